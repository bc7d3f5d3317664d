"""`fulcrum party`: take part in a federation, from options or from party.toml; `--check` looks at everything first."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import flower, show, view
from fulcrum.cli.failures import RunInterrupted
from fulcrum.cli.options import DebugOption, QuietOption
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import Table, TaskSettings

if TYPE_CHECKING:
    from fulcrum.data import Dataset
    from fulcrum.flower.operations.party_file import PartyOptions
    from fulcrum.flower.terms import PartyTerms


def party(
    config: Annotated[
        Path | None, typer.Argument(help="File with these options, such as party.toml; options go before it.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="This party's own records: an .npz with x and y, or a source.")
    ] = None,
    server: Annotated[str | None, typer.Option("--server", help="HOST:PORT of the coordinator.")] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="This party's private key; its file name is the party's name.")
    ] = None,
    ledger: Annotated[str | None, typer.Option("--ledger", help="This party's ledger, kept over all runs.")] = None,
    schema: Annotated[
        str | None, typer.Option("--schema", help="Schema file of a table; default NAME.schema.toml beside it.")
    ] = None,
    withdrawn: Annotated[
        str | None,
        typer.Option("--withdrawn", help="File with the ids of people who withdrew their consent, one per line."),
    ] = None,
    hold_out: Annotated[
        float | None,
        typer.Option("--hold-out", help="Fraction of this party's units that do not train, for fulcrum score."),
    ] = None,
    canaries: Annotated[
        int | None,
        typer.Option("--canaries", min=1, help="Audit your own releases with so many added units (docs/audit.md)."),
    ] = None,
    ca: Annotated[
        str | None,
        typer.Option("--ca", help="Certificate of the CA that signed the server's; default: the system's CAs."),
    ] = None,
    terms: Annotated[
        str | None,
        typer.Option("--terms", help="What was agreed, default terms.toml; without the file, you are asked."),
    ] = None,
    home: Annotated[
        str | None, typer.Option("--home", help="Not used any more: there are no files of Flower's.", hidden=True)
    ] = None,
    statement: Annotated[
        str | None, typer.Option("--statement", help="Folder for PRIVACY.md; default the ledger's.")
    ] = None,
    until_done: Annotated[bool, typer.Option("--until-done", help="End when the coordinator has finished.")] = False,
    simulation: Annotated[
        bool, typer.Option("--simulation", help="Use the coordinator's seed: no protection.")
    ] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plaintext, for tests on one machine.")] = False,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Look at key, certificate, coordinator, clock, terms, data and ledger; join nothing."
        ),
    ] = False,
    log: Annotated[
        str | None, typer.Option("--log", help="File for JSON log lines, one per request; - for stderr.")
    ] = None,
    metrics: Annotated[
        int | None,
        typer.Option("--metrics", help="Port on 127.0.0.1 for /metrics (Prometheus), /healthz and /readyz."),
    ] = None,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Take part in a federation: train on this party's own data, within its own terms and budget."""
    flower.require_flower()
    from fulcrum import runs as api
    from fulcrum.flower.keys import check_party_name
    from fulcrum.flower.operations.party_file import merge_party_options

    given = {
        **{"data": data, "server": server, "key": key, "ledger": ledger, "schema": schema, "withdrawn": withdrawn},
        **{"hold_out": hold_out, "ca": ca, "terms": terms, "home": home, "statement": statement},
        **{"until_done": until_done, "simulation": simulation, "insecure": insecure, "device": device},
        **{"log": log, "metrics": metrics, "canaries": canaries},
    }
    options = merge_party_options(config, given)
    check_party_name(Path(options.key).name)
    if options.insecure and options.ca:
        raise ConfigError("give --ca FILE (the CA of the coordinator's certificate) or --insecure, not both.")
    for flag, words in ((options.insecure, flower.PLAINTEXT_WARNING), (options.simulation, flower.SIMULATION_WARNING)):
        if flag:
            view.print_message(words, quiet)
    load_records = make_loader(options, quiet or check)
    where = api.find_device(options.device)
    if check:
        from fulcrum.flower.operations.party_checks import PartyChecks

        flower.print_checks(PartyChecks(options, load_records, where).run())
        return
    take_part(options, load_records, where, quiet)


def make_loader(options: PartyOptions, quiet: bool) -> Callable[[TaskSettings], Dataset]:
    """Loads the party's records for a task: once, without those who withdrew and those who are held out."""
    from fulcrum.data.held_out import keep_training_units
    from fulcrum.data.withdrawn import leave_out_withdrawn
    from fulcrum.flower.party_data import load_party_data

    @functools.cache
    def load_records(task: TaskSettings) -> Dataset:
        found = load_party_data(options.data, task=task, table=Table(schema=options.schema))
        found = leave_out_withdrawn(found, options.withdrawn)
        show.print_own_notes(found, quiet)
        return keep_training_units(found, options.hold_out)

    return load_records


def take_part(options: PartyOptions, load_records: Callable[[TaskSettings], Dataset], device: Any, quiet: bool) -> None:
    """Answer the coordinator's requests until stopped, or until it has finished."""
    from fulcrum.flower.operations.monitor import JsonLog, Monitor, serve_monitor
    from fulcrum.flower.operations.party_status import PartyStatus
    from fulcrum.flower.party import open_party_service
    from fulcrum.flower.run import run_party_service
    from fulcrum.flower.task_terms import check_declared
    from fulcrum.flower.terms import read_terms_file

    key, ledger, terms = Path(options.key), Path(options.ledger), Path(options.terms)
    folder = ledger.absolute().parent
    statement = Path(options.statement) if options.statement else folder
    agreed = read_terms_file(terms) if terms.is_file() else None
    if agreed is None and not sys.stdin.isatty():
        raise ConfigError(f"there is no {terms}; agree on a terminal, or write it with fulcrum terms and read it.")
    if agreed is not None:
        check_declared(agreed.agreed_task)
        load_records(agreed.agreed_task)  # stops here with a message if the records do not fit the terms

    ended: list[int] = []

    def end(number: int, frame: Any) -> None:
        ended.append(number)  # where a library swallows the exception, the loop still ends
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    monitor = Monitor("party", JsonLog(options.log) if options.log else None, party=key.name)
    with (
        open_party_service(
            key.name,
            load_records,
            key,
            ledger,
            agreed,
            terms,
            consent=functools.partial(ask_consent, load_records, terms) if sys.stdin.isatty() else None,
            simulation=options.simulation,
            device=device,
            say=lambda words: view.print_message(f"[{key.name}] {words}", quiet),
            canaries=options.canaries,
        ) as service,
        serve_monitor(monitor, options.metrics),
    ):
        try:
            run_party_service(
                service,
                options.server,
                statement,
                ca=Path(options.ca) if options.ca else None,
                insecure=options.insecure,
                until_done=options.until_done,
                stop=lambda: bool(ended),
                status=PartyStatus(folder, service, monitor),
            )
        except KeyboardInterrupt:
            ended.append(signal.SIGINT)
    if ended:
        raise RunInterrupted(f"stopped; {statement / 'PRIVACY.md'} says what was released.")
    typer.echo(statement / "PRIVACY.md")


def ask_consent(load_records: Callable[[TaskSettings], Dataset], terms: Path, proposed: PartyTerms) -> bool:
    """Show the proposed terms on the terminal, and ask."""
    from fulcrum.flower.consent import make_consent_text
    from fulcrum.flower.party_data import count_units

    task = proposed.agreed_task
    # A task of the form package.module:task is code, and none of it runs before a person has agreed.
    units = None if ":" in task.name else count_units(load_records(task), proposed.unit)
    view.print_message(make_consent_text(proposed, units))
    return typer.confirm(f"Agree, and write this to {terms}?", default=False, err=True)
