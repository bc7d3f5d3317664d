"""What is refused before a private loop starts."""

from __future__ import annotations

from torch import nn

from fulcrum.errors import ModelError
from fulcrum.integrations.recording import RecordedForward
from fulcrum.models.checks import validate_by_type
from fulcrum.models.prepared import refuse_odd_module


def check_model(model: nn.Module) -> None:
    """ModelError for layers that mix examples, keep statistics or rewrite weights, and for wrapped models."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}; give the nn.Module that the loop calls.")
    refuse_odd_module(model)
    if isinstance(vars(model).get("forward"), RecordedForward):
        raise ModelError(
            "the model is in a private loop already, which has its own plan and budget; plan all epochs in one call, "
            "or end that loop by loader.privacy.close() first."
        )
    try:
        validate_by_type(model)
    except ModelError as problem:  # a loop has no settings of a run
        words = str(problem).replace(
            "--set model.norm=group", "fulcrum.models.convert_norms(model, 'group'), before the optimizer is made"
        )
        raise ModelError(words.replace("model.norm=frozen", "convert_norms(model, 'frozen')")) from None
