"""Answers of rehearsals that are shipped with the package, for common shapes: what a laptop need not rehearse.

    python benchmarks/rehearsal_tables.py check                       # which shapes have an answer for today's facts
    python benchmarks/rehearsal_tables.py make                        # rehearse those that have none, drop the others
    python benchmarks/rehearsal_tables.py pack FACTS.json             # here: the facts of those that have none
    python benchmarks/rehearsal_tables.py play FACTS.json --out A.json --device cuda     # there: torch and numpy
    python benchmarks/rehearsal_tables.py take A.json                 # here again: into the package

A shape is a run: data, model, parties, rounds, rate, epsilon. Runs with about the same noise share an answer (noise is
rounded to factors of 1.4), so the table serves more runs than it lists. Data sets that are not at hand are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fulcrum.data.made_up import DataFacts, InputFacts
from fulcrum.runs.rehearsal.choice import Rehearsed, rehearse
from fulcrum.runs.rehearsal.effort import Effort
from fulcrum.runs.rehearsal.facts import RehearsalFacts
from fulcrum.runs.rehearsal.memory import SHIPPED_FILE
from fulcrum.settings.schema import Settings, TaskSettings
from fulcrum.study.job import settings_from_json

Words = dict[str, Any]
EPSILONS = (1.0, 2.0, 4.0, 8.0)
PAPER_EPSILONS = (6.38, 3.61, 1.64)


def list_shapes() -> Iterator[tuple[str, Settings]]:
    """Name and settings of every shape: `fulcrum demo`, the README's first command, defaults, the paper's runs."""
    from fulcrum.cli.demo import make_demo_settings
    from fulcrum.settings.files import parse_settings

    yield "demo", make_demo_settings("moo")
    yield "readme", parse_settings({}, {"data.parties": 5, "train.rounds": 50, "privacy.epsilon": 4.0}, "moo")
    for source, models in (("digits", ("auto", "mlp")), ("mnist", ("auto",)), ("cifar10", ("auto",))):
        for model in models:
            for rounds in (50, 100, 200):
                for epsilon in EPSILONS:
                    name = f"{source}-{model}-{rounds}-e{epsilon:g}"
                    words: Words = {"data.source": source, "model.name": model, "train.rounds": rounds}
                    yield name, parse_settings({}, {**words, "privacy.epsilon": epsilon}, "moo")
    for source in ("mnist", "fashion-mnist", "cifar10"):
        for epsilon in PAPER_EPSILONS:
            words = {"data.source": source, "data.parties": 10, "train.rounds": 200, "privacy.epsilon": epsilon}
            yield f"paper-{source}-e{epsilon:g}", parse_settings({}, words, "moo")


def read_shapes(only: str = "") -> dict[str, tuple[str, RehearsalFacts]]:
    """Facts by digest, with the name of the first shape that has them. Data sets that are not here are left out."""
    from fulcrum.errors import DataError
    from fulcrum.runs import prepare_unrehearsed
    from fulcrum.runs.rehearsal import find_refusal, read_rehearsal_facts

    found: dict[str, tuple[str, RehearsalFacts]] = {}
    for name, settings in list_shapes():
        if only not in name:
            continue
        try:
            federation = prepare_unrehearsed(settings)
        except DataError as error:
            print(f"left out {name}: {error}")
            continue
        reason = find_refusal(federation)
        if reason:
            print(f"left out {name}: {reason}")
            continue
        facts = read_rehearsal_facts(federation)
        found.setdefault(facts.digest(), (name, facts))
    return found


def read_table() -> dict[str, Words]:
    """The shipped answers by digest."""
    return json.loads(SHIPPED_FILE.read_text(encoding="utf-8")) if SHIPPED_FILE.is_file() else {}


def write_table(table: Mapping[str, Words]) -> None:
    """One line per answer, in the order of the digests."""
    lines = ",\n".join(f"{json.dumps(digest)}: {json.dumps(table[digest])}" for digest in sorted(table))
    SHIPPED_FILE.write_text("{\n" + lines + "\n}\n" if lines else "{}\n", encoding="utf-8")


def to_row(name: str, answer: Rehearsed) -> Words:
    """An answer as the table has it: without the time it took, which is no fact."""
    plain = answer.to_json()
    return {"for": name, **{key: value for key, value in plain.items() if key != "seconds"}}


def facts_to_json(facts: RehearsalFacts) -> Words:
    """Plain values; `facts_from_json` reads them back."""
    return dataclasses.asdict(facts)


def facts_from_json(plain: Words) -> RehearsalFacts:
    """The facts from the values of `facts_to_json`."""
    data = dict(plain["data"])
    data["inputs"] = {
        name: InputFacts(tuple(value["shape"]), **{k: v for k, v in value.items() if k != "shape"})
        for name, value in data["inputs"].items()
    }
    words: Words = {name: tuple(value) if isinstance(value, list) else value for name, value in data["task"].items()}
    data |= {"task": TaskSettings(**words), "balance": tuple(data["balance"])}
    rest = {key: value for key, value in plain.items() if key not in ("data", "settings", "effort")}
    return RehearsalFacts(
        data=DataFacts(**data),
        settings=settings_from_json(plain["settings"]),
        effort=Effort(**plain["effort"]),
        **rest,
    )


def play(name: str, facts: RehearsalFacts, device: str = "") -> Words:
    """Rehearse one shape."""
    began = time.monotonic()
    if device:
        facts = dataclasses.replace(facts, settings=facts.settings.replace(run={"device": device}))
    answer = rehearse(facts)
    print(f"{name}: {answer.candidate.describe()}, {time.monotonic() - began:.0f} s", flush=True)
    return to_row(name, answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["check", "make", "pack", "play", "take"])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    words = parser.parse_args()
    if words.what == "play":
        packed = json.loads(words.file.read_text())
        rows: dict[str, Words] = {}
        for digest, entry in packed.items():
            rows[digest] = play(entry["name"], facts_from_json(entry["facts"]), words.device)
            assert rows[digest]["digest"] == digest, "the facts changed on their way"
            words.out.write_text(json.dumps(rows))
        return
    table = read_table()
    if words.what == "take":
        write_table({**table, **json.loads(words.file.read_text())})
        return
    shapes = read_shapes(words.only)
    missing = {digest: entry for digest, entry in shapes.items() if digest not in table}
    if words.what == "check":
        stale = [digest for digest in table if not words.only and digest not in shapes]
        print(
            f"{len(shapes) - len(missing)} of {len(shapes)} shapes have an answer; {len(stale)} answers are of no use."
        )
        for name, _ in missing.values():
            print(f"missing: {name}")
    elif words.what == "pack":
        plain = {digest: {"name": name, "facts": facts_to_json(facts)} for digest, (name, facts) in missing.items()}
        words.file.write_text(json.dumps(plain, default=str))
        print(f"{len(plain)} shapes")
    else:
        kept = {digest: row for digest, row in table.items() if words.only or digest in shapes}
        for digest, (name, facts) in missing.items():
            kept[digest] = play(name, facts, words.device)
            write_table(kept)


if __name__ == "__main__":
    main()
