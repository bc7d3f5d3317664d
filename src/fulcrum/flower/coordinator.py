"""The coordinator's side: an engine that sends a round's assignments to the parties and checks their replies.

The loop over rounds, aggregation, the rule for C, evaluation, record and resume are those of a run in one process
(`training`, `runs`). A reply that is late, malformed, not signed by the party that it names, of another round, or
larger than any honest one is left out and reported; the round goes on with the other replies.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fulcrum.clipping.party_state import select_moving_entries
from fulcrum.errors import RunError
from fulcrum.flower.array_coding import encode_arrays
from fulcrum.flower.messages import (
    ArraySpec,
    BadMessage,
    Envelope,
    PackedBody,
    SimulatedStreams,
    assignment_to_table,
    compute_model_fingerprint,
    events_agree,
    events_from_rows,
    pack_envelope,
    read_message_arrays,
    simulation_to_table,
    state_to_arrays,
)
from fulcrum.flower.pairwise.coordinator import LASTING_REFUSALS, MaskedCoordinator
from fulcrum.flower.registry import POLL_SECONDS, PartyInfo, PartyRegistry, describe_refusal, verify_signed_reply
from fulcrum.flower.rule_terms import is_C_within
from fulcrum.flower.stragglers import StragglerBook, StragglerPolicy
from fulcrum.flower.task_terms import task_fingerprint
from fulcrum.privacy.mechanism import compute_planned_events
from fulcrum.settings.schema import Settings
from fulcrum.training.engine import Engine
from fulcrum.training.problem import TrainingProblem
from fulcrum.training.traffic import measure_statistics_width
from fulcrum.types import Assignment, ClientReply, RoundRequest, RuleState


@dataclass(frozen=True)
class WaitPolicy:
    """How long the coordinator waits, and for how many parties.

    round_timeout: seconds that a round waits for replies. join_timeout: seconds to wait until enough parties are
    connected. min_parties: the number of parties that must answer a round. quorum, grace, max_rest: what becomes of
    parties that are late, see `StragglerPolicy`.
    """

    round_timeout: float = 60.0
    join_timeout: float = 600.0
    min_parties: int = 1
    quorum: float = StragglerPolicy.quorum
    grace: float = StragglerPolicy.grace
    max_rest: int = StragglerPolicy.max_rest

    @property
    def stragglers(self) -> StragglerPolicy:
        """What becomes of parties that are late."""
        return StragglerPolicy(self.quorum, self.grace, self.max_rest)


STALE_CODES = ("repeated", "lost")
"""Refusals of a round that a party has answered before, to a request that differs; waiting does not change them."""


class FlowerEngine(Engine):
    """`run(request)` sends each assignment to its party, checks the replies, and yields those that are sound.

    clients: the parties in the order of their numbers. secret: makes the requests' nonces, the same ones again after a
    crash. streams: the seed and the id of the random streams that parties share, in simulations only.
    """

    remote = True

    def __init__(
        self,
        registry: PartyRegistry,
        clients: Sequence[PartyInfo],
        problem: TrainingProblem,
        settings: Settings,
        wait_policy: WaitPolicy,
        secret: bytes,
        streams: SimulatedStreams | None = None,
    ) -> None:
        self.registry, self.clients, self.problem, self.settings = registry, tuple(clients), problem, settings
        self.wait_policy, self.secret, self.streams = wait_policy, secret, streams
        self.stragglers = StragglerBook(wait_policy.stragglers)
        self._spent: set[int] = set()
        self._stale: set[int] = set()  # refused the current round because they had answered it before
        self._next_round = 0
        self._agreed = name_model_and_task(problem)
        limit: Callable[[int], None] = getattr(registry.transport, "limit_replies", lambda size: None)
        limit(8 * problem.layout.dim)  # an honest reply has four bytes per number, coded or not
        self.masked = MaskedCoordinator(self)

    # --- who is there -----------------------------------------------------------------------------

    def list_reachable_clients(self, clients: Sequence[int]) -> list[int]:
        """Those of the clients that are online and do not rest; waits until at least `min_parties` are online."""
        able = [k for k in clients if k not in self._spent]
        if len(able) < self.wait_policy.min_parties:
            return able
        end, told = time.monotonic() + self.wait_policy.join_timeout, False
        while True:
            self.registry.poll()
            online = self.registry.transport.online()
            here = [k for k in able if self.registry.node_of.get(self.clients[k].name) in online]
            if len(here) >= self.wait_policy.min_parties:
                return self._select_awake(here)
            if time.monotonic() > end:
                raise RunError(
                    f"only {len(here)} of at least {self.wait_policy.min_parties} parties are there after "
                    f"{self.wait_policy.join_timeout:g} s{list_refusals(self.registry)}; bring them back, then "
                    "continue with fulcrum serve --resume."
                )
            if not told:
                self.registry.report(
                    "", f"waiting: {len(here)} of at least {self.wait_policy.min_parties} parties are there"
                )
                told = True
            time.sleep(10 * POLL_SECONDS)

    def _select_awake(self, here: Sequence[int]) -> list[int]:
        """Those of the clients that do not rest; those that do are greeted, and come back by answering."""
        names = {k: self.clients[k].name for k in here}
        resting = set(self.stragglers.list_resting(here))
        for k in resting:
            self.registry.greet_again(names[k])
        heard = {k: self.registry.heard[name] for k, name in names.items() if name in self.registry.heard}
        awake = self.stragglers.select_awake(here, self._next_round, heard, self.wait_policy.min_parties)
        for k in resting - set(self.stragglers.list_resting(here)):
            self.registry.report(names[k], f"answers again; it is asked from round {self._next_round + 1} on")
        return awake

    def spent(self) -> set[int]:
        """Parties whose own ledger has refused to go on."""
        return set(self._spent)

    def replays_rounds(self, randomness_mode: str) -> bool:
        """The parties keep the ledgers that count, and send a round's stored bytes again, unless masked."""
        return self.settings.privacy.aggregation != "pairwise"

    # --- a round ----------------------------------------------------------------------------------

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        """Ask every party, wait until all have answered or the time is over, and yield the sound replies."""
        if self.settings.privacy.aggregation == "pairwise":
            self._next_round = request.round + 1
            yield from self.masked.run(request)
            return
        shared = all(state is request.states[0] for state in request.states) or self.problem.rule.where == "client"
        body = pack_round_body(self.problem, request, request.states[0]) if shared and request.states else None
        asks = {
            task.client: (task, state, self._make_round_request(request, task, state, body=body))
            for task, state in zip(request.assignments, request.states, strict=True)
        }
        needed = min(self.wait_policy.min_parties, len(asks))
        replies: dict[int, ClientReply] = {}
        settled: set[int] = set()  # answered, well or badly
        missed: set[int] = set()
        self._stale.clear()
        self._next_round = request.round + 1
        end = time.monotonic() + max(self.wait_policy.join_timeout, self.wait_policy.round_timeout)
        while True:
            self._collect_results(request, {k: ask for k, ask in asks.items() if k not in settled}, replies, settled)
            for k in asks.keys() - settled - missed:
                words = self.stragglers.note_miss(k, request.round)
                self.registry.report(self.clients[k].name, f"did not answer round {request.round + 1} in time: {words}")
                missed.add(k)
            short = needed - len(self._spent & asks.keys()) - len(replies)
            if short <= 0:  # parties that ran out of budget just now end the run, but only after this round
                break
            if len(settled) == len(asks) and short <= len(self._stale):
                # The folder is older than what the parties have answered, and other parties took part then.
                names = ", ".join(self.clients[k].name for k in sorted(self._stale))
                self.registry.report(
                    "",
                    f"round {request.round + 1} passes without an update: {names} answered it before, to another "
                    "request, and paid for it then; what they paid is not paid again",
                )
                return
            if len(settled) == len(asks):
                raise RunError(f"too few usable answers to round {request.round + 1}; parties.jsonl says why.")
            if time.monotonic() > end:
                raise RunError(
                    f"only {len(replies)} of at least {needed} parties answered round {request.round + 1}; bring "
                    "them back, then continue with fulcrum serve --resume."
                )
        yield from (replies[task.client] for task in request.assignments if task.client in replies)

    def _collect_results(
        self,
        request: RoundRequest,
        asks: Mapping[int, tuple[Assignment, RuleState, Envelope]],
        replies: dict[int, ClientReply],
        settled: set[int],
    ) -> None:
        """Send the requests, and collect replies until all are settled or the time is over."""
        end = time.monotonic() + self.wait_policy.round_timeout
        quorum: float = max(self.stragglers.policy.count_needed(len(asks) + len(settled)), self.wait_policy.min_parties)
        waiting: dict[str, int] = {}

        def send(k: int) -> None:
            node = self.registry.node_of.get(self.clients[k].name)
            left = end - time.monotonic()
            if node is not None and left > 0:
                sent = self.registry.transport.send(node, asks[k][2], left, str(request.round + 1))
                if sent:
                    waiting[sent] = k

        for k in asks:
            send(k)
        late = False
        while asks.keys() - settled and not late:
            late = time.monotonic() > end  # once more after the deadline: what has arrived by then counts
            self.registry.poll()
            for name in self.registry.take_restarted_parties():
                for k in asks.keys() - settled:
                    if self.clients[k].name == name:
                        send(k)  # the same bytes: it computes once, or sends what it stored
            for delivery in self.registry.transport.collect(set(waiting)) if waiting else ():
                k = waiting.pop(delivery.id)
                if k in settled:
                    continue
                if delivery.envelope is None:
                    self.registry.report(self.clients[k].name, f"round {request.round + 1}: {delivery.error}")
                    continue
                settled.add(k)
                try:
                    reply = self._check_reply(request, *asks[k], delivery.envelope)
                except BadMessage as error:
                    self.registry.report(
                        self.clients[k].name, f"round {request.round + 1}: its reply was refused: {error}"
                    )
                    continue
                if reply is not None:
                    replies[k] = reply
                    self.stragglers.note_answer(k)
            if len(replies) >= quorum:
                end, quorum = min(end, time.monotonic() + self.stragglers.policy.grace), math.inf
            if asks.keys() - settled:
                self.registry.wait()

    def _make_round_request(
        self,
        request: RoundRequest,
        task: Assignment,
        state: RuleState,
        attempt: int = 0,
        body: PackedBody | None = None,
    ) -> Envelope:
        """The signed request to one party. The same attempt at a round of a run gives the same header and body, also
        after a crash; a party that has answered them sends its stored reply again."""
        name = self.clients[task.client].name
        again = f"/{attempt}" if attempt else ""
        nonce = hmac.new(self.secret, f"{self.registry.run}/{request.round}/{name}{again}".encode(), hashlib.sha256)
        header = {
            "run": self.registry.run,
            "nonce": nonce.hexdigest()[:32],
            "party": name,
            "attempt": attempt,
            "simulation": simulation_to_table(self.streams),
        }
        packed = pack_round_request({**header, **self._agreed}, self.settings, self.problem, request, task, state, body)
        return self.registry.sign(packed)

    def _check_reply(
        self, request: RoundRequest, task: Assignment, state: RuleState, ask: Envelope, envelope: Envelope
    ) -> ClientReply | None:
        """The reply as an engine returns it; None where the party refused; BadMessage where it is not sound."""
        header = verify_signed_reply(envelope, ("update", "refused"), ask, self.registry.run, self.registry.public_keys)
        name = self.clients[task.client].name
        if header["party"] != name:
            raise BadMessage(f"it is from {header['party']}.")
        if header["kind"] == "refused":
            if header["code"] == "budget":
                self._spent.add(task.client)
            if header["code"] in STALE_CODES:
                self._stale.add(task.client)
            self.registry.report(name, f"refused round {request.round + 1}: {describe_refusal(header['code'])}")
            return None
        if header["round"] != request.round:
            raise BadMessage("it is of another round.")
        units = self.clients[task.client].units
        events = events_from_rows(header["events"])
        if not events_agree(events, compute_planned_events(task, self.problem.rule, task.rate * units, request.round)):
            raise BadMessage("what it says it released is not what was asked for.")
        own = self.problem.rule.where == "client"
        spec: ArraySpec = {
            "delta": (torch.float32, (self.problem.layout.dim,)),
            "extra": (torch.float32, (measure_statistics_width(self.problem, state),)),
            **({"C": (state["C"].dtype, tuple(state["C"].shape))} if own else {}),
        }
        arrays = read_message_arrays(envelope, spec)
        limit = bound_update_norm(self.problem, self.settings, request, task, state, units)
        if float(torch.linalg.vector_norm(arrays["delta"].double())) > limit:
            raise BadMessage("its update is larger than any honest one.")
        if own and not is_C_within(arrays["C"], self.settings.clip.C_min, self.settings.clip.C_max):
            raise BadMessage("its clipping norm is outside the agreed range.")
        device = self.problem.device
        return ClientReply(
            client=task.client,
            delta=arrays["delta"].to(device),
            extra=arrays["extra"].to(device),
            events=events,
            state={**state, "C": arrays["C"].to(device)} if own else state,
        )

    def note_refusal(self, client: int, code: str) -> None:
        """A party refused a masked round. It is asked no more if its budget is spent, or if it would refuse again."""
        if code == "budget" or code in LASTING_REFUSALS:
            self._spent.add(client)

    def pack_body(self, request: RoundRequest, state: RuleState) -> PackedBody:
        """What travels to every party of a round."""
        return pack_round_body(self.problem, request, state)

    def select_moving(self, state: RuleState) -> RuleState:
        """What of a clipping state travels with a round's request."""
        rule = self.problem.rule
        return {} if rule.where == "client" else select_moving_entries(rule.moves, state)

    def send_run_finished(self, rounds: int, seconds: float = 5.0) -> None:
        """Tell every party that the run is over, so that it writes its statement; waits up to `seconds` for that."""
        online = self.registry.transport.online()
        there = {name: node for name, node in self.registry.node_of.items() if node in online}
        waiting = {
            self.registry.transport.send(
                node, self.registry.pack_request("done", name, rounds=rounds), 10 * seconds, "done"
            )
            for name, node in there.items()
        } - {""}
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            waiting -= {delivery.id for delivery in self.registry.transport.collect(waiting)}
            time.sleep(POLL_SECONDS)


def list_refusals(registry: PartyRegistry) -> str:
    """Who refused to take part, and why: " (b does not take part: ...)"; "" where nobody did."""
    found = [f"{name} {why}" for name, why in sorted(registry.refusals.items())]
    return f" ({'; '.join(found)})" if found else ""


def name_model_and_task(problem: TrainingProblem) -> dict[str, str]:
    """The fingerprints by which coordinator and parties know that they train the same thing."""
    return {
        "model": compute_model_fingerprint(problem.model, problem.layout),
        "task": task_fingerprint(problem.dataset),
    }


def pack_round_request(
    header: Mapping[str, Any],
    settings: Settings,
    problem: TrainingProblem,
    request: RoundRequest,
    task: Assignment,
    state: RuleState,
    body: PackedBody | None = None,
) -> Envelope:
    """A round's request. header: its run, nonce, party, model, task and simulation. body: of `pack_round_body`."""
    public = {
        "kind": "round",
        "assignment": assignment_to_table(task),
        "rule": settings.clip.rule,
        "groups": settings.clip.groups,
        "unit": settings.privacy.unit,
        "round": request.round,
        "rounds": request.rounds,
        "weight_decay": request.weight_decay,
    }
    return pack_envelope({**header, **public}, body=body or pack_round_body(problem, request, state))


def pack_round_body(problem: TrainingProblem, request: RoundRequest, state: RuleState) -> PackedBody:
    """What travels to a party in a round: the weights, and what moves of the rule's state.

    It is the same for all parties, unless each has a rule's state of its own that moves.
    """
    rule = problem.rule  # a rule that parties adapt for themselves sends nothing of its state
    moving = {} if rule.where == "client" else select_moving_entries(rule.moves, state)
    return PackedBody(encode_arrays({"params": request.params, **state_to_arrays(moving)}))


def bound_update_norm(
    problem: TrainingProblem, settings: Settings, request: RoundRequest, task: Assignment, state: RuleState, units: int
) -> float:
    """An upper bound on the norm of an honest update: every unit sampled and aligned, noise at ten times its size."""
    C = float(torch.linalg.vector_norm(problem.rule.bounds(state).C))
    if problem.rule.where == "client":  # it may have moved on its way through the steps
        C = max(C, settings.clip.C_max)
    spread = 10 * task.sigma * math.sqrt(2 * problem.layout.dim + 100)
    step = task.lr * C * (units + spread) / (task.rate * units)
    decay = task.lr * request.weight_decay
    start = float(torch.linalg.vector_norm(request.params))
    grown = (1 + decay) ** task.steps
    return (step * task.steps + start * decay * task.steps) * grown * (1 + 1e-3)
