"""A federation whose transport is a dictionary: parties and coordinator as across machines, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fulcrum.clipping import find_rule
from fulcrum.clipping.party_state import select_moving_entries
from fulcrum.clipping.rule import ModelFacts
from fulcrum.data import Dataset, split
from fulcrum.data.arrays import recheck_dataset
from fulcrum.flower import keys, run
from fulcrum.flower.coordinator import WaitPolicy
from fulcrum.flower.messages import (
    Envelope,
    assignment_to_table,
    compute_model_fingerprint,
    make_assignment_schema,
    pack_envelope,
    state_to_arrays,
)
from fulcrum.flower.party import PartyService, open_party_service
from fulcrum.flower.party_data import take_part
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.registry import MessageDelivery
from fulcrum.flower.terms import PartyTerms
from fulcrum.privacy.events import Gaussian
from fulcrum.settings.schema import Clip, Data, Model, Privacy, Run, Settings, Train
from fulcrum.types import Assignment
from support.federations import toy_data

NAMES = ("party-0", "party-1", "party-2")
WAIT_POLICY = WaitPolicy(round_timeout=1.0, join_timeout=1.0, min_parties=1)


def flip_last_byte(content: bytes) -> bytes:
    """Other bytes, always: a fixed byte in place of the last is the same one in 256 signatures."""
    return content[:-1] + bytes([content[-1] ^ 1])


def toy_settings(rounds: int = 4, rule: str = "moo", **train: Any) -> Settings:
    """Three toy parties; sigma rather than epsilon, so that nothing is calibrated."""
    return Settings(
        method="moo",
        data=Data(source="toy", parties=3, partition="iid", min_examples=1),
        model=Model(name="linear"),
        train=Train(rounds=rounds, rate=0.2, lr=0.5, **train),
        clip=Clip(rule=rule),
        privacy=Privacy(sigma=1.1, delta=1e-3),
        run=Run(engine="auto", device="cpu"),  # as the parties choose; other engines differ in the last bits
    )


def part(data: Dataset, settings: Settings, k: int) -> Dataset:
    """Party k's own records, and no others."""
    return take_part(data, split(data, settings.data, settings.run.seed).indices(k), f"part-{k}")


def toy_terms(settings: Settings, name: str = "party-0", **changes: Any) -> PartyTerms:
    return dataclasses.replace(accept_proposal(name, make_proposal(settings, 3), 50.0), **changes)


@contextlib.contextmanager
def toy_party(folder: Path, settings: Settings, k: int = 0, **options: Any) -> Iterator[PartyService]:
    """Party k's service; its key, ledger and terms lie in `folder`, so that it can be opened again."""
    name = NAMES[k]
    if not (folder / "keys" / name).exists():
        keys.make_key_pair(folder / "keys", name)
    options = {"terms": toy_terms(settings, name), "say": lambda words: None, **options}
    data = part(options.pop("data", None) or toy_data(120), settings, k)
    terms = options.pop("terms")
    with open_party_service(
        name,
        lambda task: recheck_dataset(data, data.name, task),
        folder / "keys" / name,
        folder / f"{name}.sqlite",
        terms,
        folder / f"{name}.toml",
        **options,
    ) as service:
        yield service


def toy_request(service: PartyService, settings: Settings, round: int = 0, C: float = 1.0, **changes: Any) -> Envelope:
    """A round's request that the party's terms allow, unless `changes` to the header say otherwise."""
    assert service.terms is not None
    model, layout = service.trainer.model, service.trainer.layout
    task = Assignment(client=NAMES.index(service.name), rate=0.2, sigma=1.1, steps=1, lr=0.5)
    assignment = {**assignment_to_table(task), **changes.pop("assignment", {})}
    assignment |= {name: changes.pop(name) for name in make_assignment_schema() if name in changes}
    header = {
        "kind": "round",
        "run": "run-1",
        "nonce": "0" * 32,
        "party": service.name,
        "assignment": assignment,
        "rule": settings.clip.rule,
        "groups": "flat",
        "unit": "example",
        "model": compute_model_fingerprint(model, layout),
        "task": service.trainer.task_fingerprint,
        "round": round,
        "rounds": settings.train.rounds,
        "weight_decay": 0.0,
        "simulation": {"seed": 7, "stream": "toy"} if service.simulation else {},
        **changes,
    }
    rule = find_rule(settings.clip.rule)
    state = {**rule.init(settings.clip, ModelFacts(layout.dim, layout.sizes))}
    state["C"] = torch.full_like(state["C"], C)
    moving = {} if rule.where == "client" else select_moving_entries(rule.moves, state)
    return pack_envelope(header, {"params": layout.flatten(model), **state_to_arrays(moving)})


EVENT = Gaussian(0.2, 1.1, 1)


class Bus:
    """The transport: node k is party k. `tamper(k, request, reply)` may change a reply, or return None to lose it."""

    def __init__(self, services: dict[int, PartyService]) -> None:
        self.services = services
        self.away: set[int] = set()
        self.back: set[int] = set()
        self.tamper: Callable[[int, Envelope, Envelope], Envelope | None] = lambda k, request, reply: reply
        self.sent: list[tuple[int, Envelope]] = []
        self._open: dict[str, tuple[int, Envelope]] = {}

    def online(self) -> set[int]:
        return set(self.services) - self.away

    def restarted(self) -> set[int]:
        back, self.back = self.back, set()
        return back

    def send(self, node: int, envelope: Envelope, seconds: float, label: str) -> str:
        self.sent.append((node, envelope))
        number = f"m{len(self.sent)}"
        if node not in self.away:
            self._open[number] = (node, envelope)
        return number

    def collect(self, ids: set[str]) -> list[MessageDelivery]:
        """Parties compute here, so that no deadline of a test is a race against a busy machine."""
        found = []
        for number in sorted(ids & self._open.keys()):
            node, envelope = self._open.pop(number)
            reply = self.tamper(node, envelope, self.services[node].answer(envelope))
            if reply is not None:
                found.append(MessageDelivery(number, reply))
        return found


@contextlib.contextmanager
def toy_federation(
    folder: Path,
    settings: Settings,
    simulation: bool = True,
    terms: Callable[[str], PartyTerms] | None = None,
    data: Dataset | None = None,
) -> Iterator[Bus]:
    """Three parties on a bus. terms: what each agreed to, by name; by default the settings with a large budget.

    data: the records of all three, by default toy data.
    """
    with contextlib.ExitStack() as stack:
        services = {}
        for k, name in enumerate(NAMES):
            options = {} if terms is None else {"terms": terms(name)}
            services[k] = stack.enter_context(
                toy_party(folder, settings, k, simulation=simulation, data=data, **options)
            )
        yield Bus(services)


def serve(bus: Bus, settings: Settings, folder: Path, monkeypatch: Any, **options: Any) -> Any:
    """`fulcrum serve` over the bus; "resume" continues the run in `folder`. data: holds the public test records."""
    data = options.pop("data", None) or toy_data(120)
    public = dataclasses.replace(data, train=None)  # a coordinator has no training records
    monkeypatch.setattr(run, "load_public_data", lambda source, place, task: recheck_dataset(public, data.name, task))
    address = run.ListenAddress("nowhere", 1, None, None)
    register = {name: keys.load_public_key(folder.parent / "keys" / f"{name}.pub") for name in NAMES}
    said = options.pop("said", [])
    common = {"open_transport": lambda *_: contextlib.nullcontext(bus), "say": said.append}
    if options.pop("resume", False):
        return run.resume_served_run(folder, address, register, **common, **options)
    options = {"wait_policy": WAIT_POLICY, "simulation": True, **options}
    return run.serve_run(settings, folder, address, register, **common, **options)


def share_streams(monkeypatch: Any) -> None:
    """Give all runs of a seed the same random streams, so that a run across machines can be compared with one here.

    Otherwise a run's streams are named after all records, and across machines nobody has them all.
    """
    for module in ("problem", "loop"):
        monkeypatch.setattr(f"fulcrum.training.{module}.identify_releases", lambda *given: "compared")
    monkeypatch.setattr("fulcrum.flower.party_training.bind_stream_to_records", lambda streams, data: streams.stream)
