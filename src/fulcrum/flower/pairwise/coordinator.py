"""The coordinator's side of a round with masks: it relays keys, fixes the set, and collects all messages or none.

It sees signed keys, nonces and masked messages. A message that does not come voids the attempt: nothing can be
unmasked, whoever sent has paid, and the next attempt has a new sample, new noise and new masks.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fulcrum.errors import RunError
from fulcrum.flower.messages import (
    BadMessage,
    Envelope,
    events_agree,
    events_from_rows,
    pack_envelope,
    read_message_arrays,
)
from fulcrum.flower.pairwise.keys import SignedKey, signed_key_from_table
from fulcrum.flower.pairwise.manifest import Manifest, Participant, compute_tau, make_manifest
from fulcrum.flower.pairwise.model_digest import digest_model
from fulcrum.flower.registry import describe_refusal, verify_signed_reply
from fulcrum.flower.signing import fingerprint
from fulcrum.privacy.bounds import sanitise_bounds
from fulcrum.privacy.mechanism import compute_planned_events
from fulcrum.privacy.pairwise.integers import unpack_message
from fulcrum.privacy.pairwise.shares import count_colluders
from fulcrum.training.server import compute_exact_weights
from fulcrum.types import Assignment, ClientReply, RoundRequest, RuleState

if TYPE_CHECKING:
    from fulcrum.flower.coordinator import FlowerEngine

MAX_ATTEMPTS = 8
"""Attempts at one round before the run stops; each costs those who sent a message what a round costs."""

LASTING_REFUSALS = ("peers", "colluders", "aggregation")
"""Refusals of a manifest that another attempt does not change. Each attempt would cost the others a round."""

T = TypeVar("T")


@dataclass(frozen=True)
class Ready:
    """A party that has computed its part: its signed key of the run, and the nonce that the manifest must hold."""

    key: SignedKey
    nonce: str


class MaskedCoordinator:
    """Plays masked rounds for a `FlowerEngine`."""

    def __init__(self, engine: FlowerEngine) -> None:
        self.engine = engine
        # X25519 key of a party -> those of others that it has been told. A process that starts again has another key of
        # its own, and knows nobody's.
        self._sent: dict[str, set[str]] = {}
        self._unwilling: dict[str, str] = {}  # party -> why it masks for no manifest of this run

    @property
    def colluders(self) -> int:
        """c, of all parties of the run."""
        return count_colluders(self.engine.settings.privacy.colluders, len(self.engine.clients))

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        """The replies of all participants of the first attempt at a round that lost none of them."""
        engine = self.engine
        plain = [dataclasses.replace(task, noise_parties=1, message=None) for task in request.assignments]
        tasks = {task.client: (task, state) for task, state in zip(plain, request.states, strict=True)}
        needed = max(self.colluders + 1, min(engine.wait_policy.min_parties, len(tasks)))
        asked: Sequence[int] = ()  # who may have sent a message in vain
        voids = 0
        for attempt in range(MAX_ATTEMPTS):
            if asked and request.pay_again is not None:
                able = request.pay_again(asked)
                tasks = {k: task for k, task in tasks.items() if k in able}
            asked = ()
            ready = self._ask_ready(request, tasks, request.attempt + attempt) if len(tasks) >= needed else {}
            if len(tasks.keys() - engine.spent()) < needed:
                self._refuse_to_go_on(request.round, needed)
                return  # whoever is left might collude; the loop ends the run
            if len(ready) < needed:
                engine.registry.report(
                    "", f"round {request.round + 1}: only {len(ready)} of at least {needed} parties are ready"
                )
                continue
            replies = self._collect_messages(request, tasks, ready, request.attempt + attempt)
            asked = sorted(ready)
            if len(replies) == len(ready):
                yield from (replies[k] for k in sorted(replies))
                return
            voids += 1
            missing = ", ".join(engine.clients[k].name for k in sorted(ready.keys() - replies.keys()))
            engine.registry.report(
                "",
                f"round {request.round + 1} is void: {missing} sent no message, and the others' cannot be unmasked; "
                f"{len(replies)} have paid, and the round is asked for again",
            )
        raise RunError(
            f"round {request.round + 1} failed {MAX_ATTEMPTS} times: it was void {voids} times, because not all of "
            f"those who were ready sent their message, and {MAX_ATTEMPTS - voids} times fewer than {needed} parties "
            "were ready; see parties.jsonl, then continue with fulcrum serve --resume."
        )

    def _refuse_to_go_on(self, round: int, needed: int) -> None:
        """RunError where parties that would refuse every manifest leave too few; each says why."""
        if self._unwilling:
            codes = sorted(set(self._unwilling.values()))
            named = {code: sorted(name for name, own in self._unwilling.items() if own == code) for code in codes}
            why = "; ".join(f"{', '.join(names)}: {describe_refusal(code)}" for code, names in named.items())
            raise RunError(
                f"round {round + 1} needs {needed} parties that mask their messages, and some refuse ({why}); have "
                "their terms changed (fulcrum terms --peers pins keys), then continue with fulcrum serve --resume."
            )

    # --- who is ready -----------------------------------------------------------------------------

    def _ask_ready(
        self, request: RoundRequest, tasks: Mapping[int, tuple[Assignment, RuleState]], attempt: int
    ) -> dict[int, Ready]:
        """Ask all parties to compute; those that report ready before the deadline, or soon after the quorum did."""
        engine = self.engine
        shared = all(state is request.states[0] for state in request.states)
        body = engine.pack_body(request, request.states[0]) if shared and request.states else None
        asks = {
            k: engine._make_round_request(request, task, state, attempt, body)
            for k, (task, state) in tasks.items()
            if k not in engine.spent()
        }
        policy = engine.stragglers.policy
        wanted = max(policy.count_needed(len(asks)), engine.wait_policy.min_parties, self.colluders + 1)
        found = self._exchange(asks, self._read_ready, request.round, wanted, held=True)
        for k in asks.keys() - found.keys() - engine.spent():
            words = engine.stragglers.note_miss(k, request.round)
            engine.registry.report(engine.clients[k].name, f"was not ready for round {request.round + 1}: {words}")
        return found

    def _read_ready(self, k: int, ask: Envelope, envelope: Envelope, round: int) -> Ready | None:
        header = self._read_reply(k, ask, envelope, "ready", round)
        if header is None:
            return None
        key, name, registry = signed_key_from_table(header["key"]), self.engine.clients[k].name, self.engine.registry
        # With its registered key: the others would refuse a manifest with any other, and be asked no more.
        known = key.party == name and key.fingerprint == fingerprint(registry.public_keys[name])
        if not known or not key.is_valid(registry.run):
            raise BadMessage("its key of the run is not signed with its registered key, or makes no secret.")
        return Ready(key, header["fresh"])

    # --- messages ---------------------------------------------------------------------------------

    def make_manifest(
        self,
        request: RoundRequest,
        tasks: Mapping[int, tuple[Assignment, RuleState]],
        ready: Mapping[int, Ready],
        attempt: int,
    ) -> Manifest:
        """The manifest of the parties that are ready."""
        engine = self.engine
        clients = sorted(ready)
        units = [engine.clients[k].units for k in clients]
        weights = compute_exact_weights(units, engine.settings.train.weights).tolist()
        rule = engine.problem.rule
        _, common = tasks[clients[0]]  # a rule that may be masked has one state, the server's
        model = digest_model(request.params, engine.select_moving(common))
        reach = float(torch.linalg.vector_norm(sanitise_bounds(rule, rule.bounds(common)).C.double()))
        lines = []
        for k, count, share in zip(clients, units, weights, strict=True):
            task, _ = tasks[k]
            weight = share / (task.rate * count)
            key = ready[k].key
            lines.append(
                Participant(
                    party=key.party,
                    fingerprint=key.fingerprint,
                    exchange=key.exchange,
                    nonce=ready[k].nonce,
                    weight=weight,
                    rate=task.rate,
                    sigma=task.sigma,
                    C=reach,
                    units=count,
                    tau=compute_tau(weight, reach, task.sigma),
                )
            )
        return make_manifest(engine.registry.run, request.round, attempt, self.colluders, model, lines)

    def _collect_messages(
        self,
        request: RoundRequest,
        tasks: Mapping[int, tuple[Assignment, RuleState]],
        ready: Mapping[int, Ready],
        attempt: int,
    ) -> dict[int, ClientReply]:
        manifest = self.make_manifest(request, tasks, ready, attempt)
        keys = [each.key for each in ready.values()]
        asks = {k: self._pack_manifest(ready[k].key, manifest, keys) for k in ready}

        def read(k: int, ask: Envelope, envelope: Envelope, round: int) -> ClientReply | None:
            return self._read_message(k, ask, envelope, tasks[k], manifest)

        found = self._exchange(asks, read, request.round, len(asks))
        for k in found:
            self.engine.stragglers.note_answer(k)
            self._sent.setdefault(ready[k].key.exchange, set()).update(key.exchange for key in keys)
        for k in ready.keys() - found.keys():
            self._sent.pop(ready[k].key.exchange, None)  # it may not have got them
            self.engine.stragglers.note_miss(k, request.round)
        return found

    def _pack_manifest(self, own: SignedKey, manifest: Manifest, keys: Sequence[SignedKey]) -> Envelope:
        """The request to one participant: the manifest, and the keys that it has not been told yet. own: its key."""
        party, known = own.party, self._sent.get(own.exchange, set())
        new = [dataclasses.asdict(key) for key in keys if key.exchange not in known and key.party != party]
        bodies = {"manifest": manifest.to_bytes(), "keys": json.dumps(new).encode() if new else b""}
        registry = self.engine.registry
        header = {
            **{"kind": "manifest", "run": registry.run, "party": party, "round": manifest.round},
            "nonce": manifest.participants[manifest.place(party)].nonce,
            **{f"{name}_bytes": len(body) for name, body in bodies.items()},
        }
        arrays = {name: torch.frombuffer(bytearray(body), dtype=torch.uint8) for name, body in bodies.items() if body}
        return registry.sign(pack_envelope(header, arrays))

    def _read_message(
        self, k: int, ask: Envelope, envelope: Envelope, asked: tuple[Assignment, RuleState], manifest: Manifest
    ) -> ClientReply | None:
        header = self._read_reply(k, ask, envelope, "update", manifest.round)
        if header is None:
            return None
        engine, (task, state) = self.engine, asked
        events = events_from_rows(header["events"])
        batch = task.rate * engine.clients[k].units
        if not events_agree(events, compute_planned_events(task, engine.problem.rule, batch, manifest.round)):
            raise BadMessage("what it says it released is not what was asked for.")
        size = engine.problem.layout.dim * manifest.bits // 8
        arrays = read_message_arrays(envelope, {"delta": (torch.uint8, (size,)), "extra": (torch.float32, (0,))})
        device = engine.problem.device
        return ClientReply(
            client=k,
            delta=unpack_message(arrays["delta"], manifest.bits).to(device),
            extra=arrays["extra"].to(device),
            events=events,
            state=state,
            grid=manifest.grid,
            bits=manifest.bits,
        )

    # --- both -------------------------------------------------------------------------------------

    def _read_reply(self, k: int, ask: Envelope, envelope: Envelope, kind: str, round: int) -> dict[str, Any] | None:
        """The header of a party's own signed reply; None where it refused, which is reported."""
        registry, name = self.engine.registry, self.engine.clients[k].name
        header = verify_signed_reply(envelope, (kind, "refused"), ask, registry.run, registry.public_keys)
        if header["party"] != name:
            raise BadMessage(f"it is from {header['party']}.")
        if header["kind"] == "refused":
            self.engine.note_refusal(k, header["code"])
            if header["code"] in LASTING_REFUSALS:
                self._unwilling[name] = header["code"]
            registry.report(name, f"refused round {round + 1}: {describe_refusal(header['code'])}")
            return None
        if header["round"] != round:
            raise BadMessage("it is of another round.")
        return header

    def _exchange(
        self,
        asks: Mapping[int, Envelope],
        read: Callable[[int, Envelope, Envelope, int], T | None],
        round: int,
        wanted: int,
        held: bool = False,
    ) -> dict[int, T]:
        """Send requests and read the answers, until all are there, or `wanted` and the grace is over, or the deadline.

        A node that starts again has lost its request; it is not sent once more: what it had computed is gone too.
        held: an answer only counts while its party holds what it computed, so it ends with the party's process.
        """
        engine = self.engine
        if held:  # who started again before it was asked has lost nothing
            engine.registry.poll()
            engine.registry.take_restarted_parties()
        end = time.monotonic() + engine.wait_policy.round_timeout
        waiting: dict[str, int] = {}
        found: dict[int, T] = {}
        settled: set[int] = set()
        for k, ask in asks.items():
            node = engine.registry.node_of.get(engine.clients[k].name)
            sent = (
                ""
                if node is None
                else engine.registry.transport.send(node, ask, engine.wait_policy.round_timeout, str(round + 1))
            )
            if sent:
                waiting[sent] = k
            else:
                settled.add(k)
        graced = False
        while asks.keys() - settled:
            late = time.monotonic() > end
            engine.registry.poll()
            for name in engine.registry.take_restarted_parties():
                gone = {k for k in asks if engine.clients[k].name == name}
                settled |= gone
                found = {k: answer for k, answer in found.items() if not (held and k in gone)}
            for delivery in engine.registry.transport.collect(set(waiting)) if waiting else ():
                k = waiting.pop(delivery.id)
                settled.add(k)
                name = engine.clients[k].name
                if delivery.envelope is None:
                    engine.registry.report(name, f"round {round + 1}: {delivery.error}")
                    continue
                try:
                    answer = read(k, asks[k], delivery.envelope, round)
                except BadMessage as error:
                    engine.registry.report(name, f"round {round + 1}: its reply was refused: {error}")
                    continue
                if answer is not None:
                    found[k] = answer
            if late:
                break
            if len(found) >= wanted and not graced and wanted < len(asks):
                end, graced = min(end, time.monotonic() + engine.stragglers.policy.grace), True
            if asks.keys() - settled:
                engine.registry.wait()
        return found
