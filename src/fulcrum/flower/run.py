"""`fulcrum serve` and `fulcrum party`, without their command lines: a run with Flower around it."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric import ec

from fulcrum import runs as api
from fulcrum.data import Dataset
from fulcrum.errors import ConfigError, RunError
from fulcrum.flower import keys, known_ledgers
from fulcrum.flower.continuation import take_old_model
from fulcrum.flower.coordinator import FlowerEngine, WaitPolicy
from fulcrum.flower.display import clean_message
from fulcrum.flower.messages import Envelope
from fulcrum.flower.operations.coordinator_status import CoordinatorStatus
from fulcrum.flower.operations.monitor import Monitor, append_durably
from fulcrum.flower.operations.party_status import PartyStatus
from fulcrum.flower.party import PartyService
from fulcrum.flower.port.limits import PortLimits
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
from fulcrum.flower.registry import PartyInfo, PartyReportFn, Transport
from fulcrum.flower.rehearsal import rehearse_before_proposing
from fulcrum.flower.request_gate import RequestGate
from fulcrum.flower.served_facts import read_served_facts
from fulcrum.flower.signing import RequestSigner, derive_request_signer, load_request_signer
from fulcrum.flower.units import keep_plausible_parties
from fulcrum.runs import Result, RoundCallback
from fulcrum.runs import folder as record
from fulcrum.settings import files as settings_file
from fulcrum.settings.schema import Settings, Table
from fulcrum.types import RoundResult

if TYPE_CHECKING:
    from fulcrum.flower.flwr141 import FleetNode


@dataclass(frozen=True)
class ListenAddress:
    """Where the coordinator listens, and with which certificate; both None: plaintext.

    signing: the key that signs requests, by default the certificate's own. Parties trust the certificate's key by their
    CA; another key they pin in their terms (`coordinator`).
    """

    host: str
    port: int
    certificate: Path | None
    key: Path | None
    signing: Path | None = None
    limits: PortLimits | None = None
    """What the port allows; None: the defaults."""


OpenTransportFn = Callable[..., Any]
"""Called with the address, the parties' public keys and a function to report with."""


def find_request_signer(address: ListenAddress, secret: bytes) -> RequestSigner:
    """The key that signs this coordinator's requests; without any file it follows from the run's secret."""
    path = address.signing or address.key
    return load_request_signer(path) if path else derive_request_signer(secret)


def follow_certificate(transport: Any, signer: RequestSigner) -> None:
    """Sign with a renewed certificate's key from the moment on in which the port shows it."""
    if hasattr(transport, "on_certificate"):
        transport.on_certificate = signer.reload


def open_ledger_book(
    public_keys: Mapping[str, ec.EllipticCurvePublicKey], simulation: bool
) -> known_ledgers.LedgerBook:
    """Which ledger each party has paid from, kept in the register's folder; a simulation keeps nothing."""
    if simulation or not isinstance(public_keys, keys.KeyRegister):
        return known_ledgers.LedgerBook()
    return known_ledgers.LedgerBook(public_keys.folder / known_ledgers.FILE_NAME)


class PartyLog:
    """What happened with parties: printed, and kept in the folder's parties.jsonl, on disk before anything follows.

    monitor: gets each line, too.
    """

    def __init__(self, say: Callable[[str], None], folder: Path, monitor: Monitor) -> None:
        self.say, self.folder, self.monitor = say, folder, monitor

    def __call__(self, party: str, what: str) -> None:
        what = clean_message(what)
        self.say(f"{party}: {what}" if party else what)
        line = {"time": record.current_utc_time(), "party": party, "what": what}
        try:
            append_durably(self.folder / "parties.jsonl", json.dumps(line) + "\n")
        except (
            OSError
        ) as error:  # the port reports from its own thread, and must stay up; the ledger decides what counts
            self.say(f"warning: {self.folder / 'parties.jsonl'} cannot be written: {error.strerror}")
        self.monitor.event("note", party=party, what=what)


def claim_run_folder(out: Path) -> None:
    """Make the folder of a new run, before anybody joins; RunError where it is taken or cannot be written."""
    record.check_free_folder(out, "fulcrum serve --resume")
    try:
        out.mkdir(parents=True, exist_ok=True)
        append_durably(out / "parties.jsonl", "")
    except OSError as error:
        raise RunError(f"cannot write to folder {out}: {error.strerror}; choose another --out.") from None


@contextmanager
def open_superlink_transport(
    address: ListenAddress, public_keys: Mapping[str, ec.EllipticCurvePublicKey], report: PartyReportFn | None = None
) -> Iterator[Transport]:
    """Flower's fleet API in this process, behind the hardened port, as the coordinator's transport."""
    from fulcrum.flower.flwr141 import LocalSuperlink, TlsFiles

    tls = TlsFiles(address.certificate, address.key) if address.certificate and address.key else None

    def name_keys() -> dict[str, bytes]:
        return {name: keys.public_key_to_pem(key) for name, key in public_keys.items()}

    def read_register() -> dict[str, bytes] | None:
        return name_keys() if isinstance(public_keys, keys.KeyRegister) and public_keys.refresh() else None

    with LocalSuperlink(
        address.host,
        address.port,
        tls,
        name_keys(),
        limits=address.limits,
        report=report or (lambda party, words: None),
        read_register=read_register,
    ) as link:
        link.transport.port_counts = link.server.count  # for an operator
        yield link.transport


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
    monitor: Monitor | None = None,
    start: Path | None = None,
    open_transport: OpenTransportFn = open_superlink_transport,
) -> Result:
    """A run over parties elsewhere, from the first greeting to the last statement; the folder `out` must be new.

    facts are kept in run.json, for `resume_served_run`. monitor: what an operator watches. start: the folder of
    a run whose model this one begins with.
    """
    record.check_free_folder(out, "fulcrum serve --resume")
    monitor = monitor or Monitor("coordinator")
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
    origin = take_old_model(problem, settings, start) if start else None
    claim_run_folder(out)
    run, secret, party_log = uuid.uuid4().hex, secrets.token_bytes(32), PartyLog(say, out, monitor)
    signer = find_request_signer(address, secret)
    with open_transport(address, public_keys, party_log) as transport:
        follow_certificate(transport, signer)
        say(f"listening on {address.host}:{address.port}; waiting for {', '.join(public_keys)}")
        say(f"requests are signed with {signer.fingerprint}")
        book = open_ledger_book(public_keys, simulation)
        registry = make_party_registry(transport, public_keys, run, settings, problem, party_log, signer, book)
        watch = CoordinatorStatus(
            out, run, registry, tuple(public_keys), monitor, settings.train.rounds, wait_policy.min_parties
        )
        watch.certificate = address.certificate
        registry.on_poll = watch.refresh
        parties = wait_for_parties(registry, len(public_keys), wait_policy)
        if not simulation:
            parties = keep_plausible_parties(parties, registry.registered_units, registry.refuse_party)
        if len(parties) < max(1, wait_policy.min_parties):
            raise RunError(f"only {len(parties)} of at least {wait_policy.min_parties} parties can take part.")
        problem = add_party_names(problem, parties, settings)
        streams = make_simulated_streams(settings, problem) if simulation else None
        watch.engine = engine = FlowerEngine(registry, parties, problem, settings, wait_policy, secret, streams)
        kept = {"secret": secret.hex(), "simulation": simulation, "wait_policy": asdict(wait_policy)}
        kept |= {"start": str(start.absolute())} if start else {}
        kept |= {"parties": [asdict(party) for party in parties], **(facts or {})}
        federation = replace(make_served_federation(settings, engine), origin=origin)
        result = api.execute(federation, out, watch_rounds(watch, on_round), {"id": run, "flower": kept})
        watch.refresh(force=True)
        engine.send_run_finished(len(result.C))
        return result


def resume_served_run(
    folder: Path,
    address: ListenAddress,
    public_keys: Mapping[str, ec.EllipticCurvePublicKey],
    *,
    on_round: RoundCallback | None = None,
    say: Callable[[str], None] = print,
    monitor: Monitor | None = None,
    open_transport: OpenTransportFn = open_superlink_transport,
) -> Result:
    """Continue a served run after the coordinator stopped or crashed. The parties keep what they paid for."""
    facts = record.load_run_json(folder, "run.json")
    kept = read_served_facts(folder)
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
    origin = take_old_model(problem, settings, Path(kept["start"])) if kept.get("start") else None
    monitor = monitor or Monitor("coordinator")
    party_log = PartyLog(say, folder, monitor)
    wait_policy = WaitPolicy(**kept["wait_policy"])
    signer = find_request_signer(address, bytes.fromhex(kept["secret"]))
    with open_transport(address, public_keys, party_log) as transport:
        follow_certificate(transport, signer)
        say(f"listening on {address.host}:{address.port} again")
        book = open_ledger_book(public_keys, kept["simulation"])
        registry = make_party_registry(
            transport, public_keys, str(facts["id"]), settings, problem, party_log, signer, book
        )
        registry.parties.update({party.name: party for party in parties})
        watch = CoordinatorStatus(
            folder,
            str(facts["id"]),
            registry,
            tuple(public_keys),
            monitor,
            settings.train.rounds,
            wait_policy.min_parties,
        )
        watch.certificate = address.certificate
        registry.on_poll = watch.refresh
        problem = add_party_names(problem, parties, settings)
        streams = make_simulated_streams(settings, problem) if kept["simulation"] else None
        engine = FlowerEngine(registry, parties, problem, settings, wait_policy, bytes.fromhex(kept["secret"]), streams)
        watch.engine = engine
        # The parties that took part before get time to come back, so that no round runs without them.
        end = time.monotonic() + min(wait_policy.join_timeout, wait_policy.round_timeout)
        while len(registry.node_of.keys() | registry.refusals.keys()) < len(parties) and time.monotonic() < end:
            registry.poll()
            time.sleep(0.1)
        federation = replace(make_served_federation(settings, engine), origin=origin)
        result = api.resume_prepared(federation, folder, watch_rounds(watch, on_round))
        watch.refresh(force=True)
        engine.send_run_finished(len(result.C))
        return result


def watch_rounds(watch: CoordinatorStatus, on_round: RoundCallback | None) -> RoundCallback:
    """Called after each round: the operator's view first, then the caller's own."""

    def both(result: RoundResult) -> None:
        watch.note_round(result)
        if on_round is not None:
            on_round(result)

    return both


def _load_public_records(settings: Settings) -> Dataset:
    """What the coordinator evaluates on; the columns only where the settings declare some."""
    declared = {} if settings.table == Table() else {"table": settings.table}
    return load_public_data(settings.data.source, settings.data.dir, settings.task, **declared)


def _find_run_device(settings: Settings) -> Any:
    return api.find_device(settings.run.device)


def run_party_service(
    service: PartyService,
    server: str,
    statement: Path,
    *,
    ca: Path | None,
    insecure: bool = False,
    until_done: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_node: Callable[[FleetNode], None] | None = None,
    status: PartyStatus | None = None,
) -> None:
    """Answer requests over Flower until stopped; the statement is written at the start, at the end and in between.

    ca: the CA of the coordinator's certificate; None: the system's CAs. insecure: plaintext. on_node: called with the
    node before it starts; its `health` says how the connection stands. status: what an operator watches.
    """
    from fulcrum.flower.flwr141 import FleetNode

    written = 0.0

    def answer(request: Envelope, expired: bool) -> Envelope:
        nonlocal written
        if not insecure and not gate.knows_signer(request):
            node.look_again()  # the certificate, and with it the coordinator's key, may be a new one
        reply = service.make_refusal(request, "expired") if expired else service.answer(request)
        if service.done or time.monotonic() - written > 60:
            service.write_party_statement(statement)
            written = time.monotonic()
        return reply

    service.write_party_statement(statement)
    written = time.monotonic()

    def over() -> bool:
        if status is not None:
            status.refresh()
        return stop() or (until_done and service.done)

    gate = service.gate or RequestGate(service.name, service.terms.coordinator if service.terms else "", not insecure)
    service.gate = gate
    node = FleetNode(
        server,
        answer if status is None else status.watch(answer),
        service.key,
        ca=ca,
        insecure=insecure,
        say=service.say,
        limit=service.compute_request_limit,
        certificate=gate.note_certificate,
    )
    if on_node is not None:
        on_node(node)
    if status is not None:
        status.attach(node)
    try:
        node.run(over)
    finally:
        service.write_party_statement(statement)
