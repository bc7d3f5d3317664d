"""The available studies: what each runs, which page it writes, where its results are.

A study is a TOML file: with `[[rows]]` a table of methods, with `compare` beside them one of aggregations, with `rules`
a grid over C0 and learning rates, with `scenarios` a suite of federations. The package has some; ./experiments may hold
more. `protocol` and `parties` are two further tables from paper.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fulcrum.errors import ConfigError
from fulcrum.settings.registry import find_nearest_name
from fulcrum.study import report
from fulcrum.study.experiment import (
    BUILT_IN_FOLDER,
    WORKING_FOLDER,
    Experiment,
    find_study_folder,
    list_paper_jobs,
    list_parties_jobs,
    list_protocol_jobs,
    list_study_files,
    list_tuning_jobs,
    read_experiment,
)
from fulcrum.study.job import StudyJob
from fulcrum.study.pairwise import write_aggregation_report
from fulcrum.study.robustness import list_robustness_jobs, read_robustness_grid
from fulcrum.study.robustness_report import write_robustness_report
from fulcrum.study.search import read_toml_file
from fulcrum.study.store import RunRecord
from fulcrum.study.suite.jobs import list_suite_jobs
from fulcrum.study.suite.report import write_suite_report
from fulcrum.study.suite.scenarios import read_suite, select_part

TUNE_SUFFIX = "-tune"
"""Suffix of a study's name that means its tuning trials."""


@dataclass(frozen=True)
class StudyPart:
    """A part of a study; empty lists mean all of it. seeds: how many of the seeds, 0 for all."""

    datasets: Sequence[str] = ()
    methods: Sequence[str] = ()
    epsilons: Sequence[float] = ()
    seeds: int = 0


@dataclass(frozen=True)
class Study:
    """A study, or a part of it.

    jobs(): what it runs. trials(): its tuning trials. write(folder, done): writes its tables and figures from the
    finished runs. page: the file among those that is shown to people. results: default folder of its results.
    unknown: methods that its file names and this version lacks.
    """

    jobs: Callable[[], list[StudyJob]]
    trials: Callable[[], list[StudyJob]]
    write: Callable[[Path, Mapping[str, RunRecord]], object]
    page: str
    results: Path
    unknown: tuple[str, ...] = ()


StudyReaderFn = Callable[[Path | None, StudyPart], Study]


def _read_table_study(name: str, folder: Path | None, part: StudyPart) -> Study:
    experiment = read_experiment_part(name, folder, part)
    return Study(
        jobs=lambda: list_paper_jobs(experiment),
        trials=lambda: list_tuning_jobs(experiment),
        write=lambda out, done: report.write_table(out, experiment, done),
        page="table.md",
        results=Path("results") / name,
    )


def _read_grid_study(name: str, folder: Path | None, part: StudyPart) -> Study:
    grid = read_robustness_grid(folder, part.datasets, part.methods, part.epsilons, part.seeds, name)

    def no_trials() -> list[StudyJob]:
        raise ConfigError(f"{name} is a grid and has nothing to tune; prepare {name} itself.")

    return Study(
        jobs=lambda: list_robustness_jobs(grid),
        trials=no_trials,
        write=lambda out, done: write_robustness_report(out, grid, done),
        page="summary.md",
        results=Path("results") / name,
        unknown=grid.unknown,
    )


def _read_suite_study(name: str, folder: Path | None, part: StudyPart) -> Study:
    suite = select_part(read_suite(folder, name), part.datasets, part.methods, part.seeds)

    def no_trials() -> list[StudyJob]:
        raise ConfigError(f"{name} is a suite and has nothing to tune; prepare {name} itself.")

    return Study(
        jobs=lambda: list_suite_jobs(suite),
        trials=no_trials,
        write=lambda out, done: write_suite_report(out, suite, done),
        page="summary.md",
        results=Path("results") / name,
    )


def _read_protocol_study(folder: Path | None, part: StudyPart) -> Study:
    experiment = read_experiment_part("paper", folder, part)
    return Study(
        jobs=lambda: list_protocol_jobs(experiment),
        trials=lambda: list_tuning_jobs(experiment, protocol=True),
        write=lambda out, done: report.write_table(out, experiment, done, "protocol"),
        page="protocol.md",
        results=Path("results/paper"),
    )


def _read_parties_study(folder: Path | None, part: StudyPart) -> Study:
    experiment = read_experiment_part("paper", folder, part)
    return Study(
        jobs=lambda: list_parties_jobs(experiment),
        trials=lambda: list_tuning_jobs(experiment),
        write=lambda out, done: report.write_parties_table(out, experiment, done),
        page="parties.md",
        results=Path("results/paper"),
    )


def _read_aggregation_study(name: str, folder: Path | None, part: StudyPart) -> Study:
    experiment = read_experiment_part(name, folder, part)
    compare = str(read_toml_file(find_study_folder(folder, name) / f"{name}.toml")["compare"])
    return Study(
        jobs=lambda: list_paper_jobs(experiment),
        trials=lambda: list_tuning_jobs(experiment),
        write=lambda out, done: write_aggregation_report(out, experiment, compare, done),
        page="table.md",
        results=Path("results") / name,
    )


STUDY_FORMS: dict[str, Callable[[str, Path | None, StudyPart], Study]] = {
    "scenarios": _read_suite_study,
    "rules": _read_grid_study,
    "compare": _read_aggregation_study,
}
"""Forms of a study's file by a key that only this form has; without any of them it is a table of rows."""
PAPER_STUDIES: dict[str, StudyReaderFn] = {"protocol": _read_protocol_study, "parties": _read_parties_study}
"""Further tables that paper.toml describes."""


def read_experiment_part(name: str, folder: Path | None, part: StudyPart) -> Experiment:
    """A part of a study with rows."""
    return read_experiment(folder, name).only(part.datasets, part.methods, part.epsilons, part.seeds)


def list_study_names(folder: Path | None = None) -> list[str]:
    """The studies that `fulcrum study NAME` can run: those of the folder, else of ./experiments and the package."""
    places = [folder] if folder else [BUILT_IN_FOLDER, WORKING_FOLDER]
    return list(dict.fromkeys([*(name for place in places for name in list_study_files(place)), *PAPER_STUDIES]))


def split_study_path(name: str, folder: Path | None) -> tuple[str, Path | None]:
    """The name and folder of a study that was given by its path ("somewhere/mine.toml"), or both unchanged."""
    path = Path(name)
    if path.suffix != ".toml":
        return name, folder
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give the path of a study, or the name of one.")
    return path.stem, path.parent


def read_study(name: str, folder: Path | None = None, part: StudyPart | None = None) -> Study:
    """The study of that name, or of that path; ConfigError with the nearest name where there is none."""
    name, folder = split_study_path(name, folder)
    part = part or StudyPart()
    if name in PAPER_STUDIES:
        return PAPER_STUDIES[name](folder, part)
    known = list_study_names(folder)
    if name not in known:
        near = find_nearest_name(name, known)
        hint = f"; did you mean {near!r}?" if near else "."
        raise ConfigError(f"study = {name!r} is not known; choose one of {', '.join(known)}, or a path{hint}")
    raw = read_toml_file(find_study_folder(folder, name) / f"{name}.toml")
    read = next((form for key, form in STUDY_FORMS.items() if key in raw), _read_table_study)
    return read(name, folder, part)


def list_stage_jobs(
    stage: str, folder: Path | None = None, part: StudyPart | None = None
) -> tuple[list[StudyJob], tuple[str, ...]]:
    """The jobs of a stage (a study, or NAME-tune for its trials), and the methods that this version lacks."""
    known = list_study_names(folder)
    if stage.endswith(TUNE_SUFFIX) and stage not in known:
        study = read_study(stage.removesuffix(TUNE_SUFFIX), folder, part)
        return study.trials(), study.unknown
    study = read_study(stage, folder, part)
    return study.jobs(), study.unknown
