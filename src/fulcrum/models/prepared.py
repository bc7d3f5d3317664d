"""The form in which engines train an imported network: one tensor in, one tensor out, random layers by keys.

A plain network trains as it is. One of `transformers` gives an object with `logits`; one with dropout needs the keys of
its examples. Both get a `PreparedModel` around them, and `unwrap_model` gives the network back.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.data.records import ModelInputs
from fulcrum.errors import ModelError
from fulcrum.models.draws import KeyedDraws, make_example_keys
from fulcrum.models.norms import BATCH_NORMS

SINGLE_INPUT, EXAMPLE_KEYS = "fulcrum_input", "fulcrum_keys"
"""Names of a single input beside its examples' keys, and of the keys."""


class PreparedModel(nn.Module):
    """A network as engines call it. Without keys it runs in eval mode: that is what evaluation sees.

    model: the network, in eval mode. random: its modules that are in training mode where there are keys.
    """

    def __init__(self, model: nn.Module, random: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.random = model.eval(), random
        self.eval()

    def forward(self, *args: Any, **inputs: Any) -> Any:
        keys = inputs.pop(EXAMPLE_KEYS, None)
        if SINGLE_INPUT in inputs:
            args = (inputs.pop(SINGLE_INPUT),)
        if keys is None:
            return take_outputs(self.model(*args, **inputs))
        with self._training(), KeyedDraws(keys):
            return take_outputs(self.model(*args, **inputs))

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        modules = [self.model.get_submodule(name) for name in self.random]
        for module in modules:
            module.training = True
        try:
            yield
        finally:
            for module in modules:
                module.training = False

    def train(self, mode: bool = True) -> PreparedModel:
        """Nothing changes: keys say whether a pass trains."""
        return self


def take_outputs(found: Any) -> Any:
    """The tensor of predictions in what a network returns: itself, `logits`, or the only tensor of a result."""
    if isinstance(found, Tensor):
        return found
    if isinstance(getattr(found, "logits", None), Tensor):
        return found.logits
    if isinstance(found, Mapping) and isinstance(found.get("logits"), Tensor):
        return found["logits"]
    if isinstance(found, tuple | list) and found and isinstance(found[0], Tensor) and not isinstance(found[0], bool):
        return found[0] if len(found) == 1 else found
    return found


def draws_keys(model: nn.Module) -> bool:
    """Whether a model has random layers, which need keys to train."""
    return isinstance(model, PreparedModel) and bool(model.random)


def add_example_keys(x: ModelInputs, seed: int, rows: Tensor) -> ModelInputs:
    """The inputs of some examples with their keys; rows [B]: which records they are. seed: of the step."""
    keys = make_example_keys(seed, rows)
    if isinstance(x, Tensor):
        return {SINGLE_INPUT: x, EXAMPLE_KEYS: keys.to(x.device)}
    return {**x, EXAMPLE_KEYS: keys.to(next(iter(x.values())).device)}


def prepare_model(model: nn.Module, sample: ModelInputs) -> nn.Module:
    """The model as engines train it: itself, or a `PreparedModel` where it is random or returns no plain tensor.

    sample: inputs of at least two examples; what the model does with them in training mode shows whether it is random.
    """
    if isinstance(model, PreparedModel):
        return model
    random = tuple(
        name
        for name, module in model.named_modules()
        if module.training and not isinstance(module, BATCH_NORMS) and not isinstance(module, PreparedModel)
    )
    is_random, found = _try_twice(model, sample)
    settle_transformers(model)
    if not is_random and isinstance(found, Tensor):
        return model
    return PreparedModel(copy.deepcopy(model), random if is_random else ())  # whoever handed it over keeps its mode


def unwrap_model(model: nn.Module) -> nn.Module:
    """The network inside a `PreparedModel`; any other model itself."""
    return model.model if isinstance(model, PreparedModel) else model


def settle_transformers(model: Any) -> None:
    """Sets what a network of `transformers` must not choose by looking at the whole batch.

    Its fused attention leaves the mask out where no example of the batch has padding, so that an example's last bits
    would depend on others; and keys and values of a cache are not needed.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        return
    if getattr(config, "use_cache", False):
        config.use_cache = False
    choose = getattr(model, "set_attn_implementation", None)
    if callable(choose) and getattr(config, "_attn_implementation", "eager") != "eager":
        with contextlib.suppress(Exception):  # a model without that choice stays as it is
            choose("eager")


@torch.no_grad()
def _try_twice(model: nn.Module, sample: ModelInputs) -> tuple[bool, Any]:
    """Whether two passes in the model's own mode draw random numbers, and the outputs of the second."""
    states = []
    found: Any = None
    with torch.random.fork_rng(devices=[]), _kept_buffers(model):
        torch.default_generator.manual_seed(1)
        for _ in range(2):
            states.append(torch.default_generator.get_state())
            found = model(sample) if isinstance(sample, Tensor) else model(**sample)
        states.append(torch.default_generator.get_state())
    return any(not torch.equal(states[0], other) for other in states[1:]), found


@contextlib.contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.data.copy_(before[name])


def refuse_odd_module(model: nn.Module) -> None:
    """ModelError for a module that cannot be trained as it is handed over, with what to hand over instead."""
    if type(model).__name__ == "OptimizedModule":
        raise ModelError("The model was compiled by torch.compile; hand over the model itself.")
    if isinstance(model, nn.DataParallel) or type(model).__name__ in (
        "DistributedDataParallel",
        "FullyShardedDataParallel",
    ):
        raise ModelError(f"The model is wrapped in {type(model).__name__}; hand over what is inside, model.module.")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError("The model is TorchScript, whose functions cannot be followed; hand over the nn.Module.")
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ModelError(f"Parameter {name!r} has no shape yet; run the model once before handing it over.")
        if parameter.is_meta:
            raise ModelError(f"Parameter {name!r} is on the meta device and has no values; load its weights first.")
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ModelError(f"Parameter {name!r} is {kind}; private training is in float32: hand over model.float().")
        if parameter.requires_grad and not bool(torch.isfinite(parameter).all()):
            raise ModelError(f"Parameter {name!r} holds NaN or infinite values; load weights that are finite.")
