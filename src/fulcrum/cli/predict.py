"""`fulcrum predict`: a finished run's model on new records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulcrum.cli import view
from fulcrum.cli.evaluate import DataDirOption
from fulcrum.cli.export import ModelOption, RunArgument, load_run
from fulcrum.cli.options import DebugOption, QuietOption


def predict(
    folder: RunArgument,
    data: Annotated[
        str,
        typer.Option("--data", metavar="SOURCE", help="An .npz file with an array x, or a data source's test records."),
    ] = "",
    out: Annotated[Path | None, typer.Option("--out", help="A .csv or .npz file; default: CSV on stdout.")] = None,
    data_dir: DataDirOption = "",
    model: ModelOption = "",
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Predict new records with a run's model: classes with their probabilities, labels or numbers.

    The records stay on this machine, and so do the predictions: what is predicted of private records is private.
    """
    from fulcrum.errors import ConfigError, RunError
    from fulcrum.runs import afterwards

    if not data:
        raise ConfigError("--data is missing; name the records to predict, such as --data new.npz.")
    if out is not None and out.exists():
        raise RunError(f"{out} exists; choose another --out, or remove it.")
    trained = load_run(folder, model)
    found = afterwards.predict(trained, afterwards.load_inputs(trained, data, data_dir))
    text = afterwards.write_predictions(found, out)
    if out is None:
        typer.echo(text, nl=False)
    else:
        view.print_message(f"wrote {len(found.values)} predictions to {out}", quiet)
