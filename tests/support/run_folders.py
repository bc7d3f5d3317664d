"""Folders of runs as `fulcrum run` leaves them, made up for tests of viewing: no training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTINGS = """method = "{method}"

[data]
source = "{source}"

[train]
rounds = {rounds}
lr = 1.0

[privacy]
epsilon = {epsilon}
delta = 1e-05
randomness = "seeded"

[clip]
rule = "moo"
rehearse = false

[run]
seed = {seed}
"""


def make_line(number: int, rounds: int, parties: int, score: float, epsilon: float, names: list[str]) -> dict[str, Any]:
    """A line of metrics.jsonl; the score rises to `score`."""
    share = number / rounds
    accuracy = 0.1 + (score - 0.1) * (1 - (1 - share) ** 3)
    line: dict[str, Any] = {
        "round": number,
        "loss": 2.3 - 2 * share,
        "accuracy": accuracy,
        "metrics": {"accuracy": accuracy, "loss": 2.3 - 2 * share},
        "C": 1.0 / number,
        "epsilon": epsilon * share**0.5,
        "seconds": 0.05,
        "participants": list(range(parties)),
        "course": {"update": 0.2, "noise": 0.1, "move": 1.0, "alignment": 0.05, "penalty": 0.01, "step": 2.0},
        "baseline": {"accuracy": 0.1},
    }
    if parties <= 100:
        line["epsilons"] = [epsilon * share**0.5 * (1 - 0.5 * k / parties) for k in range(parties)]
        line["party_metrics"] = {name: {"accuracy": accuracy - 0.001 * k} for k, name in enumerate(names)}
        line["mean_over_parties"] = {"accuracy": accuracy - 0.0005 * parties}
    return line


def make_run_folder(
    folder: Path,
    *,
    rounds: int = 20,
    done: int | None = None,
    parties: int = 5,
    method: str = "moo",
    source: str = "digits",
    epsilon: float = 4.0,
    score: float = 0.9,
    seed: int = 0,
    names: list[str] | None = None,
    public: bool = True,
    finished: bool = True,
    guarantee: str = "simulation",
    unit: str = "example",
    changes: Mapping[str, Mapping[str, Any]] = {},
) -> Path:
    """A run's folder. done: rounds on record. names: of the parties. changes: file -> keys that differ."""
    folder.mkdir(parents=True)
    names = names or [f"party-{k}" for k in range(parties)]
    done = rounds if done is None else done
    text = SETTINGS.format(method=method, source=json.dumps(source)[1:-1], rounds=rounds, epsilon=epsilon, seed=seed)
    (folder / "settings.toml").write_text(text)
    lines = [make_line(t, rounds, parties, score, epsilon, names) for t in range(1, done + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        {
            "name": name,
            "units": 100 + k,
            "rate": 0.05,
            "sigma": 0.9,
            "releases": done,
            "epsilon_rdp": epsilon,
            "budget": epsilon,
        }
        for k, name in enumerate(names)
    ]
    files: dict[str, dict[str, Any]] = {
        "run.json": {
            **{"id": "abc", "created": "2026-11-16T10:00:00+00:00", "version": "0.1.0", "parameters": 650},
            **{"unit": unit, "score": "accuracy", "higher_is_better": True, "simulation": True, "format": 2},
            **{"sound": True, "private": True, "aggregation": "plain"},
        },
        "split.json": {
            **{"parties": parties, "public": public, "names": names, "units": [100 + k for k in range(parties)]},
            **({"labels": [[10 * (k + 1), 5, 1] for k in range(parties)]} if public else {}),
        },
        "environment.json": {"date": "2026-11-16", "python": "3.11.7", "torch": "2.13.0", "platform": "Linux"},
    }
    if finished:
        files["summary.json"] = {
            **{"status": "finished", "metrics": lines[-1]["metrics"], "score": "accuracy", "higher_is_better": True},
            **{"evaluated_on": "public test data", "epsilon": epsilon, "delta": 1e-5, "unit": unit, "parties": parties},
            **{"guarantee": guarantee, "method": method, "rule": "moo", "seconds": 1.0, "warnings": []},
            **{"confusion": [[9.0, 1.0], [2.0, 8.0]], "baseline": {"accuracy": 0.1}},
        }
        files["privacy.json"] = {
            **{"guarantee": guarantee, "guarantee_text": f"epsilon = {epsilon}", "unit": unit, "parties": rows},
            **{"accountant": {"enforced": "rdp"}, "adversary": "A curious server.", "warnings": ["Seeded."]},
            **{"releases": [{"kind": "C", "times": done, "text": "The clipping norm."}], "not_covered": ["Timing."]},
            **{"groups_of_records": [{"records": 2, "epsilon": 8.0, "delta": 1e-3}], "adds_up": ["It adds up."]},
        }
        if parties <= 100:
            files["summary.json"]["epsilons"] = dict.fromkeys(names, epsilon)
            files["summary.json"]["party_metrics"] = lines[-1]["party_metrics"]
    for name, content in files.items():
        (folder / name).write_text(json.dumps({**content, **changes.get(name, {})}))
    return folder
