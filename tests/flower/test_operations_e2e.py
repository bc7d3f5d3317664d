"""Real processes on loopback: checks, party.toml, metrics, health, status, key changes, a party that stalls."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")

from fulcrum.flower import certs, keys
from fulcrum.flower.flwr141 import find_free_port

pytestmark = [pytest.mark.flower, pytest.mark.slow]

CONFIG = """
method = "moo"
[data]
source = "public.npz"
[model]
name = "linear"
[train]
rounds = {rounds}
rate = 0.1
min_parties = 2
combine = "median"
[privacy]
sigma = 1.5
delta = 1e-4
"""


class Site:
    """A coordinator and three parties in one folder, each started as an operator would.

    rounds: more than a test takes on a busy machine; a run that ends has its parties say that nobody answers.
    """

    def __init__(self, folder: Path, rounds: int = 4000) -> None:
        self.folder, self.port = folder, find_free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        rng = np.random.default_rng(0)
        (folder / "config.toml").write_text(CONFIG.format(rounds=rounds))
        x = rng.normal(size=(30, 8)).astype("f4")
        np.savez(folder / "public.npz", x_test=x, y_test=np.arange(30) % 3, classes=3)
        certs.make_certificate_authority(folder / "certs", ["127.0.0.1"])
        (folder / "register").mkdir()
        self.metrics = {name: find_free_port() for name in ("serve", "a", "b", "c")}
        for name in ("a", "b", "c"):
            _, public = keys.make_key_pair(folder / name, name)
            shutil.copy(public, folder / "register")
            np.savez(folder / name / "d.npz", x=rng.normal(size=(60, 8)).astype("f4"), y=np.arange(60) % 3)
            self.run(
                "terms",
                "config.toml",
                "--party",
                name,
                "--classes",
                "3",
                "--budget",
                "1000",
                "--out",
                f"{name}/terms.toml",
            )
            (folder / name / "party.toml").write_text(
                f'data = "d.npz"\nserver = "127.0.0.1:{self.port}"\nkey = "{name}"\nledger = "ledger.sqlite"\n'
                f'ca = "../certs/ca.crt"\nterms = "terms.toml"\nlog = "party.jsonl"\nmetrics = {self.metrics[name]}\n'
            )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fulcrum", *words]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=120)

    def start(self, name: str, *words: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FULCRUM_KEY_FILE": str(self.folder / "record.key")}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "fulcrum", *words], cwd=self.folder, stdout=log, stderr=log, env=environment
            )

    @property
    def transport(self) -> list[str]:
        words = ["--certificate", "certs/server.crt", "--private-key", "certs/server.key", "--keys", "register"]
        return [*words, "--listen", f"127.0.0.1:{self.port}"]

    def get(self, name: str, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics[name]}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def wait_for(self, what, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            logs = {file.name: file.read_text()[-1500:] for file in self.folder.glob("*.log")}
            assert time.monotonic() < end, logs
            time.sleep(0.2)

    def rounds(self) -> int:
        path = self.folder / "run" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.is_file() else 0

    def said(self) -> str:
        path = self.folder / "run" / "parties.jsonl"
        return path.read_text() if path.is_file() else ""

    def state(self, party: str) -> str:
        with contextlib.suppress(OSError, ValueError):
            rows = json.loads((self.folder / "run" / "status.json").read_text())["parties"]
            return next(row["state"] for row in rows if row["party"] == party)
        return ""

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_an_operators_day(site):
    """From checks to a run that is watched: a party stops and returns, its key changes, another's is revoked."""
    before = site.run("serve", "config.toml", *site.transport, "--out", "run", "--check")
    assert before.returncode == 0, before.stdout + before.stderr
    alone = site.run("party", "a/party.toml", "--check")
    assert alone.returncode == 2
    assert "WRONG    coordinator" in alone.stdout, "nobody is there yet"

    (site.folder / "run").mkdir()
    site.start(
        "serve",
        *("serve", "config.toml", *site.transport, "--out", "run", "--deadline", "4", "--wait", "100"),
        *("--log", "coordinator.jsonl", "--metrics", str(site.metrics["serve"])),
    )
    site.wait_for(lambda: site.get("serve", "/readyz")[0] == 503)
    checked = site.run("party", "a/party.toml", "--check")
    assert "knows this party's key" in checked.stdout, checked.stdout
    assert checked.returncode == 0, checked.stdout
    for name in ("a", "b", "c"):
        site.start(name, "party", f"{name}/party.toml")
    site.wait_for(lambda: site.rounds() >= 3)
    assert site.get("serve", "/readyz")[0] == 200
    assert 'fulcrum_parties{state="online"} 3.0' in site.get("serve", "/metrics")[1]
    assert "fulcrum_party_connected 1.0" in site.get("a", "/metrics")[1]
    assert site.get("b", "/healthz")[0] == 200

    # A stalled party costs one deadline; the rounds go on without it, and it returns by answering.
    site.running["c"].send_signal(signal.SIGSTOP)
    site.wait_for(lambda: "it rests until it answers a greeting" in site.said())
    done = site.rounds()
    began = time.monotonic()
    site.wait_for(lambda: site.rounds() >= done + 8)
    assert time.monotonic() - began < 30, "not one deadline of 4 s for each of eight rounds"
    site.running["c"].send_signal(signal.SIGCONT)
    site.wait_for(lambda: "answers again" in site.said() or "is back" in site.said())
    site.wait_for(lambda: site.state("c") == "online")

    # A party's key changes while the coordinator runs.
    site.running["b"].terminate()
    site.running["b"].wait(timeout=30)
    assert site.run("keys", "rotate", "b/b").returncode == 0
    accepted = site.run("keys", "accept", "register", "b/b.rotation.json")
    assert accepted.returncode == 0, accepted.stderr
    site.start("b", "party", "b/party.toml")
    site.wait_for(lambda: site.state("b") == "online")

    # Another's is revoked: it is turned away and told so.
    assert site.run("keys", "revoke", "register", "c").returncode == 0
    site.wait_for(lambda: "revoked" in (site.folder / "c.log").read_text())
    site.wait_for(lambda: site.state("c") != "online")
    shown = site.run("status", "run")
    assert shown.returncode == 0
    assert "online" in shown.stdout
    site.wait_for(lambda: "revoked" in site.run("status", "c").stdout)

    events = [json.loads(line) for line in (site.folder / "coordinator.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "round" for line in events) >= site.rounds() - 2
    ends = [json.loads(line) for line in (site.folder / "a" / "party.jsonl").read_text().splitlines()]
    assert next(line["event"] for line in ends if line["event"] != "connection") == "hello"
