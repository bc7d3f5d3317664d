"""What masks cost at K = 10: time and bytes of a round across machines, masked and plain, on the same work.

    python benchmarks/pairwise.py                             # prints; about four minutes
    python benchmarks/pairwise.py --tls --out results/bench-pairwise.json     # also over Flower with TLS; writes

Coordinator and parties are those of `fulcrum serve` and `fulcrum party`, with the paper's CNN (26,010 parameters) and
its expected batch of 600 examples per party and round (3,000 records at rate 0.2).
in-process   a dictionary stands in for the network, and one process plays all, one after the other: seconds are those
             of the work of ten parties and the coordinator, and bytes those of the messages.
tls          Flower's SuperLink with TLS on loopback; ten parties, each with its own connection, in a second process.

Both aggregations compute with one thread (--threads). They run in turns, forwards and backwards, and every round is a
row: seconds and CPU seconds of all processes between the starts of two rounds. The first two rounds of a run are left
out: keys are made and checked in them. Intervals are of the median, from a bootstrap over whole runs.

What the two do not share: a plain party draws one whole dose of noise and sends floats, compressed, and stores the
reply on its disk to send it again after a crash; a masked one draws a share, sends the low 24 or 32 bits of integers,
and stores no reply. A masked round has two more messages per party (ready, manifest).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulcrum.data import Dataset, from_arrays, split
from fulcrum.data.arrays import recheck_dataset
from fulcrum.flower import certs, keys, run
from fulcrum.flower.coordinator import WaitPolicy
from fulcrum.flower.flwr141 import LocalSuperlink, TlsFiles, find_free_port
from fulcrum.flower.messages import Envelope
from fulcrum.flower.party import PartyService, open_party_service
from fulcrum.flower.party_data import take_part
from fulcrum.flower.port.limits import PortLimits
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.registry import MessageDelivery
from fulcrum.flower.signing import fingerprint
from fulcrum.flower.terms import PartyTerms
from fulcrum.runs import folder as record
from fulcrum.settings.schema import Clip, Data, Model, Privacy, Run, Settings, Train

PARTIES = 10
SKIPPED = 2
"""Rounds at the start of a run that are left out."""
AGGREGATIONS = ("plain", "pairwise")
AIM = 1.1
"""Time of a masked round over that of a plain one, at most."""


class Post:
    """A transport that is a dictionary, and counts what it carries by kind of message."""

    def __init__(self, services: dict[int, PartyService]) -> None:
        self.services = services
        self.bytes: dict[str, int] = {}
        self.key_bytes = 0
        self._open: dict[str, tuple[int, Envelope]] = {}
        self._count = 0

    def online(self) -> set[int]:
        return set(self.services)

    def restarted(self) -> set[int]:
        return set()

    def send(self, node: int, envelope: Envelope, seconds: float, label: str) -> str:
        self._note(envelope)
        self._count += 1
        self._open[str(self._count)] = (node, envelope)
        return str(self._count)

    def collect(self, ids: set[str]) -> list[MessageDelivery]:
        found = []
        for number in sorted(ids & self._open.keys(), key=int):
            node, envelope = self._open.pop(number)
            reply = self.services[node].answer(envelope)
            self._note(reply)
            found.append(MessageDelivery(number, reply))
        return found

    def _note(self, envelope: Envelope) -> None:
        header = json.loads(envelope.header)
        self.bytes[header["kind"]] = self.bytes.get(header["kind"], 0) + envelope.size
        self.key_bytes += int(header.get("keys_bytes", 0)) + len(json.dumps(header.get("key", "")))


# --- one federation ---------------------------------------------------------------------------------


def make_settings(aggregation: str, rounds: int) -> Settings:
    return Settings(
        method="moo",
        data=Data(source="made-up", parties=PARTIES, partition="iid", min_examples=1),
        model=Model(name="mnist-cnn"),
        train=Train(rounds=rounds, rate=0.2, lr=0.5, min_parties=PARTIES),
        clip=Clip(rule="moo"),
        privacy=Privacy(sigma=2.0, delta=1e-5, aggregation=aggregation),
        run=Run(device="cpu", evaluate_every=rounds),
    )


def make_data(records: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(PARTIES * records + 50, 1, 28, 28, generator=generator), torch.arange(PARTIES * records + 50) % 10
    return from_arrays(x[:-50], y[:-50], x[-50:], y[-50:], name="made-up", classes=10)


def make_terms(name: str, settings: Settings, pins: dict[str, str]) -> PartyTerms:
    """A party's terms, with all others pinned where messages are masked."""
    terms = accept_proposal(name, make_proposal(settings, 10), 1e6)
    if settings.privacy.aggregation == "pairwise":
        terms = dataclasses.replace(terms, peers={n: p for n, p in pins.items() if n != name})
    return terms


@contextlib.contextmanager
def open_parties(folder: Path, settings: Settings, data: Dataset) -> Iterator[dict[int, PartyService]]:
    """The ten parties, each with its own key, ledger, terms and part of the data."""
    parts = split(data, settings.data, 0)
    names = [f"party-{k}" for k in range(PARTIES)]
    pins = {name: fingerprint(keys.load_public_key(folder / "keys" / f"{name}.pub")) for name in names}
    with contextlib.ExitStack() as stack:
        services: dict[int, PartyService] = {}
        for k, name in enumerate(names):
            own = take_part(data, parts.indices(k), name)
            services[k] = stack.enter_context(
                open_party_service(
                    name,
                    lambda task, own=own: recheck_dataset(own, own.name, task),  # type: ignore[misc]
                    folder / "keys" / name,
                    folder / f"{name}.sqlite",
                    make_terms(name, settings, pins),
                    folder / f"{name}.toml",
                    simulation=True,
                    say=lambda words: None,
                )
            )
        yield services


def make_keys(folder: Path) -> dict[str, Any]:
    for k in range(PARTIES):
        keys.make_key_pair(folder / "keys", f"party-{k}")
    return {path.stem: keys.load_public_key(path) for path in sorted((folder / "keys").glob("*.pub"))}


def serve(
    folder: Path, settings: Settings, data: Dataset, public: dict[str, Any], address: Any, open_transport: Any
) -> list[dict[str, float]]:
    """Run the coordinator in this process; the times at the end of each round."""
    shown = dataclasses.replace(data, train=None)
    setattr(run, "load_public_data", lambda source, place, task: recheck_dataset(shown, data.name, task))  # noqa: B010
    marks: list[dict[str, float]] = []

    def mark(result: Any = None) -> None:
        marks.append({"seconds": time.perf_counter(), "cpu_seconds": time.process_time()})

    run.serve_run(
        settings,
        folder / "run",
        address,
        public,
        open_transport=open_transport,
        on_round=mark,
        say=lambda words: None,
        wait_policy=WaitPolicy(round_timeout=600.0, join_timeout=600.0, min_parties=PARTIES),
        simulation=True,
    )
    return marks


def marks_to_rows(marks: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Seconds of each round from the second after the skipped ones on; the last one, which evaluates, is left out."""
    kept = marks[SKIPPED - 1 : -1]
    return [{name: after[name] - before[name] for name in after} for before, after in itertools.pairwise(kept)]


# --- in one process ---------------------------------------------------------------------------------


def play(aggregation: str, rounds: int, records: int) -> dict[str, Any]:
    """One run in this process: its rounds' times, and bytes per round and party, of keys and without."""
    settings, data = make_settings(aggregation, rounds), make_data(records)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        public = make_keys(folder)
        with open_parties(folder, settings, data) as services:
            post = Post(services)
            nowhere = run.ListenAddress("nowhere", 1, None, None)
            marks = serve(folder, settings, data, public, nowhere, lambda *_: contextlib.nullcontext(post))
    kinds = {kind: size / rounds / PARTIES for kind, size in post.bytes.items() if kind not in ("hello", "welcome")}
    return {
        "rows": marks_to_rows(marks),
        "bytes_per_round_and_party": {kind: round(size) for kind, size in kinds.items()},
        "bytes_without_keys": round(sum(kinds.values()) - post.key_bytes / rounds / PARTIES),
        "bytes_of_keys": round(post.key_bytes / rounds / PARTIES),
    }


# --- over Flower with TLS ---------------------------------------------------------------------------


def play_over_tls(aggregation: str, rounds: int, records: int) -> dict[str, Any]:
    """One run over Flower's SuperLink: the coordinator here, the parties in another process."""
    settings, data = make_settings(aggregation, rounds), make_data(records)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        public = make_keys(folder)
        certs.make_certificate_authority(folder / "certs", ["127.0.0.1"])
        port = find_free_port()
        tls = TlsFiles(folder / "certs" / "server.crt", folder / "certs" / "server.key")
        links: list[LocalSuperlink] = []

        @contextlib.contextmanager
        def link(address: Any, register: Any, report: Any = None) -> Iterator[Any]:
            pems = {name: keys.public_key_to_pem(key) for name, key in register.items()}
            with LocalSuperlink("127.0.0.1", port, tls, pems, limits=PortLimits()) as made:
                links.append(made)
                yield made.transport

        words = [sys.executable, __file__, "--play", place, "--server", f"127.0.0.1:{port}"]
        words += ["--only", aggregation, "--rounds", str(rounds), "--records", str(records)]
        parties = subprocess.Popen([*words, "--threads", str(torch.get_num_threads())], stdout=subprocess.PIPE)
        try:
            address = run.ListenAddress(
                "127.0.0.1", port, folder / "certs" / "server.crt", folder / "certs" / "server.key"
            )
            marks = serve(folder, settings, data, public, address, link)
            out, _ = parties.communicate(timeout=120)
        finally:
            if parties.poll() is None:
                parties.kill()
        count = links[0].server.count()
    times = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
    theirs = {int(each["round"]): each["cpu_seconds"] for each in times}
    rows = marks_to_rows(marks)
    for n, row in enumerate(rows):  # CPU seconds of the parties' process between the same two rounds
        first = n + SKIPPED
        row["coordinator_cpu_seconds"] = row["cpu_seconds"]
        row["cpu_seconds"] += theirs[first + 1] - theirs[first]
    return {"rows": rows, "bytes_in": count.get("bytes_in", 0), "bytes_out": count.get("bytes_out", 0)}


def play_parties(folder: Path, server: str, settings: Settings, records: int) -> None:
    """All parties in this process, one thread each, until the run is over; prints CPU seconds at the start of rounds.

    They answer one after the other: the work is compared, and not how ten parties share the cores of one machine.
    """
    one, seen = threading.Lock(), set[int]()

    def watch(service: PartyService) -> None:
        real = service.answer

        def answer(request: Envelope) -> Envelope:
            header = json.loads(request.header)
            with one:
                if header["kind"] == "round" and header["round"] not in seen:
                    seen.add(header["round"])
                    print(json.dumps({"round": header["round"], "cpu_seconds": time.process_time()}), flush=True)
                return real(request)

        service.answer = answer  # type: ignore[method-assign]

    with open_parties(folder, settings, make_data(records)) as services:
        threads = []
        for service in services.values():
            watch(service)
            home = folder / f"home-{service.name}"
            home.mkdir()
            threads.append(
                threading.Thread(
                    target=run.run_party_service,
                    args=(service, server, home),
                    kwargs={"ca": folder / "certs" / "ca.crt", "until_done": True},
                )
            )
        for each in threads:
            each.start()
        for each in threads:
            each.join()


# --- what comes out ---------------------------------------------------------------------------------


def describe_times(runs: dict[str, list[list[dict[str, float]]]], name: str) -> dict[str, Any]:
    """Medians over all rounds of plain and masked runs and of their ratio, with 95% intervals (bootstrap over runs)."""
    generator = np.random.default_rng(0)
    values = {kind: [np.array([row[name] for row in rows]) for rows in found] for kind, found in runs.items()}

    def draw(kind: str) -> float:
        chosen = generator.integers(len(values[kind]), size=len(values[kind]))
        return float(np.median(np.concatenate([values[kind][i] for i in chosen])))

    medians = {kind: float(np.median(np.concatenate(found))) for kind, found in values.items()}
    drawn = {kind: np.array([draw(kind) for _ in range(2000)]) for kind in AGGREGATIONS}
    ratios = drawn["pairwise"] / drawn["plain"]

    def interval(numbers: Any) -> list[float]:
        return [float(np.quantile(numbers, q)) for q in (0.025, 0.975)]

    return {
        **{kind: {"median": medians[kind], "ci95": interval(drawn[kind])} for kind in AGGREGATIONS},
        "over_plain": medians["pairwise"] / medians["plain"],
        "over_plain_ci95": interval(ratios),
    }


def measure(how: Any, rounds: int, records: int, repeats: int) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Runs of both kinds in turns; what their times say with all rows, and the last run of each."""
    for aggregation in AGGREGATIONS:  # imports and first calls
        how(aggregation, SKIPPED + 3, 60)
    runs: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in AGGREGATIONS}
    last: dict[str, dict[str, Any]] = {}
    for repeat in range(repeats):
        for aggregation in AGGREGATIONS if repeat % 2 == 0 else AGGREGATIONS[::-1]:
            last[aggregation] = how(aggregation, rounds, records)
            runs[aggregation].append(last[aggregation].pop("rows"))
    times = {f"{name}_per_round": describe_times(runs, name) for name in ("cpu_seconds", "seconds")}
    return {"runs_of_each": repeats, "rounds": rounds, **times, "rows": runs}, last


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--records", type=int, default=3000, help="per party")
    parser.add_argument("--repeats", type=int, default=4, help="runs of each kind")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch, for both kinds")
    parser.add_argument("--tls", action="store_true", help="also over Flower with TLS, two runs of each kind")
    parser.add_argument("--out", type=Path)
    for hidden in ("--play", "--server", "--only"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    if words.play:
        play_parties(Path(words.play), words.server, make_settings(words.only, words.rounds), words.records)
        return
    with tempfile.TemporaryDirectory() as place:
        os.environ["FULCRUM_KEY_FILE"] = str(Path(place) / "record.key")
        times, last = measure(play, words.rounds, words.records, words.repeats)
        tls = {}
        if words.tls:
            found, ends = measure(play_over_tls, words.rounds, words.records, 2)
            tls = {"tls": {**found, "traffic": ends}}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "date": record.current_utc_time(),
        "environment": record.describe_environment(torch.device("cpu")),
        "load_average": os.getloadavg()[0],
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "parties": PARTIES,
        "parameters": 26010,
        "records_per_party": words.records,
        "threads": words.threads,
        "aim": AIM,
        **{kind: last[kind] for kind in AGGREGATIONS},
        "time_over_plain": times["cpu_seconds_per_round"]["over_plain"],
        "bytes_over_plain_without_keys": last["pairwise"]["bytes_without_keys"] / last["plain"]["bytes_without_keys"],
        "in_process": times,
        **tls,
    }
    short = {name: value for name, value in result.items() if name not in ("in_process", "tls")}
    for part in ("in_process", "tls"):
        if part in result:
            short[part] = {name: value for name, value in result[part].items() if name != "rows"}
    print(json.dumps(short, indent=1))
    if words.out is not None:
        words.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
