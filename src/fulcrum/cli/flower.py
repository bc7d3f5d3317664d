"""`fulcrum serve`, `party`, `terms` and `certs`: the same federation across machines, on Flower."""

from __future__ import annotations

import functools
import importlib.util
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import show, view
from fulcrum.cli.failures import RunInterrupted
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption, with_settings
from fulcrum.cli.run import choose_free_folder, make_source_slug
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import Settings, Table, TaskSettings

if TYPE_CHECKING:
    from fulcrum.data import Dataset
    from fulcrum.flower.terms import PartyTerms

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
        for path in keys.make_key_pair(folder, name):
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
    out: Annotated[Path, typer.Option("--out", help="File to write; - prints it.")] = Path("terms.toml"),
    debug: DebugOption = False,
) -> None:
    """Write the terms that a party would agree to for a configuration; read them before you use them."""
    require_flower()
    from fulcrum.flower.proposals import accept_proposal, make_proposal
    from fulcrum.flower.terms import terms_to_toml

    settings = rehearse_for_terms(settings)
    text = terms_to_toml(accept_proposal(party, make_proposal(settings, classes), budget))
    if str(out) == "-":
        typer.echo(text, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{out} exists; terms are not overwritten, so choose another name.") from None
    typer.echo(f"wrote {out}")


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


def party(
    data: Annotated[str, typer.Option("--data", help="This party's own records: an .npz with x and y, or a source.")],
    server: Annotated[str, typer.Option("--server", help="HOST:PORT of the coordinator.")],
    key: Annotated[Path, typer.Option("--key", help="This party's private key; its file name is the party's name.")],
    ledger: Annotated[Path, typer.Option("--ledger", help="This party's ledger, kept over all runs.")],
    schema: Annotated[
        str, typer.Option("--schema", help="Schema file of a table; default NAME.schema.toml beside it.")
    ] = "",
    withdrawn: Annotated[
        str, typer.Option("--withdrawn", help="File with the ids of people who withdrew their consent, one per line.")
    ] = "",
    hold_out: Annotated[
        float,
        typer.Option("--hold-out", help="Fraction of this party's units that do not train, for fulcrum score."),
    ] = 0.0,
    ca: Annotated[Path | None, typer.Option("--ca", help="Certificate of the CA that signed the server's.")] = None,
    terms: Annotated[
        Path, typer.Option("--terms", help="What was agreed; without the file, you are asked on a terminal.")
    ] = Path("terms.toml"),
    home: Annotated[
        Path | None, typer.Option("--home", help="Folder for Flower's files; default beside the ledger.")
    ] = None,
    statement: Annotated[
        Path | None, typer.Option("--statement", help="Folder for PRIVACY.md; default the ledger's.")
    ] = None,
    until_done: Annotated[bool, typer.Option("--until-done", help="End when the coordinator has finished.")] = False,
    simulation: Annotated[
        bool, typer.Option("--simulation", help="Use the coordinator's seed: no protection.")
    ] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plaintext, for tests on one machine.")] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Take part in a federation: train on this party's own data, within its own terms and budget."""
    require_flower()
    from fulcrum import runs as api
    from fulcrum.data.held_out import keep_training_units
    from fulcrum.data.withdrawn import leave_out_withdrawn
    from fulcrum.flower.consent import make_consent_text
    from fulcrum.flower.keys import check_party_name
    from fulcrum.flower.party import open_party_service
    from fulcrum.flower.party_data import count_units, load_party_data
    from fulcrum.flower.run import run_party_service
    from fulcrum.flower.task_terms import check_declared
    from fulcrum.flower.terms import read_terms_file

    name = check_party_name(key.name)
    if insecure == (ca is not None):
        raise ConfigError("give --ca FILE (the CA of the coordinator's certificate), or --insecure, and not both.")
    for flag, words in ((insecure, PLAINTEXT_WARNING), (simulation, SIMULATION_WARNING)):
        if flag:
            view.print_message(words, quiet)
    folder = ledger.absolute().parent
    home = home or folder / f"flower-{name}"
    if ledger.absolute().is_relative_to(home.absolute()):
        raise ConfigError(f"--ledger {ledger} lies in Flower's folder {home}; keep it elsewhere, it must outlive that.")
    agreed = read_terms_file(terms) if terms.is_file() else None
    if agreed is None and not sys.stdin.isatty():
        raise ConfigError(f"there is no {terms}; agree on a terminal, or write it with fulcrum terms and read it.")

    @functools.cache
    def load_records(task: TaskSettings) -> Dataset:
        found = leave_out_withdrawn(load_party_data(data, task=task, table=Table(schema=schema)), withdrawn)
        show.print_own_notes(found, quiet)
        return keep_training_units(found, hold_out)

    if agreed is not None:
        check_declared(agreed.agreed_task)
        load_records(agreed.agreed_task)  # stops here with a message if the records do not fit the terms

    def consent(proposed: PartyTerms) -> bool:
        task = proposed.agreed_task
        # A task of the form package.module:task is code, and none of it runs before a person has agreed.
        units = None if ":" in task.name else count_units(load_records(task), proposed.unit)
        view.print_message(make_consent_text(proposed, units))
        return typer.confirm(f"Agree, and write this to {terms}?", default=False, err=True)

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    with open_party_service(
        name,
        load_records,
        key,
        ledger,
        agreed,
        terms,
        consent=consent if sys.stdin.isatty() else None,
        simulation=simulation,
        device=api.find_device(device),
        say=lambda words: view.print_message(f"[{name}] {words}", quiet),
    ) as service:
        try:
            run_party_service(
                service,
                server,
                home,
                statement or folder,
                ca=ca,
                key=None if insecure else key,
                until_done=until_done,
            )
        except KeyboardInterrupt:
            raise RunInterrupted(f"stopped; {(statement or folder) / 'PRIVACY.md'} says what was released.") from None
    typer.echo((statement or folder) / "PRIVACY.md")


@with_settings
def serve(
    settings: Settings,
    keys: Annotated[Path | None, typer.Option("--keys", help="Folder with one NAME.pub for each party.")] = None,
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to listen on.")] = "0.0.0.0:9092",
    certificate: Annotated[Path | None, typer.Option("--certificate", help="The server's certificate, PEM.")] = None,
    private: Annotated[Path | None, typer.Option("--private-key", help="The certificate's key, PEM.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plaintext, for tests on one machine.")] = False,
    simulation: Annotated[
        bool, typer.Option("--simulation", help="Share the seed with the parties: repeatable, no protection.")
    ] = False,
    deadline: Annotated[float, typer.Option("--deadline", help="Seconds a round waits for replies.")] = 60.0,
    wait: Annotated[float, typer.Option("--wait", help="Seconds to wait until enough parties are there.")] = 600.0,
    out: Annotated[Path | None, typer.Option("--out", help="New folder for the run.")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Continue the run in this folder; other options as it began.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Coordinate a federation: rounds over parties that run `fulcrum party` elsewhere. Sees no party's data."""
    require_flower()
    from fulcrum.flower import run as runs
    from fulcrum.flower.coordinator import WaitPolicy
    from fulcrum.flower.keys import load_public_keys
    from fulcrum.runs import folder as record
    from fulcrum.settings import files as settings_file

    if resume is not None:
        kept = record.load_run_json(resume, "run.json").get("flower") or {}
        settings = settings_file.read_settings(resume / "settings.toml")
        keys = keys or Path(kept.get("keys", "keys"))
        listen = kept.get("listen", listen)
        certificate = certificate or _to_optional_path(kept.get("certificate"))
        private = private or _to_optional_path(kept.get("private"))
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
    address = runs.ListenAddress(host.strip("[]"), int(port), certificate, private)
    register = load_public_keys(keys)
    folder = resume or out or choose_free_folder(f"{make_source_slug(settings.data.source)}-{settings.method}-flower")
    facts = {
        "keys": str(keys.absolute()),
        "listen": listen,
        "certificate": str(certificate.absolute()) if certificate else None,
        "private": str(private.absolute()) if private else None,
        "insecure": insecure,
    }

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def say(words: str) -> None:
        view.print_message(words, quiet)

    signal.signal(signal.SIGTERM, end)
    try:
        with view.show_progress(settings.method, settings.train.rounds, quiet) as on_round:
            if resume is not None:
                result = runs.resume_served_run(resume, address, register, on_round=on_round, say=say)
            else:
                result = runs.serve_run(
                    settings,
                    folder,
                    address,
                    register,
                    wait_policy=WaitPolicy(deadline, wait, settings.train.min_parties),
                    simulation=simulation,
                    facts=facts,
                    on_round=on_round,
                    say=say,
                )
    except KeyboardInterrupt:
        if (folder / "run.json").is_file():
            raise RunInterrupted(f"interrupted; continue with: fulcrum serve --resume {folder}") from None
        raise RunInterrupted("interrupted before the first round; nothing was kept.") from None
    show.print_summary(result.summary, folder, as_json)


def _to_optional_path(text: str | None) -> Path | None:
    return Path(text) if text else None
