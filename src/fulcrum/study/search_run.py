"""Runs a search: asks for proposals, plays them in batches, keeps the trials, and says what came out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fulcrum.errors import BudgetError, ConfigError
from fulcrum.privacy.paid_tuning import TrialCount, calibrate_trial_sigma
from fulcrum.runs import folder as record
from fulcrum.settings.schema import Settings
from fulcrum.study.backends import BackendOptions, choose_backend, count_available_cores, run_jobs
from fulcrum.study.calibrate import calibrate_jobs
from fulcrum.study.compare import iterate_charged_jobs
from fulcrum.study.front import compute_hypervolume, find_front, find_knee
from fulcrum.study.job import StudyJob
from fulcrum.study.proposals import Proposer
from fulcrum.study.run_job import JobOutcome
from fulcrum.study.selection import compute_trial_rdp
from fulcrum.study.tuning import Objective, Space, Trial, append_trial, finish_trial, load_trials, make_trial_jobs

REQUEST_FILE = "tune.json"
STACK = 16
"""Trials that are proposed at once where runs are stacked on a GPU."""
SELECTIONS: dict[str, float | None] = {"poisson": None, "logarithmic": 0.0, "geometric": 1.0}
"""Distributions of the number of trials for private selection, by their eta."""
SettingsFn = Callable[[Mapping[str, Any]], Settings]


@dataclass(frozen=True)
class Search:
    """A search. make: settings by dotted name -> checked settings. more: settings of all trials. charged: whether each
    trial is charged to a ledger (private data). sigma: the noise of a trial under private selection, else None."""

    make: SettingsFn
    space: Space
    objectives: tuple[Objective, ...]
    trials: int
    seeds: tuple[int, ...] = (0,)
    more: Mapping[str, Any] | None = None
    charged: bool = False
    random: bool = False
    sigma: float | None = None
    epsilon: float | None = None
    """Under private selection, what releasing the best trial costs."""

    def describe(self) -> dict[str, Any]:
        """What makes two searches the same, for a folder that is used again."""
        space = {name: repr(each) for name, each in self.space.items()}
        names = [each.name for each in self.objectives]
        settings = record.to_json_value(_flatten(self.make({**(self.more or {})})))
        return {
            "space": space,
            "objectives": names,
            "seeds": list(self.seeds),
            "sigma": self.sigma,
            "settings": settings,
        }


def _flatten(settings: Settings) -> dict[str, Any]:
    import dataclasses

    return {
        f"{section}.{name}": value
        for section, values in dataclasses.asdict(settings).items()
        if isinstance(values, dict)
        for name, value in values.items()
        if section != "run"
    }


def plan_selection(search: Search, kind: str, mean: float, seed: int) -> tuple[int, float]:
    """(trials drawn, sigma of a trial) of a private selection whose best trial costs the settings' epsilon."""
    settings = search.make({**(search.more or {})})
    epsilon = settings.privacy.epsilon
    if epsilon is None:
        raise ConfigError("--selection needs privacy.epsilon: the price of the whole search is kept within it.")
    count = TrialCount(mean, SELECTIONS[kind])

    def measure(sigma: float) -> Any:
        job = StudyJob(settings.replace(privacy={"epsilon": None, "sigma": sigma}), "tune", "", "", "", None)
        return compute_trial_rdp([job])

    sigma = calibrate_trial_sigma(measure, count, epsilon, settings.privacy.delta)
    drawn = count.draw(float(np.random.default_rng([seed, 20_22]).random()))
    return drawn, sigma


def run_search(
    search: Search, out: Path, backend: str, how: BackendOptions, say: Callable[[str], None], seed: int = 0
) -> list[Trial]:
    """Play trials until there are `search.trials`; those of before count. Each is on disk when it is done."""
    check_same_search(search, out)
    done = load_trials(out)
    proposer = Proposer(search.space, search.objectives, seed + 1009 * len(done), search.random)
    for trial in done:
        proposer.tell(trial)
    size = choose_batch(backend, how, search)
    while len(done) < search.trials:
        first = len(done)
        count = min(size, search.trials - first)
        proposals = list(proposer.ask(count))
        if first == 0 and not search.random:
            proposals[0] = read_defaults(search)
        made = list(play_trials(search, list(enumerate(proposals, start=first)), out, backend, how, say))
        for trial in made:
            append_trial(out, trial)
            proposer.tell(trial)
            done.append(trial)
            told = ", ".join(f"{name} {value:.4g}" for name, value in trial.objectives.items())
            say(f"trial {trial.number + 1} of {search.trials}: {told}")
        if len(made) < count:  # out of time or budget; what is done is kept
            break
    return done


def read_defaults(search: Search) -> dict[str, Any]:
    """The settings as they are: the first trial of every search."""
    settings = search.make({**(search.more or {})})
    return {name: getattr(getattr(settings, name.split(".")[0]), name.split(".")[1]) for name in search.space}


def choose_batch(backend: str, how: BackendOptions, search: Search) -> int:
    """How many trials are proposed at once: as many as run at once."""
    if search.charged:
        return 1
    chosen = choose_backend(how.device) if backend == "auto" else backend
    each = {"stacked": STACK, "processes": how.workers or count_available_cores()}.get(chosen, 1)
    return max(1, each // len(search.seeds))


def play_trials(
    search: Search,
    proposals: Sequence[tuple[int, Mapping[str, Any]]],
    out: Path,
    backend: str,
    how: BackendOptions,
    say: Callable[[str], None],
) -> Iterator[Trial]:
    """Train the proposals; trials that did not end are left out."""
    more = dict(search.more or {})
    if search.sigma is not None:
        more |= {"privacy.epsilon": None, "privacy.sigma": search.sigma}
    jobs = [
        job for number, values in proposals for job in make_trial_jobs(search.make, number, values, search.seeds, more)
    ]
    if search.charged:
        try:
            found = list(iterate_charged_jobs(jobs, out, lambda line: None))
        except BudgetError as error:
            say(f"the ledger ends the search: {error}")
            return
    else:
        ready = calibrate_jobs(jobs)
        unique = {job.id: job for job in ready}
        outcomes = {job.id: outcome for job, outcome in run_jobs(list(unique.values()), backend, how)}
        found = [(job, outcomes[job.id]) for job in ready if job.id in outcomes]
    by_trial: dict[int, list[tuple[StudyJob, JobOutcome]]] = {}
    for job, outcome in found:
        assert job.trial is not None
        by_trial.setdefault(job.trial, []).append((job, outcome))
    for number, values in proposals:
        results = by_trial.get(number, [])
        if len(results) == len(search.seeds):
            yield finish_trial(number, values, results, search.objectives, search.epsilon)


def check_same_search(search: Search, out: Path) -> None:
    """Write what is searched to the folder; ConfigError where it holds another search."""
    file, mine = out / REQUEST_FILE, search.describe()
    if file.is_file() and (out / "trials.jsonl").is_file():
        try:
            known = json.loads(file.read_text(encoding="utf-8")).get("search")
        except ValueError:
            known = None
        if known != json.loads(json.dumps(mine)):
            raise ConfigError(
                f"--out = {out} holds another search; choose another folder, or repeat that search's options."
            )
    out.mkdir(parents=True, exist_ok=True)
    record.write_file_atomically(file, record.to_json_text({"search": mine}).encode())


# --- what came out ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The best trials. front: places of the trials that nothing beats (the best one where there is one objective).
    chosen: the one that is recommended, the best or the front's bend. hypervolume: None for one objective; reference:
    its corner, the worst value of each objective."""

    front: tuple[int, ...]
    chosen: int
    hypervolume: float | None = None
    reference: tuple[float, float] | None = None


def sum_up(trials: Sequence[Trial], objectives: Sequence[Objective]) -> Outcome:
    """The front of the trials, the one to recommend, and how much of the plane the front covers."""
    if not trials:
        raise ConfigError("no trial was finished: there is nothing to recommend.")
    if len(objectives) == 1:
        (one,) = objectives
        sign = 1.0 if one.lower_is_better else -1.0
        best = min(range(len(trials)), key=lambda i: sign * trials[i].objectives[one.name])
        return Outcome((best,), best)
    points = [(t.objectives[objectives[0].name], t.objectives[objectives[1].name]) for t in trials]
    lower = (objectives[0].lower_is_better, objectives[1].lower_is_better)
    worst = tuple((max if low else min)(values) for low, values in zip(lower, zip(*points, strict=True), strict=True))
    knee = find_knee(points, lower)
    reference = (worst[0], worst[1])
    front = tuple(find_front(points, lower))
    return Outcome(front, front[0] if knee is None else knee, compute_hypervolume(points, lower, reference), reference)
