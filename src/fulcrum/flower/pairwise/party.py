"""A party's side of a round with masks: compute, report ready, check the manifest, pay, mask, send.

Nothing is released and nothing is paid before the manifest: until then the clipped sum is in this process's memory
alone. A manifest uses up what was pending, so each is answered once; the same bytes again get the same answer.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fulcrum.errors import BudgetError
from fulcrum.flower.messages import BadMessage, Envelope, events_agree
from fulcrum.flower.pairwise.keys import RunKey, SignedKey, signed_key_from_table
from fulcrum.flower.pairwise.manifest import (
    MAX_PARTICIPANTS,
    NONCE_BYTES,
    ManifestRefusal,
    OwnPart,
    Participant,
    check_manifest,
    compute_tau,
    find_noise_parties,
    manifest_from_bytes,
    mask_message,
)
from fulcrum.flower.pairwise.model_digest import digest_model
from fulcrum.flower.party_training import LocalTrainer, PartyRunFacts
from fulcrum.flower.refusals import TermsRefusal
from fulcrum.flower.terms import PartyTerms
from fulcrum.privacy.bounds import sanitise_bounds
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.mechanism import compute_planned_events
from fulcrum.training.client import HeldSum
from fulcrum.training.round import compute_reply_digest
from fulcrum.types import Assignment, ClientReply, RoundRequest, RuleState

MAX_KEYS_BYTES = 1 << 22
"""Bytes of the longest list of keys, and of the longest manifest."""


@dataclass(frozen=True)
class Pending:
    """A computed round that waits for its manifest. Private: it holds the clipped sum."""

    facts: PartyRunFacts
    round: int
    task: Assignment
    held: HeldSum
    reach: float
    model: str
    nonce: str


@dataclass
class MaskedRounds:
    """The masked rounds of one party's process: its key of the run, what is pending, and the keys it has seen.

    tries: how often each round of each run was computed in this process. It outlives the run's key: a coordinator that
    ends a run and asks for one of its rounds again would otherwise get the noise of the first time once more, and the
    difference of the two sums would have none.
    """

    party: str
    signing: Any
    key: RunKey | None = None
    pending: Pending | None = None
    keys: dict[str, SignedKey] = field(default_factory=dict)
    tries: dict[tuple[str, int], int] = field(default_factory=dict)
    answered: tuple[str, Envelope] | None = None

    def start_run(self, run: str) -> RunKey:
        """This party's key of the run; another run ends the one before."""
        if self.key is None or self.key.run != run:
            self.forget()
            self.key = RunKey(run, self.party, self.signing)
        return self.key

    def forget(self) -> None:
        """End the run: its key, what is pending and the last answer are gone. Its attempts stay counted."""
        if self.key is not None:
            self.key.forget()
        self.key, self.pending, self.answered = None, None, None
        self.keys.clear()

    def compute(
        self, trainer: LocalTrainer, facts: PartyRunFacts, request: RoundRequest, moved: Mapping[str, Tensor]
    ) -> Pending:
        """Compute the round's clipped sum with a new sample, and draw the nonce that its manifest must hold.

        moved: what the request carried of the clipping state. What was pending before is dropped: never released.
        """
        self.start_run(facts.run)
        place = (facts.run, request.round)
        own = self.tries.get(place, 0)
        self.tries[place] = own + 1
        (task,), (state,) = request.assignments, request.states
        asked = dataclasses.replace(request, attempt=own)  # streams of its own, whatever attempt the request names
        held = trainer.hold(facts, asked)
        self.pending = Pending(
            facts,
            request.round,
            task,
            held,
            measure_reach(trainer, facts, state),
            digest_model(request.params, moved),
            secrets.token_hex(NONCE_BYTES),
        )
        return self.pending

    def read_keys(self, content: bytes) -> None:
        """Note the signed keys that were relayed; BadMessage where they are none."""
        try:
            tables = json.loads(content) if content else []
        except (ValueError, RecursionError):
            raise BadMessage("the keys are not JSON.") from None
        if not isinstance(tables, list):
            raise BadMessage("the keys are not a list.")
        for key in map(signed_key_from_table, tables):
            self.keys[key.party] = key
        while len(self.keys) > MAX_PARTICIPANTS:  # a coordinator that makes parties up must not fill the memory
            del self.keys[next(iter(self.keys))]

    def mask(
        self, trainer: LocalTrainer, terms: PartyTerms, ledger: Ledger, run: str, round: int, content: bytes
    ) -> tuple[ClientReply, int]:
        """Check a manifest, pay, and mask: the reply that may leave, and how many participants are not pinned.

        Of the reply's integers only the low bits that the manifest names may travel (`pack_message`).
        """
        pending, key = self.pending, self.key
        if pending is None or key is None or (pending.facts.run, pending.round) != (run, round):
            raise TermsRefusal("stale", "no computed round waits for a manifest")
        try:
            manifest = manifest_from_bytes(content)
            weight = manifest.participants[manifest.place(self.party)].weight
            line = make_own_line(key.signed, pending, trainer.units, weight)
            part = OwnPart(run, round, pending.model, line, terms.colluders, terms.peers)
            unpinned = check_manifest(manifest, part, {**self.keys, self.party: key.signed})
        except ManifestRefusal as error:
            raise TermsRefusal(error.code, str(error)) from error
        self.pending = None  # used up, whatever happens from here on
        message, share = find_noise_parties(manifest, self.party)
        task = dataclasses.replace(pending.task, message=message, noise_parties=share)
        planned = compute_planned_events(task, trainer.problem(pending.facts).rule, pending.held.batch, round)
        pay(ledger, self.party, run, round, planned)
        reply = trainer.release(pending.facts, pending.held, task)
        if not events_agree(reply.events, planned):
            raise BudgetError(f"round {round + 1} would release {reply.events}, but {planned} was reserved.")
        if reply.extra.numel():  # no such rule gets here (`find_allowed_rule`); masks would not hide its statistics
            raise BudgetError("the clipping rule releases statistics beside the sum, which masks do not hide.")
        masked = dataclasses.replace(reply, delta=mask_message(manifest, key, reply.delta), bits=manifest.bits)
        ledger.settle(run, round, {self.party: compute_reply_digest(masked)})
        return masked, unpinned


def measure_reach(trainer: LocalTrainer, facts: PartyRunFacts, state: RuleState) -> float:
    """|C|: the norm of the bounds of one unit's contribution."""
    rule = trainer.problem(facts).rule
    return float(torch.linalg.vector_norm(sanitise_bounds(rule, rule.bounds(state)).C.double()))


def make_own_line(key: SignedKey, pending: Pending, units: int, weight: float) -> Participant:
    """This party's line as it must be. Any weight is as private as any other, since tau grows with it."""
    task = pending.task
    return Participant(
        party=key.party,
        fingerprint=key.fingerprint,
        exchange=key.exchange,
        nonce=pending.nonce,
        weight=weight,
        rate=task.rate,
        sigma=task.sigma,
        C=pending.reach,
        units=units,
        tau=compute_tau(weight, pending.reach, task.sigma),
    )


# --- paying -----------------------------------------------------------------------------------------


def pay(ledger: Ledger, party: str, run: str, round: int, events: tuple[Event, ...]) -> None:
    """Reserve one more release of this round, before it leaves; TermsRefusal where the budget does not allow it.

    What was reserved before and never settled did not leave, so it is used now. Every message that left is paid.
    """
    entries = ledger.list_round_entries(party, run, round)
    attempt = sum(entry.digest is not None for entry in entries)
    try:
        granted = ledger.reserve(run, round, {party: events}, attempt)
    except BudgetError as error:
        raise TermsRefusal("repeated") from error
    if not granted[party]:
        raise TermsRefusal("budget")
