"""A run's folder: everything a reader needs to check, rerun or continue the run. Format: docs/run-folder.md.

Files are written beside their final name and renamed, so a crash leaves the old file or the new one,
never half of one. `metrics.jsonl` grows line by line; an incomplete last line is dropped when the run is resumed.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fulcrum.errors import RunError
from fulcrum.training.snapshot import Snapshot
from fulcrum.types import RoundResult, ScoreFacts

CHECKPOINTS_KEPT = 2
"""Number of checkpoints kept; the second last is a backup if the last one is damaged."""
EARLY_FILES = ("parties.jsonl", "rounds.jsonl", "status.json")
"""Files that a coordinator writes while it waits for parties, before the run has a folder's other files."""
MAX_PARTIES_PER_LINE = 100
"""The largest number of parties for which metrics.jsonl has each party's epsilon and metrics."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run. Make one with `create` or `open`; both take the folder's lock."""

    path: Path
    lock: IO[str]

    @staticmethod
    def create(path: Path) -> RunFolder:
        """A new folder; refuses an existing folder that is not empty."""
        check_free_folder(path)
        try:
            (path / "checkpoints").mkdir(parents=True)
        except OSError as error:
            raise RunError(f"cannot make folder {path}: {error.strerror}.") from error
        return RunFolder(path, _lock_folder(path))

    @staticmethod
    def open(path: Path) -> RunFolder:
        """An existing run's folder, to resume the run."""
        if not (path / "run.json").is_file():
            raise RunError(f"{path} is not a run's folder: it holds no run.json.")
        return RunFolder(path, _lock_folder(path))

    def close(self) -> None:
        """Release the lock."""
        self.lock.close()

    @contextlib.contextmanager
    def remove_unless_started(self) -> Iterator[None]:
        """Around the start of a new run: where it fails, what was written is removed, so that nothing is left."""
        try:
            yield
        except BaseException:
            early = [name for name in EARLY_FILES if (self.path / name).is_file()]
            for each in self.path.iterdir() if early else ():
                if each.name not in early:
                    shutil.rmtree(each, ignore_errors=True) if each.is_dir() else each.unlink(missing_ok=True)
            if not early:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def write_text(self, name: str, text: str) -> None:
        """Write a file atomically."""
        write_file_atomically(self.path / name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file atomically; infinities become the string "inf"."""
        self.write_text(name, to_json_text(value))

    def remove_statement(self) -> None:
        """Remove the privacy statement of before: rounds are about to be released that it does not count."""
        for name in ("privacy.json", "PRIVACY.md"):
            (self.path / name).unlink(missing_ok=True)

    def append_metrics_line(self, line: Mapping[str, Any]) -> None:
        """Append one round's line (`make_metrics_line`) to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def write_checkpoint(self, snapshot: Snapshot) -> None:
        """Write the state after a round and drop checkpoints older than the last two."""
        folder = self.path / "checkpoints"
        name = f"round-{snapshot.round:06d}.safetensors"
        tensors = snapshot.to_tensors()
        digest = compute_checkpoint_digest(self._read_run_id(), snapshot.round, tensors)
        facts = {"round": str(snapshot.round), "digest": digest}
        write_file_atomically(folder / name, save(tensors, facts))
        for old in sorted(folder.glob("round-*.safetensors"))[:-CHECKPOINTS_KEPT]:
            old.unlink()

    def load_last_snapshot(self, device: torch.device) -> Snapshot | None:
        """The newest whole checkpoint, or None where there is none.

        One that was damaged, renamed or put there from another run is passed over: its digest does not fit.
        """
        run = self._read_run_id()
        for file in sorted((self.path / "checkpoints").glob("round-*.safetensors"), reverse=True):
            with contextlib.suppress(OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError):
                return _read_checkpoint(file, run, device)
        return None

    def _read_run_id(self) -> str:
        """The run that the checkpoints belong to; empty before it has a name."""
        return str(load_run_json(self.path, "run.json").get("id", "")) if (self.path / "run.json").is_file() else ""

    def truncate_metrics(self, rounds: int) -> list[dict[str, Any]]:
        """Keep the first `rounds` lines of metrics.jsonl and return them."""
        lines = load_metrics(self.path)[:rounds]
        if len(lines) < rounds:
            raise RunError(
                f"{self.path}/metrics.jsonl has {len(lines)} rounds but the checkpoint {rounds}: it was cut."
            )
        self.write_metrics(lines)
        return lines

    def write_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write metrics.jsonl anew."""
        self.write_text("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def check_free_folder(path: Path, resume: str = "fulcrum resume") -> None:
    """RunError where a new run cannot have this folder: it is a file, or holds something. resume: how to continue."""
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; choose a new folder as --out.")
    if path.exists() and any(each.name not in EARLY_FILES for each in path.iterdir()):
        refuse_taken_folder(path, resume)
    nearest = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise RunError(f"{nearest} is no folder that can be written to; choose another --out.")


def refuse_taken_folder(path: Path, command: str) -> None:
    """Raise RunError: a new run cannot begin in this folder. command: the one that continues the run in it."""
    if (path / "run.json").is_file():
        raise RunError(f"folder {path} holds a run; choose another --out, or continue it: {command} {path}")
    if (path / "lock").is_file() and (path / "checkpoints").is_dir():
        raise RunError(
            f"folder {path} holds a start that was killed before its first round, when nothing had been released; "
            "remove the folder, or choose another --out."
        )
    raise RunError(f"folder {path} exists and is not empty; choose another --out.")


def _read_checkpoint(file: Path, run: str, device: torch.device) -> Snapshot:
    """The snapshot in a checkpoint; ValueError (or the reader's own error) where it is not as it was written."""
    with safe_open(file, framework="pt") as opened:
        facts = opened.metadata() or {}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    round = int(facts["round"])
    if file.name != f"round-{round:06d}.safetensors":
        raise ValueError(f"{file} holds round {round}")
    whole = compute_checkpoint_digest(run, round, tensors)
    if facts.get("digest", whole) != whole:  # earlier versions wrote none
        raise ValueError(f"{file} is not as it was written")
    return Snapshot.from_tensors(round, tensors, device)


def compute_checkpoint_digest(run: str, round: int, tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest of a checkpoint: its run and round, and the names, types, shapes and bits of its tensors on the CPU."""
    h = hashlib.blake2b(f"{run}|{round}".encode(), digest_size=16)
    for name, value in sorted(tensors.items()):
        h.update(f"|{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        h.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


def make_fact_entries(facts: ScoreFacts) -> dict[str, Any]:
    """What stands beside the metrics in metrics.jsonl and summary.json; of many parties only the mean."""
    found: dict[str, Any] = {"baseline": dict(facts.baseline)} if facts.baseline else {}
    if facts.party_baselines:
        found["mean_baseline"] = facts.mean_baseline
    if 0 < len(facts.party_baselines) <= MAX_PARTIES_PER_LINE:
        found["party_baselines"] = {name: dict(values) for name, values in facts.party_baselines.items()}
    if len(facts.confusion):
        found["confusion"] = [list(row) for row in facts.confusion]
    if 0 < len(facts.party_confusion) <= MAX_PARTIES_PER_LINE:
        found["party_confusion"] = {name: [list(row) for row in rows] for name, rows in facts.party_confusion.items()}
    if facts.threshold:
        found["threshold"] = dict(facts.threshold)
    return found


def make_metrics_line(result: RoundResult) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    line: dict[str, Any] = {
        "round": result.round,
        "loss": result.loss,
        "accuracy": result.accuracy,
        "metrics": dict(result.metrics),
        "C": compute_total_C(result.C),
        "epsilon": result.epsilon,
        "seconds": round(result.seconds, 6),
    }
    if result.participants is not None:  # None: participation is secret (unit client)
        line["participants"] = list(result.participants)
    if result.out_of_budget:
        line["out_of_budget"] = list(result.out_of_budget)
    if len(result.C) > 1:
        line["C_groups"] = list(result.C)
    if 0 < len(result.epsilons) <= MAX_PARTIES_PER_LINE:
        line["epsilons"] = list(result.epsilons)
    if result.party_metrics:
        line["mean_over_parties"] = result.mean_over_parties
    if 0 < len(result.party_metrics) <= MAX_PARTIES_PER_LINE:
        line["party_metrics"] = {name: dict(metrics) for name, metrics in result.party_metrics.items()}
    line |= make_fact_entries(result.facts)
    if result.course:
        line["course"] = {name: float(f"{value:.6g}") for name, value in result.course.items()}
    if result.diagnostics:
        line["non_private_diagnostics"] = dict(result.diagnostics)
    return line


def compute_total_C(C: tuple[float, ...]) -> float:
    """The clipping norm of one unit's whole contribution, over all groups."""
    return math.hypot(*C)


def load_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rounds of a run, in order. Omits an incomplete last line."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return []
    lines = []
    texts = file.read_bytes().splitlines()
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            if not (isinstance(line, dict) and line.get("round") == number):
                raise ValueError
            lines.append(line)
        except (ValueError, RecursionError):
            if number == len(texts):
                break
            raise RunError(f"{file} is damaged in line {number}; restore it from a copy.") from None
    return lines


def load_run_json(folder: Path, name: str) -> dict[str, Any]:
    """One of the run's JSON files, as a dictionary."""
    file = folder / name
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}.")
    if not file.is_file():
        raise RunError(f"{folder} has no {name}: it is not a run's folder, or the run has not got that far.")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RunError(f"{file} is damaged: {error}.") from error
    if not isinstance(value, dict):
        raise RunError(f"{file} is damaged: it holds a {type(value).__name__}, not an object.")
    return value


def load_summary(folder: Path) -> dict[str, Any]:
    """summary.json of a run."""
    return load_run_json(Path(folder), "summary.json")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """The environment of a run: versions, machine, threads, time."""
    return {
        "date": current_utc_time(),
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": _describe_processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    }


def current_utc_time() -> str:
    """The time, UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def to_json_text(value: Any) -> str:
    """Indented JSON; infinities become the string "inf"."""
    return json.dumps(to_json_value(value), indent=2) + "\n"


def to_json_value(value: Any) -> Any:
    """The value with what JSON cannot hold replaced: infinities by "inf", NaN by null, tuples by lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(name): to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return value


def _describe_processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def write_file_atomically(file: Path, content: bytes) -> None:
    """Write a file atomically: under a temporary name first, then renamed."""
    part = file.with_name(file.name + ".part")
    try:
        with part.open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _lock_folder(path: Path) -> IO[str]:
    opened = (path / "lock").open("w")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        opened.close()
        raise RunError(f"{path} is in use by another process.") from error
    return opened
