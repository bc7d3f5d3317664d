"""train.combine: what each combination computes, the noise that it is known to have, and what it bears."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fulcrum import runs as api
from fulcrum.clipping.moo import estimate_signal
from fulcrum.engines.batched import can_stack_runs
from fulcrum.errors import ConfigError
from fulcrum.settings.checks import check_settings
from fulcrum.settings.schema import Clip, Data, Model, Privacy, Run, Settings, Train
from fulcrum.training.combine import COMBINERS, count_trimmed
from fulcrum.training.federation import make_model_facts
from fulcrum.training.round import compute_aggregate_noise
from fulcrum.types import Assignment, Released
from support.federations import toy_data

EQUAL = torch.full((5,), 0.2)


def toy(combine: str, **changes) -> Settings:
    settings = Settings(
        data=Data(source="toy", parties=5, partition="iid", min_examples=1),
        model=Model(name="linear"),
        train=Train(rounds=3, rate=0.3, lr=0.5, combine=combine),
        clip=Clip(rule="moo"),
        privacy=Privacy(sigma=1.1, delta=1e-3),
        run=Run(engine="reference", device="cpu"),
    )
    return settings.replace(**changes)


# --- values -------------------------------------------------------------------------------------


def test_values_of_each_combination():
    rows = torch.tensor([[0.0, 9.0], [1.0, -50.0], [2.0, 10.0], [3.0, 11.0], [100.0, 12.0]])

    def values(name: str, trim: float = 0.2) -> list[float]:
        return COMBINERS[name].combine(rows, EQUAL, trim).values.tolist()

    assert values("mean") == pytest.approx([21.2, -1.6])
    assert values("median") == [2.0, 10.0]
    assert values("trimmed-mean") == [2.0, 10.0]
    assert values("trimmed-mean", 0.0) == pytest.approx([21.2, -1.6])
    assert COMBINERS["median"].combine(rows[:4], EQUAL[:4], 0.2).values.tolist() == [1.5, 9.5]
    assert [count_trimmed(m, 0.2) for m in (1, 2, 3, 5, 10, 11)] == [0, 0, 1, 1, 2, 3]


def test_the_geometric_median_has_the_smallest_sum_of_distances_and_bears_one_bad_party():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 40, generator=generator)
    rows[2] *= 1e4
    weights = torch.tensor([0.1, 0.2, 0.2, 0.2, 0.2, 0.1])
    found = COMBINERS["geometric-median"].combine(rows, weights, 0.2)

    def cost(at: torch.Tensor) -> float:
        return float((weights.double() * (rows.double() - at).norm(dim=1)).sum())

    best = cost(found.values.double())
    for _ in range(20):
        assert best <= cost(found.values.double() + 1e-2 * torch.randn(40, generator=generator)) + 1e-9
    assert float(found.values.norm()) < 10 < float((weights @ rows).norm())
    assert float(found.weights.sum()) == pytest.approx(1.0)
    same = COMBINERS["geometric-median"].combine(rows[:1].expand(4, 40), weights[:4], 0.2).values
    torch.testing.assert_close(same, rows[0])


# --- the noise that is known ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trimmed-mean", "median"])
@pytest.mark.parametrize(
    "scales", [(1.0,) * 3, (1.0,) * 4, (2.0,) * 11, (1.0, 1.0, 3.0, 0.5, 0.5), (0.1, 1.0, 5.0, 5.0)]
)
def test_the_known_noise_is_that_of_a_simulation_and_that_of_the_mean_is_not(name, scales):
    draws, m = 200_000, len(scales)
    values = np.random.default_rng(3).standard_normal((draws, m)) * np.array(scales)
    seen = COMBINERS[name].combine(torch.from_numpy(values.T.copy()), torch.full((m,), 1 / m), 0.2).values
    known = COMBINERS[name].noise(scales, [1 / m] * m, 0.2)
    spread = 6 / (2 * draws) ** 0.5  # six standard deviations of the estimate; tails are near those of a normal
    assert float(seen.std()) == pytest.approx(known, rel=spread)
    wrong = COMBINERS["mean"].noise(scales, [1 / m] * m, 0.2)
    assert abs(wrong / float(seen.std()) - 1) > spread, "the mean's noise would be told apart"


def test_the_median_of_normals_has_the_textbook_variance():
    """Order statistics of the normal: variance 0.4487 for three, 0.2868 for five; pi/2m for many."""
    noise = COMBINERS["median"].noise
    assert noise([1.0] * 3, [1 / 3] * 3, 0.2) ** 2 == pytest.approx(0.44867, abs=2e-5)
    assert noise([1.0] * 5, [0.2] * 5, 0.2) ** 2 == pytest.approx(0.28683, abs=2e-5)
    assert noise([3.0] * 101, [1 / 101] * 101, 0.2) ** 2 == pytest.approx(9 * np.pi / 2 / 101, rel=0.02)
    assert noise([1.0] * 1001, [1 / 1001] * 1001, 0.2) ** 2 == pytest.approx(np.pi / 2 / 1001, rel=0.02)
    assert noise([0.0] * 3, [1 / 3] * 3, 0.2) == 0.0
    assert noise([2.0], [1.0], 0.2) == 2.0


def test_the_geometric_median_is_a_mean_with_known_weights():
    scales = torch.tensor([1.0, 1.0, 4.0, 0.5, 2.0])
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(5, 4000, generator=generator) * scales[:, None]
    found = COMBINERS["geometric-median"].combine(rows, EQUAL, 0.2)
    known = COMBINERS["geometric-median"].noise(scales.tolist(), found.weights.tolist(), 0.2)
    assert float(found.values.std()) == pytest.approx(known, rel=0.05)
    assert abs(COMBINERS["mean"].noise(scales.tolist(), EQUAL.tolist(), 0.2) / known - 1) > 0.05
    before = COMBINERS["geometric-median"].expect_weights(scales.tolist(), EQUAL.tolist())
    assert list(before) == pytest.approx(found.weights.tolist(), abs=0.01)


@pytest.mark.parametrize("name", ["trimmed-mean", "median"])
def test_moo_sees_no_signal_in_noise_alone_and_would_with_the_noise_of_the_mean(name):
    dim, sigma, tasks = 20_000, 0.3, tuple(Assignment(k, 0.1, 1.0, 1, 1.0) for k in range(5))
    generator = torch.Generator().manual_seed(7)
    rows = sigma * torch.randn(5, dim, generator=generator)
    train = Train(combine=name)
    found = COMBINERS[name].combine(rows, EQUAL, train.trim)
    state = {"C": torch.ones(1)}

    def signal(noise: float) -> tuple[float, float]:
        released = Released(found.values, torch.zeros(0), 1.0, 1.0, 0, 10, noise)
        now, floor = estimate_signal(state, released)
        return float(now), float(floor)

    right = signal(compute_aggregate_noise(tasks, [sigma] * 5, found.weights, train))
    wrong = signal(compute_aggregate_noise(tasks, [sigma] * 5, found.weights))
    assert abs(right[0]) < right[1]
    assert wrong[0] > wrong[1]


def test_moo_starts_with_the_noise_of_the_combination():
    noises = {}
    for name in COMBINERS:
        noises[name] = make_model_facts(api.prepare(toy(name), toy_data(150))).noise
    assert noises["mean"] < noises["trimmed-mean"] < noises["median"]
    assert noises["geometric-median"] == pytest.approx(noises["mean"], rel=0.05)


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trimmed-mean", "median", "geometric-median"])
def test_engines_agree_and_the_result_is_not_that_of_the_mean(name):
    found = {}
    for engine in ("reference", "parallel", "stacked"):
        result = api.execute(api.prepare(toy(name, run={"engine": engine}), toy_data(150)))
        found[engine] = torch.cat([value.flatten() for value in result.model.state_dict().values()])
    mean = api.execute(api.prepare(toy("mean"), toy_data(150)))
    torch.testing.assert_close(found["parallel"], found["reference"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["stacked"], found["reference"], rtol=1e-3, atol=1e-4)
    flat = torch.cat([value.flatten() for value in mean.model.state_dict().values()])
    assert not torch.allclose(flat, found["reference"], rtol=1e-2, atol=1e-3)
    assert can_stack_runs(toy("mean"))
    assert not can_stack_runs(toy(name))


class Poisoned:
    """An engine whose first party turns its update round and scales it."""

    def __init__(self, engine):
        self.engine, self.remote = engine, False

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def run(self, request):
        for reply in self.engine.run(request):
            yield dataclasses.replace(reply, delta=-1e4 * reply.delta) if reply.client == 0 else reply


@pytest.mark.parametrize(
    ("name", "bears"), [("mean", False), ("trimmed-mean", True), ("median", True), ("geometric-median", True)]
)
def test_a_scaled_update_takes_over_the_mean_only(name, bears):
    federation = api.prepare(toy(name, clip={"rule": "fixed"}), toy_data(150))
    result = api.execute(dataclasses.replace(federation, engine=Poisoned(federation.engine)))
    largest = max(float(value.abs().max()) for value in result.model.state_dict().values())
    assert (largest < 20) == bears


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy": {"aggregation": "ideal-secagg"}}, "parties share their noise"),
        ({"privacy": {"unit": "client"}}, "covers a mean of clipped updates"),
        ({"train": {"trim": 0.5}}, "train.trim"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        check_settings(toy("median", **changes))
    if "train" not in changes:
        check_settings(toy("mean", **changes))


def test_an_unknown_combination_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="median"):
        api.prepare(toy("medain"), toy_data(150))
