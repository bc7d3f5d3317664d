"""Tuning: the same number of trials for every method, from lists fixed beforehand, evaluated on held-out data.

Trial 0 is the method's unchanged preset; the others are the points of one shifted Halton sequence.
The dimensions that all methods share come first, so that every method tries the same learning rates,
clipping norms, rates and steps, and none has an advantage by chance.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulcrum.errors import ConfigError
from fulcrum.rng import numpy_generator
from fulcrum.settings.toml import parse_toml
from fulcrum.study.records import DEFAULT_SCORE, StudyScore, update_choice_keys

HALTON_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)
SearchSpace = dict[str, dict[str, Any]]
"""Dotted path of a setting -> {low, high} (on a log scale), or {choices = [...]}. A choice may be a table of several
settings that go together, under any name without a dot."""


@dataclass(frozen=True)
class SearchSettings:
    """search.toml, or NAME-search.toml of another study.

    plain: number of first trials that keep the clipping rule's settings; the protocol of
    one C0 for all is tuned on those only. validation: fraction of the training data for evaluating trials.
    run_seed: the seed of every trial, not used by final runs. space: shared by all methods. rows, datasets: by
    name, further dimensions and those to leave out; a row's `datasets` hold its dimensions on one data set, and its
    `instead` what it has in place of a shared one: the same points of the sequence, and in plain trials too.
    """

    trials: int
    seed: int
    validation: float
    run_seed: int
    space: SearchSpace
    plain: int = 0
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    datasets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def make_row_space(self, row: str, dataset: str, clipping: bool = True) -> SearchSpace:
        """The search space of one row of the table; without `clipping`, no clipping settings."""
        mine, here = self.rows.get(row, {}), self.datasets.get(dataset, {})
        both = mine.get("datasets", {}).get(dataset, {})
        space = self.space | {p: d for p, d in here.get("space", {}).items() if p in self.space}
        space = {**space, **mine.get("instead", {}), **mine.get("space", {}), **both}
        dropped = set(mine.get("drop", ())) | set(here.get("drop", ()))
        return {p: d for p, d in space.items() if p not in dropped and (clipping or not p.startswith("clip."))}

    def make_row_trials(self, row: str, dataset: str, clipping: bool = True) -> list[dict[str, Any]]:
        """Settings by dotted path, one entry per trial; without `clipping`, the plain ones."""
        count = self.trials if clipping else self.plain or self.trials
        found = make_trials(self.make_row_space(row, dataset, clipping), count, self.seed, list(self.space))
        found = [_drop_clip_settings(t) if i < self.plain else t for i, t in enumerate(found)]
        names = {path: dimension["path"] for path, dimension in self.rows.get(row, {}).get("instead", {}).items()}
        return [{names.get(path, path): value for path, value in trial.items()} for trial in found]


NO_SEARCH = SearchSettings(trials=0, seed=0, validation=0.1, run_seed=0, space={})
"""The search of a study without a search file: its runs use the presets, and no settings are chosen."""


def _drop_clip_settings(trial: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in trial.items() if not path.startswith("clip.")}


def read_search_file(file: Path) -> SearchSettings:
    """Reads and checks a search file."""
    raw = read_toml_file(file)
    search = SearchSettings(**{name: raw[name] for name in SearchSettings.__dataclass_fields__ if name in raw})
    if not 0 < search.validation < 1:
        raise ConfigError(f"{file}: validation = {search.validation}; tuning needs held-out data, such as 0.1.")
    if search.trials < 1:
        raise ConfigError(f"{file}: trials = {search.trials}; at least one is needed.")
    for row, own in search.rows.items():
        for path, dimension in own.get("instead", {}).items():
            if path not in search.space or "path" not in dimension:
                raise ConfigError(
                    f"{file}: rows.{row}.instead has {path!r} = {dimension}; it takes the place of a setting in "
                    "[space], and names its own as `path`."
                )
    return search


def read_toml_file(file: Path) -> dict[str, Any]:
    """A TOML file's tables."""
    try:
        return parse_toml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; name its folder with --experiments.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}.") from error


def make_trials(space: SearchSpace, count: int, seed: int, shared: Sequence[str] = ()) -> list[dict[str, Any]]:
    """`count` settings: the preset, then points of a Halton sequence shifted by the seed.

    Paths in `shared` keep their dimension of the sequence whether or not a space has them, so that
    their values are the same in every space.
    """
    axes = [*shared, *(path for path in space if path not in shared)]
    if len(axes) > len(HALTON_BASES):
        raise ConfigError(f"the search has {len(axes)} dimensions; at most {len(HALTON_BASES)} are supported.")
    shift = numpy_generator(seed, "search").random(len(HALTON_BASES))
    found: list[dict[str, Any]] = [{}]
    for i in range(1, count):
        point = {path: (halton_number(i, HALTON_BASES[a]) + shift[a]) % 1.0 for a, path in enumerate(axes)}
        found.append(
            _flatten_choices(
                {path: pick_search_value(path, dimension, point[path]) for path, dimension in space.items()}
            )
        )
    return found[:count]


def _flatten_choices(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings one by one, where a choice held several."""
    found: dict[str, Any] = {}
    for path, value in values.items():
        found |= value if isinstance(value, Mapping) else {path: value}
    return found


def halton_number(index: int, base: int) -> float:
    """The index's digits mirrored at the radix point: evenly spread over [0, 1)."""
    result, scale = 0.0, 1.0
    while index:
        index, digit = divmod(index, base)
        scale /= base
        result += digit * scale
    return result


def pick_search_value(path: str, dimension: Mapping[str, Any], u: float) -> Any:
    """The value at u in [0, 1) of one dimension, to four digits."""
    if "choices" in dimension:
        return dimension["choices"][int(u * len(dimension["choices"]))]
    try:
        low, high = float(dimension["low"]), float(dimension["high"])
    except KeyError as error:
        raise ConfigError(f"the search's {path} needs {error.args[0]} (or choices).") from None
    return float(f"{math.exp(math.log(low) + u * math.log(high / low)):.4g}")


# --- choosing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChosenSettings:
    """Settings chosen for a cell: the best of `trials` on held-out data. epsilon None: without privacy.

    validation_score and worst: the score of the best and of the worst trial (where it was kept): how much the score can
    drop without tuning. score: the name of that metric.
    """

    dataset: str
    row: str
    trial: int
    trials: int
    validation_score: float
    epsilon: float | None = None
    protocol: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    worst: float | None = None
    score: str = DEFAULT_SCORE


def find_best_trial(candidates: Iterable[tuple[int, float]], score: StudyScore | None = None) -> tuple[int, float]:
    """(trial, value) of the trial with the best score; the earliest of equals."""
    lead = (score or StudyScore()).compute_lead
    return max(candidates, key=lambda pair: (lead(pair[1], 0.0), -pair[0]))


def find_choice(
    choices: Iterable[ChosenSettings], dataset: str, epsilon: float | None, row: str, protocol: bool = False
) -> ChosenSettings | None:
    """The cell's own choice, else the same row's at the nearest epsilon, else None."""
    own = [c for c in choices if (c.dataset, c.row, c.protocol) == (dataset, row, protocol)]
    if epsilon is None:
        return own[0] if own else None
    near = [c for c in own if c.epsilon is not None]
    return min(near, key=lambda c: abs(math.log((c.epsilon or 1.0) / epsilon)), default=None)


def read_choices(file: Path) -> list[ChosenSettings]:
    """A file of chosen settings; empty where there is none."""
    if not file.is_file():
        return []
    return [ChosenSettings(**update_choice_keys(entry)) for entry in read_toml_file(file).get("chosen", [])]


def write_choices(file: Path, choices: Iterable[ChosenSettings], note: str) -> None:
    """Write a file of chosen settings whole; `note` says how it was made."""
    import tomli_w

    def key(c: ChosenSettings) -> tuple[Any, ...]:
        return (c.protocol, c.dataset, -(c.epsilon or math.inf), c.row)

    entries = [
        {name: value for name, value in vars(choice).items() if value is not None}
        for choice in sorted(choices, key=key)
    ]
    head = "".join(f"# {line}\n" for line in note.splitlines())
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".toml.part")
    part.write_text(head + "\n" + tomli_w.dumps({"chosen": entries}), encoding="utf-8")
    part.replace(file)
