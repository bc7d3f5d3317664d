"""A stranger attacks the coordinator's port while rounds go on: seconds per round, beside the same attacker elsewhere.

    python benchmarks/attacked_port.py [--seconds 60] [--parties 3] [--out results/attacked-port.json]

Real processes on loopback with TLS: a coordinator, parties, and one attacker process. For `--seconds` in all the
attacker is aimed at the coordinator, for as long at an idle port (a listener that throws everything away), in turns of
a few seconds, so that whatever else the machine does falls on both. The attacker repeats, as fast as one process can:
1,100 silent connections, heads that never end, garbage, half-open handshakes, and 20 unfinished bodies of 60 MB by
somebody without a key. The file says rounds and seconds per round of both, their ratio (at most 1.2 is asked for),
how many answers of parties were missing, and the coordinator's memory and open files before and at the worst.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fulcrum.data import load, split
from fulcrum.flower import certs, keys
from fulcrum.flower.flwr141 import find_free_port
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.terms import terms_to_toml
from fulcrum.runs import folder as record
from fulcrum.settings import files as settings_file
from fulcrum.settings.schema import Data

CONFIG = """
method = "moo"
[data]
source = "public.npz"
[model]
name = "linear"
[train]
rounds = 100000
rate = 0.05
min_parties = 1
[privacy]
sigma = 1000.0
delta = 1e-4
[run]
evaluate_every = 1000
"""
SILENT = 1100
BODIES, BODY_BYTES = 20, 60_000_000


# --- the attacker -------------------------------------------------------------------------------


def attack(port: Any, stop: Any, attempts: Any, ready: Any) -> None:
    """Attack 127.0.0.1:`port.value` (0: rest) until `stop` is set."""
    ready.set()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    draw = random.Random(0)
    held: list[socket.socket] = []
    aimed = 0
    while not stop.is_set():
        if port.value != aimed:
            for line in held:
                line.close()
            held, aimed = [], port.value
        if not aimed:
            time.sleep(0.02)
            continue
        kind = draw.choice((silent, silent, slow_head, garbage, half_open, huge_body))
        with contextlib.suppress(OSError, ssl.SSLError):
            held.extend(kind(aimed, draw))
        attempts.value += 1
        while len(held) > SILENT:  # the oldest first: the coordinator has dropped it long ago
            held.pop(0).close()


def _connect(port: int) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port), timeout=0.5)
    line.setblocking(False)
    return line


def silent(port: int, draw: random.Random) -> list[socket.socket]:
    """Connections that say nothing."""
    return [_connect(port) for _ in range(50)]


def slow_head(port: int, draw: random.Random) -> list[socket.socket]:
    """A request's head that never ends, inside TLS."""
    line = _shake(port)
    if line is not None:
        line.send(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nx: " + b"y" * draw.randrange(100))
    return [line] if line is not None else []


def garbage(port: int, draw: random.Random) -> list[socket.socket]:
    """Bytes that mean nothing, some of which look like a handshake."""
    line = _connect(port)
    line.send(draw.choice((b"\x16\x03\x01\x02\x00", b"", b"GET / HTTP/1.1\r\n\r\n")) + draw.randbytes(500))
    return [line]


def half_open(port: int, draw: random.Random) -> list[socket.socket]:
    """The first bytes of a handshake, and nothing more."""
    line = _connect(port)
    line.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    return [line]


def huge_body(port: int, draw: random.Random) -> list[socket.socket]:
    """Unfinished bodies of 60 MB, by somebody without a key."""
    lines = []
    for _ in range(BODIES // 10):
        line = _shake(port)
        if line is not None:
            with contextlib.suppress(OSError, ssl.SSLError):
                line.send(f"POST /v1/fleet/push-object HTTP/1.1\r\ncontent-length: {BODY_BYTES}\r\n\r\n".encode())
                for _ in range(50):
                    line.send(bytes(65536))
            lines.append(line)
    return lines


def _shake(port: int) -> Any:
    """A TLS connection that trusts anybody; None where the other side does not want to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    plain = socket.create_connection(("127.0.0.1", port), timeout=0.3)
    try:
        line = context.wrap_socket(plain)
    except (OSError, ssl.SSLError):
        plain.close()
        return None
    line.setblocking(False)
    return line


def idle_port(port: int) -> None:
    """A listener that takes every connection, throws away what comes and keeps the last thousand open."""
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    held: list[socket.socket] = []
    while True:
        line, _ = listener.accept()
        line.setblocking(False)
        held.append(line)
        with contextlib.suppress(OSError):
            line.recv(65536)
        if len(held) > 500:
            held.pop(0).close()


# --- the federation -----------------------------------------------------------------------------


@contextlib.contextmanager
def federation(folder: Path, parties: int, port: int) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Coordinator and parties as processes in `folder`."""
    data = load("digits")
    parts = split(data, Data(source="digits", parties=parties, partition="iid"), 0)
    np.savez(folder / "public.npz", x_test=data.x_test, y_test=data.y_test, classes=data.classes)
    (folder / "config.toml").write_text(CONFIG)
    certs.make_certificate_authority(folder / "certs", ["127.0.0.1"])
    (folder / "register").mkdir()
    settings = settings_file.read_settings(folder / "config.toml", {"data.source": str(folder / "public.npz")})
    running: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, *words: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / f"{name}.log").open("ab") as log:
            running[name] = subprocess.Popen(
                [sys.executable, "-m", "fulcrum", *words], cwd=folder, stdout=log, stderr=log, env=environment
            )

    words = ["--certificate", "certs/server.crt", "--private-key", "certs/server.key", "--keys", "register"]
    for k in range(parties):
        name = f"p{k}"
        _, public = keys.make_key_pair(folder / name, name)
        shutil.copy(public, folder / "register")
        rows = parts.indices(k)
        np.savez(folder / f"{name}.npz", x=data.x[rows], y=data.y[rows], classes=data.classes)
        (folder / name / "terms.toml").write_text(
            terms_to_toml(accept_proposal(name, make_proposal(settings, data.classes), 100.0))
        )
    start("serve", "serve", "config.toml", *words, "--listen", f"127.0.0.1:{port}", "--out", "run")
    for k in range(parties):
        name = f"p{k}"
        own = ["--data", f"{name}.npz", "--key", f"{name}/{name}", "--ledger", f"{name}/ledger.sqlite"]
        start(
            name,
            *("party", *own, "--terms", f"{name}/terms.toml", "--server", f"127.0.0.1:{port}", "--ca", "certs/ca.crt"),
        )
    try:
        yield running
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
            process.kill()


def count_rounds(folder: Path) -> int:
    try:
        return len(record.load_metrics(folder / "run"))
    except Exception:  # the run has no folder yet
        return 0


def look(pid: int) -> tuple[float, int]:
    """Megabytes of memory and open files of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def measure(folder: Path, seconds: float, parties: int, turn: float) -> dict[str, Any]:
    port, idle = find_free_port(), find_free_port()
    context = multiprocessing.get_context("spawn")
    aim, attempts = context.Value("i", 0), context.Value("q", 0)
    stop, ready = context.Event(), context.Event()
    helpers = [
        context.Process(target=attack, args=(aim, stop, attempts, ready), daemon=True),
        context.Process(target=idle_port, args=(idle,), daemon=True),
    ]
    with federation(folder, parties, port) as running:
        end = time.monotonic() + 180
        while count_rounds(folder) < 5:
            if time.monotonic() > end or running["serve"].poll() is not None:
                raise SystemExit("\n".join(path.read_text()[-1500:] for path in sorted(folder.glob("*.log"))))
            time.sleep(0.2)
        for helper in helpers:
            helper.start()
        if not ready.wait(120):
            raise SystemExit("the attacker did not start")
        time.sleep(2.0)
        before = look(running["serve"].pid)
        worst = before
        rounds, spent = {port: 0, idle: 0}, {port: 0.0, idle: 0.0}
        first = count_rounds(folder)
        while min(spent.values()) < seconds:
            for place in (idle, port):
                aim.value = place
                time.sleep(0.5)
                began, at = time.monotonic(), count_rounds(folder)
                while time.monotonic() - began < turn:
                    time.sleep(0.1)
                    now = look(running["serve"].pid)
                    worst = (max(worst[0], now[0]), max(worst[1], now[1]))
                rounds[place] += count_rounds(folder) - at
                spent[place] += time.monotonic() - began
                if running["serve"].poll() is not None:
                    raise SystemExit("the coordinator has ended: " + (folder / "serve.log").read_text()[-2000:])
        stop.set()
        lines = record.load_metrics(folder / "run")[first:]
        missing = sum(parties - len(line["participants"]) for line in lines)
        alive = all(process.poll() is None for process in running.values())
    for helper in helpers:
        helper.terminate()
    per_round = {place: spent[place] / max(1, rounds[place]) for place in (port, idle)}
    return {
        "parties": parties,
        "seconds_attacked": spent[port],
        "rounds_attacked": rounds[port],
        "rounds_beside": rounds[idle],
        "seconds_per_round_attacked": per_round[port],
        "seconds_per_round_beside": per_round[idle],
        "ratio": per_round[port] / per_round[idle],
        "attempts": attempts.value,
        "missing_answers": missing,
        "all_processes_alive": alive,
        "coordinator_mb_before": before[0],
        "coordinator_mb_worst": worst[0],
        "coordinator_files_worst": worst[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--turn", type=float, default=5.0)
    parser.add_argument("--parties", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/attacked-port.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = measure(Path(place), given.seconds, given.parties, given.turn)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    found |= {"load_average": os.getloadavg()[0], "commit": commit, "command": " ".join(["python", *sys.argv])}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
