"""The options that every study has: `fulcrum study NAME` and `fulcrum reproduce paper` share them."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import view
from fulcrum.cli.failures import RunInterrupted
from fulcrum.errors import ConfigError

if TYPE_CHECKING:
    from fulcrum.study.backends import TimeBudget
    from fulcrum.study.job import StudyJob
    from fulcrum.study.studies import StudyPart

DatasetsOption = Annotated[str, typer.Option("--datasets", metavar="A,B", help="Only these data sets.")]
MethodsOption = Annotated[str, typer.Option("--methods", metavar="A,B", help="Only these rows of the table.")]
EpsilonsOption = Annotated[str, typer.Option("--epsilons", metavar="A,B", help="Only these epsilons.")]
SeedsOption = Annotated[int, typer.Option("--seeds", min=0, help="Only the first so many seeds; 0: all.")]
ExperimentsOption = Annotated[
    Path | None,
    typer.Option("--experiments", help="Folder with the studies; default ./experiments, then those of the package."),
]


@dataclass(frozen=True)
class StudyOptions:
    """Options of a study; the annotations are those of the command line."""

    datasets: DatasetsOption = ""
    methods: MethodsOption = ""
    epsilons: EpsilonsOption = ""
    seeds: SeedsOption = 0
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
    experiments: ExperimentsOption = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no messages, the result only.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False

    @property
    def part(self) -> StudyPart:
        """The part of the study that the options name."""
        return make_study_part(self.datasets, self.methods, self.epsilons, self.seeds)

    def run_missing_jobs(self, jobs: list[StudyJob], folder: Path, clock: TimeBudget) -> int:
        """Run the jobs that have no result in the folder; returns how many of this shard are left."""
        from fulcrum.study import backends, worker
        from fulcrum.study.calibrate import calibrate_jobs
        from fulcrum.study.job import drop_duplicate_jobs, parse_shard
        from fulcrum.study.store import find_missing_jobs, load_results

        if self.report_only:
            return 0
        shard = parse_shard(self.shard)
        every = drop_duplicate_jobs(jobs)
        todo = (
            [job for job in find_missing_jobs(every, load_results(folder)) if shard.contains_job(job)]
            if folder.is_dir()
            else every
        )
        if not todo:
            return 0
        require_public_datasets(todo, self.data_dir)
        how = backends.BackendOptions(
            self.data_dir, workers=self.workers, clock=clock, say=lambda line: view.print_message(line, self.quiet)
        )
        try:
            return worker.run_missing_jobs(calibrate_jobs(todo), folder, self.backend, how, shard)
        except KeyboardInterrupt:
            raise RunInterrupted(f"interrupted; finished runs are in {folder}, the same command goes on.") from None


def require_public_datasets(jobs: Iterable[StudyJob], folder: str) -> None:
    """Raise DataError at once where a named data set is not on this machine: calibrating the jobs takes a while."""
    from fulcrum.data.sources.public.registry import PUBLIC_DATASETS, require_dataset

    for source, place in dict.fromkeys((job.settings.data.source, folder or job.settings.data.dir) for job in jobs):
        if source in PUBLIC_DATASETS:
            require_dataset(PUBLIC_DATASETS[source], place)


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


def make_study_part(datasets: str, methods: str, epsilons: str, seeds: int = 0) -> StudyPart:
    """The part of a study that the command line selects."""
    from fulcrum.study.studies import StudyPart

    return StudyPart(split_comma_list(datasets), split_comma_list(methods), parse_epsilon_list(epsilons), seeds)


def parse_epsilon_list(text: str) -> list[float]:
    """ "6.38,1.64" -> [6.38, 1.64]."""
    try:
        return [float(word) for word in split_comma_list(text)]
    except ValueError:
        raise ConfigError(f"--epsilons {text} is not a list of numbers; write for example 6.38,1.64.") from None


def split_comma_list(text: str) -> list[str]:
    """ "a, b" -> ["a", "b"]."""
    return [word.strip() for word in text.split(",") if word.strip()]


def warn_unknown_methods(unknown: tuple[str, ...]) -> None:
    """Name the methods that a study asks for and this version does not have."""
    if unknown:
        view.print_message(f"warning: {', '.join(unknown)} not built into this version; their rows stay empty.")
