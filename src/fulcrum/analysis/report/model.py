"""One run as its readers see it: small frozen values, made from the folder alone."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulcrum.analysis.report import reading
from fulcrum.analysis.report.reading import Problems, get_list, get_mapping, numbers_of, to_number, to_text
from fulcrum.study.records import StudyScore
from fulcrum.types import make_short_repr

STATES = {
    "finished": "finished",
    "running": "running",
    "stopped": "not finished",
    "unreadable": "not readable",
    "missing": "missing",
}
"""State of a run: what people read."""
RUN_FILES = ("run.json", "summary.json", "metrics.jsonl", "settings.toml", "parties.jsonl", "status.json")
"""A folder with one of these is shown as a run."""
MAX_PARTIES_WITH_CURVES = 20
"""Of more parties, curves are shown as quantiles."""
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
SECRET = "(not shown: the noise follows from it)"


@dataclass(frozen=True)
class Party:
    """A party. units: its declared number of examples or persons. Numbers are NaN where the folder does not say."""

    name: str
    units: float = math.nan
    epsilon: float = math.nan
    budget: float = math.nan
    rate: float = math.nan
    sigma: float = math.nan
    releases: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    baseline: Mapping[str, float] = field(default_factory=dict)
    reference: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PartyStatus:
    """A party of a federation across machines, as the coordinator sees it. state: "online", "late", "offline",
    "refused", "out of budget" or "expected". answered: rounds that it answered, NaN where that is not to be shown."""

    name: str
    state: str
    why: str = ""
    since: str = ""
    answered: float = math.nan


@dataclass(frozen=True)
class Federation:
    """The state of a served run's parties at a time (UTC, ISO 8601). needed: parties without which no round begins."""

    time: str
    needed: float
    parties: tuple[PartyStatus, ...]


@dataclass(frozen=True)
class RunView:
    """A run for viewing.

    state: a key of `STATES`. problems: what could not be read. columns: name -> value per kept round, NaN where there
    is none: "round", "epsilon", "C", "seconds", "participants", "metric:NAME", "mean:NAME" (over parties),
    "course:NAME", "party:NAME" (its score), "quantile:Q" (of the parties' scores), "spent:NAME" (its epsilon).
    settings: section.name -> value, secrets replaced. public: whether the training records are.
    """

    __repr__ = make_short_repr

    name: str
    folder: str
    state: str
    problems: tuple[str, ...] = ()
    id: str = ""
    created: str = ""
    version: str = ""
    method: str = ""
    rule: str = ""
    dataset: str = ""
    status: str = ""
    score: StudyScore = field(default_factory=StudyScore)
    metrics: Mapping[str, float] = field(default_factory=dict)
    baseline: Mapping[str, float] = field(default_factory=dict)
    reference: Mapping[str, float] = field(default_factory=dict)
    evaluated_on: str = ""
    epsilon: float = math.nan
    delta: float = math.nan
    target: float = math.nan
    unit: str = ""
    guarantee: str = ""
    statement: Mapping[str, Any] = field(default_factory=dict)
    rounds_done: int = 0
    rounds_planned: int = 0
    seconds: float = math.nan
    parameters: float = math.nan
    party_count: int = 0
    parties: tuple[Party, ...] = ()
    labels: tuple[tuple[int, ...], ...] = ()
    public: bool = False
    confusion: tuple[tuple[float, ...], ...] = ()
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    rehearsal: Mapping[str, Any] = field(default_factory=dict)
    theory: Mapping[str, Any] = field(default_factory=dict)
    audit: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Mapping[str, Any], ...] = ()
    federation: Federation | None = None
    warnings: tuple[str, ...] = ()
    changed: float = 0.0

    @property
    def score_value(self) -> float:
        """The score of the last evaluation; NaN where there is none."""
        return self.metrics.get(self.score.name, math.nan)

    @property
    def is_private(self) -> bool:
        """Whether noise protects anything at all."""
        return self.guarantee != "none"


def is_run_folder(folder: Path) -> bool:
    """Whether a folder looks like a run's, whole or broken."""
    return any((folder / name).is_file() for name in RUN_FILES)


def read_run(folder: Path) -> RunView:
    """The run in a folder. Whatever is missing or broken is among its problems; nothing is raised."""
    if not folder.is_dir():
        why = f"{folder} is a file, not a run's folder." if folder.is_file() else f"there is no folder {folder}."
        return RunView(folder.name or str(folder), str(folder), "missing", (why,))
    problems = Problems()
    run = reading.read_json_object(folder / "run.json", problems)
    summary = reading.read_json_object(folder / "summary.json", problems)
    statement = reading.read_json_object(folder / "privacy.json", problems)
    split = reading.read_json_object(folder / "split.json", problems)
    rehearsal = reading.read_json_object(folder / "rehearsal.json", problems)
    theory = reading.read_json_object(folder / "theory.json", problems)
    audit = reading.read_json_object(folder / "audit.json", problems)
    environment = reading.read_json_object(folder / "environment.json", problems)
    sections, _ = reading.read_toml_table(folder / "settings.toml", problems)
    rounds = reading.read_rounds(folder / "metrics.jsonl", problems)
    state = find_state(folder, summary)
    note_missing_files(folder, run, sections, rounds, state, problems)

    score = StudyScore(to_text(run.get("score"), "accuracy"), run.get("higher_is_better", True) is not False)
    last = rounds.last_scored
    metrics = numbers_of(get_mapping(summary, "metrics") or get_mapping(last, "metrics"))
    public = split.get("public") is True
    settings = list_settings(sections, public)
    unit = to_text(run.get("unit"), to_text(statement.get("unit")))
    guarantee = find_guarantee(summary, statement, run)
    epsilon = to_number(summary.get("epsilon", rounds.lines[-1].get("epsilon") if rounds.lines else None))
    told = _or_zero(to_number(summary.get("rounds")))
    if told > rounds.total:
        problems.add(
            f"metrics.jsonl was cut: it has {rounds.total} of the {told:.0f} rounds that summary.json speaks of."
        )
    return RunView(
        name=folder.resolve().name,
        folder=str(folder),
        state=state,
        problems=tuple(problems.sentences),
        id=to_text(run.get("id")),
        created=to_text(run.get("created")),
        version=to_text(run.get("version")),
        method=to_text(sections.get("method"), to_text(summary.get("method"))),
        rule=to_text(summary.get("rule"), to_text(settings.get("clip.rule"))),
        dataset=to_text(get_mapping(statement, "run").get("dataset"), to_text(settings.get("data.source"))),
        status=to_text(summary.get("status"), STATES[state]),
        score=score,
        metrics=metrics,
        baseline=numbers_of(get_mapping(summary, "baseline") or get_mapping(last, "baseline")),
        reference=numbers_of(get_mapping(get_mapping(summary, "reference"), "metrics")),
        evaluated_on=to_text(summary.get("evaluated_on")),
        epsilon=epsilon,
        delta=to_number(summary.get("delta", settings.get("privacy.delta"))),
        target=to_number(settings.get("privacy.epsilon")),
        unit=unit,
        guarantee=guarantee,
        statement=statement,
        rounds_done=rounds.total,
        rounds_planned=int(_or_zero(to_number(settings.get("train.rounds")))),
        seconds=_sum_seconds(rounds, summary, unit, public),
        parameters=to_number(run.get("parameters")),
        party_count=int(_or_zero(to_number(summary.get("parties", split.get("parties"))))),
        parties=list_parties(summary, statement, split, rounds),
        labels=_read_labels(split) if public else (),
        public=public,
        confusion=_read_table(get_list(summary, "confusion") or get_list(last, "confusion")),
        columns=make_columns(rounds.lines, score, _names_of(split, statement), unit, public),
        settings=settings,
        rehearsal=rehearsal,
        theory=theory,
        audit=audit,
        environment=environment,
        events=read_events(folder / "parties.jsonl", problems),
        federation=read_federation(folder / "status.json", problems, secret=unit == "client" and not public),
        warnings=tuple(str(each) for each in get_list(summary, "warnings") or get_list(statement, "warnings")),
        changed=_last_change(folder),
    )


def find_state(folder: Path, summary: Mapping[str, Any]) -> str:
    """Finished, running, stopped or unreadable."""
    if summary:
        return "finished"
    if not is_run_folder(folder):
        return "unreadable"
    return "running" if reading.is_locked(folder / "lock") else "stopped"


def note_missing_files(
    folder: Path,
    run: Mapping[str, Any],
    settings: Mapping[str, Any],
    rounds: reading.KeptRounds,
    state: str,
    problems: Problems,
) -> None:
    """Say what is not there and what follows from it."""
    if state == "unreadable":
        problems.add(f"{folder} holds none of the files of a run ({', '.join(RUN_FILES)}).")
        return
    if not run and not rounds.total and (folder / "parties.jsonl").exists() and state != "finished":
        return  # a federation whose parties are still joining
    if not run and not (folder / "run.json").exists():
        problems.add("run.json is missing: which run this is, its unit and its score are not known.")
    if not settings and not any("settings.toml" in each for each in problems.sentences):
        problems.add("settings.toml is missing or empty: this run cannot be repeated from this folder.")
    if not rounds.total:
        problems.add("metrics.jsonl holds no round yet." if state == "running" else "metrics.jsonl holds no round.")
    elif state == "finished" and not (folder / "privacy.json").exists():
        problems.add("privacy.json is missing: this page cannot say what the epsilon is worth.")


def find_guarantee(summary: Mapping[str, Any], statement: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """What the epsilon is worth, as `privacy.json` words it; of a run in progress what is known so far, "" if nothing.

    A run in progress has no statement yet. Then what run.json says of its rule and its random numbers counts.
    """
    said = to_text(summary.get("guarantee"), to_text(statement.get("guarantee")))
    if said:
        return said
    if not isinstance(run.get("sound"), bool) or not isinstance(run.get("private"), bool):
        return "unknown" if run else ""  # a run of an earlier version
    if not run["private"]:
        return "none"
    if not run["sound"]:
        return "nominal"
    if run.get("aggregation") == "ideal-secagg":
        return "assumed"
    return "simulation" if run.get("simulation") is not False else "yes"


def list_settings(sections: Mapping[str, Any], public: bool) -> dict[str, Any]:
    """section.name -> value. The seed of the noise is replaced where the records are not public: it would undo it."""
    flat: dict[str, Any] = {}
    for name, value in sections.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    if not public:
        hidden = "privacy.seed" if flat.get("privacy.seed") is not None else "run.seed"
        if hidden in flat and flat.get("privacy.randomness") != "secure":
            flat[hidden] = SECRET
    return flat


def list_parties(
    summary: Mapping[str, Any], statement: Mapping[str, Any], split: Mapping[str, Any], rounds: reading.KeptRounds
) -> tuple[Party, ...]:
    """The parties by name, from whatever file knows them."""
    stated = {to_text(each.get("name")): each for each in get_list(statement, "parties") if isinstance(each, dict)}
    last = rounds.lines[-1] if rounds.lines else {}
    names = list(stated) or _names_of(split, statement)
    units = dict(zip(map(str, get_list(split, "names")), get_list(split, "units"), strict=False))
    now = dict(zip(names, get_list(last, "epsilons"), strict=False))
    epsilons = get_mapping(summary, "epsilons") or now
    scored = rounds.last_scored
    metrics = get_mapping(summary, "party_metrics") or get_mapping(scored, "party_metrics")
    baselines = get_mapping(summary, "party_baselines") or get_mapping(scored, "party_baselines")
    reference = get_mapping(get_mapping(summary, "reference"), "party_metrics")
    enforced = to_text(get_mapping(statement, "accountant").get("enforced"))

    def make(name: str) -> Party:
        own = stated.get(name, {})
        spent = own.get(f"epsilon_{enforced}", own.get("epsilon"))
        return Party(
            name=name,
            units=to_number(own.get("units", units.get(name))),
            epsilon=to_number(epsilons.get(name, spent)),
            budget=to_number(own.get("budget")),
            rate=to_number(own.get("rate")),
            sigma=to_number(own.get("sigma")),
            releases=to_number(own.get("releases")),
            metrics=numbers_of(get_mapping(metrics, name)),
            baseline=numbers_of(get_mapping(baselines, name)),
            reference=numbers_of(get_mapping(reference, name)),
        )

    return tuple(make(name) for name in names or list(metrics))


def make_columns(
    lines: Sequence[Mapping[str, Any]], score: StudyScore, names: Sequence[str], unit: str, public: bool
) -> dict[str, tuple[float, ...]]:
    """`RunView.columns` of these rounds."""
    found: dict[str, list[float]] = {}

    def put(name: str, index: int, value: Any) -> None:
        number = to_number(value)
        if not math.isnan(number):
            found.setdefault(name, [math.nan] * len(lines))[index] = number

    timed = unit != "client" or public  # with unit client, a round's duration tells how many joined
    for i, line in enumerate(lines):
        put("round", i, line.get("round", i + 1))
        for name in ("epsilon", "C", *(["seconds"] if timed else [])):
            put(name, i, line.get(name))
        if isinstance(line.get("participants"), list):
            put("participants", i, len(line["participants"]))
        former = {name: line.get(name) for name in ("accuracy", "loss")}
        for name, value in {**former, **get_mapping(line, "metrics")}.items():
            put(f"metric:{name}", i, value)
        for name, value in get_mapping(line, "mean_over_parties").items():
            put(f"mean:{name}", i, value)
        for name, value in get_mapping(line, "course").items():
            put(f"course:{name}", i, value)
        own = {name: to_number(each.get(score.name)) for name, each in _tables(get_mapping(line, "party_metrics"))}
        known = sorted(value for value in own.values() if not math.isnan(value))
        for q in QUANTILES if known else ():
            put(f"quantile:{q:g}", i, known[round(q * (len(known) - 1))])
        if len(own) <= MAX_PARTIES_WITH_CURVES:
            for name, value in own.items():
                put(f"party:{name}", i, value)
        spent = get_list(line, "epsilons")
        if len(spent) <= MAX_PARTIES_WITH_CURVES and len(set(map(str, spent))) > 1:
            for name, value in zip(names, spent, strict=False):
                put(f"spent:{name}", i, value)
    return {name: tuple(values) for name, values in found.items()}


def read_events(file: Path, problems: Problems, most: int = 500) -> tuple[Mapping[str, Any], ...]:
    """The last lines of parties.jsonl: who joined, was late, refused or was refused, and why."""
    lines = reading.read_last_lines(file, problems, most)
    return tuple({"time": each.get("time"), "party": each.get("party"), "what": each.get("what")} for each in lines)


def read_federation(file: Path, problems: Problems, secret: bool) -> Federation | None:
    """What `fulcrum serve` writes of its parties; None for other runs. secret: who took part is not shown."""
    content = reading.read_json_object(file, problems)
    rows = [row for row in get_list(content, "parties") if isinstance(row, dict)]
    if not rows:
        return None
    parties = tuple(
        PartyStatus(
            to_text(row.get("party")),
            to_text(row.get("state"), "not known"),
            to_text(row.get("why")),
            to_text(row.get("since")),
            math.nan if secret else to_number(row.get("answered")),
        )
        for row in rows
    )
    return Federation(to_text(content.get("time")), to_number(content.get("needed")), parties)


def _tables(values: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(str(name), value) for name, value in values.items() if isinstance(value, dict)]


def _names_of(split: Mapping[str, Any], statement: Mapping[str, Any]) -> list[str]:
    names = [str(name) for name in get_list(split, "names")]
    return names or [to_text(each.get("name")) for each in get_list(statement, "parties") if isinstance(each, dict)]


def _read_labels(split: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    rows = _read_table(get_list(split, "labels"))
    return tuple(tuple(int(_or_zero(value)) for value in row) for row in rows)


def _read_table(rows: Sequence[Any]) -> tuple[tuple[float, ...], ...]:
    """A table of numbers; empty where it is none, or not rectangular."""
    found = tuple(tuple(map(to_number, row)) for row in rows if isinstance(row, list))
    return found if len(found) == len(rows) and len({len(row) for row in found}) == 1 else ()


def _sum_seconds(rounds: reading.KeptRounds, summary: Mapping[str, Any], unit: str, public: bool) -> float:
    if unit == "client" and not public:
        return math.nan
    told = to_number(summary.get("seconds"))
    known = [value for line in rounds.lines if not math.isnan(value := to_number(line.get("seconds")))]
    whole = len(known) == rounds.total
    return told if not math.isnan(told) else sum(known) if known and whole else math.nan


def _last_change(folder: Path) -> float:
    """When a file of the run was last written, in seconds since 1970; 0 where that is not known."""
    times = []
    for name in RUN_FILES:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return min(max(times, default=0.0), time.time())


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0
