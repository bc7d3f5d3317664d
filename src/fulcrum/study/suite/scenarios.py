"""The scenarios of the suite, as no-tuning.toml lists them, and which half is set aside."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fulcrum.errors import ConfigError
from fulcrum.settings.registry import suggest_nearest_names
from fulcrum.study.experiment import find_study_folder
from fulcrum.study.search import read_toml_file
from fulcrum.study.suite.sources import TRAINING_SIZES

FEW_ROUNDS = 50
"""Runs of at most so many rounds count as short: they have more seeds, and were where the rule failed first."""
SMALL_DATA = 2000
"""Data sets of fewer training examples count as small."""
DEFAULT_START = (1.0, 1.0)
"""C0 and learning rate of the default settings."""
SPLITS = ("development", "set-aside")
"""The two halves, as words for --datasets."""
LOOKS: Mapping[str, str] = {"first-look": "looked_at", "second-look": "looked_at_second"}
"""Words for the scenarios that were set aside before and have been looked at, development now; and the list of each."""


@dataclass(frozen=True)
class Scenario:
    """One federation: data, model and terms. seeds: how many, 0: as the suite says for its number of rounds."""

    name: str
    data: str
    model: str
    parties: int
    rounds: int
    steps: int
    rate: float
    epsilon: float
    partition: str = "dirichlet"
    alpha: float = 0.5
    participation: float = 1.0
    server: str = "sgd"
    activation: str = "relu"
    hidden: tuple[int, ...] = (64,)
    seeds: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes of `FAILING_CLASSES` that it belongs to."""
        return tuple(name for name, belongs in FAILING_CLASSES.items() if belongs(self))


FAILING_CLASSES: Mapping[str, Callable[[Scenario], bool]] = {
    "many-local-steps": lambda s: s.rounds <= FEW_ROUNDS and s.steps >= 4,
    "few-rounds": lambda s: s.rounds <= FEW_ROUNDS and s.steps == 1,
    "momentum": lambda s: s.server == "momentum",
    "adam": lambda s: s.server == "adam",
    "sentences": lambda s: s.data in ("topics", "reviews"),
    "group-norm": lambda s: s.model == "resnet",
    "layer-norm": lambda s: s.model == "layer_norm_mlp",
    "small-data": lambda s: TRAINING_SIZES[s.data] < SMALL_DATA,
}
"""Where the default failed before this suite was made (issue 16) or at its first look (adam, layer-norm), by public
facts of a scenario."""


@dataclass(frozen=True)
class Suite:
    """The whole list, or a part of it. default: the method under test. fixed: whose grid it is compared with.

    set_aside: names of the scenarios that are set aside, always those of the whole list. looks: by word of `LOOKS`, of
    those that were set aside in an earlier list. seeds_rivals: how many seeds rivals have at most (0: as many as the
    others). revisions: by rule, increased where its code has changed so much that stored results are no longer valid.
    """

    name: str
    title: str
    scenarios: tuple[Scenario, ...]
    set_aside: frozenset[str]
    C0: tuple[float, ...]
    lr: tuple[float, ...]
    starts: tuple[tuple[float, float], ...]
    default: str
    fixed: str
    rivals: tuple[str, ...]
    seeds_few_rounds: int
    seeds_many_rounds: int
    seeds_rivals: int = 0
    revisions: Mapping[str, int] = field(default_factory=dict)
    most_seeds: int = 0
    tiny: bool = False
    looks: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def list_seeds(self, scenario: Scenario) -> tuple[int, ...]:
        """The seeds of a scenario's runs."""
        few = scenario.rounds <= FEW_ROUNDS
        count = max(scenario.seeds, self.seeds_few_rounds if few else self.seeds_many_rounds)
        return tuple(range(min(count, self.most_seeds) if self.most_seeds else count))

    def list_method_seeds(self, scenario: Scenario, method: str) -> tuple[int, ...]:
        """The seeds of a method's runs: rivals have the first few."""
        seeds = self.list_seeds(scenario)
        return seeds[: self.seeds_rivals] if self.seeds_rivals and method not in (self.fixed, self.default) else seeds


def select_set_aside(names: Sequence[str]) -> frozenset[str]:
    """The first half of the names by SHA-256."""
    by_digest = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return frozenset(by_digest[: len(by_digest) // 2])


def read_suite(folder: Path | None = None, name: str = "no-tuning") -> Suite:
    """The suite as NAME.toml has it. Half of its `scenarios` are set aside, none of the earlier lists (`LOOKS`)."""
    file = find_study_folder(folder, name) / f"{name}.toml"
    raw = read_toml_file(file)
    needed = ("scenarios", "C0", "lr", "starts", "default", "fixed", "seeds_few_rounds", "seeds_many_rounds")
    missing = [key for key in needed if key not in raw]
    if missing:
        raise ConfigError(f"{file} has no {missing[0]}; a suite needs {', '.join(needed)}.")
    earlier = {word: tuple(_read_scenario(entry, file) for entry in raw.get(key, ())) for word, key in LOOKS.items()}
    listed = tuple(_read_scenario(entry, file) for entry in raw["scenarios"])
    scenarios = (*itertools.chain(*earlier.values()), *listed)
    names = [scenario.name for scenario in scenarios]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"{file}: two scenarios are called {twice[0]!r}; give each its own name.")
    return Suite(
        name=name,
        title=raw.get("title", name),
        scenarios=scenarios,
        set_aside=select_set_aside([scenario.name for scenario in listed]),
        looks={word: select_set_aside([scenario.name for scenario in own]) for word, own in earlier.items()},
        C0=tuple(map(float, raw["C0"])),
        lr=tuple(map(float, raw["lr"])),
        starts=tuple((float(C0), float(lr)) for C0, lr in raw["starts"]),
        default=raw["default"],
        fixed=raw["fixed"],
        rivals=tuple(raw.get("rivals", ())),
        seeds_few_rounds=int(raw["seeds_few_rounds"]),
        seeds_many_rounds=int(raw["seeds_many_rounds"]),
        seeds_rivals=int(raw.get("seeds_rivals", 0)),
        revisions=raw.get("revisions", {}),
    )


def _read_scenario(entry: Mapping[str, Any], file: Path) -> Scenario:
    known = [each.name for each in fields(Scenario)]
    unknown = [key for key in entry if key not in known]
    if unknown:
        hint = suggest_nearest_names(unknown[0], known)
        raise ConfigError(f"{file}: a scenario has {unknown[0]!r}, which has no meaning; {hint}")
    lost = [
        key for key in ("name", "data", "model", "parties", "rounds", "steps", "rate", "epsilon") if key not in entry
    ]
    if lost:
        raise ConfigError(f"{file}: scenario {entry.get('name', '?')!r} has no {lost[0]}.")
    if entry["data"] not in TRAINING_SIZES:
        hint = suggest_nearest_names(entry["data"], TRAINING_SIZES)
        raise ConfigError(f"{file}: scenario {entry['name']!r} has data = {entry['data']!r}; {hint}")
    words: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Scenario(**words)


def select_part(suite: Suite, chosen: Sequence[str] = (), methods: Sequence[str] = (), seeds: int = 0) -> Suite:
    """A part of the suite; empty means all.

    chosen: names of scenarios, "development", "set-aside", "first-look" or "second-look" (set aside before, development
    now), "tiny" (small enough for a test), or one of the failing classes. methods: rivals to keep; "default" for none;
    the grid and the default always stay. seeds: at most so many.
    """
    kept = []
    for word in chosen:
        found = [s for s in suite.scenarios if word in (s.name, *s.kinds, *_list_splits(suite, s))]
        if not found and word != "tiny":
            known = [*SPLITS, *LOOKS, "tiny", *FAILING_CLASSES, *(s.name for s in suite.scenarios)]
            raise ConfigError(f"dataset {word!r} is not of the suite; {suggest_nearest_names(word, known)}")
        kept += [s.name for s in found]
    unknown = [name for name in methods if name not in (*suite.rivals, "default", suite.default, suite.fixed)]
    if unknown:
        known = ["default", *suite.rivals]
        raise ConfigError(f"method {unknown[0]!r} is not of the suite; {suggest_nearest_names(unknown[0], known)}")
    part = replace(
        suite,
        scenarios=tuple(s for s in suite.scenarios if not kept or s.name in kept),
        rivals=tuple(name for name in suite.rivals if not methods or name in methods),
        most_seeds=seeds,
    )
    return make_tiny(part) if "tiny" in chosen else part


def _list_splits(suite: Suite, scenario: Scenario) -> list[str]:
    half = SPLITS[scenario.name in suite.set_aside]
    return [half, *(word for word, names in suite.looks.items() if scenario.name in names)]


def make_tiny(suite: Suite) -> Suite:
    """A suite for tests: small data of the development half, at most four rounds, two seeds, a grid of four cells."""
    small = [
        s
        for s in suite.scenarios
        if s.name not in suite.set_aside and TRAINING_SIZES[s.data] < SMALL_DATA and s.model in ("linear", "mlp")
    ]
    few = [replace(s, rounds=min(s.rounds, 4), steps=min(s.steps, 2), seeds=2) for s in small[:3]]
    return replace(
        suite,
        scenarios=tuple(few),
        C0=(0.1, 10.0),
        lr=(0.25, 4.0),
        starts=((0.1, 4.0),),
        seeds_few_rounds=2,
        seeds_many_rounds=2,
        tiny=True,
    )
