"""What an honest-but-curious server computes from one party's releases: how much of a record's gradient is in each.

In every round, for every record of a party: the record's gradient at the broadcast model, clipped as the party would,
and its inner product with what the party released. A member's gradient is in the sum with probability q; a
non-member's never is. The products are added up over the rounds, each in units of the round's C: with a constant noise
multiplier these are the weights of the likelihood ratio for small signals.

    dot              sum of <clipped gradient / C, release / C>
    cosine           sum of cosines, for runs without noise, in which gradients shrink as the model fits
    centred, centred-cosine     the same with the mean of the other parties' releases taken off, which the server
                                sees too: what all records of a class share falls out
    joint            sum of each record's estimated coefficient in the release, all candidates of the party at once: the
                     linear estimate of least error, for a server that has a list of all records that may be there
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fulcrum.analysis.attacks.cells import ScoreArray
from fulcrum.analysis.attacks.pool import BoolArray, IntArray
from fulcrum.engines.batched.server import BatchedServer
from fulcrum.engines.stacked.core import MatrixTape, find_piece_budget
from fulcrum.engines.stacked.sampling import select_row_on_device
from fulcrum.gradients.stacked.passes import StackedTape
from fulcrum.gradients.stacked.recorded import RecordedTape
from fulcrum.types import View

STATISTICS = ("dot", "cosine", "centred", "centred-cosine", "joint")
JOINT_ITERATIONS = 64
"""Steps of conjugate gradients: a fixed number, so that the program can be recorded."""
LEAST_RIDGE = 1e-3
"""Smallest ridge, in units of the mean squared gradient: for releases without noise."""
MATRIX_BYTES = 6 * 2**30
"""The most for gradients that are written out, so that several processes fit on one GPU."""

Tape = StackedTape | RecordedTape | MatrixTape


class ReleaseScorer:
    """A `ReleaseWatch` that adds up scores [5, R, N] of all records of a pool, against their own party's releases."""

    def __init__(self, party: IntArray, common: BoolArray | None = None, known: int | None = None) -> None:
        """party [N]: who holds each record of the data set. common [N]: in every federation, and not scored.

        known: how many of each party's common records are on the server's list; None: all. They stand for the rest.
        """
        common = np.zeros(len(party), dtype=bool) if common is None else common
        self.scored = np.flatnonzero(~common)
        lists = []
        for k in range(int(party.max()) + 1):
            own, others = np.flatnonzero((party == k) & ~common), np.flatnonzero((party == k) & common)
            lists.append((own, others[:known], len(others)))
        most = max(len(own) + len(listed) for own, listed, _ in lists)
        rows = np.zeros((len(lists), most), dtype=np.int64)
        held, copies = np.zeros(rows.shape), np.zeros(rows.shape)
        for k, (own, listed, total) in enumerate(lists):
            end = len(own) + len(listed)
            rows[k, :end] = np.concatenate([own, listed])
            held[k, :end] = np.repeat([0.5, 1.0], [len(own), len(listed)])
            copies[k, :end] = np.repeat([1.0, total / max(1, len(listed))], [len(own), len(listed)])
        self.owned = [own for own, _, _ in lists]
        self.rows = torch.from_numpy(rows)  # [K, n], padded with row 0, whose score nobody reads
        # Each record's chance to be in the party's data, and how many records it stands for; 0 for padding.
        self.held, self.copies = torch.from_numpy(held), torch.from_numpy(copies)

    def begin(self, server: BatchedServer, steps: int) -> None:
        """Allocates the sums."""
        self.server, self.steps, device = server, float(steps), server.device
        self.rows = self.rows.to(device)
        runs, (parties, count) = len(server.theta), self.rows.shape
        self.sums = torch.zeros((len(STATISTICS), runs, parties, count), device=device)
        plans = [federation.plan for federation in server.federations]
        tasks = [[plan.assignment(k, 0, 1.0) for k in range(parties)] for plan in plans]
        batch = [[task.rate * plan.units(task.client) for task in own] for plan, own in zip(plans, tasks, strict=True)]
        self.batch = torch.tensor(batch, dtype=torch.float32).to(device)  # [R, K]
        # A candidate is a member with probability 1/2 and then in a sample with probability q: coefficients of a
        # release have this mean and this standard deviation, [R, K, n].
        rate = torch.tensor([[task.rate for task in own] for own in tasks], dtype=torch.float64)
        chance = rate[:, :, None] * self.held
        self.mean = (chance * self.copies).float().to(device)
        self.spread = (chance * (1 - chance) * self.copies).sqrt().float().to(device)
        sigma = torch.tensor([[task.sigma for task in own] for own in tasks])
        self.variance = sigma.square().float().to(device)
        self.joint_rows = max(1, min(find_piece_budget(device), MATRIX_BYTES) // (16 * server.theta.shape[1]))

    def list_state_tensors(self) -> list[Tensor]:
        """The sums."""
        return [self.sums]

    def look(self, releases: Tensor) -> None:
        """Adds this round's scores."""
        server, (runs, parties) = self.server, self.batch.shape
        norm = torch.linalg.vector_norm(server.rule_state["C"], dim=1)
        C = torch.where(torch.isfinite(norm), norm, torch.ones_like(norm))  # [R]; 1 where nothing is clipped
        lr = select_row_on_device(server.lr, server.t)
        scale = self.batch / (lr * self.steps * C)[:, None]
        seen = -releases.view(runs, parties, -1) * scale[:, :, None]  # the sum of a step's clipped gradients, over C
        others = (seen.sum(dim=1, keepdim=True) - seen) / max(1, parties - 1)
        seen_alone = seen - others
        limit = torch.where(torch.isfinite(norm), C, torch.full_like(C, torch.inf))
        limits = min(server.core.rows_limit, self.joint_rows)
        for s, k in _split(runs, parties, self.rows.shape[1], limits):
            rows = self.rows[k].flatten().expand(s.stop - s.start, -1)
            tape = server.core.record_tape(server.theta[s], rows, View())
            norms = _measure_norms(tape)
            clipped = torch.clamp(limit[s, None] / norms, max=1.0) / C[s, None]
            found = [
                *_score_directions(tape, seen[s, k], norms, clipped),
                *_score_directions(tape, seen_alone[s, k], norms, clipped),
                self._estimate_jointly(tape, seen[s, k], clipped, s, k),
            ]
            added = torch.nan_to_num(torch.stack(found), nan=0.0, posinf=0.0, neginf=0.0)
            self.sums[:, s, k].add_(added.view(len(STATISTICS), *self.sums[0, s, k].shape))

    def _estimate_jointly(self, tape: Tape, seen: Tensor, clipped: Tensor, s: slice, k: slice) -> Tensor:
        """Coefficients of all candidates in the releases seen [S, M, d], less their expectation: [S, M n]."""
        matrix = tape.gradients if isinstance(tape, MatrixTape) else tape.matrix()
        runs, dim = len(seen), seen.shape[2]
        spread, mean = self.spread[s, k].flatten(0, 1), self.mean[s, k].flatten(0, 1)  # [S M, n]
        gradients = (matrix * (clipped.view(spread.shape) * spread).reshape(-1, 1)).view(*spread.shape, dim)
        gram = torch.bmm(gradients, gradients.transpose(1, 2))
        along = torch.bmm(gradients, seen.reshape(-1, dim, 1))[:, :, 0]
        expected = torch.bmm(gram, (mean / spread.clamp_min(1e-12))[:, :, None])[:, :, 0]
        least = LEAST_RIDGE * gram.diagonal(dim1=1, dim2=2).mean(dim=1, keepdim=True)
        ridge = torch.maximum(self.variance[s, k].reshape(-1, 1), least)
        return (spread * solve_ridge(gram, ridge, along - expected)).view(runs, -1)

    def collect(self) -> dict[str, ScoreArray]:
        """The scores by statistic, [R, number of scored records] float32."""
        sums = self.sums.cpu().numpy()
        found = {name: np.zeros((sums.shape[1], len(self.scored)), dtype=np.float32) for name in STATISTICS}
        for i, name in enumerate(STATISTICS):
            for k, own in enumerate(self.owned):
                found[name][:, np.searchsorted(self.scored, own)] = sums[i, :, k, : len(own)]
        return found


def _measure_norms(tape: Tape) -> Tensor:
    """[S, n], of whole gradients."""
    table = tape.norm_table(1) if isinstance(tape, MatrixTape) else tape.norm_table(())
    return table.norms[:, :, 0].clamp_min(1e-12)


def _score_directions(tape: Tape, direction: Tensor, norms: Tensor, clipped: Tensor) -> tuple[Tensor, Tensor]:
    """Products and cosines [S, M n] with directions [S, M, d]; clipped [S, M n]: what clipping leaves of each."""
    segments = direction.shape[1]
    dots = tape.dots(direction.flatten(0, 1).contiguous(), segments)
    lengths = torch.linalg.vector_norm(direction, dim=2).clamp_min(1e-12)
    return dots * clipped, dots / (norms * lengths.repeat_interleave(norms.shape[1] // segments, dim=1))


def solve_ridge(gram: Tensor, ridge: Tensor, along: Tensor, iterations: int = JOINT_ITERATIONS) -> Tensor:
    """(gram + ridge I)^-1 along, by conjugate gradients: gram [T, n, n], ridge [T, 1], along [T, n]."""
    found, rest = torch.zeros_like(along), along
    step, size = rest, rest.square().sum(dim=1, keepdim=True)
    for _ in range(iterations):
        moved = torch.bmm(gram, step[:, :, None])[:, :, 0] + ridge * step
        length = size / (step * moved).sum(dim=1, keepdim=True).clamp_min(1e-30)
        found, rest = found + length * step, rest - length * moved
        before, size = size, rest.square().sum(dim=1, keepdim=True)
        step = rest + size / before.clamp_min(1e-30) * step
    return found


def _split(runs: int, parties: int, count: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of runs and parties of at most `limit` examples, at least one party of one run."""
    by_party = max(1, min(parties, limit // count))
    by_run = max(1, min(runs, limit // (by_party * count)))
    for s in range(0, runs, by_run):
        for k in range(0, parties, by_party):
            yield slice(s, min(runs, s + by_run)), slice(k, min(parties, k + by_party))
