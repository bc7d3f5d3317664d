"""How long a run will take on this machine: its own engine and its own loop, on made-up records, timed after warm-up.

Local steps are timed with the run's engine: one step of the parties of a typical round, or of fewer parties or a part
of the batch where that would take long; the time is scaled by the expected number of units. The rest of a round is
timed in `training.loop` with replies at hand: reservation in a ledger, aggregation, the rule, settlement.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fulcrum.engines import choose_engine, find_engine
from fulcrum.privacy.ledger import Ledger
from fulcrum.runs.forecast.made_up import make_up_federation, make_up_records
from fulcrum.settings.derived import compute_learning_rate, count_evaluations
from fulcrum.training.client_level import make_local_problem
from fulcrum.training.engine import Engine
from fulcrum.training.evaluate import evaluate_model
from fulcrum.training.federation import Federation
from fulcrum.training.loop import federate
from fulcrum.training.round import plan_round_events
from fulcrum.training.snapshot import make_first_snapshot
from fulcrum.types import Assignment, ClientReply, RoundRequest, RuleState

STEP_SECONDS = 1.0
"""Seconds that a timed step of all its parties may take: work is added while it is expected to stay below."""
TIMED_SECONDS, MAX_TIMED = 0.7, 20
"""Steps, and rounds, are timed until they took so long together, or are so many; each at least twice."""
FIRST_UNITS, PROVEN_UNITS = 2, 32
"""Units in the smallest step that is tried; in proven arithmetic every pass has at least so many."""
GROWTH = 4
"""Each try has at most so many times the work of the one before."""
SECOND_TRY = 4
"""The second try may be expected to take so many times longer: two sizes show what a step takes whatever its units."""
LEAST_SLOPE = 0.1
"""Further units cost at least this share of what the timed ones took: two times that are close say little."""
MAX_PARTIES = 500
"""Parties that reserve and reply in a timed round; the time of more is scaled."""
EVALUATED_RECORDS = 1000
"""Records that are scored to time an evaluation; the time of more is scaled."""


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds on this machine. total = start + rounds * per_round + evaluations * per_evaluation.

    training: part of per_round that local steps take; the rest is the ledger, aggregation and the rule. start: what
    the first round takes longer. engine, workers, device: what was timed. timed: how, in words. Not in it: loading
    the data before, checkpoints, and the statement at the end.
    """

    total: float
    rounds: int
    per_round: float
    training: float
    start: float
    evaluations: int
    per_evaluation: float
    engine: str
    workers: int
    device: str
    timed: str


def estimate_time(federation: Federation) -> TimeEstimate:
    """Time a federation of the same shape over made-up records; takes seconds. Nothing of the run's data is read."""
    dry = make_up_federation(federation)
    inner = find_engine(federation.settings.run.engine, make_local_problem(dry.problem))
    steps = time_steps(dry, inner)
    rest = time_rounds(replace(dry, engine=ReplyEngine(dry, steps.reply)))
    scored = time_evaluation(federation, dry)
    rounds, evaluations = federation.settings.train.rounds, count_evaluations(federation.settings)
    training = steps.seconds_per_unit * count_expected_units(federation)
    per_round = training + rest.each
    start = rest.first + steps.first
    return TimeEstimate(
        total=start + rounds * per_round + evaluations * scored,
        rounds=rounds,
        per_round=per_round,
        training=training,
        start=start,
        evaluations=evaluations,
        per_evaluation=scored,
        engine=choose_engine(federation.settings.run.engine, federation.problem),
        workers=getattr(inner, "workers", 1),
        device=describe_device(federation.problem.device),
        timed=steps.words,
    )


def describe_device(device: torch.device) -> str:
    """The device in words: cpu, or the name of a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def count_expected_units(federation: Federation) -> float:
    """Units in all local steps of all parties of a round, on average."""
    plan = federation.plan
    tasks = [_local_task(federation, int((plan.group_of == n).argmax())) for n in range(len(plan.groups))]
    work = [task.steps * task.rate for task in tasks]
    each = sum(w * float(plan.sizes[plan.group_of == n].sum()) for n, w in enumerate(work))
    return federation.settings.train.participation * each


def _local_task(federation: Federation, k: int) -> Assignment:
    return federation.plan.assignment(k, 0, compute_learning_rate(federation.settings.train, 0))


# --- local steps ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTimes:
    """seconds_per_unit: of a local step, the parties of a round together. first: what the first step took longer.

    reply: one of the replies. words: what was timed.
    """

    seconds_per_unit: float
    first: float
    reply: ClientReply
    words: str


def time_steps(dry: Federation, engine: Engine) -> StepTimes:
    """Times local steps of a typical round with the engine, as many parties and units at a time as are fast enough."""
    trial = StepTrial.of(dry, engine)
    part, smaller = trial.start, None
    began = trial.play(part).seconds  # warms up
    while True:
        last = trial.play(part)
        larger = trial.grow(part)
        limit = STEP_SECONDS if smaller else SECOND_TRY * STEP_SECONDS
        if larger is None or last.seconds * trial.count(larger) / trial.count(part) > limit:
            break
        smaller = (part, last.seconds)
        part = larger
        trial.play(part)  # a new shape warms up
    seconds = [last.seconds]
    while len(seconds) < 2 or (len(seconds) < MAX_TIMED and sum(seconds) < TIMED_SECONDS):
        seconds.append(trial.play(part).seconds)
    each = trial.extrapolate(part, statistics.median(seconds), smaller)
    first = max(0.0, began - each * trial.count(trial.start))
    return StepTimes(each, first, last.replies[0], f"{len(seconds)} steps{trial.describe(part)}")


@dataclass(frozen=True)
class StepPart:
    """One step of so many parties, of at most so many expected units each."""

    parties: int
    units: float


@dataclass(frozen=True)
class PlayedStep:
    """The replies to one step, and how many seconds it took."""

    seconds: float
    replies: list[ClientReply]


@dataclass(frozen=True)
class StepTrial:
    """Local steps of the parties that a round invites on average, at equal distances. tasks: theirs, one step each.

    batches: their expected units. state: with which they clip.
    """

    dry: Federation
    engine: Engine
    params: torch.Tensor
    state: RuleState
    tasks: tuple[Assignment, ...]
    batches: tuple[float, ...]

    @staticmethod
    def of(dry: Federation, engine: Engine) -> StepTrial:
        """The trial of a federation's first round."""
        plan, snapshot = dry.plan, make_first_snapshot(dry)
        typical = max(1, min(plan.parties, round(dry.settings.train.participation * plan.parties)))
        tasks = [replace(_local_task(dry, i * plan.parties // typical), steps=1) for i in range(typical)]
        state: RuleState = snapshot.rule
        if plan.central:  # parties do not clip
            state = {"C": torch.full((1,), torch.inf, device=dry.problem.device)}
        batches = tuple(task.rate * float(plan.sizes[task.client]) for task in tasks)
        return StepTrial(dry, engine, snapshot.params, state, tuple(tasks), batches)

    @property
    def start(self) -> StepPart:
        """The smallest step that is tried: as many parties as train at a time, with few units each."""
        workers = int(getattr(self.engine, "workers", 1))
        units = PROVEN_UNITS if self.dry.problem.proven else FIRST_UNITS
        return StepPart(min(len(self.tasks), workers), float(units))

    def grow(self, part: StepPart) -> StepPart | None:
        """More units of each party, or more parties where these are all; None where there are no more."""
        if part.units < max(self.batches):
            return StepPart(part.parties, part.units * GROWTH)
        if part.parties < len(self.tasks):
            return StepPart(min(len(self.tasks), part.parties * GROWTH), part.units)
        return None

    def choose(self, part: StepPart) -> list[int]:
        """The places of the parties in a part."""
        return [i * len(self.tasks) // part.parties for i in range(part.parties)]

    def count(self, part: StepPart) -> float:
        """Expected units of a part."""
        return sum(min(self.batches[i], part.units) for i in self.choose(part))

    def extrapolate(self, part: StepPart, seconds: float, smaller: tuple[StepPart, float] | None) -> float:
        """Seconds per unit of a whole step of these parties, from those of a part and of a smaller one.

        A step takes some time whatever its units, so units that were left out count by the slope between both.
        """
        done, whole = self.count(part), self.count(replace(part, units=max(self.batches)))
        slope = seconds / done
        if smaller is not None and smaller[0].parties == part.parties:
            rise = (seconds - smaller[1]) / (done - self.count(smaller[0]))
            slope = min(max(rise, LEAST_SLOPE * slope), slope)
        return (seconds + slope * (whole - done)) / whole

    def describe(self, part: StepPart) -> str:
        """What of a round's step a part leaves out."""
        words = f" of {part.parties} of {len(self.tasks)} parties" if part.parties < len(self.tasks) else ""
        most = max(self.batches)
        return words + ("" if part.units >= most else f" with {part.units:g} of {most:.0f} units each")

    def play(self, part: StepPart) -> PlayedStep:
        """Trains one step of a part with the engine."""
        chosen = self.choose(part)
        shares = [min(1.0, part.units / self.batches[i]) for i in chosen]
        tasks = tuple(
            replace(self.tasks[i], rate=self.tasks[i].rate * share) for i, share in zip(chosen, shares, strict=True)
        )
        train, device = self.dry.settings.train, self.dry.problem.device
        request = RoundRequest(0, train.rounds, self.params, tasks, (self.state,) * len(tasks), train.weight_decay)
        began = time.perf_counter()
        replies = list(self.engine.run(request))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return PlayedStep(time.perf_counter() - began, replies)


# --- the rest of a round ----------------------------------------------------------------------------


class ReplyEngine(Engine):
    """Answers every assignment at once, with an update of zeros and the events that were planned."""

    def __init__(self, federation: Federation, like: ClientReply) -> None:
        self.plan, self.like = federation.plan, like
        self.scale = 1.0

    def list_reachable_clients(self, clients: Sequence[int]) -> Sequence[int]:
        """At most MAX_PARTIES; all of them where they share one noise vector."""
        most = max(MAX_PARTIES, self.plan.colluders + 1)
        kept = clients if self.plan.shares_noise else clients[:most]
        self.scale = len(clients) / max(1, len(kept))
        return kept

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        """Replies, one per assignment, in order."""
        clients = [task.client for task in request.assignments]
        events = {} if self.plan.central else plan_round_events(self.plan, clients, request.round)
        nothing = torch.zeros_like(self.like.delta), torch.zeros_like(self.like.extra)
        for k, state in zip(clients, request.states, strict=True):
            yield ClientReply(k, *nothing, events.get(k, self.like.events), state, self.like.diagnostics)


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a round without local steps; first: what the first one took longer."""

    each: float
    first: float


def time_rounds(dry: Federation) -> RoundTimes:
    """Times rounds of the loop, with a ledger in a temporary folder, where the engine answers at once."""
    found: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="fulcrum-plan-") as folder,
        Ledger.open(Path(folder) / "ledger.sqlite") as ledger,
    ):
        for result, _ in federate(dry, ledger, "dry-run"):
            found.append(result.seconds)
            if len(found) > MAX_TIMED or (len(found) > 2 and sum(found[1:]) > TIMED_SECONDS):
                break
    if not found:
        return RoundTimes(0.0, 0.0)
    steady = statistics.median(found[1:] or found)
    scale = dry.engine.scale if isinstance(dry.engine, ReplyEngine) else 1.0
    return RoundTimes(steady * scale, max(0.0, found[0] - steady))


def time_evaluation(federation: Federation, dry: Federation) -> float:
    """Seconds of scoring all test (or held-out) records once; 0 where there are none."""
    data = federation.problem.dataset
    scored = data.held_out if federation.evaluation is not None else data.test
    if scored is None or not len(scored):
        return 0.0
    public = data.public or federation.evaluation is None
    few = make_up_records(scored, min(len(scored), EVALUATED_RECORDS), dry.problem.model, public)
    problem = replace(dry.problem, dataset=replace(dry.problem.dataset, test=few))
    params = make_first_snapshot(dry).params
    evaluate_model(problem, params)
    began = time.perf_counter()
    evaluate_model(problem, params)
    return (time.perf_counter() - began) * len(scored) / len(few)
