"""Canaries: units that an audit adds to a party's data, and an engine that trains with them and keeps what was seen.

A canary is a unit like any other: it counts in n_k, it is sampled by the same coins at the same rate, clipped by the
same `apply_rule`, covered by the same noise, and paid for in the ledger. A fair coin of the auditor decides whether it
contributes (it is in) or adds nothing when it is sampled (it is out, the neighbour by zero-out).

A gradient canary contributes a gradient of its own, along one coordinate in each clipping group and longer than the
bound, so that what is left of it is as long as any unit may be. Coordinates differ between canaries, so their
directions are orthogonal. An example canary is a record with a wrong target, and its gradient is the model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.data import Dataset, Partition
from fulcrum.data.fingerprints import compute_record_digests
from fulcrum.data.records import ModelInputs, Records, map_inputs, select_rows
from fulcrum.engines.fast import add_contributions, clip_tape, make_ghost_step
from fulcrum.errors import ConfigError
from fulcrum.gradients.rounding import NormTable, SquaredNorms, to_norm_table
from fulcrum.privacy.events import Event
from fulcrum.training.client import (
    LocalStepTerms,
    StepFn,
    StepSample,
    compute_unit_gradients,
    make_materialised_step,
    train_client,
)
from fulcrum.training.clipped_sum import Contribution, compute_contribution
from fulcrum.training.engine import Engine
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Assignment, ClientReply, RoundRequest, RuleState, View

CANARY_KINDS = ("gradient", "example")
REACH = 4.0
"""The gradient of a canary is this many times as long as its bound."""


@dataclass(frozen=True, eq=False)
class Canaries:
    """The m canaries of a run. Secret until the run is over: whoever knows the coins needs no attack.

    first: the data set's row of the first canary; the others follow. party [m]: who holds it. included [m]: its coin.
    places [m, G] and signs [m, G]: the coordinate and the sign of its gradient in each clipping group; empty [m, 0] for
    canaries that are examples.
    """

    first: int
    party: Tensor
    included: Tensor
    places: Tensor
    signs: Tensor

    @property
    def are_gradients(self) -> bool:
        """Whether they contribute gradients of their own."""
        return self.places.shape[1] > 0

    def __len__(self) -> int:
        return len(self.party)

    def weigh(self, C: Tensor) -> Tensor:
        """What each canary adds to a sum of bounds C when it is sampled, at its places: [m, G].

        Where a rule clips in another basis, C has other groups, and all of it goes to the one coordinate.
        """
        C = C.to(self.signs)
        return self.signs * (C if len(C) == self.signs.shape[1] else torch.linalg.vector_norm(C))

    def project(self, total: Tensor, C: Tensor) -> Tensor:
        """A noised sum [d] along each canary's direction, in units of what it adds when it is sampled: float64 [m]."""
        weights = self.weigh(C.double().cpu())
        return (total.double().cpu()[self.places] * weights).sum(dim=1) / weights.square().sum(dim=1)


def draw_canaries(
    parties: Sequence[int], first: int, groups: Tensor, kind: str, generator: torch.Generator
) -> Canaries:
    """Canaries for these parties (one entry per canary). groups [d]: the clipping group of each coordinate.

    Canaries of one party have directions of their own as far as its groups have coordinates; so have those of different
    parties, as far as the model has.
    """
    if kind not in CANARY_KINDS:
        raise ConfigError(f"canaries of kind {kind!r} are not known; choose {' or '.join(CANARY_KINDS)}.")
    count, groups = len(parties), groups.cpu()
    included = torch.rand(count, generator=generator) < 0.5
    columns = []
    for group in range(int(groups.max()) + 1 if kind == "gradient" else 0):
        own = torch.nonzero(groups == group)[:, 0]
        most = int(torch.bincount(torch.tensor(list(parties))).max())
        if not groups.max() and most > len(own):
            raise ConfigError(
                f"{most} canaries per party need as many directions: the model has {len(own)} parameters."
            )
        order = own[torch.randperm(len(own), generator=generator)]
        columns.append(order[torch.arange(count) % len(own)])  # a layer may be smaller than the number of canaries
    shape = (count, len(columns))
    places = torch.stack(columns, dim=1) if columns else torch.zeros(shape, dtype=torch.int64)
    signs = torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
    return Canaries(first, torch.tensor(list(parties), dtype=torch.int64), included, places, signs)


# --- the records --------------------------------------------------------------------------------


def add_canary_records(
    dataset: Dataset, partition: Partition, parties: Sequence[int], generator: torch.Generator
) -> tuple[Dataset, Partition]:
    """The data set with one more record per entry of `parties` (ascending), each a unit of that party.

    Inputs come from public test records where there are any, else they are random; targets are drawn at random from
    the task's classes, or from the test records. Nothing is read from the training records but their shape and type.
    """
    count, records = len(parties), dataset.records
    if list(parties) != sorted(parties):
        raise ValueError("canaries must be given party by party")
    x, y = _draw_records(dataset, count, generator)
    extra = Records(
        x,
        y,
        None if records.person is None else int(records.person.max()) + 1 + torch.arange(count),
        None if records.party is None else torch.tensor(list(parties), dtype=records.party.dtype),
    )
    joined = Records(
        _join_inputs(records.x, extra.x),
        torch.cat([records.y, extra.y]),
        None if records.person is None else torch.cat([records.person, extra.person]),  # type: ignore[list-item]
        None if records.party is None else torch.cat([records.party, extra.party]),  # type: ignore[list-item]
    )
    changed = dataset.with_changes(x=joined.x, y=joined.y, person=joined.person, party=joined.party)
    if dataset.person_names:  # ids as text
        names = [f"canary {i}" for i in range(int(joined.person.max()) + 1 - len(dataset.person_names))]  # type: ignore[union-attr]
        changed = dataclasses.replace(changed, person_names=(*dataset.person_names, *names))
    if records.digests is not None:  # those of the records as they were loaded stay
        digests = torch.cat([records.digests, compute_record_digests(extra)])
        changed = dataclasses.replace(changed, train=dataclasses.replace(changed.records, digests=digests))
    owner = torch.tensor(list(parties), dtype=torch.int64)
    rows = [
        torch.cat([partition.indices(k), len(records) + torch.nonzero(owner == k)[:, 0]])
        for k in range(partition.parties)
    ]
    starts = torch.tensor([0, *(len(each) for each in rows)]).cumsum(0)
    return changed, Partition(torch.cat(rows), starts, partition.names)


def _draw_records(dataset: Dataset, count: int, generator: torch.Generator) -> tuple[ModelInputs, Tensor]:
    like, test = dataset.records, dataset.test
    if test is not None and len(test):
        rows = torch.randint(0, len(test), (count,), generator=generator)
        x, y = select_rows(test.x, rows), test.y[torch.randint(0, len(test), (count,), generator=generator)]
    else:

        def drawn(values: Tensor) -> Tensor:
            shape = (count, *values.shape[1:])
            if not values.is_floating_point():
                return torch.zeros(shape, dtype=values.dtype)
            return torch.randn(shape, generator=generator).to(values.dtype)

        x, y = map_inputs(drawn, like.x), torch.zeros((count, *like.y.shape[1:]), dtype=like.y.dtype)
    if dataset.task.classes and not y.is_floating_point() and y.ndim == 1:
        y = torch.randint(0, dataset.task.classes, (count,), generator=generator).to(like.y.dtype)
    return x, y.to(like.y.dtype)


def _join_inputs(one: ModelInputs, other: ModelInputs) -> ModelInputs:
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor)
        return torch.cat([one, other.to(one)])
    assert not isinstance(other, Tensor)
    return {name: torch.cat([value, other[name].to(value)]) for name, value in one.items()}


# --- the step -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseTape:
    """Gradients [b, d] with one number per clipping group: at places [b, G], with values [b, G]. No losses."""

    places: Tensor
    values: Tensor
    dim: int

    @property
    def losses(self) -> Tensor:
        return self.values.new_zeros(len(self.values))

    @property
    def positions(self) -> int:
        return 1

    def matrix(self) -> Tensor:
        return self.values.new_zeros(len(self.values), self.dim).scatter_(1, self.places, self.values)

    def norm_table(self, groups: tuple[int, ...] = ()) -> NormTable:
        squares = self.values.double().square()
        bounds = squares * (1 + 2.0**-50)
        return to_norm_table(SquaredNorms(squares, bounds, bounds), self.values.dtype)

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        return self.norm_table(groups).norms

    def dots(self, direction: Tensor) -> Tensor:
        return (direction[self.places] * self.values).sum(dim=1)

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = (), proven: bool = False) -> Tensor:
        kind = torch.float64 if proven else self.values.dtype
        added = (self.values.to(kind) * factors.to(kind)).flatten()
        return torch.zeros(self.dim, dtype=kind, device=added.device).index_add_(0, self.places.flatten(), added)


def make_canary_step(
    follow_with: StepFn, canaries: Canaries, problem: TrainingProblem, sampled: Tensor | None = None
) -> StepFn:
    """A step over samples that hold canaries. follow_with: the step for all other units (any engine's).

    sampled [m] int64: counts in place how often each canary was sampled, whether it is in or not.

    Rules that look at gradients in another basis, or at a whole batch, get every gradient written out.
    """
    included = canaries.included
    recorder = problem.make_recorder()

    def work(
        problem: TrainingProblem, sample: StepSample, view: View, state: RuleState, terms: LocalStepTerms
    ) -> Contribution:
        number = sample.rows - canaries.first  # of the canary, from 0; below 0 for other records
        theirs = number >= 0
        if not bool(theirs.any()):
            return follow_with(problem, sample, view, state, terms)
        if sampled is not None:
            sampled[number[theirs]] += 1
        active = number[theirs][included[number[theirs]]]
        if not canaries.are_gradients:
            stay = ~theirs | included[number.clamp_min(0)]
            return follow_with(problem, _select_rows(sample, stay), view, state, terms)
        others = _select_rows(sample, ~theirs)
        C = problem.rule.bounds(state).C
        values = (REACH * canaries.weigh(C.cpu())[active]).to(sample.theta)
        tape = SparseTape(canaries.places[active].to(problem.device), values, problem.layout.dim)
        if view.needs_gradients or not problem.rule.sound:
            return _clip_written_out(problem, others, tape, view, state, terms)
        given = follow_with(problem, others, view, state, terms)
        return add_contributions([given, clip_tape(problem, tape, sample.count, view, state, terms)])

    def _clip_written_out(
        problem: TrainingProblem,
        others: StepSample,
        tape: SparseTape,
        view: View,
        state: RuleState,
        terms: LocalStepTerms,
    ) -> Contribution:
        gradients, losses = compute_unit_gradients(problem, recorder, others)
        rows = tape.matrix() if view.axes is None else view.axes.inverse(tape.matrix())
        return compute_contribution(
            problem.rule,
            view,
            state,
            torch.cat([gradients, rows]),
            torch.cat([losses, tape.losses]),
            problem.coordinates,
            terms.sigma,
            terms.batch,
            lr=terms.lr,
            proven=problem.proven,
        )

    return work


def _select_rows(sample: StepSample, stay: Tensor) -> StepSample:
    """The sample without the units whose rows do not stay; the others are numbered again."""
    present = torch.zeros(sample.count, dtype=torch.bool)
    present[sample.slots[stay]] = True
    slots = (present.cumsum(0) - 1)[sample.slots[stay]]
    return dataclasses.replace(sample, rows=sample.rows[stay], slots=slots, count=int(present.sum()))


# --- the engine ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeenRelease:
    """One party's release in one round, as the server sees it: along each of the canaries' directions.

    projections [m] of all canaries (0 where they are examples). sampled [m]: in how many steps each was sampled, which
    the server does not see. sum_only: the server sees this only as part of the sum
    over the parties of the round, where it has this weight.
    """

    round: int
    client: int
    steps: int
    events: tuple[Event, ...]
    projections: Tensor
    sampled: Tensor
    sum_only: bool
    weight: float = 1.0


class CanaryEngine(Engine):
    """Trains clients one after the other, with canaries, and keeps what the server sees of them in `seen`.

    fast: by the step of the parallel engine (norms from the tape); else by the reference engine's.
    """

    def __init__(self, problem: TrainingProblem, canaries: Canaries, fast: bool = True) -> None:
        self.problem, self.canaries = problem, canaries
        make = make_ghost_step if fast else make_materialised_step
        self._sampled = torch.zeros(len(canaries), dtype=torch.int64)
        self._work = make_canary_step(make(problem.make_recorder()), canaries, problem, self._sampled)
        self.seen: list[SeenRelease] = []

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        """Replies in the order of the request."""
        for task, state in zip(request.assignments, request.states, strict=True):
            self._sampled.zero_()
            reply = train_client(self.problem, request, task, state, self._work)
            seen = look_at_reply(self.problem, self.canaries, request, task, state, reply)
            self.seen.append(dataclasses.replace(seen, sampled=self._sampled.clone()))
            yield reply


def look_at_reply(
    problem: TrainingProblem,
    canaries: Canaries,
    request: RoundRequest,
    task: Assignment,
    state: RuleState,
    reply: ClientReply,
) -> SeenRelease:
    """What a reply shows of the canaries: the noised sum that follows from the update and public numbers, projected."""
    alone = task.noise_parties == 1 and task.message is None
    projections = torch.zeros(len(canaries), dtype=torch.float64)
    if canaries.are_gradients:
        total = recover_noised_sum(problem, request, task, state, reply)
        projections = canaries.project(total, problem.rule.bounds(state).C)
    weight = 1.0 if task.message is None else task.message.weight
    unknown = torch.zeros(len(canaries), dtype=torch.int64)
    return SeenRelease(request.round, task.client, task.steps, reply.events, projections, unknown, not alone, weight)


def recover_noised_sum(
    problem: TrainingProblem, request: RoundRequest, task: Assignment, state: RuleState, reply: ClientReply
) -> Tensor:
    """The noised sum [d] (with several local steps: the sum of theirs) that an update shows, float64."""
    if task.message is not None:
        return reply.delta.double() * (reply.grid / task.message.weight)
    batch = task.rate * problem.party(task.client).units
    mean = reply.delta.double() / -task.lr - task.steps * request.weight_decay * request.params.double()
    view = problem.rule.view(state, request.round, request.rounds)
    if view.axes is not None:
        mean = (mean - task.steps * view.axes.centre.double()) / view.axes.scale.double()
    return mean * batch
