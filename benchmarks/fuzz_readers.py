"""Fuzzing of every reader: settings, data files, checkpoints, ledgers, messages, terms. One command:

    PYTHONPATH=src python benchmarks/fuzz_readers.py                     # 100,000 inputs, about ten minutes on one core
    PYTHONPATH=src python benchmarks/fuzz_readers.py --inputs 2000       # a short look at all of them
    PYTHONPATH=src python benchmarks/fuzz_readers.py --only ledger --inputs 5000

Inputs are mutations of right files, from seeds, by bytes and with their structure kept. They are read in worker
processes with limits on CPU seconds and memory. A reader may succeed, or raise the error that it documents. Anything
else is a finding: another exception, more than two CPU seconds, more than 1.5 GB, a process that dies, a file or
process or connection that the content brought about. Findings are printed and kept in results/fuzz.json, with the
input's number, by which it is made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

from fuzz_inputs import mutate_bytes  # noqa: E402

CPU_SECONDS = 2.0
WALL_SECONDS = 60.0
MEMORY_BYTES = 1_500 << 20
CHUNK = 500
FORBIDDEN = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "socket.connect")
CANARY = "import pathlib; pathlib.Path(__file__).with_name('canary-ran').touch()\ndef make(*a, **k): raise SystemExit\n"


def make_input(reader: Any, number: int, seed: int) -> bytes:
    """Input `number` of a reader. The first ones are the right files themselves."""
    if number < len(reader.seeds):
        return bytes(reader.seeds[number])
    draw = random.Random(f"{seed}/{reader.name}/{number}")
    chosen = draw.choice(reader.seeds)
    try:
        content: bytes = reader.mutate(chosen, draw, reader.seeds)
    except (ValueError, LookupError, sqlite3.Error, zipfile.BadZipFile):  # changed beyond its own structure
        content = mutate_bytes(chosen, draw, reader.seeds)
    return content


def read_one(reader: Any, content: bytes, folder: Path) -> str:
    """What came of an input: "read", "refused", or a finding in words."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        reader.read(content, folder)
    except reader.errors as error:
        words = str(error)
        # A refusal is one sentence; a message of thousands of characters repeats the input.
        return "refused" if len(words) < 2000 else f"a sentence of {len(words)} characters"
    except MemoryError:
        return "memory"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in place if "/fulcrum/" in frame.filename] or place
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        return f"{type(error).__name__} at {where}: {str(error)[:120]}"
    return "read"


def work(reader: Any, first: int, count: int, seed: int, folder: Path, progress: int) -> None:
    """In the worker: read inputs, and write (number, what came of it) to the pipe before and after each."""
    struck: list[str] = []
    sys.addaudithook(lambda event, _: struck.append(event) if event in FORBIDDEN else None)
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    canary = folder.parent / "canary-ran"
    for number in range(first, first + count):
        os.write(progress, f"{number}\n".encode())
        content = make_input(reader, number, seed)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # by default its signal ends the process, in C code too
        result = read_one(reader, content, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if struck or canary.exists():
            result = f"code: {struck[0] if struck else 'a module was imported'}"
            struck.clear()
            canary.unlink(missing_ok=True)
        os.write(progress, f"{number} {json.dumps(result)}\n".encode())


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def fuzz(reader: Any, first: int, count: int, seed: int, folder: Path, note: Callable[[int, str], None]) -> None:
    """Read inputs in workers; one that dies is a finding, and the next worker goes on after that input."""
    at, end = first, first + count
    while at < end:
        chunk = min(CHUNK, end - at)
        receive, send = os.pipe()
        child = os.fork()
        if not child:
            os.close(receive)
            try:
                work(reader, at, chunk, seed, folder, send)
            finally:
                os._exit(0)
        os.close(send)
        current, done = _follow(child, receive, note)
        _, status = os.waitpid(child, 0)
        if current is not None and not done:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            why = "hang" if number in (signal.SIGPROF, signal.SIGKILL) else f"died of signal {number}"
            note(current, why)
        at = (current + 1) if current is not None else at + chunk


def _follow(child: int, receive: int, note: Callable[[int, str], None]) -> tuple[int | None, bool]:
    """Read a worker's pipe until it ends: the last input that it began, and whether that was finished."""
    import select

    current: int | None = None
    done, rest, heard = True, b"", time.monotonic()
    while True:
        ready, _, _ = select.select([receive], [], [], 1.0)
        if not ready:
            if time.monotonic() - heard > WALL_SECONDS:
                os.kill(child, signal.SIGKILL)
            continue
        chunk = os.read(receive, 1 << 16)
        if not chunk:
            os.close(receive)
            return current, done
        heard = time.monotonic()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number, _, result = line.decode().partition(" ")
            current, done = int(number), bool(result)
            if done:
                note(current, json.loads(result))


def main(words: list[str] | None = None) -> int:
    """Read all inputs, print a line per reader, write the file; 1 where there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all, shared by the readers")
    parser.add_argument("--only", default="", help="readers whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input of each reader")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "fuzz.json")
    given = parser.parse_args(words)

    import fuzz_targets
    import torch

    from faults import read_commit

    torch.set_num_threads(1)
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=base) as made:
        home = Path(made)
        os.environ["FULCRUM_KEY_FILE"] = str(home / "record.key")
        (home / "fuzz_canary.py").write_text(CANARY)
        sys.path.insert(0, str(home))
        os.chdir(home)
        readers = [each for each in fuzz_targets.make_readers(home) if given.only in each.name]
        shares = sum(each.share for each in readers)
        rows, findings, began = [], [], time.monotonic()
        for reader in readers:
            count = max(len(reader.seeds) + 1, round(given.inputs * reader.share / shares))
            results: Counter[str] = Counter()

            def note(number: int, result: str, name: str = reader.name, results: Counter[str] = results) -> None:
                results[result if result in ("read", "refused") else "findings"] += 1
                if result not in ("read", "refused"):
                    findings.append({"reader": name, "input": number, "what": result})

            for number in range(len(reader.seeds)):  # right files are read, or the fuzzing would test nothing
                (home / "input").mkdir(exist_ok=True)
                try:
                    reader.read(reader.seeds[number], home / "input")
                except Exception as error:
                    raise SystemExit(f"{reader.name}: right file {number} was not read: {error}") from error
                shutil.rmtree(home / "input")
            since = time.monotonic()
            fuzz(reader, given.first, count, given.seed, home / "input", note)
            took = time.monotonic() - since
            rows.append({"reader": reader.name, "inputs": count, **results, "seconds": round(took, 1)})
            print(
                f"{reader.name:28}{count:8} inputs{results['read']:8} read{results['refused']:8} refused"
                f"{results['findings']:6} findings{took:8.1f} s",
                flush=True,
            )
        os.chdir(ROOT)
    for what, times in Counter(f"{each['reader']}: {each['what']}" for each in findings).most_common(60):
        print(f"{times:6} x {what}")
    total = sum(row["inputs"] for row in rows)
    content = {
        "inputs": total,
        "findings": len(findings),
        "seconds": round(time.monotonic() - began, 1),
        "seed": given.seed,
        "commit": read_commit(),
        "command": f"PYTHONPATH=src python benchmarks/fuzz_readers.py --inputs {given.inputs} --seed {given.seed}",
        "readers": rows,
        "found": findings[:500],
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
