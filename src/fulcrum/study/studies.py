"""Which studies there are: what each runs, which page it writes, where its results lie.

A study is a TOML file: with `[[rows]]` a table of methods, with `rules` a grid over C0 and learning rates. The
package has some; ./experiments may hold more. `protocol` and `parties` are two further tables from paper.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fulcrum.errors import ConfigError
from fulcrum.settings.registry import nearest_name
from fulcrum.study import report
from fulcrum.study.experiment import (
    BUILT_IN,
    WORKING,
    Experiment,
    find_folder,
    paper_jobs,
    parties_jobs,
    protocol_jobs,
    read_experiment,
    study_files,
    tuning_jobs,
)
from fulcrum.study.job import Job
from fulcrum.study.robustness import read_grid, robustness_jobs
from fulcrum.study.robustness_report import write_robustness
from fulcrum.study.search import read_toml
from fulcrum.study.store import Record

TUNE = "-tune"
"""What a study's name ends in where its tuning trials are meant."""


@dataclass(frozen=True)
class Part:
    """A part of a study; empty lists mean all of it. seeds: how many of the seeds, 0 for all."""

    datasets: Sequence[str] = ()
    methods: Sequence[str] = ()
    epsilons: Sequence[float] = ()
    seeds: int = 0


@dataclass(frozen=True)
class Study:
    """A study, read and cut down to a part.

    jobs(): what it runs. trials(): its tuning trials. write(folder, done): writes its tables and figures from the
    finished runs. page: the file among those that is shown to people. results: where its results lie by default.
    unknown: methods that its file names and this version lacks.
    """

    jobs: Callable[[], list[Job]]
    trials: Callable[[], list[Job]]
    write: Callable[[Path, Mapping[str, Record]], object]
    page: str
    results: Path
    unknown: tuple[str, ...] = ()


Reader = Callable[[Path | None, Part], Study]


def _table(name: str, folder: Path | None, part: Part) -> Study:
    experiment = read_part(name, folder, part)
    return Study(
        jobs=lambda: paper_jobs(experiment),
        trials=lambda: tuning_jobs(experiment),
        write=lambda out, done: report.write_table(out, experiment, done),
        page="table.md",
        results=Path("results") / name,
        unknown=experiment.unknown,
    )


def _grid(name: str, folder: Path | None, part: Part) -> Study:
    grid = read_grid(folder, part.datasets, part.methods, part.epsilons, part.seeds, name)

    def no_trials() -> list[Job]:
        raise ConfigError(f"{name} is a grid and has nothing to tune; prepare {name} itself.")

    return Study(
        jobs=lambda: robustness_jobs(grid),
        trials=no_trials,
        write=lambda out, done: write_robustness(out, grid, done),
        page="summary.md",
        results=Path("results") / name,
        unknown=grid.unknown,
    )


def _protocol(folder: Path | None, part: Part) -> Study:
    experiment = read_part("paper", folder, part)
    return Study(
        jobs=lambda: protocol_jobs(experiment),
        trials=lambda: tuning_jobs(experiment, protocol=True),
        write=lambda out, done: report.write_table(out, experiment, done, "protocol"),
        page="protocol.md",
        results=Path("results/paper"),
        unknown=experiment.unknown,
    )


def _parties(folder: Path | None, part: Part) -> Study:
    experiment = read_part("paper", folder, part)
    return Study(
        jobs=lambda: parties_jobs(experiment),
        trials=lambda: tuning_jobs(experiment),
        write=lambda out, done: report.write_parties(out, experiment, done),
        page="parties.md",
        results=Path("results/paper"),
        unknown=experiment.unknown,
    )


FROM_PAPER: dict[str, Reader] = {"protocol": _protocol, "parties": _parties}
"""Further tables that paper.toml describes."""


def read_part(name: str, folder: Path | None, part: Part) -> Experiment:
    """A study with rows, cut down to a part."""
    return read_experiment(folder, name).only(part.datasets, part.methods, part.epsilons, part.seeds)


def study_names(folder: Path | None = None) -> list[str]:
    """The studies that `fulcrum study NAME` can run: those of the folder, else of ./experiments and the package."""
    places = [folder] if folder else [BUILT_IN, WORKING]
    return list(dict.fromkeys([*(name for place in places for name in study_files(place)), *FROM_PAPER]))


def split_path(name: str, folder: Path | None) -> tuple[str, Path | None]:
    """The name and folder of a study that was given by its path ("somewhere/mine.toml"), or both as they are."""
    path = Path(name)
    if path.suffix != ".toml":
        return name, folder
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give the path of a study, or the name of one.")
    return path.stem, path.parent


def read_study(name: str, folder: Path | None = None, part: Part | None = None) -> Study:
    """The study of that name, or of that path; ConfigError with the nearest name where there is none."""
    name, folder = split_path(name, folder)
    part = part or Part()
    if name in FROM_PAPER:
        return FROM_PAPER[name](folder, part)
    known = study_names(folder)
    if name not in known:
        near = nearest_name(name, known)
        hint = f"; did you mean {near!r}?" if near else "."
        raise ConfigError(f"study = {name!r} is not known; choose one of {', '.join(known)}, or a path{hint}")
    read = _grid if "rules" in read_toml(find_folder(folder, name) / f"{name}.toml") else _table
    return read(name, folder, part)


def stage_jobs(stage: str, folder: Path | None = None, part: Part | None = None) -> tuple[list[Job], tuple[str, ...]]:
    """The jobs of a stage (a study, or NAME-tune for its trials), and the methods that this version lacks."""
    known = study_names(folder)
    if stage.endswith(TUNE) and stage not in known:
        study = read_study(stage.removesuffix(TUNE), folder, part)
        return study.trials(), study.unknown
    study = read_study(stage, folder, part)
    return study.jobs(), study.unknown
