"""Gradient inversion on MNIST, CIFAR-10 and made-up texts: results/attacks/inversion.json and docs/pictures.

    FULCRUM_DATA=... python benchmarks/attacks.py                 # about ten minutes of one core
    FULCRUM_DATA=... python benchmarks/attacks.py --quick         # seconds: one image, few steps, nothing is written

Membership has a command of its own: `fulcrum attack membership` (docs/attacks.md has the command of each table).
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fulcrum.analysis.attacks import InversionRow, InversionSize, TokensRow, attack_inversion, attack_tokens
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


def attack_images(source: str, quick: bool) -> list[InversionRow]:
    """All attacks on an mlp, and those that search on the paper's CNN too."""
    began, rows = time.monotonic(), []
    small = InversionSize(1, 1, 2, 5)
    plan = [
        ("mlp", ("dlg", "cosine", "ratio", "imprint"), small if quick else InversionSize(4, 2, 8, 150)),
        (CNNS[source], ("dlg", "cosine"), small if quick else InversionSize(3, 1, 4, 100)),
    ]
    for model, attacks, size in plan:

        def say(words: str, model: str = model) -> None:
            print(f"{source} {model}: {words} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)

        rows += attack_inversion(make_settings(source, model), EPSILONS, size, attacks, say=say)
    return rows


def attack_texts(quick: bool) -> list[TokensRow]:
    """Tokens from the embedding's gradient."""
    settings = make_settings("digits", "linear").replace(model={"name": "auto"})
    size = InversionSize(images=2, parties=2) if quick else InversionSize(images=16, parties=8, batch=8)
    return attack_tokens(settings, EPSILONS, size, dataset=make_texts(), model=TextModel())


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one image and few steps; nothing is written")
    parser.add_argument("--data", default="mnist,cifar10", help="data sets, separated by commas")
    words = parser.parse_args()
    sources = [source for source in words.data.split(",") if source]
    found = {source: attack_images(source, words.quick) for source in sources}
    rows, texts = [row for own in found.values() for row in own], attack_texts(words.quick)
    for columns, table in ((INVERSION_COLUMNS, make_inversion_rows(rows)), (TOKEN_COLUMNS, make_token_rows(texts))):
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for row in table:
            print(f"| {' | '.join(row)} |")
        print()
    if words.quick:
        return
    command = shlex.join(["python", "benchmarks/attacks.py", *sys.argv[1:]])
    facts = {**inversion_to_json(rows, texts, {"train": vars(make_settings("mnist", "mlp").train)}), "command": command}
    out = ROOT / "results" / "attacks" / "inversion.json"
    record.write_file_atomically(out, record.to_json_text(facts).encode())
    for source, own in found.items():
        mlp = [row for row in own if row.model.startswith("mlp")]
        title = f"{source}: one record per release, mlp"
        figure = draw_reconstructions(mlp, "1", title, f"{command} | {facts['date']} | {facts['commit']}")
        (ROOT / "docs" / "pictures" / f"inversion-{source}.svg").write_text(figure, encoding="utf-8")


if __name__ == "__main__":
    main()
