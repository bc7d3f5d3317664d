"""Recorded uses of any model's parameters, with the interface of a stacked pass.

Sets of weights go one after the other: one pass each over the examples of the set, all in one tensor program. Nothing
here waits for the device, so that the program can be a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.data.records import ModelInputs, map_inputs
from fulcrum.gradients import GradientRecorder
from fulcrum.gradients.ghost import GhostTape
from fulcrum.gradients.param_grads import ParamGrad
from fulcrum.gradients.rounding import NormTable, to_norm_table
from fulcrum.gradients.stacked.passes import PassOptions

Parts = tuple[tuple[ParamGrad, ...], ...]


@dataclass
class RecordedTape:
    """The tapes of S sets of weights with n examples each. losses [S, n], float32, unmasked."""

    tapes: tuple[GhostTape, ...]
    parts: tuple[Parts, ...]
    """Of each tape: its gradients, or what is left of them after `zero_examples`."""
    proven: bool

    @property
    def losses(self) -> Tensor:
        return torch.stack([tape.raw_losses for tape in self.tapes])

    @property
    def positions(self) -> int:
        """The most products that add up to one entry of an example's gradient."""
        return max(tape.positions for tape in self.tapes)

    def norm_table(self, groups: tuple[int, ...]) -> NormTable:
        """[S, n, G] each; not finite where the gradient is not."""
        found = [to_norm_table(tape.group_squares(groups), torch.float32) for tape in self.tapes]
        return NormTable(*(torch.stack(each) for each in zip(*found, strict=True)))

    def dots(self, direction: Tensor, segments: int) -> Tensor:
        """Inner products with a direction [S * M, d]: [S, n]."""
        rows = []
        for number, (tape, parts) in enumerate(zip(self.tapes, self.parts, strict=True)):
            each = len(tape.raw_losses) // segments
            for m in range(segments):
                blocks = direction[number * segments + m].split(tape.layout.sizes)
                total = tape.raw_losses.new_zeros(each)
                for block, uses in zip(blocks, _slice(parts, m, each, segments), strict=True):
                    for use in uses:
                        total = total + use.dots(block)
                rows.append(total)
        return torch.cat(rows).view(len(self.tapes), -1)

    def matrix(self) -> Tensor:
        """Every example's gradient, [S * n, d]."""
        tables = []
        for tape, parts in zip(self.tapes, self.parts, strict=True):
            table = tape.params.new_zeros(len(tape.raw_losses), tape.layout.dim)
            for block, uses in zip(table.split(tape.layout.sizes, dim=1), parts, strict=True):
                for use in uses:
                    block += use.rows()
            tables.append(table)
        return torch.cat(tables)

    def zero_examples(self, good: Tensor) -> None:
        """Excludes the examples where good [S, n] is False from all sums."""
        self.parts = tuple(
            tuple(tuple(use.only(row) for use in uses) for uses in parts)
            for row, parts in zip(good, self.parts, strict=True)
        )

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...], segments: int) -> Tensor:
        """Sum over each segment of factor times gradient: factors [S, n, G] -> [S * M, d].

        float32, or float64 where the bounds are proven.
        """
        sums = []
        for tape, parts, own in zip(self.tapes, self.parts, factors, strict=True):
            each = len(own) // segments
            for m in range(segments):
                piece = own[m * each : (m + 1) * each]
                sums.append(tape.sum_parts(_slice(parts, m, each, segments), piece, groups, self.proven))
        return torch.stack(sums)


def _slice(parts: Parts, m: int, each: int, segments: int) -> Parts:
    """The m-th of equal parts of the examples."""
    if segments == 1:
        return parts
    return tuple(tuple(use.slice(m * each, (m + 1) * each) for use in uses) for uses in parts)


def record_sets(recorder: GradientRecorder, theta: Tensor, x: ModelInputs, y: Tensor, how: PassOptions) -> RecordedTape:
    """Forward and backward for x [S, n, ...] and targets y [S, n, ...] with weights theta [S, d].

    Raises UnsupportedModel where the recorder cannot follow the model.
    """

    def record(s: int) -> GhostTape:
        rows = map_inputs(lambda value: value[s], x)
        return recorder.record_once(theta[s], rows, y[s], not how.proven, how.precision == "bf16")

    tapes = tuple(record(s) for s in range(len(theta)))
    return RecordedTape(tapes, tuple(tape.parts for tape in tapes), how.proven)
