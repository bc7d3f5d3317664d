"""Normalisation within an example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fulcrum.gradients.group_norm import ParameterGrads, fused_group_norm
from fulcrum.gradients.host_group_norm import host_group_norm
from fulcrum.gradients.param_grads import MaterialisedGrad
from fulcrum.gradients.uses import ParameterUse, UseRecorder, register_function_rule


@register_function_rule(F.layer_norm)
def use_layer_norm(
    recorder: UseRecorder,
    function: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Over the last dimensions."""
    x, dim = recorder.bring_first((weight, bias), input, len(normalized_shape))
    a = x if x.element_size() >= 4 else x.float()  # as autocast does
    out, mean, rstd = torch.native_layer_norm(a, list(normalized_shape), weight, bias, eps)
    seen, centre, scale, count = a.detach(), mean.detach(), rstd.detach(), math.prod(normalized_shape)

    def total(values: Tensor) -> MaterialisedGrad:
        return MaterialisedGrad(values.reshape(len(values), -1, count).sum(dim=1))

    def along(g: Tensor) -> MaterialisedGrad:
        if g.dtype == torch.float64:
            return total(((seen - centre) * scale).mul_(g))
        # Sums over positions as products: fewer passes over memory.
        shape = (len(g), -1, count)
        spread = scale.reshape(len(g), 1, -1)
        plain = torch.bmm(spread * centre.reshape(len(g), 1, -1), g.reshape(shape))
        return MaterialisedGrad((torch.bmm(spread, (seen * g).view(shape)) - plain)[:, 0])

    uses = [
        ParameterUse(weight, along) if weight is not None else None,
        ParameterUse(bias, total) if bias is not None else None,
    ]
    out = recorder.tap(out, [use for use in uses if use], (a,))
    return out.movedim(0, dim) if dim else out


def _tap_group_norm(
    recorder: UseRecorder, a: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    own = (fused_group_norm if a.is_cuda else host_group_norm)(a, groups, weight, bias, eps)
    if own is not None:
        out, differentiate = own
        grads: list[ParameterGrads] = []

        def take(g: Tensor, name: str) -> MaterialisedGrad:
            if not grads:
                grads.append(differentiate(g))
            return MaterialisedGrad(getattr(grads[0], name))

        named = (("weight", weight), ("bias", bias))
        taken = [ParameterUse(p, partial(take, name=name)) for name, p in named if p is not None]
        return recorder.tap(out, taken, (a,))
    count, channels = a.shape[:2]
    pixels = math.prod(a.shape[2:])
    a = a.contiguous() if a.element_size() >= 4 else a.float().contiguous()
    out, mean, rstd = torch.native_group_norm(a, weight, bias, count, channels, pixels, groups, eps)
    seen, centre, scale = a.detach(), mean.detach(), rstd.detach()
    found: dict[str, Tensor] = {}

    def compute(g: Tensor, name: str) -> MaterialisedGrad:
        """Both gradients in one pass: to the library, the channels of all examples are those of one image."""
        if not found:
            whole = (1, count * channels, pixels)
            _, found["weight"], found["bias"] = torch.ops.aten.native_group_norm_backward(
                g.reshape(whole),
                seen.reshape(whole),
                centre.reshape(1, -1),
                scale.reshape(1, -1),
                scale.new_ones(count * channels),
                1,
                count * channels,
                pixels,
                count * groups,
                [False, True, True],
            )
        return MaterialisedGrad(found[name].view(count, channels))

    uses = [
        ParameterUse(weight, lambda g: compute(g, "weight")) if weight is not None else None,
        ParameterUse(bias, lambda g: compute(g, "bias")) if bias is not None else None,
    ]
    return recorder.tap(out, [use for use in uses if use], (a,))


@register_function_rule(F.group_norm)
def use_group_norm(
    recorder: UseRecorder,
    function: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Over groups of channels of [B, C, ...]."""
    recorder.require_rows((weight, bias), input)
    return _tap_group_norm(recorder, input, num_groups, weight, bias, eps)


@register_function_rule(F.instance_norm)
def use_instance_norm(
    recorder: UseRecorder,
    function: Any,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """A group norm with one channel per group."""
    if not use_input_stats or running_mean is not None:
        raise recorder.refuse("instance_norm with running statistics", weight, bias)
    recorder.require_rows((weight, bias), input)
    return _tap_group_norm(recorder, input, input.shape[1], weight, bias, eps)


@register_function_rule(F.rms_norm)
def use_rms_norm(
    recorder: UseRecorder,
    function: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Over the last dimensions, without a mean."""
    x, dim = recorder.bring_first((weight,), input, len(normalized_shape))
    dims = tuple(range(-len(normalized_shape), 0))
    a = x if x.element_size() >= 4 else x.float()
    out = function(a, normalized_shape, weight, eps)
    seen, count = a.detach(), math.prod(normalized_shape)
    small = torch.finfo(a.dtype).eps if eps is None else eps

    def along(g: Tensor) -> MaterialisedGrad:
        scale = (seen.square().mean(dim=dims, keepdim=True) + small).rsqrt()
        return MaterialisedGrad((seen * scale).mul_(g).reshape(len(g), -1, count).sum(dim=1))

    out = recorder.tap(out, [ParameterUse(weight, along)] if weight is not None else [], (a,))
    return out.movedim(0, dim) if dim else out


@register_function_rule(F.batch_norm)
def use_frozen_batch_norm(
    recorder: UseRecorder,
    function: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """With statistics that stay as they are: each channel of [B, C, ...] times a number plus a number."""
    if training or running_mean is None or running_var is None:
        raise recorder.refuse("batch_norm over the batch", weight, bias)
    recorder.require_rows((weight, bias), input)
    out = function(input, running_mean, running_var, weight, bias, False, momentum, eps)
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    seen, centre, scale = input.detach(), running_mean.view(shape), (running_var.view(shape) + eps).rsqrt()

    def total(values: Tensor) -> MaterialisedGrad:
        return MaterialisedGrad(values.flatten(2).sum(dim=2) if values.dim() > 2 else values)

    uses = [] if weight is None else [ParameterUse(weight, lambda g: total((seen - centre) * scale * g))]
    uses += [] if bias is None else [ParameterUse(bias, total)]
    return recorder.tap(out, uses, (input,))
