"""Gradients of examples from those of their parts, where each row of a layer's input is a part of an example."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fulcrum.gradients.outer_products import LinearGrad
from fulcrum.gradients.param_grads import EmbeddingGrad, MaterialisedGrad, ParamGrad


def group_rows(part: ParamGrad, count: int, each: int, inner: bool) -> ParamGrad:
    """Gradients of `count` examples with `each` rows, which stand as [count, each] or (`inner`) as [each, count].

    An example's gradient is the sum over its rows. A sum over the positions of several rows is a sum over positions.
    """

    def split(values: Tensor) -> Tensor:
        found: Tensor = values.unflatten(0, (each, count) if inner else (count, each))
        return found.transpose(0, 1) if inner else found

    def join(values: Tensor) -> Tensor:
        found = split(values)
        return found if found.dim() < 4 else found.flatten(1, 2)

    if isinstance(part, LinearGrad):
        return LinearGrad(join(part.a), join(part.g), part.order)
    if isinstance(part, EmbeddingGrad):
        return replace(part, index=split(part.index).flatten(1), g=split(part.g).flatten(1, 2))
    if isinstance(part, MaterialisedGrad):
        return MaterialisedGrad(split(part.grads).sum(dim=1), part.order)
    return MaterialisedGrad(split(part.rows()).sum(dim=1))
