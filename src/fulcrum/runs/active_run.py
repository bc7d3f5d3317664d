"""A run in progress, and its current privacy statement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fulcrum
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.statement import AccountedRun, make_statement, statement_to_markdown
from fulcrum.runs import folder as record
from fulcrum.runs.folder import RunFolder
from fulcrum.training.federation import Federation


@dataclass(frozen=True)
class ActiveRun:
    """A run with its outputs. id: its name in the ledger. folder: None where nothing is stored.

    notes: warnings about this run that its outputs show, such as rounds that are paid a second time.
    """

    federation: Federation
    folder: RunFolder | None
    ledger: Ledger
    id: str
    notes: tuple[str, ...] = ()


def write_privacy_statement(run: ActiveRun, rounds_done: int, finished: bool) -> dict[str, Any]:
    """The privacy statement after `rounds_done` rounds; also written to the folder."""
    settings, problem = run.federation.settings, run.federation.problem
    own = run.ledger.get_spends(run.id)
    words = make_statement(
        AccountedRun(
            settings=settings,
            plan=run.federation.plan,
            rule=problem.rule,
            spent=run.ledger.get_spends() if settings.run.ledger else own,
            run_id=run.id,
            scope="ledger" if settings.run.ledger else "run",
            randomness_mode=problem.randomness.mode,
            dataset_name=problem.dataset.name,
            dataset_warnings=problem.dataset.warnings,
            finished=finished,
            rounds_done=rounds_done,
            version=fulcrum.__version__,
            date=record.current_utc_time(),
            run_spent=own,
        )
    )
    if run.folder:
        run.folder.write_json("privacy.json", words)
        run.folder.write_text("PRIVACY.md", statement_to_markdown(words))
    return words
