"""`nn.MultiheadAttention`: linear layers around attention, which has no parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fulcrum.gradients.call_plan import Axis
from fulcrum.gradients.function_rules.common import sum_positions, to_compute_type
from fulcrum.gradients.function_rules.direct import copy_for_each_row
from fulcrum.gradients.function_rules.linear import tap_linear
from fulcrum.gradients.outer_products import LinearGrad, WeightGradCost
from fulcrum.gradients.param_grads import MaterialisedGrad
from fulcrum.gradients.uses import ParameterUse, UseRecorder, register_function_rule


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
    if query.dim() != 3 or static_k is not None or static_v is not None:
        raise recorder.refuse("attention without a batch, or with keys from elsewhere", *parameters)
    for given in (query, key, value):
        axis = recorder.find_axis(given)
        if not isinstance(axis, Axis) or axis.dim != 1:
            raise recorder.refuse("attention over the batch", *parameters)
    width, (tokens, count, _) = embed_dim_to_check, query.shape
    x = query.transpose(0, 1)
    if query is key and key is value and not use_separate_proj_weight:
        assert in_proj_weight is not None
        q, k, v = tap_linear(recorder, x, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
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

    more = int(bias_k is not None) + int(add_zero_attn)
    k, v = (_add_tokens(recorder, *pair, add_zero_attn) for pair in ((k, bias_k), (v, bias_v)))

    def heads(values: Tensor) -> Tensor:
        return values.reshape(count, values.shape[1], num_heads, -1).transpose(1, 2)

    q, k, v = heads(q), heads(k), heads(v)
    dropout = dropout_p if training else 0.0
    if is_causal and key_padding_mask is None and not need_weights and not more:
        mixed = F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)
        attention = None
    else:
        mask = _merge_masks(attn_mask, key_padding_mask, count, num_heads, q, more)
        if need_weights:
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
            attention = F.dropout((scores if mask is None else scores + mask).softmax(dim=3), dropout)
            mixed = attention @ v
            attention = attention.mean(dim=1) if average_attn_weights else attention
        else:
            mixed, attention = F.scaled_dot_product_attention(q, k, v, mask, dropout), None
    joined = mixed.transpose(1, 2).reshape(count, tokens, width)
    return tap_linear(recorder, joined, out_proj_weight, out_proj_bias).transpose(0, 1), attention


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


def _add_tokens(recorder: UseRecorder, values: Tensor, parameter: Tensor | None, zero: bool) -> Tensor:
    """Keys or values [B, S, E] with a learned one [1, 1, E] and one of zeros after them."""
    if parameter is not None:
        own = copy_for_each_row(recorder, parameter, 3, 0) if recorder.is_tracked(parameter) else parameter
        values = torch.cat([values, own.expand(len(values), -1, -1).to(values.dtype)], dim=1)
    return F.pad(values, (0, 0, 0, 1)) if zero else values


def _merge_masks(
    attention: Tensor | None, padding: Tensor | None, count: int, heads: int, like: Tensor, more: int
) -> Tensor | None:
    """Both masks as numbers to add to the scores [B, heads, T, S]; the last `more` of S are never hidden."""

    def to_numbers(mask: Tensor) -> Tensor:
        mask = F.pad(mask, (0, more)) if more else mask
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
