"""What is refused before a private loop starts."""

from __future__ import annotations

from torch import nn

from fulcrum.errors import ModelError
from fulcrum.models.checks import REFUSED_LAYERS

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_model(model: nn.Module) -> None:
    """ModelError for layers that mix examples, keep statistics or rewrite weights, and for wrapped models.

    Dropout is allowed: in a loop its numbers come from a stream of each step.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}; give the nn.Module that the loop calls.")
    if hasattr(model, "_orig_mod"):
        raise ModelError("model is compiled, and its passes cannot be recorded; give the model before torch.compile.")
    if isinstance(model, WRAPPERS):
        raise ModelError(f"model is a {type(model).__name__}, which copies batches apart; give the model inside it.")
    for name, layer in model.named_modules():
        for types, finding in REFUSED_LAYERS:
            problem = finding(layer) if isinstance(layer, types) else ""
            if problem and "random numbers" not in problem:
                raise ModelError(f"Layer {name or 'model'!r} ({type(layer).__name__}) {problem}.")
