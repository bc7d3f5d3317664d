"""A Flower mod: a client function with a private loop in it, and a guard at the door.

    mod = PrivateMod(epsilon=3.0, rounds=20, ledger="/data/hospital.sqlite")
    app = ClientApp(mods=[mod])

    @app.train()
    def train(msg, context):
        model = Net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = mod.private(model, optimizer, make_loader())
        for x, y in loader:                       # one local epoch
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": 500})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

Each record (or person) of this party is protected against everybody, the server included. The mod lets out what the
private loop released and nothing else: weights that did not come from its steps, buffers that changed, metrics that are
not listed, evaluations and the text of errors stay inside. Any strategy that averages weights goes with it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from torch import Tensor
from torch.utils.data import DataLoader

from fulcrum.errors import BudgetError, FulcrumError, RunError
from fulcrum.integrations import PrivateLoop, private
from fulcrum.integrations.loop import ModelT, OptimizerT

STATE = "fulcrum"
"""The record of the node's state that holds the private loop's between two rounds."""
REFUSED = 1000
"""Code of a reply that was refused; the reason is a fixed sentence, so that it tells nothing about the data."""

CallNext = Callable[[Message, Context], Message]


class PrivateMod:
    """Guards a ClientApp. rounds: number of rounds that this party takes part in at most; epochs: local epochs of each.

    epsilon, delta, persons, ledger, name, seed and options: as for `fulcrum.private`; the budget is for all rounds.
    metrics: names of numbers that may leave as they are, since they are public; all others are dropped. evaluate:
    whether answers to evaluation messages leave; their metrics are not private.
    """

    def __init__(
        self,
        *,
        rounds: int,
        epsilon: float | None = None,
        epochs: float = 1,
        ledger: str | Path | None = None,
        metrics: tuple[str, ...] = ("num-examples",),
        evaluate: bool = False,
        **options: Any,
    ) -> None:
        self._rounds, self._epochs, self._evaluate, self._metrics = rounds, epochs, evaluate, metrics
        self._options: dict[str, Any] = {"epsilon": epsilon, "ledger": ledger, **options}
        self._message: Message | None = None
        self._context: Context | None = None
        self._loop: PrivateLoop[Any, Any] | None = None

    def private(
        self, model: ModelT, optimizer: OptimizerT, loader: DataLoader[Any], persons: Any = None
    ) -> PrivateLoop[ModelT, OptimizerT]:
        """`fulcrum.private` for this round's part of the budget; the model must have the weights of the message."""
        if self._message is None or self._context is None:
            raise RunError("mod.private was called outside of a message; call it in the client function.")
        sent = read_arrays(self._message)
        for name, value in model.state_dict().items():
            if name not in sent or not torch.equal(sent[name].to(value), value):
                raise RunError(
                    f"the model's {name!r} is not what the server sent; load the message's weights before mod.private, "
                    "since anything else may hold traces of the data."
                )
        loop = private(model, optimizer, loader, epochs=self._rounds * self._epochs, persons=persons, **self._options)
        kept = self._context.state.get(STATE)
        if isinstance(kept, ConfigRecord) and isinstance(kept.get("state"), bytes):
            loop.privacy.load_state_dict(torch.load(io.BytesIO(kept["state"]), weights_only=True))
        self._loop = loop
        return loop

    def __call__(self, msg: Message, context: Context, call_next: CallNext) -> Message:
        kind = msg.metadata.message_type.partition(".")[0]
        if kind == MessageType.EVALUATE and self._evaluate:
            return call_next(msg, context)
        if kind != MessageType.TRAIN:
            return refuse(msg, "only training is private here; evaluate on public records at the server")
        self._message, self._context, self._loop = msg, context, None
        try:
            reply = call_next(msg, context)
            return self._let_out(msg, context, reply)
        except BudgetError:
            return refuse(msg, "this party's privacy budget is spent")
        except FulcrumError:
            return refuse(msg, "this party's private loop refused")
        except Exception:  # Flower would send the whole text of the error, which may quote the data
            return refuse(msg, "the client function failed")
        finally:
            self._keep_state(context)
            self._message = self._context = self._loop = None

    def _keep_state(self, context: Context) -> None:
        if self._loop is None:
            return
        text = io.BytesIO()
        torch.save(self._loop.privacy.state_dict(), text)
        context.state[STATE] = ConfigRecord({"state": text.getvalue()})
        self._loop.privacy.close()

    def _let_out(self, msg: Message, context: Context, reply: Message) -> Message:
        """The reply with what is private of it; a refusal where its weights are not those that were released."""
        if reply.has_error():
            return refuse(msg, "the client function failed")
        loop = self._loop
        if loop is None:
            return refuse(msg, "the client function did not train through mod.private")
        if len(reply.content.array_records) != 1:
            return refuse(msg, "a reply holds one ArrayRecord, the weights")
        key = next(iter(reply.content.array_records))
        sent, found = read_arrays(msg), read_arrays(reply)
        allowed = {**sent, **loop.privacy.released_weights()}
        if set(found) != set(sent) or not all(_is_same(value, allowed[name]) for name, value in found.items()):
            return refuse(msg, "the reply's weights are not those that the private loop released")
        kept: dict[str, Any] = {}
        for record in reply.content.metric_records.values():
            kept |= {name: value for name, value in record.items() if name in self._metrics}
        metrics = MetricRecord({**kept, "epsilon": loop.privacy.epsilon, "steps": loop.privacy.step})
        return Message(RecordDict({key: ArrayRecord(found), "metrics": metrics}), reply_to=msg)


def read_arrays(message: Message) -> dict[str, Tensor]:
    """The tensors of a message's one ArrayRecord."""
    found: dict[str, Tensor] = dict(next(iter(message.content.array_records.values())).to_torch_state_dict())
    return found


def refuse(msg: Message, reason: str) -> Message:
    """A reply that says why there is none; the reason is a fixed sentence."""
    return Message(Error(REFUSED, f"{reason}."), reply_to=msg)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.to(other), other)
