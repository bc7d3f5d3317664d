"""`fulcrum party --check`: everything that a party needs, looked at without joining a run and without any release."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import torch

from fulcrum.data import Dataset
from fulcrum.errors import ConfigError
from fulcrum.flower.keys import check_party_name, load_private_key
from fulcrum.flower.operations.checks import (
    FINE,
    WARNING,
    WRONG,
    Check,
    check_disk,
    check_expiry,
    check_private_file,
    describe_versions,
    load_certificates,
    run_checks,
)
from fulcrum.flower.operations.party_file import PartyOptions
from fulcrum.flower.party_data import count_units
from fulcrum.flower.party_ledger import make_run_plan
from fulcrum.flower.party_training import LocalTrainer, PartyRunFacts
from fulcrum.flower.signing import fingerprint
from fulcrum.flower.task_terms import check_declared
from fulcrum.flower.terms import PartyTerms, find_allowed_rule, read_terms_file
from fulcrum.privacy.accounting import Spend, format_epsilon
from fulcrum.privacy.ledger import Ledger
from fulcrum.settings.schema import TaskSettings
from fulcrum.types import Assignment, RoundRequest

CLOCK_WARNING_SECONDS = 2.0


class PartyChecks:
    """The checks of one party. load: loads its records for a task, as `fulcrum party` does."""

    def __init__(self, options: PartyOptions, load: Callable[[TaskSettings], Dataset], device: torch.device) -> None:
        self.options, self.load, self.device = options, load, device
        self.key, self.ledger = Path(options.key), Path(options.ledger)

    def run(self) -> Iterator[Check]:
        """Each check in turn; nothing is written, nothing is released."""
        return run_checks(
            (
                ("versions", describe_versions),
                ("key", self.check_key),
                ("certificate", self.check_ca),
                ("coordinator", self.check_coordinator),
                ("terms", self.check_terms),
                ("data", self.check_data),
                ("ledger", self.check_ledger),
                ("disk", lambda: check_disk(self.ledger.absolute().parent, 32 * self.reply_bytes)),
                ("dry round", self.run_dry_round),
            )
        )

    @cached_property
    def terms(self) -> PartyTerms:
        """The terms of the file; ConfigError where there is none."""
        path = Path(self.options.terms)
        if not path.is_file():
            raise ConfigError(f"there is no {path}; write it with fulcrum terms and read it, or agree on a terminal.")
        return read_terms_file(path)

    @cached_property
    def records(self) -> Dataset:
        """This party's records, as it would train on them."""
        return self.load(self.terms.agreed_task)

    @cached_property
    def trainer(self) -> LocalTrainer:
        """The party's model and records."""
        return LocalTrainer(self.terms.party, self.records, self.terms, self.device)

    @property
    def reply_bytes(self) -> int:
        """Bytes of one stored reply; 0 where the model cannot be built (another check says so)."""
        try:
            return 4 * self.trainer.layout.dim
        except Exception:
            return 0

    def check_key(self) -> Check | str:
        name = check_party_name(self.key.name)
        own = load_private_key(self.key)
        found = check_private_file(self.key, "key")
        if found.level != FINE:
            return found
        return f"party {name}, {fingerprint(own.public_key())}, readable by its owner alone"

    def check_ca(self) -> Check | str:
        if self.options.insecure:
            return Check("certificate", WARNING, "--insecure: nothing is encrypted; for tests on one machine only")
        if not self.options.ca:
            return "no --ca: the coordinator's certificate must be signed by a CA that this system trusts"
        return check_expiry(load_certificates(Path(self.options.ca)), "certificate")

    def check_coordinator(self) -> Check | str:
        """Whether the coordinator is reached, by which way, and whether it knows this party's key."""
        from fulcrum.flower.operations.reach import look_at_coordinator

        found = look_at_coordinator(
            self.options.server,
            load_private_key(self.key),
            Path(self.options.ca) if self.options.ca else None,
            self.options.insecure,
        )
        if not found.reached:
            return Check("coordinator", WRONG, found.words)
        if abs(found.clock_ahead) > CLOCK_WARNING_SECONDS:
            return Check(
                "coordinator", WARNING, f"{found.words}; this clock is off by {found.clock_ahead:.0f} s: use NTP"
            )
        return found.words

    def check_terms(self) -> Check | str:
        terms, name = self.terms, self.key.name
        if terms.party != name:
            return Check(
                "terms", WRONG, f"{self.options.terms} was agreed to by {terms.party!r}, and the key is {name!r}'s"
            )
        check_declared(terms.agreed_task)
        cost = self.compute_run_cost()
        words = (
            f"budget {format_epsilon(terms.budget)}, one run costs at most {format_epsilon(cost)} at delta "
            f"{terms.delta:g}, up to {terms.rounds} rounds"
        )
        if cost > terms.budget * (1 + 1e-9):
            return Check("terms", WARNING, f"{words}: the budget ends a run early")
        return words

    def check_data(self) -> Check | str:
        units = count_units(self.records, self.terms.unit)
        words = f"{units} {self.terms.unit}s, {len(self.records.y)} records, as the terms describe them"
        if self.terms.delta >= 1 / units:
            return Check("data", WARNING, f"{words}; delta {self.terms.delta:g} is not below 1/{units}")
        return words

    def compute_run_cost(self) -> float:
        """Epsilon of one whole run under the terms."""
        terms = self.terms
        return Spend.empty().add_events(terms.planned_events).epsilon(terms.run_delta or terms.delta, terms.accountant)

    def check_ledger(self) -> Check | str:
        if not self.ledger.is_file():
            return f"{self.ledger} does not exist yet: a new one begins with the first run"
        name = self.terms.party
        with Ledger.open(self.ledger, wait=5.0) as ledger:
            if name not in ledger.accounts():
                return Check("ledger", WARNING, f"{self.ledger} has no account of {name}; is it the right file?")
            spent = ledger.epsilon(name)
            left = self.terms.budget - spent
            words = f"spent {format_epsilon(spent)} of {format_epsilon(self.terms.budget)}, {len(ledger.runs())} run(s)"
            # The account in the ledger has the budget of earlier terms until the party starts with these.
            fits = ledger.fits(name, "check", make_run_plan(self.terms)) or self.compute_run_cost() <= left
        if left <= 0:
            return Check("ledger", WRONG, f"{words}: nothing is left; agree on new terms with a larger budget, or stop")
        return words if fits else Check("ledger", WARNING, f"{words}: a whole further run does not fit, it ends early")

    def run_dry_round(self) -> Check | str:
        """Train one round on this party's records and throw the result away: nothing leaves, nothing is paid."""
        trainer, terms = self.trainer, self.terms
        rule = find_allowed_rule(terms, terms.rules[0])
        facts = PartyRunFacts("check", 0, rule.name, None)
        task = Assignment(0, terms.rate, terms.sigma, terms.steps, terms.lr, terms.statistics_interval)
        state = trainer.start_state(facts)
        params = trainer.layout.flatten(trainer.model).to(self.device)
        began = time.monotonic()
        trainer.train(facts, RoundRequest(0, terms.rounds, params, (task,), (state,), 0.0))
        seconds = time.monotonic() - began
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return (
            f"{trainer.layout.dim} parameters, {terms.steps} step(s) in {seconds:.2f} s on {self.device}, "
            f"{4 * trainer.layout.dim / 1e6:.1f} MB each way, at most {memory:.0f} MB of memory; thrown away"
        )


def is_port_free(host: str, port: int) -> str:
    """ "" where a server can listen there, else why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
