"""One run of a study as a value, and the id of its result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fulcrum.errors import ConfigError
from fulcrum.settings.renamed import to_original_names, translate_old_names
from fulcrum.settings.schema import Images, Settings, Table, TaskSettings

IGNORED_IN_ID = {"method": None, "data": ("dir",), "privacy": ("epsilon", "sigma")}
"""Settings that do not affect a result: the preset's name, file locations. The id has the privacy target separately."""
LATER_SETTINGS: dict[str, dict[str, Any]] = {
    "clip": {"options": {}, "rehearse": False, "rehearse_on": "", "step": 0.0, "search": True, "statistics_rounds": 0},
    "data": {"feature_whiten": 0.0, "public": False, "withdrawn": "", "units": ()},
    "model": {
        **{"coordinates": "plain", "whiten": 0.5, "norm": "keep", "train": "auto"},
        **{"lora": 0, "lora_alpha": 0.0, "lora_targets": (), "arguments": {}},
    },
    "train": {"combine": "mean", "trim": 0.2},
    "task": {"choose_threshold": "none", "class_balance": (), "imbalance": "none"},
    "privacy": {"seed": None, "arithmetic": "auto", "evaluation_epsilon": None, "budget_delta": None, "colluders": 1.0},
}
"""Settings newer than stored results, with the value those results used: at that value they are not in the id."""
FORMER_VALUES: dict[tuple[str, str], str] = {
    ("data", "partition"): "dirichlet",
    ("privacy", "unit"): "example",
    ("privacy", "randomness"): "seeded",
}
"""Settings that may be "auto" since stored results were made, with the value that these used."""
LATER_SECTIONS: dict[str, dict[str, Any]] = {
    "task": dataclasses.asdict(TaskSettings()),
    "table": dataclasses.asdict(Table()),
    "images": dataclasses.asdict(Images()),
}
"""Whole sections newer than stored results: at their defaults they are not in the id."""
CLIP_SETTINGS_READ: dict[str, tuple[str, ...]] = {
    "none": (),
    "fixed": ("C0",),
    "units-of-c": ("C0", "stability"),
    "auto-s": ("C0", "stability"),
    "psac": ("C0", "stability"),
    "dynamic": ("C0", "rho_c"),
    "wav": ("C0", "shrink"),
    "quantile": ("C0", "gamma", "eta_C", "C_min", "C_max", "refresh"),
    "oso": ("C0", "eta_C", "C_min", "C_max", "refresh"),
    "dc-sgd": ("C0", "C_min", "C_max", "refresh"),
    "median": ("C0", "C_min", "C_max"),
    "hyfree": ("C_min", "C_max", "stability", "refresh", "statistics_rounds"),
    "macadam": ("C0",),
}
"""Settings of [clip] that a rule reads, besides `rule` and `groups`: the others do not affect its results, so that a
change of their defaults keeps those valid. A rule that is not listed is assumed to read them all."""
SECTION_FACTORIES: dict[str, Any] = {
    field.name: field.default_factory
    for field in dataclasses.fields(Settings)
    if field.default_factory is not dataclasses.MISSING
}


@dataclass(frozen=True)
class StudyJob:
    """Settings to run once, and the place of the result in a study.

    study: paper, tune, protocol, parties, robustness, ... cell: the table cell in which the result is averaged
    over seeds. row: the method's name in tables (a method may have several rows). epsilon is
    the target, None without privacy; once calibrated, settings.privacy.sigma holds the noise and
    `accounted` the epsilon it costs. revision: increased in experiments/ when a rule's code has changed so
    much that old results are no longer valid.
    """

    settings: Settings
    study: str
    cell: str
    dataset: str
    row: str
    epsilon: float | None
    trial: int | None = None
    revision: int = 0
    accounted: float | None = None

    @property
    def seed(self) -> int:
        """The seed of split, initialisation, sampling and noise."""
        return self.settings.run.seed

    @property
    def id(self) -> str:
        """16 hexadecimal digits: equal for jobs whose results are interchangeable."""
        return compute_job_id(self.settings, self.epsilon, self.revision)

    @property
    def is_calibrated(self) -> bool:
        """Whether the noise is known, so that it can run where no accountant is installed."""
        return self.settings.privacy.epsilon is None

    def to_json(self) -> dict[str, Any]:
        """Plain values; `job_from_json` reads them back."""
        tags = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "settings"}
        return {"id": self.id, **tags, "settings": dataclasses.asdict(self.settings)}


def compute_job_id(settings: Settings, epsilon: float | None, revision: int = 0) -> str:
    """A hash of the settings that affect a result: not device, engine, folders or evaluation interval.

    For the noise it uses the target epsilon (or, without one, sigma), so that an accountant that is
    tighter in the fifth digit does not invalidate every result.
    """
    plain = to_original_names(dataclasses.asdict(settings))
    for (section, name), former in FORMER_VALUES.items():
        if plain[section][name] == "auto":
            plain[section][name] = former
    kept: dict[str, Any] = {}
    for section, values in plain.items():
        idle = IGNORED_IN_ID.get(section, ())
        if idle is None:
            continue
        later = LATER_SETTINGS.get(section, {})
        if section in LATER_SECTIONS and values == LATER_SECTIONS[section]:
            continue
        kept[section] = {n: v for n, v in values.items() if n not in idle and not (n in later and v == later[n])}
    read = CLIP_SETTINGS_READ.get(settings.clip.rule)
    if read is not None:
        # Where it is true, which no old result has, a rehearsal changes what any rule does.
        names = ("rule", "groups", *read, *(("rehearse",) if settings.clip.rehearse else ()))
        kept["clip"] = {name: kept["clip"][name] for name in names if name in kept["clip"]}
    kept["run"] = {"seed": settings.run.seed}
    kept["target"] = {"epsilon": epsilon} if epsilon is not None else {"sigma": settings.privacy.sigma}
    if revision:
        kept["revision"] = revision
    text = json.dumps(_to_canonical_value(kept), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _to_canonical_value(value: Any) -> Any:
    """The value with 1 and 1.0 alike, and tuples as lists."""
    if isinstance(value, Mapping):
        return {str(name): _to_canonical_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_canonical_value(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    return repr(float(value))


# --- plain values ---------------------------------------------------------------------------------


def settings_from_json(plain: Mapping[str, Any]) -> Settings:
    """Settings from the plain values of `dataclasses.asdict`, without pydantic; missing fields get their default."""
    parts: dict[str, Any] = {}
    for name, value in translate_old_names(plain).items():
        if name not in SECTION_FACTORIES:
            if name != "method":
                raise ConfigError(f"{name} is not a section of this version's settings; use the same version.")
            parts[name] = value
            continue
        default = SECTION_FACTORIES[name]()
        known = {field.name for field in dataclasses.fields(default)}
        unknown = set(value) - known
        if unknown:
            raise ConfigError(f"{name}.{min(unknown)} is not a setting of this version; use the same version.")
        parts[name] = dataclasses.replace(
            default, **{n: _cast_like_default(getattr(default, n), v) for n, v in value.items()}
        )
    return Settings(**parts)


def _cast_like_default(default: Any, value: Any) -> Any:
    """JSON has no tuples and may write 1.0 as 1."""
    if isinstance(default, tuple):
        return tuple(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def job_from_json(plain: Mapping[str, Any]) -> StudyJob:
    """A job from the values of `StudyJob.to_json`."""
    tags = {f.name: plain[f.name] for f in dataclasses.fields(StudyJob) if f.name != "settings" and f.name in plain}
    return StudyJob(settings=settings_from_json(plain["settings"]), **tags)


# --- lists of jobs --------------------------------------------------------------------------------


def drop_duplicate_jobs(jobs: Iterable[StudyJob]) -> list[StudyJob]:
    """Each id once, in order."""
    return list({job.id: job for job in reversed(list(jobs))}.values())[::-1]


@dataclass(frozen=True)
class JobShard:
    """Part `index` (from 0) of `count`: the jobs of one machine among several. Every job is in exactly one part."""

    index: int = 0
    count: int = 1

    def contains_job(self, job: StudyJob) -> bool:
        """By id only, so that the parts do not depend on finished jobs."""
        return int(job.id, 16) % self.count == self.index

    def __str__(self) -> str:
        return f"{self.index}of{self.count}"


def parse_shard(text: str) -> JobShard:
    """ "0/4" -> the first of four parts."""
    index, slash, count = text.partition("/")
    if not slash or not index.isdigit() or not count.isdigit() or int(index) >= int(count):
        raise ConfigError(f"shard = {text!r} is not i/n; with four machines use 0/4, 1/4, 2/4 and 3/4.")
    return JobShard(int(index), int(count))
