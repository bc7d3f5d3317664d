"""The faults over the message layer: a coordinator and three parties in one process, without a network.

The parties are the real ones (`PartyService`): own keys, terms, ledgers and stored replies on disk. Only Flower's
transport is left out; a dictionary carries the envelopes (tests/support/flower.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults_child as child
from faults_damage import DAMAGES
from faults_trials import World, describe_finished, read_lines, read_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

ROUNDS = 5
NAMES = ("party-0", "party-1", "party-2")


def play_federation(folder: Path) -> int:
    """Serve a run to three parties over the dictionary, or go on with it; 0 when it has finished."""
    import pytest

    from support import flower as toy

    settings = toy.toy_settings(rounds=ROUNDS)
    patch = pytest.MonkeyPatch()
    from fulcrum.cli.failures import run_guarded

    def call() -> int:
        with toy.toy_federation(folder, settings) as bus:
            resume = (folder / "run" / "run.json").is_file()
            if not resume:  # killed before its first round: the folder says so, and is removed as it advises
                shutil.rmtree(folder / "run", ignore_errors=True)
            toy.serve(bus, settings, folder / "run", patch, resume=resume)
        return 0

    return run_guarded(call, [])


@dataclass
class MessageWorld:
    """What the trials share: the uninterrupted federation, its lines of code and its seconds."""

    world: World
    whole: dict[str, Any] = field(default_factory=dict)
    lines: int = 0
    seconds: float = 0.0

    def prepare(self) -> None:
        """Play the federation here (imports), then counted, then timed."""
        os.environ["FULCRUM_KEY_FILE"] = str(self.world.home / "record.key")
        for name in ("here", "counted", "timed"):
            folder = self.world.home / f"federation-{name}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            count, log = self.world.home / "count", self.world.home / "log"

            def counted(folder: Path = folder, count: Path = count) -> int:
                code = play_federation(folder)
                count.write_text(str(child.COUNTERS[-1]()))
                return code

            if name == "here":
                code, said = play_federation(folder), "see above"
            elif name == "counted":
                ended = child.run_command(counted, log, child.count_lines(0, lambda: None))
                code, said, self.lines = ended.code, ended.said, int(count.read_text())
            else:
                ended = child.run_command(functools.partial(play_federation, folder), log)
                code, said, self.seconds = ended.code, ended.said, ended.seconds
            if code:
                raise SystemExit(f"the federation without faults failed: {said}")
            self.whole = describe_federation(folder)


def describe_federation(folder: Path) -> dict[str, Any]:
    """What two equal federations have in common: the coordinator's run, and every party's ledger."""
    found = describe_finished(folder / "run", folder / "run" / "ledger.sqlite")
    return found | {name: read_rows(folder / f"{name}.sqlite") for name in NAMES}


def find_wrong_rows(folder: Path) -> str:
    """Why the parties' ledgers are wrong: a round paid twice, or used and not paid; empty where they are right."""
    for k, name in enumerate(NAMES):
        rows = read_rows(folder / f"{name}.sqlite")
        rounds = [row[1] for row in rows]
        if len(rounds) != len(set(rounds)) or any(row[2] for row in rows):
            return f"{name} paid a round twice"
        settled = {row[1] for row in rows if row[4] is not None}
        used = {line["round"] - 1 for line in read_lines(folder / "run") if k in line.get("participants", [])}
        if used - settled:
            return f"{name} was used in round {min(used - settled) + 1} and did not pay"
    return ""


Play = Callable[[MessageWorld, Path, random.Random], dict[str, Any]]


def _finish(world: MessageWorld, folder: Path, row: dict[str, Any], equal: bool = True) -> dict[str, Any]:
    ended = child.run_command(lambda: play_federation(folder), folder / "log")
    row |= {"resumed": ended.code}
    if ended.code:
        return row | {"ok": False, "why": f"did not go on: {ended.said.strip()[-300:]}"}
    why = find_wrong_rows(folder)
    if not why and equal:
        found = describe_federation(folder)
        wrong = [name for name, value in world.whole.items() if found[name] != value]
        why = f"{', '.join(wrong)} differ from the uninterrupted run" if wrong else ""
    return row | {"ok": not why, "equal": equal and not why, "why": why}


def _strike(folder: Path, arm: child.Arm | None = None, **more: Any) -> dict[str, Any]:
    ended = child.run_command(lambda: play_federation(folder), folder / "log", arm, **more)
    row = {
        "exit": ended.code,
        "said": ended.said.strip()[-200:],
        "rounds_on_record": len(read_lines(folder / "run")),
        "ledger_rows": sum(len(read_rows(folder / f"{name}.sqlite")) for name in NAMES),
    }
    why = find_wrong_rows(folder)
    if why or not (ended.killed or ended.in_words):
        row |= {"ok": False, "why": why or "ended without a sentence"}
    return row


def kill_at_line(world: MessageWorld, folder: Path, draw: random.Random) -> dict[str, Any]:
    """kill -9 of coordinator and parties before a random line, up to three times."""
    row: dict[str, Any] = {}
    points = [draw.randint(1, world.lines) for _ in range(draw.randint(1, 3))]
    for at in points:
        row = _strike(folder, child.count_lines(at, child.kill_now)) | {"point": f"lines {points}"}
        if row.get("ok") is False:
            return row
    return _finish(world, folder, row)


def kill_at_time(world: MessageWorld, folder: Path, draw: random.Random) -> dict[str, Any]:
    """kill -9 from outside."""
    after = draw.uniform(0.05, 1.0) * world.seconds
    row = _strike(folder, kill_after=after) | {"point": f"{after:.3f} s"}
    return row if row.get("ok") is False else _finish(world, folder, row)


def damage_party(world: MessageWorld, folder: Path, draw: random.Random) -> dict[str, Any]:
    """A party's ledger or its stored replies are damaged between a crash and the return."""
    row = _strike(folder, child.count_lines(draw.randint(world.lines // 2, world.lines), child.kill_now))
    if row.get("ok") is False:
        return row
    name, what = draw.choice(NAMES), draw.choice((".sqlite", ".sqlite.replies"))
    file = folder / f"{name}{what}"
    if not file.is_file() or not read_rows(folder / f"{name}.sqlite"):
        return {"skipped": "the run had not got so far"}
    kind = draw.choice([each for each in DAMAGES if each != "another run's"])
    before, rows_before = file.read_bytes(), read_rows(folder / f"{name}.sqlite")
    DAMAGES[kind](file, draw, world.world)
    ended = child.run_command(lambda: play_federation(folder), folder / "log")
    row |= {"point": f"{file.name}: {kind}", "exit": ended.code, "said": ended.said.strip()[-200:]}
    if not ended.in_words:
        return row | {"ok": False, "why": "ended without a sentence"}
    paid = [each[:4] for each in rows_before]
    if what == ".sqlite" and ended.code == 0 and [each[:4] for each in read_rows(file)][: len(paid)] != paid:
        return row | {"ok": False, "why": "the party went on under a ledger without what it had paid"}
    if ended.code:
        file.write_bytes(before)
        return _finish(world, folder, row | {"refused": True}, equal=False)
    why = find_wrong_rows(folder) if what != ".sqlite" else ""
    return row | {"ok": not why, "equal": False, "resumed": 0, "why": why}


MESSAGE_FAULTS: dict[str, Play] = {
    "federation killed at a line": kill_at_line,
    "federation killed at a time": kill_at_time,
    "party's files damaged": damage_party,
}


def play_message_trial(world: MessageWorld, number: int, seed: int) -> dict[str, Any]:
    """One trial; its number counts from 0 within this layer."""
    draw = random.Random(f"{seed}/messages/{number}")
    name = list(MESSAGE_FAULTS)[number % len(MESSAGE_FAULTS)]
    folder = world.world.home / f"message-trial-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    row = MESSAGE_FAULTS[name](world, folder, draw)
    if row.get("ok") is not False:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    return {"trial": f"m{number}", "fault": name, "work": "messages", **row}
