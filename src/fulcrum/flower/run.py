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
from fulcrum.data import Dataset
from fulcrum.errors import ConfigError, RunError
from fulcrum.flower import keys
from fulcrum.flower.coordinator import FlowerEngine, WaitPolicy
from fulcrum.flower.messages import BadMessage
from fulcrum.flower.party import PartyService
from fulcrum.flower.prepare import (
    add_party_names,
    load_public_data,
    make_party_registry,
    make_public_problem,
    make_served_federation,
    make_served_settings,
    make_simulated_streams,
    wait_for_parties,
)
from fulcrum.flower.registry import PartyInfo, Transport
from fulcrum.flower.rehearsal import rehearse_before_proposing
from fulcrum.runs import Result, RoundCallback
from fulcrum.runs import folder as record
from fulcrum.settings import files as settings_file
from fulcrum.settings.schema import Settings, Table


@dataclass(frozen=True)
class ListenAddress:
    """Where the coordinator listens, and with which certificate; both None: plaintext."""

    host: str
    port: int
    certificate: Path | None
    key: Path | None


OpenTransportFn = Callable[[ListenAddress, Mapping[str, ec.EllipticCurvePublicKey]], Any]


class PartyLog:
    """What happened with parties: printed, and kept in parties.jsonl once the run has a folder."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.folder: Path | None = None
        self._early: list[str] = []

    def __call__(self, party: str, what: str) -> None:
        self.say(f"{party}: {what}" if party else what)
        self._early.append(json.dumps({"time": record.current_utc_time(), "party": party, "what": what}) + "\n")
        self.flush()

    def flush(self) -> None:
        """Write what is not in the folder yet, if there is a folder by now."""
        if self.folder is not None and self.folder.is_dir():
            with (self.folder / "parties.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(self._early)
            self._early.clear()


@contextmanager
def open_superlink_transport(
    address: ListenAddress, public_keys: Mapping[str, ec.EllipticCurvePublicKey]
) -> Iterator[Transport]:
    """Flower's SuperLink in this process, as the coordinator's transport."""
    from fulcrum.flower.flwr141 import LocalSuperlink, TlsFiles
    from fulcrum.flower.transport import GridTransport

    tls = TlsFiles(address.certificate, address.key) if address.certificate and address.key else None
    nodes = {name: keys.public_key_to_pem(key) for name, key in public_keys.items()}
    with LocalSuperlink(address.host, address.port, tls, nodes) as link:
        yield GridTransport(link.grid, link.restarted)


def serve_run(
    settings: Settings,
    out: Path,
    address: ListenAddress,
    public_keys: Mapping[str, ec.EllipticCurvePublicKey],
    *,
    wait_policy: WaitPolicy | None = None,
    simulation: bool = False,
    facts: Mapping[str, Any] | None = None,
    on_round: RoundCallback | None = None,
    say: Callable[[str], None] = print,
    open_transport: OpenTransportFn = open_superlink_transport,
) -> Result:
    """A run over parties elsewhere, from the first greeting to the last statement; the folder `out` must be new.

    facts are kept in run.json, for `resume_served_run`.
    """
    wait_policy = wait_policy or WaitPolicy(min_parties=settings.train.min_parties)
    settings = make_served_settings(settings, len(public_keys), simulation)
    problem = make_public_problem(
        settings,
        _load_public_records(settings),
        _find_run_device(settings),
    )
    rehearsed = rehearse_before_proposing(settings, problem, say)
    if rehearsed != settings:
        settings, problem = rehearsed, make_public_problem(rehearsed, problem.dataset, problem.device)
    run, secret, party_log = uuid.uuid4().hex, secrets.token_bytes(32), PartyLog(say)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"folder {out} exists and is not empty; choose another --out, or --resume {out}.")
    party_log.folder = out
    with open_transport(address, public_keys) as transport:
        say(f"listening on {address.host}:{address.port}; waiting for {', '.join(public_keys)}")
        registry = make_party_registry(transport, public_keys, run, settings, problem, party_log)
        parties = wait_for_parties(registry, len(public_keys), wait_policy)
        problem = add_party_names(problem, parties, settings)
        streams = make_simulated_streams(settings, problem) if simulation else None
        engine = FlowerEngine(registry, parties, problem, settings, wait_policy, secret, streams)
        kept = {"secret": secret.hex(), "simulation": simulation, "wait_policy": asdict(wait_policy)}
        kept |= {"parties": [asdict(party) for party in parties], **(facts or {})}
        result = api.execute(make_served_federation(settings, engine), out, on_round, {"id": run, "flower": kept})
        party_log.flush()
        engine.send_run_finished(len(result.C))
        return result


def resume_served_run(
    folder: Path,
    address: ListenAddress,
    public_keys: Mapping[str, ec.EllipticCurvePublicKey],
    *,
    on_round: RoundCallback | None = None,
    say: Callable[[str], None] = print,
    open_transport: OpenTransportFn = open_superlink_transport,
) -> Result:
    """Continue a served run after the coordinator stopped or crashed. The parties keep what they paid for."""
    facts = record.load_run_json(folder, "run.json")
    kept = facts.get("flower")
    if kept is None:
        raise RunError(f"{folder} was not served to parties elsewhere; continue it with: fulcrum resume {folder}")
    settings = settings_file.read_settings(folder / "settings.toml")
    parties = tuple(PartyInfo(**party) for party in kept["parties"])
    missing = [party.name for party in parties if party.name not in public_keys]
    if missing:
        raise ConfigError(f"the keys of {', '.join(missing)} are missing; bring their NAME.pub back.")
    problem = make_public_problem(
        settings,
        _load_public_records(settings),
        _find_run_device(settings),
    )
    party_log = PartyLog(say)
    party_log.folder = folder
    wait_policy = WaitPolicy(**kept["wait_policy"])
    with open_transport(address, public_keys) as transport:
        say(f"listening on {address.host}:{address.port} again")
        registry = make_party_registry(transport, public_keys, str(facts["id"]), settings, problem, party_log)
        registry.parties.update({party.name: party for party in parties})
        problem = add_party_names(problem, parties, settings)
        streams = make_simulated_streams(settings, problem) if kept["simulation"] else None
        engine = FlowerEngine(registry, parties, problem, settings, wait_policy, bytes.fromhex(kept["secret"]), streams)
        # The parties that took part before get time to come back, so that no round runs without them.
        end = time.monotonic() + min(wait_policy.join_timeout, wait_policy.round_timeout)
        while len(registry.node_of) < len(parties) and time.monotonic() < end:
            registry.poll()
            time.sleep(0.1)
        result = api.resume_prepared(make_served_federation(settings, engine), folder, on_round)
        engine.send_run_finished(len(result.C))
        return result


def _load_public_records(settings: Settings) -> Dataset:
    """What the coordinator evaluates on; the columns only where the settings declare some."""
    declared = {} if settings.table == Table() else {"table": settings.table}
    return load_public_data(settings.data.source, settings.data.dir, settings.task, **declared)


def _find_run_device(settings: Settings) -> Any:
    return api.find_device(settings.run.device)


def run_party_service(
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

    from fulcrum.flower.flwr141 import SupernodeExecutor
    from fulcrum.flower.messages import Envelope
    from fulcrum.flower.transport import envelope_to_record, record_to_envelope

    written = 0.0

    def answer(message: Message) -> Message:
        nonlocal written
        try:
            request = record_to_envelope(message.content)
        except BadMessage:
            request = Envelope(b"")
        expired = message.metadata.created_at + message.metadata.ttl < time.time()
        reply = service.make_refusal(request, "expired") if expired else service.answer(request)
        if service.done or time.monotonic() - written > 60:
            service.write_party_statement(statement)
            written = time.monotonic()
        return Message(envelope_to_record(reply), reply_to=message)

    service.write_party_statement(statement)
    finished = 0.0

    def over() -> bool:
        nonlocal finished
        if until_done and service.done and not finished:
            finished = time.monotonic()  # the SuperNode still has to send the last answer
        return stop() or bool(finished and time.monotonic() - finished > 2)

    executor = SupernodeExecutor(server, home, answer, ca=ca, key=key, say=service.say)
    try:
        executor.run(over)
    finally:
        service.write_party_statement(statement)
