"""The table of functions that book-keeping knows: how each one's parameters get their per-example gradients.

Symbols: B examples, T positions, a the input, g the gradient of the output. Importing this module fills
`uses.FUNCTION_RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fulcrum.gradients.group_norm import ParameterGrads, fused_group_norm
from fulcrum.gradients.outer_products import ConvGrad, LinearGrad, WeightGradCost
from fulcrum.gradients.param_grads import EmbeddingGrad, MaterialisedGrad
from fulcrum.gradients.uses import FUNCTION_RULES, ParameterUse, UseRecorder, register_function_rule

Size = int | Sequence[int]


def sum_positions(values: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """A sum in float32 where the numbers have fewer digits."""
    return values.sum(dim=dim, dtype=torch.float32 if values.dtype in (torch.bfloat16, torch.float16) else None)


def to_compute_type(value: Tensor) -> Tensor:
    """An input in the type in which autocast will multiply it, so that it is held once."""
    kind = value.device.type
    return value.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else value


def arrange_images(recorder: UseRecorder, images: Tensor) -> Tensor:
    """Images [B, C, H, W] with channels last in memory, the format of a GPU's tensor cores, where these convolve them.

    What follows keeps the format, so that it is changed once in a pass; full float32 is faster with channels first.
    """
    if not (recorder.channels_last and images.is_cuda and images.dim() == 4):
        return images
    conv = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    if images.dtype == torch.bfloat16 or (images.dtype == torch.float32 and conv.fp32_precision == "tf32"):
        return images.contiguous(memory_format=torch.channels_last)
    return images


# --- linear -------------------------------------------------------------------------------------


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


# --- convolutions -------------------------------------------------------------------------------


def _expand(value: Size, dims: int) -> tuple[int, ...]:
    found = (value,) if isinstance(value, int) else tuple(value)
    return found * dims if len(found) == 1 else found


def _pad_amounts(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """Padding left and right of the last dimension, then of the one before, in the order of `F.pad`."""
    amounts: list[int] = []
    for i in reversed(range(len(kernel))):
        if isinstance(padding, str):
            total = dilation[i] * (kernel[i] - 1) if padding == "same" else 0
            amounts += [total // 2, total - total // 2]
        else:
            amounts += [padding[i], padding[i]]
    return amounts


def _make_conv_grad(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    padding: tuple[int, ...] = (),
) -> ConvGrad | LinearGrad:
    """A sequence is an image of height 1; a 1x1 convolution is a linear layer over pixels."""
    kernel = weight.shape[2:]
    if groups == 1 and math.prod(kernel) == 1 and not any(padding):
        if max(stride) > 1:
            for dim, (step, n) in enumerate(zip(stride, g.shape[2:], strict=True), 2):
                x = x.narrow(dim, 0, (n - 1) * step + 1)[(slice(None),) * dim + (slice(None, None, step),)]
        return LinearGrad(x.flatten(2).transpose(1, 2), g.flatten(2).transpose(1, 2))
    if x.dim() == 3:
        x, g, weight = x.unsqueeze(2), g.unsqueeze(2), weight.unsqueeze(2)
        stride, dilation, padding = (1, *stride), (1, *dilation), ((0, *padding) if padding else ())
    return ConvGrad(x, g, weight.to(x.dtype), stride, dilation, groups, padding)


@register_function_rule(torch.conv1d, torch.conv2d, torch.conv3d)
def use_convolution(
    recorder: UseRecorder,
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Any = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Any:
    """[B, C, ...] -> [B, O, ...] in one to three dimensions."""
    dims = weight.dim() - 2
    if input.dim() != dims + 2:
        raise recorder.refuse(f"{function.__name__} does not see one example per row", weight, bias)
    recorder.require_rows((weight, bias), input)
    strides, steps = _expand(stride, dims), _expand(dilation, dims)
    around = padding if isinstance(padding, str) else _expand(padding, dims)
    a = arrange_images(recorder, to_compute_type(input))
    out = function(a, weight, bias, strides, around, steps, groups)
    seen, amounts = a.detach(), _pad_amounts(around, tuple(weight.shape[2:]), steps)

    def weight_grads(g: Tensor) -> ConvGrad | LinearGrad:
        if amounts[::2] == amounts[1::2]:
            return _make_conv_grad(seen, g, weight, strides, steps, groups, tuple(reversed(amounts[::2])))
        return _make_conv_grad(F.pad(seen, amounts), g, weight, strides, steps, groups)

    cost = WeightGradCost.of(a, groups, math.prod(out.shape[2:]), math.prod(weight.shape[1:]), len(weight) // groups)
    uses = [ParameterUse(weight, weight_grads, cost)]
    if bias is not None:
        uses.append(ParameterUse(bias, lambda g: MaterialisedGrad(sum_positions(g.flatten(2), 2))))
    return recorder.tap(out, uses, (a,))


@register_function_rule(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def use_transposed_convolution(
    recorder: UseRecorder,
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Any:
    """The adjoint of a convolution: its weight's gradient is that convolution's, with input and gradient exchanged."""
    dims = weight.dim() - 2
    if input.dim() != dims + 2:
        raise recorder.refuse(f"{function.__name__} does not see one example per row", weight, bias)
    recorder.require_rows((weight, bias), input)
    strides, around, steps = (_expand(value, dims) for value in (stride, padding, dilation))
    a = to_compute_type(input)
    out = function(a, weight, bias, strides, around, _expand(output_padding, dims), groups, steps)
    seen, kernel = a.detach(), weight.shape[2:]

    def weight_grads(g: Tensor) -> ConvGrad | LinearGrad:
        padded = F.pad(g, _pad_amounts(around, tuple(kernel), steps)) if any(around) else g
        reach = [
            (n - 1) * step + gap * (k - 1) + 1
            for n, step, gap, k in zip(seen.shape[2:], strides, steps, kernel, strict=True)
        ]
        for dim, n in enumerate(reach, 2):
            padded = padded.narrow(dim, 0, n)  # without output_padding
        return _make_conv_grad(padded, seen, weight, strides, steps, groups)

    cost = WeightGradCost.of(a, groups, math.prod(a.shape[2:]), math.prod(weight.shape[1:]), len(weight) // groups)
    uses = [ParameterUse(weight, weight_grads, cost)]
    if bias is not None:
        uses.append(ParameterUse(bias, lambda g: MaterialisedGrad(sum_positions(g.flatten(2), 2))))
    return recorder.tap(out, uses, (a,))


# --- normalisation within an example --------------------------------------------------------------


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
    recorder.require_rows((weight, bias), input)
    if input.dim() <= len(normalized_shape):
        raise recorder.refuse("layer_norm does not see one example per row", weight, bias)
    a = input if input.element_size() >= 4 else input.float()  # as autocast does
    out, mean, rstd = torch.native_layer_norm(a, list(normalized_shape), weight, bias, eps)
    seen, centre, scale, count = a.detach(), mean.detach(), rstd.detach(), math.prod(normalized_shape)

    def total(values: Tensor) -> MaterialisedGrad:
        return MaterialisedGrad(values.reshape(len(values), -1, count).sum(dim=1))

    def along(g: Tensor) -> MaterialisedGrad:
        if not g.is_cuda:
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
    return recorder.tap(out, [use for use in uses if use], (a,))


def _tap_group_norm(
    recorder: UseRecorder, a: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    own = fused_group_norm(a, groups, weight, bias, eps) if a.is_cuda else None
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
    recorder.require_rows((weight,), input)
    dims = tuple(range(-len(normalized_shape), 0))
    if input.dim() <= len(dims):
        raise recorder.refuse("rms_norm does not see one example per row", weight)
    a = input if input.element_size() >= 4 else input.float()
    out = function(a, normalized_shape, weight, eps)
    seen, count = a.detach(), math.prod(normalized_shape)
    small = torch.finfo(a.dtype).eps if eps is None else eps

    def along(g: Tensor) -> MaterialisedGrad:
        scale = (seen.square().mean(dim=dims, keepdim=True) + small).rsqrt()
        return MaterialisedGrad((seen * scale).mul_(g).reshape(len(g), -1, count).sum(dim=1))

    return recorder.tap(out, [ParameterUse(weight, along)] if weight is not None else [], (a,))


# --- embedding ----------------------------------------------------------------------------------


@register_function_rule(F.embedding)
def use_embedding(
    recorder: UseRecorder,
    function: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Indices [B, ...] -> [B, ..., D]."""
    if max_norm is not None or scale_grad_by_freq:
        raise recorder.refuse("embedding with max_norm or scale_grad_by_freq", weight)
    recorder.require_rows((weight,), input)
    out = function(input, weight, padding_idx)
    index, count = input.reshape(len(input), -1), len(weight)

    def grads(g: Tensor) -> EmbeddingGrad:
        g = g.reshape(len(g), -1, weight.shape[1])
        if padding_idx is not None:
            skipped = padding_idx if padding_idx >= 0 else count + padding_idx
            g = g.masked_fill((index == skipped).unsqueeze(2), 0)
        return EmbeddingGrad(index, g, count)

    return recorder.tap(out, [ParameterUse(weight, grads)])


# --- attention ----------------------------------------------------------------------------------


@register_function_rule(F.multi_head_attention_forward)
def use_attention(
    recorder: UseRecorder,
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """`nn.MultiheadAttention`: linear uses of its projections around attention without parameters; [T, B, E]."""
    weights = (in_proj_weight, in_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight, out_proj_weight)
    parameters = (*weights, out_proj_bias, bias_k, bias_v)
    if query.dim() != 3 or add_zero_attn or any(v is not None for v in (bias_k, bias_v, static_k, static_v)):
        raise recorder.refuse("attention without a batch, or with added keys", *parameters)
    width, (tokens, count, _) = embed_dim_to_check, query.shape
    x = query.transpose(0, 1)
    if query is key and key is value and not use_separate_proj_weight:
        assert in_proj_weight is not None
        q, k, v = use_linear(recorder, F.linear, x, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        others = (x, key.transpose(0, 1), value.transpose(0, 1))
        if use_separate_proj_weight:
            split: tuple[Tensor | None, ...] = (q_proj_weight, k_proj_weight, v_proj_weight)
        else:
            assert in_proj_weight is not None
            split = in_proj_weight.detach().chunk(3)
        q, k, v = (
            _use_rows(recorder, each, own, in_proj_weight, in_proj_bias, n)
            for n, (each, own) in enumerate(zip(others, split, strict=True))
        )

    def heads(values: Tensor) -> Tensor:
        return values.reshape(count, values.shape[1], num_heads, -1).transpose(1, 2)

    q, k, v = heads(q), heads(k), heads(v)
    dropout = dropout_p if training else 0.0
    if is_causal and key_padding_mask is None and not need_weights:
        mixed = F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)
        attention = None
    else:
        mask = _merge_masks(attn_mask, key_padding_mask, count, num_heads, q)
        if need_weights:
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
            attention = F.dropout((scores if mask is None else scores + mask).softmax(dim=3), dropout)
            mixed = attention @ v
            attention = attention.mean(dim=1) if average_attn_weights else attention
        else:
            mixed, attention = F.scaled_dot_product_attention(q, k, v, mask, dropout), None
    joined = mixed.transpose(1, 2).reshape(count, tokens, width)
    return use_linear(recorder, F.linear, joined, out_proj_weight, out_proj_bias).transpose(0, 1), attention


def _use_rows(
    recorder: UseRecorder, x: Tensor, own: Tensor | None, whole: Tensor | None, bias: Tensor | None, number: int
) -> Tensor:
    """The linear use of a third of an attention's input projection, or of a projection of its own."""
    assert own is not None
    width = len(own)
    a = to_compute_type(x)
    seen, where = a.detach(), (number * width, (2 - number) * width)
    shift = None if bias is None else bias.detach()[number * width : (number + 1) * width]
    out = F.linear(a, own, shift)
    uses = []
    if recorder.is_tracked(own):
        cost = WeightGradCost.of(a, 1, x.shape[1], own.shape[1], width)
        uses.append(ParameterUse(own, lambda g: LinearGrad(seen, g), cost))
    elif whole is not None:
        uses.append(ParameterUse(whole, lambda g: LinearGrad(seen, F.pad(g, where))))
    if bias is not None:
        uses.append(ParameterUse(bias, lambda g: MaterialisedGrad(F.pad(sum_positions(g, 1), where))))
    return recorder.tap(out, uses, (a,))


def _merge_masks(
    attention: Tensor | None, padding: Tensor | None, count: int, heads: int, like: Tensor
) -> Tensor | None:
    """Both masks as numbers to add to the scores [B, heads, T, S]."""

    def to_numbers(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(like.dtype)
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf)

    found = None
    if attention is not None:
        found = to_numbers(attention)
        found = found.view(count, heads, *found.shape[1:]) if found.dim() == 3 else found
    if padding is not None:
        columns = to_numbers(padding)[:, None, None, :]
        found = columns if found is None else found + columns
    return found


# --- parameters used directly ---------------------------------------------------------------------


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


__all__ = ["FUNCTION_RULES"]
