"""The Hugging Face Trainer with a small BERT, made private. Sentences are made up, so nothing is downloaded.

python examples/loops/with_trainer.py          (needs: pip install transformers accelerate)
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import fulcrum

LENGTH, WORDS, GOOD, BAD = 12, 60, range(2, 12), range(12, 22)


class MadeUpReviews(Dataset[dict[str, Tensor]]):
    """Sentences of word numbers; a review is good where good words outnumber bad ones."""

    def __init__(self, size: int, seed: int) -> None:
        stream = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, WORDS, (size, LENGTH), generator=stream)
        good = sum((self.ids == word).sum(1) for word in GOOD)
        bad = sum((self.ids == word).sum(1) for word in BAD)
        self.labels = (good > bad).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[row], "labels": self.labels[row]}


class PrivateTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """The Trainer with a loader that is given. It must not be made anew: its samples are the ones accounted for."""

    def __init__(self, *args: Any, private_loader: DataLoader[Any], **words: Any) -> None:
        super().__init__(*args, **words)
        self.private_loader = private_loader

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self.private_loader


def compute_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The loss outside of the model, so that each example's own can be told apart."""
    return F.cross_entropy(outputs.logits, labels)


def main(epochs: int, accumulate: int, seed: int | None) -> dict[str, float]:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    shape |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # noise regularises enough
    model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **shape))
    train, test = MadeUpReviews(2000, 0), MadeUpReviews(500, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(train, batch_size=200 // accumulate, shuffle=True)
    loop = fulcrum.private(model, optimizer, loader, epsilon=8.0, epochs=epochs, accumulate=accumulate, seed=seed)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model=model,
            args=TrainingArguments(
                folder,
                num_train_epochs=epochs,
                gradient_accumulation_steps=accumulate,
                max_grad_norm=0.0,  # the rule clips
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            ),
            private_loader=loop.loader,
            eval_dataset=test,
            optimizers=(optimizer, schedule),
            compute_loss_func=compute_loss,
        )
        trainer.train()
    model.eval()
    with torch.no_grad():
        accuracy = float((model(input_ids=test.ids).logits.argmax(1) == test.labels).float().mean())
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
