"""Parameters used without a layer: added, multiplied, chosen, written into a tensor, expanded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from fulcrum.gradients.call_plan import Axis
from fulcrum.gradients.param_grads import MaterialisedGrad
from fulcrum.gradients.uses import ParameterUse, UseRecorder, register_function_rule


def copy_for_each_row(recorder: UseRecorder, parameter: Tensor, rank: int, dim: int) -> Tensor:
    """The parameter once for each row, in dimension `dim` of a tensor of `rank` dimensions that it is broadcast to.

    The copies take no memory. Their gradients are the per-example gradients; autograd adds up the other dimensions.
    """
    shape = (1,) * (rank - parameter.dim()) + tuple(parameter.shape)
    if rank < parameter.dim() or dim >= rank or shape[dim] != 1:
        raise recorder.refuse("a parameter has an entry for each row", parameter)
    spread = parameter.detach().view(shape).movedim(dim, 0).expand(recorder.count, *shape[:dim], *shape[dim + 1 :])

    def rows(g: Tensor) -> MaterialisedGrad:
        return MaterialisedGrad((g.float() if g.element_size() < 4 else g).reshape(len(g), -1))

    return recorder.tap(spread, [ParameterUse(parameter, rows)]).movedim(0, dim)


def _list_variants(*names: str) -> tuple[Any, ...]:
    """The functions and methods of these names: also in place, as operators, and with exchanged operands."""
    found: dict[Any, None] = {}
    for name in names:
        for variant in (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__"):
            for owner in (torch, Tensor):
                if hasattr(owner, variant):
                    found[getattr(owner, variant)] = None
    return tuple(found)


BROADCASTING = (
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "truediv", "pow"),
    *("where", "lerp", "addcmul", "addcdiv", "maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max"),
    *("clip", "atan2", "arctan2", "hypot", "logaddexp", "logaddexp2", "copysign", "xlogy", "fmod", "remainder"),
    *("eq", "ne", "lt", "le", "gt", "ge", "heaviside", "floor_divide"),
)
"""Functions whose arguments are broadcast against each other, and whose entries depend on the same entries of these."""


@register_function_rule(*_list_variants(*BROADCASTING))
def use_with_others(recorder: UseRecorder, function: Any, *args: Any, **kwargs: Any) -> Any:
    """x + p, p * x, torch.where(mask, x, p), ...: the parameter once for each row."""
    axis, rank = recorder.found_axis, max(value.dim() for value in args if isinstance(value, Tensor))
    if not isinstance(axis, Axis):
        raise recorder.refuse("a result without examples", *recorder.find_parameters(args, kwargs))
    from_end = rank  # all operands are aligned at their last dimension, as the result is

    def spread(value: Any) -> Any:
        return copy_for_each_row(recorder, value, from_end, axis.dim) if recorder.is_tracked(value) else value

    given, named = tree_map(spread, (args, kwargs))
    return function(*given, **named)


@register_function_rule(torch.masked_fill, Tensor.masked_fill)
def use_filling(recorder: UseRecorder, function: Any, input: Tensor, mask: Tensor, value: Tensor) -> Any:
    """x where a mask is False, and a parameter where it is True."""
    axis = recorder.found_axis
    if not isinstance(axis, Axis) or recorder.is_tracked(input):
        raise recorder.refuse("masked_fill of a parameter", input, value)
    return torch.where(mask, copy_for_each_row(recorder, value, input.dim(), axis.dim), input)


@register_function_rule(Tensor.__setitem__)
def use_assignment(recorder: UseRecorder, function: Any, target: Tensor, index: Any, value: Tensor) -> None:
    """target[:, ...] = p, and target[mask] = p, where the first dimension holds the examples."""
    if recorder.is_tracked(target):
        raise recorder.refuse("a parameter is written into", target, value)
    recorder.require_rows((value,), target)
    if isinstance(index, Tensor) and index.dtype == torch.bool and len(index) == len(target):
        if value.dim() > target.dim() - index.dim():
            raise recorder.refuse("a parameter has an entry for each row", value)
        target[index] = copy_for_each_row(recorder, value, target.dim(), 0).expand_as(target)[index].to(target.dtype)
        return
    parts = index if isinstance(index, tuple) else (index,)
    basic = all(part is None or isinstance(part, int | slice | type(...)) for part in parts)
    if not basic or parts[0] not in (slice(None), ...):
        raise recorder.refuse("a parameter is written at places that depend on the example", value)
    target[index] = copy_for_each_row(recorder, value, target[index].dim(), 0)


@register_function_rule(Tensor.expand)
def use_expansion(recorder: UseRecorder, function: Any, input: Tensor, *sizes: Any) -> Any:
    """p.expand(..., B, ...): a row per example."""
    return _expand_copies(recorder, input, _read_sizes(sizes))


@register_function_rule(torch.broadcast_to, Tensor.broadcast_to)
def use_broadcast(recorder: UseRecorder, function: Any, input: Tensor, size: Any) -> Any:
    """As `expand`."""
    return _expand_copies(recorder, input, tuple(size))


@register_function_rule(Tensor.expand_as)
def use_expansion_as(recorder: UseRecorder, function: Any, input: Tensor, other: Tensor) -> Any:
    """As `expand`, to the shape of a tensor."""
    return _expand_copies(recorder, input, tuple(other.shape))


@register_function_rule(Tensor.repeat, torch.tile, Tensor.tile)
def use_repetition(recorder: UseRecorder, function: Any, input: Tensor, *sizes: Any) -> Any:
    """p.repeat(..., B, ...), where p has one entry in that dimension: a row per example."""
    times, axis = _read_sizes(sizes), recorder.found_axis
    rank = max(len(times), input.dim())
    times = (1,) * (rank - len(times)) + times
    if not isinstance(axis, Axis) or times[axis.dim] != recorder.count:
        raise recorder.refuse(f"no rule for this {function.__name__}", input)
    copies = copy_for_each_row(recorder, input, rank, axis.dim)
    return copies.repeat(*(1 if dim == axis.dim else number for dim, number in enumerate(times)))


def _read_sizes(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


def _expand_copies(recorder: UseRecorder, parameter: Tensor, wanted: tuple[int, ...]) -> Tensor:
    axis = recorder.found_axis
    if not isinstance(axis, Axis):
        raise recorder.refuse("a parameter is expanded to something other than a row per example", parameter)
    copies = copy_for_each_row(recorder, parameter, len(wanted), axis.dim)
    return copies.expand(*wanted).clone(memory_format=torch.contiguous_format)


@register_function_rule(F.prelu, torch.prelu)
def use_prelu(recorder: UseRecorder, function: Any, input: Tensor, weight: Tensor) -> Any:
    """x where it is positive, and a multiple of it elsewhere; one multiple, or one per channel."""
    recorder.require_rows((weight,), input)
    x = input
    seen = x.detach()

    def slopes(g: Tensor) -> MaterialisedGrad:
        found = torch.where(seen < 0, seen * g, torch.zeros((), dtype=g.dtype))
        per_channel = found.flatten(2).sum(dim=2) if found.dim() > 2 else found
        return MaterialisedGrad(per_channel if len(weight) > 1 else found.flatten(1).sum(dim=1, keepdim=True))

    return recorder.tap(function(x, weight), [ParameterUse(weight, slopes)], (x,))
