"""`fulcrum evaluate`: a finished run's model on public test records."""

from __future__ import annotations

from typing import Annotated

import typer

from fulcrum.cli import view
from fulcrum.cli.export import ModelOption, RunArgument, load_run
from fulcrum.cli.options import DebugOption, JsonOption

DataOption = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="SOURCE",
        help="A data source whose test records (x_test, y_test) are public; default: the run's.",
    ),
]
DataDirOption = Annotated[str, typer.Option("--data-dir", help="Folder to search for the data first.")]


def evaluate(
    folder: RunArgument,
    data: DataOption = "",
    data_dir: DataDirOption = "",
    model: ModelOption = "",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Score a run's model on public test records. The training records are not needed.

    Scores are computed in the clear, so the records must be public. Private records are scored while training, with
    noise that their own account pays for (privacy.evaluation_epsilon).
    """
    from fulcrum.cli.show import print_parties
    from fulcrum.runs.afterwards import load_test_records, score_model

    trained = load_run(folder, model)
    records = load_test_records(trained, data, data_dir)
    found = score_model(trained, records)
    if as_json:
        view.print_json({**found, "data": records.name, "run": str(folder)})
        return
    facts: list[tuple[str, view.TableValue]] = [
        ("data", f"{records.name}, {found['records']} public test records"),
        *((name, view.format_metric(name, value)) for name, value in found["metrics"].items()),
        ("model", f"sha256 {trained.sha256}"),
    ]
    view.print_name_value_lines(facts)
    print_parties(found)
