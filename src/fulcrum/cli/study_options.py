"""The options that every study has, said once: `fulcrum study NAME` and `fulcrum reproduce paper` share them."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import view
from fulcrum.cli.failures import Interrupted
from fulcrum.errors import ConfigError

if TYPE_CHECKING:
    from fulcrum.study.backends import Clock
    from fulcrum.study.job import Job
    from fulcrum.study.studies import Part

Datasets = Annotated[str, typer.Option("--datasets", metavar="A,B", help="Only these data sets.")]
Methods = Annotated[str, typer.Option("--methods", metavar="A,B", help="Only these rows of the table.")]
Epsilons = Annotated[str, typer.Option("--epsilons", metavar="A,B", help="Only these epsilons.")]
Seeds = Annotated[int, typer.Option("--seeds", min=0, help="Only the first so many seeds; 0: all.")]
Experiments = Annotated[
    Path | None,
    typer.Option("--experiments", help="Folder with the studies; default ./experiments, then those of the package."),
]


@dataclass(frozen=True)
class StudyOptions:
    """Options of a study; the annotations are those of the command line."""

    datasets: Datasets = ""
    methods: Methods = ""
    epsilons: Epsilons = ""
    seeds: Seeds = 0
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results; default: the study's own in results/.")
    ] = None
    shard: Annotated[str, typer.Option("--shard", help="i/n: run only part i of n, for several machines.")] = "0/1"
    backend: Annotated[str, typer.Option("--backend", help="auto, sequential, processes, or stacked (GPU).")] = "auto"
    workers: Annotated[int, typer.Option("--workers", min=0, help="Processes to run in; 0: one per core.")] = 0
    seconds: Annotated[float, typer.Option("--seconds", help="Stop cleanly before this time is up; 0: no limit.")] = 0.0
    data_dir: Annotated[str, typer.Option("--data-dir", help="Folder that holds the data sets.")] = ""
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing; write the outputs from what there is.")
    ] = False
    experiments: Experiments = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no messages, the result only.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False

    @property
    def part(self) -> Part:
        """The part of the study that the options name."""
        return part_of(self.datasets, self.methods, self.epsilons, self.seeds)

    def run_jobs(self, jobs: list[Job], folder: Path, clock: Clock) -> int:
        """Run the jobs that have no result in the folder; returns how many of this shard are left."""
        from fulcrum.study import backends, worker
        from fulcrum.study.calibrate import calibrated
        from fulcrum.study.job import distinct, parse_shard
        from fulcrum.study.store import load, missing

        if self.report_only:
            return 0
        shard = parse_shard(self.shard)
        every = distinct(jobs)
        todo = [job for job in missing(every, load(folder)) if shard.holds(job)] if folder.is_dir() else every
        if not todo:
            return 0
        how = backends.How(
            self.data_dir, workers=self.workers, clock=clock, say=lambda line: view.say(line, self.quiet)
        )
        try:
            return worker.work(calibrated(todo), folder, self.backend, how, shard)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; finished runs are in {folder}, the same command goes on.") from None


def with_study_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `options` (a StudyOptions) every option of it, after the command's own."""
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "options"]
    hints = typing.get_type_hints(StudyOptions, include_extras=True)
    shared = {
        field.name: inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(StudyOptions)
    }

    def command(**values: Any) -> None:
        given = {name: values.pop(name) for name in shared}
        function(options=StudyOptions(**given), **values)

    parameters = [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *shared.values()]
    command.__doc__, command.__name__ = function.__doc__, function.__name__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def part_of(datasets: str, methods: str, epsilons: str, seeds: int = 0) -> Part:
    """The part of a study that the words of the command line name."""
    from fulcrum.study.studies import Part

    return Part(split_list(datasets), split_list(methods), epsilon_list(epsilons), seeds)


def epsilon_list(text: str) -> list[float]:
    """ "6.38,1.64" -> [6.38, 1.64]."""
    try:
        return [float(word) for word in split_list(text)]
    except ValueError:
        raise ConfigError(f"--epsilons {text} is not a list of numbers; write for example 6.38,1.64.") from None


def split_list(text: str) -> list[str]:
    """ "a, b" -> ["a", "b"]."""
    return [word.strip() for word in text.split(",") if word.strip()]


def warn_unknown_methods(unknown: tuple[str, ...]) -> None:
    """Name the methods that a study asks for and this version does not have."""
    if unknown:
        view.say(f"warning: {', '.join(unknown)} not built into this version; their rows stay empty.")
