"""An audit in the run itself: canaries among each party's units, and bounds from what the server sees.

    audited = add_canaries(fulcrum.runs.prepare(settings), per_party=200)
    result, audit = run_audit(audited, out)

The canaries are units: n_k is larger by them, the sampling rate follows from the batch as always, they are clipped and
paid for as all others. The model is trained with their noise in it, so an audited run is for the audit.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fulcrum.analysis.audit.bounds import (
    BoolVector,
    GuessPlan,
    LowerBound,
    bound_by_known_samples,
    bound_by_noise_fit,
    bound_by_one_run,
    bound_by_one_run_fdp,
    guess_by_scores,
    plan_guesses,
    score_likelihood,
)
from fulcrum.analysis.audit.curves import FloatVector, NoiseFamily, make_poisson_family
from fulcrum.analysis.audit.outcome import Audit, Measured, conclude
from fulcrum.data import count_units_per_party
from fulcrum.engines.canaries import Canaries, CanaryEngine, SeenRelease, add_canary_records, draw_canaries
from fulcrum.errors import ConfigError
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.plan import make_plan
from fulcrum.rng import torch_generator
from fulcrum.runs.execution import execute
from fulcrum.runs.folder import to_json_text, write_file_atomically
from fulcrum.runs.observers import Observer
from fulcrum.runs.result import Result
from fulcrum.training.federation import Federation
from fulcrum.training.problem import TrainingProblem, get_private_seed
from fulcrum.types import RoundResult

VIEWS = {
    "gradient": "white-box: the server sees every party's release in every round, along the canaries' directions",
    "example": "black-box: the first and the final model alone; score: how much the canary's loss fell",
}
FIT_CANARIES = 40
"""The fewest canaries of a party whose noise is fitted."""


@dataclass(frozen=True)
class AuditedFederation:
    """A federation with canaries, ready to run; its engine keeps what the server sees."""

    federation: Federation
    engine: CanaryEngine
    canaries: Canaries
    kind: str


def add_canaries(
    federation: Federation, per_party: int, kind: str = "gradient", fast: bool | None = None
) -> AuditedFederation:
    """The federation with `per_party` canaries among the units of every party; its plan is made anew.

    kind: "gradient" or "example". fast: the step of the parallel engine, or of the reference engine; None: as
    run.engine says. Raises ConfigError where there is nothing to audit: no noise, unit client, or an
    engine without canaries.
    """
    settings, problem = federation.settings, federation.problem
    if federation.plan.central is not None:
        raise ConfigError(
            'fulcrum audit knows privacy.unit = "example" and "person"; at unit client it has no canaries.'
        )
    if not federation.plan.private:
        raise ConfigError("the run has no noise, so it claims no epsilon that could be audited; set --epsilon.")
    if settings.run.engine == "stacked":  # auto trains with the parallel engine's step, on any device
        raise ConfigError('run.engine = "stacked" has no canaries; audit with auto, parallel or reference.')
    if per_party < 1:
        raise ConfigError(f"--canaries {per_party} must be at least 1 per party.")
    generator = make_canary_generator(settings.privacy.randomness, get_private_seed(settings))
    parties = [k for k in range(federation.plan.parties) for _ in range(per_party)]
    first = len(problem.dataset.records)
    canaries = draw_canaries(parties, first, problem.coordinates, kind, generator)
    dataset, partition = add_canary_records(problem.dataset, problem.partition, parties, generator)
    units = count_units_per_party(dataset, partition, settings.privacy.unit)
    plan = make_plan(settings, partition, units, problem.rule)
    own = TrainingProblem.of(settings, dataset, partition, problem.model, problem.device, rule=problem.rule)
    engine = CanaryEngine(own, canaries, settings.run.engine != "reference" if fast is None else fast)
    changed = dataclasses.replace(federation, problem=own, plan=plan, engine=engine)
    return AuditedFederation(changed, engine, canaries, kind)


def make_canary_generator(randomness: str, seed: int) -> torch.Generator:
    """Coins and directions: from the operating system where randomness is secure, else from the run's seed."""
    if randomness == "secure":
        return torch.Generator().manual_seed(secrets.randbits(63))
    return torch_generator(seed, "canaries")


# --- after the run ------------------------------------------------------------------------------


class LastWeights(Observer):
    """Keeps the released model [d] of the last round, in the coordinates in which the run trains."""

    def __init__(self) -> None:
        self.weights: Tensor | None = None

    def round(self, result: RoundResult) -> None:
        """After each round."""
        self.weights = result.averaged


def run_audit(
    audited: AuditedFederation,
    out: Path | str | None = None,
    observers: Sequence[str | Observer] = (),
    confidence: float = 0.95,
) -> tuple[Result, Audit]:
    """Train to the end and measure. With `out`, the run's folder is there, and audit.json in it."""
    last = LastWeights()
    result = execute(audited.federation, out, facts={"audit": audited.kind}, observers=[*observers, last])
    audit = measure_run(audited, result, last.weights, confidence)
    if result.folder is not None:
        write_file_atomically(result.folder / "audit.json", to_json_text(audit.to_json()).encode())
    return result, audit


def measure_run(
    audited: AuditedFederation, result: Result, weights: Tensor | None = None, confidence: float = 0.95
) -> Audit:
    """The bounds of every party: from what the engine saw, or by the models alone for canaries that are examples.

    result: of `execute`, whose epsilons are the ledger's. weights [d]: the final model, for canaries that are examples.
    """
    federation, canaries = audited.federation, audited.canaries
    plan, included = federation.plan, canaries.included.numpy()
    owner, families = canaries.party.numpy(), FamilyCache()
    losses = None if canaries.are_gradients or weights is None else score_examples(audited, weights)
    entries: list[Measured] = []
    pooled: list[CanaryView] = []
    for k in range(plan.parties):
        mine = owner == k
        view = collect_view(audited.engine.seen, k, mine, included[mine])
        pooled.append(view if losses is None else dataclasses.replace(view, scores=losses[mine]))
        entries.append(make_entry(plan.name(k), result.epsilons[k], pooled[-1], result.delta, families))
    if plan.parties > 1 and len({view.events for view in pooled}) == 1:
        # Concluded with the others: the verdict is one, at one level.
        entries.append(make_entry("all parties", max(result.epsilons), join_views(pooled), result.delta, families))
    concluded = conclude(entries, confidence)
    parties = concluded[: plan.parties]
    together = concluded[-1] if len(concluded) > plan.parties else None
    return Audit(
        VIEWS[audited.kind],
        audited.kind,
        result.delta,
        confidence,
        tuple(parties),
        together,
        notes=list_notes(audited),
        facts={
            "canaries": len(canaries),
            "included": int(included.sum()),
            "parameters": federation.problem.layout.dim,
            "units": [int(plan.units(k)) for k in range(plan.parties)],
            "rounds": federation.settings.train.rounds,
            "step": "reference" if federation.settings.run.engine == "reference" else "ghost norms (parallel, auto)",
        },
    )


def list_notes(audited: AuditedFederation) -> tuple[str, ...]:
    """What a reader must know about an audited run."""
    notes = [
        "canaries count as units: rate and claimed epsilon are those of the run with them",
        "a bound far below the claim says nothing; a bound above it is a contradiction",
    ]
    if any(seen.sum_only for seen in audited.engine.seen):
        notes.append("the server sees the sum over the parties only, so only that was used")
    return tuple(notes)


class FamilyCache:
    """Families and plans of guesses by events: parties with equal terms share their curves."""

    def __init__(self) -> None:
        self._families: dict[tuple[Gaussian, ...], NoiseFamily] = {}
        self._plans: dict[tuple[int, tuple[Gaussian, ...], float], GuessPlan] = {}

    def family(self, events: tuple[Gaussian, ...]) -> NoiseFamily:
        """The family Poisson(q, sigma')^T of the events."""
        if events not in self._families:
            self._families[events] = make_poisson_family(events)
        return self._families[events]

    def plan(self, canaries: int, events: tuple[Gaussian, ...], confidence: float) -> GuessPlan:
        """How many guesses to make."""
        key = (canaries, events, confidence)
        if key not in self._plans:
            self._plans[key] = plan_guesses(canaries, events, confidence)
        return self._plans[key]


@dataclass(frozen=True)
class CanaryView:
    """What is known of m canaries after a run with T releases.

    projections [m, T]; sampled [m, T]: in how many of a release's steps the canary was sampled, which its party alone
    knows (None: unknown); included [m]; events: the claim, T of them in order; steps: how many of them are seen as one
    sum. scores [m]: of examples, by the models; None: by projections.
    """

    projections: FloatVector
    sampled: FloatVector | None
    included: BoolVector
    events: tuple[Gaussian, ...]
    steps: int = 1
    scores: FloatVector | None = None


def join_views(views: Sequence[CanaryView]) -> CanaryView:
    """The canaries of parties with the same events as one."""
    scores = None if views[0].scores is None else np.concatenate([v.scores for v in views if v.scores is not None])
    return CanaryView(
        np.concatenate([view.projections for view in views]),
        np.concatenate([view.sampled for view in views if view.sampled is not None]),
        np.concatenate([view.included for view in views]),
        views[0].events,
        views[0].steps,
        scores,
    )


def make_entry(name: str, claimed: float, view: CanaryView, delta: float, families: FamilyCache) -> Measured:
    """One entry of the audit: all bounds that its view allows."""
    events, included = view.events, view.included
    scores = score_likelihood(view.projections, events) if view.scores is None else view.scores

    def bound(confidence: float) -> tuple[LowerBound, ...]:
        guesses = guess_by_scores(scores, included, families.plan(len(scores), events, confidence))
        family = families.family(events)
        found = [
            bound_by_one_run_fdp(guesses, family, delta, confidence),
            bound_by_one_run(guesses, delta, confidence),
        ]
        if view.scores is None and len(scores) >= FIT_CANARIES:
            fit = bound_by_noise_fit(view.projections, included, events, delta, confidence)
            found = [fit, *found]
            if view.sampled is not None:
                taken = view.projections, view.sampled
                known = bound_by_known_samples(*taken, included, events, delta, confidence, view.steps)
                found = [known, *found]
        return tuple(found)

    releases = sum(event.count for event in events)
    return Measured(name, claimed, len(included), int(included.sum()), releases, bound, find_point(scores, included))


def find_point(scores: FloatVector, included: BoolVector) -> tuple[float, float] | None:
    """Rates of false and true positives where the tenth of canaries with the highest scores is called in."""
    members, others = int(included.sum()), int((~included).sum())
    if not members or not others:
        return None
    called = np.argsort(-scores, kind="stable")[: max(1, len(scores) // 10)]
    hits = int(included[called].sum())
    return (len(called) - hits) / others, hits / members


def collect_view(seen: Sequence[SeenRelease], client: int, mine: BoolVector, included: BoolVector) -> CanaryView:
    """One party's releases along its own canaries' directions, and what they were made of.

    Where a round has several local steps the server sees the sum of their releases; each gets its part of it. Where the
    server sees the sum over the parties alone, that sum is used.
    """
    columns: list[Tensor] = []
    sampled: list[Tensor] = []
    events: list[Gaussian] = []
    steps = next((one.steps for one in seen if one.client == client), 1)
    chosen = torch.from_numpy(mine)
    for one in seen:
        if one.client != client:
            continue
        total = one.projections[chosen]
        if one.sum_only:
            others = [each for each in seen if each.round == one.round and each.client != client]
            total = total + sum(each.projections[chosen] * (each.weight / one.weight) for each in others)
        for event in one.events:
            if isinstance(event, Gaussian):
                events += [event.with_count(1)] * event.count
        columns += [total / one.steps] * one.steps
        sampled += [one.sampled[chosen].double() / one.steps] * one.steps
    if len(columns) != len(events) or not events:
        raise ConfigError("a party released nothing, or something without noise, so there is no claim to audit.")
    values, taken = (torch.stack(each, dim=1).double().numpy() for each in (columns, sampled))
    return CanaryView(values, taken, included, tuple(events), steps)


def score_examples(audited: AuditedFederation, end: Tensor) -> FloatVector:
    """How much each canary's loss fell from the first model to the final one: [m]."""
    problem = audited.federation.problem
    rows = audited.canaries.first + torch.arange(len(audited.canaries))
    records = problem.dataset.records.take(rows)
    recorder = problem.make_recorder()
    start = problem.layout.flatten(problem.model).detach()
    found = []
    for piece in torch.arange(len(rows)).split(250):
        part = records.take(piece)
        x, y = part.x, part.y.to(problem.device)
        before, after = (recorder(weights, x, y).losses for weights in (start, end))
        found.append((before - after).double().cpu())
    return torch.cat(found).nan_to_num(0.0, 0.0, 0.0).numpy()
