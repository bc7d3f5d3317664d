"""`fulcrum ledger`: look at a kept ledger, and change a party's budget in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption, JsonOption
from fulcrum.errors import ConfigError, InputError


def ledger(
    path: Annotated[
        Path, typer.Argument(metavar="LEDGER", help="A ledger: what --ledger names, or RUN/ledger.sqlite.")
    ],
    party: Annotated[str | None, typer.Option("--party", help="Only this party.")] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="Give that party (or all) this epsilon over all runs from now on.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what every party has spent over all runs of a ledger; with --budget, change its limit."""
    from fulcrum.privacy.ledger import Ledger

    if not path.is_file():
        raise InputError(f"there is no ledger {path}; `fulcrum run --ledger {path}` would start one.")
    with Ledger.open(path) as opened:
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
        spent, lines = opened.epsilons(), [line for line in opened.list_run_costs() if line.party in chosen]
    if as_json:
        view.print_json(
            {
                "parties": [{**vars(accounts[name]), "epsilon": spent[name]} for name in chosen],
                "runs": [vars(line) for line in lines],
            }
        )
        return
    view.print_table(
        ("party", "unit", "spent", "budget", "delta", "accountant", "runs", "data"),
        [
            (
                name,
                accounts[name].unit,
                view.format_epsilon(spent[name]),
                "no limit" if accounts[name].budget is None else view.format_value(accounts[name].budget),
                f"{accounts[name].delta:g}",
                accounts[name].accountant,
                sum(line.party == name for line in lines),
                accounts[name].population,
            )
            for name in chosen
        ],
    )
