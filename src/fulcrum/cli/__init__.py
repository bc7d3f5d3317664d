"""The command line: parses, calls, prints. Each file is one subject; heavy imports wait until a command runs.

run.py       run, resume
demo.py      demo
plan.py      plan
rehearse.py  rehearse
account.py   account
data.py      data list, fetch, verify, describe     changes.py  data changes
show.py      show, methods
report.py    report
watch.py     watch
compare.py   compare
tune.py      tune, pareto
ledger.py    ledger
study.py     study NAME, prepare, merge, choose
reproduce.py reproduce paper
audit.py     audit
attack.py    attack membership, inversion
theory.py    theory check, objective, constants, predict
check.py     check: the known mistakes of other people's private clients
init.py      init
prior.py     prior
evaluate.py, score.py, predict.py, export.py  a finished run's model: scores, predictions, other formats
flower.py    serve, terms, certs     party.py  party     operations.py  status, keys
options.py   the options that settings have
study_options.py  the options that studies have
view.py      tables and progress
failures.py  exit codes, and one sentence for every failure
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fulcrum import __version__, refuse_windows
from fulcrum.cli import (
    account,
    attack,
    audit,
    check,
    compare,
    data,
    demo,
    evaluate,
    export,
    failures,
    flower,
    init,
    ledger,
    operations,
    options,
    party,
    plan,
    predict,
    prior,
    rehearse,
    report,
    reproduce,
    run,
    score,
    show,
    study,
    theory,
    tune,
    watch,
)
from fulcrum.settings.registry import current_folder_importable

app = typer.Typer(
    name="fulcrum",
    help="Private federated learning that finds its own balance.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fulcrum {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _show_help_or_version(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Private federated learning that finds its own balance."""
    options.show_help_without_command(context)


app.command("run")(run.run)
app.command("resume")(run.resume)
app.command("show")(show.show)
app.command("report")(report.report)
app.command("watch")(watch.watch)
app.command("compare")(compare.compare)
app.command("tune")(tune.tune)
app.command("pareto")(tune.pareto)
app.command("evaluate")(evaluate.evaluate)
app.command("score")(score.score)
app.command("predict")(predict.predict)
app.command("export")(export.export)
app.command("init")(init.init)
app.command("plan")(plan.plan)
app.command("rehearse")(rehearse.rehearse)
app.command("account")(account.account)
app.command("ledger")(ledger.ledger)
app.command("check")(check.check)
app.command("audit")(audit.audit)
app.add_typer(data.app, name="data")
app.add_typer(reproduce.app, name="reproduce")
app.add_typer(study.app, name="study")
app.add_typer(theory.app, name="theory")
app.add_typer(attack.app, name="attack")
app.command("methods")(show.methods)
app.command("prior")(prior.prior)
app.command("demo")(demo.demo)
app.command("serve")(flower.serve)
app.command("party")(party.party)
app.command("status")(operations.status)
app.add_typer(operations.keys_app, name="keys")
app.command("terms")(flower.terms)
app.command("certs")(flower.certs)


HEAVY = {"run", "resume", "plan", "rehearse", "demo", "compare", "tune", "pareto", "study", "reproduce", "theory"}
HEAVY |= {"evaluate", "score", "predict", "export", "prior", "account"}
"""Commands that compute: what they import takes a second."""


def preload(words: Sequence[str]) -> None:
    """Import what the command will need, while Ctrl-C can still leave at once; nothing for `--help`."""
    if words and words[0] in HEAVY and not {"-h", "--help"} & set(words):
        importlib.import_module("fulcrum.privacy.accounting" if words[0] == "account" else "fulcrum.runs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 2 wrong input, 1 other failures, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)

    def call() -> Any:
        if not {"--help", "-h", "--version"} & set(words):
            refuse_windows()
        command = options.hide_flag_types(typer.main.get_command(app))
        return command.main(words, prog_name="fulcrum", standalone_mode=False)

    with current_folder_importable():  # for the whole command: own models and rules may import as they run
        return failures.run_guarded(call, words)
