"""Large samples in a small memory: gradient accumulation as many loops have it, and virtual batches.

python examples/loops/accumulation.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fulcrum
from fulcrum.data import load

EPOCHS, ACCUMULATE = 8, 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def accumulate_by_hand(seed: int | None) -> fulcrum.integrations.Privacy:
    """The loop divides by 4 and steps on every fourth batch. One step sees a Poisson sample of about 4 x 64 records."""
    data = load("digits")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=64, shuffle=True)
    model, optimizer, loader = fulcrum.private(
        model, optimizer, loader, epsilon=2.0, epochs=EPOCHS, accumulate=ACCUMULATE, seed=seed
    )
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
            if (i + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
    return loader.privacy


def virtual_batches(seed: int | None) -> fulcrum.integrations.Privacy:
    """The loop knows nothing of it: a sample of about 256 comes in pieces of about 64, and only the last one steps."""
    data = load("digits")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=256, shuffle=True)
    model, optimizer, loader = fulcrum.private(
        model, optimizer, loader, epsilon=2.0, epochs=EPOCHS, physical_batch=64, seed=seed
    )
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return loader.privacy


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument(
        "--seed", type=int, default=None, help="for a simulation; without it nobody can repeat the noise"
    )
    chosen = words.parse_args().seed
    for way in (accumulate_by_hand, virtual_batches):
        privacy = way(chosen)
        print(f"{way.__name__}: {privacy.step} steps at rate {privacy.rate:.3f}, epsilon {privacy.epsilon:.3f}")
