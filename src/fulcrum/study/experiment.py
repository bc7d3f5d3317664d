"""The files of a folder of experiments -> jobs: what `fulcrum reproduce paper` and `fulcrum study` run.

Every job's settings are: the defaults, the file's [settings], those of the data set, the method's
preset, the row's own, the chosen ones; later ones take precedence. Seeds are shared by all rows, so that split,
initialisation, sampling and noise are the same wherever the settings allow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fulcrum.clipping import find_rule
from fulcrum.errors import ConfigError
from fulcrum.models.pretrain import SYNTHETIC_INIT_NAME
from fulcrum.runs.choices import check_choices
from fulcrum.settings import files as settings_file
from fulcrum.settings.presets import METHODS
from fulcrum.settings.registry import suggest_nearest_names
from fulcrum.settings.schema import Settings
from fulcrum.study.job import StudyJob
from fulcrum.study.search import (
    NO_SEARCH,
    ChosenSettings,
    SearchSettings,
    find_choice,
    read_choices,
    read_search_file,
    read_toml_file,
)


@dataclass(frozen=True)
class TableRow:
    """A row of a table: a method at its own unit, with its own settings. paper: the row of the paper's table.

    against: the row to compare with, if unit, parties and the server's view are the same.
    """

    name: str
    method: str
    label: str
    paper: str = ""
    against: str = "moo"
    set: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """paper.toml with search.toml and chosen.toml beside it, or another study of the same form.

    name: of the file, and of its runs in results/. title: of its table.
    """

    datasets: tuple[str, ...]
    epsilons: tuple[float, ...]
    seeds: tuple[int, ...]
    rows: tuple[TableRow, ...]
    settings: Mapping[str, Any]
    by_dataset: Mapping[str, Mapping[str, Any]]
    revisions: Mapping[str, int]
    weights: Mapping[str, int]
    protocol: Mapping[str, Any]
    parties: Mapping[str, Any]
    subset: Mapping[str, Any]
    search: SearchSettings
    choices: tuple[ChosenSettings, ...]
    folder: Path
    name: str = "paper"
    title: str = "The paper's table under equal conditions"
    notes: tuple[str, ...] = ()
    """Notes for readers of the table."""

    def only(
        self,
        datasets: Sequence[str] = (),
        methods: Sequence[str] = (),
        epsilons: Sequence[float] = (),
        seeds: int = 0,
    ) -> Experiment:
        """A part of the experiment; empty means all. methods: names of rows or methods; seeds: number of seeds."""
        rows = self.rows
        if methods:
            rows = tuple(row for row in rows if row.name in methods or row.method in methods)
            lost = set(methods) - {row.name for row in rows} - {row.method for row in rows}
            if lost:
                known = ", ".join(row.name for row in self.rows)
                raise ConfigError(f"method {min(lost)!r} is not a row of the study; choose from {known}.")
        return replace(
            self,
            datasets=_select_part("dataset", self.datasets, datasets),
            epsilons=_select_part("epsilon", self.epsilons, epsilons),
            rows=rows,
            seeds=self.seeds[:seeds] if seeds else self.seeds,
        )

    def row(self, name: str) -> TableRow:
        """The row of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise ConfigError(f"row {name!r} is not in {self.folder}/{self.name}.toml, or its method is not built in.")

    @property
    def chosen_path(self) -> Path:
        """The file for the chosen settings."""
        return find_chosen_file(self.folder, self.name)


def _select_part(what: str, all_: tuple[Any, ...], wanted: Sequence[Any]) -> tuple[Any, ...]:
    lost = [value for value in wanted if value not in all_]
    if lost:
        raise ConfigError(f"{what} {lost[0]!r} is not in the study; choose from {', '.join(map(str, all_))}.")
    return tuple(value for value in all_ if value in wanted) if wanted else all_


BUILT_IN_FOLDER = Path(__file__).parent / "experiments"
"""The studies that come with Fulcrum."""
WORKING_FOLDER = Path("experiments")
"""Folder of a user's own studies, and of the chosen settings of any study."""


def find_study_folder(given: Path | None = None, name: str = "paper") -> Path:
    """The folder that holds the study NAME.toml: the given one, else ./experiments, else that of the package."""
    places = [given] if given else [WORKING_FOLDER, BUILT_IN_FOLDER]
    for place in places:
        if (place / f"{name}.toml").is_file():
            return place
    known = sorted({study for place in places for study in list_study_files(place)})
    hint = suggest_nearest_names(name, known) if known else "name another folder with --experiments."
    raise ConfigError(f"there is no {name}.toml in {' or '.join(map(str, places))}; {hint}")


def list_study_files(folder: Path) -> list[str]:
    """Names of the studies in a folder: its TOML files, except the companion files (search, chosen)."""
    names = {file.stem for file in folder.glob("*.toml")}
    beside_others = {companion_file(folder, name, what).stem for name in names for what in ("search", "chosen")}
    return sorted(names - beside_others - {"search", "chosen"})


def companion_file(folder: Path, name: str, what: str) -> Path:
    """The companion file of a study: search.toml for the paper, open-search.toml for the open track."""
    return folder / (f"{what}.toml" if name == "paper" else f"{name}-{what}.toml")


def find_chosen_file(folder: Path, name: str) -> Path:
    """The file for a study's chosen settings: in its folder, or in ./experiments for a study of the package."""
    return companion_file(WORKING_FOLDER if folder == BUILT_IN_FOLDER else folder, name, "chosen")


def _read_row(entry: Mapping[str, Any], file: Path) -> TableRow:
    """One of the [[rows]] of a study; its method and label are its name where they are not given."""
    known = [each.name for each in fields(TableRow)]
    unknown = [key for key in entry if key not in known]
    if unknown:
        raise ConfigError(
            f"{file}: a row has {unknown[0]!r}, which has no meaning; {suggest_nearest_names(unknown[0], known)}"
        )
    if "name" not in entry:
        raise ConfigError(f"{file}: a row has no name; give each of [[rows]] a name, such as 'moo'.")
    method = str(entry.get("method", entry["name"]))
    if method not in METHODS:
        hint = suggest_nearest_names(method, METHODS)
        raise ConfigError(f"{file}: row {entry['name']!r} has no known method ({method!r}); {hint}")
    return TableRow(**{"method": method, "label": entry["name"], **entry})


def read_experiment(given: Path | None = None, name: str = "paper") -> Experiment:
    """A study with `[[rows]]` as its files describe it: the paper's, the open track ("open"), or a user's own.

    NAME-search.toml and NAME-chosen.toml beside it are optional. Settings chosen in the working folder take precedence
    over those of the package.
    """
    folder = find_study_folder(given, name)
    raw = read_toml_file(folder / f"{name}.toml")
    lost = [key for key in ("datasets", "epsilons", "seeds", "rows") if key not in raw]
    if lost:
        raise ConfigError(f"{folder / name}.toml has no {lost[0]}; a study needs datasets, epsilons, seeds and rows.")
    rows = [_read_row(entry, folder / f"{name}.toml") for entry in raw["rows"]]
    search, chosen = companion_file(folder, name, "search"), find_chosen_file(folder, name)
    return Experiment(
        datasets=tuple(raw["datasets"]),
        epsilons=tuple(map(float, raw["epsilons"])),
        seeds=tuple(raw["seeds"]),
        rows=tuple(rows),
        settings=raw.get("settings", {}),
        by_dataset=raw.get("by_dataset", {}),
        revisions=raw.get("revisions", {}),
        weights={name: entry["revision"] for name, entry in raw.get("weights", {}).items()},
        protocol=raw.get("protocol", {}),
        parties=raw.get("parties", {}),
        subset=raw.get("subset", {}),
        search=read_search_file(search) if search.is_file() else NO_SEARCH,
        choices=tuple(read_choices(chosen if chosen.is_file() else companion_file(folder, name, "chosen"))),
        folder=folder,
        name=name,
        title=raw.get("title", Experiment.title if name == "paper" else name),
        notes=tuple(raw.get("notes", ())),
    )


# --- settings of one job --------------------------------------------------------------------------


def make_run_settings(
    base: Mapping[str, Any], dataset: str, method: str, epsilon: float | None, overrides: Mapping[str, Any]
) -> Settings:
    """Checked settings of a run; without privacy if the method's rule is not private."""
    words = {"data.source": dataset, "privacy.epsilon": epsilon, **overrides}
    settings = check_choices(settings_file.parse_settings(base, words, method))
    if find_rule(settings.clip.rule).private or epsilon is None:
        return settings
    return settings.replace(privacy={"epsilon": None})


def merge_sections(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merged sections of settings; the second takes precedence."""
    return {name: {**base.get(name, {}), **over.get(name, {})} for name in {**base, **over}}


def is_private_row(row: TableRow) -> bool:
    """Whether the row's method adds noise at all."""
    return find_rule(METHODS[row.method].parts["clip"]["rule"]).private


def list_row_epsilons(experiment: Experiment, row: TableRow) -> tuple[float | None, ...]:
    """The targets of a row; a method without privacy has a single cell."""
    return experiment.epsilons if is_private_row(row) else (None,)


def make_study_job(
    experiment: Experiment,
    study: str,
    dataset: str,
    row: TableRow,
    epsilon: float | None,
    overrides: Mapping[str, Any],
    trial: int | None = None,
    suffix: str = "",
) -> StudyJob:
    """One job of a study; its cell is dataset/epsilon/row, then `suffix`."""
    base = merge_sections(experiment.settings, experiment.by_dataset.get(dataset, {}))
    settings = make_run_settings(base, dataset, row.method, epsilon, {**row.set, **overrides})
    cell = "/".join([dataset, "none" if epsilon is None else f"{epsilon:g}", row.name, *([suffix] if suffix else [])])
    # Both numbers only increase, so that their sum distinguishes old results from new ones.
    painted = experiment.weights.get(dataset, 0) if settings.model.init == SYNTHETIC_INIT_NAME else 0
    revision = experiment.revisions.get(settings.clip.rule, 0) + painted
    return StudyJob(settings, study, cell, dataset, row.name, epsilon, trial, revision)


# --- the studies ----------------------------------------------------------------------------------


def list_paper_jobs(experiment: Experiment) -> list[StudyJob]:
    """The final runs: every row, data set, epsilon and seed, at the chosen settings, on the test data."""
    return [
        make_study_job(
            experiment,
            experiment.name,
            dataset,
            row,
            epsilon,
            {**_find_chosen_settings(experiment, dataset, epsilon, row), **_make_seed_settings(seed)},
        )
        for dataset in experiment.datasets
        for row in experiment.rows
        for epsilon in list_row_epsilons(experiment, row)
        for seed in experiment.seeds
    ]


def list_protocol_jobs(experiment: Experiment) -> list[StudyJob]:
    """The paper's own protocol: one C0 for all methods, no other clipping setting tuned."""
    shared = {"clip.C0": float(experiment.protocol["C0"])}
    return [
        make_study_job(
            experiment,
            "protocol",
            dataset,
            row,
            epsilon,
            {
                **_find_chosen_settings(experiment, dataset, epsilon, row, protocol=True),
                **shared,
                **_make_seed_settings(seed),
            },
        )
        for dataset in experiment.datasets
        for row in experiment.rows
        if is_private_row(row)
        for epsilon in experiment.epsilons
        for seed in experiment.seeds
    ]


def list_tuning_jobs(experiment: Experiment, protocol: bool = False, at: Sequence[float] = ()) -> list[StudyJob]:
    """Every trial of every cell, one seed, evaluated on held-out training data; `at` limits the epsilons."""
    search, study = experiment.search, "tune-protocol" if protocol else "tune"
    if not search.trials:
        where = companion_file(experiment.folder, experiment.name, "search")
        raise ConfigError(f"{where} does not exist; tuning {experiment.name} needs it (docs/studies.md).")
    study = study if experiment.name == "paper" else f"{experiment.name}-{study}"
    shared = {"clip.C0": float(experiment.protocol["C0"])} if protocol else {}
    fixed = {"data.validation": search.validation, **_make_seed_settings(search.run_seed)}
    jobs = []
    for dataset in experiment.datasets:
        for row in experiment.rows:
            if protocol and not is_private_row(row):
                continue
            tried = search.make_row_trials(row.name, dataset, clipping=not protocol)
            for epsilon in list_row_epsilons(experiment, row):
                if at and epsilon is not None and epsilon not in at:
                    continue
                jobs += [
                    make_study_job(experiment, study, dataset, row, epsilon, {**words, **shared, **fixed}, trial)
                    for trial, words in enumerate(tried)
                ]
    return jobs


def list_parties_jobs(experiment: Experiment) -> list[StudyJob]:
    """Accuracy over the number of parties, at the settings chosen for the table's own number."""
    plan = experiment.parties
    rows = [row for row in experiment.rows if row.name in plan["rows"]]
    seeds = experiment.seeds[: int(plan.get("seeds", len(experiment.seeds)))]
    return [
        make_study_job(
            experiment,
            "parties",
            dataset,
            row,
            epsilon,
            {
                **_find_chosen_settings(experiment, dataset, epsilon, row),
                **plan.get("set", {}),
                "data.parties": count,
                **_make_seed_settings(seed),
            },
            suffix=f"k{count}",
        )
        for dataset in experiment.datasets
        for row in rows
        for epsilon in experiment.epsilons
        for count in plan["counts"]
        for seed in seeds
    ]


def reduce_to_one_cell(experiment: Experiment, datasets: Sequence[str] = ()) -> Experiment:
    """One reduced cell: the presets as they are, fewer rounds, one seed.

    datasets: of the subset's own data set and those that may stand in for it (`stand_ins`), the one to take.
    """
    plan = experiment.subset
    (dataset, *_) = _select_part("dataset", (plan["dataset"], *plan.get("stand_ins", {})), datasets)
    small = merge_sections(experiment.settings, plan.get("settings", {}))
    small = merge_sections(small, plan.get("stand_ins", {}).get(dataset, {}))
    small = merge_sections(small, {"train": {"rounds": int(plan["rounds"])}})
    return replace(
        experiment,
        datasets=(dataset,),
        epsilons=(float(plan["epsilon"]),),
        seeds=experiment.seeds[: int(plan.get("seeds", 1))],
        rows=tuple(
            replace(row, set={**row.set, **plan.get("set", {}).get(row.name, {})})
            for row in experiment.rows
            if row.name not in plan.get("without", ())
        ),
        settings=small,
        choices=(),
        title=plan.get("title", experiment.title),
        notes=tuple(plan.get("notes", ())),  # the notes of the whole study describe other runs
    )


def has_choice_for_cell(experiment: Experiment, cell: StudyJob | ChosenSettings) -> bool:
    """Whether chosen.toml already has a choice for this cell."""
    protocol = cell.protocol if isinstance(cell, ChosenSettings) else cell.study == "tune-protocol"
    key = (cell.dataset, cell.epsilon, cell.row, protocol)
    return any((c.dataset, c.epsilon, c.row, c.protocol) == key for c in experiment.choices)


def replace_choices(experiment: Experiment, choices: Sequence[ChosenSettings]) -> Experiment:
    """The experiment with other choices."""
    return replace(experiment, choices=tuple(choices))


def _find_chosen_settings(
    experiment: Experiment, dataset: str, epsilon: float | None, row: TableRow, protocol: bool = False
) -> dict[str, Any]:
    choice = find_choice(experiment.choices, dataset, epsilon, row.name, protocol)
    return dict(choice.settings) if choice else {}


def _make_seed_settings(seed: int) -> dict[str, Any]:
    return {"run.seed": seed}
