"""The coordinator's side: an engine that asks parties instead of computing.

Rounds, aggregation, the rule for C, evaluation, record and resume are those of a run in one process
(`federate`, `api`). What is here: asking, and checking what comes back (`FlowerEngine`).
A reply that is late, malformed, not signed by the party it claims, of another round, or larger than
any honest one is left out and reported; the round goes on with the others.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fulcrum.errors import RunError
from fulcrum.flower.messages import (
    BadMessage,
    Envelope,
    Wanted,
    model_fingerprint,
    pack,
    read_arrays,
    read_events,
    state_arrays,
    take_state,
    wanted_state,
)
from fulcrum.flower.registry import POLL, Card, Roll, opened, refusal_words
from fulcrum.privacy.events import Gaussian
from fulcrum.settings.schema import Settings
from fulcrum.training.clipped_sum import contribute
from fulcrum.training.engine import Engine
from fulcrum.training.problem import Problem, coordinate_groups
from fulcrum.types import Assignment, ClientReply, RoundRequest, State


@dataclass(frozen=True)
class Patience:
    """deadline: seconds a round waits for replies. wait: seconds to wait for enough parties to be there.

    minimum: parties that must answer a round.
    """

    deadline: float = 60.0
    wait: float = 600.0
    minimum: int = 1


class FlowerEngine(Engine):
    """`run(request)` sends each assignment to its party and yields the replies that came, checked.

    clients: the parties in the order of their numbers. seed: shared with the parties, in simulations only.
    """

    remote = True

    def __init__(
        self,
        roll: Roll,
        clients: Sequence[Card],
        problem: Problem,
        settings: Settings,
        patience: Patience,
        secret: bytes,
        seed: int | None = None,
    ) -> None:
        self.roll, self.clients, self.problem, self.settings = roll, tuple(clients), problem, settings
        self.patience, self.secret, self.seed = patience, secret, seed
        self._spent: set[int] = set()
        self._model = model_fingerprint(problem.model, problem.layout)

    # --- who is there -----------------------------------------------------------------------------

    def present(self, clients: Sequence[int]) -> list[int]:
        """Those that are online; waits until `minimum` of those who still take part are."""
        able = [k for k in clients if k not in self._spent]
        if len(able) < self.patience.minimum:
            return able
        end, told = time.monotonic() + self.patience.wait, False
        while True:
            self.roll.call()
            online = self.roll.post.online()
            here = [k for k in able if self.roll.node_of.get(self.clients[k].name) in online]
            if len(here) >= self.patience.minimum:
                return here
            if time.monotonic() > end:
                raise RunError(
                    f"only {len(here)} of at least {self.patience.minimum} parties are there after "
                    f"{self.patience.wait:g} s; bring them back, then continue with fulcrum serve --resume."
                )
            if not told:
                self.roll.report("", f"waiting: {len(here)} of at least {self.patience.minimum} parties are there")
                told = True
            time.sleep(10 * POLL)

    def spent(self) -> set[int]:
        """Parties whose own ledger has refused to go on."""
        return set(self._spent)

    def replays(self, randomness_mode: str) -> bool:
        """The parties keep the ledgers that count, and send a round's stored bytes again."""
        return True

    # --- a round ----------------------------------------------------------------------------------

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        """Ask everybody, wait until all have answered or the deadline has passed, yield what is sound."""
        asks = {
            task.client: (task, state, self._ask(request, task, state))
            for task, state in zip(request.assignments, request.states, strict=True)
        }
        needed = min(self.patience.minimum, len(asks))
        replies: dict[int, ClientReply] = {}
        settled: set[int] = set()  # answered, well or badly
        end = time.monotonic() + max(self.patience.wait, self.patience.deadline)
        while True:
            self._collect(request, {k: ask for k, ask in asks.items() if k not in settled}, replies, settled)
            for k in asks.keys() - settled:
                self.roll.report(self.clients[k].name, f"did not answer round {request.round + 1} in time")
            short = needed - len(self._spent & asks.keys()) - len(replies)
            if short <= 0:  # parties that ran out of budget just now end the run, but only after this round
                break
            if len(settled) == len(asks):
                raise RunError(f"too few usable answers to round {request.round + 1}; parties.jsonl says why.")
            if time.monotonic() > end:
                raise RunError(
                    f"only {len(replies)} of at least {needed} parties answered round {request.round + 1}; bring "
                    "them back, then continue with fulcrum serve --resume."
                )
        yield from (replies[task.client] for task in request.assignments if task.client in replies)

    def _collect(
        self,
        request: RoundRequest,
        asks: Mapping[int, tuple[Assignment, State, Envelope]],
        replies: dict[int, ClientReply],
        settled: set[int],
    ) -> None:
        """Send and gather until the deadline."""
        end = time.monotonic() + self.patience.deadline
        waiting: dict[str, int] = {}

        def send(k: int) -> None:
            node = self.roll.node_of.get(self.clients[k].name)
            left = end - time.monotonic()
            if node is not None and left > 0:
                sent = self.roll.post.send(node, asks[k][2], left, str(request.round + 1))
                if sent:
                    waiting[sent] = k

        for k in asks:
            send(k)
        late = False
        while asks.keys() - settled and not late:
            late = time.monotonic() > end  # once more after the deadline: what has arrived by then counts
            self.roll.call()
            for name in self.roll.take_returned():
                for k in asks.keys() - settled:
                    if self.clients[k].name == name:
                        send(k)  # the same bytes: it computes once, or sends what it stored
            for delivery in self.roll.post.collect(set(waiting)) if waiting else ():
                k = waiting.pop(delivery.id)
                if k in settled:
                    continue
                if delivery.envelope is None:
                    self.roll.report(self.clients[k].name, f"round {request.round + 1}: {delivery.error}")
                    continue
                settled.add(k)
                try:
                    reply = self._checked(request, *asks[k], delivery.envelope)
                except BadMessage as error:
                    self.roll.report(self.clients[k].name, f"round {request.round + 1}: its reply was refused: {error}")
                    continue
                if reply is not None:
                    replies[k] = reply
            time.sleep(POLL)

    def _ask(self, request: RoundRequest, task: Assignment, state: State) -> Envelope:
        """The request to one party. The same round of the same run gives the same bytes, also after a crash."""
        name = self.clients[task.client].name
        nonce = hmac.new(self.secret, f"{self.roll.run}/{request.round}/{name}".encode(), hashlib.sha256)
        header = {
            "kind": "round",
            "run": self.roll.run,
            "nonce": nonce.hexdigest()[:32],
            "party": name,
            "client": task.client,
            "rule": self.settings.clip.rule,
            "groups": self.settings.clip.groups,
            "unit": self.settings.privacy.unit,
            "model": self._model,
            "round": request.round,
            "rounds": request.rounds,
            "steps": task.steps,
            "rate": task.rate,
            "sigma": task.sigma,
            "lr": task.lr,
            "weight_decay": request.weight_decay,
            "seeds": [] if self.seed is None else [self.seed],
        }
        return pack(header, {"params": request.params, **state_arrays(state)})

    def _checked(
        self, request: RoundRequest, task: Assignment, state: State, ask: Envelope, envelope: Envelope
    ) -> ClientReply | None:
        """The reply as the federation takes it; None where the party refused; BadMessage where it is not honest."""
        header = opened(envelope, ("update", "refused"), ask, self.roll.run, self.roll.register)
        name = self.clients[task.client].name
        if header["party"] != name:
            raise BadMessage(f"it is from {header['party']}.")
        if header["kind"] == "refused":
            if header["code"] == "budget":
                self._spent.add(task.client)
            self.roll.report(name, f"refused round {request.round + 1}: {refusal_words(header['code'])}")
            return None
        if header["round"] != request.round:
            raise BadMessage("it is of another round.")
        events = read_events(header["events"])
        made = {(event.rate, event.sigma) for event in events}
        if made != {(task.rate, task.sigma)} or sum(event.count for event in events) != task.steps:
            raise BadMessage("what it says it released is not what was asked for.")
        own = self.problem.rule.where == "client"
        wanted: Wanted = {
            "delta": (torch.float32, (self.problem.layout.dim,)),
            "extra": (torch.float32, (extra_width(self.problem, state),)),
            **(wanted_state(state) if own else {}),
        }
        arrays = read_arrays(envelope, wanted)
        units = self.clients[task.client].units
        limit = largest_update(self.problem, self.settings, request, task, state, units)
        if float(torch.linalg.vector_norm(arrays["delta"].double())) > limit:
            raise BadMessage("its update is larger than any honest one.")
        device = self.problem.device
        return ClientReply(
            client=task.client,
            delta=arrays["delta"].to(device),
            extra=arrays["extra"].to(device),
            events=(Gaussian(task.rate, task.sigma),) * task.steps,
            state={n: v.to(device) for n, v in take_state(arrays).items()} if own else state,
        )

    def dismiss(self, rounds: int, seconds: float = 5.0) -> None:
        """Tell everybody that the run is over, so that each writes its statement; waits a little for that."""
        online = self.roll.post.online()
        nonce = secrets.token_hex(16)
        done = pack({"kind": "done", "run": self.roll.run, "nonce": nonce, "rounds": rounds})
        nodes = [node for node in self.roll.node_of.values() if node in online]
        waiting = {self.roll.post.send(node, done, 10 * seconds, "done") for node in nodes} - {""}
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            waiting -= {delivery.id for delivery in self.roll.post.collect(waiting)}
            time.sleep(POLL)


def extra_width(problem: Problem, state: State) -> int:
    """J: how many extra statistics the rule releases, seen on a batch without examples."""
    on_cpu = {name: value.cpu() for name, value in state.items()}
    nothing = torch.zeros((0, problem.layout.dim))
    groups = coordinate_groups(problem.layout, problem.groups)
    view = problem.rule.view(on_cpu, 0, 1)
    return len(contribute(problem.rule, view, on_cpu, nothing, torch.zeros(0), groups, 1.0, 1.0).extra)


def largest_update(
    problem: Problem, settings: Settings, request: RoundRequest, task: Assignment, state: State, units: int
) -> float:
    """A bound on the norm of an honest update: every unit sampled and aligned, noise at ten times its size."""
    C = float(torch.linalg.vector_norm(problem.rule.bounds(state).C))
    if problem.rule.where == "client":  # it may have moved on its way through the steps
        C = max(C, settings.clip.C_max)
    spread = 10 * task.sigma * math.sqrt(2 * problem.layout.dim + 100)
    step = task.lr * C * (units + spread) / (task.rate * units)
    decay = task.lr * request.weight_decay
    start = float(torch.linalg.vector_norm(request.params))
    grown = (1 + decay) ** task.steps
    return (step * task.steps + start * decay * task.steps) * grown * (1 + 1e-3)
