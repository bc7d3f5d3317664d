"""What users may rely on: the names of `fulcrum`, and the commands and options of the command line.

A change here is a change for users: it belongs in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import fulcrum
from fulcrum.cli import app

SOURCE = Path(__file__).parents[2] / "src"
NAMES = {
    "Dataset",
    "Forecast",
    "FulcrumError",
    "InputError",
    "Observer",
    "Result",
    "RoundResult",
    "Settings",
    "__version__",
    "check",
    "execute",
    "load",
    "plan",
    "prepare",
    "private",
    "resume",
    "rounds",
    "train",
}

SETTINGS = {
    "config",
    "--method",
    "--data",
    "--data-dir",
    "--model",
    "--task",
    "--epsilon",
    "--sigma",
    "--delta",
    "--parties",
    "--partition",
    "--alpha",
    "--rounds",
    "--steps",
    "--rate",
    "--lr",
    "--seed",
    "--unit",
    "--randomness",
    "--arithmetic",
    "--private-seed",
    "--public",
    "--schema",
    "--withdrawn",
    "--engine",
    "--device",
    "--ledger",
    "--reference",
    "--set",
}
PART = {"--datasets", "--methods", "--epsilons", "--seeds"}
STUDY = PART | {"--out", "--shard", "--backend", "--workers", "--seconds", "--data-dir", "--report-only"}
STUDY |= {"--experiments", "--quiet", "-q", "--debug"}
COMMANDS = {
    "run": SETTINGS | {"--observe", "--no-rehearsal", "--out", "--json", "--quiet", "-q", "--debug"},
    "resume": {"folder", "--observe", "--repeat", "--json", "--quiet", "-q", "--debug"},
    "compare": (SETTINGS - {"--method", "--epsilon", "--seed"})
    | {"--methods", "--epsilons", "--seeds", "--against", "--out", "--backend", "--processes", "--seconds"}
    | {"--json", "--quiet", "-q", "--debug"},
    "tune": (SETTINGS - {"--seed"})
    | {
        "--for",
        "--search",
        "--trials",
        "--seeds",
        "--selection",
        "--made-up",
        "--out",
        "--backend",
        "--processes",
        "--seconds",
    }
    | {"--json", "--quiet", "-q", "--debug"},
    "pareto": (SETTINGS - {"--seed", "--epsilon"})
    | {"--epsilons", "--search", "--trials", "--seeds", "--made-up", "--out", "--backend", "--processes", "--seconds"}
    | {"--json", "--quiet", "-q", "--debug"},
    "watch": {"--debug", "--host", "--open", "--port", "--seconds", "folder"},
    "report": {"--csv", "--debug", "--figures", "--formats", "--json", "--out", "--title", "folders"},
    "show": {"folder", "--json", "--debug"},
    "evaluate": {"folder", "--data", "--data-dir", "--model", "--json", "--debug"},
    "score": {"folder", "--data", "--party", "--ledger", "--hold-out", "--epsilon", "--delta", "--out", "--merge"}
    | {"--data-dir", "--model", "--json", "--debug"},
    "predict": {"folder", "--data", "--data-dir", "--model", "--out", "--quiet", "-q", "--debug"},
    "export": {"folder", "--to", "--out", "--model", "--json", "--quiet", "-q", "--debug"},
    "init": {"path", "--debug"},
    "plan": SETTINGS | {"--for-epsilon", "--timing", "--advise", "--out", "--json", "--debug"},
    "rehearse": SETTINGS | {"--again", "--json", "--quiet", "-q", "--debug"},
    "account": {"--q", "--sigma", "--epsilon", "--steps", "--delta", "--accountant", "--parties", "--colluders"}
    | {"--json", "--debug"},
    "data list": {"--data-dir", "--json", "--debug"},
    "data fetch": {"names", "--data-dir", "--mirror", "--json", "--quiet", "-q", "--debug"},
    "data describe": {"table", "--target", "--out", "--public", "--regression", "--query", "--delimiter"}
    | {"--json", "--debug"},
    "data changes": SETTINGS | {"--person", "--json", "--debug"},
    "data verify": {"names", "--data-dir", "--json", "--debug"},
    "check": {
        "client",
        "--claims",
        "--sigma",
        "--rate",
        "--steps",
        "--epsilon",
        "--delta",
        "--sampling",
        "--clip",
        "--kind",
        "--output",
        "--data",
        "--features",
        "--classes",
        "--examples",
        "--parameters",
        "--local-steps",
        "--replays",
        "--json",
        "--debug",
    },
    "ledger": {"path", "--party", "--budget", "--verify", "--json", "--debug"},
    "audit": SETTINGS
    | {"--canaries", "--kind", "--releases", "--confidence", "--out", "--json", "--quiet", "-q", "--debug"},
    "attack membership": (SETTINGS - {"--epsilon"})
    | {
        "--epsilons",
        "--shadows",
        "--candidates",
        "--controls",
        "--common",
        "--known",
        "--plain",
        "--no-records",
        "--plain-lr",
        "--stack",
        "--out",
        "--report",
    }
    | {"--prepare", "--scored", "--all", "--json", "--quiet", "-q", "--debug"},
    "attack inversion": (SETTINGS - {"--epsilon"})
    | {"--epsilons", "--attacks", "--images", "--batches", "--batch", "--iterations", "--report", "--figure"}
    | {"--json", "--quiet", "-q", "--debug"},
    "methods": {"--json", "--debug"},
    "prior": {
        "model",
        "--out",
        "--activation",
        "--kinds",
        "--pool",
        "--steps",
        "--jitter",
        "--scene",
        "--colours",
        "--scale",
        "--seed",
        "--device",
    }
    | {"--quiet", "-q", "--debug"},
    "serve": SETTINGS
    | {"--keys", "--listen", "--certificate", "--private-key", "--insecure", "--simulation", "--deadline", "--wait"}
    | {"--out", "--resume", "--json", "--quiet", "-q", "--debug"}
    | {"--quorum", "--grace", "--max-rest", "--from", "--check", "--log", "--metrics", "--signing-key"},
    "status": {"folder", "--json", "--debug"},
    "keys rotate": {"key", "--debug"},
    "keys accept": {"register", "note", "--debug"},
    "keys revoke": {"register", "name", "--debug"},
    "party": {
        "config",
        "--check",
        "--log",
        "--metrics",
        "--data",
        "--schema",
        "--withdrawn",
        "--hold-out",
        "--canaries",
        "--server",
        "--key",
        "--ledger",
        "--ca",
        "--terms",
        "--home",
        "--statement",
        "--until-done",
    }
    | {"--simulation", "--insecure", "--device", "--quiet", "-q", "--debug"},
    "terms": SETTINGS | {"--coordinator", "--peers", "--party", "--budget", "--classes", "--out", "--debug"},
    "certs": {"folder", "--host", "--party", "--units", "--debug"},
    "reproduce paper": STUDY | {"--subset", "--tune", "--tune-at", "--json"},
    "study prepare": PART | {"stage", "--done", "--pack", "--experiments", "--debug"},
    "study merge": {"folders", "--into", "--keep", "--json", "--debug"},
    "study choose": PART - {"--seeds"} | {"--out", "--study", "--protocol", "--partial", "--experiments", "--debug"},
    "theory check": {"names", "--page", "--write", "--figures", "--json", "--quiet", "-q", "--debug"},
    "theory objective": SETTINGS | {"--at", "--kappa", "--draws", "--out", "--figures", "--json", "--debug"},
    "theory constants": SETTINGS | {"--at", "--best", "--json", "--debug"},
    "theory predict": SETTINGS | {"--json", "--debug"},
    "study paper": STUDY,
    "study robustness": STUDY,
    "study no-tuning": STUDY,
    "study protocol": STUDY,
    "study parties": STUDY,
    "study open": STUDY,
    "study pairwise": STUDY,
    "study kept": STUDY,
    "study zero-trials": STUDY,
    "demo": {"--out", "--json", "--quiet", "-q", "--debug"},
}


def test_public_names():
    assert set(fulcrum.__all__) == NAMES
    assert set(dir(fulcrum)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_public_name_is_there_and_explained(name):
    thing = getattr(fulcrum, name)
    if callable(thing):
        assert inspect.getdoc(thing)


def test_data_and_clip_need_no_import_of_their_own():
    code = "import fulcrum; fulcrum.data.from_arrays, fulcrum.clipping.RULES"
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE, timeout=120).returncode == 0


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="trian"):
        _ = fulcrum.trian


def surface(command, path: str = "") -> dict[str, set[str]]:
    """Every command with its arguments and options."""
    if not hasattr(command, "commands"):
        given = [p for p in command.params if p.name != "help"]
        return {path: {word for p in given for word in (p.opts if p.param_type_name == "option" else [p.name])}}
    found: dict[str, set[str]] = {}
    for name, inner in command.commands.items():
        found |= surface(inner, f"{path} {name}".strip())
    return found


def test_commands_and_options():
    assert surface(typer.main.get_command(app)) == COMMANDS


def test_every_option_and_command_is_explained():
    def explained(command) -> bool:
        inner = getattr(command, "commands", {}).values()
        options = [p for p in command.params if p.param_type_name == "option"]
        return bool(command.help) and all(p.help for p in options) and all(explained(c) for c in inner)

    assert explained(typer.main.get_command(app))
