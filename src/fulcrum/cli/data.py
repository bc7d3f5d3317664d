"""`fulcrum data`: which data sets are on this machine, getting them, and checking them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fulcrum.cli import view
from fulcrum.cli.failures import EXIT_FAILED
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption, show_help_without_command

app = typer.Typer(help="Which data sets are on this machine: list, fetch, verify.")

FolderOption = Annotated[
    str, typer.Option("--data-dir", help="Folder to look in first; then FULCRUM_DATA, then the user's cache.")
]


@app.callback(invoke_without_command=True)
def _show_help(context: typer.Context) -> None:
    """Which data sets are on this machine: list, fetch, verify."""
    show_help_without_command(context)


@app.command("list")
def list_(folder: FolderOption = "", as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List the data sets that have a name, and where each was found."""
    from fulcrum import data

    rows = data.list_available_datasets(folder)
    if as_json:
        view.print_json([{**vars(row), "where": None if row.where is None else str(row.where)} for row in rows])
        return
    columns = ("data", "examples", "status", "where")
    view.print_table(columns, [(row.name, row.examples, row.status, row.where) for row in rows])
    if any(row.status == "missing" for row in rows):
        view.print_message("Get a missing one with: fulcrum data fetch NAME")


@app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="mnist, fashion-mnist, cifar10.")],
    folder: Annotated[str, typer.Option("--data-dir", help="Where to put it; default: the user's cache.")] = "",
    mirror: Annotated[
        list[str],
        typer.Option("--mirror", help="Address to download from in place of the public ones; repeat for more."),
    ] = [],  # noqa: B006  typer only reads it
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Download data sets, checked against the public checksums; goes on where an earlier try stopped."""
    from fulcrum import data

    places: dict[str, Path] = {}
    for name in names:
        with show_download_progress(name, quiet) as report:
            places[name] = data.fetch(name, folder or None, mirror or None, report)
    if as_json:
        view.print_json({name: str(place) for name, place in places.items()})
        return
    view.print_name_value_lines(list(places.items()))


@app.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Data sets; default: those that are here.")
    ] = None,
    folder: FolderOption = "",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check files against the public checksums. Exits with 1 unless all are the public ones."""
    from fulcrum import data

    chosen = names or [row.name for row in data.list_available_datasets(folder) if row.where is not None]
    rows = [(name, status, path) for name in chosen for path, status in data.verify_dataset(name, folder)]
    if as_json:
        view.print_json([{"data": name, "status": status, "file": str(path)} for name, status, path in rows])
    else:
        view.print_table(("data", "status", "file"), rows)
    if any(status != "public" for _, status, _ in rows):
        raise typer.Exit(EXIT_FAILED)


@contextlib.contextmanager
def show_download_progress(name: str, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A live bar of bytes on stderr; nothing where that is not a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
