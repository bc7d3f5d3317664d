"""Ten parties, ten rounds: seconds and bytes a round over Flower on loopback, beside the engine in one process.

    python benchmarks/flower.py [--parties 10] [--rounds 10] [--out results/bench-flower.json]

Real processes, TLS and node keys. Seeds are shared (a simulation), so that the two results can be compared:
the file says how far their parameters are apart. Bytes are what the coordinator's port received and sent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulcrum import runs as api
from fulcrum.data import load, split
from fulcrum.flower import certs, keys, run
from fulcrum.flower.coordinator import WaitPolicy
from fulcrum.flower.flwr141 import LocalSuperlink, TlsFiles, find_free_port
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.terms import terms_to_toml
from fulcrum.models.layout import ParameterLayout
from fulcrum.runs import folder as record
from fulcrum.settings.schema import Data, Model, Privacy, Run, Settings, Train


def settings_for(parties: int, rounds: int) -> Settings:
    """A network of 26,260 parameters on the digits: the size of the paper's CNN for MNIST, without its arithmetic."""
    return Settings(
        data=Data(source="digits", parties=parties, partition="iid"),
        model=Model(name="mlp", hidden=(350,)),
        train=Train(rounds=rounds, rate=0.1, lr=0.5, min_parties=parties),
        privacy=Privacy(sigma=2.0, delta=1e-4),
        run=Run(engine="auto", device="cpu", evaluate_every=rounds),
    )


def start_parties(folder: Path, settings: Settings, port: int) -> list[subprocess.Popen[bytes]]:
    data = load("digits")
    parts = split(data, settings.data, settings.run.seed)
    started = []
    for k in range(settings.data.parties):
        name, rows = f"party-{k}", parts.indices(k)
        home = folder / name
        _, public = keys.make_key_pair(home, name)
        (folder / "register").mkdir(exist_ok=True)
        (folder / "register" / public.name).write_bytes(public.read_bytes())
        np.savez(home / "data.npz", x=data.x[rows], y=data.y[rows], classes=data.classes)
        (home / "terms.toml").write_text(
            terms_to_toml(accept_proposal(name, make_proposal(settings, data.classes), 1e3))
        )
        words = ["party", "--data", "data.npz", "--key", name, "--ledger", "ledger.sqlite", "--terms", "terms.toml"]
        words += ["--server", f"127.0.0.1:{port}", "--ca", str(folder / "ca.crt"), "--simulation", "--until-done"]
        with (home / "log").open("wb") as log:
            started.append(
                subprocess.Popen([sys.executable, "-m", "fulcrum", *words], cwd=home, stdout=log, stderr=log)
            )
    return started


def over_flower(folder: Path, settings: Settings) -> tuple[api.Result, list[float], list[int], list[int]]:
    """The result, and seconds, bytes in and bytes out of every round."""
    port = find_free_port()
    certs.make_certificate_authority(folder, ["127.0.0.1"])
    parties = start_parties(folder, settings, port)
    seconds: list[float] = []
    received: list[int] = []
    sent: list[int] = []
    links: list[LocalSuperlink] = []

    @contextlib.contextmanager
    def counted(address: Any, register: Any, report: Any) -> Any:
        nodes = {name: keys.public_key_to_pem(key) for name, key in register.items()}
        with LocalSuperlink("127.0.0.1", port, TlsFiles(address.certificate, address.key), nodes) as link:
            links.append(link)
            yield link.transport

    def on_round(result: Any) -> None:
        count = links[0].server.count()
        seconds.append(result.seconds)
        received.append(count["bytes_in"] - sum(received))
        sent.append(count["bytes_out"] - sum(sent))

    try:
        result = run.serve_run(
            settings,
            folder / "run",
            run.ListenAddress("127.0.0.1", port, folder / "server.crt", folder / "server.key"),
            keys.load_public_keys(folder / "register"),
            wait_policy=WaitPolicy(120, 400, settings.data.parties),
            simulation=True,
            on_round=on_round,
            open_transport=counted,
        )
    finally:
        for process in parties:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.terminate()
    return result, seconds, received, sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parties", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("results/bench-flower.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    settings = settings_for(given.parties, given.rounds)

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        times: list[float] = []
        federation = api.prepare(settings)
        alone = api.execute(federation, folder / "alone", lambda r: times.append(r.seconds))
        load_before = os.getloadavg()[0]
        result, seconds, received, sent = over_flower(folder, settings)

    flat = [ParameterLayout.of(r.model).flatten(r.model) for r in (alone, result)]
    numbers = federation.problem.layout.dim
    found = {
        "parties": given.parties,
        "rounds": given.rounds,
        "parameters": numbers,
        "in_process_seconds_a_round": statistics.median(times),
        "flower_seconds_a_round": statistics.median(seconds),
        "flower_seconds_all_rounds": seconds,
        # The first round's counts hold the greetings and every look for mail before it.
        "bytes_received_a_round": statistics.median(received[1:]),
        "bytes_sent_a_round": statistics.median(sent[1:]),
        "bytes_of_numbers_received_a_round": 4 * numbers * given.parties,
        "bytes_of_numbers_sent_a_round": 2 * 4 * numbers * given.parties,
        "largest_difference_of_parameters": float((flat[0] - flat[1]).abs().max()),
        "same_C": alone.C == result.C,
        "load_average_before": load_before,
        "environment": record.describe_environment(torch.device("cpu")),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "environment"}, indent=2))


if __name__ == "__main__":
    main()
