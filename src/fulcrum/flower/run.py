"""`fulcrum serve` and `fulcrum party`, without their command lines: a run with Flower around it."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fulcrum import runs as api
from fulcrum.errors import ConfigError, RunError
from fulcrum.flower import keys
from fulcrum.flower.coordinator import FlowerEngine, Patience
from fulcrum.flower.messages import BadMessage
from fulcrum.flower.party import Desk
from fulcrum.flower.prepare import as_served, join, make_federation, make_roll, public_data, public_problem
from fulcrum.flower.registry import Card, Post
from fulcrum.runs import OnRound, Result
from fulcrum.runs import folder as record
from fulcrum.settings import files as settings_file
from fulcrum.settings.schema import Settings


@dataclass(frozen=True)
class Address:
    """Where the coordinator listens, and with which certificate; both None: plaintext."""

    host: str
    port: int
    certificate: Path | None
    key: Path | None


Open = Callable[[Address, Mapping[str, ec.EllipticCurvePublicKey]], Any]


class Journal:
    """What happened with parties: said aloud, and kept in parties.jsonl once the run has a folder."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.folder: Path | None = None
        self._early: list[str] = []

    def __call__(self, party: str, what: str) -> None:
        self.say(f"{party}: {what}" if party else what)
        self._early.append(json.dumps({"time": record.now(), "party": party, "what": what}) + "\n")
        self.flush()

    def flush(self) -> None:
        """Write what is not in the folder yet, if there is a folder by now."""
        if self.folder is not None and self.folder.is_dir():
            with (self.folder / "parties.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(self._early)
            self._early.clear()


@contextmanager
def open_link(address: Address, register: Mapping[str, ec.EllipticCurvePublicKey]) -> Iterator[Post]:
    """Flower's SuperLink in this process, as the coordinator's post."""
    from fulcrum.flower.flwr141 import Link, Tls
    from fulcrum.flower.transport import GridPost

    tls = Tls(address.certificate, address.key) if address.certificate and address.key else None
    nodes = {name: keys.public_bytes(key) for name, key in register.items()}
    with Link(address.host, address.port, tls, nodes) as link:
        yield GridPost(link.grid, link.returned)


def serve(
    settings: Settings,
    out: Path,
    address: Address,
    register: Mapping[str, ec.EllipticCurvePublicKey],
    *,
    patience: Patience | None = None,
    simulation: bool = False,
    facts: Mapping[str, Any] | None = None,
    on_round: OnRound | None = None,
    say: Callable[[str], None] = print,
    open_post: Open = open_link,
) -> Result:
    """A run over parties elsewhere, from the first greeting to the last statement; the folder `out` must be new.

    facts are kept in run.json, for `go_on`.
    """
    patience = patience or Patience(minimum=settings.train.min_parties)
    settings = as_served(settings, len(register), simulation)
    problem = public_problem(settings, public_data(settings.data.source, settings.data.dir), _device(settings))
    run, secret, journal = uuid.uuid4().hex, secrets.token_bytes(32), Journal(say)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"folder {out} exists and is not empty; choose another --out, or --resume {out}.")
    journal.folder = out
    with open_post(address, register) as post:
        say(f"listening on {address.host}:{address.port}; waiting for {', '.join(register)}")
        roll = make_roll(post, register, run, settings, problem, journal)
        cards = join(roll, len(register), patience)
        engine = FlowerEngine(
            roll, cards, problem, settings, patience, secret, settings.run.seed if simulation else None
        )
        federation = make_federation(settings, problem, cards, engine)
        kept = {"secret": secret.hex(), "simulation": simulation, "patience": asdict(patience)}
        kept |= {"parties": [asdict(card) for card in cards], **(facts or {})}
        result = api.execute(federation, out, on_round, {"id": run, "flower": kept})
        journal.flush()
        engine.dismiss(len(result.C))
        return result


def go_on(
    folder: Path,
    address: Address,
    register: Mapping[str, ec.EllipticCurvePublicKey],
    *,
    on_round: OnRound | None = None,
    say: Callable[[str], None] = print,
    open_post: Open = open_link,
) -> Result:
    """Continue a served run after the coordinator stopped or crashed. The parties keep what they paid for."""
    facts = record.load_json(folder, "run.json")
    kept = facts.get("flower")
    if kept is None:
        raise RunError(f"{folder} was not served to parties elsewhere; continue it with: fulcrum resume {folder}")
    settings = settings_file.read(folder / "settings.toml")
    cards = tuple(Card(**card) for card in kept["parties"])
    missing = [card.name for card in cards if card.name not in register]
    if missing:
        raise ConfigError(f"the keys of {', '.join(missing)} are missing; bring their NAME.pub back.")
    problem = public_problem(settings, public_data(settings.data.source, settings.data.dir), _device(settings))
    journal = Journal(say)
    journal.folder = folder
    patience = Patience(**kept["patience"])
    with open_post(address, register) as post:
        say(f"listening on {address.host}:{address.port} again")
        roll = make_roll(post, register, str(facts["id"]), settings, problem, journal)
        roll.cards.update({card.name: card for card in cards})
        seed = settings.run.seed if kept["simulation"] else None
        engine = FlowerEngine(roll, cards, problem, settings, patience, bytes.fromhex(kept["secret"]), seed)
        # All that took part before get the time to come back, so that a round is not played without them.
        end = time.monotonic() + min(patience.wait, patience.deadline)
        while len(roll.node_of) < len(cards) and time.monotonic() < end:
            roll.call()
            time.sleep(0.1)
        result = api.go_on(make_federation(settings, problem, cards, engine), folder, on_round)
        engine.dismiss(len(result.C))
        return result


def _device(settings: Settings) -> Any:
    return api.find_device(settings.run.device)


def take_part(
    desk: Desk,
    server: str,
    home: Path,
    statement: Path,
    *,
    ca: Path | None,
    key: Path | None,
    until_done: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Serve a party's desk over Flower until stopped; the statement is written at the start, the end and in between.

    home: Flower's own files. ca and key: None for plaintext, which has no node keys either.
    """
    from flwr.app import Message

    from fulcrum.flower.flwr141 import Executor
    from fulcrum.flower.messages import Envelope
    from fulcrum.flower.transport import to_envelope, to_record

    written = 0.0

    def answer(message: Message) -> Message:
        nonlocal written
        try:
            request = to_envelope(message.content)
        except BadMessage:
            request = Envelope(b"")
        expired = message.metadata.created_at + message.metadata.ttl < time.time()
        reply = desk.refuse(request, "expired") if expired else desk.answer(request)
        if desk.done or time.monotonic() - written > 60:
            desk.write_statement(statement)
            written = time.monotonic()
        return Message(to_record(reply), reply_to=message)

    desk.write_statement(statement)
    finished = 0.0

    def over() -> bool:
        nonlocal finished
        if until_done and desk.done and not finished:
            finished = time.monotonic()  # the SuperNode still has to carry the last answer away
        return stop() or bool(finished and time.monotonic() - finished > 2)

    executor = Executor(server, home, answer, ca=ca, key=key, say=desk.say)
    try:
        executor.run(over)
    finally:
        desk.write_statement(statement)
