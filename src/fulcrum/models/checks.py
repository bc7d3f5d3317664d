"""Finds models that cannot be trained with a bound per example, by type and by behaviour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fulcrum.data.records import ModelInputs, count_examples, map_inputs
from fulcrum.errors import ModelError
from fulcrum.models.norms import is_frozen_norm
from fulcrum.models.prepared import PreparedModel, unwrap_model

# --- what cannot be trained with a bound per example ------------------------------------------------

LayerCheckFn = Callable[[Any], str]


def _check_batch_norm(layer: Any) -> str:
    if is_frozen_norm(layer):
        return ""
    return (
        "mixes the examples of a batch; convert it with --set model.norm=group (GroupNorm, its weights carried over), "
        "or keep its statistics with model.norm=frozen"
    )


def _check_instance_norm(layer: Any) -> str:
    return "keeps running statistics of the data; set track_running_stats=False" if layer.track_running_stats else ""


def _check_embedding(layer: Any) -> str:
    return "rewrites the weights of the tokens it sees; set max_norm=None" if layer.max_norm is not None else ""


def _check_rrelu(layer: Any) -> str:
    return "draws random numbers for all examples at once; use LeakyReLU or PReLU instead" if layer.training else ""


REFUSED_LAYERS: tuple[tuple[tuple[type[nn.Module], ...], LayerCheckFn], ...] = (
    ((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _check_instance_norm),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _check_batch_norm),
    ((nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d), _check_batch_norm),
    ((nn.RReLU,), _check_rrelu),
    ((nn.Embedding, nn.EmbeddingBag), _check_embedding),
)


def validate_model(model: nn.Module, sample: ModelInputs | None = None) -> None:
    """Raises ModelError, naming the layer and what to use instead, if the model cannot give per-example gradients.

    Refused are layers that mix the examples of a batch (BatchNorm), keep statistics of the data, rewrite their
    weights while running, or draw random numbers from the global generator (dropout draws by keys of the examples once
    `prepare_model` has wrapped the model).
    With `sample`, the inputs [B, ...] (one or several by name) of at least two examples, the model is also run:
    changing one example must leave the outputs of the others, and the model's buffers, as they were.
    """
    validate_by_type(model)
    if sample is not None:
        _validate_by_behaviour(model, sample)


def validate_by_type(model: nn.Module) -> None:
    """ModelError for a layer that cannot be trained, by its type and its settings."""
    for name, layer in unwrap_model(model).named_modules():
        for types, finding in REFUSED_LAYERS:
            problem = finding(layer) if isinstance(layer, types) else ""
            if problem:
                raise ModelError(f"Layer {name or 'model'!r} ({type(layer).__name__}) {problem}.")


def _validate_by_behaviour(model: nn.Module, sample: ModelInputs) -> None:
    trace, _, moved = run_dry(model, sample)
    if moved:
        raise ModelError(f"Buffer {moved!r} changes when the model runs: it would leave the data's traces unprotected.")
    again, _, _ = run_dry(model, sample, seed=1)
    other, _, _ = run_dry(model, map_inputs(_change_first_example, sample))
    count, sizes = count_examples(sample), None
    for place, (before, repeated, after) in enumerate(zip(trace, again, other, strict=False)):
        name, kind, rows = before
        if not _outputs_agree(rows, repeated[2]):
            raise ModelError(f"Layer {name!r} ({kind}) is random: the same batch gives another output the second time.")
        if rows.dim() and len(rows) == count and not _outputs_agree(rows[1:], after[2][1:]):
            # A first dimension of this size may be something else: the directions of an LSTM, the steps of a sequence.
            sizes = _list_sizes_with_one_more(model, sample) if sizes is None else sizes
            if place < len(sizes) and sizes[place] != count + 1:
                continue
            raise ModelError(
                f"Layer {name!r} ({kind}) mixes the examples of a batch: changing one example changes the "
                "output of the others; use GroupNorm or LayerNorm in place of batch statistics."
            )


def _list_sizes_with_one_more(model: nn.Module, sample: ModelInputs) -> list[int]:
    """The first dimension of each module's output for the same examples and one more."""
    trace, _, _ = run_dry(model, map_inputs(lambda value: torch.cat([value, value[-1:]]), sample))
    return [len(rows) if rows.dim() else 0 for _, _, rows in trace]


def _change_first_example(values: Tensor) -> Tensor:
    """The batch with a changed first example: numbers plus 1; integers replaced by those of another example."""
    changed = values.clone()
    if values.is_floating_point():
        changed[0] = values[0] + 1.0
        return changed
    differs = (values != values[:1]).flatten(1).any(dim=1) if values.dim() > 1 else values != values[0]
    changed[0] = values[int(differs.int().argmax())]
    return changed


def _outputs_agree(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


OutputTrace = list[tuple[str, str, Tensor]]


def run_dry(model: nn.Module, sample: ModelInputs, seed: int = 0) -> tuple[OutputTrace, Any, str]:
    """Runs the model: the outputs of its modules in order, its own output, and the first buffer that changed.

    The model is unchanged afterwards: buffers and the global generator are restored.
    """
    trace: OutputTrace = []

    def hook(name: str, module: nn.Module) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, out: Any) -> None:
            trace.extend((name, type(module).__name__, leaf.detach().clone()) for leaf in _iterate_tensors(out))

        return note

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    own_name = "model." if isinstance(model, PreparedModel) else ""  # what is inside has the user's names
    handles = [m.register_forward_hook(hook(n.removeprefix(own_name) or "model", m)) for n, m in model.named_modules()]
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


def _iterate_tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, tuple | list) and not isinstance(
        out, PackedSequence
    ):  # whose rows are steps, sorted by length
        for item in out:
            yield from _iterate_tensors(item)
