"""`fulcrum ledger`: look at a kept ledger, and change a party's budget in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption, JsonOption
from fulcrum.errors import ConfigError, InputError

if TYPE_CHECKING:
    from fulcrum.privacy.ledger import Ledger, RunCostLine, RunRecord


def ledger(
    path: Annotated[
        Path, typer.Argument(metavar="LEDGER", help="A ledger: what --ledger names, or RUN/ledger.sqlite.")
    ],
    party: Annotated[str | None, typer.Option("--party", help="Only this party.")] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="Give that party (or all) this epsilon over all runs from now on.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the chain of hashes over all rows, and print its end.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what every party has spent over all runs of a ledger; with --budget, change its limit.

    A ledger is checked whenever it is opened. --verify says what was checked; a copy of its end, kept elsewhere, shows
    later whether rows were cut off or written anew.
    """
    from fulcrum.privacy.accounting import format_epsilon
    from fulcrum.privacy.ledger import Ledger

    if not path.is_file():
        raise InputError(f"there is no ledger {path}; `fulcrum run --ledger {path}` would start one.")
    with Ledger.open(path) as opened:
        if verify:
            _print_verified(opened, as_json)
            return
        accounts = opened.accounts()
        if party is not None and party not in accounts:
            raise ConfigError(
                f"--party {party} is not in {path}; it holds {', '.join(list(accounts)[:8]) or 'nobody'}."
            )
        chosen = list(accounts) if party is None else [party]
        if budget is not None:
            for name in chosen:
                opened.change_budget(name, budget)
            accounts = opened.accounts()
        costs, lines = opened.costs(), [line for line in opened.list_run_costs() if line.party in chosen]
        records, composed = opened.runs(), {name: opened.describe_composition(name) for name in chosen}
        head = opened.head()
    shown = [record for record in records.values() if party is None or any(line.run == record.id for line in lines)]
    if as_json:
        view.print_json(
            {
                "ledger": vars(head),
                "parties": [
                    {
                        **vars(accounts[name]),
                        "epsilon": costs[name].epsilon,
                        "delta_spent": costs[name].delta,
                        "composition": composed[name],
                    }
                    for name in chosen
                ],
                "runs": [vars(line) for line in lines],
                "records": [vars(record) for record in shown],
            }
        )
        return
    view.print_table(
        ("party", "unit", "spent", "budget", "delta", "accountant", "runs", "data"),
        [
            (
                name,
                accounts[name].unit,
                format_epsilon(costs[name].epsilon),
                "no limit" if accounts[name].budget is None else view.format_value(accounts[name].budget),
                f"{accounts[name].delta:g}",
                accounts[name].accountant,
                sum(line.party == name for line in lines),
                accounts[name].population,
            )
            for name in chosen
        ],
    )
    if shown:
        view.print_line("")
        view.print_table(
            ("run", "rule", "sound", "randomness", "arithmetic", "parties", "rounds", "epsilon"),
            [_make_run_row(record, [line for line in lines if line.run == record.id]) for record in shown],
        )
    for sentence in dict.fromkeys(composed.values()):
        who = [name for name in chosen if composed[name] == sentence]
        view.print_line(f"{who[0] if len(who) == 1 else f'{len(who)} parties'}: {sentence}")


def _make_run_row(record: RunRecord, lines: Sequence[RunCostLine]) -> tuple[object, ...]:
    """A run as a line of the table: what it was, and the most that it cost a party by itself."""
    from fulcrum.privacy.accounting import format_epsilon

    known = record.is_known
    sound = ("yes" if record.sound else "NO") if known else record.rule
    return (
        record.id[:12],
        record.rule + ("" if record.private or not known else " (no noise)"),
        sound,
        record.randomness + (", simulation" if record.simulation else ""),
        record.arithmetic,
        len(lines),
        max((line.last_round + 1 for line in lines), default=0),
        format_epsilon(max((line.epsilon for line in lines), default=0.0)),
    )


def _print_verified(opened: Ledger, as_json: bool) -> None:
    """The end of the chain of an opened, that is checked, ledger."""
    head = opened.head()
    if as_json:
        view.print_json({"verified": head.sequence > 0, **vars(head)})
    elif head.sequence:
        view.print_line(
            f"ledger {head.ledger}: {head.sequence} rows, each covered by the hash of the next; "
            f"the last is {head.digest}."
        )
    else:
        view.print_line(
            f"{opened.path} has an older format without a chain of hashes, so nothing can be verified; "
            "its next row adds one."
        )
