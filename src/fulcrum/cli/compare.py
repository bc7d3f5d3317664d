"""`fulcrum compare`: several methods, epsilons and seeds on your own data, ranked."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import view
from fulcrum.cli.failures import RunInterrupted
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption, with_settings
from fulcrum.cli.study_options import parse_epsilon_list, split_comma_list

if TYPE_CHECKING:
    from fulcrum.study.compare import ComparedCell

COLUMNS = ("epsilon", "place", "method")


@with_settings
def compare(
    make_settings: Callable[..., Any],
    methods: Annotated[
        str, typer.Option("--methods", metavar="A,B", help="Methods to compare; see `fulcrum methods`.")
    ] = "moo,dp-sgd",
    epsilons: Annotated[
        str,
        typer.Option("--epsilons", metavar="A,B", help="Epsilons to compare them at; default: that of the settings."),
    ] = "",
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="N|A,B", help="How many seeds, or which: 3, or 0,7,8.")
    ] = "3",
    against: Annotated[
        str, typer.Option("--against", help="The method that others are compared with; default: the first.")
    ] = "",
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the results; the same command goes on with what is there.")
    ] = Path("comparison"),
    backend: Annotated[str, typer.Option("--backend", help="auto, sequential, processes, or stacked (GPU).")] = "auto",
    workers: Annotated[int, typer.Option("--processes", min=0, help="Processes to run in; 0: one per core.")] = 0,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Stop cleanly before this time is up; 0: no limit.")
    ] = 0.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare methods on your data: each at each epsilon and seed; a ranking with intervals, and a page.

    On private data every run is charged to --ledger; without one the comparison is refused.
    """
    from fulcrum.analysis.report.files import write_page
    from fulcrum.analysis.report.reading import Problems
    from fulcrum.analysis.report.study_page import make_study_page, ranking_to_csv, ranking_to_json, read_study
    from fulcrum.runs import folder as record
    from fulcrum.study import store
    from fulcrum.study.backends import BackendOptions, TimeBudget
    from fulcrum.study.calibrate import calibrate_jobs
    from fulcrum.study.compare import (
        REQUEST_FILE,
        check_charges,
        describe_request,
        list_comparison_jobs,
        run_charged_jobs,
    )
    from fulcrum.study.run_job import load_study_data
    from fulcrum.study.worker import run_missing_jobs

    clock = TimeBudget(seconds)
    names = split_comma_list(methods)
    jobs = list_comparison_jobs(make_settings, names, parse_epsilon_list(epsilons), parse_seeds(seeds))
    reference = against or names[0]
    if reference not in names:
        from fulcrum.errors import ConfigError

        raise ConfigError(f"--against {reference} is not among the methods {', '.join(names)}.")
    dataset = load_study_data(jobs[0].settings)
    private = dataset.train is not None and not dataset.public
    done = store.load_results(out) if out.is_dir() else {}
    todo = store.find_missing_jobs(jobs, done)
    if private and todo:
        total = check_charges(jobs, dataset.name)
        view.print_message(
            f"{dataset.name} is private: {len(todo)} runs are charged to {jobs[0].settings.run.ledger}, all of them "
            f"together at most epsilon = {view.format_epsilon(total)} for each party.",
            quiet,
        )
    out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["fulcrum", *sys.argv[1:]])
    record.write_file_atomically(
        out / REQUEST_FILE, record.to_json_text(describe_request(jobs, command, reference)).encode()
    )

    def read_cells() -> Sequence[ComparedCell]:
        return read_study(out, Problems())[0]

    with explain_stop(out), show_live_table(read_cells, len(jobs), quiet or as_json) as (say, refresh):
        if private:
            run_charged_jobs(todo, out, say, refresh)
        elif todo:
            how = BackendOptions(jobs[0].settings.data.dir, workers=workers, clock=clock, say=say)
            run_missing_jobs(calibrate_jobs(todo), out, backend, how, on_done=refresh)
    cells = read_cells()
    record.write_file_atomically(out / "ranking.json", record.to_json_text(ranking_to_json(cells)).encode())
    record.write_file_atomically(out / "ranking.csv", ranking_to_csv(cells).encode())
    write_page(out / "report.html", make_study_page(out))
    if as_json:
        view.print_json({"folder": str(out), "ranking": ranking_to_json(cells)})
        return
    print_ranking(cells, reference)
    view.print_line(f"{out / 'report.html'} shows it; `fulcrum watch {shlex.quote(str(out))}` follows it live.")


def parse_seeds(text: str) -> list[int]:
    """ "3" -> [0, 1, 2]; "0,7,8" -> [0, 7, 8]."""
    from fulcrum.errors import ConfigError

    words = split_comma_list(text)
    try:
        numbers = [int(word) for word in words]
    except ValueError:
        raise ConfigError(f"--seeds {text} is no number and no list of numbers; write 3, or 0,7,8.") from None
    if any(number < 0 for number in numbers):
        raise ConfigError(f"--seeds {text}: seeds are not negative.")
    return list(range(numbers[0])) if len(words) == 1 and "," not in text else numbers


def print_ranking(cells: Sequence[ComparedCell], against: str) -> None:
    """The ranking as a table, with notes."""
    from fulcrum.analysis.report.study_page import format_ranking_rows

    score = cells[0].score if cells else None
    columns = (*COLUMNS, score.title if score else "score", f"better than {against} by", "seeds")
    view.print_table(columns, format_ranking_rows(cells))
    if any(cell.is_clear for cell in cells):
        view.print_message("* the 95% interval of the paired difference leaves out zero")
    if any(not cell.sound for cell in cells):
        view.print_message("† not sound: its C looks at private values, so its epsilon is nominal")


@contextlib.contextmanager
def explain_stop(out: Path) -> Iterator[None]:
    """Around the runs: Ctrl-C ends them with the way to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise RunInterrupted(f"interrupted; finished runs are in {out}, the same command goes on.") from None


@contextlib.contextmanager
def show_live_table(
    read_cells: Callable[[], Sequence[ComparedCell]], wanted: int, quiet: bool
) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """(say, refresh): a table on a terminal that follows the runs; in a log a line per run; nothing where quiet."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield (lambda line: view.print_message(line, quiet)), (lambda _: None)
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:
        words = [f"0 of {wanted} runs"]

        def draw() -> None:
            live.update(make_live_table(read_cells(), words[0]), refresh=True)

        def say(line: str) -> None:
            words[0] = line
            draw()

        yield say, (lambda _: draw())


def make_live_table(cells: Sequence[ComparedCell], words: str) -> Any:
    """What is known so far, as a table with the last message below it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from fulcrum.analysis.report.study_page import format_ranking_rows

    table = Table(box=SIMPLE_HEAD, show_edge=False, caption=Text(words), caption_justify="left")
    for name in (*COLUMNS, "score", "better by", "seeds"):
        table.add_column(name)
    for row in format_ranking_rows(cells):
        table.add_row(*(Text(cell) for cell in row))
    return table
