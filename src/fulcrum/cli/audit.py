"""`fulcrum audit`: lower bounds on epsilon beside the claimed one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fulcrum.cli import show, view
from fulcrum.cli.failures import explain_interruption
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption, with_settings
from fulcrum.cli.run import choose_free_folder, make_source_slug
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import Settings

if TYPE_CHECKING:
    from fulcrum.analysis.audit.outcome import Audit


@with_settings
def audit(
    settings: Settings,
    run_folder: Path | None,
    canaries: Annotated[
        int, typer.Option("--canaries", min=1, help="Canaries per party, in a run that is trained for the audit.")
    ] = 200,
    kind: Annotated[
        str,
        typer.Option("--kind", help="gradient: seen in every release (white-box); example: by the model (black-box)."),
    ] = "gradient",
    releases: Annotated[
        Path | None,
        typer.Option(
            "--releases", metavar="FILE.npz", help="Audit others' releases: FILE.npz, with FILE.json beside it."
        ),
    ] = None,
    confidence: Annotated[float, typer.Option("--confidence", help="Of each bound, from 0.5 to below 1.")] = 0.95,
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder for the audited run; default runs/audit-DATA-METHOD-TIME.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure a lower bound on epsilon and print it beside the claimed one. Exit code 1 where a bound contradicts it.

    With settings (CONFIG.toml, options): train a run with canaries among each party's units. With the folder of a
    finished run: what its files still show. With --releases: the released vectors of other software.
    """
    from fulcrum.runs.folder import to_json_text, write_file_atomically

    if not 0.5 <= confidence < 1:
        raise ConfigError(f"--confidence {confidence} must be at least 0.5 and less than 1.")
    if releases is not None:
        from fulcrum.analysis.audit.releases import audit_releases, read_releases

        found = audit_releases(read_releases(releases), confidence)
    elif run_folder is not None:
        from fulcrum.analysis.audit.finished import audit_finished_run

        found = audit_finished_run(run_folder, confidence)
        write_file_atomically(run_folder / "audit.json", to_json_text(found.to_json()).encode())
    else:
        found = _train_with_canaries(settings, canaries, kind, confidence, out, quiet)
    if as_json:
        view.print_json(found.to_json())
    else:
        print_audit(found)
    if not found.passed:
        raise typer.Exit(1)


def _train_with_canaries(
    settings: Settings, canaries: int, kind: str, confidence: float, out: Path | None, quiet: bool
) -> Audit:
    from fulcrum import runs as api
    from fulcrum.analysis.audit.in_run import add_canaries, run_audit
    from fulcrum.engines.canaries import CANARY_KINDS

    if kind not in CANARY_KINDS:
        raise ConfigError(f"--kind {kind} is not known; choose {' or '.join(CANARY_KINDS)}.")
    audited = add_canaries(view.rehearse_aloud(api.prepare_unrehearsed(settings), quiet), canaries, kind)
    federation = audited.federation
    slug = f"audit-{make_source_slug(settings.data.source)}-{settings.method}"
    folder = choose_free_folder(slug) if out is None else out
    for warning in show.collect_run_warnings(federation):
        view.print_message(f"warning: {warning}", quiet and federation.plan.sound)
    bar = view.make_progress_observer(settings.method, settings.train.rounds, quiet)
    with explain_interruption(folder):
        _, found = run_audit(audited, folder, [bar], confidence)
    view.print_message(f"wrote {folder / 'audit.json'}", quiet)
    return found


def print_audit(found: Audit) -> None:
    """The bounds as a table, what they assume, what was compared, and the verdict."""
    from fulcrum.analysis.audit.outcome import format_lower_bound

    view.print_line(f"attacker: {found.view}; delta {found.delta:g}; each bound holds with {100 * found.confidence:g}%")
    if found.entries:
        view.print_table(("party", "claimed", "method", "at least", "of claim", "from"), found.list_rows())
    measured = found.to_json()["measured"]
    total = sum(len(entry.bounds) for entry in found.entries)
    if measured and total > 1:
        view.print_line(
            f"together: at least {format_lower_bound(measured['epsilon'])} ({measured['party']}, {measured['method']}) "
            f"with {100 * found.confidence:g}%, as the highest of {total} bounds"
        )
    for line in found.list_assumptions():
        view.print_line(line)
    for name, agreed in found.checks.items():
        view.print_line(f"{'agrees' if agreed else 'DOES NOT AGREE'}: {name}")
    for note in found.notes:
        view.print_line(f"note: {note}")
    view.print_line(
        "nothing contradicts the claim"
        if found.passed
        else "the claim is contradicted: more is released than it says, or an assumption above is wrong"
    )
