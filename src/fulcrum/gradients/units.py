"""Gradients of units of several records, from the recorded uses of the records.

A unit's gradient is the mean over its records. A sum over the positions of several records is a sum over positions too:
the records of a unit stand one after the other, and norms and sums are those of any other tape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fulcrum.gradients.ghost import GhostTape
from fulcrum.gradients.outer_products import ConvGrad, LinearGrad, WeightGradCost, materialise_grads
from fulcrum.gradients.param_grads import EmbeddingGrad, MaterialisedGrad, ParamGrad, scale_rows


@dataclass(frozen=True)
class UnitTable:
    """The records of U units with at most R each: rows [U, R], weights [U, R]: 1 / number. 0 where there is none.

    slots [B]: the unit of each record.
    """

    rows: Tensor
    weights: Tensor
    slots: Tensor

    @staticmethod
    def of(slots: Tensor, count: int, dtype: torch.dtype) -> UnitTable:
        """From the unit 0..count-1 of each record. Every unit has a record."""
        numbers = torch.bincount(slots, minlength=count)
        order = slots.argsort(stable=True)
        place = torch.arange(len(slots), device=slots.device) - (numbers.cumsum(0) - numbers)[slots[order]]
        rows = slots.new_zeros((count, int(numbers.max())))
        weights = torch.zeros(rows.shape, dtype=dtype, device=slots.device)
        rows[slots[order], place] = order
        weights[slots[order], place] = 1 / numbers[slots[order]].to(dtype)
        return UnitTable(rows, weights, slots)

    def take(self, values: Tensor, weighted: bool = False) -> Tensor:
        """Values [B, T, ...] -> [U, R * T, ...]; zero where there is no record, if weighted."""
        found = values[self.rows]
        if weighted:
            kept = self.weights.view(*self.weights.shape, *[1] * (values.dim() - 1))
            found = torch.where(kept > 0, found * kept.to(found.dtype), torch.zeros((), dtype=found.dtype))
        return found.flatten(1, 2)

    def average(self, rows: Tensor) -> Tensor:
        """The mean over each unit's records: [B, n] -> [U, n]."""
        weights = self.weights[self.weights > 0].new_zeros(len(rows))
        weights[self.rows[self.weights > 0]] = self.weights[self.weights > 0]
        return rows.new_zeros((len(self.rows), rows.shape[1])).index_add_(0, self.slots, scale_rows(rows, weights))


def _join(part: ParamGrad, table: UnitTable) -> ParamGrad:
    if isinstance(part, LinearGrad):
        a, g = (value if value.dim() == 3 else value.unsqueeze(1) for value in (part.a, part.g))
        positions = table.rows.shape[1] * a.shape[1]
        if WeightGradCost.of(a, 1, positions, a.shape[2], g.shape[2]).prefers_ghost_norms:
            return LinearGrad(table.take(a), table.take(g, weighted=True), part.order)
    if isinstance(part, EmbeddingGrad):
        return replace(part, index=table.take(part.index), g=table.take(part.g, weighted=True))
    if isinstance(part, LinearGrad | ConvGrad):
        part = materialise_grads(part)
    if isinstance(part, MaterialisedGrad):
        return MaterialisedGrad(table.average(part.grads), part.order)
    return MaterialisedGrad(table.average(part.rows()))


def join_units(tape: GhostTape, slots: Tensor, count: int) -> GhostTape:
    """The tape of `count` units from that of their records; slots [B] is the unit of each record.

    A record that is not finite makes its unit's norm not finite.
    """
    table = UnitTable.of(slots, count, tape.raw_losses.dtype)
    parts = tuple(tuple(_join(part, table) for part in uses) for uses in tape.parts)
    losses = table.average(tape.raw_losses[:, None])[:, 0]
    return replace(tape, raw_losses=losses, parts=parts)
