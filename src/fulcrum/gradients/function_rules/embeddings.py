"""Tables of vectors, looked up by indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fulcrum.gradients.param_grads import EmbeddingGrad
from fulcrum.gradients.uses import ParameterUse, UseRecorder, register_function_rule


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
    index, dim = recorder.bring_first((weight,), input, 0)
    out = tap_lookup(recorder, index, weight, padding_idx)
    return out.movedim(0, dim) if dim else out


def tap_lookup(recorder: UseRecorder, index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows of a table [V, D] at indices [B, ...], whose rows stand first."""
    out = F.embedding(index, weight, padding_idx)
    flat, count = index.reshape(len(index), -1), len(weight)

    def grads(g: Tensor) -> EmbeddingGrad:
        g = g.reshape(len(g), -1, weight.shape[1])
        if padding_idx is not None:
            skipped = padding_idx if padding_idx >= 0 else count + padding_idx
            g = g.masked_fill((flat == skipped).unsqueeze(2), 0)
        return EmbeddingGrad(flat, g, count)

    return recorder.tap(out, [ParameterUse(weight, grads)])


@register_function_rule(Tensor.__getitem__)
def use_indexing(recorder: UseRecorder, function: Any, table: Tensor, index: Any) -> Any:
    """table[index] with integers [B, ...] for the rows of a table [V, D]."""
    fits = isinstance(index, Tensor) and not index.is_floating_point() and index.dtype != torch.bool
    if not fits or table.dim() != 2 or not recorder.is_tracked(table):
        raise recorder.refuse("indexing that is not table[index]", table)
    found, dim = recorder.bring_first((table,), index, 0)
    out = tap_lookup(recorder, found % len(table), table)  # a negative index counts from the end
    return out.movedim(0, dim) if dim else out


@register_function_rule(torch.index_select, Tensor.index_select)
def use_selection(recorder: UseRecorder, function: Any, input: Tensor, dim: int, index: Tensor) -> Any:
    """Rows of a table [V, D] at indices [B]."""
    if dim not in (0, -2) or input.dim() != 2 or not recorder.is_tracked(input):
        raise recorder.refuse("index_select that is not of a table's rows", input)
    recorder.require_rows((input,), index)
    return tap_lookup(recorder, index, input)


@register_function_rule(F.embedding_bag)
def use_embedding_bag(
    recorder: UseRecorder,
    function: Any,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Sums or means of the rows of a table [V, D] at indices [B, T]."""
    plain = max_norm is None and not scale_grad_by_freq and offsets is None and input.dim() == 2
    if not plain or mode not in ("sum", "mean"):
        raise recorder.refuse("embedding_bag other than sums and means of [B, T]", weight)
    recorder.require_rows((weight,), input)
    if per_sample_weights is not None:
        recorder.require_rows((weight,), per_sample_weights)
    rows = tap_lookup(recorder, input, weight, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(2)
    if padding_idx is None:
        return rows.sum(dim=1) if mode == "sum" else rows.mean(dim=1)
    kept = (input != (padding_idx if padding_idx >= 0 else len(weight) + padding_idx)).to(rows.dtype)
    total = (rows * kept.unsqueeze(2)).sum(dim=1)
    return total if mode == "sum" else total / kept.sum(dim=1, keepdim=True).clamp_min(1)
