"""`fulcrum data`: which data sets are on this machine, getting and checking them; a schema for a table of your own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fulcrum.cli import changes, view
from fulcrum.cli.failures import EXIT_FAILED
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption, show_help_without_command
from fulcrum.errors import ConfigError

app = typer.Typer(help="Data sets on this machine (list, fetch, verify); a schema for your own table (describe).")

FolderOption = Annotated[
    str, typer.Option("--data-dir", help="Folder to look in first; then FULCRUM_DATA, then the user's cache.")
]


@app.callback(invoke_without_command=True)
def _show_help(context: typer.Context) -> None:
    """Data sets on this machine (list, fetch, verify); a schema for your own table (describe)."""
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


@app.command()
def describe(
    table: Annotated[
        str, typer.Argument(metavar="TABLE", help="A table's file, or the URL of a database: public or made-up data.")
    ],
    target: Annotated[str, typer.Option("--target", help="The column to predict; default the last one.")] = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write; default NAME.schema.toml beside the table; - prints it."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Everybody may see this table, or it is made up: nothing in it can leak.")
    ] = False,
    regression: Annotated[
        bool, typer.Option("--regression", help="The target is a number to predict, even where it could be classes.")
    ] = False,
    query: Annotated[str, typer.Option("--query", help="For a database: a table's name or a SELECT statement.")] = "",
    delimiter: Annotated[str, typer.Option("--delimiter", help="What separates cells; default by the ending.")] = "",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Propose a schema for a table, read off public or made-up data, and mark what would leak if it were private."""
    from fulcrum.data.sources.own import find_file
    from fulcrum.data.sources.tables import locate_schema_file
    from fulcrum.data.table import Schema, open_table
    from fulcrum.data.table.describe import propose_schema
    from fulcrum.data.table.reading import is_database_url

    place = table if is_database_url(table) else str(find_file(table, ""))
    known = Schema(delimiter=delimiter)
    proposal = propose_schema(open_table(place, known, query), known, target, regression)
    if as_json:
        view.print_json({"rows": proposal.rows, "schema": proposal.schema.to_mapping(), "leaks": dict(proposal.leaks)})
    else:
        text = proposal.to_toml(public)
        if out is None:
            out = Path("table.schema.toml") if is_database_url(table) else locate_schema_file(Path(place))
        if str(out) == "-":
            typer.echo(text, nl=False)
        else:
            _write_new_file(out, text)
            typer.echo(f"wrote {out}")
    # Also with --json and "-": whoever pipes a schema on must see it.
    leaking = sum(map(len, proposal.leaks.values()))
    if not public and leaking:
        view.print_message(
            f"warning: {leaking} entries (ranges, categories, gaps) were read off {table}; if it is private they tell "
            "about people in it. Describe public or made-up data instead (--public), or replace each entry marked "
            "LEAKS by public knowledge and set reviewed = true: until then private training refuses this schema."
        )
    if public:
        view.print_message(f"note: ranges and categories were read off {table}, which you declared public or made up.")


def _write_new_file(path: Path, text: str) -> None:
    """Write a file that is not there yet."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists and is not overwritten; choose another --out.") from None


app.command("changes")(changes.changes)


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
