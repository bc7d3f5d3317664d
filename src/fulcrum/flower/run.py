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
from fulcrum.flower.coordinator import FlowerEngine, WaitPolicy
from fulcrum.flower.messages import BadMessage
from fulcrum.flower.party import PartyService
from fulcrum.flower.prepare import (
    add_parties,
    make_federation,
    make_registry,
    public_data,
    public_problem,
    served_settings,
    wait_for_parties,
)
from fulcrum.flower.registry import PartyInfo, Transport
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


OpenTransport = Callable[[Address, Mapping[str, ec.EllipticCurvePublicKey]], Any]


class PartyLog:
    """What happened with parties: printed, and kept in parties.jsonl once the run has a folder."""

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
def open_link(address: Address, public_keys: Mapping[str, ec.EllipticCurvePublicKey]) -> Iterator[Transport]:
    """Flower's SuperLink in this process, as the coordinator's transport."""
    from fulcrum.flower.flwr141 import Link, Tls
    from fulcrum.flower.transport import GridTransport

    tls = Tls(address.certificate, address.key) if address.certificate and address.key else None
    nodes = {name: keys.public_bytes(key) for name, key in public_keys.items()}
    with Link(address.host, address.port, tls, nodes) as link:
        yield GridTransport(link.grid, link.restarted)


def serve(
    settings: Settings,
    out: Path,
    address: Address,
    public_keys: Mapping[str, ec.EllipticCurvePublicKey],
    *,
    wait_policy: WaitPolicy | None = None,
    simulation: bool = False,
    facts: Mapping[str, Any] | None = None,
    on_round: OnRound | None = None,
    say: Callable[[str], None] = print,
    open_transport: OpenTransport = open_link,
) -> Result:
    """A run over parties elsewhere, from the first greeting to the last statement; the folder `out` must be new.

    facts are kept in run.json, for `resume_serving`.
    """
    wait_policy = wait_policy or WaitPolicy(min_parties=settings.train.min_parties)
    settings = served_settings(settings, len(public_keys), simulation)
    problem = public_problem(
        settings, public_data(settings.data.source, settings.data.dir, settings.task), _device(settings)
    )
    run, secret, party_log = uuid.uuid4().hex, secrets.token_bytes(32), PartyLog(say)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"folder {out} exists and is not empty; choose another --out, or --resume {out}.")
    party_log.folder = out
    with open_transport(address, public_keys) as transport:
        say(f"listening on {address.host}:{address.port}; waiting for {', '.join(public_keys)}")
        registry = make_registry(transport, public_keys, run, settings, problem, party_log)
        parties = wait_for_parties(registry, len(public_keys), wait_policy)
        seed = settings.run.seed if simulation else None
        problem = add_parties(problem, parties)
        engine = FlowerEngine(registry, parties, problem, settings, wait_policy, secret, seed)
        kept = {"secret": secret.hex(), "simulation": simulation, "wait_policy": asdict(wait_policy)}
        kept |= {"parties": [asdict(party) for party in parties], **(facts or {})}
        result = api.execute(make_federation(settings, engine), out, on_round, {"id": run, "flower": kept})
        party_log.flush()
        engine.send_done(len(result.C))
        return result


def resume_serving(
    folder: Path,
    address: Address,
    public_keys: Mapping[str, ec.EllipticCurvePublicKey],
    *,
    on_round: OnRound | None = None,
    say: Callable[[str], None] = print,
    open_transport: OpenTransport = open_link,
) -> Result:
    """Continue a served run after the coordinator stopped or crashed. The parties keep what they paid for."""
    facts = record.load_json(folder, "run.json")
    kept = facts.get("flower")
    if kept is None:
        raise RunError(f"{folder} was not served to parties elsewhere; continue it with: fulcrum resume {folder}")
    settings = settings_file.read(folder / "settings.toml")
    parties = tuple(PartyInfo(**party) for party in kept["parties"])
    missing = [party.name for party in parties if party.name not in public_keys]
    if missing:
        raise ConfigError(f"the keys of {', '.join(missing)} are missing; bring their NAME.pub back.")
    problem = public_problem(
        settings, public_data(settings.data.source, settings.data.dir, settings.task), _device(settings)
    )
    party_log = PartyLog(say)
    party_log.folder = folder
    wait_policy = WaitPolicy(**kept["wait_policy"])
    with open_transport(address, public_keys) as transport:
        say(f"listening on {address.host}:{address.port} again")
        registry = make_registry(transport, public_keys, str(facts["id"]), settings, problem, party_log)
        registry.parties.update({party.name: party for party in parties})
        seed = settings.run.seed if kept["simulation"] else None
        problem = add_parties(problem, parties)
        engine = FlowerEngine(registry, parties, problem, settings, wait_policy, bytes.fromhex(kept["secret"]), seed)
        # The parties that took part before get time to come back, so that no round runs without them.
        end = time.monotonic() + min(wait_policy.join_timeout, wait_policy.round_timeout)
        while len(registry.node_of) < len(parties) and time.monotonic() < end:
            registry.poll()
            time.sleep(0.1)
        result = api.go_on(make_federation(settings, engine), folder, on_round)
        engine.send_done(len(result.C))
        return result


def _device(settings: Settings) -> Any:
    return api.find_device(settings.run.device)


def run_party(
    service: PartyService,
    server: str,
    home: Path,
    statement: Path,
    *,
    ca: Path | None,
    key: Path | None,
    until_done: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Answer requests over Flower until stopped; the statement is written at the start, at the end and in between.

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
        reply = service.refuse(request, "expired") if expired else service.answer(request)
        if service.done or time.monotonic() - written > 60:
            service.write_statement(statement)
            written = time.monotonic()
        return Message(to_record(reply), reply_to=message)

    service.write_statement(statement)
    finished = 0.0

    def over() -> bool:
        nonlocal finished
        if until_done and service.done and not finished:
            finished = time.monotonic()  # the SuperNode still has to carry the last answer away
        return stop() or bool(finished and time.monotonic() - finished > 2)

    executor = Executor(server, home, answer, ca=ca, key=key, say=service.say)
    try:
        executor.run(over)
    finally:
        service.write_statement(statement)
