"""One example more or less moves the sum of a step by at most C, through the user's own loop and loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fulcrum
from fulcrum.integrations.loader import cut_sample

N, LENGTH, WORDS, C = 24, 6, 9, 0.05


class Reader(nn.Module):
    """Words, dropout, a mean over positions: classes [B, 3], and one prediction per position [B, L, 9]."""

    def __init__(self, chance: float = 0.0) -> None:
        super().__init__()
        self.words, self.out, self.next = nn.Embedding(WORDS, 8), nn.Linear(8, 3), nn.Linear(8, WORDS)
        self.drop = nn.Dropout(chance)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        found = self.drop(torch.tanh(self.words(ids)))
        return {"class": self.out(found.mean(1)), "next": self.next(found)}


def make_data() -> TensorDataset:
    stream = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (N, LENGTH), generator=stream)
    following = torch.randint(WORDS, (N, LENGTH), generator=stream)
    following[torch.arange(N) % 3 > 0, 1:] = -100  # two thirds have one target only
    return TensorDataset(ids, torch.randint(3, (N,), generator=stream), following)


def tokens(out: dict[str, Tensor], y: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(out["next"].flatten(0, 1), following.flatten())


def summed(out: dict[str, Tensor], y: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(out["class"], y, reduction="sum") / len(y)


def weighted(out: dict[str, Tensor], y: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(out["class"], y, weight=torch.tensor([1.0, 30.0, 0.1]))


def plain(out: dict[str, Tensor], y: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(out["class"], y) + 0.1 * out["class"].square().mean()


LOSSES = {"plain": plain, "summed": summed, "weighted": weighted, "tokens": tokens}


def sum_without(rows: list[int], loss, chance: float, persons=None) -> Tensor:
    """The clipped sum of a step whose sample is these records, before the noise."""
    torch.manual_seed(0)
    model, data = Reader(chance), make_data()
    loader = DataLoader(data, batch_size=12, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = fulcrum.private(
        model, optimizer, loader, sigma=1.0, method="dp-sgd", C0=C, seed=1, epochs=1, persons=persons
    )
    chosen = torch.tensor(rows)
    slots = torch.arange(len(rows))
    if persons is not None:
        _, slots = torch.unique(torch.tensor([persons[row] for row in rows]), return_inverse=True)
    loop.privacy._sample = (0, 0, cut_sample(chosen, slots, int(slots.max()) + 1, 1))
    ids, y, following = (value[loop.privacy._sample[2].rows] for value in data.tensors)
    loss(loop.model(ids), y, following).backward()
    found = loop.privacy._sum.sum
    assert found is not None
    return found.double()


@pytest.mark.parametrize("chance", [0.0, 0.4])
@pytest.mark.parametrize("name", LOSSES)
def test_one_example_moves_the_sum_by_no_more_than_its_bound(name, chance):
    everybody = list(range(0, N, 2))
    whole = sum_without(everybody, LOSSES[name], chance)
    moved = [
        float((whole - sum_without([row for row in everybody if row != left], LOSSES[name], chance)).norm())
        for left in everybody[:5]
    ]
    assert max(moved) <= C * (1 + 1e-4)
    assert min(moved) > 0


def test_one_person_moves_the_sum_by_no_more_than_the_bound():
    persons = [row // 4 for row in range(N)]
    whole = sum_without(list(range(N)), plain, 0.3, persons)
    for left in range(3):
        rest = [row for row in range(N) if persons[row] != left]
        assert 0 < float((whole - sum_without(rest, plain, 0.3, persons)).norm()) <= C * (1 + 1e-4)


def test_what_clipping_the_gradients_of_the_batch_s_mean_would_do():
    """The wrong way: gradients of the loop's own mean, scaled back by the number of examples, and clipped."""

    def naive(rows: list[int]) -> Tensor:
        torch.manual_seed(0)
        model, (ids, _, following) = Reader(), make_data().tensors
        out = model(ids[rows])
        found = []
        for n in range(len(rows)):
            mask = torch.zeros(len(rows), LENGTH, dtype=torch.bool)
            mask[n] = True
            kept = torch.where(mask, following[rows], -100)
            total = F.cross_entropy(out["next"].flatten(0, 1), kept.flatten(), reduction="sum")
            mean = total / (following[rows] != -100).sum()  # as the loop's loss divides
            grads = torch.autograd.grad(mean, list(model.parameters()), retain_graph=True, allow_unused=True)
            flat = torch.cat([g.flatten() for g in grads if g is not None]).double() * len(rows)
            found.append(flat * min(1.0, 1.0 / float(flat.norm())))
        return torch.stack(found).sum(0)

    everybody = list(range(0, N, 2))
    long = next(row for row in everybody if row % 3 == 0)
    moved = float((naive(everybody) - naive([row for row in everybody if row != long])).norm())
    assert moved > 1.0 + 1e-3  # the bound is 1
