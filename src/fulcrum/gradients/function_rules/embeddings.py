"""Tables of vectors, looked up by indices."""

from __future__ import annotations

from typing import Any

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
