"""The same federation as a plain Flower app, for people who operate a SuperLink and SuperNodes already.

    flwr run examples/flower-app NAME --stream

Trusted use only. A stock SuperNode runs whatever app the SuperLink sends it, and a stock SuperLink lets
anyone who reaches its port start runs: the terms and the ledger are then only as good as that trust.
`fulcrum serve` and `fulcrum party` close both holes. Set FLWR_TELEMETRY_ENABLED=0 in your environment:
Flower is imported before this file is, so it is too late here.

Run config: config, keys, out, deadline, wait, simulation. Node config: data, key, ledger, terms. Under
Flower's simulation engine (Ray) the node config is Flower's own, and `home` in the run config names a
folder for the simulated parties' keys and ledgers.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fulcrum.data import load, split
from fulcrum.errors import ConfigError
from fulcrum.flower import keys
from fulcrum.flower.coordinator import WaitPolicy
from fulcrum.flower.party import PartyService, open_party_service
from fulcrum.flower.party_data import load_party_data, take_part
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.run import ListenAddress, resume_served_run, serve_run
from fulcrum.flower.task_terms import declare_task
from fulcrum.flower.terms import read_terms_file
from fulcrum.flower.transport import GridTransport, envelope_to_record, record_to_envelope
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.settings import files as settings_file
from fulcrum.settings.schema import Settings

client = ClientApp()
server = ServerApp()


@client.train()  # type: ignore[untyped-decorator,unused-ignore]
def answer_request(message: Message, context: Context) -> Message:
    """Answer one request to this party."""
    simulated = "partition-id" in context.node_config
    with _open_simulated_party(context) if simulated else _open_configured_party(context) as service:
        reply = service.answer(record_to_envelope(message.content))
        if service.done and not simulated:
            service.write_party_statement(service.terms_path.parent)
        return Message(envelope_to_record(reply), reply_to=message)


@server.main()  # type: ignore[untyped-decorator,unused-ignore]
def run_coordinator(grid: Grid, context: Context) -> None:
    """The run of `fulcrum serve`, over Flower's own grid; an existing folder `out` is continued."""
    given = context.run_config
    settings = settings_file.read_settings(Path(_get_config_text(given, "config")))
    out, simulation = Path(_get_config_text(given, "out")), bool(given.get("simulation", False))
    folder = Path(_get_config_text(given, "keys"))
    if simulation and "home" in given:
        for k in range(settings.data.parties):
            if not (folder / f"party-{k}").exists():
                keys.make_key_pair(folder, f"party-{k}")
    public_keys = keys.load_public_keys(folder)
    where = ListenAddress("Flower's grid", 0, None, None)

    def transport(*_: Any) -> AbstractContextManager[GridTransport]:
        return nullcontext(GridTransport(grid))

    if (out / "run.json").is_file():
        result = resume_served_run(out, where, public_keys, open_transport=transport)
    else:
        wait_policy = WaitPolicy(
            round_timeout=float(given.get("deadline", 60.0)),
            join_timeout=float(given.get("wait", 600.0)),
            min_parties=settings.train.min_parties,
        )
        result = serve_run(
            settings, out, where, public_keys, wait_policy=wait_policy, simulation=simulation, open_transport=transport
        )
    score = result.summary["score"]
    value = f"{score} {result.metrics[score]:.4f}, " if score in result.metrics else ""
    print(f"{value}epsilon {format_epsilon(result.epsilon)}, folder {out}")


def _open_configured_party(context: Context) -> AbstractContextManager[PartyService]:
    """The party that a SuperNode's --node-config names."""
    given = context.node_config
    key, terms = Path(_get_config_text(given, "key")), Path(_get_config_text(given, "terms"))
    agreed = read_terms_file(terms)
    source = _get_config_text(given, "data")
    return open_party_service(
        key.name,
        lambda task: load_party_data(source, task=task),
        key,
        Path(_get_config_text(given, "ledger")),
        agreed,
        terms,
        simulation=bool(given.get("simulation", False)),
    )


def _open_simulated_party(context: Context) -> AbstractContextManager[PartyService]:
    """A party of Flower's simulation engine: its part of the data that the settings name, with shared seeds."""
    given = context.run_config
    settings = settings_file.read_settings(Path(_get_config_text(given, "config")))
    settings = _set_party_count(settings, int(context.node_config["num-partitions"]))
    k, home = int(context.node_config["partition-id"]), Path(_get_config_text(given, "home"))
    data = load(settings.data.source, settings.data.dir, task=settings.task, table=settings.table)
    own = take_part(data, split(data, settings.data, settings.run.seed).indices(k), f"part {k}")
    name = f"party-{k}"
    terms = accept_proposal(name, make_proposal(settings, data.task.outputs, declare_task(data)))
    key = Path(_get_config_text(given, "keys")) / name
    return open_party_service(
        name, lambda task: own, key, home / name / "ledger.sqlite", terms, home / name / "terms.toml", simulation=True
    )


def _set_party_count(settings: Settings, parties: int) -> Settings:
    return dataclasses.replace(settings, data=dataclasses.replace(settings.data, parties=parties))


def _get_config_text(given: Any, name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{name} is missing in the app's configuration; give it as text.")
    return value
