"""A private loop in its ledger: who pays, what the run is, what a step costs, and the statement."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulcrum
from fulcrum.data.fingerprints import KEY_MARK, compute_person_digests, name_record_key
from fulcrum.errors import BudgetError
from fulcrum.integrations.terms import LoopTerms
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger import Ledger, LedgerAccount, RunRecord, make_seed_digest
from fulcrum.privacy.statement import AccountedRun, make_statement, statement_to_markdown
from fulcrum.rng import CipherRandomness
from fulcrum.runs.active_run import list_released_runs
from fulcrum.runs.binding import check_record_key
from fulcrum.runs.folder import current_utc_time
from fulcrum.training.loop import reserve_round


@dataclass(frozen=True)
class LoopAccount:
    """The ledger's side of one run. run: its id there. kept: whether the ledger is a file that outlives the run."""

    ledger: Ledger
    terms: LoopTerms
    run: str
    kept: bool
    randomness: CipherRandomness
    seed: int | None

    @staticmethod
    def open_ledger(path: str | Path | None) -> Ledger:
        """The ledger of a file; in memory without one."""
        return Ledger.open(":memory:" if path is None else path)

    @property
    def party(self) -> str:
        """The name under which this loop's data pays."""
        return self.terms.plan.name(0)

    @property
    def replays(self) -> bool:
        """Whether a step that is done again releases the same bits, and so costs nothing twice."""
        return self.seed is not None

    def register(self) -> None:
        """Say in the ledger what this run is; before its first release. Again: nothing changes."""
        rule, ledger = self.terms.rule, self.ledger
        ledger.bring_to_current_format()
        if self.kept and self.terms.persons:
            self._register_persons()
        ledger.register_run(
            RunRecord(
                id=self.run,
                rule=rule.name,
                sound=rule.sound,
                private=rule.private,
                randomness=self.randomness.mode,
                arithmetic="fast",
                aggregation="plain",
                unit=self.terms.plan.unit,
                seed_digest="" if self.seed is None else make_seed_digest(self.seed, ledger.identity),
                data_digest=hashlib.blake2b(
                    f"{self.terms.name}|{self.terms.party.units}".encode(), digest_size=16
                ).hexdigest(),
                settings_digest=str(self.terms.describe()["settings"]),
                simulation=self.seed is not None,
            )
        )

    def _register_persons(self) -> None:
        """Whose records these are, by keyed digests: the ledger knows people again under any name of the data."""
        check_record_key(self.ledger)
        terms = self.terms.plan.terms(0)
        known_by = f"{terms['population']}, {KEY_MARK}{name_record_key()}"
        self.ledger.enroll_parties([LedgerAccount(self.party, **{**terms, "population": known_by})])
        self.ledger.register_all_units(self.run, {self.party: compute_person_digests(self.terms.persons)})

    def count_attempts(self, step: int) -> int:
        """How often this step was released before with other bits."""
        return 0 if self.replays else self.ledger.count_settled_attempts(self.run, step)

    def reserve(self, step: int, attempt: int) -> tuple[Event, ...]:
        """Pay for a step before it is released; BudgetError where the budget does not allow it."""
        if step >= self.terms.steps:
            raise BudgetError(
                f"all {self.terms.steps} planned steps are done, and the noise was chosen for these; plan more epochs "
                "from the start, or stop here."
            )
        events = self.terms.plan.events(0, step)
        if not reserve_round(self.ledger, self.run, step, self.terms.plan, {0: events}, attempt):
            raise BudgetError(
                f"the budget of {self.party!r} is spent, so step {step + 1} is not taken; nothing was released."
            )
        return events

    def settle(self, step: int, digest: str, attempt: int) -> None:
        """Note what was released."""
        self.ledger.settle(self.run, step, {self.party: digest}, attempt)

    def restore(self, steps: int) -> None:
        """Reserve the first steps again, in a ledger in memory that does not know them: after a restart."""
        known = self.ledger.get_spends(self.run).get(self.party)
        if self.kept or (known is not None and known.releases >= steps):
            return
        self.register()
        for step in range(steps):
            self.reserve(step, 0)

    @property
    def epsilon(self) -> float:
        """The epsilon of this run so far."""
        return self.ledger.epsilons(self.run).get(self.party, 0.0)

    def make_statement(self, steps: int, notes: tuple[str, ...]) -> dict[str, Any]:
        """The facts of PRIVACY.md after `steps` steps; see `fulcrum.privacy.statement`."""
        ledger, terms = self.ledger, self.terms
        costs = ledger.costs(None if self.kept else self.run)
        return make_statement(
            AccountedRun(
                settings=terms.settings,
                plan=terms.plan,
                rule=terms.rule,
                spent=ledger.get_spends() if self.kept else ledger.get_spends(self.run),
                costs=ledger.epsilons() if self.kept else ledger.epsilons(self.run),
                run_costs=ledger.epsilons(self.run),
                run_id=self.run,
                scope="ledger" if self.kept else "run",
                randomness_mode=self.randomness.mode,
                dataset_name=terms.name,
                finished=steps >= terms.steps,
                rounds_done=steps,
                version=fulcrum.__version__,
                date=current_utc_time(),
                arithmetic="fast",
                others=list_released_runs(ledger) if self.kept else (),
                composition=ledger.describe_composition(self.party) if self.party in ledger.accounts() else "",
                notes=notes,
                scope_delta=costs[self.party].delta if self.party in costs else 0.0,
            )
        )


def write_statement(facts: Mapping[str, Any]) -> str:
    """The statement as the page PRIVACY.md."""
    return statement_to_markdown(facts)
