"""Parameters used without a layer: added, multiplied, expanded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulcrum.gradients.function_rules.common import sum_positions
from fulcrum.gradients.param_grads import MaterialisedGrad
from fulcrum.gradients.uses import ParameterUse, UseRecorder, register_function_rule


def _sum_to_parameter(g: Tensor, parameter: Tensor) -> MaterialisedGrad:
    """The rows [B, n] of a parameter that was broadcast to g [B, ...]."""
    lead = g.dim() - parameter.dim()
    shape = (1,) * lead + tuple(parameter.shape)
    dims = tuple(i for i in range(1, g.dim()) if shape[i] == 1 and g.shape[i] > 1)
    return MaterialisedGrad((sum_positions(g, dims) if dims else g).reshape(len(g), -1))


def _find_other(recorder: UseRecorder, one: Any, two: Any) -> tuple[Tensor, Tensor]:
    """(the operand with a row per example, the parameter) of a function of two."""
    other, parameter = (two, one) if recorder.is_tracked(one) else (one, two)
    fits = isinstance(other, Tensor) and not recorder.is_tracked(other) and other.dim() > 0
    fits = fits and len(other) == recorder.count and parameter.dim() <= other.dim()
    if not fits or (parameter.dim() == other.dim() and len(parameter) != 1):
        raise recorder.refuse("a parameter is used with what has no row per example", parameter)
    return other, parameter


ADDITIONS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)


@register_function_rule(*ADDITIONS)
def use_sum(recorder: UseRecorder, function: Any, input: Any, other: Any, *, alpha: float = 1) -> Any:
    """x + p, p + x."""
    _, parameter = _find_other(recorder, input, other)
    if alpha != 1:
        raise recorder.refuse("a sum with alpha", parameter)
    out = function(input, other)
    return recorder.tap(out, [ParameterUse(parameter, lambda g: _sum_to_parameter(g, parameter))])


@register_function_rule(torch.sub, Tensor.sub, Tensor.__sub__)
def use_difference(recorder: UseRecorder, function: Any, input: Any, other: Any, *, alpha: float = 1) -> Any:
    """x - p, p - x."""
    _, parameter = _find_other(recorder, input, other)
    if alpha != 1:
        raise recorder.refuse("a difference with alpha", parameter)
    sign = 1 if parameter is input else -1
    out = function(input, other)
    return recorder.tap(out, [ParameterUse(parameter, lambda g: _sum_to_parameter(sign * g, parameter))])


@register_function_rule(*PRODUCTS)
def use_product(recorder: UseRecorder, function: Any, input: Any, other: Any) -> Any:
    """x * p, p * x."""
    x, parameter = _find_other(recorder, input, other)
    out, seen = function(input, other), x.detach()
    return recorder.tap(out, [ParameterUse(parameter, lambda g: _sum_to_parameter(g * seen, parameter))], (x,))


@register_function_rule(Tensor.expand, torch.Tensor.expand)
def use_expansion(recorder: UseRecorder, function: Any, input: Tensor, *sizes: Any) -> Any:
    """p.expand(B, ...): a row per example."""
    wanted = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    lead = len(wanted) - input.dim()
    if wanted[0] != recorder.count or lead < 0 or (lead == 0 and len(input) != 1):
        raise recorder.refuse("a parameter is expanded to something other than a row per example", input)
    out = function(input, *wanted).clone(memory_format=torch.contiguous_format)
    return recorder.tap(out, [ParameterUse(input, lambda g: _sum_to_parameter(g, input))])
