"""What the soak is made of: a relay that cuts parties off, cheap processes, a book of memory, ledgers compared."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulcrum.privacy.ledger.rows import LedgerEntry


class Relay:
    """One port per party on loopback, each leading to the coordinator. A party can be cut off without being touched.

    "drop": its connections are closed, and new ones at once. "blackhole": nothing is closed, and nothing passes.
    """

    def __init__(self, target: int, parties: int) -> None:
        self.target, self.ports = target, [0] * parties
        self._mode = [""] * parties
        self._open: list[set[asyncio.StreamWriter]] = [set() for _ in range(parties)]
        self._tasks: set[Any] = set()  # the loop itself holds tasks weakly
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="relay", daemon=True).start()
        self._ready.wait()

    def set_mode(self, party: int, mode: str) -> None:
        """ "" passes everything; "drop" and "blackhole" cut the party off."""
        self._loop.call_soon_threadsafe(self._change, party, mode)

    def _change(self, party: int, mode: str) -> None:
        # What a blackhole swallowed cannot come again: its connections end with it, as a router's table does.
        if mode == "drop" or self._mode[party] == "blackhole":
            for writer in list(self._open[party]):
                writer.transport.abort()
        self._mode[party] = mode

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._ready.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        for k in range(len(self.ports)):
            server = await asyncio.start_server(lambda r, w, k=k: self._serve(k, r, w), "127.0.0.1", 0)  # type: ignore[misc]
            self.ports[k] = server.sockets[0].getsockname()[1]

    async def _serve(self, k: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode[k] == "drop":
            writer.transport.abort()
            return
        self._open[k].add(writer)
        self._tasks.add(asyncio.current_task())
        back: asyncio.StreamWriter | None = None
        try:
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection("127.0.0.1", self.target)
                self._open[k].add(back)
                await asyncio.gather(self._pump(k, reader, back), self._pump(k, there, writer))
        finally:
            for each in (writer, back):
                if each is not None:
                    self._open[k].discard(each)
                    each.transport.abort()
            self._tasks.discard(asyncio.current_task())

    async def _pump(self, k: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                if self._mode[k] == "blackhole":
                    continue  # swallowed; the connection is aborted when the cut ends
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()


# --- processes ----------------------------------------------------------------------------------


def run_launcher() -> None:
    """Import Fulcrum once, then fork a process per line of stdin {"words", "cwd", "log"}; prints {"pid"} and {"ended"}.

    A forked party is a process of its own: it is killed, stopped and measured like any other. It shares the imported
    code's memory and starts in a tenth of a second.
    """
    import select

    import torch

    import fulcrum.cli
    import fulcrum.flower.party
    import fulcrum.flower.run
    import fulcrum.runs

    with contextlib.suppress(ImportError):  # what a party imports late
        import dp_accounting  # noqa: F401
        import sklearn.datasets  # noqa: F401

        import fulcrum.cli.party
        import fulcrum.engines.parallel
        import fulcrum.flower.flwr141
        import fulcrum.privacy.statement  # noqa: F401
    torch.set_num_threads(1)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    waiting = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.1)
        if ready:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                os._exit(0)
            waiting += chunk
        while b"\n" in waiting:
            line, _, waiting = waiting.partition(b"\n")
            print(json.dumps({"pid": _fork_fulcrum(json.loads(line))}), flush=True)
        with contextlib.suppress(ChildProcessError):
            while (done := os.waitpid(-1, os.WNOHANG))[0]:
                print(json.dumps({"ended": done[0], "code": done[1]}), flush=True)


def _fork_fulcrum(order: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.chdir(order["cwd"])
        log = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        sys.argv = ["fulcrum", *order["words"]]
        from fulcrum.cli import main

        code = main(order["words"])
        sys.stdout.flush()
    finally:
        os._exit(code)


class Launcher:
    """The other end of `run_launcher`."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.ended: dict[int, int] = {}
        self._answers: list[dict[str, Any]] = []
        self._got = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self._take("ready", 120)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = json.loads(line)
            with self._got:
                if "ended" in found:
                    self.ended[found["ended"]] = found["code"]
                else:
                    self._answers.append(found)
                self._got.notify_all()

    def _take(self, name: str, seconds: float) -> int:
        with self._got:
            if not self._got.wait_for(lambda: self._answers, seconds):
                raise SystemExit("the launcher does not answer")
            return int(self._answers.pop(0)[name])

    def start(self, words: list[str], cwd: Path, log: Path) -> int:
        """Start `fulcrum WORDS` in a process of its own; returns its id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"words": words, "cwd": str(cwd), "log": str(log)}) + "\n")
        self._process.stdin.flush()
        pid = self._take("pid", 60)
        with self._got:
            self.ended.pop(pid, None)  # an earlier process of the same number
        return pid

    def is_running(self, pid: int) -> bool:
        """Whether the process has not ended."""
        return pid not in self.ended

    def close(self) -> None:
        """End the launcher; its children must have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        if self._process.poll() is None:
            self._process.kill()


def send_signal(pid: int, number: signal.Signals) -> None:
    """A signal to a process, unless it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# --- memory -------------------------------------------------------------------------------------


@dataclass
class MemoryBook:
    """Memory (resident set, MB) of processes over time, and how much it grew while each lived."""

    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    warm_seconds: float = 10.0

    def take(self, name: str, pid: int) -> None:
        """One sample of a process; name: whose, one per incarnation."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6
            self.samples.setdefault(name, []).append((time.monotonic(), resident))

    def list_growth(self) -> dict[str, float]:
        """MB by which each grew: median of its last quarter less that of its second, after it had warmed up."""
        found = {}
        for name, samples in self.samples.items():
            warm = [mb for at, mb in samples if at - samples[0][0] > self.warm_seconds]
            quarter = len(warm) // 4
            if quarter >= 3:
                found[name] = statistics.median(warm[-quarter:]) - statistics.median(warm[quarter : 2 * quarter])
        return found

    def find_peak(self, kind: str) -> float:
        """The most memory of any process whose name begins so."""
        return max((mb for name, all in self.samples.items() if name.startswith(kind) for _, mb in all), default=0.0)


def read_last_checkpoint(run: Path) -> int:
    """How many rounds the newest checkpoint of a run's folder has behind it; 0 where there is none."""
    files = sorted((run / "checkpoints").glob("round-*.safetensors"))
    return int(files[-1].stem.removeprefix("round-")) if files else 0


def compare_ledgers(
    own: Mapping[int, LedgerEntry], kept: Mapping[int, LedgerEntry], taken: Set[int], repeated: Set[int]
) -> list[str]:
    """What is wrong between a party's ledger rows, the coordinator's rows for it, and the record of its rounds.

    own, kept: rows by round (from 0). taken: the rounds whose record names the party. repeated: the rounds that a
    killed coordinator may have settled and, resumed, played again. Such a round is paid with every party that
    answered the first time; one that is away the second time is not on its record.
    """
    settled = {t for t, row in kept.items() if row.digest is not None}
    found = [
        f"is on the record of round {t + 1}, which the coordinator did not settle" for t in sorted(taken - settled)
    ]
    for t in sorted(settled - taken - repeated):
        found.append(f"is not on the record of round {t + 1}, which the coordinator settled and nobody interrupted")
    for t in sorted(settled | taken):
        if t not in own or own[t].digest is None:
            found.append(f"did not pay for round {t + 1}")
        elif t in kept and (own[t].digest != kept[t].digest or own[t].events != kept[t].events):
            found.append(f"paid for something else in round {t + 1}")
    return found


def wait_until(what: Callable[[], Any], seconds: float, pause: float = 0.1) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(pause)
    return bool(what())
