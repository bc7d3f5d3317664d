"""Finds models that cannot be trained with a bound per example, by type and by behaviour."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fulcrum.data.records import ModelInputs, count_examples, map_inputs, select_rows
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


OutputTrace = list[tuple[str, str, Tensor]]
"""The outputs of a model's modules in order: name, class, values."""


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


def _validate_parameters(model: nn.Module) -> None:
    """Refuses parameters that are no float32 numbers of their own."""
    places: list[tuple[int, int, str]] = []
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter) or not parameter.requires_grad:
            continue
        if parameter.is_complex():
            raise ModelError(
                f"Parameter {name!r} is complex; hold a real one [..., 2] and use torch.view_as_complex in forward."
            )
        if parameter.is_meta:
            raise ModelError(f"Parameter {name!r} has no values (device meta); use model.to_empty and initialise it.")
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"Parameter {name!r} has type {str(parameter.dtype).removeprefix('torch.')}, but float32 is trained; "
                "call model.float(), and set run.precision for faster products."
            )
        start = parameter.data_ptr()
        places.append((start, start + parameter.numel() * parameter.element_size(), name))
    places.sort()
    for (_, end, first), (start, _, name) in itertools.pairwise(places):
        if start < end:
            raise ModelError(
                f"Parameters {first!r} and {name!r} are views of the same memory; share the parameter itself, "
                "or take the view in forward."
            )


MANY_EXAMPLES = 40
"""Examples of the largest batch that is tried: some models do something else with many (experts with a capacity)."""


def validate_by_type(model: nn.Module) -> None:
    """ModelError for a layer that cannot be trained, by its type and its settings."""
    own = unwrap_model(model)
    if isinstance(own, torch.jit.ScriptModule):
        raise ModelError("The model is a torch.jit module, whose parameters are fixed; hand over the Python module.")
    _validate_parameters(own)
    for name, layer in own.named_modules():
        for types, finding in REFUSED_LAYERS:
            problem = finding(layer) if isinstance(layer, types) else ""
            if problem:
                raise ModelError(f"Layer {name or 'model'!r} ({type(layer).__name__}) {problem}.")


def _validate_by_behaviour(model: nn.Module, sample: ModelInputs) -> None:
    trace, _, moved = run_dry(model, sample)
    if moved:
        raise ModelError(f"Buffer {moved!r} changes when the model runs: it would leave the data's traces unprotected.")
    again, _, _ = run_dry(model, sample, seed=1)
    count = count_examples(sample)
    longer, _, _ = run_dry(model, select_rows(sample, torch.arange(count + 1) % count))
    rows = _find_rows(trace, longer, count)
    if trace and trace[-1][0] == "model" and rows[-1] != 0:
        sizes = " and ".join(str(list(each[-1][2].shape)) for each in (trace, longer))
        raise ModelError(
            f"The model's output must hold one example per row, but has the shapes {sizes} for {count} and {count + 1} "
            "examples."
        )
    for before, repeated in zip(trace, again, strict=False):
        if before[:2] == repeated[:2] and not _outputs_agree(before[2], repeated[2]):
            name, kind, _ = before
            raise ModelError(f"Layer {name!r} ({kind}) is random: the same batch gives another output the second time.")
    for changed in (0, count - 1):
        try:
            other, _, _ = run_dry(model, map_inputs(partial(_change_example, number=changed), sample))
        except Exception:  # a user's model may refuse numbers that are not those of the data
            copied = torch.arange(count).index_fill(0, torch.tensor([changed]), (changed + 1) % count)
            other, _, _ = run_dry(model, select_rows(sample, copied))
        kept = torch.arange(count) != changed
        for (name, kind, values), after, dim in _align(trace, other, rows):
            if dim is None or values.shape != after.shape:
                continue
            if not _outputs_agree(values.movedim(dim, 0)[kept], after.movedim(dim, 0)[kept]):
                raise ModelError(
                    f"Layer {name!r} ({kind}) mixes the examples of a batch: changing one example changes the "
                    "output of the others; use GroupNorm or LayerNorm in place of batch statistics."
                )
    _validate_by_size(model, sample, trace, longer, rows, count)


def _validate_by_size(
    model: nn.Module, sample: ModelInputs, trace: OutputTrace, longer: OutputTrace, rows: list[int | None], count: int
) -> None:
    """Batches are drawn at random, so that they may have any size, and an example must not notice."""
    try:
        single, _, _ = run_dry(model, select_rows(sample, slice(0, 1)))
    except Exception as problem:  # a user's model may raise any error
        words = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise ModelError(
            f"The model fails on a batch of one example ({words}), but a private batch may have any size; "
            "make it work on one."
        ) from problem
    many, _, _ = run_dry(model, select_rows(sample, torch.arange(MANY_EXAMPLES) % count))
    for size, other in ((count, longer), (1, single), (count, many)):
        for (name, kind, values), after, dim in _align(trace, other, rows):
            if dim is None or not values.is_floating_point() or not values.numel():
                continue
            wanted = values.movedim(dim, 0)[:size]
            part = after.movedim(dim, 0)[:size] if after.dim() == values.dim() else after
            room = 1e-3 * float(wanted.abs().max())
            if part.shape != wanted.shape or not torch.allclose(part, wanted, 1e-3, room, equal_nan=True):
                raise ModelError(
                    f"Layer {name!r} ({kind}) gives another output for an example when the batch has another size; "
                    "leave the number of examples out of the computation, and name dimensions in squeeze()."
                )


def _align(
    trace: OutputTrace, other: OutputTrace, rows: list[int | None]
) -> list[tuple[tuple[str, str, Tensor], Tensor, int | None]]:
    """The outputs of two runs side by side; only the model's own where its modules run as the data say."""
    if [entry[:2] for entry in trace] != [entry[:2] for entry in other]:
        trace, other, rows = trace[-1:], other[-1:], rows[-1:]
    return [(one, values, dim) for one, (_, _, values), dim in zip(trace, other, rows, strict=True)]


def _find_rows(few: OutputTrace, more: OutputTrace, count: int) -> list[int | None]:
    """The dimension of each output that holds the examples, from two runs with `count` and one more example.

    None where no dimension does, or more than one row belongs to an example.
    """
    if [entry[:2] for entry in few] != [entry[:2] for entry in more]:
        return [None] * (len(few) - 1) + [0]  # modules run as the data say; the model's own output remains
    found: list[int | None] = []
    for (_, _, one), (_, _, other) in zip(few, more, strict=True):
        pairs = enumerate(zip(one.shape, other.shape, strict=False))
        grown = [dim for dim, sizes in pairs if sizes == (count, count + 1)]
        same = one.dim() == other.dim() and sum(a != b for a, b in zip(one.shape, other.shape, strict=False)) == 1
        found.append(grown[0] if grown and same else None)
    return found


def _change_example(values: Tensor, number: int) -> Tensor:
    """The batch with one example changed: numbers plus 1; integers replaced by those of another example."""
    changed = values.clone()
    if values.is_floating_point():
        changed[number] = values[number] + 1.0
        return changed
    own = values[number : number + 1]
    differs = (values != own).flatten(1).any(dim=1) if values.dim() > 1 else values != own
    changed[number] = values[int(differs.int().argmax())]
    return changed


def _outputs_agree(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


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
    handles = [
        m.register_forward_hook(hook(n.removeprefix(own_name) or "model", m))
        for n, m in model.named_modules()
        if not isinstance(m, torch.jit.ScriptModule)  # takes no hooks
    ]
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
    if isinstance(out, PackedSequence):
        return  # its rows stand in an order that depends on the lengths of all; unpacked they are seen
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, tuple | list):
        for item in out:
            yield from _iterate_tensors(item)
