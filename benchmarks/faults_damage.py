"""Trials with damaged files: a run is killed, a file of it is damaged, and it is resumed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import faults_child as child
from faults_trials import Place, World, fault, find_difference, finish, last_line, list_checkpoints, read_rows

Damage = Callable[[Path, random.Random, World], None]


def _flip(file: Path, draw: random.Random, world: World) -> None:
    content = bytearray(file.read_bytes())
    at = draw.randrange(len(content)) if content else 0
    content[at : at + 1] = bytes([content[at] ^ (1 << draw.randrange(8))])
    file.write_bytes(content)


def _cut(file: Path, draw: random.Random, world: World) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content))] if content else b"")


def _empty(file: Path, draw: random.Random, world: World) -> None:
    file.write_bytes(b"")


def _remove(file: Path, draw: random.Random, world: World) -> None:
    file.unlink()


def _zero(file: Path, draw: random.Random, world: World) -> None:
    content = bytearray(file.read_bytes())
    at = draw.randrange(max(1, len(content)))
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    file.write_bytes(content)


def _exchange(file: Path, draw: random.Random, world: World) -> None:
    """The same file of another run."""
    whole = world.home / "whole-seeded" / "disk" / "run"
    other = whole / file.name if (whole / file.name).is_file() else whole / "ledger.sqlite"
    if file.parent.name == "checkpoints":
        other = list_checkpoints(whole)[0]
    shutil.copy(other, file)


DAMAGES: dict[str, Damage] = {
    "bit flipped": _flip,
    "cut": _cut,
    "emptied": _empty,
    "missing": _remove,
    "zeroed": _zero,
    "another run's": _exchange,
}


def _damage(
    world: World, place: Place, draw: random.Random, choose: Callable[[Place], Sequence[Path]]
) -> dict[str, Any]:
    """Stop a run by kill -9, damage a file, resume. Refused in words: bring the file back, and resume again."""
    place.start(
        child.count_lines(draw.randint(world.lines[place.work.name] // 3, world.lines[place.work.name]), child.kill_now)
    )
    files = [file for file in choose(place) if file.is_file()]
    if not (place.run / "run.json").is_file() or not files:
        return {"skipped": "the run had not got so far"}
    name = draw.choice(list(DAMAGES))
    file = draw.choice(files)
    before = file.read_bytes()
    rows_before = read_rows(place.ledger)
    DAMAGES[name](file, draw, world)
    ended = place.resume()
    row: dict[str, Any] = {"point": f"{file.name}: {name}", "exit": ended.code, "said": last_line(ended.said)}
    if ended.code == 0:  # it went on without the file, or the damage made no difference
        why = find_difference(place, world.whole[place.work.name], 2)
        return row | {"resumed": 0, "ok": not why, "equal": place.work.replays and not why, "why": why}
    if not ended.in_words:
        return row | {"ok": False, "why": "ended without a sentence"}
    if file != place.ledger and read_rows(place.ledger) != rows_before:
        return row | {"ok": False, "why": "a refused resume changed the ledger"}
    file.write_bytes(before)
    return finish(world, place, row | {"refused": True}, 2)


@fault("damaged checkpoint")
def damage_checkpoint(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """A checkpoint is corrupted, cut, emptied, missing, or another run's."""
    return _damage(world, place, draw, lambda place: list_checkpoints(place.run)[-1:])


@fault("damaged ledger")
def damage_ledger(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """The ledger is corrupted, cut, emptied, missing, or replaced."""
    return _damage(world, place, draw, lambda place: [place.ledger])


@fault("damaged record")
def damage_record(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """Another file of the folder is corrupted, cut, emptied, missing, or another run's."""
    names = ("metrics.jsonl", "run.json", "settings.toml", "ledger-head.json", "environment.json", "summary.json")
    return _damage(world, place, draw, lambda place: [place.run / name for name in names])
