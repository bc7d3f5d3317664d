"""A soak: many real parties over TLS on loopback, killed, stopped, cut off and started at random; see what is lost.

    PYTHONPATH=src .venv-flower/bin/python benchmarks/soak.py                           # 30 parties, 500 rounds
    PYTHONPATH=src .venv-flower/bin/python benchmarks/soak.py --parties 4 --rounds 60 --kills 2 --deadline 5

Every party is a process of its own with its key, ledger, terms and data, behind a port of a relay that can cut it off.
The coordinator is `fulcrum serve`; it is killed with kill -9 and resumed. Writes results/soak.json and, line by line,
results/soak.log.gz. A party is absent while rounds go on without it; its absence counts from the end of its cause: the
moment when its process is started or continued, its connection restored, or the coordinator started again.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

import soak_parts as parts  # noqa: E402

CONFIG = """
method = "moo"
[data]
source = "public.npz"
[model]
name = "linear"
[train]
rounds = {rounds}
rate = 0.2
min_parties = {least}
[privacy]
sigma = 3.0
delta = 1e-4
[run]
evaluate_every = 10
"""
CAUSES = ("kill", "stop", "drop", "blackhole", "leave")
"""What happens to a party: kill -9 and a start at once, SIGSTOP for a while, two kinds of cut, gone for a while."""


@dataclass
class Party:
    """One party and what happens to it. cause: what keeps it away now. free_since: when its last cause ended."""

    name: str
    number: int
    pid: int = 0
    births: int = 0
    cause: str = ""
    until: float = 0.0
    free_since: float = 0.0
    last_seen: float = 0.0
    last_cause: str = "start"
    rounds_lived: int = 0
    longest: float = 0.0


@dataclass
class Soak:
    """A federation under faults."""

    given: argparse.Namespace
    home: Path
    log_file: Any
    draw: random.Random
    relay: parts.Relay = field(init=False)
    launcher: parts.Launcher = field(init=False)
    parties: list[Party] = field(default_factory=list)
    memory: parts.MemoryBook = field(default_factory=parts.MemoryBook)
    counts: Counter[str] = field(default_factory=Counter)
    absences: list[tuple[float, str, str]] = field(default_factory=list)  # seconds, party, cause before it
    rounds_seen: int = 0
    round_times: list[float] = field(default_factory=list)
    serve: subprocess.Popen[bytes] | None = None
    serve_births: int = 0
    serve_rounds: int = 0
    serve_since: float = 0.0
    repeated: set[int] = field(default_factory=set)  # rounds (from 0) that a resumed coordinator may play again
    began: float = field(default_factory=time.monotonic)

    # --- a place for it ---------------------------------------------------------------------------

    def prepare(self) -> None:
        """Data, keys, certificates, terms; the launcher and the relay."""
        import numpy as np

        from fulcrum.flower import certs, keys
        from fulcrum.flower.flwr141 import find_free_port
        from fulcrum.flower.proposals import accept_proposal, make_proposal
        from fulcrum.flower.terms import terms_to_toml
        from fulcrum.settings import files as settings_file

        count, numbers = self.given.parties, np.random.default_rng(self.given.seed)
        centres = 2 * numbers.normal(size=(3, 6))

        def records(n: int) -> tuple[Any, Any]:
            y = np.arange(n) % 3
            return (centres[y] + numbers.normal(size=(n, 6))).astype(np.float32), y

        x, y = records(90)
        np.savez(self.home / "public.npz", x_test=x, y_test=y, classes=3)
        least = max(1, count // 2)
        (self.home / "config.toml").write_text(CONFIG.format(rounds=self.given.rounds, least=least))
        settings = settings_file.read_settings(self.home / "config.toml")
        proposal = make_proposal(settings, 3)
        certs.make_certificate_authority(self.home / "certs", ["127.0.0.1"])
        (self.home / "register").mkdir()
        for k in range(count):
            name = f"p{k:02d}"
            _, public = keys.make_key_pair(self.home / name, name)
            shutil.copy(public, self.home / "register")
            x, y = records(40)
            np.savez(self.home / name / "data.npz", x=x, y=y, classes=3)
            (self.home / name / "terms.toml").write_text(terms_to_toml(accept_proposal(name, proposal)))
            self.parties.append(Party(name, k))
        self.port = find_free_port()
        self.relay = parts.Relay(self.port, count)
        self.launcher = parts.Launcher([sys.executable, __file__, "--launcher"])

    def say(self, words: str) -> None:
        """One line of the log."""
        self.log_file.write(f"{time.monotonic() - self.began:9.2f}  {words}\n")

    # --- processes --------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """`fulcrum serve`, new or resumed."""
        first = not (self.home / "run" / "run.json").is_file()
        words = ["--certificate", "certs/server.crt", "--private-key", "certs/server.key", "--keys", "register"]
        words += ["--listen", f"127.0.0.1:{self.port}", "--deadline", f"{self.given.deadline:g}", "--wait", "300"]
        words += ["--quorum", "0.8", "--grace", "2", "--max-rest", "8"]
        if first:  # killed before its first round: nothing was released
            shutil.rmtree(self.home / "run", ignore_errors=True)
        command = ["config.toml", "--out", "run", *words] if first else ["--resume", "run"]
        # A coordinator that dies between the ledger's row and the checkpoint asks for that round again.
        if not first:
            self.repeated.add(parts.read_last_checkpoint(self.home / "run"))
        with (self.home / "serve.log").open("ab") as log:
            self.serve = subprocess.Popen(
                [sys.executable, "-m", "fulcrum", "serve", *command, "--quiet"],
                cwd=self.home,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.serve_births += 1
        self.serve_rounds = 0
        self.serve_since = time.monotonic()
        self.say(f"coordinator started ({'new' if first else 'resumed'})")

    def start_party(self, party: Party) -> None:
        """`fulcrum party`."""
        home = party.name
        words = ["party", "--data", f"{home}/data.npz", "--key", f"{home}/{party.name}", "--until-done"]
        words += ["--ledger", f"{home}/ledger.sqlite", "--ca", "certs/ca.crt", "--terms", f"{home}/terms.toml"]
        words += ["--server", f"127.0.0.1:{self.relay.ports[party.number]}"]
        party.pid = self.launcher.start(words, self.home, self.home / home / "party.log")
        party.births += 1
        party.rounds_lived = 0
        party.free_since = time.monotonic()
        self.say(f"{party.name} started")

    # --- causes -----------------------------------------------------------------------------------

    def strike(self, party: Party, cause: str) -> None:
        """Something happens to a party."""
        party.cause = party.last_cause = cause
        seconds = self.draw.uniform(1, self.given.longest_cause)
        party.until = time.monotonic() + (0 if cause == "kill" else seconds)
        self.counts[cause] += 1
        self.say(f"{party.name} {cause}" + ("" if cause == "kill" else f" for {seconds:.1f} s"))
        if cause in ("kill", "leave"):
            parts.send_signal(party.pid, signal.SIGKILL)
        elif cause == "stop":
            parts.send_signal(party.pid, signal.SIGSTOP)
        else:
            self.relay.set_mode(party.number, cause)

    def release(self, party: Party) -> None:
        """The cause ends."""
        if party.cause in ("kill", "leave", "late"):
            if party.births and not parts.wait_until(lambda: not self.launcher.is_running(party.pid), 5):
                self.say(f"{party.name} is still there after kill -9")
            self.start_party(party)
        elif party.cause == "stop":
            parts.send_signal(party.pid, signal.SIGCONT)
        else:
            self.relay.set_mode(party.number, "")
        self.say(f"{party.name} {party.cause} ends")
        party.cause, party.free_since = "", time.monotonic()

    def kill_coordinator(self) -> None:
        """kill -9, and a new one after a moment."""
        assert self.serve is not None
        self.serve.kill()
        self.serve.wait()
        self.counts["coordinator"] += 1
        self.say(f"coordinator killed after round {self.rounds_seen}")
        time.sleep(self.draw.uniform(0, 3))
        self.start_coordinator()

    # --- what happens -----------------------------------------------------------------------------

    def read_rounds(self) -> None:
        """New lines of metrics.jsonl: who took part, and who did not although nothing kept them."""
        file = self.home / "run" / "metrics.jsonl"
        if not file.is_file():
            return
        content = file.read_text()
        whole = content[: content.rfind("\n") + 1].splitlines()
        for text in whole[self.rounds_seen :]:
            line, now = json.loads(text), time.monotonic()
            self.rounds_seen = line["round"]
            self.round_times.append(now)
            self.serve_rounds += 1
            there = set(line["participants"])
            self.say(f"round {line['round']}: {len(there)} of {len(self.parties)}, {line['seconds']:.2f} s")
            for party in self.parties:
                if party.number in there:
                    self.note_absence(party, now)
                    party.last_seen = now
                    party.rounds_lived += 1

    def note_absence(self, party: Party, now: float) -> None:
        """How long rounds have gone on without a party that nothing kept away."""
        if party.cause or not self.round_times:
            return
        since = max(party.last_seen or self.round_times[0], party.free_since, self.serve_since)
        if now - since > 5 and self.rounds_seen:
            self.absences.append((now - since, party.name, party.last_cause))
        party.longest = max(party.longest, now - since)

    def step(self) -> None:
        """Once every fifth of a second."""
        now = time.monotonic()
        self.read_rounds()
        if self.serve is None or self.serve.poll() is not None:
            if self.serve is not None and self.serve.returncode:
                self.counts["coordinator_failures"] += 1
                self.say(f"coordinator ended by itself with {self.serve.returncode}")
                self.start_coordinator()
            return
        progress = self.rounds_seen / self.given.rounds
        due = int(progress * (self.given.kills + 0.5)) if self.rounds_seen else 0
        if self.counts["coordinator"] < min(due, self.given.kills) and self.draw.random() < 0.2:
            self.kill_coordinator()
        for party in self.parties:
            if party.cause and now >= party.until:
                self.release(party)
            elif not party.cause and party.births and self.launcher.ended.get(party.pid, 0):
                self.counts["party_failures"] += 1
                self.say(f"{party.name} ended by itself with {self.launcher.ended[party.pid]}")
                self.start_party(party)
        away = sum(bool(party.cause) for party in self.parties)
        free = [party for party in self.parties if not party.cause and party.last_seen > party.free_since]
        struck = sum(self.counts[cause] for cause in CAUSES)
        if free and struck < progress * self.given.causes and away < max(1, len(self.parties) // 6):
            self.strike(self.draw.choice(free), CAUSES[struck % len(CAUSES)])

    def run(self) -> None:
        """From the start to the end of the run."""
        self.start_coordinator()
        late = set(self.draw.sample(range(len(self.parties)), len(self.parties) // 10))
        for party in self.parties:
            if party.number in late:
                party.cause, party.last_cause = "late", "late"
                party.until = time.monotonic() + self.draw.uniform(5, 60)
                self.counts["late"] += 1
            else:
                self.start_party(party)
        sampled = 0.0
        end = self.began + 60 * self.given.minutes
        while not (self.serve is not None and self.serve.poll() == 0):
            self.step()
            if time.monotonic() > end:
                self.say("out of time")
                break
            if time.monotonic() - sampled > 2:
                sampled = time.monotonic()
                assert self.serve is not None
                # From the third round on: what a process loads for its first rounds is no growth.
                if self.serve_rounds > 2:
                    self.memory.take(f"coordinator {self.serve_births}", self.serve.pid)
                for party in self.parties:
                    if party.rounds_lived > 2 and self.launcher.is_running(party.pid):
                        self.memory.take(f"{party.name} {party.births}", party.pid)
            time.sleep(0.2)
        self.read_rounds()
        for party in self.parties:
            self.note_absence(party, time.monotonic())
            if party.cause and party.cause != "late":
                self.release(party)
        parts.wait_until(lambda: not any(self.launcher.is_running(p.pid) for p in self.parties if p.pid), 60)

    def close(self) -> None:
        """End whatever is left."""
        if self.serve is not None and self.serve.poll() is None:
            self.serve.kill()
            self.serve.wait()
        for number in (signal.SIGCONT, signal.SIGTERM):
            for party in self.parties:
                if party.pid and self.launcher.is_running(party.pid):
                    parts.send_signal(party.pid, number)
        if not parts.wait_until(lambda: not any(self.launcher.is_running(p.pid) for p in self.parties if p.pid), 10):
            for party in self.parties:
                if party.pid and self.launcher.is_running(party.pid):
                    parts.send_signal(party.pid, signal.SIGKILL)
            parts.wait_until(lambda: not any(self.launcher.is_running(p.pid) for p in self.parties if p.pid), 5)
        self.launcher.close()

    # --- afterwards -------------------------------------------------------------------------------

    def find_ledger_errors(self) -> list[str]:
        """Every row of every ledger against what the coordinator has on record."""
        from fulcrum.privacy.ledger import Ledger

        found: list[str] = []
        run = json.loads((self.home / "run" / "run.json").read_text())
        order = {entry["name"]: k for k, entry in enumerate(run["flower"]["parties"])}
        lines = [json.loads(text) for text in (self.home / "run" / "metrics.jsonl").read_text().splitlines()]
        if [line["round"] for line in lines] != list(range(1, self.given.rounds + 1)):
            found.append(f"the run has {len(lines)} lines for {self.given.rounds} rounds")
        with Ledger.open(self.home / "run" / "ledger.sqlite") as mirror:
            for party in self.parties:
                name, k = party.name, order.get(party.name)
                file = self.home / name / "ledger.sqlite"
                if k is None or not file.is_file():
                    found.append(f"{name} never joined")
                    continue
                with Ledger.open(file) as ledger:
                    rows = ledger.entries(name) if name in ledger.accounts() else []
                    spent, budget = (ledger.epsilon(name), ledger.accounts()[name].budget) if rows else (0.0, None)
                own = {row.round: row for row in rows}
                if len(own) != len(rows) or any(row.attempt for row in rows):
                    found.append(f"{name} paid a round twice")
                if any(row.run != run["id"] for row in rows):
                    found.append(f"{name} paid for a run that nobody asked for")
                if budget is not None and spent > budget:
                    found.append(f"{name} spent {spent} of {budget}")
                kept = {row.round: row for row in mirror.entries(name)} if name in mirror.accounts() else {}
                taken = {line["round"] - 1 for line in lines if k in line["participants"]}
                found += [f"{name} {error}" for error in parts.compare_ledgers(own, kept, taken, self.repeated)]
        return found

    def describe(self) -> dict[str, Any]:
        """The content of results/soak.json."""
        from faults import read_commit

        errors = self.find_ledger_errors()
        for error in errors:
            self.say(f"ledger: {error}")
        growth = self.memory.list_growth()
        seconds = self.round_times[-1] - self.round_times[0] if len(self.round_times) > 1 else 0.0
        worst = sorted(self.absences, reverse=True)[:10]
        return {
            "parties": self.given.parties,
            "rounds": self.rounds_seen,
            "party_kills": self.counts["kill"] + self.counts["leave"],
            "coordinator_kills": self.counts["coordinator"],
            "longest_absence_s": round(max((party.longest for party in self.parties), default=0.0), 2),
            "ledger_errors": len(errors),
            "memory_growth_mb": round(max(growth.values(), default=0.0), 2),
            "seconds_per_round": round(seconds / max(1, len(self.round_times) - 1), 3),
            "party_stops": self.counts["stop"],
            "party_cuts": self.counts["drop"] + self.counts["blackhole"],
            "party_late_starts": self.counts["late"],
            "party_failures": self.counts["party_failures"],
            "coordinator_failures": self.counts["coordinator_failures"],
            "longest_absences": [{"seconds": round(s, 2), "party": name, "after": cause} for s, name, cause in worst],
            "coordinator_growth_mb": round(
                max((mb for name, mb in growth.items() if name.startswith("coordinator")), default=0.0), 2
            ),
            "coordinator_peak_mb": round(self.memory.find_peak("coordinator"), 1),
            "party_peak_mb": round(self.memory.find_peak("p"), 1),
            "processes_measured": len(growth),
            "largest_growths_mb": {
                name: round(mb, 2) for name, mb in sorted(growth.items(), key=lambda each: -each[1])[:8]
            },
            "seconds": round(time.monotonic() - self.began, 1),
            "seed": self.given.seed,
            "commit": read_commit(),
            "command": f"benchmarks/soak.py --parties {self.given.parties} --rounds {self.given.rounds}"
            f" --kills {self.given.kills} --causes {self.given.causes} --longest-cause {self.given.longest_cause:g}"
            f" --deadline {self.given.deadline:g} --seed {self.given.seed}",
            "errors": errors[:20],
        }


def main(words: list[str] | None = None) -> int:
    """Run it, write the files; 1 where a party was absent for too long, a ledger is wrong, or memory grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parties", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--kills", type=int, default=10, help="how often the coordinator is killed")
    parser.add_argument("--causes", type=int, default=0, help="how often something happens to a party; 0: 4 for each")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds that a round waits")
    parser.add_argument("--longest-cause", type=float, default=30.0, help="seconds that a party is kept away at most")
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "soak.json")
    parser.add_argument("--home", type=Path, default=None, help="folder for everything; stays")
    parser.add_argument("--launcher", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.launcher:
        parts.run_launcher()
    given.causes = given.causes or 4 * given.parties
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    out = given.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        home = given.home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        home = home.absolute()
        home.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("FULCRUM_KEY_FILE", str(home / "record.key"))
        log = stack.enter_context((home / "soak.log").open("w", encoding="utf-8", buffering=1))
        soak = Soak(given, home, log, random.Random(given.seed))
        soak.prepare()
        try:
            soak.run()
        finally:
            soak.close()
        found = soak.describe()
        out.with_name(out.stem + ".log.gz").write_bytes(gzip.compress((home / "soak.log").read_bytes(), mtime=0))
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    right = found["rounds"] == given.rounds and not found["ledger_errors"] and found["longest_absence_s"] <= 120
    return int(not (right and found["memory_growth_mb"] < 20))


if __name__ == "__main__":
    sys.exit(main())
