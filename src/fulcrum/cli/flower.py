"""`fulcrum serve`, `terms` and `certs`: the same federation across machines, on Flower. party.py has `party`."""

from __future__ import annotations

import dataclasses
import importlib.util
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import show, view
from fulcrum.cli.failures import RunInterrupted
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption, with_settings
from fulcrum.cli.run import choose_free_folder, make_source_slug
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import Settings

if TYPE_CHECKING:
    from fulcrum.flower.operations.checks import Check

PLAINTEXT_WARNING = (
    "warning: --insecure: everything travels readable and changeable by whoever is on the way, and no node proves "
    "who it is; updates are still signed. For tests on one machine only."
)
SIMULATION_WARNING = (
    "warning: --simulation: randomness comes from a seed that the coordinator knows; this protects nobody."
)


def require_flower() -> None:
    """One sentence in place of an ImportError."""
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("this needs Flower: pip install 'fulcrum-fl[flower]'.")


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder to write to.")] = Path("certs"),
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Make a development CA and a server certificate for this name or address; repeat."),
    ] = None,
    party: Annotated[list[str] | None, typer.Option("--party", help="Make a key pair for this party; repeat.")] = None,
    units: Annotated[
        int | None,
        typer.Option("--units", min=1, help="The party's number of examples or persons, fixed with its key."),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Make a development CA with a server certificate (--host), and key pairs for parties (--party).

    A party makes its own pair and sends NAME.pub to the coordinator; the private key stays with it.
    """
    require_flower()
    from fulcrum.flower import certs as authority
    from fulcrum.flower import keys

    if not host and not party:
        raise ConfigError("nothing to make; give --host NAME for a server certificate or --party NAME for a key pair.")
    for path in authority.make_certificate_authority(folder, host) if host else []:
        typer.echo(path)
    for name in party or []:
        for path in keys.make_key_pair(folder, name, units):
            typer.echo(path)


@with_settings
def terms(
    settings: Settings,
    party: Annotated[str, typer.Option("--party", help="The party's name.")],
    budget: Annotated[
        float | None, typer.Option("--budget", help="Epsilon over all runs; default: what one such run costs.")
    ] = None,
    classes: Annotated[
        int,
        typer.Option("--classes", help="Number of classes, from public knowledge, where the settings do not say it."),
    ] = 0,
    coordinator: Annotated[
        str,
        typer.Option("--coordinator", help="Pin the key that signs requests: its .pub file, or SHA256:..."),
    ] = "",
    peers: Annotated[
        Path | None,
        typer.Option(
            "--peers", help="With pairwise masks: folder of the other parties' NAME.pub, from themselves; pins them."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="File to write; - prints it.")] = Path("terms.toml"),
    debug: DebugOption = False,
) -> None:
    """Write the terms that a party would agree to for a configuration; read them before you use them."""
    require_flower()
    from fulcrum.flower.consent import describe_mask_terms
    from fulcrum.flower.keys import load_public_key
    from fulcrum.flower.proposals import accept_proposal, make_proposal
    from fulcrum.flower.signing import fingerprint
    from fulcrum.flower.terms import terms_to_toml, validate_terms

    settings = rehearse_for_terms(settings)
    agreed = accept_proposal(party, make_proposal(settings, classes), budget)
    pinned = coordinator
    if coordinator and not coordinator.startswith("SHA256:"):
        pinned = fingerprint(load_public_key(Path(coordinator)))
    agreed = dataclasses.replace(agreed, coordinator=pinned)
    if peers is not None:
        from fulcrum.flower.pairwise.pins import pin_peers

        agreed = pin_peers(agreed, peers)
    text = terms_to_toml(validate_terms(agreed))
    if str(out) == "-":
        typer.echo(text, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{out} exists; terms are not overwritten, so choose another name.") from None
    typer.echo(f"wrote {out}")
    for words in describe_mask_terms(agreed):
        view.print_message(words)


def rehearse_for_terms(settings: Settings) -> Settings:
    """The settings as `fulcrum serve` would propose them: rehearsed where data.units declares the parties' units."""
    if not (settings.clip.rehearse and settings.clip.step == 0 and settings.data.units):
        return settings
    from fulcrum import runs as api
    from fulcrum.flower.prepare import load_public_data, make_public_problem
    from fulcrum.flower.rehearsal import rehearse_before_proposing

    public = load_public_data(settings.data.source, settings.data.dir, settings.task)
    problem = make_public_problem(settings, public, api.find_device(settings.run.device))
    return rehearse_before_proposing(settings, problem, view.print_message)


@with_settings
def serve(
    settings: Settings,
    keys: Annotated[Path | None, typer.Option("--keys", help="Folder with one NAME.pub for each party.")] = None,
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to listen on.")] = "0.0.0.0:9092",
    certificate: Annotated[Path | None, typer.Option("--certificate", help="The server's certificate, PEM.")] = None,
    private: Annotated[Path | None, typer.Option("--private-key", help="The certificate's key, PEM.")] = None,
    signing: Annotated[
        Path | None,
        typer.Option("--signing-key", help="Key that signs requests, pinned by parties; default: the certificate's."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plaintext, for tests on one machine.")] = False,
    simulation: Annotated[
        bool, typer.Option("--simulation", help="Share the seed with the parties: repeatable, no protection.")
    ] = False,
    deadline: Annotated[float, typer.Option("--deadline", help="Seconds a round waits for replies.")] = 60.0,
    wait: Annotated[float, typer.Option("--wait", help="Seconds to wait until enough parties are there.")] = 600.0,
    quorum: Annotated[
        float,
        typer.Option("--quorum", help="Share of the asked parties after whose answers a round waits --grace more."),
    ] = 1.0,
    grace: Annotated[float, typer.Option("--grace", help="Seconds that a round waits after its quorum.")] = 5.0,
    max_rest: Annotated[
        int, typer.Option("--max-rest", help="The most rounds that a late party rests; 0: it is always asked.")
    ] = 32,
    out: Annotated[Path | None, typer.Option("--out", help="New folder for the run.")] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="Folder of an old run: a new run begins with its model.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Continue the run in this folder; other options as it began.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Look at keys, certificate, port, settings, data and folder; start nothing.")
    ] = False,
    log: Annotated[
        str, typer.Option("--log", help="File for JSON log lines, one per round and event; - for stderr.")
    ] = "",
    metrics: Annotated[
        int | None,
        typer.Option("--metrics", help="Port on 127.0.0.1 for /metrics (Prometheus), /healthz and /readyz."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Coordinate a federation: rounds over parties that run `fulcrum party` elsewhere. Sees no party's data."""
    require_flower()
    from fulcrum.flower import run as runs
    from fulcrum.flower.coordinator import WaitPolicy
    from fulcrum.flower.keys import KeyRegister
    from fulcrum.flower.operations.monitor import JsonLog, Monitor, serve_monitor
    from fulcrum.flower.served_facts import read_served_facts
    from fulcrum.settings import files as settings_file

    if resume is not None:
        kept = read_served_facts(resume)
        settings = settings_file.read_settings(resume / "settings.toml")
        keys = keys or Path(kept.get("keys", "keys"))
        listen = kept.get("listen", listen)
        certificate = certificate or _to_optional_path(kept.get("certificate"))
        private = private or _to_optional_path(kept.get("private"))
        signing = signing or _to_optional_path(kept.get("signing"))
        insecure, simulation = kept.get("insecure", insecure), kept.get("simulation", simulation)
    if keys is None:
        raise ConfigError("give --keys FOLDER: one NAME.pub for each party, made by fulcrum certs --party NAME.")
    if insecure == (certificate is not None and private is not None):
        raise ConfigError("give --certificate FILE and --private-key FILE, or --insecure, and not both.")
    for flag, words in ((insecure, PLAINTEXT_WARNING), (simulation, SIMULATION_WARNING)):
        if flag:
            view.print_message(words, quiet)
    host, _, port = listen.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"--listen {listen} is not HOST:PORT, such as 0.0.0.0:9092.")
    address = runs.ListenAddress(host.strip("[]"), int(port), certificate, private, signing)
    if check:
        from fulcrum.flower.operations.server_checks import ServerChecks

        print_checks(ServerChecks(settings, keys, address, None if resume else out, simulation).run())
        return
    register = KeyRegister(keys)
    folder = resume or out or choose_free_folder(f"{make_source_slug(settings.data.source)}-{settings.method}-flower")
    facts = {
        "keys": str(keys.absolute()),
        "listen": listen,
        "certificate": str(certificate.absolute()) if certificate else None,
        "private": str(private.absolute()) if private else None,
        "signing": str(signing.absolute()) if signing else None,
        "insecure": insecure,
    }

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def say(words: str) -> None:
        view.print_message(words, quiet)

    signal.signal(signal.SIGTERM, end)
    monitor = Monitor("coordinator", JsonLog(log) if log else None)
    try:
        with (
            serve_monitor(monitor, metrics),
            view.show_progress(settings.method, settings.train.rounds, quiet) as on_round,
        ):
            if resume is not None:
                result = runs.resume_served_run(resume, address, register, on_round=on_round, say=say, monitor=monitor)
            else:
                result = runs.serve_run(
                    settings,
                    folder,
                    address,
                    register,
                    wait_policy=WaitPolicy(deadline, wait, settings.train.min_parties, quorum, grace, max_rest),
                    simulation=simulation,
                    facts=facts,
                    on_round=on_round,
                    say=say,
                    monitor=monitor,
                    start=start,
                )
    except KeyboardInterrupt:
        if (folder / "run.json").is_file():
            raise RunInterrupted(f"interrupted; continue with: fulcrum serve --resume {folder}") from None
        raise RunInterrupted("interrupted before the first round; nothing was kept.") from None
    show.print_summary(result.summary, folder, as_json)


def print_checks(checks: Iterable[Check]) -> None:
    """Print each check as it is done; exit code 2 where one went wrong."""
    from fulcrum.flower.operations.checks import WRONG, format_check

    wrong = 0
    for check in checks:
        typer.echo(format_check(check))
        wrong += check.level == WRONG
    if wrong:
        raise ConfigError(f"{wrong} check(s) went wrong; see the lines marked WRONG above.")


def _to_optional_path(text: str | None) -> Path | None:
    return Path(text) if text else None
