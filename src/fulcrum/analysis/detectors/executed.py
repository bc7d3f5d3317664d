"""A real run of a case, stopped once and resumed, with a witness beside its engine: what left, and what was paid."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fulcrum.analysis.detectors.probe import CLASSES, make_model, make_records
from fulcrum.data import Dataset, from_arrays
from fulcrum.errors import FulcrumError
from fulcrum.rng import CipherRandomness, StreamKey
from fulcrum.runs import execute, prepare
from fulcrum.runs.execution import resume_prepared
from fulcrum.settings.schema import Settings
from fulcrum.training.engine import Engine
from fulcrum.training.federation import Federation
from fulcrum.types import Assignment, ClientReply, RoundRequest, RoundResult, RuleState

RUN_PARTIES = 3


@dataclass(frozen=True)
class Sent:
    """One reply that left a party. digest: of its bytes. params [d], state: the weights and the rule's state that it
    was made with."""

    round: int
    task: Assignment
    digest: str
    reply: ClientReply
    params: torch.Tensor
    state: RuleState


@dataclass
class Witness(Engine):
    """An engine that writes down what passes through it."""

    inner: Engine
    sent: list[Sent] = field(default_factory=list)

    def run(self, request: RoundRequest) -> Iterable[ClientReply]:
        """The inner engine's replies, written down."""
        replies = list(self.inner.run(request))
        for task, state, reply in zip(request.assignments, request.states, replies, strict=True):
            self.sent.append(Sent(request.round, task, digest_reply(reply), reply, request.params, state))
        return replies

    def replays_rounds(self, randomness_mode: str) -> bool:
        """As the inner engine says."""
        return self.inner.replays_rounds(randomness_mode)


def digest_reply(reply: ClientReply) -> str:
    """The digest that a ledger keeps of a release."""
    mac = hashlib.blake2b(digest_size=16)
    for tensor in (reply.delta, reply.extra):
        mac.update(tensor.detach().cpu().numpy().tobytes())
    return mac.hexdigest()


@dataclass(frozen=True)
class Executed:
    """A finished run: what left it, round by round, and what its folder says.

    early: the statement when it stopped. refused: why the library itself did not go on, where it noticed a fault.
    streams: by the place of a random stream (secret, cipher's key and nonce), the names under which it was asked for.
    """

    federation: Federation
    folder: Path
    sent: tuple[Sent, ...]
    results: tuple[RoundResult, ...]
    facts: dict[str, Any]
    page: str
    early: dict[str, Any]
    refused: str = ""
    streams: Mapping[Any, frozenset[StreamKey]] = field(default_factory=dict)


class Stopped(Exception):
    """Ends a run in the middle, as a crash would."""


def make_run_dataset(settings: Settings) -> Dataset:
    """Records of three parties; private where some of them are held out for evaluation, else public."""
    model, persons = make_model(), settings.privacy.unit == "person"
    parties = RUN_PARTIES if settings.privacy.unit != "client" else 6
    records = make_records(model, parties, persons)
    held_out = settings.data.validation > 0
    tests: dict[str, Any] = {} if held_out else {"x_test": records["x"][:6], "y_test": torch.arange(6) % CLASSES}
    person: dict[str, Any] = {"person": records["person"]} if persons else {}
    names = [f"p{k}" for k in range(parties)]
    return from_arrays(
        records["x"] / 10,
        records["y"],
        party=records["party"],
        party_names=names,
        classes=CLASSES,
        name="probe",
        public=not held_out,
        **tests,
        **person,
    )


@contextmanager
def watch_streams() -> Iterator[dict[Any, set[StreamKey]]]:
    """Write down under which names random streams are asked for, and where they lie."""
    locate = CipherRandomness.locate_stream
    seen: dict[Any, set[StreamKey]] = {}

    def watched(self: CipherRandomness, key: StreamKey) -> Any:
        place = locate(self, key)
        seen.setdefault((self.secret, *place), set()).add(tuple(key))
        return place

    with mock.patch.object(CipherRandomness, "locate_stream", watched):
        yield seen


def execute_case(settings: Settings, folder: Path, stop_after: int = 2) -> Executed:
    """Run the settings over the probe's records; the run stops after a few rounds and is resumed."""
    with watch_streams() as streams:
        found = _execute(settings, folder, stop_after)
    return dataclasses.replace(found, streams={place: frozenset(names) for place, names in streams.items()})


def _execute(settings: Settings, folder: Path, stop_after: int) -> Executed:
    changed = settings.replace(data={"source": "probe", "partition": "auto", "min_examples": 1})
    dataset, results, seen = make_run_dataset(changed), [], []
    parties = len(dataset.party_names)
    changed = changed.replace(data={"parties": parties})

    def prepare_watched() -> tuple[Federation, Witness]:
        made = prepare(changed, dataset, make_model())
        witness = Witness(made.engine)
        return dataclasses.replace(made, engine=witness), witness

    def stop(result: RoundResult) -> None:
        results.append(result)
        if result.round == stop_after:
            raise Stopped

    federation, witness = prepare_watched()
    early: dict[str, Any] = {}
    refused = ""
    try:
        execute(federation, folder, stop)
    except Stopped:
        early = json.loads((folder / "privacy.json").read_text(encoding="utf-8"))
        seen += witness.sent
        federation, witness = prepare_watched()
        try:
            resume_prepared(federation, folder, results.append, repeat=True)
        except FulcrumError as error:
            refused = str(error)
    except FulcrumError as error:
        refused = str(error)
        if not (folder / "privacy.json").is_file():
            raise
    seen += witness.sent
    facts = json.loads((folder / "privacy.json").read_text(encoding="utf-8"))
    page = (folder / "PRIVACY.md").read_text(encoding="utf-8")
    return Executed(federation, folder, tuple(seen), tuple(results), facts, page, early, refused)
