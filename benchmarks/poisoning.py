"""What train.combine does to accuracy, to moo, and to a party that sends scaled updates: digits, ten parties, private.

    python benchmarks/poisoning.py [--rounds 60] [--seeds 3] [--out results/poisoning.json]

Bad parties turn their update round and multiply it by a scale. "bounded" rows keep the coordinator's norm bound, which
follows from the terms (`flower.coordinator.bound_update_norm`): a larger update is left out of the round. Without the
bound, a scale of 1000 shows what a server without it would suffer. Everything is seeded; one process, no network.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fulcrum import runs as api
from fulcrum.flower.coordinator import bound_update_norm
from fulcrum.settings.schema import Clip, Data, Model, Privacy, Run, Settings, Train
from fulcrum.training.combine import COMBINERS
from fulcrum.training.engine import Engine
from fulcrum.training.federation import Federation
from fulcrum.types import ClientReply, RoundRequest

PARTIES = 10


class PoisonedEngine(Engine):
    """The first `bad` parties send -scale times their update. bounded: too large updates do not count."""

    def __init__(self, federation: Federation, bad: int, scale: float, bounded: bool) -> None:
        self.federation, self.bad, self.scale, self.bounded = federation, bad, scale, bounded
        self.remote = bounded  # a reply that is left out is one that did not come
        self.refused = 0

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        problem, settings = self.federation.problem, self.federation.settings
        replies = self.federation.engine.run(request)
        for reply, task, state in zip(replies, request.assignments, request.states, strict=True):
            if reply.client < self.bad:
                reply = dataclasses.replace(reply, delta=-self.scale * reply.delta)
            units = self.federation.plan.units(reply.client)
            limit = bound_update_norm(problem, settings, request, task, state, units)
            if self.bounded and float(torch.linalg.vector_norm(reply.delta)) > limit:
                self.refused += 1
                continue
            yield reply


def settings_for(combine: str, rule: str, partition: str, rounds: int, seed: int) -> Settings:
    return Settings(
        data=Data(source="digits", parties=PARTIES, partition=partition, alpha=0.5),
        model=Model(name="linear"),
        train=Train(rounds=rounds, rate=0.2, lr=1.0, combine=combine, weights="sqrt"),
        clip=Clip(rule=rule),
        privacy=Privacy(epsilon=8.0, delta=1e-4),
        run=Run(engine="parallel", device="cpu", evaluate_every=rounds, seed=seed),
    )


def score(
    settings: Settings, bad: int = 0, scale: float = 0.0, bounded: bool = True
) -> tuple[float, float, float, int]:
    """Accuracy, the last C, the known noise of the first round's aggregate over that of the mean, refused updates."""
    federation = api.prepare(settings)
    engine = PoisonedEngine(federation, bad, scale, bounded)
    result = api.execute(dataclasses.replace(federation, engine=engine))
    from fulcrum.training.federation import compare_noise_with_mean

    return (
        float(result.metrics["accuracy"]),
        float(result.C[-1] if isinstance(result.C[-1], float) else result.C[-1][0]),
        compare_noise_with_mean(settings.train, federation.plan),
        engine.refused,
    )


ATTACKS: dict[str, tuple[int, float, bool]] = {
    "nobody": (0, 0.0, True),
    "one of ten, scale 1": (1, 1.0, True),
    "one of ten, scale 10": (1, 10.0, True),
    "one of ten, scale 1000, bounded": (1, 1000.0, True),
    "one of ten, scale 1000, not bounded": (1, 1000.0, False),
    "two of ten, scale 10": (2, 10.0, True),
}


def write_rows(out: Path, rows: list[dict[str, Any]], seeds: int, rounds: int) -> None:
    """All rows so far, with how they were made."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    command = " ".join(["python", *sys.argv])
    content = {"command": command, "commit": commit, "parties": PARTIES, "rounds": rounds, "seeds": seeds, "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/poisoning.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for partition in ("iid", "dirichlet"):
        for rule in ("moo", "fixed"):
            for combine in COMBINERS:
                for attack, (bad, scale, bounded) in ATTACKS.items():
                    if partition == "dirichlet" and attack not in ("nobody", "one of ten, scale 10"):
                        continue
                    found = [
                        score(settings_for(combine, rule, partition, given.rounds, seed), bad, scale, bounded)
                        for seed in range(given.seeds)
                    ]
                    row = {
                        "partition": partition,
                        "rule": rule,
                        "combine": combine,
                        "bad": attack,
                        "accuracy": statistics.mean(each[0] for each in found),
                        "accuracy_by_seed": [each[0] for each in found],
                        "last_C": [each[1] for each in found],
                        "noise_over_mean": statistics.mean(each[2] for each in found),
                        "updates_refused": sum(each[3] for each in found),
                    }
                    rows.append(row)
                    write_rows(given.out, rows, given.seeds, given.rounds)
                    print(
                        f"{partition:9} {rule:6} {combine:16} {attack:36} accuracy {row['accuracy']:.3f}  "
                        f"noise x{row['noise_over_mean']:.3f}  refused {row['updates_refused']}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
