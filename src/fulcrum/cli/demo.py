"""`fulcrum demo`: private training on 1,797 handwritten digits, compared with a fixed C and with no privacy."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import show, view
from fulcrum.cli.failures import explain_interruption
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption
from fulcrum.cli.run import choose_free_folder
from fulcrum.settings.files import parse_settings
from fulcrum.study.records import get_record_score, get_score_value

if TYPE_CHECKING:
    from fulcrum.settings.schema import Settings

# The same run under other methods. Without privacy there is no target to calibrate the noise to.
COMPARED_METHODS: dict[str, dict[str, Any]] = {"moo": {}, "dp-sgd": {}, "none": {"privacy.epsilon": None}}


def demo(
    out: Annotated[Path | None, typer.Option("--out", help="New folder for the runs; default runs/demo-TIME.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Train privately on 1,797 handwritten digits, and compare with a fixed C and with no privacy."""
    folder = choose_free_folder("demo") if out is None else out
    view.print_message(
        "Digits over five parties, with unequal and label-skewed data: private, then two comparisons.", quiet
    )
    summaries = {
        method: run_demo_method(make_demo_settings(method), folder / method, quiet) for method in COMPARED_METHODS
    }
    if as_json:
        view.print_json({"folder": str(folder), "runs": summaries})
        return
    score = get_record_score(summaries["moo"]).name
    columns = ("run", score, "epsilon", "by party", "C over the rounds")
    view.print_table(columns, [(method, *make_summary_row(summary)) for method, summary in summaries.items()])
    terms = summaries["moo"]
    from fulcrum.privacy.statement.units import UNIT_TEXTS

    unit = UNIT_TEXTS[terms["unit"]].short
    view.print_line(
        f"epsilon is that of one {unit}, the largest of any party, at delta {terms['delta']:g}; "
        f"{score} is on {terms['evaluated_on']}."
    )
    if terms["simulation"]:
        view.print_line(
            "All three are simulations: their random numbers follow from a seed, which repeats them bit for bit."
        )
    view.print_line(
        "dp-sgd and none are comparisons that only public data allows: with private data every run spends again."
    )
    print(f"folder of the private run  {folder / 'moo'}")


def make_demo_settings(method: str) -> Settings:
    """demo.toml under one of the compared methods."""
    raw = tomllib.loads(resources.files("fulcrum").joinpath("demo.toml").read_text(encoding="utf-8"))
    return parse_settings(raw, COMPARED_METHODS[method], method)


def run_demo_method(settings: Settings, folder: Path, quiet: bool) -> dict[str, Any]:
    """One of the runs; returns its summary."""
    from fulcrum import runs as api

    federation = view.rehearse_aloud(api.prepare_unrehearsed(settings), quiet)
    bar = view.make_progress_observer(settings.method.ljust(6), settings.train.rounds, quiet)
    with explain_interruption(folder):
        return api.execute(federation, folder, observers=[bar]).summary


def make_summary_row(summary: dict[str, Any]) -> tuple[view.TableValue, ...]:
    """A run's line in the table."""
    private = summary["private"]
    score, value = get_record_score(summary), get_score_value(summary)
    return (
        view.format_percent(value) if score.is_fraction else score.text(value),
        view.format_epsilon(summary["epsilon"]) if private else "not private",
        show.format_epsilon_spread(summary["epsilons"]) if private else "",
        show.format_C_course(summary["C"]),
    )
