"""Linear layers, and products with a matrix of parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fulcrum.gradients.call_plan import Axis
from fulcrum.gradients.function_rules.common import sum_positions, to_compute_type
from fulcrum.gradients.outer_products import LinearGrad, WeightGradCost
from fulcrum.gradients.param_grads import EntryOrder, MaterialisedGrad
from fulcrum.gradients.uses import ParameterUse, UseRecorder, register_function_rule


@register_function_rule(F.linear)
def use_linear(recorder: UseRecorder, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """[B, ..., K] -> [B, ..., O]."""
    x, dim = recorder.bring_first((weight, bias), input)
    return _move_back(tap_linear(recorder, x, weight, bias), dim)


def _move_back(out: Tensor, dim: int) -> Tensor:
    return out.movedim(0, dim) if dim else out


def tap_linear(recorder: UseRecorder, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer on x [B, ..., K], whose rows stand first."""
    a = to_compute_type(x)
    out = F.linear(a, weight, bias)
    seen = a.detach()
    if seen.dim() > 3:
        seen = seen.flatten(1, -2)

    def slopes(g: Tensor) -> Tensor:
        return g.flatten(1, -2) if g.dim() > 3 else g

    cost = WeightGradCost.of(a, 1, math.prod(out.shape[1:-1]), weight.shape[1], weight.shape[0])
    uses = [ParameterUse(weight, lambda g: LinearGrad(seen, slopes(g)), cost)]
    if bias is not None:
        uses.append(ParameterUse(bias, lambda g: sum_over_positions(slopes(g))))
    return recorder.tap(out, uses, (a,))


def sum_over_positions(g: Tensor) -> MaterialisedGrad:
    """A bias's gradients, from the output's [B, T, O] or [B, O]."""
    if g.dim() > 2:
        return MaterialisedGrad(sum_positions(g, 1))
    return MaterialisedGrad(g.float() if g.element_size() < 4 else g)


@register_function_rule(Tensor.matmul, torch.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def use_matmul(recorder: UseRecorder, function: Any, input: Any, other: Any) -> Any:
    """x @ p with a matrix p [K, O]: a linear layer with its weight transposed."""
    if not recorder.is_tracked(other) or other.dim() != 2 or recorder.is_tracked(input):
        raise recorder.refuse("a product that is not x @ p", input, other)
    x, dim = recorder.bring_first((other,), input)
    return _move_back(tap_matmul(recorder, x, other), dim)


def tap_matmul(recorder: UseRecorder, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [B, ..., K] @ matrix [K, O] + bias."""
    a = to_compute_type(x)
    out, seen = torch.matmul(a, matrix), a.detach()
    out = out if bias is None else out + bias
    seen = seen.flatten(1, -2) if seen.dim() > 3 else seen

    def slopes(g: Tensor) -> Tensor:
        return g.flatten(1, -2) if g.dim() > 3 else g

    cost = WeightGradCost.of(a, 1, math.prod(out.shape[1:-1]), matrix.shape[1], matrix.shape[0])
    uses = [ParameterUse(matrix, lambda g: LinearGrad(slopes(g), seen), cost)]
    if bias is not None:
        uses.append(ParameterUse(bias, lambda g: sum_over_positions(slopes(g))))
    return recorder.tap(out, uses, (a,))


@register_function_rule(torch.addmm, Tensor.addmm)
def use_addmm(recorder: UseRecorder, function: Any, input: Any, mat1: Any, mat2: Any, **options: Any) -> Any:
    """bias + x @ p."""
    plain = recorder.is_tracked(mat2) and not recorder.is_tracked(mat1) and recorder.find_axis(input) is None
    if options or not plain or input.dim() != 1 or len(input) != mat2.shape[1]:
        raise recorder.refuse("a sum of products that is not b + x @ p", input, mat1, mat2)
    recorder.require_rows((input, mat2), mat1)
    return tap_matmul(recorder, mat1, mat2, input)


@register_function_rule(F.bilinear, torch.bilinear)
def use_bilinear(
    recorder: UseRecorder, function: Any, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    """[B, ..., I], [B, ..., J] -> [B, ..., O]: a linear layer on the products of all pairs of inputs."""
    recorder.require_rows((weight, bias), input1, input2)
    if input1.dim() < 2:
        raise recorder.refuse("bilinear does not see one example per row", weight, bias)
    out = function(input1, input2, weight, bias)
    one, other = input1.detach(), input2.detach()

    def flatten(values: Tensor) -> Tensor:
        return values.flatten(1, -2) if values.dim() > 3 else values

    def pairs(g: Tensor) -> LinearGrad:
        return LinearGrad(flatten((one.unsqueeze(-1) * other.unsqueeze(-2)).flatten(-2)), flatten(g))

    uses = [ParameterUse(weight, pairs)]
    if bias is not None:
        uses.append(ParameterUse(bias, lambda g: sum_over_positions(flatten(g))))
    return recorder.tap(out, uses, (input1, input2))


@register_function_rule(torch.einsum)
def use_einsum(recorder: UseRecorder, function: Any, equation: str, *operands: Any) -> Any:
    """A sum of products of x and p over indices of both, such as "bti,hio->bhto": a linear layer."""
    tensors = tuple(operands[0]) if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
    known = [value for value in tensors if recorder.is_tracked(value)]
    terms = _read_equation(equation, tensors)
    if terms is None or len(tensors) != 2 or len(known) != 1:
        raise recorder.refuse("no rule for this einsum", *known)
    side = 1 if recorder.is_tracked(tensors[1]) else 0
    (p, x), (own, other, result) = (tensors[side], tensors[1 - side]), (terms[side], terms[1 - side], terms[2])
    axis = recorder.find_axis(x)
    summed = [letter for letter in other if letter in own]
    outputs = [letter for letter in own if letter not in summed]
    batch = other[axis.dim] if isinstance(axis, Axis) else ""
    positions = [letter for letter in other if letter not in summed and letter != batch]
    if not batch or set(result) != {batch, *positions, *outputs} or batch in own or set(summed) & set(result):
        raise recorder.refuse("no rule for this einsum", p)
    out = function(equation, *tensors)
    seen = _arrange(x.detach(), other, batch, positions, summed)
    stored = [*outputs, *summed]
    sizes = (p.shape[own.index(letter)] for letter in stored)
    order = EntryOrder((1, *sizes), (0, *(1 + stored.index(letter) for letter in own)))
    left = result.replace(batch, "")

    def slopes(g: Tensor) -> LinearGrad:
        return LinearGrad(seen, _arrange(g, batch + left, batch, positions, outputs).to(seen.dtype), order)

    cost = WeightGradCost.of(x, 1, seen.shape[1], seen.shape[2], p.numel() // max(1, seen.shape[2]))
    dim = result.index(batch)
    return recorder.tap(out.movedim(dim, 0), [ParameterUse(p, slopes, cost)], (x,)).movedim(0, dim)


def _arrange(values: Tensor, letters: str, batch: str, positions: list[str], last: list[str]) -> Tensor:
    """A tensor with these letters for its dimensions as [B, T, n]."""
    moved = values.permute([letters.index(letter) for letter in (batch, *positions, *last)])
    sizes = [values.shape[letters.index(letter)] for letter in last]
    return moved.reshape(len(moved), -1, math.prod(sizes))


def _read_equation(equation: str, tensors: tuple[Any, ...]) -> tuple[str, ...] | None:
    """The letters of each operand and of the result, "..." written out; None where a letter repeats in one of them."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow or len(terms) != len(tensors) or not all(isinstance(value, Tensor) for value in tensors):
        return None
    spare = [letter for letter in map(chr, range(ord("A"), ord("Z") + 1)) if letter not in equation]
    numbers = {value.dim() - len(term) + 3 for value, term in zip(tensors, terms, strict=True) if "..." in term}
    if len(numbers) > 1:
        return None
    hidden = "".join(spare[: numbers.pop() if numbers else 0])
    found = tuple(term.replace("...", hidden) for term in (*terms, result))
    return found if all(len(set(term)) == len(term) for term in found) else None
