"""Plays candidates on made-up data: all candidates of one task and seed are one stack of runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fulcrum.data import Dataset
from fulcrum.data.made_up import VARIATIONS, Variation, make_up_dataset
from fulcrum.engines import find_engine
from fulcrum.engines.batched import run_many
from fulcrum.rng import StreamKey, torch_generator
from fulcrum.runs.preparation import derive_federation, find_device, prepare_unrehearsed
from fulcrum.runs.rehearsal.facts import TEST_EXAMPLES, RehearsalFacts, make_small_settings, scale_step
from fulcrum.runs.rehearsal.public_set import draw_part
from fulcrum.settings.schema import Settings, TaskSettings
from fulcrum.training.client_level import make_local_problem
from fulcrum.training.federation import Federation
from fulcrum.training.loop import federate


@dataclass(frozen=True)
class Candidate:
    """A way to run. C: clipping norm. step: length of the first step of a round in the real run.

    mode: plain (C and step stay), linear (C stays, the step falls to zero), moo (C is searched for, and the step
    follows the alignment of what is released), or fade (as moo, and the step falls to zero besides).
    """

    mode: str
    C: float
    step: float

    @property
    def mean_step(self) -> float:
        """Mean step length over the run, as far as the start decides it."""
        return self.step / 2 if self.falls else self.step

    @property
    def falls(self) -> bool:
        """Whether the step falls to zero over the run."""
        return self.mode in ("linear", "fade")

    @property
    def searches(self) -> bool:
        """Whether C is searched for in the run."""
        return self.mode in ("moo", "fade")

    def describe(self) -> str:
        """In words, for people."""
        start = f"first step {self.step:.3g}" if self.searches else f"C = {self.C:.3g}, step {self.step:.3g}"
        return f"{self.mode}: {start}"

    def apply(self, settings: Settings, steps: int, scale: float = 1.0) -> Settings:
        """The settings with this candidate; scale: by what the step is multiplied in a small run."""
        step = self.step * scale
        schedule = "linear" if self.falls else settings.train.schedule
        if self.searches:
            clip, lr = {"step": step, "search": True, "C0": 1.0}, 1.0
        else:
            clip, lr = {"step": step, "search": False, "C0": self.C, "eta_C": 0.0}, step / (steps * self.C)
        return settings.replace(clip=clip, train={"lr": lr, "schedule": schedule})


Scores = dict[Candidate, dict[str, float]]
"""Scores by candidate and by name of task and seed: higher is better, in points."""


@dataclass
class RehearsalLog:
    """What was played so far. scores: by rounds, task and candidate. on_task: called with the number of candidates
    after each task, played or known: for progress, and to keep the scores."""

    scores: dict[str, float] = field(default_factory=dict)
    on_task: Callable[[int], None] = lambda count: None

    @staticmethod
    def name_score(rounds: int, task: str, candidate: Candidate) -> str:
        """The key of a score; numbers are written so that they come back bit for bit."""
        return f"{rounds}/{task}/{candidate.mode}/{candidate.C!r}/{candidate.step!r}"


@dataclass
class Stage:
    """Plays candidates for some facts. Data sets and prepared runs are kept between calls.

    model: the user's own network, where no settings name it. public: the user's own public data set, in place of
    made-up ones.
    """

    facts: RehearsalFacts
    model: nn.Module | None = None
    public: Dataset | None = None
    datasets: dict[str, Dataset] = field(default_factory=dict)
    prepared: dict[tuple[str, int], Federation] = field(default_factory=dict)
    history: list[tuple[int, Scores]] = field(default_factory=list)
    """Rounds and scores of all calls of `play`."""
    log: RehearsalLog = field(default_factory=RehearsalLog)

    @property
    def in_points(self) -> bool:
        """Whether scores are in points, as accuracies are; else in units of the target."""
        return self.facts.data.task.name != "regression"

    def play(self, candidates: Sequence[Candidate], rounds: int, tasks: Sequence[tuple[Variation, int]]) -> Scores:
        """Scores of the candidates in a small run of so many rounds, for each (variation, seed)."""
        scores: Scores = {candidate: {} for candidate in candidates}
        for how, seed in tasks:
            task = f"{how.name}-{seed}"
            names = [self.log.name_score(rounds, task, candidate) for candidate in candidates]
            if not all(name in self.log.scores for name in names):
                found = self._play_task(candidates, rounds, how, seed)
                self.log.scores.update(zip(names, found, strict=True))
            for candidate, name in zip(candidates, names, strict=True):
                scores[candidate][task] = self.log.scores[name]
            self.log.on_task(len(candidates))
        self.history.append((rounds, scores))
        return scores

    def _play_task(self, candidates: Sequence[Candidate], rounds: int, how: Variation, seed: int) -> list[float]:
        base = self._prepare(how, seed, rounds)
        scale = scale_step(self.facts, rounds)
        runs = [
            derive_federation(base, candidate.apply(base.settings, self.facts.steps, scale)) for candidate in candidates
        ]
        with _use_one_thread(self.facts.work * self.facts.batch * len(runs) < LIGHT_WORK):
            return list(_train(_share_numbers(runs, seed)))

    def _prepare(self, how: Variation, seed: int, rounds: int) -> Federation:
        key = (f"{how.name}-{seed}", rounds)
        if key not in self.prepared:
            settings = make_small_settings(self.facts, rounds, seed)
            data = self._get_dataset(how, seed)
            self.prepared[key] = prepare_unrehearsed(_without_task(settings), data, self.model)
        return self.prepared[key]

    def _get_dataset(self, how: Variation, seed: int) -> Dataset:
        name, facts = f"{how.name}-{seed}", self.facts
        if name not in self.datasets and self.public is not None:
            self.datasets[name] = draw_part(self.public, facts.data.task, facts.examples, TEST_EXAMPLES, seed)
        if name not in self.datasets:
            device = find_device(self.facts.settings.run.device)
            place = device if device.type == "cuda" else torch.device("cpu")
            self.datasets[name] = make_up_dataset(self.facts.data, how, self.facts.examples, TEST_EXAMPLES, seed, place)
        return self.datasets[name]


def _without_task(settings: Settings) -> Settings:
    """The made-up data has its task already."""
    return dataclasses.replace(settings, task=TaskSettings())


LIGHT_WORK = 3e7
"""Multiplications of a stack's step below which a second thread costs more than it saves."""


@contextlib.contextmanager
def _use_one_thread(light: bool) -> Iterator[None]:
    """One thread for PyTorch while light stacks run: threads that wait for each other made them five times slower."""
    threads = torch.get_num_threads()
    try:
        if light:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class SharedNumbers:
    """Samples and noise of a rehearsal on a CPU: made-up records need no cipher, and all candidates share the numbers,
    so that a stack draws them once per round."""

    seed: int
    mode: str = "recorded"

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        """`count` numbers in [0, 1), float64."""
        return torch.rand(count, generator=torch_generator(self.seed, *key), dtype=torch.float64)

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        """`count` standard normal numbers, float64."""
        return torch.randn(count, generator=torch_generator(self.seed, *key)).double()


def _share_numbers(federations: Sequence[Federation], seed: int) -> list[Federation]:
    """The runs with one source of samples and noise. On a GPU the cipher is as fast, and has the same numbers too."""
    if federations[0].problem.device.type != "cpu":
        return list(federations)
    numbers, shared = SharedNumbers(seed), []
    for federation in federations:
        problem = dataclasses.replace(federation.problem, randomness=numbers)
        engine = find_engine(federation.settings.run.engine, make_local_problem(problem))
        shared.append(dataclasses.replace(federation, problem=problem, engine=engine))
    return shared


def _train(federations: Sequence[Federation]) -> Iterator[float]:
    """The score of each run after its last round, in points; a run that diverged has the least of all."""
    task = federations[0].problem.task
    values = _play_one_by_one(federations) if _is_faster_alone(federations[0]) else _play_stacked(federations)
    sign = 1.0 if task.higher_is_better else -1.0
    unit = 100.0 if task.score.endswith(("accuracy", "auc", "f1")) else 1.0
    finite = [value for value in values if math.isfinite(value)]
    worst = min((sign * value for value in finite), default=0.0)
    for value in values:
        yield unit * (sign * value if math.isfinite(value) else worst)


def _is_faster_alone(federation: Federation) -> bool:
    """Convolutions on a CPU: a stack of weights costs them more than it saves (2.4 times on the MNIST CNN)."""
    problem = federation.problem
    convolves = any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in problem.model.modules())
    return convolves and problem.device.type == "cpu"


def _play_stacked(federations: Sequence[Federation]) -> list[float]:
    """All runs in one tensor program."""
    last = None
    for last in run_many(federations):  # noqa: B007
        pass
    assert last is not None
    return [float(value) for value in last.metrics[federations[0].problem.task.score]]


def _play_one_by_one(federations: Sequence[Federation]) -> list[float]:
    """One run after the other, each with the engine that "auto" chooses. Samples and noise are those of a stack."""
    values = []
    for federation in federations:
        metrics: Mapping[str, float] = {}
        for result, _ in federate(federation):
            metrics = result.metrics or metrics
        values.append(float(metrics[federation.problem.task.score]))
    return values


__all__ = ["VARIATIONS", "Candidate", "RehearsalLog", "Scores", "Stage"]
