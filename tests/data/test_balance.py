"""Unequal classes: declared shares weigh the loss or shift its logits; nothing is counted in labels."""

from __future__ import annotations

import math

import pytest
import torch

from fulcrum.data.tasks import make_task
from fulcrum.errors import ConfigError, ModelError
from fulcrum.models.build import build_model
from fulcrum.settings.schema import Model, TaskSettings
from fulcrum.training.server import compute_client_weights


def test_logit_adjustment_is_the_loss_of_shifted_logits():
    shares = (0.7, 0.2, 0.1)
    plain = make_task(TaskSettings("classification", classes=3), [])
    asked = TaskSettings("classification", classes=3, class_balance=shares, imbalance="logits")
    task = make_task(asked, [])
    outputs, targets = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    shifted = outputs + torch.tensor(shares, dtype=torch.float64).log()
    assert task.loss(outputs, targets).allclose(plain.loss(shifted, targets))
    losses, slopes = task.compute_losses_and_gradients(outputs, targets)
    leaf = outputs.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(task.loss(leaf, targets).sum(), leaf)
    assert slopes.allclose(wanted)
    assert losses.allclose(task.loss(outputs, targets))
    assert torch.equal(task.predict(outputs), outputs.argmax(dim=-1)), "predictions are those of the model itself"


@pytest.mark.parametrize("imbalance", ["logits", "weights"])
def test_a_model_without_features_then_finds_classes_equally_likely(imbalance: str):
    """One logit, trained on 8% positives: its best value is 0, where a plain loss would have it at log(0.08 / 0.92)."""
    targets = torch.cat([torch.zeros(92), torch.ones(8)]).long()
    asked = TaskSettings("binary", class_balance=(0.92, 0.08), imbalance=imbalance)
    for task, best in ((make_task(asked, []), 0.0), (make_task(TaskSettings("binary"), []), math.log(0.08 / 0.92))):
        _, slopes = task.compute_losses_and_gradients(torch.full((100, 1), best), targets)
        assert float(slopes.sum()) == pytest.approx(0.0, abs=1e-4)


def test_labels_are_balanced_one_by_one():
    asked = TaskSettings("multilabel", classes=2, class_balance=(0.1, 0.5), imbalance="weights")
    _, slopes = make_task(asked, []).compute_losses_and_gradients(torch.zeros(10, 2), torch.eye(10, 2).long() * 0)
    assert slopes.shape == (10, 2)
    targets = torch.zeros(10, 2, dtype=torch.int64)
    targets[0, 0], targets[:5, 1] = 1, 1
    _, slopes = make_task(asked, []).compute_losses_and_gradients(torch.zeros(10, 2), targets)
    assert slopes.sum(dim=0).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"imbalance": "logits"}, "needs task.class_balance"),
        ({"imbalance": "weights", "class_balance": (0.5, 0.2)}, "add up to 1"),
        ({"imbalance": "weights", "class_balance": (1.0, 0.0)}, "between 0 and 1"),
        ({"imbalance": "weights", "class_balance": (0.2, 0.3, 0.5)}, "needs 2"),
        ({"imbalance": "weights", "class_balance": (0.9, 0.1), "class_weights": (1.0, 2.0)}, "leave one of them out"),
    ],
)
def test_wrong_shares_are_one_sentence(settings: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        make_task(TaskSettings("binary", **settings), [])  # type: ignore[arg-type]


def test_weights_by_the_root_lie_between_the_two_others():
    by = {name: compute_client_weights([900, 100], name)[1].item() for name in ("examples", "sqrt", "uniform")}
    assert by == pytest.approx({"examples": 0.1, "sqrt": 0.25, "uniform": 0.5})


def test_zeros_are_for_models_of_one_layer():
    model = build_model(Model(name="linear", init="zeros"), (4,), 2, seed=0)
    assert all(not parameter.any() for parameter in model.parameters())
    with pytest.raises(ModelError, match="would never learn from zeros"):
        build_model(Model(name="mlp", init="zeros"), (4,), 2, seed=0)
