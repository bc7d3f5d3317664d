"""`fulcrum score`: a finished run's model on a party's own private records, as a noised release that they pay for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulcrum.cli import view
from fulcrum.cli.evaluate import DataDirOption
from fulcrum.cli.export import ModelOption, RunArgument, load_run
from fulcrum.cli.options import DebugOption, JsonOption
from fulcrum.errors import ConfigError


def score(
    folder: RunArgument,
    data: Annotated[
        str, typer.Option("--data", metavar="SOURCE", help="The party's own records, as for fulcrum party.")
    ] = "",
    party: Annotated[str, typer.Option("--party", help="The party's name.")] = "",
    ledger: Annotated[Path | None, typer.Option("--ledger", help="The party's ledger, in which it pays.")] = None,
    hold_out: Annotated[
        float, typer.Option("--hold-out", help="The fraction of its units that the party kept out of training.")
    ] = 0.0,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="What the scored units pay.")] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="Default: the run's.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="File to write and to hand over.")] = None,
    merge: Annotated[
        list[Path], typer.Option("--merge", metavar="FILE", help="Add up the files of the parties; repeat for more.")
    ] = [],  # noqa: B006  # typer needs a list
    data_dir: DataDirOption = "",
    model: ModelOption = "",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Score a run's model on private records that did not train: noised sums leave, and the scored units pay.

    Each party runs it with its own data and ledger; --merge adds up the files of all of them.
    """
    from fulcrum.cli.show import list_comparisons, print_parties
    from fulcrum.data import load as load_data
    from fulcrum.runs import afterwards, private_scores
    from fulcrum.runs import folder as record

    trained = load_run(folder, model)
    if merge:
        found = private_scores.read_scores(trained, merge)
        shown = private_scores.merge_private_scores(trained, private_scores.make_blank_records(trained), found)
    else:
        wanted = {"--data": data, "--party": party, "--ledger": ledger, "--hold-out": hold_out, "--epsilon": epsilon}
        missing = [name for name, value in wanted.items() if not value]
        if missing or ledger is None or epsilon is None:
            raise ConfigError(f"{missing[0]} is missing; a release of private scores needs {', '.join(wanted)}.")
        task = afterwards.choose_task(trained)
        records = load_data(data, data_dir, task=task, need=("train",), table=trained.settings.table)
        shown = private_scores.release_private_scores(
            *(trained, private_scores.fit_records(trained, records), party, ledger, hold_out, epsilon),
            delta or trained.settings.privacy.delta,
        )
        view.print_message(f"warning: {shown['note']}")
        if out is not None:
            record.write_file_atomically(out, record.to_json_text(shown).encode())
    if as_json:
        view.print_json(shown)
        return
    view.print_name_value_lines(
        [
            *((name, view.format_metric(name, value)) for name, value in shown["metrics"].items()),
            *list_comparisons(shown),
        ]
    )
    print_parties(shown)
