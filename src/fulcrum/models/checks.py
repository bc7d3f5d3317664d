"""What cannot be trained with a bound per example, found by type and by behaviour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.data.records import Inputs, count_examples, map_inputs
from fulcrum.errors import ModelError

# --- what cannot be trained with a bound per example ------------------------------------------------

Finding = Callable[[Any], str]


def _batch_norm(layer: Any) -> str:
    return "mixes the examples of a batch; use GroupNorm or LayerNorm instead"


def _instance_norm(layer: Any) -> str:
    return "keeps running statistics of the data; set track_running_stats=False" if layer.track_running_stats else ""


def _random(layer: Any) -> str:
    chance = float(getattr(layer, "p", 0.0) or getattr(layer, "dropout", 0.0))
    return "draws random numbers from the global generator; set its probability to 0 or leave it out" if chance else ""


def _renormalising(layer: Any) -> str:
    return "rewrites the weights of the tokens it sees; set max_norm=None" if layer.max_norm is not None else ""


def _always_random(layer: Any) -> str:
    return "draws random numbers from the global generator; use LeakyReLU or PReLU instead"


REFUSED: tuple[tuple[tuple[type[nn.Module], ...], Finding], ...] = (
    ((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _instance_norm),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _batch_norm),
    ((nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d), _batch_norm),
    ((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout), _random),
    ((nn.RNNBase, nn.MultiheadAttention), _random),
    ((nn.RReLU,), _always_random),
    ((nn.Embedding, nn.EmbeddingBag), _renormalising),
)


def refuse_mixing(model: nn.Module, sample: Inputs | None = None) -> None:
    """Raises ModelError, naming the layer and what to use instead, if the model cannot give per-example gradients.

    Refused are layers that mix the examples of a batch (BatchNorm), keep statistics of the data, rewrite their
    weights while running, or draw random numbers (Dropout with p > 0: they would come from the global generator).
    With `sample`, the inputs [B, ...] (one or several by name) of at least two examples, the model is also run:
    changing one example must leave the outputs of the others, and the model's buffers, as they were.
    """
    _refuse_by_type(model)
    if sample is not None:
        _refuse_by_behaviour(model, sample)


def _refuse_by_type(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        for types, finding in REFUSED:
            problem = finding(layer) if isinstance(layer, types) else ""
            if problem:
                raise ModelError(f"Layer {name or 'model'!r} ({type(layer).__name__}) {problem}.")


def _refuse_by_behaviour(model: nn.Module, sample: Inputs) -> None:
    trace, _, moved = _dry(model, sample)
    if moved:
        raise ModelError(f"Buffer {moved!r} changes when the model runs: it would leave the data's traces unprotected.")
    again, _, _ = _dry(model, sample, seed=1)
    other, _, _ = _dry(model, map_inputs(_first_changed, sample))
    count = count_examples(sample)
    for before, repeated, after in zip(trace, again, other, strict=False):
        name, kind, rows = before
        if not _same(rows, repeated[2]):
            raise ModelError(f"Layer {name!r} ({kind}) is random: the same batch gives another output the second time.")
        if rows.dim() and len(rows) == count and not _same(rows[1:], after[2][1:]):
            raise ModelError(
                f"Layer {name!r} ({kind}) mixes the examples of a batch: changing one example changes the "
                "output of the others; use GroupNorm or LayerNorm in place of batch statistics."
            )


def _first_changed(values: Tensor) -> Tensor:
    """The batch with another first example: numbers plus 1; integers those of another example."""
    changed = values.clone()
    if values.is_floating_point():
        changed[0] = values[0] + 1.0
        return changed
    differs = (values != values[:1]).flatten(1).any(dim=1) if values.dim() > 1 else values != values[0]
    changed[0] = values[int(differs.int().argmax())]
    return changed


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


Trace = list[tuple[str, str, Tensor]]


def _dry(model: nn.Module, sample: Inputs, seed: int = 0) -> tuple[Trace, Any, str]:
    """Runs the model: the outputs of its modules in order, its own output, and the first buffer that changed.

    The model is left as it was: buffers are put back, and so is the global generator.
    """
    trace: Trace = []

    def hook(name: str, module: nn.Module) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, out: Any) -> None:
            trace.extend((name, type(module).__name__, leaf.detach().clone()) for leaf in _tensors(out))

        return note

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    handles = [m.register_forward_hook(hook(n or "model", m)) for n, m in model.named_modules()]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            own = map_inputs(Tensor.clone, sample)
            outputs = model(own) if isinstance(own, Tensor) else model(**own)
        moved = [n for n, b in model.named_buffers() if n not in before or not torch.equal(b, before[n])]
    finally:
        for handle in handles:
            handle.remove()
        for name, buffer in model.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.data.copy_(before[name])
    return trace, outputs, moved[0] if moved else ""


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, tuple | list):
        for item in out:
            yield from _tensors(item)
