"""Linear layers, and products with a matrix of parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fulcrum.gradients.function_rules.common import sum_positions, to_compute_type
from fulcrum.gradients.outer_products import LinearGrad, WeightGradCost
from fulcrum.gradients.param_grads import MaterialisedGrad
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
