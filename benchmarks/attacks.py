"""Gradient inversion on MNIST, CIFAR-10 and made-up texts: results/attacks/inversion.json and docs/pictures.

    FULCRUM_DATA=... python benchmarks/attacks.py                 # about half an hour of one core
    FULCRUM_DATA=... python benchmarks/attacks.py --quick         # seconds: one image, few steps, nothing is written

Parts may be made elsewhere, several at a time, where torch, numpy and safetensors are enough, and joined here:

    python benchmarks/attacks.py --list | xargs -P 8 -I{} python benchmarks/attacks.py --part {} --out PARTS
    python benchmarks/attacks.py --join PARTS

Membership has a command of its own: `fulcrum attack membership` (docs/attacks.md has the command of each table).
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fulcrum.analysis.attacks import InversionRow, InversionSize, TokensRow, attack_inversion, attack_tokens
from fulcrum.analysis.attacks.cells import name_epsilon
from fulcrum.analysis.attacks.pages import (
    INVERSION_COLUMNS,
    TOKEN_COLUMNS,
    inversion_to_json,
    make_inversion_rows,
    make_token_rows,
)
from fulcrum.analysis.attacks.pictures import draw_reconstructions
from fulcrum.data import Dataset, from_arrays
from fulcrum.runs import folder as record
from fulcrum.settings.schema import Settings
from fulcrum.study.provenance import get_source_commit
from fulcrum.study.run_job import describe_machine

ROOT = Path(__file__).parents[1]
EPSILONS = (None, 6.38, 3.61, 1.64)
CNNS = {"mnist": "mnist-cnn", "cifar10": "cifar-cnn"}
VOCABULARY, LENGTH, WIDTH = 2000, 24, 32


def make_settings(source: str, model: str) -> Settings:
    """One local step at rate 0.05 for 100 rounds; tanh, which attacks by search follow best."""
    return Settings(method="dp-sgd").replace(
        data={"source": source},
        model={"name": model, "hidden": (64,), "activation": "tanh"},
        train={"rounds": 100, "rate": 0.05, "lr": 0.5},
        clip={"rule": "fixed", "C0": 1.0, "rehearse": False},
        run={"device": "cpu"},
    )


class TextModel(nn.Module):
    """A bag of embedded words and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.words(x).mean(dim=1))
        return found


def make_texts(records: int = 2000) -> Dataset:
    """Made-up texts of 24 words from a vocabulary of 2,000, frequencies by Zipf's law, as texts have them."""
    rng = np.random.default_rng(0)
    chances = 1 / np.arange(1, VOCABULARY + 1)
    x = rng.choice(VOCABULARY, size=(records, LENGTH), p=chances / chances.sum())
    y = (x < 20).sum(axis=1) > 8
    tensors = [torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))]
    return from_arrays(*tensors, *(t[:100] for t in tensors), name="made-up texts", classes=2, public=True)


@dataclass(frozen=True)
class Part:
    """What one process attacks: a data set, a model and an epsilon. Its name: mnist:mlp:3.61."""

    source: str
    model: str
    epsilon: float | None

    @property
    def name(self) -> str:
        """Also of its file."""
        return f"{self.source}:{self.model}:{name_epsilon(self.epsilon)}"


TEXTS = "texts"


def list_parts(sources: Sequence[str]) -> list[Part]:
    """All parts, the longest first."""
    pairs = [(source, model) for source in sources for model in (CNNS[source], "mlp")] + [(TEXTS, "embedding")]
    return [Part(source, model, epsilon) for source, model in pairs for epsilon in EPSILONS]


def run_part(part: Part, quick: bool) -> tuple[list[InversionRow], list[TokensRow]]:
    """All attacks on an mlp, those that search on the paper's CNN; or tokens from the embedding's gradient."""
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"{part.name}: {words} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)

    if part.source == TEXTS:
        settings = make_settings("digits", "linear").replace(model={"name": "auto"})
        size = InversionSize(images=2, parties=2) if quick else InversionSize(images=32, parties=16, batch=8)
        return [], attack_tokens(settings, [part.epsilon], size, dataset=make_texts(), model=TextModel(), say=say)
    small, mlp = InversionSize(1, 1, 2, 5), part.model == "mlp"
    attacks = ("dlg", "cosine", "ratio", "imprint") if mlp else ("dlg", "cosine")
    size = InversionSize(12, 5, 8, 150) if mlp else InversionSize(8, 3, 4, 100)
    settings = make_settings(part.source, part.model)
    return attack_inversion(settings, [part.epsilon], small if quick else size, attacks, say=say), []


def write_part(folder: Path, part: Part, rows: list[InversionRow], texts: list[TokensRow]) -> None:
    """A file with plain values and the images of one part."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = [[{f.name: getattr(row, f.name) for f in fields(row)} for row in found] for found in (rows, texts)]
    held = {"images": plain[0], "tokens": plain[1], "machine": describe_machine("cpu"), "commit": get_source_commit()}
    torch.save(held, folder / f"{part.name.replace(':', '-')}.pt")


def read_parts(
    folder: Path, parts: Sequence[Part]
) -> tuple[list[InversionRow], list[TokensRow], dict[str, dict[str, Any]]]:
    """The rows of all parts, and the machine and commit of each."""
    rows: list[InversionRow] = []
    texts: list[TokensRow] = []
    made = {}
    for part in parts:
        held = torch.load(folder / f"{part.name.replace(':', '-')}.pt", weights_only=True)
        rows += [InversionRow(**values) for values in held["images"]]
        texts += [TokensRow(**values) for values in held["tokens"]]
        made[part.name] = {"machine": held["machine"], "commit": held["commit"]}
    return rows, texts, made


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one image and few steps; nothing is written")
    parser.add_argument("--list", action="store_true", help="print the names of all parts")
    parser.add_argument("--part", default="", help="run this part alone and write it into --out")
    parser.add_argument("--out", type=Path, default=Path("parts"), help="folder for --part")
    parser.add_argument("--join", type=Path, help="folder with the files of all parts: write the results from them")
    parser.add_argument("--data", default="mnist,cifar10", help="data sets, separated by commas")
    words = parser.parse_args()
    parts = list_parts([source for source in words.data.split(",") if source])
    if words.list:
        print("\n".join(part.name for part in parts))
        return
    if words.part:
        part = next(part for part in parts if part.name == words.part)
        write_part(words.out, part, *run_part(part, words.quick))
        return
    made: dict[str, dict[str, Any]] = {}
    if words.join:
        rows, texts, made = read_parts(words.join, parts)
    else:
        found = [run_part(part, words.quick) for part in parts]
        rows = [row for images, _ in found for row in images]
        texts = [row for _, tokens in found for row in tokens]
    for columns, table in ((INVERSION_COLUMNS, make_inversion_rows(rows)), (TOKEN_COLUMNS, make_token_rows(texts))):
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for row in table:
            print(f"| {' | '.join(row)} |")
        print()
    if words.quick:
        return
    command = shlex.join(["python", "benchmarks/attacks.py", *sys.argv[1:]])
    settings = {"train": vars(make_settings("mnist", "mlp").train)}
    facts = {**inversion_to_json(rows, texts, settings), "command": command, "parts": made}
    out = ROOT / "results" / "attacks" / "inversion.json"
    record.write_file_atomically(out, record.to_json_text(facts).encode())
    for source in sorted({row.data for row in rows}):
        mlp = [row for row in rows if row.data == source and row.model.startswith("mlp")]
        title = f"{source}: one record per release, mlp"
        figure = draw_reconstructions(mlp, "1", title, f"{command} | {facts['date']} | {facts['commit']}")
        (ROOT / "docs" / "pictures" / f"inversion-{source}.svg").write_text(figure, encoding="utf-8")


if __name__ == "__main__":
    main()
