"""Tasks: closed-form slopes against autograd, metrics against scikit-learn, sums that merge, errors that help."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor
from torch.nn import functional as F

from fulcrum.data.tasks import METRICS, Metric, MetricContext, Task, make_task, merge_metric_sums, task_from_loss
from fulcrum.data.tasks import losses as loss_functions
from fulcrum.data.tasks.builtin import TASKS
from fulcrum.errors import ConfigError, DataError, ModelError
from fulcrum.settings.schema import TaskSettings


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def whole(high: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def some_ignored(*shape: int) -> Tensor:
    targets = whole(4, *shape)
    targets[..., 0] = -100
    targets[0] = -100
    return targets


def task(name: str, *targets: Any, **settings: Any) -> Task:
    return make_task(TaskSettings(name=name, **settings), [np.asarray(t) for t in targets])


# --- losses ---------------------------------------------------------------------------------------

LOSSES: dict[str, tuple[Any, Tensor, Tensor]] = {
    "classes": (loss_functions.make_cross_entropy(), normal(9, 4), whole(4, 9)),
    "weighted classes": (loss_functions.make_cross_entropy((0.5, 1.0, 2.0, 7.0)), normal(9, 4), whole(4, 9)),
    "binary": (loss_functions.make_binary_cross_entropy(), 5 * normal(9, 1), whole(2, 9)),
    "weighted binary": (loss_functions.make_binary_cross_entropy((0.5, 3.0)), normal(9, 1), whole(2, 9)),
    "labels": (loss_functions.make_multilabel_cross_entropy(), normal(9, 3), whole(2, 9, 3)),
    "weighted labels": (loss_functions.make_multilabel_cross_entropy((1.0, 4.0, 0.2)), normal(9, 3), whole(2, 9, 3)),
    "tokens": (loss_functions.make_token_cross_entropy(-100), normal(9, 5, 4), some_ignored(9, 5)),
    **{
        f"{kind} {dims}": (
            loss_functions.make_regression_loss(kind, 2.0, 0.5, 0.7),
            normal(9, dims),
            3 * (normal(9, seed=4) if dims == 1 else normal(9, dims, seed=4)),
        )
        for kind in ("squared", "absolute", "huber")
        for dims in (1, 3)
    },
}


@pytest.mark.parametrize("name", LOSSES)
def test_slopes_are_the_derivative_of_the_loss(name: str) -> None:
    (loss, slopes), outputs, targets = LOSSES[name]
    by_autograd = loss_functions.make_autograd_gradient(loss)
    for o, t in ((outputs, targets), (outputs.expand(2, 3, *outputs.shape), targets.expand(2, 3, *targets.shape))):
        losses, slope = slopes(o, t)
        true_losses, true_slope = by_autograd(o, t)
        assert losses.dtype == slope.dtype == torch.float64
        assert losses.shape == o.shape[: o.dim() - (2 if name == "tokens" else 1)]
        torch.testing.assert_close(losses, true_losses, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(slope, true_slope, rtol=1e-12, atol=1e-14)
    step = 1e-6  # by differences too, so that autograd and formula cannot share a mistake
    direction = normal(*outputs.shape, seed=9)
    ahead, behind = (loss(outputs + sign * step * direction, targets) for sign in (1, -1))
    along = (slopes(outputs, targets)[1] * direction).flatten(1).sum(dim=1)
    torch.testing.assert_close((ahead - behind) / (2 * step), along, rtol=1e-5, atol=1e-7)


def test_slopes_without_weights_are_told_apart() -> None:
    for kind in ("classes", "binary", "labels"):
        (_, slopes), outputs, targets = LOSSES[kind]
        (loss, _), _, _ = LOSSES[f"weighted {kind}"]
        true = loss_functions.make_autograd_gradient(loss)(outputs, targets)[1]
        assert not torch.allclose(slopes(outputs, targets)[1], true, rtol=1e-2)


def test_losses_are_those_of_pytorch() -> None:
    weights = (0.5, 1.0, 2.0, 7.0)
    o, t = normal(9, 4), whole(4, 9)
    wanted = F.cross_entropy(o, t, torch.tensor(weights, dtype=o.dtype), reduction="none")
    torch.testing.assert_close(loss_functions.make_cross_entropy(weights)[0](o, t), wanted)
    logit, answer = normal(9, 1), whole(2, 9)
    wanted = F.binary_cross_entropy_with_logits(logit[:, 0], answer.double(), reduction="none")
    torch.testing.assert_close(loss_functions.make_binary_cross_entropy()[0](logit, answer), wanted)
    labels, answers = normal(9, 3), whole(2, 9, 3)
    weight = torch.tensor((1.0, 4.0, 0.2), dtype=torch.float64)
    wanted = F.binary_cross_entropy_with_logits(labels, answers.double(), pos_weight=weight, reduction="none")
    found = loss_functions.make_multilabel_cross_entropy((1.0, 4.0, 0.2))[0](labels, answers)
    torch.testing.assert_close(found, wanted.mean(dim=1))
    words, tokens = normal(9, 5, 4), some_ignored(9, 5)
    each = F.cross_entropy(words.transpose(1, 2), tokens, ignore_index=-100, reduction="none").sum(dim=1)
    counts = (tokens != -100).sum(dim=1)
    found = loss_functions.make_token_cross_entropy(-100)[0](words, tokens)
    torch.testing.assert_close(found, each / counts.clamp_min(1))
    assert float(found[0]) == 0
    numbers, wanted_numbers = normal(9, 3), normal(9, 3, seed=5)
    wanted = F.huber_loss(numbers, wanted_numbers, reduction="none", delta=0.7).mean(dim=1)
    torch.testing.assert_close(
        loss_functions.make_regression_loss("huber", 1, 0, 0.7)[0](numbers, wanted_numbers), wanted
    )


def test_half_precision_is_widened() -> None:
    for (_, slopes), outputs, targets in LOSSES.values():
        losses, slope = slopes(outputs.bfloat16(), targets)
        assert losses.dtype == slope.dtype == torch.float32


def test_a_loss_of_ones_own_sees_one_batch() -> None:
    """F.cross_entropy takes [B, O] alone; runs and clients before the examples are folded away, and come back."""
    own = task_from_loss(lambda o, t: F.cross_entropy(o, t, reduction="none"), 4)
    o, t = normal(2, 3, 9, 4), whole(4, 2, 3, 9)
    losses, slopes = own.compute_losses_and_gradients(o, t)
    wanted, wanted_slopes = loss_functions.make_cross_entropy()[1](o, t)
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(slopes, wanted_slopes)
    with pytest.raises(ModelError, match="one value an example"):
        task_from_loss(F.cross_entropy, 4).loss(o, t)


# --- metrics --------------------------------------------------------------------------------------

N = 3000
BINARY = (2 * normal(N, 1) + whole(2, N)[:, None] - 1.5, whole(2, N))
CLASSES = (normal(N, 4) + F.one_hot(whole(4, N), 4), whole(4, N))
LABELS = (normal(N, 3) + whole(2, N, 3), whole(2, N, 3))
PAIRS = (normal(N, 2) + normal(N, 2, seed=7), 3 * normal(N, 2, seed=7) + 1)
NUMBER = (PAIRS[0][:, :1], PAIRS[1][:, 0])
TOKENS = (normal(40, 6, 5), torch.where(whole(3, 40, 6) == 0, -100, whole(5, 40, 6)))


def yes(outputs: Tensor) -> Any:
    return torch.sigmoid(outputs[:, 0].float()).double().numpy()


def calibration(chance: Any, right: Any) -> float:
    """Guo et al. 2017, by their formula."""
    place = np.minimum((chance * 15).astype(int), 14)
    bins = [place == b for b in range(15) if (place == b).any()]
    return float(sum(abs(chance[b].mean() - right[b].mean()) * b.mean() for b in bins))


def counted(o: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return o[t != -100], t[t != -100]


Oracle = Callable[[Tensor, Tensor], float]
BY_SKLEARN: dict[str, tuple[str, tuple[Tensor, Tensor], dict[str, Oracle]]] = {
    "binary": (
        "binary",
        BINARY,
        {
            "accuracy": lambda o, t: sk.accuracy_score(t, yes(o) >= 0.5),
            "balanced_accuracy": lambda o, t: sk.balanced_accuracy_score(t, yes(o) >= 0.5),
            "f1": lambda o, t: sk.f1_score(t, yes(o) >= 0.5),
            "sensitivity": lambda o, t: sk.recall_score(t, yes(o) >= 0.5),
            "specificity": lambda o, t: sk.recall_score(1 - t, yes(o) < 0.5),
            "auc": lambda o, t: sk.roc_auc_score(t, o[:, 0]),
            "average_precision": lambda o, t: sk.average_precision_score(t, o[:, 0]),
            "brier": lambda o, t: sk.brier_score_loss(t, yes(o)),
            "log_loss": lambda o, t: sk.log_loss(t, yes(o)),
            "calibration_error": lambda o, t: calibration(yes(o), t.double().numpy()),
            "loss": lambda o, t: sk.log_loss(t, yes(o)),
        },
    ),
    "classification": (
        "classification",
        CLASSES,
        {
            "accuracy": lambda o, t: sk.accuracy_score(t, o.argmax(dim=1)),
            "balanced_accuracy": lambda o, t: sk.balanced_accuracy_score(t, o.argmax(dim=1)),
            "log_loss": lambda o, t: sk.log_loss(t, o.softmax(dim=1)),
            "brier": lambda o, t: float((o.softmax(dim=1) - F.one_hot(t, 4)).square().sum(dim=1).mean()),
            "calibration_error": lambda o, t: calibration(
                o.float().softmax(dim=1).amax(dim=1).double().numpy(), (o.argmax(dim=1) == t).double().numpy()
            ),
            "loss": lambda o, t: sk.log_loss(t, o.softmax(dim=1)),
        },
    ),
    "multilabel": (
        "multilabel",
        LABELS,
        {
            "accuracy": lambda o, t: float(((o > 0) == t.bool()).double().mean()),
            "auc": lambda o, t: sk.roc_auc_score(t, o, average="macro"),
            "average_precision": lambda o, t: sk.average_precision_score(t, o, average="macro"),
            "f1": lambda o, t: sk.f1_score(t, o > 0, average="micro"),
            "log_loss": lambda o, t: sk.log_loss(t.flatten(), torch.sigmoid(o).flatten()),
            "brier": lambda o, t: sk.brier_score_loss(t.flatten(), torch.sigmoid(o).flatten()),
        },
    ),
    "numbers": (
        "regression",
        NUMBER,
        {
            "rmse": lambda o, t: sk.root_mean_squared_error(t, 2 * o[:, 0] + 1),
            "mae": lambda o, t: sk.mean_absolute_error(t, 2 * o[:, 0] + 1),
            "r2": lambda o, t: sk.r2_score(t, 2 * o[:, 0] + 1),
        },
    ),
    "pairs of numbers": (
        "regression",
        PAIRS,
        {
            "rmse": lambda o, t: math.sqrt(sk.mean_squared_error(t, 2 * o + 1)),
            "mae": lambda o, t: sk.mean_absolute_error(t, 2 * o + 1),
            "r2": lambda o, t: sk.r2_score(t, 2 * o + 1),
        },
    ),
    "tokens": (
        "tokens",
        TOKENS,
        {
            "accuracy": lambda o, t: sk.accuracy_score(counted(o, t)[1], counted(o, t)[0].argmax(dim=1)),
            "perplexity": lambda o, t: math.exp(sk.log_loss(counted(o, t)[1], counted(o, t)[0].softmax(dim=1))),
        },
    ),
}


def make(case: str) -> tuple[Task, Tensor, Tensor, dict[str, Oracle]]:
    kind, (outputs, targets), oracles = BY_SKLEARN[case]
    more: dict[str, Any] = {"scale": 2.0, "offset": 1.0} if kind == "regression" else {}
    return task(kind, targets, metrics=tuple(oracles), **more), outputs, targets, oracles


@pytest.mark.parametrize("case", BY_SKLEARN)
def test_metrics_are_those_of_scikit_learn(case: str) -> None:
    made, outputs, targets, oracles = make(case)
    cuts = [0, 1, 7, 7, len(targets) // 2, len(targets)]  # uneven batches, one of them empty
    merged: dict[str, Tensor] | None = None
    for start, stop in itertools.pairwise(cuts):
        merged = merge_metric_sums(merged, made.sums(outputs[start:stop], targets[start:stop]))
    assert merged is not None
    found, at_once = made.results(merged), made.results(made.sums(outputs, targets))
    for name, oracle in oracles.items():
        wanted = oracle(outputs, targets)
        close: dict[str, Any] = {"abs": 1e-4} if name in ("auc", "average_precision") else {"rel": 1e-5}
        assert found[name] == pytest.approx(wanted, **close), name
        assert found[name] == pytest.approx(at_once[name], rel=1e-9)
        worse = oracle(-outputs, targets)
        assert found[name] != pytest.approx(worse, rel=1e-2), f"{name}: wrong predictions must show"
    assert set(found) >= {"loss", *oracles}


@pytest.mark.parametrize("case", BY_SKLEARN)
def test_metrics_of_several_runs_at_once(case: str) -> None:
    made, outputs, targets, _ = make(case)
    runs = torch.stack([outputs, -outputs, 0.5 * outputs])
    sums = made.sums(runs, targets.expand(3, *targets.shape))
    for place in range(3):
        alone = made.results(made.sums(runs[place], targets))
        for name, metric in made.metrics.items():
            result = metric.result(sums[name])
            assert result.shape == (3,)
            assert float(result[place]) == pytest.approx(alone[name], rel=1e-9)


@pytest.mark.parametrize("case", BY_SKLEARN)
def test_nothing_to_count_is_not_a_number(case: str) -> None:
    made, outputs, targets, _ = make(case)
    assert all(math.isnan(value) for value in made.results(made.sums(outputs[:0], targets[:0])).values())


@pytest.mark.parametrize(
    ("shift", "spread", "close"),
    [
        *((0.0, spread, 1e-4) for spread in (1e-3, 0.1, 1.0, 30.0)),
        *((shift, 1.0, 1e-4) for shift in (5.0, -8.0)),
        *((shift, 0.1, 1e-3) for shift in (5.0, -8.0)),  # scores of one sign, close together: some ties
    ],
)
def test_areas_do_not_depend_on_where_scores_lie(shift: float, spread: float, close: float) -> None:
    """A bin of scores is narrow beside what logits differ by."""
    targets = whole(2, N)
    scores = (shift + spread * (normal(N) + targets)).float()[:, None]
    made = task("binary", targets)
    found = made.results(made.sums(scores, targets))
    assert found["auc"] == pytest.approx(sk.roc_auc_score(targets, scores[:, 0]), abs=close)
    assert found["average_precision"] == pytest.approx(
        sk.average_precision_score(targets, scores[:, 0]), abs=10 * close
    )


def test_ties_count_one_half_and_odd_scores_do_no_harm() -> None:
    targets = torch.tensor([0, 1, 0, 1])
    made = task("binary", targets)
    assert made.results(made.sums(torch.zeros(4, 1), targets))["auc"] == 0.5
    odd = torch.tensor([[-math.inf], [math.inf], [-1e30], [1e30]])
    assert made.metrics["auc"].result(made.metrics["auc"].sums(odd, targets)) == 1.0
    made.metrics["auc"].sums(torch.full((4, 1), math.nan), targets)


def test_one_class_only() -> None:
    outputs, none = BINARY[0][:20], torch.zeros(20, dtype=torch.int64)
    made = task("binary", BINARY[1])
    found = made.results(made.sums(outputs, none))
    for name in ("auc", "average_precision", "sensitivity"):
        assert math.isnan(found[name])
    assert found["specificity"] == pytest.approx(found["accuracy"])
    assert found["balanced_accuracy"] == pytest.approx(found["accuracy"]), "classes without examples do not count"
    every = made.results(made.sums(outputs, none + 1))
    assert math.isnan(every["auc"])
    assert math.isnan(every["specificity"])
    assert every["sensitivity"] == pytest.approx(1 - found["specificity"])
    labels = task("multilabel", LABELS[1])
    targets = LABELS[1].clone()
    targets[:, 1] = 0  # this label does not count
    wanted = np.mean([sk.roc_auc_score(targets[:, k], LABELS[0][:, k]) for k in (0, 2)])
    assert labels.results(labels.sums(LABELS[0], targets))["auc"] == pytest.approx(wanted, abs=1e-4)


def test_targets_that_do_not_vary_have_no_r2() -> None:
    made = task("regression", np.zeros(4, dtype=np.float32), scale=1.0)
    assert math.isnan(made.results(made.sums(torch.ones(4, 1), torch.full((4,), 3.7)))["r2"])


def test_a_threshold_moves_what_counts_as_yes() -> None:
    outputs, targets = BINARY
    low, high = (task("binary", targets, threshold=t) for t in (0.1, 0.9))
    found = [made.results(made.sums(outputs, targets)) for made in (low, high)]
    for metrics, threshold in zip(found, (0.1, 0.9), strict=True):
        assert metrics["sensitivity"] == pytest.approx(sk.recall_score(targets, yes(outputs) >= threshold))
        assert metrics["accuracy"] == pytest.approx(sk.accuracy_score(targets, yes(outputs) >= threshold))
    assert found[0]["sensitivity"] > found[1]["sensitivity"]
    assert found[0]["auc"] == found[1]["auc"]


# --- metrics and tasks of one's own -----------------------------------------------------------------


def off_by_one(context: MetricContext) -> Metric:
    """How many examples are off by more than 1."""

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        far = ((context.predict(outputs) - targets).abs() > 1).double()
        return torch.stack([far.sum(dim=-1), torch.ones_like(far).sum(dim=-1)], dim=-1)

    return Metric(sums, lambda sums: sums[..., 0] / sums[..., 1], higher_is_better=False)


def test_a_metric_by_its_place_and_by_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, targets = NUMBER
    monkeypatch.setattr(METRICS, "_values", dict(METRICS._values))  # what is added here is gone afterwards
    METRICS.register("off_by_one")(off_by_one)
    names = (f"{__name__}:off_by_one", "off_by_one")
    made = task("regression", targets, metrics=names, score="off_by_one", scale=1.0)
    found = made.results(made.sums(outputs, targets))
    wanted = float(((outputs[:, 0].float() - targets).abs() > 1).double().mean())
    assert [found[name] for name in names] == pytest.approx([wanted, wanted])
    assert made.score == "off_by_one"
    assert not made.higher_is_better
    with pytest.raises(ConfigError, match="metric"):
        task("regression", targets, metrics=("no_such_metric",))
    with pytest.raises(ConfigError, match=r"task\.score"):
        task("regression", targets, score="auc")


def test_a_task_by_its_place() -> None:
    made = make_task(TaskSettings(name=f"{__name__}:OWN"), [])
    assert made is OWN
    with pytest.raises(ConfigError, match="not a fulcrum Task"):
        make_task(TaskSettings(name=f"{__name__}:no_task"), [])
    assert "classification" in TASKS


OWN = task_from_loss(lambda o, t: (o.squeeze(-1) - t).abs())


def no_task(settings: TaskSettings, targets: Any) -> str:
    return "no task"


@pytest.mark.parametrize(
    ("kind", "targets", "metric", "words"),
    [
        ("classification", whole(4, 9), "auc", "auc is of yes and no; this task has 4 classes"),
        ("classification", whole(4, 9), "f1", "f1 is of yes and no"),
        ("classification", whole(4, 9), "perplexity", "sequences of tokens"),
        ("regression", normal(9, 2), "auc", "auc is a metric of classes"),
        ("regression", normal(9), "log_loss", "log_loss is a metric of classes"),
        ("regression", normal(9), "brier", "brier is a metric of classes"),
        ("multilabel", whole(2, 9, 3), "balanced_accuracy", "balanced_accuracy is a metric of classes"),
        ("tokens", whole(5, 9, 3), "calibration_error", "calibration_error is a metric of classes"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_at_once(kind: str, targets: Tensor, metric: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        task(kind, targets, metrics=(metric,))


@pytest.mark.parametrize(
    ("kind", "settings", "targets", "words"),
    [
        ("classification", {"classes": 2}, [0.5, 1.0], "integers 0..classes-1"),
        ("classification", {"classes": 2}, [0, 2], "must lie in 0..1"),
        ("classification", {"classes": 2}, [-1, 1], "hold -1"),
        ("binary", {}, [0, 1, 2], "0..1"),
        ("multilabel", {"classes": 3}, [[0, 1]], "2 labels per record; the task has 3"),
        ("regression", {}, [0.0, math.nan], "finite"),
        ("regression", {}, ["a", "b"], "real numbers"),
        ("tokens", {"classes": 4}, [[0, 4]], "token 4"),
    ],
)
def test_targets_that_do_not_fit(kind: str, settings: dict[str, Any], targets: Any, words: str) -> None:
    made = task(kind, **settings) if kind != "multilabel" else task(kind, np.zeros((1, 3), dtype=int), **settings)
    with pytest.raises(DataError, match=words):
        made.check_targets("y", targets)


def test_class_weights_are_one_per_class() -> None:
    for weights in ((1.0,), (1.0, 0.0, 1.0), (1.0, math.inf, 1.0)):
        with pytest.raises(ConfigError, match="class_weights"):
            task("classification", [0, 1, 2], class_weights=weights)
