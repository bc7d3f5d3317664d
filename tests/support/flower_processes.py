"""Three parties and a coordinator as real processes on loopback, with TLS and node keys."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from fulcrum.data import load, split
from fulcrum.flower import certs, keys
from fulcrum.flower.flwr141 import find_free_port
from fulcrum.runs import folder as record
from fulcrum.settings.schema import Data

PARTIES = ("a", "b", "c")
ROUNDS = 20
CONFIG = f"""
method = "moo"
[data]
source = "public.npz"
[model]
name = "linear"
[train]
rounds = {ROUNDS}
rate = 0.05
min_parties = 2
[privacy]
sigma = 1.5
delta = 1e-4
"""


class Federation:
    """A folder with everything three hospitals and a coordinator need, and the processes in it."""

    def __init__(self, folder: Path, config: str = CONFIG) -> None:
        self.folder, self.port = folder, find_free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        data = load("digits")
        parts = split(data, Data(source="digits", parties=3, partition="iid"), 0)
        for k, name in enumerate(PARTIES):
            rows = parts.indices(k)
            np.savez(folder / f"{name}.npz", x=data.x[rows], y=data.y[rows], classes=data.classes)
        np.savez(folder / "public.npz", x_test=data.x_test, y_test=data.y_test, classes=data.classes)
        (folder / "config.toml").write_text(config)
        certs.make_certificate_authority(folder / "certs", ["127.0.0.1"])
        (folder / "register").mkdir()
        for name in PARTIES:
            _, public = keys.make_key_pair(folder / name, name)
            shutil.copy(public, folder / "register")
            self.command("terms", "config.toml", "--party", name, "--classes", "10", "--out", f"{name}/terms.toml")

    def command(self, *words: str) -> None:
        subprocess.run([sys.executable, "-m", "fulcrum", *words], cwd=self.folder, check=True, capture_output=True)

    def start(self, name: str, *words: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "fulcrum", *words], cwd=self.folder, stdout=log, stderr=log, env=environment
            )

    def party(self, name: str, home: str = "", data: str = "") -> None:
        home = home or name
        words = ["--data", data or f"{name}.npz", "--key", f"{home}/{name}", "--ledger", f"{home}/ledger.sqlite"]
        words += ["--server", f"127.0.0.1:{self.port}", "--ca", "certs/ca.crt", "--terms", f"{home}/terms.toml"]
        self.start(home, "party", *words, "--until-done")

    @property
    def transport(self) -> list[str]:
        """Options of `fulcrum serve`: certificate, keys, address, waits."""
        words = ["--certificate", "certs/server.crt", "--private-key", "certs/server.key", "--keys", "register"]
        return [*words, "--listen", f"127.0.0.1:{self.port}", "--deadline", "30", "--wait", "200"]

    def serve(self, *words: str) -> None:
        self.start("serve", "serve", *words)

    def kill(self, name: str) -> None:
        """kill -9, without a chance to say goodbye."""
        self.running[name].kill()
        self.running[name].wait()

    def rounds(self) -> list[dict]:
        return record.load_metrics(self.folder / "run")

    def wait_for(self, what, seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            logs = {file.name: file.read_text()[-1500:] for file in self.folder.glob("*.log")}
            assert time.monotonic() < end, logs
            time.sleep(0.1)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def children(self) -> list[str]:
        """Processes that were started in this folder and still run: their command lines."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = f"{file.read_bytes().replace(bytes(1), b' ').decode()} in {(file.parent / 'cwd').readlink()}"
                if "fulcrum" in words and str(self.folder) in words:
                    found.append(words)
        return found

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            if process.poll() is None:
                process.kill()
