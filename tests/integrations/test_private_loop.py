"""`fulcrum.private` in an ordinary loop: the same mathematics as a run, whatever the loop's loss is."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fulcrum
from fulcrum.errors import BudgetError, ConfigError, DataError, ModelError, RunError
from fulcrum.gradients import record_gradients
from fulcrum.integrations.following import PROBE_TASK

N, WIDTH, CLASSES = 60, 6, 3
NO_NOISE = {"method": "dp-sgd", "sigma": 1e-6, "C0": 20.0, "seed": 3}
"""A release that is the exact sum, to be compared with."""


def make_data(n: int = N, seed: int = 0) -> TensorDataset:
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(n, WIDTH, generator=stream)
    return TensorDataset(x, torch.randint(CLASSES, (n,), generator=stream))


def make_model(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def start(model=None, data=None, optimizer=None, batch_size=12, lr=0.5, workers=0, **words):
    model = model or make_model()
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    loader = DataLoader(data or make_data(), batch_size=batch_size, shuffle=True, num_workers=workers)
    if "epsilon" not in words and "sigma" not in words:
        words["epsilon"] = 5.0
    return fulcrum.private(model, optimizer, loader, **{"seed": 1, "epochs": 2, **words})


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def read_grads(model: nn.Module) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def run(loop, steps: int | None = None, criterion=F.cross_entropy) -> None:
    """The user's loop, to the end or for some steps."""
    model, optimizer, loader = loop
    steps = loop.privacy.steps if steps is None else loop.privacy.step + steps
    while loop.privacy.step < steps:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            if loop.privacy.step >= steps:
                break


# --- the mathematics --------------------------------------------------------------------------------


def test_a_step_is_the_house_step():
    """Clipped by the same recorder, noised by the same stream, divided by the expected batch."""
    loop = start(method="dp-sgd", sigma=1.0, C0=0.3, lr=0.5, seed=4)
    model, data = loop.model, make_data()
    before, layout = flat(model), loop.privacy._terms.layout
    sample = loop.privacy.draw_sample(0)
    x, y = data.tensors[0][sample.rows], data.tensors[1][sample.rows]
    task = copy.copy(PROBE_TASK)
    object.__setattr__(task, "loss", lambda out, y: F.cross_entropy(out, y, reduction="none"))
    tape = record_gradients(make_model(), layout, before, x, y, task)
    clipped = tape.weighted_sum((0.3 / tape.norms()).clamp(max=1.0))
    noise = loop.privacy._account.randomness.normal(("noise", 0, 0, 0), len(before))
    wanted = before - 0.5 * (clipped + 0.3 * noise.float()) / 12
    run(loop, 1)
    assert torch.allclose(flat(model), wanted, atol=1e-5)
    assert not torch.allclose(flat(model), before - 0.5 * clipped / 12, atol=1e-3)


def one_by_one(loss) -> torch.Tensor:
    """The gradient that a private step must release at no noise: the examples' own, over the expected batch."""
    loop = start(**NO_NOISE)
    model, data = make_model(), make_data()
    total = torch.zeros_like(flat(model))
    for row in loop.privacy.draw_sample(0).rows.tolist():
        model.zero_grad()
        loss(model(data.tensors[0][row : row + 1]), data.tensors[1][row : row + 1]).backward()
        total += read_grads(model)
    return total / 12


WEIGHTS = torch.tensor([1.0, 5.0, 0.2])
LOSSES = {
    "mean": (F.cross_entropy, F.cross_entropy),
    "module": (nn.CrossEntropyLoss(), F.cross_entropy),
    "half": (lambda o, y: 0.5 * F.cross_entropy(o, y), lambda o, y: 0.5 * F.cross_entropy(o, y)),
    "sum over length": (lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(y), F.cross_entropy),
    "none then mean": (lambda o, y: F.cross_entropy(o, y, reduction="none").mean(), F.cross_entropy),
    "class weights": (
        lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS),
        lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS, reduction="sum"),
    ),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "nll": (lambda o, y: F.nll_loss(o.log_softmax(1), y), F.cross_entropy),
    "by hand": (
        lambda o, y: -o.log_softmax(-1).gather(1, y[:, None]).mean(),
        F.cross_entropy,
    ),
    "squares": (
        lambda o, y: ((o - F.one_hot(y, CLASSES)) ** 2).mean(),
        lambda o, y: ((o - F.one_hot(y, CLASSES)) ** 2).mean(),
    ),
    "mse": (
        lambda o, y: F.mse_loss(o, F.one_hot(y, CLASSES).float()),
        lambda o, y: F.mse_loss(o, F.one_hot(y, CLASSES).float()),
    ),
    "bce": (
        lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, CLASSES).float(), pos_weight=WEIGHTS),
        lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, CLASSES).float(), pos_weight=WEIGHTS),
    ),
    "two terms": (
        lambda o, y: F.cross_entropy(o, y) + 0.1 * o.square().mean(),
        lambda o, y: F.cross_entropy(o, y) + 0.1 * o.square().mean(),
    ),
    "with detach": (
        lambda o, y: (o.detach().softmax(1)[:, :1] * F.cross_entropy(o, y, reduction="none")[:, None]).mean(),
        lambda o, y: (o.detach().softmax(1)[:, :1] * F.cross_entropy(o, y, reduction="none")[:, None]).mean(),
    ),
    "loop of rows": (
        lambda o, y: torch.stack([F.cross_entropy(a[None], b[None]) for a, b in zip(o, y, strict=True)]).mean(),
        None,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_means_of_examples(name):
    given, own = LOSSES[name]
    loop = start(lr=1.0, **NO_NOISE)
    before = flat(loop.model)
    if own is None:  # rows taken out one by one cannot be played for another example
        with pytest.raises(ModelError, match=r"one example alone|neither the mean"):
            run(loop, 1, given)
        return
    run(loop, 1, given)
    assert torch.allclose(before - flat(loop.model), one_by_one(own), atol=2e-5), name


def test_a_sum_stays_a_sum_for_the_users_own_learning_rate():
    loop = start(lr=1.0, **NO_NOISE)
    before = flat(loop.model)
    run(loop, 1, lambda o, y: F.cross_entropy(o, y, reduction="sum"))
    assert torch.allclose(before - flat(loop.model), 12 * one_by_one(F.cross_entropy), atol=2e-4)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids):
        return self.out(self.embed(ids).cumsum(1))


def test_an_example_does_not_see_how_many_tokens_the_others_have():
    """The mean over all tokens of a batch divides by a number that depends on everybody: here each has its own."""
    torch.manual_seed(0)
    ids = torch.randint(7, (20, 5))
    targets = torch.randint(7, (20, 5))
    targets[:10, 1:] = -100  # ten short ones
    data, model = TensorDataset(ids, targets), Tokens()
    own = copy.deepcopy(model)
    loop = start(model, data, lr=1.0, **{**NO_NOISE, "epochs": 1})
    before = flat(model)
    run(loop, 1, lambda o, y: F.cross_entropy(o.view(-1, 7), y.view(-1)))
    total = torch.zeros_like(before)
    sample = start(own, data, **{**NO_NOISE, "epochs": 1}).privacy.draw_sample(0)
    own.eval()
    for row in sample.rows.tolist():
        own.zero_grad()
        F.cross_entropy(own(ids[row : row + 1])[0], targets[row]).backward()
        total += read_grads(own)
    assert torch.allclose(before - flat(model), total / 12, atol=2e-5)


# --- what is refused --------------------------------------------------------------------------------


def contrast(o, y):
    near = F.normalize(o, dim=1) @ F.normalize(o, dim=1).T
    return F.cross_entropy(near, torch.arange(len(o)))


MIXING = {
    "contrast": contrast,
    "largest": lambda o, y: F.cross_entropy(o, y, reduction="none").max(),
    "hardest": lambda o, y: F.cross_entropy(o, y, reduction="none").topk(3)[0].mean(),
    "centred": lambda o, y: F.cross_entropy(o - o.mean(0), y),
    "centred by detached": lambda o, y: F.cross_entropy(o - o.detach().mean(0), y),
    "weighted by its own": lambda o, y: (
        (e := F.cross_entropy(o, y, reduction="none")) * (e.detach() / e.detach().sum())
    ).sum(),
    "rolled": lambda o, y: (o * o.roll(1, 0)).sum(1).mean(),
    "first": lambda o, y: F.cross_entropy(o[:1], y[:1]),
    "normalised": lambda o, y: (lambda e: e / e.detach())(F.cross_entropy(o, y)) * 0.7 + (o - o.std(0)).square().mean(),
}


@pytest.mark.parametrize("name", MIXING)
def test_losses_that_mix_examples_are_refused(name):
    loop = start()
    before = flat(loop.model)
    with pytest.raises(ModelError):
        run(loop, 1, MIXING[name])
    assert loop.privacy.step == 0
    assert torch.equal(flat(loop.model), before)
    assert loop.privacy.epsilon == 0


def test_a_number_that_changes_from_batch_to_batch_is_refused():
    """A division by a count of the batch is a leak even where each example's loss is right."""
    loop = start(batch_size=20)
    with pytest.raises(ModelError, match="changes from batch to batch"):
        run(loop, 3, lambda o, y: F.cross_entropy(o, y, reduction="sum") / (y > 0).sum())
    numbers = iter(range(1, 99))
    with pytest.raises(ModelError, match="changes from batch to batch"):
        run(start(), 3, lambda o, y: F.cross_entropy(o, y) * (0.5 + next(numbers)))
    run(start(public_numbers=True), 3, lambda o, y: F.cross_entropy(o, y) * (0.5 + next(numbers)))


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.out(x - x.mean(0))


def test_models_that_mix_examples_are_refused():
    with pytest.raises(ModelError, match="BatchNorm1d"):
        start(nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)))
    with pytest.raises(ModelError, match="mixes the examples"):
        run(start(Centred()), 1)


def test_gradients_that_go_another_way_are_refused():
    loop = start()
    model, optimizer, loader = loop
    x, y = next(iter(loader))
    F.cross_entropy(model[2](model[1](model[0](x))), y).backward()  # layers called by hand
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ModelError, match=r"'0.weight' has a gradient without noise"):
        optimizer.step()
    assert loop.privacy.step == 0

    loop = start()
    model, optimizer, loader = loop
    x, y = next(iter(loader))
    with pytest.raises(ModelError, match="penalty="):
        (F.cross_entropy(model(x), y) + 0.1 * model[0].weight.square().sum()).backward()
    with pytest.raises(ModelError, match="another way"):
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x), y)).backward()  # two passes
    model.eval()
    F.cross_entropy(model(x), y).backward()
    model.train()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ModelError, match="without noise"):
        optimizer.step()
    assert loop.privacy.step == 0


def test_a_penalty_without_data_is_added():
    loop = start(lr=1.0, penalty=lambda model: 0.5 * model[0].weight.square().sum(), **NO_NOISE)
    before, first = flat(loop.model), loop.model[0].weight.detach().clone()
    run(loop, 1)
    moved = before - flat(loop.model) - one_by_one(F.cross_entropy)
    assert torch.allclose(moved[: first.numel()], first.flatten(), atol=2e-5)
    assert torch.allclose(moved[first.numel() :], torch.zeros_like(moved[first.numel() :]), atol=2e-5)


def test_backward_twice_and_steps_without_backward():
    loop = start()
    model, optimizer, loader = loop
    x, y = next(iter(loader))
    with pytest.raises(RunError, match="before backward"):
        optimizer.step()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RunError, match="twice"):
        loss.backward()
    with pytest.raises(RunError, match="more examples"):
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert loop.privacy.step == 1


def go_through(loop, batches) -> None:
    for x, y in batches:
        F.cross_entropy(loop.model(x), y).backward()
        loop.optimizer.step()


def test_batches_of_another_loader_and_left_out_batches_are_refused():
    loop = start(batch_size=10)
    with pytest.raises(RunError, match="private loader"):
        go_through(loop, DataLoader(make_data(), batch_size=30))
    loop = start(batch_size=10)
    sizes = [len(loop.privacy.draw_sample(t).rows) for t in range(6)]
    left_out = next(t for t in range(5) if sizes[t + 1] > sizes[t])  # the next batch is larger than the one due
    with pytest.raises(RunError, match="leave no batch out"):
        go_through(loop, (batch for t, batch in enumerate(loop.loader) if t != left_out))
    assert loop.privacy.step == left_out
    go_through(loop, loop.loader)  # the loader begins again where the loop is
    assert loop.privacy.step == 6


def test_evaluation_in_the_loop_is_not_recorded():
    plain, watched = start(seed=5), start(seed=5)
    run(plain, 3)
    model, optimizer, loader = watched
    for x, y in loader:
        model.eval()
        with torch.no_grad():
            model(x)
        model(x).argmax(1)
        model.train()
        with torch.no_grad():
            model(x)
        model(x).softmax(1)  # a training pass that nobody goes back through
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        assert isinstance(loss.item(), float)
        assert f"{loss:.2f}"
        optimizer.step()
        if watched.privacy.step == 3:
            break
    assert torch.equal(flat(plain.model), flat(model))


def test_forgetting_zero_grad_changes_nothing():
    one, other = start(seed=5), start(seed=5)
    run(one, 4)
    model, optimizer, loader = other
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if other.privacy.step == 4:
            break
    assert torch.equal(flat(one.model), flat(model))


def test_an_error_in_the_middle_of_a_step_leaves_the_sample_due():
    one, other = start(seed=5, accumulate=2), start(seed=5, accumulate=2)
    run(one, 2)
    model = other.model
    x, y = next(iter(other.loader))
    F.cross_entropy(model(x), y).backward()  # the first of two pieces; then something goes wrong
    run(other, 2)
    assert torch.equal(flat(one.model), flat(model))


def test_hard_stop():
    loop = start()
    run(loop)
    after, spent = flat(loop.model), loop.privacy.epsilon
    assert loop.privacy.step == loop.privacy.steps == 10
    assert 4.9 < spent <= 5.0
    with pytest.raises(BudgetError, match="all 10 planned steps"):
        next(iter(loop.loader))
    x, y = make_data().tensors
    with pytest.raises(BudgetError, match="all 10 planned steps"):
        F.cross_entropy(loop.model(x), y).backward()
    with pytest.raises(BudgetError, match="all 10 planned steps"):
        loop.optimizer.step()
    assert torch.equal(flat(loop.model), after)
    assert loop.privacy.epsilon == spent


# --- samples ----------------------------------------------------------------------------------------


class Numbered(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int):
        return {"inputs": {"x": torch.full((WIDTH,), float(row))}, "y": row % CLASSES, "name": str(row)}


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, scale: float = 1.0):
        return {"logits": self.out(scale * x), "kind": "dict"}


@pytest.mark.parametrize("workers", [0, 2])
def test_dict_batches_workers_and_empty_samples(workers):
    loop = start(ByName(), Numbered(), batch_size=1, epochs=1, workers=workers, epsilon=20.0)
    model, optimizer, loader = loop
    sizes, moved = [], []
    for batch in loader:
        before = flat(model)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(**batch["inputs"], scale=0.1)["logits"], batch["y"])
        loss.backward()
        optimizer.step()
        sizes.append(len(batch["y"]))
        moved.append(not torch.equal(before, flat(model)))
    assert loop.privacy.step == 40 == len(sizes)
    assert sizes == [loop.privacy.draw_sample(t).count for t in range(40)]
    assert 0 in sizes
    assert all(moved)  # an empty sample is released like any other


def chi_square(counts: list[int], n: int, q: float) -> float:
    """Distance of sample sizes from the binomial distribution, in three classes of about the same chance."""
    low, high = (
        int(torch.distributions.Binomial(n, torch.tensor(q)).mean + s * math.sqrt(n * q * (1 - q)))
        for s in (-0.43, 0.43)
    )
    chance = [math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(n + 1)]
    wanted = [sum(chance[: low + 1]), sum(chance[low + 1 : high + 1]), sum(chance[high + 1 :])]
    seen = [sum(c <= low for c in counts), sum(low < c <= high for c in counts), sum(c > high for c in counts)]
    return sum((s - len(counts) * w) ** 2 / (len(counts) * w) for s, w in zip(seen, wanted, strict=True))


def test_samples_are_poisson():
    loop = start(batch_size=12, epochs=160, epsilon=50.0)
    drawn = [loop.privacy.draw_sample(t) for t in range(800)]
    assert chi_square([sample.count for sample in drawn], N, 0.2) < 13.8  # one in a thousand
    assert chi_square([12] * 800, N, 0.2) > 100  # a shuffled loader's batches
    joins = torch.zeros(N)
    for sample in drawn:
        assert len(set(sample.rows.tolist())) == sample.count
        joins[sample.rows] += 1
    assert (joins / 800 - 0.2).abs().max() < 0.07


def test_pieces_of_a_sample_make_the_same_step():
    whole = start(lr=1.0, **NO_NOISE)
    before = flat(whole.model)
    run(whole, 1)
    for words in ({"physical_batch": 5}, {"accumulate": 1, "physical_batch": 100}):
        loop = start(lr=1.0, **NO_NOISE, **words)
        sample = loop.privacy.draw_sample(0)
        if len(sample.cuts) > 1:
            assert len(sample.cuts) == 3
            assert len(loop.loader) == 15
        run(loop, 1)
        assert loop.privacy.step == 1
        total = sum_gradients(sample.rows)
        assert torch.allclose(before - flat(loop.model), total / 12, atol=2e-5)


def sum_gradients(rows: torch.Tensor) -> torch.Tensor:
    model, (x, y) = make_model(), make_data().tensors
    F.cross_entropy(model(x[rows]), y[rows], reduction="sum").backward()
    return read_grads(model)


def test_a_loop_that_accumulates():
    """The loop divides by 3 and steps on every third batch: one step of the threefold batch."""
    loop = start(batch_size=4, accumulate=3, lr=1.0, **NO_NOISE)
    model, optimizer, loader = loop
    before, sample = flat(model), loop.privacy.draw_sample(0)
    assert loop.privacy.rate == pytest.approx(0.2)
    assert len(loader) == 15
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            break
    assert loop.privacy.step == 1
    assert torch.allclose(before - flat(model), sum_gradients(sample.rows) / 12, atol=2e-5)


def test_persons_are_the_unit():
    ids = ["anna" if row < 30 else f"p{row}" for row in range(N)]
    loop = start(persons=ids, method="dp-sgd", sigma=1e-6, C0=0.01, lr=1.0, seed=2, batch_size=30)
    assert start(persons=ids).privacy.report()["unit"] == "person"
    assert loop.privacy._terms.party.units == 31
    before, data = flat(loop.model), make_data()
    sample = loop.privacy.draw_sample(0)
    people = [
        [row for row, slot in zip(sample.rows.tolist(), sample.slots.tolist(), strict=True) if slot == u]
        for u in range(sample.count)
    ]
    wanted = torch.zeros_like(before)
    for rows in people:
        assert len(rows) in (1, 30)
        mean = sum_gradients(torch.tensor(rows)) / len(rows)
        wanted += mean * min(1.0, 0.01 / float(mean.norm()))
    run(loop, 1)
    assert torch.allclose(before - flat(loop.model), wanted / (31 * 0.5), atol=1e-6)
    with pytest.raises(DataError, match="one for each record"):
        start(persons=[1, 2], data=data)


# --- optimizers and schedules -----------------------------------------------------------------------


def test_the_learning_rate_does_not_matter_to_moo():
    runs = [start(lr=lr, seed=6) for lr in (0.001, 30.0)]
    for loop in runs:
        run(loop, 6)
    assert torch.allclose(flat(runs[0].model), flat(runs[1].model), atol=1e-5)
    adam = make_model()
    loop = start(adam, optimizer=torch.optim.AdamW(adam.parameters(), lr=1e-3, weight_decay=0.0), seed=6)
    run(loop, 6)
    assert torch.allclose(flat(adam), flat(runs[0].model), atol=1e-5)
    fixed = [start(lr=lr, seed=6, method="dp-sgd") for lr in (0.001, 30.0)]
    for loop in fixed:
        run(loop, 6)
    assert not torch.allclose(flat(fixed[0].model), flat(fixed[1].model), atol=1e-2)


def _constant(value: float):
    return lambda step: value


def test_a_schedule_is_a_factor():
    runs = []
    for factor in (1.0, 0.5, 0.0):
        loop = start(lr=0.3, seed=6)
        schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, _constant(factor))
        before = flat(loop.model)
        run(loop, 1)
        schedule.step()
        runs.append(flat(loop.model) - before)
    assert torch.allclose(runs[1], 0.5 * runs[0], atol=1e-6)
    assert not runs[2].any()


def test_optimizers_that_cannot_be_are_refused():
    model = make_model()
    with pytest.raises(ConfigError, match="LBFGS"):
        start(model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ModelError, match=r"'2.weight' needs a gradient"):
        start(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=1.0))
    other = make_model()
    with pytest.raises(ModelError, match="not the model's"):
        start(model, optimizer=torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0))
    with pytest.raises(ConfigError, match="maximize"):
        start(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0, maximize=True))


def test_frozen_layers_stay_as_they_are():
    model = make_model()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    loop = start(model)
    run(loop, 2)
    assert torch.equal(flat(model[0]), flat(before[0]))
    assert not torch.equal(flat(model[2]), flat(before[2]))
    assert loop.privacy._terms.layout.dim == 18


def test_autocast():
    loop = start(lr=1.0, **NO_NOISE)
    model, optimizer, loader = loop
    before = flat(model)
    x, y = next(iter(loader))
    with torch.autocast("cpu", torch.float16), pytest.raises(ModelError, match="bfloat16"):
        model(x)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    assert torch.allclose(before - flat(model), one_by_one(F.cross_entropy), atol=2e-2)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(WIDTH, 30), nn.Linear(30, CLASSES), nn.Dropout(0.5)

    def forward(self, x):
        return self.b(self.drop(self.a(x)))


def test_dropout_repeats_and_leaves_the_loops_numbers_alone():
    torch.manual_seed(0)
    one = Dropped()
    other = copy.deepcopy(one)
    first, second = start(one, seed=5), start(other, seed=5)
    torch.manual_seed(1)
    run(first, 3)
    mine = torch.rand(3)
    torch.manual_seed(1)
    torch.rand(7)
    run(second, 3)
    assert torch.equal(flat(one), flat(other))
    torch.manual_seed(1)
    # A DataLoader takes one number per epoch for its workers' seeds, as ever.
    assert mine.shape == (3,)


# --- state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["moo", "dp-sgd", "quantile"])
def test_resumed_bit_for_bit(method, tmp_path):
    def make():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
        return start(model, optimizer=optimizer, seed=8, method=method)

    whole, stopped = make(), make()
    run(whole)
    run(stopped, 7)
    checkpoint = {"model": stopped.model.state_dict(), "optimizer": stopped.optimizer.state_dict()}
    torch.save(checkpoint, tmp_path / "c.pt")
    again = make()
    run(again, 2)  # whatever happened in the new process before
    again = make()
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    again.model.load_state_dict(loaded["model"])
    again.optimizer.load_state_dict(loaded["optimizer"])
    assert again.privacy.step == 7
    assert again.privacy.epsilon == stopped.privacy.epsilon > 0
    run(again)
    assert torch.equal(flat(again.model), flat(whole.model))
    assert again.privacy.epsilon == whole.privacy.epsilon
    other = start(seed=8, method=method, epochs=3)
    with pytest.raises(RunError, match="other settings"):
        other.optimizer.load_state_dict(loaded["optimizer"])


def test_a_repeated_step_with_other_bits_is_paid_again_or_refused(tmp_path):
    ledger = tmp_path / "ledger.sqlite"
    loop = start(seed=None, ledger=ledger, epochs=1)
    state = copy.deepcopy(loop.optimizer.state_dict())
    run(loop, 3)
    spent = loop.privacy.epsilon
    loop.optimizer.load_state_dict(state)
    first = loop.privacy.draw_sample(0).rows
    run(loop, 2)
    assert loop.privacy.epsilon > spent  # secure: drawn anew, paid again
    with pytest.raises(BudgetError):
        run(loop)
    assert first is not None

    seeded = start(seed=3)
    state = copy.deepcopy(seeded.optimizer.state_dict())
    run(seeded, 2)
    seeded.optimizer.load_state_dict(state)
    with pytest.raises(BudgetError, match="already released something else"):
        run(seeded, 1)  # the same noise on other weights


def test_runs_add_up_in_a_ledger(tmp_path):
    ledger = tmp_path / "ledger.sqlite"
    first = start(seed=1, ledger=ledger, name="clinic", epsilon=2.0, budget=2.3)
    run(first)
    first.privacy.close()
    second = start(seed=2, ledger=ledger, name="clinic", epsilon=2.0, budget=2.3)
    with pytest.raises(BudgetError):
        run(second)
    assert 0 < second.privacy.step < second.privacy.steps
    facts = second.privacy.report()
    assert facts["epsilon"] <= 2.3
    assert len(facts["runs_covered"]) == 2
    with pytest.raises(ConfigError, match="seed"):
        run(start(seed=1, ledger=ledger, name="clinic", epsilon=0.1, budget=2.3), 1)


def test_a_ledger_knows_persons_under_any_name_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "key"))
    ledger, ids = tmp_path / "ledger.sqlite", [f"p{row // 2}" for row in range(N)]
    run(start(seed=1, ledger=ledger, name="clinic", persons=ids, epsilon=2.0), 1)
    again = start(seed=2, ledger=ledger, name="clinic under another name", persons=ids, epsilon=2.0)
    with pytest.raises(BudgetError, match="clinic"):
        run(again, 1)
    assert again.privacy.step == 0
    run(start(seed=3, ledger=ledger, name="others", persons=[f"q{row}" for row in range(N)], epsilon=2.0), 1)


def test_statement():
    loop = start(seed=None, epsilon=1.5)
    run(loop, 4)
    text = loop.privacy.statement()
    assert text.startswith("# Privacy statement\n")
    assert "4 of 10 (not finished)" in text
    facts = loop.privacy.report()
    assert facts["epsilon"] == pytest.approx(loop.privacy.epsilon)
    assert facts["randomness"]["mode"] == "secure"
    assert facts["arithmetic"]["mode"] == "fast"
    assert "SIMULATION" in start(seed=1).privacy.statement()


def test_the_model_is_its_own_again():
    loop = start()
    run(loop, 1)
    loop.privacy.close()
    x, y = make_data().tensors
    F.cross_entropy(loop.model(x), y).backward()
    assert loop.model[0].weight.grad is not None
    assert "forward" not in vars(loop.model)
    before = flat(loop.model)
    loop.optimizer.step()
    assert not torch.equal(before, flat(loop.model))


# --- words ------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="rounds is no option"):
        start(rounds=5)
    with pytest.raises(ConfigError, match="did you mean"):
        start(method="mooo")
    with pytest.raises(ConfigError, match="C_0"):
        start(C_0=1.0)
    with pytest.raises(ConfigError, match="epsilon"):
        start(epsilon=None)
    with pytest.raises(ConfigError, match="both given"):
        start(epsilon=1.0, sigma=1.0)
    with pytest.raises(ConfigError, match="epochs"):
        start(epochs=0)
    with pytest.raises(ConfigError, match="whole parties"):
        start(method="dp-fedavg")
    with pytest.raises(ConfigError, match="no guarantee"):
        start(method="moo-paper")
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * N, N)
    with pytest.raises(ConfigError, match="WeightedRandomSampler"):
        fulcrum.private(model, optimizer, DataLoader(data, 4, sampler=weighted), epsilon=1.0)

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(DataError, match="map-style"):
        fulcrum.private(model, optimizer, DataLoader(Endless(), 4), epsilon=1.0)
