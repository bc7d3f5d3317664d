"""Search over settings for one objective or two: `fulcrum tune` and `fulcrum pareto`. Optuna proposes, studies run.

Trials are kept as lines of trials.jsonl; a search that goes on tells Optuna of them first. A trial is judged on
held-out training records (data.validation), so the test records stay for the end.

Private data: every trial is charged to a kept ledger, or the search is refused. Private selection
(`privacy.paid_tuning`) prices a search for somebody who sees the chosen model only; in a federation the server sees all
trials, so it is for simulations on public data.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulcrum.errors import ConfigError
from fulcrum.runs import folder as record
from fulcrum.settings.catalogue import list_setting_fields
from fulcrum.settings.derived import COST_FREE_SETTINGS
from fulcrum.settings.registry import suggest_nearest_names
from fulcrum.settings.schema import Settings
from fulcrum.study.job import StudyJob
from fulcrum.study.records import StudyScore
from fulcrum.study.run_job import JobOutcome

TRIALS_FILE = "trials.jsonl"
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Range:
    """Numbers from low to high; whole: integers only; log: by their logarithm."""

    low: float
    high: float
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Any, ...]


Space = Mapping[str, Range | Choice]
"""Setting (section.name) -> what it may be."""

DEFAULT_SPACES: dict[str, Space] = {
    "moo": {"clip.balance": Range(0.5, 12.0, log=True), "clip.reach": Range(0.2, 3.0, log=True)},
    "": {"train.lr": Range(0.03, 16.0, log=True), "clip.C0": Range(0.03, 30.0, log=True)},
}
"""What is searched where nothing is named, by clipping rule; "" for all others."""
ROUNDS_FACTORS = (0.25, 2.0)
"""The range of rounds for the objective `rounds`, as multiples of those of the settings."""


def parse_space_option(text: str) -> tuple[str, Range | Choice]:
    """ "clip.C0=0.1:10:log" or "train.server=sgd,adam" -> the setting, and what it may be."""
    name, sign, words = text.partition("=")
    fields = list_setting_fields()
    if not sign:
        raise ConfigError(f"--search {text!r} has no '='; write SETTING=LOW:HIGH, SETTING=LOW:HIGH:log or SETTING=A,B.")
    if name not in fields:
        raise ConfigError(f"--search: {name!r} is not a setting; {suggest_nearest_names(name, fields)}")
    if ":" not in words:
        values = tuple(_parse_value(word.strip()) for word in words.split(",") if word.strip())
        if len(values) < 2:
            raise ConfigError(f"--search {text!r} has fewer than two values to choose from.")
        return name, Choice(values)
    parts = words.split(":")
    try:
        low, high = float(parts[0]), float(parts[1])
    except ValueError:
        raise ConfigError(f"--search {text!r}: {words!r} is no range of numbers; write LOW:HIGH.") from None
    log = parts[2:] == ["log"]
    if (len(parts) > 2 and not log) or not low < high or (log and low <= 0) or not math.isfinite(high - low):
        raise ConfigError(
            f"--search {text!r}: write LOW:HIGH or LOW:HIGH:log, with LOW below HIGH (and above 0 for log)."
        )
    return name, Range(low, high, log, whole=fields[name].kind in (int, int | None))


def _parse_value(word: str) -> Any:
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


def choose_space(settings: Settings, named: Space, objectives: Sequence[str]) -> dict[str, Range | Choice]:
    """What is searched: what was named, else what the rule has; rounds too where they are an objective."""
    space = dict(named) if named else dict(DEFAULT_SPACES.get(settings.clip.rule, DEFAULT_SPACES[""]))
    if ("rounds" in objectives or "bytes" in objectives) and "train.rounds" not in space:
        low, high = (max(1, round(factor * settings.train.rounds)) for factor in ROUNDS_FACTORS)
        space["train.rounds"] = Range(low, max(high, low + 1), log=True, whole=True)
    return space


# --- objectives -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """What is searched for. measure(settings, target epsilon, mean score, parameters) -> its value."""

    name: str
    lower_is_better: bool
    measure: Callable[[Settings, float | None, float, int], float]


def _measure_bytes(settings: Settings, epsilon: float | None, score: float, parameters: int) -> float:
    joined = settings.data.parties * settings.train.participation
    return 2.0 * BYTES_PER_PARAMETER * parameters * joined * settings.train.rounds


COSTS: dict[str, Objective] = {
    "epsilon": Objective("epsilon", True, lambda settings, epsilon, score, d: math.inf if epsilon is None else epsilon),
    "rounds": Objective("rounds", True, lambda settings, epsilon, score, d: float(settings.train.rounds)),
    "bytes": Objective("bytes", True, _measure_bytes),
}
"""Objectives beside the score, by name. bytes: weights to each party and back, every round."""


def find_objectives(names: Sequence[str], score: StudyScore) -> list[Objective]:
    """The objectives of these names; "score" is the task's."""
    own = Objective(score.name, not score.higher_is_better, lambda settings, epsilon, value, d: value)
    found = []
    for name in dict.fromkeys(names):
        if name != "score" and name not in COSTS:
            raise ConfigError(f"--for: {name!r} is not known; {suggest_nearest_names(name, ['score', *COSTS])}")
        found.append(own if name == "score" else COSTS[name])
    if len(found) not in (1, 2) or own not in found:
        raise ConfigError(
            "--for takes score, or score with one of rounds, bytes and epsilon, such as --for score,rounds."
        )
    return found


# --- trials -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A finished trial. values: of the settings that are searched. scores: by seed. objectives: by name."""

    number: int
    values: Mapping[str, Any]
    scores: Mapping[int, float]
    objectives: Mapping[str, float]
    epsilon: float | None = None
    seconds: float = 0.0
    curve: Sequence[Sequence[float]] = field(default=(), repr=False)

    @property
    def score(self) -> float:
        """The mean score over the seeds."""
        return math.fsum(self.scores.values()) / len(self.scores)


def make_trial_jobs(make: Callable[[Mapping[str, Any]], Settings], number: int, values: Mapping[str, Any],
                    seeds: Sequence[int], more: Mapping[str, Any]) -> list[StudyJob]:  # fmt: skip
    """The jobs of a trial, one per seed. make: settings by dotted name -> checked settings; more: for all trials."""
    jobs = []
    for seed in seeds:
        settings = make({**more, **values, "run.seed": seed})
        target = settings.privacy.epsilon
        jobs.append(
            StudyJob(settings, "tune", f"trial {number}", settings.data.source, settings.method, target, number)
        )
    return jobs


def finish_trial(
    number: int,
    values: Mapping[str, Any],
    results: Sequence[tuple[StudyJob, JobOutcome]],
    objectives: Sequence[Objective],
    epsilon: float | None,
) -> Trial:
    """A trial from the outcomes of its jobs."""
    scores = {job.seed: outcome.value for job, outcome in results}
    mean = math.fsum(scores.values()) / len(scores)
    job, first = results[0]
    target = epsilon if epsilon is not None else job.epsilon
    return Trial(
        number,
        dict(values),
        scores,
        {each.name: each.measure(job.settings, target, mean, first.parameters) for each in objectives},
        target,
        sum(outcome.seconds for _, outcome in results),
        first.curve,
    )


def append_trial(folder: Path, trial: Trial) -> None:
    """Add a finished trial to trials.jsonl."""
    line = json.dumps(record.to_json_value(dataclasses.asdict(trial))) + "\n"
    with (folder / TRIALS_FILE).open("a", encoding="utf-8") as file:
        file.write(line)


def load_trials(folder: Path) -> list[Trial]:
    """The finished trials of a folder; a torn last line is left out."""
    file = folder / TRIALS_FILE
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            plain = json.loads(line)
            scores = {int(seed): float(value) for seed, value in plain.pop("scores").items()}
            objectives = {name: float(value) for name, value in plain.pop("objectives").items()}
            found.append(Trial(scores=scores, objectives=objectives, **plain))
        except (ValueError, TypeError, KeyError):
            continue
    return found


def refuse_costly_space(space: Space) -> None:
    """Raise ConfigError where a searched setting changes what a trial costs: private selection needs equal trials."""
    free = {f"{section}.{name}" for section, names in COST_FREE_SETTINGS.items() for name in names}
    costly = [name for name in space if name not in free]
    if costly:
        raise ConfigError(
            f"--selection needs trials that cost the same, and {costly[0]} changes the cost; search others, such as "
            "train.lr or clip.C0."
        )
