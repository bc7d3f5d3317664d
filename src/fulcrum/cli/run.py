"""`fulcrum run` and `fulcrum resume`."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Annotated

import typer

from fulcrum.cli import show, view
from fulcrum.cli.failures import explain_interruption
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption, with_settings
from fulcrum.settings.schema import Settings

ObserveOption = Annotated[
    list[str],
    typer.Option(
        "--observe",
        metavar="NAME",
        help="Watch the run: `lines`, a name that a package offers, or package.module:observer; repeat for more.",
    ),
]


@with_settings
def run(
    settings: Settings,
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder for the run; default runs/DATA-METHOD-TIME.")
    ] = None,
    observe: ObserveOption = [],  # noqa: B006  # typer needs a list
    no_rehearsal: Annotated[
        bool, typer.Option("--no-rehearsal", help="Choose nothing on made-up data first, whatever clip.rehearse says.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Train one model privately over the data of several parties."""
    from fulcrum import runs as api
    from fulcrum.runs.folder import check_free_folder

    if no_rehearsal:
        settings = settings.replace(clip={"rehearse": False})
    watching = [api.find_observer(name) for name in observe]
    if out is not None:
        check_free_folder(out)  # before the rehearsal, which takes a while
    federation = view.rehearse_aloud(api.prepare_unrehearsed(settings), quiet)
    folder = (
        out if out is not None else choose_free_folder(f"{make_source_slug(settings.data.source)}-{settings.method}")
    )
    for warning in [*show.collect_run_warnings(federation), *api.collect_ledger_warnings(federation)]:
        # Always say so if there is no guarantee, or only under an assumption.
        view.print_message(f"warning: {warning}", quiet and federation.plan.sound and not federation.plan.shares_noise)
    show.print_own_notes(federation.problem.dataset, quiet)
    bar = view.make_progress_observer(settings.method, settings.train.rounds, quiet)
    with explain_interruption(folder):
        result = api.execute(federation, folder, observers=[bar, *watching])
    show.print_summary(result.summary, folder, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    observe: ObserveOption = [],  # noqa: B006  # typer needs a list
    repeat: Annotated[
        bool,
        typer.Option("--repeat", help="Draw and pay again the secure rounds whose checkpoints were lost."),
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Continue a run after Ctrl-C or a crash, as if it had never stopped."""
    from fulcrum import runs as api
    from fulcrum.clipping import find_rule
    from fulcrum.runs.binding import StoredRun

    watching = [api.find_observer(name) for name in observe]
    settings = StoredRun.read(folder).read_settings()
    if not find_rule(settings.clip.rule).sound:
        view.print_message(f"warning: NOT SOUND: {show.NOMINAL_NOTE}.")
    if settings.privacy.aggregation == "ideal-secagg":
        view.print_message(f"warning: {show.ASSUMED_NOTE}.")
    bar = view.make_progress_observer(settings.method, settings.train.rounds, quiet)
    with explain_interruption(folder):
        result = api.resume(folder, observers=[view.make_notes_observer(), bar, *watching], repeat=repeat)
    show.print_summary(result.summary, folder, as_json)


def choose_free_folder(name: str) -> Path:
    """runs/NAME-TIME, with a number appended if that exists."""
    stem = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    number, folder = 1, Path("runs") / stem
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{stem}-{number}"
    return folder


def make_source_slug(source: str) -> str:
    """A data source as part of a folder's name: mnist, patients (for a/patients.npz), package.module-function."""
    path = Path(source)
    name = path.name.partition(".")[0] if path.suffix and ":" not in source else source
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "data"
