"""A federation whose post is a dictionary: parties and coordinator as across machines, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fulcrum.data import Dataset, from_arrays, split
from fulcrum.flower import keys, run
from fulcrum.flower.coordinator import Patience
from fulcrum.flower.messages import Envelope, model_fingerprint, pack, state_arrays
from fulcrum.flower.party import Desk, open_desk
from fulcrum.flower.registry import Delivery
from fulcrum.flower.terms import Terms, accept, propose
from fulcrum.privacy.events import Gaussian
from fulcrum.settings.schema import Clip, Data, Model, Privacy, Run, Settings, Train
from helpers import toy_data

NAMES = ("party-0", "party-1", "party-2")
PATIENCE = Patience(deadline=1.0, wait=1.0, minimum=1)


def toy_settings(rounds: int = 4, rule: str = "moo", **train: Any) -> Settings:
    """Three toy parties; sigma rather than epsilon, so that nothing is calibrated."""
    return Settings(
        method="moo",
        data=Data(source="toy", parties=3, partition="iid", min_examples=1),
        model=Model(name="linear"),
        train=Train(rounds=rounds, rate=0.2, lr=0.5, **train),
        clip=Clip(rule=rule),
        privacy=Privacy(sigma=1.1, delta=1e-3),
        run=Run(engine="reference", device="cpu"),  # the parties' own; other engines differ in the last bits
    )


def part(data: Dataset, settings: Settings, k: int) -> Dataset:
    """Party k's own records, and no others."""
    rows = split(data, settings.data, settings.run.seed).indices(k)
    return from_arrays(data.x[rows], data.y[rows], data.x[:1], data.y[:1], classes=data.classes, name=f"part-{k}")


def toy_terms(settings: Settings, name: str = "party-0", **changes: Any) -> Terms:
    return dataclasses.replace(accept(name, propose(settings, 3), 50.0), **changes)


@contextlib.contextmanager
def toy_desk(folder: Path, settings: Settings, k: int = 0, **options: Any) -> Iterator[Desk]:
    """Party k's desk; its key, ledger and terms lie in `folder`, so that it can be opened again."""
    name = NAMES[k]
    if not (folder / "keys" / name).exists():
        keys.make_pair(folder / "keys", name)
    options = {"terms": toy_terms(settings, name), "say": lambda words: None, **options}
    data = part(toy_data(120), settings, k)
    terms = options.pop("terms")
    with open_desk(
        name, data, folder / "keys" / name, folder / f"{name}.sqlite", terms, folder / f"{name}.toml", **options
    ) as desk:
        yield desk


def toy_request(desk: Desk, settings: Settings, round: int = 0, C: float = 1.0, **changes: Any) -> Envelope:
    """A round's request that the desk's terms allow, unless `changes` to the header say otherwise."""
    assert desk.terms is not None
    model, layout = desk.model()
    header = {
        "kind": "round",
        "run": "run-1",
        "nonce": "0" * 32,
        "party": desk.name,
        "client": NAMES.index(desk.name),
        "rule": settings.clip.rule,
        "groups": "flat",
        "unit": "example",
        "model": model_fingerprint(model, layout),
        "round": round,
        "rounds": settings.train.rounds,
        "steps": 1,
        "rate": 0.2,
        "sigma": 1.1,
        "lr": 0.5,
        "weight_decay": 0.0,
        "seeds": [7] if desk.simulation else [],
        **changes,
    }
    problem = desk.problem({**header, "seeds": [0], "rule": settings.clip.rule}, model, layout)
    state = {**problem.rule.init(settings.clip, problem.shape)}
    state["C"] = torch.full_like(state["C"], C)
    return pack(header, {"params": layout.flatten(model), **state_arrays(state)})


EVENT = Gaussian(0.2, 1.1, 1)


class Bus:
    """The post: node k is party k. `tamper(k, request, reply)` may change a reply, or return None to lose it."""

    def __init__(self, desks: dict[int, Desk]) -> None:
        self.desks = desks
        self.away: set[int] = set()
        self.back: set[int] = set()
        self.tamper: Callable[[int, Envelope, Envelope], Envelope | None] = lambda k, request, reply: reply
        self.sent: list[tuple[int, Envelope]] = []
        self._open: dict[str, tuple[int, Envelope]] = {}

    def online(self) -> set[int]:
        return set(self.desks) - self.away

    def returned(self) -> set[int]:
        back, self.back = self.back, set()
        return back

    def send(self, node: int, envelope: Envelope, seconds: float, label: str) -> str:
        self.sent.append((node, envelope))
        number = f"m{len(self.sent)}"
        if node not in self.away:
            self._open[number] = (node, envelope)
        return number

    def collect(self, ids: set[str]) -> list[Delivery]:
        """Parties compute here, so that no deadline of a test is a race against a busy machine."""
        found = []
        for number in sorted(ids & self._open.keys()):
            node, envelope = self._open.pop(number)
            reply = self.tamper(node, envelope, self.desks[node].answer(envelope))
            if reply is not None:
                found.append(Delivery(number, reply))
        return found


@contextlib.contextmanager
def toy_federation(folder: Path, settings: Settings, simulation: bool = True) -> Iterator[Bus]:
    """Three desks on a bus."""
    with contextlib.ExitStack() as stack:
        desks = {
            k: stack.enter_context(toy_desk(folder, settings, k, simulation=simulation)) for k in range(len(NAMES))
        }
        yield Bus(desks)


def serve(bus: Bus, settings: Settings, folder: Path, monkeypatch: Any, **options: Any) -> Any:
    """`fulcrum serve` over the bus; "resume" continues the run in `folder`."""
    monkeypatch.setattr(run, "public_data", lambda source, place: toy_data(120))
    address = run.Address("nowhere", 1, None, None)
    register = {name: keys.load_public(folder.parent / "keys" / f"{name}.pub") for name in NAMES}
    said = options.pop("said", [])
    common = {"open_post": lambda *_: contextlib.nullcontext(bus), "say": said.append}
    if options.pop("resume", False):
        return run.go_on(folder, address, register, **common, **options)
    options = {"patience": PATIENCE, "simulation": True, **options}
    return run.serve(settings, folder, address, register, **common, **options)
