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
    """[B, ..., K] -> [B, ..., O]. Rows that are several positions of one example each, B * T, are positions."""
    each = input.dim() and len(input) // max(1, recorder.count)
    if input.dim() < 2 or recorder.is_tracked(input) or each * recorder.count != len(input) or each == 0:
        raise recorder.refuse("linear does not see one example per row", weight, bias)
    merged = each > 1
    a = to_compute_type(input)
    out = function(a, weight, bias)
    seen = a.detach()
    if merged:
        out, seen = out.unflatten(0, (recorder.count, each)), seen.unflatten(0, (recorder.count, each))
    if seen.dim() > 3:
        seen = seen.flatten(1, -2)

    def slopes(g: Tensor) -> Tensor:
        return g.flatten(1, -2) if g.dim() > 3 else g

    def total(g: Tensor) -> MaterialisedGrad:
        if g.dim() > 2:
            return MaterialisedGrad(sum_positions(slopes(g), 1))
        return MaterialisedGrad(g.float() if g.element_size() < 4 else g)

    cost = WeightGradCost.of(a, 1, math.prod(out.shape[1:-1]), weight.shape[1], weight.shape[0])
    uses = [ParameterUse(weight, lambda g: LinearGrad(seen, slopes(g)), cost)]
    if bias is not None:
        uses.append(ParameterUse(bias, total))
    out = recorder.tap(out, uses, (a,))
    return out.flatten(0, 1) if merged else out


@register_function_rule(Tensor.matmul, torch.matmul, Tensor.__matmul__)
def use_matmul(recorder: UseRecorder, function: Any, input: Any, other: Any) -> Any:
    """x @ p with a matrix p [K, O]: a linear layer with its weight transposed."""
    if not recorder.is_tracked(other) or other.dim() != 2 or recorder.is_tracked(input):
        raise recorder.refuse("a product that is not x @ p", input, other)
    recorder.require_rows((other,), input)
    if input.dim() < 2:
        raise recorder.refuse("a product that does not see one example per row", other)
    a = to_compute_type(input)
    out, seen = function(a, other), a.detach()
    seen = seen.flatten(1, -2) if seen.dim() > 3 else seen
    cost = WeightGradCost.of(a, 1, math.prod(out.shape[1:-1]), other.shape[1], other.shape[0])
    return recorder.tap(
        out, [ParameterUse(other, lambda g: LinearGrad(g.flatten(1, -2) if g.dim() > 3 else g, seen), cost)], (a,)
    )
