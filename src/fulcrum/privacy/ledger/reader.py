"""`LedgerReader`: what can be read of an open ledger. Nothing here writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fulcrum.errors import InputError
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger.composition import SLICES_RULE, Cost, describe_rule, fits_into, is_within_plan
from fulcrum.privacy.ledger.pricing import Pricer, price_plans, total_of
from fulcrum.privacy.ledger.rows import (
    KnownUnits,
    LedgerAccount,
    LedgerEntry,
    LedgerHead,
    RunCostLine,
    RunPlan,
    RunRecord,
    UnitCost,
    read_events_text,
)
from fulcrum.privacy.ledger.store import EMPTY_SPEND, FORMAT_VERSION, LedgerStore
from fulcrum.privacy.ledger.units import UnitArray, find_members, parse_units, write_units


class LedgerReader:
    """The questions that an open ledger answers. `Ledger` adds what writes to it."""

    def __init__(self, store: LedgerStore) -> None:
        self._store = store
        self._pricer = Pricer(store)

    # --- the file as a whole -------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._store.path

    @property
    def identity(self) -> str:
        """The ledger's random name, written at its creation; empty for a file of an older format without new rows."""
        with self._store.reading():
            return self._store.identity

    def head(self) -> LedgerHead:
        """The end of the chain of rows, to be kept with a run and compared by `check_contains`."""
        with self._store.reading():
            end = self._store.head()
            return LedgerHead(self._store.identity, end.sequence, end.digest.hex() if end.sequence else "")

    def check_contains(self, head: LedgerHead) -> None:
        """InputError unless this ledger is the one that had this head, with all its rows up to there."""
        with self._store.reading():
            if head.ledger != self._store.identity:
                raise InputError(
                    f"ledger {self.path} is another ledger ({self._store.identity or 'none'}) than the one that this "
                    f"run was charged to ({head.ledger or 'none'}); give the path of that one."
                )
            if not head.sequence:
                return
            end = self._store.head()
            if end.sequence < head.sequence:
                raise InputError(
                    f"ledger {self.path} was rolled back: it has {end.sequence} rows, and this run knows "
                    f"{head.sequence}; give its latest copy."
                )
            found = self._store.db.execute("SELECT digest FROM chain WHERE sequence = ?", (head.sequence,)).fetchone()
            if found is None or bytes(found[0]).hex() != head.digest:
                raise InputError(
                    f"ledger {self.path} was rewritten: its row {head.sequence} is not the one that this run knows; "
                    "give the copy that this run was charged to."
                )

    # --- parties and runs ----------------------------------------------------------------------------

    def accounts(self) -> dict[str, LedgerAccount]:
        """Every party with its current budget and terms, by name."""
        with self._store.reading():
            return {name: account for name, (_, account) in self._store.accounts.items()}

    def runs(self) -> dict[str, RunRecord]:
        """Every run of this ledger by its id, in the order of their first rows; unregistered ones are "unknown"."""
        with self._store.reading():
            found = dict(self._store.records)
            for (run,) in self._store.db.execute("SELECT run FROM entries GROUP BY run ORDER BY min(id)"):
                found.setdefault(run, RunRecord.unknown(run))
            return found

    def has_plan(self, run: str, party: str) -> bool:
        """Whether the party's plan for this run is registered."""
        with self._store.reading():
            known = self._store.accounts.get(party)
            return known is not None and run in self._store.plans.get(known[0], {})

    def list_planned_parties(self, run: str, parties: Iterable[str]) -> set[str]:
        """Those of these parties whose plan for this run is registered."""
        with self._store.reading():
            rows = {name: self._store.accounts[name][0] for name in parties if name in self._store.accounts}
            return {name for name, row in rows.items() if run in self._store.plans.get(row, {})}

    def find_known_units(self, party: str, digests: bytes) -> KnownUnits:
        """How many of these units this ledger knows, from the party's earlier runs or from other parties."""
        units = parse_units(digests)
        with self._store.reading():
            before = self._read_party_units(party)
            staying = int(find_members(units, before).sum())
            others = {
                name: int(find_members(units, self._read_party_units(name)).sum())
                for name in self._store.unit_rows
                if name != party
            }
        elsewhere = {name: count for name, count in others.items() if count}
        return KnownUnits(len(units) - staying, staying, len(before) - staying, elsewhere)

    def _read_party_units(self, party: str) -> UnitArray:
        """All units that a party ever had in this ledger."""
        return self._pricer.read_party_units(party)

    # --- what fits -----------------------------------------------------------------------------------

    def identify_past(self, party: str) -> object:
        """A value that is equal only for parties that spent the same: their accounts have equal room."""
        with self._store.reading():
            row, account = self._store.find_account(party)
            cost = self._pricer.compute_cost(account, row, self._pricer.choose_terms(row, account))
            return cost, self._store.terms.get(row), self._pricer.find_largest_spend(account, row).key

    def fits(self, party: str, run: str, plan: RunPlan) -> bool:
        """Whether a party's account has room for a plan in addition to its other runs. Nothing is written."""
        with self._store.reading():
            if party not in self._store.accounts:
                return True
            row, account = self._store.accounts[party]
            spend = total_of(tuple(plan.events))
            terms = self._pricer.choose_terms(row, account, run, spend)
            if terms[0] == SLICES_RULE:
                price = price_plans({party: plan}, {party: account})[party]
                cost = self._pricer.compute_cost(account, row, terms, run, plan=(plan, price))
                return fits_into(cost, account.budget, account.delta)
            before = self._store.get_run_spends(row).get(run, EMPTY_SPEND)
            others = [each for name, each in self._store.get_run_spends(row).items() if name != run]
            total = spend
            for each in others:
                total = total.add_events(each.events)
            larger = spend if is_within_plan(before, spend) else before.add_events(spend.events)
            cost = self._pricer.compute_cost(account, row, terms, run, after=(total, larger))
            return account.budget is None or cost.epsilon <= account.budget

    def describe_composition(self, party: str) -> str:
        """One sentence: how the party's runs add up."""
        with self._store.reading():
            row, account = self._store.find_account(party)
            rule, order = self._pricer.choose_terms(row, account)
            runs = self._store.get_run_spends(row)
            words = describe_rule(rule, order, account.delta, account.accountant, len(runs))
            older = (
                self._store.former < FORMAT_VERSION and runs and next(iter(runs)) not in self._store.plans.get(row, {})
            )
            return f"{words[:-1]}; rows of an earlier version count as if it had been so then." if older else words

    def list_unit_costs(self, party: str, digests: bytes) -> list[UnitCost]:
        """What was released of these units of a party so far, those with the same past together; the costliest first.

        Units without a run are new. A run whose units nobody registered counts for everybody.
        """
        units = parse_units(digests)
        with self._store.reading():
            every = {name: rows for name, rows in self._store.unit_rows.items() if name in self._store.accounts}
            places = [(name, run, number) for name, rows in every.items() for run, number in rows]
            held = [find_members(units, self._pricer.read_set(number)) for _, _, number in places]
            row, account = self._store.find_account(party)
            groups: dict[tuple[int, ...], int] = {}
            for unit in range(len(units)):
                key = tuple(at for at, members in enumerate(held) if members[unit])
                groups[key] = groups.get(key, 0) + 1
            found = []
            for key, count in groups.items():
                runs = tuple((places[at][0], places[at][1]) for at in key)
                mine = {run for name, run in runs if name == party}
                registered = {run for run, _ in every.get(party, ())}
                others = frozenset((self._store.accounts[name][0], run) for name, run in runs if name != party)
                cost = self._pricer.compute_history_cost(account, row, (frozenset(registered - mine), others))
                found.append(UnitCost(count, runs, cost.epsilon, cost.delta))
        return sorted(found, key=lambda each: (-each.epsilon, -len(each.runs)))

    def list_past_units(self, party: str) -> bytes:
        """All units that a party ever had in this ledger, 16 bytes each."""
        with self._store.reading():
            return write_units(self._pricer.read_party_units(party))

    # --- what was spent ------------------------------------------------------------------------------

    def spent(self, party: str) -> Spend:
        """The party's total of reservations so far, over all runs: that of the present unit that was in most of it."""
        with self._store.reading():
            row, account = self._store.find_account(party)
            return self._pricer.find_largest_spend(account, row)

    def get_spends(self, run: str | None = None) -> dict[str, Spend]:
        """The total of reservations per party so far: over all runs, or in one run."""
        store = self._store
        with store.reading():
            if run is None:
                find = self._pricer.find_largest_spend
                return {name: find(account, row) for name, (row, account) in store.accounts.items()}
            return {name: store.get_run_spends(row).get(run, EMPTY_SPEND) for name, (row, _) in store.accounts.items()}

    def cost(self, party: str, run: str | None = None) -> Cost:
        """(epsilon, delta) that the party has spent so far, over all runs or in one, by its rule of composition."""
        with self._store.reading():
            return self._compute_costs([party], run)[party]

    def costs(self, run: str | None = None) -> dict[str, Cost]:
        """`cost` of every party."""
        with self._store.reading():
            return self._compute_costs(self._store.accounts, run)

    def _compute_costs(self, parties: Iterable[str], run: str | None) -> dict[str, Cost]:
        found = {}
        for party in parties:
            row, account = self._store.find_account(party)
            if run is not None:
                found[party] = self._pricer.compute_run_cost(account, row, run)
            else:
                terms = self._pricer.choose_terms(row, account)
                found[party] = self._pricer.compute_cost(account, row, terms)
        return found

    def price_run(self, run: str, spends: Mapping[str, Spend]) -> dict[str, float]:
        """The epsilon of a run alone, had each of these parties released no more in it than this, as `cost` counts."""
        with self._store.reading():
            found = {}
            for party, spend in spends.items():
                row, account = self._store.find_account(party)
                found[party] = self._pricer.compute_run_cost(account, row, run, spend).epsilon
            return found

    def epsilon(self, party: str, run: str | None = None) -> float:
        """The epsilon of `cost`."""
        return self.cost(party, run).epsilon

    def epsilons(self, run: str | None = None) -> dict[str, float]:
        """`epsilon` of every party."""
        return {name: cost.epsilon for name, cost in self.costs(run).items()}

    # --- releases ------------------------------------------------------------------------------------

    def count_settled_attempts(self, run: str, round: int) -> int:
        """The first attempt at this round that was not settled: 0 unless this round was released before."""
        with self._store.reading():
            (last,) = self._store.db.execute(
                "SELECT coalesce(max(e.attempt), -1) FROM entries e JOIN settlements s ON s.entry = e.id"
                " WHERE e.run = ? AND e.round = ?",
                (run, round),
            ).fetchone()
            return int(last) + 1

    def list_round_reservations(self, run: str, rounds: range) -> list[tuple[str, tuple[Event, ...]]]:
        """(party, events) of every reservation of a run in these rounds, in the order of rounds and attempts."""
        with self._store.reading():
            rows = self._store.db.execute(
                "SELECT p.name, e.events FROM entries e JOIN parties p ON p.id = e.party"
                " WHERE e.run = ? AND e.round >= ? AND e.round < ? ORDER BY e.round, e.attempt, e.id",
                (run, rounds.start, rounds.stop),
            )
            return [(name, read_events_text(events)) for name, events in rows]

    def entries(self, party: str) -> list[LedgerEntry]:
        """Every reservation of a party, oldest first."""
        with self._store.reading():
            rows = self._store.db.execute(
                "SELECT e.run, e.round, e.attempt, e.events, e.time, s.digest, s.time FROM entries e"
                " LEFT JOIN settlements s ON s.entry = e.id WHERE e.party = ? ORDER BY e.id",
                (self._store.find_account(party)[0],),
            )
            return [
                LedgerEntry(party, run, round, attempt, read_events_text(events), reserved, digest, released)
                for run, round, attempt, events, reserved, digest, released in rows
            ]

    def list_run_costs(self) -> list[RunCostLine]:
        """The cost of each run for each party, in the order in which the runs began."""
        with self._store.reading():
            rows = self._store.db.execute(
                "SELECT p.name, e.run, e.events, min(e.round), max(e.round), count(*), count(s.entry)"
                " FROM entries e JOIN parties p ON p.id = e.party LEFT JOIN settlements s ON s.entry = e.id"
                " GROUP BY e.party, e.run, e.events ORDER BY min(e.id)"
            ).fetchall()
            totals: dict[tuple[str, str], tuple[int, int, int, int, Spend]] = {}
            for name, run, events, first, last, count, settled in rows:
                old = totals.get((name, run), (first, last, 0, 0, EMPTY_SPEND))
                spend = old[4].add_events(read_events_text(events), count)
                totals[name, run] = min(old[0], first), max(old[1], last), old[2] + count, old[3] + settled, spend
            accounts = self._store.accounts
            costs = {
                key: self._pricer.compute_run_cost(accounts[key[0]][1], accounts[key[0]][0], key[1]).epsilon
                for key in totals
            }
        return [RunCostLine(*key, *total[:4], total[4].releases, costs[key]) for key, total in totals.items()]

    def list_round_entries(self, party: str, run: str, round: int) -> list[LedgerEntry]:
        """A party's reservations for one round of one run, first attempt first. Uses an index."""
        with self._store.reading():
            rows = self._store.db.execute(
                "SELECT e.attempt, e.events, e.time, s.digest, s.time FROM entries e LEFT JOIN settlements s"
                " ON s.entry = e.id WHERE e.run = ? AND e.round = ? AND e.party = ? ORDER BY e.attempt",
                (run, round, self._store.find_account(party)[0]),
            )
            return [
                LedgerEntry(party, run, round, attempt, read_events_text(events), reserved, digest, released)
                for attempt, events, reserved, digest, released in rows
            ]
