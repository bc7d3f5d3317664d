"""What a federation costs beside training: CPU seconds, seconds, bytes and memory, with real TLS on loopback.

    python benchmarks/federation_cost.py [--parties 30] [--rounds 20] [--large 10000000] [--out FILE]

small     many parties and a small model: the coordinator's CPU seconds per party and round, seconds per round
large     two parties and a large model: bytes each way beside those of one float32 model, memory of the coordinator
waiting   one real `fulcrum party`, connected and waiting: its memory

The coordinator is this process. In `small` and `large` the parties run in one other process, each with its own key,
ledger, terms and connection; what they do for a round besides the transport is in `training_seconds`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulcrum.flower import certs, keys, run
from fulcrum.flower.coordinator import WaitPolicy
from fulcrum.flower.flwr141 import LocalSuperlink, TlsFiles, find_free_port
from fulcrum.flower.operations.monitor import read_resident_bytes
from fulcrum.flower.party import open_party_service
from fulcrum.flower.party_data import load_party_data
from fulcrum.flower.port.limits import PortLimits
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.terms import read_terms_file, terms_to_toml
from fulcrum.runs import folder as record
from fulcrum.settings.schema import Data, Model, Privacy, Run, Settings, Train

RECORDS, FEATURES, CLASSES = 40, 64, 10
AIMS = {
    "coordinator_cpu_s_per_party_round": 0.03,
    "seconds_per_round_besides_training": 2.0,
    "bytes_over_one_model": 1.1,
    "waiting_party_mb": 450.0,
}


def make_settings(folder: Path, parties: int, rounds: int, parameters: int) -> Settings:
    width = max(1, round((parameters - CLASSES) / (FEATURES + 1 + CLASSES)))
    return Settings(
        data=Data(source=str(folder / "public.npz")),
        model=Model(name="mlp", hidden=(width,)),
        train=Train(rounds=rounds, rate=0.5, lr=0.1, min_parties=parties, ema=0.0),
        privacy=Privacy(sigma=2.0, delta=1e-3, arithmetic="fast"),
        run=Run(device="cpu", evaluate_every=rounds),
    )


def make_site(folder: Path, settings: Settings, parties: int) -> None:
    """Certificates, keys, terms and made-up records of every party."""
    rng = np.random.default_rng(0)
    certs.make_certificate_authority(folder / "certs", ["127.0.0.1"])
    np.savez(
        folder / "public.npz",
        x_test=rng.normal(size=(20, FEATURES)).astype("f4"),
        y_test=np.arange(20) % CLASSES,
        classes=CLASSES,
    )
    for k in range(parties):
        name, home = f"p{k:03d}", folder / f"p{k:03d}"
        _, public = keys.make_key_pair(home, name)
        (folder / "register").mkdir(exist_ok=True)
        (folder / "register" / public.name).write_bytes(public.read_bytes())
        np.savez(home / "d.npz", x=rng.normal(size=(RECORDS, FEATURES)).astype("f4"), y=np.arange(RECORDS) % CLASSES)
        terms = accept_proposal(name, make_proposal(settings, CLASSES), 1e6)
        (home / "terms.toml").write_text(terms_to_toml(terms))


def play_parties(folder: Path, server: str) -> None:
    """All parties of a folder in this process, one thread each, until the run is over; prints seconds of training."""
    torch.set_num_threads(1)
    times: list[float] = []
    one = threading.Lock()  # training is not what is measured: one at a time, so that its seconds are its own

    def play(home: Path) -> None:
        name = home.name
        terms = read_terms_file(home / "terms.toml")
        with open_party_service(
            name,
            lambda task: load_party_data(str(home / "d.npz"), task=task),
            home / name,
            home / "ledger.sqlite",
            terms,
            home / "terms.toml",
            say=lambda words: None,
        ) as service:
            real = service.answer

            def answer(request: Any) -> Any:
                with one:
                    began = time.perf_counter()
                    try:
                        return real(request)
                    finally:
                        times.append(time.perf_counter() - began)

            service.answer = answer  # type: ignore[method-assign]
            run.run_party_service(service, server, home, ca=folder / "certs" / "ca.crt", until_done=True)

    threads = [threading.Thread(target=play, args=(home,)) for home in sorted(folder.glob("p[0-9]*"))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    facts = {"answers": len(times), "seconds": sum(times), "cpu": usage.ru_utime + usage.ru_stime}
    print(json.dumps({**facts, "peak_mb": usage.ru_maxrss / 1024}), flush=True)


def measure(folder: Path, parties: int, rounds: int, parameters: int) -> dict[str, Any]:
    """One federation: the coordinator here, its parties in another process."""
    settings = make_settings(folder, parties, rounds, parameters)
    make_site(folder, settings, parties)
    port = find_free_port()
    words = [sys.executable, __file__, "--play", str(folder), "--server", f"127.0.0.1:{port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    links: list[LocalSuperlink] = []
    marks: list[dict[str, float]] = []

    @contextlib.contextmanager
    def counted(address: Any, register: Any, report: Any = None) -> Iterator[Any]:
        pems = {name: keys.public_key_to_pem(key) for name, key in register.items()}
        tls = TlsFiles(folder / "certs" / "server.crt", folder / "certs" / "server.key")
        limits = PortLimits(body_bytes=8 * parameters + (1 << 20), bodies_bytes=16 * parameters + (64 << 20))
        with LocalSuperlink("127.0.0.1", port, tls, pems, limits=limits) as link:
            links.append(link)
            yield link.transport

    def mark(result: Any = None) -> None:
        count, used = links[0].server.count(), time.process_time()
        now = {"in": count.get("bytes_in", 0), "out": count.get("bytes_out", 0), "rss": read_resident_bytes() / 1e6}
        marks.append({"cpu": used, "wall": time.perf_counter(), **now})

    played = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
    address = run.ListenAddress("127.0.0.1", port, folder / "certs" / "server.crt", folder / "certs" / "server.key")
    try:
        run.serve_run(
            settings,
            folder / "run",
            address,
            keys.load_public_keys(folder / "register"),
            wait_policy=WaitPolicy(120.0, 600.0, parties),
            on_round=mark,
            say=lambda words: None,
            open_transport=counted,
        )
        out, _ = played.communicate(timeout=60)
    finally:
        if played.poll() is None:
            played.kill()
    theirs = json.loads(out)
    dim = json.loads((folder / "run" / "run.json").read_text())["parameters"]
    steps = [{name: after[name] - before[name] for name in after} for before, after in itertools.pairwise(marks)]
    training = theirs["seconds"] / max(1, theirs["answers"]) * parties
    seconds = statistics.median(each["wall"] for each in steps)
    return {
        "parties": parties,
        "rounds": rounds,
        "parameters": dim,
        "coordinator_cpu_s_per_party_round": statistics.median(each["cpu"] for each in steps) / parties,
        "seconds_per_round": seconds,
        "training_seconds_per_round": training,
        "seconds_per_round_besides_training": max(0.0, seconds - training),
        "bytes_to_each_party_over_one_model": statistics.median(each["out"] for each in steps) / parties / (4 * dim),
        "bytes_from_each_party_over_one_model": statistics.median(each["in"] for each in steps) / parties / (4 * dim),
        "coordinator_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "coordinator_mb_after_each_round": [round(each["rss"], 1) for each in marks],
        "parties_process": theirs,
        "load_average": os.getloadavg()[0],
    }


def measure_waiting(folder: Path) -> dict[str, Any]:
    """The memory of one real party that has joined and waits; its children, if it has any, are counted."""
    settings = make_settings(folder, 2, 3, 50_000)
    make_site(folder, settings, 2)
    port = find_free_port()
    home = folder / "p000"
    words = [sys.executable, "-m", "fulcrum", "party", "--data", "d.npz", "--key", "p000", "--ledger", "ledger.sqlite"]
    words += ["--terms", "terms.toml", "--server", f"127.0.0.1:{port}", "--ca", str(folder / "certs" / "ca.crt")]
    joined = threading.Event()
    address = run.ListenAddress("127.0.0.1", port, folder / "certs" / "server.crt", folder / "certs" / "server.key")

    def coordinate() -> None:
        with contextlib.suppress(Exception):
            run.serve_run(
                settings,
                folder / "run",
                address,
                keys.load_public_keys(folder / "register"),
                wait_policy=WaitPolicy(5.0, 25.0, 2),
                say=lambda words: joined.set() if "has joined" in words else None,
            )

    thread = threading.Thread(target=coordinate, daemon=True)
    thread.start()
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(words, cwd=home, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        if not joined.wait(60):
            raise SystemExit((home / "log").read_text())
        time.sleep(5)
        found = {
            "party_mb": read_process_mb(process.pid),
            "children_mb": sum(map(read_process_mb, list_children(process.pid))),
        }
    finally:
        process.terminate()
        process.wait(timeout=20)
        thread.join(timeout=40)
    return {**found, "waiting_party_mb": sum(found.values()), "torch": torch.__version__}


def read_process_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def list_children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parties", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--large", type=int, default=10_000_000)
    parser.add_argument("--only", choices=("small", "large", "waiting"))
    parser.add_argument("--out", type=Path, default=Path("results/federation-cost.json"))
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--server", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        play_parties(given.play, given.server)
        return
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        os.environ["FULCRUM_KEY_FILE"] = str(Path(place) / "record.key")
        for name in ("waiting", "small", "large"):
            if given.only and name != given.only:
                continue
            folder = Path(place) / name
            folder.mkdir()
            if name == "waiting":
                found[name] = measure_waiting(folder)
            else:
                many = name == "small"
                found[name] = measure(
                    folder, given.parties if many else 2, given.rounds if many else 5, 5_000 if many else given.large
                )
            print(json.dumps({name: found[name]}, indent=1), flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    environment = record.describe_environment(torch.device("cpu"))
    content = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "aims": AIMS,
        **found,
        "environment": environment,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
