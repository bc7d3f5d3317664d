"""Trials of one run under one fault: what was lost, what the ledger says, and whether resume equals the whole run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults_child as child
import numpy as np

ROUNDS = 6


@dataclass(frozen=True)
class Work:
    """A small run. replays: its seeded noise comes again, so that a resumed run has the same bits. kept: the ledger
    lies outside of the run's folder."""

    name: str
    words: tuple[str, ...]
    replays: bool = True
    kept: bool = False


_COMMON: tuple[str, ...] = (
    "--data",
    "data.npz",
    "--parties",
    "2",
    "--partition",
    "iid",
    "--rounds",
    str(ROUNDS),
    "--rate",
    "0.5",
)
_COMMON += ("--sigma", "1.3", "--model", "linear", "--quiet")
_SEEDED = ("--set", "privacy.randomness=seeded")
WORKS = (
    Work("seeded", (*_COMMON, *_SEEDED)),
    Work("sparse", (*_COMMON, *_SEEDED, "--set", "run.checkpoint_every=3", "--set", "train.server=adam"), kept=True),
    Work("secure", (*_COMMON, "--set", "privacy.randomness=secure"), replays=False),
)


@dataclass
class Place:
    """One trial's own folder."""

    home: Path
    work: Work
    run: Path = field(init=False)
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.run, self.log = self.home / "disk" / "run", self.home / "log"
        self.run.parent.mkdir(parents=True)

    @property
    def ledger(self) -> Path:
        """The run's ledger."""
        return self.run.parent / "kept.sqlite" if self.work.kept else self.run / "ledger.sqlite"

    def start(self, arm: child.Arm | None = None, out: Path | None = None, **more: Any) -> child.Ended:
        """`fulcrum run`."""
        words = ["run", *self.work.words, "--out", str(out or self.run)]
        words += ["--set", f"run.ledger={self.ledger}"] if self.work.kept else []
        return child.run_command(child.fulcrum_command(words), self.log, arm, **more)

    def resume(self, arm: child.Arm | None = None, **more: Any) -> child.Ended:
        """`fulcrum resume`."""
        command = child.fulcrum_command(["resume", str(self.run), "--quiet"])
        return child.run_command(command, self.log, arm, **more)


# --- what is there ------------------------------------------------------------------------------


def read_rows(ledger: Path) -> list[list[Any]]:
    """(party, round, attempt, events, digest) of all reservations, without Fulcrum's own reader."""
    if not ledger.is_file() or ledger.stat().st_size == 0:
        return []
    with contextlib.closing(sqlite3.connect(ledger)) as db:
        try:
            found = db.execute(
                "SELECT p.name, e.round, e.attempt, e.events, s.digest FROM entries e JOIN parties p ON p.id = e.party"
                " LEFT JOIN settlements s ON s.entry = e.id ORDER BY 1, 2, 3"
            ).fetchall()
        except sqlite3.DatabaseError:  # killed before its tables were made
            return []
    return [list(row) for row in found]


def read_lines(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, without what depends on the machine's speed."""
    lines = []
    for text in (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").is_file() else []:
        with contextlib.suppress(ValueError):
            lines.append({name: value for name, value in json.loads(text).items() if name != "seconds"})
    return lines


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints, oldest first."""
    return sorted((run / "checkpoints").glob("round-*.safetensors"))


def describe_finished(run: Path, ledger: Path) -> dict[str, Any]:
    """What two equal runs have in common: every bit of the model and the last checkpoint, metrics, ledger, epsilon."""
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for file in (run / "model.safetensors", list_checkpoints(run)[-1]):
        for name, value in sorted(load_file(file).items()):
            digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
    summary = json.loads((run / "summary.json").read_text())
    return {
        "bits": digest.hexdigest(),
        "lines": read_lines(run),
        "rows": read_rows(ledger),
        "epsilon": summary["epsilon"],
        "stated": json.loads((run / "privacy.json").read_text())["epsilon"],
    }


def find_difference(place: Place, whole: dict[str, Any], strikes: int) -> str:
    """Why the finished run in a trial's folder is not as it must be; empty where it is."""
    missing = [
        name for name in ("summary.json", "model.safetensors", "privacy.json") if not (place.run / name).is_file()
    ]
    if missing:
        return f"finished without {missing[0]}"
    found = describe_finished(place.run, place.ledger)
    if place.work.replays:
        wrong = [name for name, value in whole.items() if found[name] != value]
        return f"{', '.join(wrong)} differ from the uninterrupted run" if wrong else ""
    # Fresh noise has other bits. Every round that stands was paid and settled, and a strike costs one round at most.
    last: dict[tuple[str, int], list[Any]] = {}
    for party, round, attempt, _, digest in found["rows"]:
        last[party, round] = [attempt, digest]
    rounds = {line["round"] - 1 for line in found["lines"]}
    if {round for _, round in last} != rounds or rounds != set(range(ROUNDS)):
        return "rounds on record are not the rounds that were paid"
    if any(digest is None for _, digest in last.values()):
        return "a round that stands is not settled"
    repeated = len(found["rows"]) - len(last)
    if repeated > 2 * strikes:
        return f"{repeated} reservations were paid again after {strikes} strikes"
    if (found["epsilon"] == whole["epsilon"]) != (repeated == 0) or found["stated"] != found["epsilon"]:
        return "the statement does not say what the ledger has"
    return ""


def describe_stopped(place: Place) -> dict[str, Any]:
    """What a fault left: rounds on record, in the last checkpoint, paid and settled."""
    rows, lines, kept = read_rows(place.ledger), read_lines(place.run), list_checkpoints(place.run)
    settled = {row[1] for row in rows if row[4] is not None}
    done = len(lines)
    saved = int(kept[-1].stem.partition("-")[2]) if kept else 0
    unpaid = [line["round"] for line in lines if line["round"] - 1 not in settled]
    return {
        "rounds_on_record": done,
        "rounds_saved": saved,
        "rounds_to_play_again": max(len(settled), done) - saved,
        "ledger_rows": len(rows),
        "ledger_open": sum(row[4] is None for row in rows),
        "unpaid": unpaid,
    }


# --- faults -------------------------------------------------------------------------------------


@dataclass
class World:
    """What all trials share. lines: lines of Fulcrum's own code in an uninterrupted run, by work."""

    home: Path
    disks: bool
    whole: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def prepare(self) -> None:
        """Write the data, and play each work without a fault: once here (imports), once counted."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o777)
        os.chdir(self.home)
        os.environ["FULCRUM_KEY_FILE"] = str(self.home / "record.key")
        if not (self.home / "data.npz").is_file():
            draw = np.random.default_rng(0)
            x, y = draw.normal(size=(90, 5)).astype(np.float32), np.arange(90) % 3
            x[np.arange(90), y] += 2
            np.savez(self.home / "data.npz", x=x[:60], y=y[:60], x_test=x[60:], y_test=y[60:], classes=3)
        for work in WORKS:
            shutil.rmtree(self.home / f"whole-{work.name}", ignore_errors=True)
            place = Place(self.home / f"whole-{work.name}", work)
            here = child.fulcrum_command(["run", *_in_this_process(work, place)])
            if work is WORKS[0] and here():  # imports everything that the children will need
                raise SystemExit("the run without faults failed")
            shutil.rmtree(place.home)
            place = Place(self.home / f"whole-{work.name}", work)
            count = self.home / "count"
            command = _then_count(self._command(place), count)
            ended = child.run_command(command, place.log, child.count_lines(0, _nothing))
            if ended.code:
                raise SystemExit(f"the run without faults failed: {ended.said}")
            self.lines[work.name] = int(count.read_text())
            self.whole[work.name] = describe_finished(place.run, place.ledger)
            shutil.rmtree(place.home)
            place = Place(self.home / f"whole-{work.name}", work)
            self.seconds[work.name] = place.start().seconds

    def _command(self, place: Place) -> Callable[[], int]:
        return child.fulcrum_command(["run", *_in_this_process(place.work, place)])


def _in_this_process(work: Work, place: Place) -> list[str]:
    return [*work.words, "--out", str(place.run), *(["--set", f"run.ledger={place.ledger}"] if work.kept else [])]


def _then_count(call: Callable[[], int], file: Path) -> Callable[[], int]:
    def both() -> int:
        code = call()
        file.write_text(str(child.COUNTERS[-1]()))
        return code

    return both


def _nothing() -> None:
    pass


Play = Callable[[World, Place, random.Random], dict[str, Any]]
FAULTS: dict[str, Play] = {}
"""Each fault by name: plays one trial and returns its row."""


def fault(name: str) -> Callable[[Play], Play]:
    """Register a fault."""

    def add(play: Play) -> Play:
        FAULTS[name] = play
        return play

    return add


def finish(world: World, place: Place, row: dict[str, Any], strikes: int = 1) -> dict[str, Any]:
    """Go on without the fault, and compare with the uninterrupted run."""
    row |= {"resumable": (place.run / "run.json").is_file()}
    if not row["resumable"]:
        if row.get("ledger_rows"):
            return row | {"ok": False, "why": "releases were paid, and the run cannot be resumed"}
        place.run = place.run.with_name("again")
        ended = place.start()
    else:
        ended = place.resume()
    row |= {"resumed": ended.code}
    if ended.code:
        return row | {"ok": False, "why": f"did not go on: {ended.said.strip()[-300:]}"}
    why = find_difference(place, world.whole[place.work.name], strikes)
    return row | {"equal": place.work.replays and not why, "ok": not why, "why": why}


def judge_strike(place: Place, ended: child.Ended, **more: Any) -> dict[str, Any]:
    """The row of a run that a fault struck. A command that was not killed must have ended in words."""
    row = {"exit": ended.code, "said": last_line(ended.said), **more, **describe_stopped(place)}
    if row["unpaid"]:
        row |= {"ok": False, "why": f"round {row['unpaid'][0]} is on record and was not paid"}
    elif not (ended.killed or ended.in_words):
        row |= {"ok": False, "why": "ended without a sentence"}
    return row


def last_line(text: str) -> str:
    """The sentence with which a command ended."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    wanted = [line for line in lines if line.startswith(("error", "internal", "interrupted"))]
    return (wanted or lines or [""])[-1][:300]


def _go_on(world: World, place: Place, row: dict[str, Any], strikes: int = 1) -> dict[str, Any]:
    return row if row.get("ok") is False else finish(world, place, row, strikes)


@fault("kill at a line")
def kill_at_line(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """kill -9 before a random line; one trial in three strikes the resumed run too."""
    at = draw.randint(1, world.lines[place.work.name])
    row = judge_strike(place, place.start(child.count_lines(at, child.kill_now)), point=f"line {at}")
    strikes = 1
    if draw.random() < 1 / 3 and row.get("ok") is None and (place.run / "run.json").is_file():
        again = draw.randint(1, world.lines[place.work.name])
        ended = place.resume(child.count_lines(again, child.kill_now))
        row = {**judge_strike(place, ended, point=f"line {at}, then line {again} of resume")}
        strikes = 2
        if ended.code == 0:
            why = find_difference(place, world.whole[place.work.name], strikes)
            return row | {"ok": not why, "equal": place.work.replays and not why, "why": why}
    return _go_on(world, place, row, strikes)


@fault("kill at a time")
def kill_at_time(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """kill -9 from outside, inside of whatever runs then: SQLite, a rename, a gradient."""
    after = draw.uniform(0.02, 1.0) * world.seconds[place.work.name]
    row = judge_strike(place, place.start(kill_after=after), point=f"{after:.3f} s")
    return _go_on(world, place, row)


@fault("disk full")
def fill_disk(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """A small disk; later it has room."""
    disk = place.run.parent
    if not world.disks:
        return {"skipped": "mounting is not allowed here"}
    size = 4096 * draw.randint(8, 60)
    child.mount_small_disk(disk, size)
    try:
        ended = place.start()
        row = judge_strike(place, ended, point=f"{size} bytes")
        child.resize_disk(disk, 1 << 26)
        return _go_on(world, place, row)
    finally:
        child.unmount(disk)


@fault("ledger cannot grow")
def fill_ledger(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """SQLite finds the disk full in the middle of the run."""
    more = draw.randint(1, 30)
    row = judge_strike(place, place.start(child.limit_ledger_pages(more)), point=f"{more} pages")
    return _go_on(world, place, row)


@fault("file too large")
def limit_files(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """A limit on the size of files, as a quota sets it."""
    size = draw.choice([draw.randint(500, 8000), draw.randint(8000, 110_000)])
    row = judge_strike(place, place.start(child.limit_file_size(size)), point=f"{size} bytes")
    return _go_on(world, place, row)


@fault("read-only folder")
def forbid_folder(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """The folder cannot be written any more from a line on; later it can."""
    at = draw.randint(1, world.lines[place.work.name])
    _give_to_nobody(place.home)
    ended = place.start(child.forbid_writing(place.run, at))
    _allow_all(place.home)
    row = judge_strike(place, ended, point=f"line {at}")
    if draw.random() < 0.5 and row.get("ok") is None and (place.run / "run.json").is_file():
        child.forbid_writing(place.run, 1)
        _give_to_nobody(place.home)
        ended = place.resume(child.forbid_writing(place.run, 1))
        _allow_all(place.home)
        row = judge_strike(place, ended, point=f"line {at}, and resume")
    return _go_on(world, place, row, 2)


@fault("clock jumps")
def jump(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """The wall clock jumps forwards and back by up to thirty years while the run goes on; then kill -9."""
    jumps = sorted((draw.randint(1, 60), draw.choice([-1, 1]) * 10 ** draw.uniform(0, 9)) for _ in range(3))
    at = draw.randint(1, world.lines[place.work.name])

    def arm() -> None:
        child.jump_clock(jumps)()
        if draw.random() < 0.5:
            child.count_lines(at, child.kill_now)()

    ended = place.start(arm)
    row = judge_strike(place, ended, point=f"{[round(s) for _, s in jumps]} s, line {at}")
    if ended.code == 0:
        why = find_difference(place, world.whole[place.work.name], 0)
        return row | {"ok": not why, "equal": place.work.replays and not why, "why": why}
    return _go_on(world, place, row)


@fault("out of memory")
def fill_memory(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """An allocation fails, on the device or on the host."""
    at, host = draw.randint(1, 250), draw.random() < 0.5
    ended = place.start(child.run_out_of_memory(at, host))
    row = judge_strike(place, ended, point=f"allocation {at} of the {'host' if host else 'device'}")
    if ended.code == 0:
        why = find_difference(place, world.whole[place.work.name], 0)
        return row | {"ok": not why, "equal": place.work.replays and not why, "why": why}
    return _go_on(world, place, row)


@fault("two processes")
def run_twice(world: World, place: Place, draw: random.Random) -> dict[str, Any]:
    """Two processes resume one run at once: one goes on, the other says why it does not."""
    place.start(child.count_lines(draw.randint(1, world.lines[place.work.name]), child.kill_now))
    if not (place.run / "run.json").is_file():
        return {"skipped": "the run had not got so far"}
    command = child.fulcrum_command(["resume", str(place.run), "--quiet"])
    logs = [place.home / "first", place.home / "second"]
    children = [child.fork_command(command, log) for log in logs]
    ends = [child.wait_for(each, log) for each, log in zip(children, logs, strict=True)]
    row: dict[str, Any] = {"exit": [end.code for end in ends], "said": last_line(max(ends, key=lambda e: e.code).said)}
    if not all(end.in_words for end in ends) or all(end.code for end in ends):
        return row | {"ok": False, "why": "neither went on, or one ended without a sentence"}
    why = find_difference(place, world.whole[place.work.name], 1)
    return row | {"resumed": 0, "ok": not why, "equal": place.work.replays and not why, "why": why}


def _give_to_nobody(folder: Path) -> None:
    for path in [folder.parent / "data.npz", folder.parent / "record.key", *folder.rglob("*"), folder]:
        if os.getuid() == 0 and path.exists():
            os.chown(path, child.NOBODY, child.NOBODY)


def _allow_all(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o777 if path.is_dir() else 0o666)


def play_trial(world: World, number: int, seed: int) -> dict[str, Any]:
    """One trial. The same number and seed make the same choices."""
    draw = random.Random(f"{seed}/{number}")
    names = list(FAULTS)
    name, work = names[number % len(names)], WORKS[number // len(names) % len(WORKS)]
    home = world.home / f"trial-{number}"
    shutil.rmtree(home, ignore_errors=True)
    place = Place(home, work)
    row = FAULTS[name](world, place, draw)
    if row.get("ok") is not False:
        shutil.rmtree(home, ignore_errors=True)
    return {"trial": number, "fault": name, "work": work.name, **row}


def iterate_trials(world: World, numbers: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    """Play trials in order."""
    for number in numbers:
        yield play_trial(world, number, seed)
