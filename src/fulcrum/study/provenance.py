"""Where, when and how an output was made; every file of a study includes it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulcrum
from fulcrum.runs import folder as record
from fulcrum.study.store import RunRecord


def collect_provenance(settings: Mapping[str, Any], seeds: Iterable[int], runs: Iterable[RunRecord]) -> dict[str, Any]:
    """Command, settings of the study, seeds, the machines that ran it, and the date."""
    runs = list(runs)
    machines = sorted({_describe_machine(run["machine"]) for run in runs})
    dates = sorted(str(run["date"]) for run in runs)
    return {
        "command": get_command_line(),
        "date": record.current_utc_time(),
        "version": fulcrum.__version__,
        "commit": get_source_commit(),
        "seeds": list(seeds),
        "hardware": machines,
        "runs": len(runs),
        "first_run": dates[0] if dates else None,
        "last_run": dates[-1] if dates else None,
        "settings": dict(settings),
    }


@dataclass(frozen=True)
class MadeBy:
    """What made a run: the commit of the source ("" where nothing tells it) and the command."""

    commit: str = ""
    command: str = ""


def list_makers(runs: Iterable[RunRecord]) -> dict[str, str | list[str]]:
    """Commit and command of the runs, as entries for a file: a word where all agree, else a list.

    Runs of versions that did not note them count as made by "unknown".
    """
    found: dict[str, str | list[str]] = {}
    runs = list(runs)
    for name in ("commit", "command"):
        values = sorted({str(run.get(name) or UNKNOWN_MAKER) for run in runs})
        found[name] = values[0] if len(values) == 1 else values
    return found


UNKNOWN_MAKER = "unknown"


def get_command_line() -> str:
    """The command line of this process."""
    return shlex.join(["fulcrum", *sys.argv[1:]])


def describe_command(module: str, argv: Sequence[str] | None) -> str:
    """The command line of a module that was started with `python -m`."""
    return shlex.join(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)])


def get_source_commit() -> str:
    """The commit of the source tree, with + where it has changed since; empty outside of one."""
    try:
        where = Path(__file__).parent
        words = ["git", "-C", str(where), "describe", "--always", "--dirty=+", "--abbrev=10"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        return ""


def _describe_machine(facts: Mapping[str, Any]) -> str:
    device = str(facts["device"])
    name = f"{facts['processor']}, {facts['cores']} cores" if device == "cpu" else device
    return f"{name}; Python {facts['python']}, torch {facts['torch']}, backend {facts.get('backend', '?')}"


def provenance_to_line(facts: Mapping[str, Any]) -> str:
    """For comments inside figures and LaTeX."""
    where = "; ".join(facts["hardware"])
    what = f"seeds {facts['seeds']} | settings {json.dumps(facts['settings'], default=str)}"
    return f"{facts['command']} | {facts['date']} | fulcrum {facts['version']} {facts['commit']} | {where} | {what}"


def provenance_to_markdown(facts: Mapping[str, Any]) -> str:
    """For the end of a page."""
    made = f"Made by `{facts['command']}` on {facts['date']} with fulcrum {facts['version']} "
    made += f"({facts['commit'] or 'no git'})"
    if not facts["runs"]:
        return f"{made}. Nothing has run yet.\n"
    return (
        f"{made} from {facts['runs']} runs between {facts['first_run']} and {facts['last_run']}; seeds "
        f"{', '.join(map(str, facts['seeds']))}. Hardware: {'; '.join(facts['hardware'])}.\n"
    )
