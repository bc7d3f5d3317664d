"""A LightningModule, made private before `Trainer.fit`. Its training_step stays as it is.

python examples/loops/with_lightning.py        (needs: pip install lightning)
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fulcrum
from fulcrum.data import load


class Digits(LightningModule):
    """An ordinary module; the one thing to know is that the optimizer is made before the training starts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def main(epochs: int, accumulate: int, seed: int | None) -> dict[str, float]:
    data = load("digits")
    torch.manual_seed(0)
    module = Digits()
    train = DataLoader(TensorDataset(data.x, data.y), batch_size=128 // accumulate, shuffle=True)
    test = DataLoader(TensorDataset(data.x_test, data.y_test), batch_size=500)
    loop = fulcrum.private(
        module, module.optimizer, train, epsilon=3.0, epochs=epochs, accumulate=accumulate, seed=seed
    )
    trainer = Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loop.loader, test)
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"accuracy {accuracy:.3f}, epsilon {loop.privacy.epsilon:.3f} after {loop.privacy.step} steps")
    return {"accuracy": accuracy, "epsilon": loop.privacy.epsilon, "steps": loop.privacy.step}


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("--epochs", type=int, default=10)
    words.add_argument("--accumulate", type=int, default=1)
    words.add_argument(
        "--seed", type=int, default=None, help="for a simulation; without it nobody can repeat the noise"
    )
    given = words.parse_args()
    main(given.epochs, given.accumulate, given.seed)
