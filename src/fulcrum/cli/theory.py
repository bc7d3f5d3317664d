"""`fulcrum theory`: evaluate and check the paper's statements and ours, on exact problems and on a real run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption, show_help_without_command, with_settings
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import Settings

if TYPE_CHECKING:
    from fulcrum.analysis.theory.findings import Finding
    from fulcrum.training.federation import Federation

app = typer.Typer(
    help="Evaluate and check the theory: the paper's statements and our own.", invoke_without_command=True
)
RoundsOption = Annotated[str, typer.Option("--at", metavar="ROUNDS", help="Rounds to look at, such as 0,25,199.")]
KappaOption = Annotated[float, typer.Option("--kappa", help="The price of C in L(C) = L_model(C) + kappa C.")]
DrawsOption = Annotated[int, typer.Option("--draws", help="Draws of sample and noise, the same for every C.")]


@app.callback()
def theory(context: typer.Context) -> None:
    """Evaluate and check the theory: the paper's statements and our own."""
    show_help_without_command(context)


@app.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Statements to check; default: all.")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="A page with statuses; default: docs/theory.md.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the tables and statuses into the page.")] = False,
    figures: Annotated[Path | None, typer.Option("--figures", help="A folder for figures (needs matplotlib).")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure every statement and compare its status with docs/theory.md. Exit code 1 where one differs."""
    from fulcrum.analysis.theory.findings import UNMEASURED
    from fulcrum.analysis.theory.page import PAGE, read_statuses, write_blocks
    from fulcrum.analysis.theory.statements import STATEMENTS

    known = {statement.name: statement for statement in STATEMENTS}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"{name!r} is no statement; choose from {', '.join(known)}.")
    chosen = [known[name] for name in names] if names else list(STATEMENTS)
    if write and names:
        raise ConfigError("--write makes the whole page anew; leave the names out.")
    file = page or (PAGE if PAGE.is_file() else None)
    if page is not None and not page.is_file():
        raise ConfigError(f"--page {page} is not there; name a page such as docs/theory.md.")
    stated = {s.name: s.status for s in STATEMENTS} if file is None else read_statuses(file)
    found: dict[str, Finding] = {}
    for statement in chosen:
        view.print_message(f"{statement.name}: {statement.claim}", quiet or as_json)
        found[statement.name] = statement.check()
        if not quiet and not as_json:
            view.print_table(("measured", "value"), found[statement.name].rows)
            view.print_line(f"{statement.source}: {found[statement.name].status}")
    if write:
        if file is None:
            raise ConfigError("--write needs the page; run it in the repository, or name the page with --page.")
        write_blocks(file, chosen, found)
        stated = read_statuses(file)
    if figures is not None:
        from fulcrum.analysis.report.figures import write_figures
        from fulcrum.analysis.theory.charts import make_bowl_chart, make_lemma_2_chart
        from fulcrum.analysis.theory.own_checks import BOWLS

        for path in write_figures(
            figures, [make_lemma_2_chart(), make_bowl_chart(BOWLS[0]), make_bowl_chart(BOWLS[3])]
        ):
            view.print_message(f"wrote {path}", quiet)
    differ = [s.name for s in chosen if found[s.name].status not in (stated.get(s.name), UNMEASURED)]
    if as_json:
        view.print_json({name: dataclasses.asdict(finding) for name, finding in found.items()})
    else:
        view.print_table(
            ("statement", "source", "status", "page"),
            [
                (
                    s.name,
                    s.source,
                    found[s.name].status,
                    "the same" if s.name not in differ else stated.get(s.name, "none"),
                )
                for s in chosen
            ],
        )
    if differ:
        view.print_message(f"statuses that differ from the page: {', '.join(differ)}")
        raise typer.Exit(1)


def prepare_public(settings: Settings) -> Federation:
    """The federation of the settings; ConfigError where its records are private."""
    from fulcrum.analysis.theory.on_run import refuse_private_records
    from fulcrum.runs.preparation import prepare

    federation = prepare(settings)
    refuse_private_records(federation)
    return federation


def parse_rounds(words: str, rounds: int) -> list[int]:
    """Rounds such as "0,25,199"; four of them spread over the run where none are given."""
    from fulcrum.analysis.theory.on_run import spread_rounds

    if not words:
        return spread_rounds(rounds, 4)
    try:
        found = sorted({int(word) for word in words.split(",")})
    except ValueError:
        raise ConfigError(f"--at {words!r} must be whole numbers with commas between, such as 0,25,199.") from None
    if found[0] < 0 or found[-1] > rounds:
        raise ConfigError(f"--at {words} must be from 0 to {rounds}, the number of rounds.")
    return found


@app.command()
@with_settings
def objective(
    settings: Settings,
    at: RoundsOption = "",
    kappa: KappaOption = 0.01,
    draws: DrawsOption = 32,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write all numbers as JSON; RUN/theory.json is shown by fulcrum report."),
    ] = None,
    figures: Annotated[Path | None, typer.Option("--figures", help="A folder for figures (needs matplotlib).")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure L(C), the expected loss after one private round plus kappa C, along a run on public records.

    CONFIG is a settings file or the folder of a finished run, which is trained again. Parts of L(C): the step itself,
    clipping, noise with sampling, and kappa C; the minimum; and where the rule has C.
    """
    from fulcrum.analysis.theory import readings
    from fulcrum.analysis.theory.objective import find_minimiser, measure_objective
    from fulcrum.analysis.theory.on_run import look, replay
    from fulcrum.analysis.theory.paper_checks import OBJECTIVE_GRID

    if draws < 2:
        raise ConfigError(f"--draws {draws} must be at least 2, for an interval.")
    federation = prepare_public(settings)
    told: list[dict[str, Any]] = []
    for snapshot in replay(federation, parse_rounds(at, settings.train.rounds)):
        moment = look(federation, snapshot)
        points = measure_objective(moment.step, moment.loss, OBJECTIVE_GRID, kappa, draws)
        best = find_minimiser(points)
        rests = {
            name: readings.find_resting_point(readings.make_drift(name, moment.batch, kappa)).C
            for name in readings.READINGS
        }
        entry = {
            "round": moment.round,
            "kappa": kappa,
            "draws": draws,
            "units_used": moment.used,
            "units": moment.units,
            "C_of_the_rule": moment.C,
            "median_norm": float(moment.batch.norms.median()),
            "best_C": best.C,
            "readings_rest_at": rests,
            "points": [dataclasses.asdict(point) for point in points],
        }
        told.append(entry)
        if as_json:
            continue
        view.print_line(
            f"after round {moment.round}: least L(C) at C = {best.C:.3g}; the rule has C = {moment.C:.3g}, the median "
            f"norm is {entry['median_norm']:.3g}; readings of A2 rest at "
            + ", ".join(f"{name} {C:.3g}" for name, C in rests.items())
        )
        view.print_table(
            ("C", "L(C)", "+-", "step", "clipping", "noise", "kappa C", "dL_model/dC", "kappa + that"),
            [
                tuple(
                    f"{value:.4g}"
                    for value in (
                        p.C,
                        p.total,
                        p.interval,
                        p.step,
                        p.clipping,
                        p.noise,
                        p.price,
                        p.slope,
                        p.slope + kappa,
                    )
                )
                for p in points
            ],
        )
    if out is not None:
        from fulcrum.runs.folder import to_json_text, write_file_atomically

        write_file_atomically(out, to_json_text({"moments": told}).encode())
        view.print_message(f"wrote {out}")
    if figures is not None:
        from fulcrum.analysis.report.figures import write_figures
        from fulcrum.analysis.report.theory_charts import make_objective_charts

        for path in write_figures(figures, make_objective_charts(told)):
            view.print_message(f"wrote {path}")
    if as_json:
        view.print_json(told)


@app.command()
@with_settings
def constants(
    settings: Settings,
    at: RoundsOption = "",
    best: Annotated[float, typer.Option("--best", help="The least loss known, L*; 0 is valid for most losses.")] = 0.0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Estimate PL and smoothness along a run on public records: is the loss PL, is it convex?

    PL: |grad L|^2 / (2 (L - L*)), an upper bound on mu at that point. Smoothness: the largest eigenvalue of the
    Hessian by power iteration, a lower bound on M. A least eigenvalue below 0: not convex there.
    """
    from fulcrum.analysis.theory.on_run import estimate_constants, look, replay

    federation = prepare_public(settings)
    found = [
        estimate_constants(look(federation, snapshot), best)
        for snapshot in replay(federation, parse_rounds(at, settings.train.rounds))
    ]
    if as_json:
        view.print_json([dataclasses.asdict(each) for each in found])
        return
    view.print_table(
        ("round", "loss", "|grad L|", "PL ratio", "largest eigenvalue", "least eigenvalue"),
        [(e.round, *(f"{v:.4g}" for v in (e.loss, e.gradient, e.pl, e.smoothness, e.lowest))) for e in found],
    )
    view.print_line(
        f"mu is at most {min(e.pl for e in found):.3g}, M at least {max(e.smoothness for e in found):.3g}; the loss is "
        + ("not convex on the way" if min(e.lowest for e in found) < 0 else "convex wherever it was looked at")
    )


@app.command()
@with_settings
def predict(settings: Settings, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Say before training which step suits the budget, and how wrong a fixed C would be, from public facts alone."""
    from fulcrum.analysis.theory.prediction import advise, collect_run_facts, compare_rounds
    from fulcrum.runs.preparation import prepare_unrehearsed

    federation = prepare_unrehearsed(settings)
    if federation.plan.central is not None:
        raise ConfigError('fulcrum theory describes privacy.unit = "example" or "person"; set one of them.')
    facts = collect_run_facts(federation)
    advice = advise(facts)
    rounds = compare_rounds(federation)
    if as_json:
        view.print_json({**dataclasses.asdict(advice), "rounds": rounds, "facts": dataclasses.asdict(facts)})
        return
    view.print_line(
        f"length of a local step (lr times C) {advice.step:.3g}; with it, {100 * advice.end:.0f}% of the way "
        "is left at the end"
    )
    view.print_line(
        f"with the learning rate that is right at C = 1: C = 0.01 leaves {100 * min(advice.wrong[0], 99):.0f}%, "
        f"C = 100 {100 * min(advice.wrong[1], 99):.0f}% (over 100%: further away than at the start)"
    )
    if not rounds:
        view.print_message("other numbers of rounds are compared at an epsilon (--epsilon), which these settings lack.")
        return
    view.print_table(
        ("rounds at this budget", "sigma", "best step", "left of the way, %"),
        [(r["rounds"], f"{r['sigma']:.3g}", f"{r['step']:.3g}", f"{100 * r['end']:.0f}") for r in rounds],
    )
    view.print_message(
        "A network is taken for a bowl; on measured grids the order of cells agrees to a rank correlation of 0.7 to "
        "0.8 (fulcrum theory check prediction). fulcrum rehearse measures instead."
    )
