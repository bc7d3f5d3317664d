"""An ordinary PyTorch loop, made private by one line.

python examples/loops/plain.py --epsilon 3
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fulcrum
from fulcrum.data import load


def main(epsilon: float, epochs: int, seed: int | None) -> float:
    data = load("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=128, shuffle=True)
    criterion = nn.CrossEntropyLoss()

    model, optimizer, loader = fulcrum.private(
        model, optimizer, loader, epsilon=epsilon, delta=1e-5, epochs=epochs, seed=seed, name="digits"
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)  # a factor of the rule's step

    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            accuracy = float((model(data.x_test).argmax(1) == data.y_test).float().mean())
        if epoch % 5 == 4:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}, epsilon {loader.privacy.epsilon:.3f}")

    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    with open("PRIVACY.md", "w", encoding="utf-8") as page:
        page.write(loader.privacy.statement())
    return accuracy


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("--epsilon", type=float, default=3.0)
    words.add_argument("--epochs", type=int, default=20)
    words.add_argument(
        "--seed", type=int, default=None, help="for a simulation; without it nobody can repeat the noise"
    )
    given = words.parse_args()
    main(given.epsilon, given.epochs, given.seed)
