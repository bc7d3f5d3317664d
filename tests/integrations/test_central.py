"""Rounds of a trusted server that somebody else runs: private for whole parties."""

from __future__ import annotations

import pytest
import torch

from fulcrum.errors import BudgetError, ConfigError, ModelError, RunError
from fulcrum.integrations.central import PrivateRounds

WEIGHTS = {"a.weight": torch.zeros(3, 2), "a.bias": torch.zeros(3), "a.steps": torch.tensor(7)}


def update(size: float, seed: int = 0) -> dict[str, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(value.shape, generator=stream) for name, value in WEIGHTS.items() if value.dim()}


def flat(rounds: PrivateRounds) -> torch.Tensor:
    return torch.cat([rounds.weights["a.weight"].flatten(), rounds.weights["a.bias"]])


def test_a_party_counts_for_no_more_than_its_bound():
    found = []
    for size in (0.0, 1e9, float("nan")):
        rounds = PrivateRounds.open(WEIGHTS, 10, rounds=1, sigma=1e-6, method="dp-sgd", C0=0.5, seed=1)
        cohort = rounds.begin()
        assert cohort == list(range(10))
        rounds.finish({k: update(0.01 if k else size, k) for k in cohort})
        found.append(flat(rounds))
    assert torch.allclose(found[0], found[2], atol=1e-5)  # no number: counts as zero
    assert (found[0] - found[1]).norm() == pytest.approx(0.5 / 10, rel=1e-3)
    assert rounds.weights["a.steps"] == 7


@pytest.mark.slow
def test_the_noise_is_that_of_the_plan():
    """With nothing to average the release is noise alone, of sigma C over the expected number."""
    drawn = []
    for seed in range(60):
        rounds = PrivateRounds.open(
            WEIGHTS, 10, rounds=1, sigma=2.0, method="dp-sgd", C0=0.5, seed=seed, name=f"f{seed}"
        )
        rounds.begin()
        rounds.finish({})
        drawn.append(flat(rounds))
    spread = torch.cat(drawn).std()
    assert spread == pytest.approx(2.0 * 0.5 / 10, rel=0.12)
    assert spread != pytest.approx(2.0 * 0.5, rel=0.12)


def test_rounds_are_paid_before_anybody_is_asked(tmp_path):
    rounds = PrivateRounds.open(
        WEIGHTS, 20, rounds=3, epsilon=4.0, participation=0.5, ledger=tmp_path / "l.sqlite", seed=2
    )
    with pytest.raises(RunError, match="before begin"):
        rounds.finish({})
    sizes = []
    for t in range(3):
        before = rounds.epsilon
        cohort = rounds.begin()
        assert rounds.epsilon > before
        sizes.append(len(cohort))
        with pytest.raises(RunError, match="was not asked"):
            rounds.finish({next(k for k in range(20) if k not in cohort): update(1.0)})
        rounds.finish({k: update(0.1, k) for k in cohort[:-1]})  # one did not answer
        assert rounds.round == t + 1
    assert len(set(sizes)) > 1
    assert 3.9 < rounds.epsilon <= 4.0
    with pytest.raises(BudgetError, match="all 3 planned rounds"):
        rounds.begin()
    assert rounds.report()["unit"] == "client"
    again = PrivateRounds.open(WEIGHTS, 20, rounds=3, epsilon=4.0, ledger=tmp_path / "l.sqlite", seed=3)
    with pytest.raises((BudgetError, ConfigError)):
        again.begin()


def test_wrong_words():
    with pytest.raises(ConfigError, match="both given"):
        PrivateRounds.open(WEIGHTS, 3, rounds=1, epsilon=1.0, sigma=1.0)
    with pytest.raises(ModelError, match="state_dict"):
        PrivateRounds.open({"n": torch.tensor(3)}, 3, rounds=1, epsilon=1.0)
    rounds = PrivateRounds.open(WEIGHTS, 3, rounds=1, epsilon=1.0, seed=1)
    cohort = rounds.begin()
    with pytest.raises(ModelError, match=r"party 0 has no 'a.bias'"):
        rounds.finish({cohort[0]: {"a.weight": torch.zeros(3, 2)}})
