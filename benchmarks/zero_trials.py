"""The row `moo, zero trials` of the paper's cells: what `fulcrum plan --advise` recommends, and nothing else.

    python benchmarks/zero_trials.py advise --out advice.json               # each cell's advice; goes on if cut off
    python benchmarks/zero_trials.py advise --out advice.json --only digits --rounds 10      # a trial
    python benchmarks/zero_trials.py take advice.json                         # into experiments/zero-trials-chosen.toml
    fulcrum study zero-trials                                                 # then trains it: results/zero-trials

Cells of the same shape, size and budget share an advice. Without dp_accounting (on a GPU machine) noise is planned by
RDP; the study itself is calibrated by PLD. About one and a half minutes of a core per cell of MNIST.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

Words = dict[str, Any]
ADVISED = {
    "train": ("rate", "rounds", "steps", "server", "lr", "schedule"),
    "clip": ("step", "C0", "search", "eta_C", "rehearse"),
    "model": ("init",),
}
"""Settings that an advice decides, by section."""
STUDY, ROW = "zero-trials", "moo-zero-trials"


def list_cells(only: str, rounds: int, at: float = 0.0) -> list[Words]:
    """Data set, epsilon and settings of each cell; at: one epsilon alone."""
    from fulcrum.settings.schema import Settings

    found = []
    accountant = "pld" if importlib.util.find_spec("dp_accounting") else "rdp"
    for source in (only,) if only else ("mnist", "fashion-mnist", "cifar10"):
        for epsilon in (at,) if at else (1.64, 3.61, 6.38):
            settings = Settings(method="moo").replace(
                data={"source": source, "parties": 10, "partition": "dirichlet", "alpha": 0.5},
                train={"rounds": rounds},
                clip={"rule": "moo", "rehearse": True},
                privacy={"epsilon": epsilon, "delta": 1e-5, "accountant": accountant},
            )
            found.append({"dataset": source, "epsilon": epsilon, "settings": settings})
    return found


def advise_cells(cells: list[Words], out: Path) -> list[Words]:
    """The advice of each cell, written after each."""
    from fulcrum.runs import prepare_unrehearsed
    from fulcrum.runs.advice import advise
    from fulcrum.runs.rehearsal import read_rehearsal_facts

    done: list[Words] = json.loads(out.read_text()) if out.is_file() else []
    for cell in cells:
        if any((row["dataset"], row["epsilon"]) == (cell["dataset"], cell["epsilon"]) for row in done):
            continue
        settings = cell["settings"]
        digest = read_rehearsal_facts(prepare_unrehearsed(settings.replace(clip={"rehearse": False}))).digest()
        same = next((row for row in done if row["facts"] == digest and row["epsilon"] == cell["epsilon"]), None)
        began = time.monotonic()
        if same is None:
            found = advise(settings, say=lambda line: print(f"   {line}", flush=True))
            chosen = {
                f"{section}.{name}": getattr(getattr(found.settings, section), name)
                for section, names in ADVISED.items()
                for name in names
            }
            row: Words = {"reasons": list(found.reasons), "chosen": chosen, "recipes": len(found.played)}
        else:
            row = {name: same[name] for name in ("reasons", "chosen", "recipes")}
        took = round(time.monotonic() - began, 1)
        row = {"dataset": cell["dataset"], "epsilon": cell["epsilon"], "facts": digest, "seconds": took, **row}
        done.append(row)
        out.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        print(f"{row['dataset']} {row['epsilon']:g}: {row['reasons'][0]} {took:.0f} s", flush=True)
    return done


def take(advice: Path, folder: Path | None) -> Path:
    """Write zero-trials-chosen.toml from advice; returns the file."""
    from fulcrum.study.experiment import BUILT_IN_FOLDER, companion_file
    from fulcrum.study.search import ChosenSettings, write_choices

    file = companion_file(folder or BUILT_IN_FOLDER, STUDY, "chosen")
    choices = [
        ChosenSettings(row["dataset"], ROW, 0, 0, 0.0, row["epsilon"], settings=row["chosen"])
        for row in json.loads(advice.read_text(encoding="utf-8"))
    ]
    note = "Written by `python benchmarks/zero_trials.py take`, from `fulcrum plan --advise`: no trial on real data."
    write_choices(file, choices, note)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["advise", "take"])
    parser.add_argument("advice", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("advice.json"))
    parser.add_argument("--only", default="", help="one data set")
    parser.add_argument("--epsilon", type=float, default=0.0, help="one epsilon")
    parser.add_argument("--rounds", type=int, default=200, help="the most rounds")
    parser.add_argument("--folder", type=Path, help="for take: where the study's files are; default: the package")
    words = parser.parse_args()
    if words.what == "take":
        print(f"wrote {take(words.advice or words.out, words.folder)}")
        return
    advise_cells(list_cells(words.only, words.rounds, words.epsilon), words.out)


if __name__ == "__main__":
    main()
