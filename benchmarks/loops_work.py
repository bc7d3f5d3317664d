"""Small problems for loops: a table, a small CNN and text classifiers. Nothing is downloaded.

table   Adult's census records where FULCRUM_DATA has them (numbers and four columns of words, 3,200), else made up
cnn     scikit-learn's 8 x 8 digits (1,280 records)
text    made-up sentences of 16 words out of 200; the class is that of the topic whose words are more frequent (3,200)
text-other  another text problem with another network, made after moo was changed for embeddings, as a check of that
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fulcrum.data import load


@dataclass(frozen=True)
class LoopProblem:
    """Records, a fresh model by seed, and how long a loop trains. batch divides the number of records."""

    name: str
    train: TensorDataset
    test: TensorDataset
    make_model: Callable[[], nn.Module]
    batch: int
    epochs: int
    source: str

    def make_loader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch, shuffle=True)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Accuracy on the test records."""
        model.eval()
        x, y = self.test.tensors
        found = float((model(x).argmax(1) == y).float().mean())
        model.train()
        return found


def _split(x: Tensor, y: Tensor, train: int, test: int) -> tuple[TensorDataset, TensorDataset]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    chosen, rest = order[:train], order[train : train + test]
    return TensorDataset(x[chosen], y[chosen]), TensorDataset(x[rest], y[rest])


# --- the table --------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    return path.read_text() if path.is_file() else gzip.decompress(path.with_suffix(".data.gz").read_bytes()).decode()


def _read_adult(folder: Path) -> tuple[Tensor, Tensor]:
    """Adult as numbers: five columns by public constants, four columns of words one-hot."""
    rows = [line.strip().rstrip(".").split(", ") for line in _read_text(folder / "adult.data").splitlines()]
    rows = [row for row in rows if len(row) == 15]
    numbers = np.array([[float(row[i]) for i in (0, 4, 10, 11, 12)] for row in rows], dtype=np.float32)
    numbers /= np.array([100.0, 16.0, 20000.0, 4000.0, 100.0], dtype=np.float32)
    words = []
    for i in (1, 5, 7, 9):
        known = sorted({row[i] for row in rows})
        words.append(np.eye(len(known), dtype=np.float32)[[known.index(row[i]) for row in rows]])
    y = np.array([row[14] == ">50K" for row in rows], dtype=np.int64)
    return torch.from_numpy(np.concatenate([numbers, *words], axis=1)), torch.from_numpy(y)


def _make_up_table() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    x = torch.rand(6000, 24, generator=stream)
    weights = torch.randn(24, generator=stream)
    noise = 0.5 * torch.randn(6000, generator=stream)
    return x, ((x - 0.5) @ weights + noise > 0.3).long()


def make_table() -> LoopProblem:
    found = [Path(base) / "adult" for base in os.environ.get("FULCRUM_DATA", "").split(os.pathsep) if base]
    found = [folder for folder in found if (folder / "adult.data").is_file() or (folder / "adult.data.gz").is_file()]
    x, y = _read_adult(found[0]) if found else _make_up_table()
    train, test = _split(x, y, 3200, 2000)
    width = x.shape[1]

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 2))

    return LoopProblem("table", train, test, make_model, 160, 10, "Adult" if found else "made-up numbers")


# --- the CNN ----------------------------------------------------------------------------------------


def make_cnn() -> LoopProblem:
    data = load("digits")
    x = torch.cat([data.x, data.x_test]).reshape(-1, 1, 8, 8)
    train, test = _split(x, torch.cat([data.y, data.y_test]), 1280, 500)

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        )

    return LoopProblem("cnn", train, test, make_model, 128, 15, "scikit-learn's digits")


# --- text -------------------------------------------------------------------------------------------

WORDS, LENGTH, TOPICS, TOPIC_WORDS = 200, 16, 4, 20


class TextModel(nn.Module):
    """Word vectors, their mean, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.hidden, self.out = nn.Linear(16, 32), nn.Linear(32, TOPICS)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.hidden(self.words(ids).mean(dim=1))))
        return found


def make_text() -> LoopProblem:
    stream = torch.Generator().manual_seed(0)
    topic = torch.randint(TOPICS, (5200,), generator=stream)
    common = torch.randint(TOPICS * TOPIC_WORDS, WORDS, (5200, LENGTH), generator=stream)
    any_topic = torch.randint(TOPICS * TOPIC_WORDS, (5200, LENGTH), generator=stream)
    own = topic[:, None] * TOPIC_WORDS + torch.randint(TOPIC_WORDS, (5200, LENGTH), generator=stream)
    chance = torch.rand(5200, LENGTH, generator=stream)
    ids = torch.where(chance < 0.25, own, torch.where(chance < 0.4, any_topic, common))
    train, test = _split(ids, topic, 3200, 2000)
    return LoopProblem("text", train, test, TextModel, 160, 12, "made-up sentences")


class OtherTextModel(nn.Module):
    """Word vectors, a convolution over positions, the largest value of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv, self.out = nn.Embedding(400, 24), nn.Conv1d(24, 32, 3, padding=1), nn.Linear(32, 6)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(torch.relu(self.conv(self.words(ids).transpose(1, 2))).amax(dim=2))
        return found


def make_other_text() -> LoopProblem:
    """Another vocabulary, length, number of topics and kind of network: nothing was changed after looking at it."""
    stream = torch.Generator().manual_seed(1)
    topic = torch.randint(6, (5200,), generator=stream)
    common = torch.randint(400, (5200, 24), generator=stream)
    own = topic[:, None] * 15 + torch.randint(15, (5200, 24), generator=stream)
    ids = torch.where(torch.rand(5200, 24, generator=stream) < 0.3, own, common)
    train, test = _split(ids, topic, 3200, 2000)
    return LoopProblem("text-other", train, test, OtherTextModel, 160, 12, "made-up sentences")


PROBLEMS: dict[str, Callable[[], LoopProblem]] = {
    "table": make_table,
    "cnn": make_cnn,
    "text": make_text,
    "text-other": make_other_text,
}
