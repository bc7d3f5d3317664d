"""Measures a federation's mechanism from outside: what parties release of records that were made for it.

The records are such that a release shows who is in it: unit i has a feature of its own, so its gradient has directions
of its own. Five kinds of rounds are played with the federation's own engine, rule and plan, all at the same weights:

    loud    at the declared noise          what the server sees
    quiet   at a noise that is negligible  sums that can be read off: who was sampled, and how much each one added
    empty   at a rate of almost 0          noise alone
    steps   empty, with two local steps    noise alone, added up over the steps
    twice   quiet, with two small steps    who was sampled in both steps

All values are in units of what is charged: the sum over |C|, the statistics over their own bound. So no unit may move
either part by more than 1, and the noise has standard deviation sigma / sqrt(1 - s) and sigma / sqrt(s).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fulcrum.clipping.rule import gradient_multiplier
from fulcrum.data import Dataset, from_arrays, split
from fulcrum.engines import find_engine
from fulcrum.privacy.bounds import sanitise_bounds
from fulcrum.runs import prepare
from fulcrum.settings.schema import Data, Settings
from fulcrum.training.federation import Federation
from fulcrum.training.snapshot import make_first_snapshot
from fulcrum.types import Assignment, ClientReply, RoundRequest, RuleState

Floats = npt.NDArray[np.float64]
FEATURES, HIDDEN, CLASSES = 32, 6, 3
UNITS, PARTIES = 24, 2
QUIET_SIGMA = 1e-4
EMPTY_RATE = 1e-9
SMALL_STEP = 1e-3
"""The learning rate of two steps at almost the same weights."""
SIZES = (30.0, 3.0, 200.0, 0.5)
"""Sizes of the records in turn: most gradients are clipped, a few are not."""
OTHER_C = 0.4
"""Every other round uses C times this, as if the rule had adapted it."""


def make_model(seed: int = 0) -> nn.Module:
    """A network of two layers whose gradients never vanish; its weights are public and fixed."""
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LeakyReLU(0.3), nn.Linear(HIDDEN, CLASSES))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # Large weights above small ones: most of a gradient is in the first layer, where each unit has its own place.
        for parameter, size in zip(model.parameters(), (0.2, 0.2, 1.5, 0.2), strict=True):
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model


def make_records(model: nn.Module, parties: int, persons: bool) -> dict[str, Tensor]:
    """x, y, unit, person and party of the records: unit i has feature i; its label is the least likely one."""
    copies = 2 if persons else 1
    unit = torch.arange(UNITS).repeat(parties).repeat_interleave(copies)
    party = torch.arange(parties).repeat_interleave(UNITS * copies)
    sizes = torch.tensor(SIZES)[(unit + party) % len(SIZES)]
    sizes[copies - 1 :: copies] *= 1.0 if copies == 1 else -0.7
    x = torch.zeros(len(unit), FEATURES)
    x[torch.arange(len(unit)), unit] = sizes
    with torch.no_grad():
        y = model(x).argmin(dim=1)
    return {"x": x, "y": y, "unit": unit, "party": party, "person": unit + UNITS * party}


def make_dataset(records: Mapping[str, Tensor], party: Tensor, persons: bool, public: bool = True) -> Dataset:
    """The data set of these records; party [n]: who holds each of them."""
    named = [f"p{int(k)}" for k in party.tolist()]
    names = list(dict.fromkeys(named))
    given: dict[str, Any] = {"person": records["person"]} if persons else {}
    numbers = torch.tensor([names.index(name) for name in named])
    return from_arrays(
        records["x"],
        records["y"],
        records["x"][:6],
        torch.arange(6) % CLASSES,
        party=numbers,
        party_names=names,
        classes=CLASSES,
        public=public,
        name="probe",
        **given,
    )


def prepare_probe(settings: Settings, rounds: int, parties: int = PARTIES, seed: int = 0) -> Federation:
    """The federation of these settings over the probe's records; its plan is for `rounds` rounds of one step."""
    model, persons = make_model(), settings.privacy.unit == "person"
    records = make_records(model, parties, persons)
    changed = settings.replace(
        data={"source": "probe", "parties": parties, "partition": "auto", "min_examples": 1, "validation": 0.0},
        train={"rounds": rounds, "steps": 1, "epochs": 0.0, "participation": 1.0},
        privacy={"evaluation_epsilon": None, "seed": seed, "max_participations": 0},
        run={"seed": seed, "ledger": "", "diagnostics": False},
    )
    return prepare(changed, make_dataset(records, records["party"], persons), model)


@dataclass(frozen=True)
class Terms:
    """A party's declared numbers of one release. deviations [m]: of the noise in each released number."""

    rate: float
    sigma: float
    batch: float
    asked: bool
    deviations: Floats


@dataclass(frozen=True)
class Releases:
    """Released vectors [N, m] in units of the charge, with the place and the declared terms of each.

    places: (source, round, party). state: which of the probe's states of the rule each has.
    """

    values: Floats
    places: tuple[tuple[int, int, int], ...]
    terms: tuple[Terms, ...]
    states: tuple[int, ...]

    def pick(self, chosen: Sequence[int]) -> Releases:
        """Some of them."""
        return Releases(
            self.values[list(chosen)],
            tuple(self.places[i] for i in chosen),
            tuple(self.terms[i] for i in chosen),
            tuple(self.states[i] for i in chosen),
        )


NOTHING = Releases(np.zeros((0, 0)), (), (), ())


@dataclass(frozen=True)
class Probe:
    """What was measured. units: contribution of each unit alone, by state and party: [states][parties][n, m].

    gradient: how many of the m numbers are the sum's; the others are statistics. alone: the expected batch with which
    units were measured alone. tensors: numbers of elements of the model's parameter tensors.
    """

    federation: Federation
    names: tuple[str, ...]
    gradient: int
    units: tuple[tuple[Floats, ...], ...]
    loud: Releases
    quiet: Releases
    empty: Releases
    steps: Releases
    tensors: tuple[int, ...]
    alone: float = 1.0
    twice: Releases = NOTHING


Row = tuple[Floats, tuple[int, int], Terms, int, int]
"""A release in units of the charge, its (round, party), its terms, and the numbers of its source and state."""


class Player:
    """Plays rounds of a federation's engine at fixed weights and fixed states of the rule."""

    def __init__(self, federation: Federation, states: Sequence[RuleState]) -> None:
        self.federation, self.states = federation, tuple(states)
        self.params = make_first_snapshot(federation).params

    def play(self, t: int, tasks: Sequence[Assignment], state: int, source: int = 0, attempt: int = 0) -> list[Row]:
        """The releases of one round: each party's vector [m] in units of the charge."""
        federation = self.federation
        rounds, rule_state = federation.settings.train.rounds, self.states[state]
        request = RoundRequest(
            t,
            rounds,
            self.params,
            tuple(tasks),
            (rule_state,) * len(tasks),
            federation.settings.train.weight_decay,
            attempt,
        )
        replies = list(federation.engine.run(request))
        return [(*self.read(t, task, reply, state), source, state) for task, reply in zip(tasks, replies, strict=True)]

    def read(self, t: int, task: Assignment, reply: ClientReply, state: int) -> tuple[Floats, tuple[int, int], Terms]:
        """A reply as numbers in units of the charge, and what is declared of it."""
        return read_reply(self.federation, t, task, reply, self.params, self.states[state])


def read_reply(
    federation: Federation, t: int, task: Assignment, reply: ClientReply, params: Tensor, rule_state: RuleState
) -> tuple[Floats, tuple[int, int], Terms]:
    """A reply as numbers in units of the charge, its (round, party), and what is declared of it.

    params [d], rule_state: what the reply was made with.
    """
    problem, rule = federation.problem, federation.problem.rule
    view = rule.view(rule_state, t, federation.settings.train.rounds)
    bounds = sanitise_bounds(rule, rule.bounds(rule_state))
    batch = task.rate * problem.party(task.client).units
    gradient = -reply.delta.double() / task.lr
    decay = federation.settings.train.weight_decay
    if decay:
        gradient = gradient - decay * params.double()
    if view.axes is not None:
        gradient = (gradient - task.steps * view.axes.centre.double()) / view.axes.scale.double()
    reach = float(torch.linalg.vector_norm(bounds.C.double()))
    total = gradient.cpu().numpy() * batch / reach
    limit, asked = float(bounds.extra), task.asks_statistics(t, 0)
    extra = reply.extra.double().cpu().numpy() * batch / limit if limit > 0 else np.zeros(0)
    share = rule.share(task.sigma, batch)
    on_sum = gradient_multiplier(rule.share, task.sigma, batch) * math.sqrt(task.steps / task.noise_parties)
    on_extra = task.sigma / math.sqrt(share) if share > 0 and asked else 0.0
    deviations = np.concatenate([np.full(len(total), on_sum), np.full(len(extra), on_extra)])
    terms = Terms(task.rate, task.sigma, batch, asked, deviations)
    return np.concatenate([total, extra]), (t, task.client), terms


def gather(rows: Sequence[Row]) -> Releases:
    """Releases from what `Player.play` returned."""
    return Releases(
        np.stack([row[0] for row in rows]),
        tuple((row[3], *row[1]) for row in rows),
        tuple(row[2] for row in rows),
        tuple(row[4] for row in rows),
    )


def list_states(federation: Federation) -> tuple[RuleState, ...]:
    """The rule's first state, and the same with another C."""
    first = make_first_snapshot(federation).rule
    return first, {**first, "C": first["C"] * OTHER_C}


def measure_units(federation: Federation, states: Sequence[RuleState]) -> tuple[tuple[Floats, ...], ...]:
    """What each unit adds to a release when it is alone: a party of one unit each, always sampled, without noise."""
    settings, model = federation.settings, federation.problem.model
    persons = settings.privacy.unit == "person"
    records = make_records(make_model(), federation.plan.parties, persons)
    alone = make_dataset(records, records["person"], persons)
    count = federation.plan.parties * UNITS
    parts = split(alone, Data(parties=count, partition="given", min_examples=1), 0)
    problem = dataclasses.replace(federation.problem, dataset=alone, partition=parts, model=model)
    made = dataclasses.replace(federation, problem=problem, engine=find_engine(settings.run.engine, problem))
    player = Player(made, states)
    tasks = [Assignment(k, 1.0, QUIET_SIGMA, 1, 1.0) for k in range(count)]
    found = []
    for state in range(len(states)):
        values = gather(player.play(0, tasks, state)).values
        found.append(tuple(values.reshape(federation.plan.parties, UNITS, -1)))
    return tuple(found)


def measure(settings: Settings, loud: int = 24, quiet: int = 40, empty: int = 10, seed: int = 0) -> Probe:
    """Play the probe's rounds under these settings: so many of each kind."""
    federation = prepare_probe(settings, max(loud, quiet), seed=seed)
    states = list_states(federation)
    player, plan = Player(federation, states), federation.plan
    names = tuple(map(plan.name, range(plan.parties)))
    clients = list(range(plan.parties))

    def tasks(t: int, **changes: float) -> list[Assignment]:
        return [dataclasses.replace(task, **changes) for task in plan.assignments(clients, t, 1.0)]  # type: ignore[arg-type]

    rows_loud = [row for t in range(loud) for row in player.play(t, tasks(t), t % 2)]
    rows_quiet = [row for t in range(quiet) for row in player.play(t, tasks(t, sigma=QUIET_SIGMA), 0)]
    rows_empty = [row for t in range(empty) for row in player.play(t, tasks(t, rate=EMPTY_RATE), t % 2)]
    rows_steps = [row for t in range(empty // 2) for row in player.play(t, tasks(t, rate=EMPTY_RATE, steps=2), 0)]
    rows_twice = [
        row for t in range(quiet // 2) for row in player.play(t, tasks(t, sigma=QUIET_SIGMA, steps=2, lr=SMALL_STEP), 0)
    ]
    if federation.problem.rule.when == "step":  # its C moves between the steps
        rows_steps, rows_twice = [], []
    units = measure_units(federation, states)
    layout = federation.problem.layout
    return Probe(
        federation,
        names,
        layout.dim,
        units,
        gather(rows_loud),
        gather(rows_quiet),
        gather(rows_empty),
        gather(rows_steps) if rows_steps else NOTHING,
        tuple(layout.sizes),
        twice=gather(rows_twice) if rows_twice else NOTHING,
    )


def measure_other_runs(settings: Settings, rounds: int = 4) -> Releases:
    """Empty rounds of runs that must not share their noise: another epsilon's, other records', another seed's.

    Source i is run i. All of them are prepared as a user would.
    """
    rows = []
    changes: tuple[dict[str, dict[str, float]], ...] = (
        {},
        {"train": {"lr": settings.train.lr * 1.5}},
        {"clip": {"C0": settings.clip.C0 * 1.25}},
    )
    for source, change in enumerate(changes):
        made = prepare_probe(settings.replace(**change), rounds)
        rows += _play_empty(made, rounds, source)
    rows += _play_empty(prepare_probe(settings, rounds, seed=1), rounds, len(changes))
    return gather(rows)


def _play_empty(federation: Federation, rounds: int, source: int) -> list[Row]:
    player, plan = Player(federation, list_states(federation)), federation.plan
    clients = range(plan.parties)
    return [
        row
        for t in range(rounds)
        for row in player.play(
            t,
            [dataclasses.replace(task, rate=EMPTY_RATE) for task in plan.assignments(clients, t, 1.0)],
            0,
            source,
        )
    ]
