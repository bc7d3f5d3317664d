"""`fulcrum demo`: the main job on data that everybody has, beside what privacy costs."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import show, view
from fulcrum.cli.failures import resumable
from fulcrum.cli.options import Debug, Json, Quiet
from fulcrum.cli.run import free_folder
from fulcrum.privacy.statement.units import UNITS
from fulcrum.settings.files import parse
from fulcrum.study.records import score_of_record, score_value

if TYPE_CHECKING:
    from fulcrum.settings.schema import Settings

# The same run under other methods. Without privacy there is no target to calibrate the noise to.
COMPARED: dict[str, dict[str, Any]] = {"moo": {}, "dp-sgd": {}, "none": {"privacy.epsilon": None}}


def demo(
    out: Annotated[Path | None, typer.Option("--out", help="New folder for the runs; default runs/demo-TIME.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train privately on scikit-learn's digits, and compare with a fixed C and with no privacy."""
    folder = free_folder("demo") if out is None else out
    view.say("Digits over five parties, with unequal and label-skewed data: private, then two comparisons.", quiet)
    summaries = {method: once(settings_of(method), folder / method, quiet) for method in COMPARED}
    if as_json:
        view.print_json({"folder": str(folder), "runs": summaries})
        return
    score = score_of_record(summaries["moo"]).name
    columns = ("run", score, "epsilon", "by party", "C over the rounds")
    view.print_table(columns, [(method, *row(summary)) for method, summary in summaries.items()])
    terms = summaries["moo"]
    unit = UNITS[terms["unit"]].short
    view.print_line(
        f"epsilon is that of one {unit}, the largest of any party, at delta {terms['delta']:g}; "
        f"{score} is on {terms['evaluated_on']}."
    )
    view.print_line(
        "dp-sgd and none are comparisons that only public data allows: with private data every run spends again."
    )
    print(f"folder of the private run  {folder / 'moo'}")


def settings_of(method: str) -> Settings:
    """demo.toml under one of the compared methods."""
    raw = tomllib.loads(resources.files("fulcrum").joinpath("demo.toml").read_text(encoding="utf-8"))
    return parse(raw, COMPARED[method], method)


def once(settings: Settings, folder: Path, quiet: bool) -> dict[str, Any]:
    """One of the runs; returns its summary."""
    from fulcrum import runs as api

    federation = api.prepare(settings)
    bar = view.progress_observer(settings.method.ljust(6), settings.train.rounds, quiet)
    with resumable(folder):
        return api.execute(federation, folder, observers=[bar]).summary


def row(summary: dict[str, Any]) -> tuple[view.Cell, ...]:
    """A run's line in the table."""
    private = summary["private"]
    score, value = score_of_record(summary), score_value(summary)
    return (
        view.percent(value) if score.is_fraction else score.text(value),
        view.epsilon(summary["epsilon"]) if private else "not private",
        show.spread(summary["epsilons"]) if private else "",
        show.course(summary["C"]),
    )
