"""`fulcrum serve --check`: everything that a coordinator needs, looked at without opening its port to anybody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from fulcrum.data import Dataset
from fulcrum.flower.coordinator import name_model_and_task, pack_round_request
from fulcrum.flower.keys import load_public_keys
from fulcrum.flower.operations.checks import (
    FINE,
    WARNING,
    WRONG,
    Check,
    check_disk,
    check_expiry,
    check_file_limit,
    check_key_matches,
    describe_versions,
    list_certificate_hosts,
    load_certificates,
    run_checks,
)
from fulcrum.flower.operations.party_checks import is_port_free
from fulcrum.flower.prepare import make_public_problem, make_served_settings
from fulcrum.flower.proposals import make_proposal
from fulcrum.flower.run import ListenAddress, _load_public_records
from fulcrum.flower.task_terms import declare_task
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.runs.folder import check_free_folder
from fulcrum.settings.schema import Settings
from fulcrum.training.evaluate import compute_public_baseline
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Assignment, RoundRequest

FILES_PER_PARTY = 8
FILES_RESERVED = 400


class ServerChecks:
    """The checks of a coordinator before a run. out: the run's folder, None where an old one is continued."""

    def __init__(
        self, settings: Settings, keys: Path, address: ListenAddress, out: Path | None, simulation: bool
    ) -> None:
        self.settings, self.keys, self.address, self.out, self.simulation = settings, keys, address, out, simulation

    def run(self) -> Iterator[Check]:
        """Each check in turn; nobody is contacted, nothing is written."""
        return run_checks(
            (
                ("versions", describe_versions),
                ("register", self.check_register),
                ("certificate", self.check_certificate),
                ("key", self.check_key),
                ("port", self.check_port),
                ("files", lambda: check_file_limit(FILES_RESERVED + FILES_PER_PARTY * len(self.public_keys))),
                ("settings", self.check_settings),
                ("data", self.check_data),
                ("folder", self.check_folder),
                ("dry round", self.run_dry_round),
            )
        )

    @cached_property
    def public_keys(self) -> dict[str, object]:
        return dict(load_public_keys(self.keys))

    @cached_property
    def served(self) -> Settings:
        return make_served_settings(self.settings, len(self.public_keys), self.simulation)

    @cached_property
    def public(self) -> Dataset:
        return _load_public_records(self.served)

    @cached_property
    def problem(self) -> TrainingProblem:
        return make_public_problem(self.served, self.public, torch.device("cpu"))

    def check_register(self) -> Check | str:
        names = list(self.public_keys)
        needed = self.settings.train.min_parties
        count = "1 party" if len(names) == 1 else f"{len(names)} parties"
        words = f"{count} in {self.keys}: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
        if len(names) < needed:
            return Check("register", WRONG, f"{words}; train.min_parties = {needed} can never be reached")
        return words

    def check_certificate(self) -> Check | str:
        if self.address.certificate is None:
            return Check("certificate", WARNING, "--insecure: nothing is encrypted; for tests on one machine only")
        found = load_certificates(self.address.certificate)
        hosts = list_certificate_hosts(found[0])
        if not hosts:
            return Check(
                "certificate", WRONG, "it names no host (subjectAltName), so no party accepts it; make one anew"
            )
        expiry = check_expiry(found, "certificate")
        return Check("certificate", expiry.level, f"for {', '.join(hosts)}; {expiry.words}")

    def check_key(self) -> Check | str:
        if self.address.certificate is None or self.address.key is None:
            return "none, --insecure"
        return check_key_matches(self.address.certificate, self.address.key)

    def check_port(self) -> Check | str:
        why = is_port_free(self.address.host, self.address.port)
        where = f"{self.address.host}:{self.address.port}"
        return Check("port", WRONG, f"cannot listen on {where}: {why}") if why else f"{where} is free"

    def check_settings(self) -> Check | str:
        served = self.served
        proposal = make_proposal(served, self.problem.task.outputs, declare_task(self.problem.dataset))
        cost = format_epsilon(proposal["budget"]) if "budget" in proposal else "infinite"
        return (
            f"method {served.method}, {served.train.rounds} rounds, at least {served.train.min_parties} parties, "
            f"combined by {served.train.combine}; one run costs each party at most epsilon {cost}"
        )

    def check_data(self) -> Check | str:
        test = self.public.test
        if test is None or not len(test):
            return Check("data", WARNING, f"{self.public.name} holds no test records: nothing is evaluated")
        return f"{self.public.name}: {len(test)} public test records, {self.problem.task.name}"

    def check_folder(self) -> Check | str:
        if self.out is None:
            return "the run's own"
        check_free_folder(self.out, "fulcrum serve --resume")
        room = 12 * self.problem.layout.dim * 4
        found = check_disk(self.out.absolute(), room)
        return Check("folder", found.level, found.words) if found.level != FINE else f"{self.out}: {found.words}"

    def run_dry_round(self) -> Check | str:
        """Pack a round's request and evaluate the model once; nothing is sent."""
        problem, settings = self.problem, self.served
        state = problem.rule.init(settings.clip, problem.shape)
        params = problem.layout.flatten(problem.model)
        task = Assignment(0, settings.train.rate, settings.privacy.sigma or 1.0, 1, settings.train.lr)
        request = RoundRequest(0, settings.train.rounds, params, (task,), (state,), settings.train.weight_decay)
        header = {
            "run": "0" * 32,
            "nonce": "0" * 32,
            "party": "check",
            "simulation": {},
            **name_model_and_task(problem),
        }
        began = time.monotonic()
        size = pack_round_request(header, settings, problem, request, task, state).size
        packed = time.monotonic() - began
        began = time.monotonic()
        if self.public.test is not None and len(self.public.test):
            compute_public_baseline(problem)
        scored = time.monotonic() - began
        return (
            f"{problem.layout.dim} parameters, {size / 1e6:.2f} MB to each party and about as much back, packed in "
            f"{packed:.2f} s, scored in {scored:.2f} s; nothing was sent"
        )
