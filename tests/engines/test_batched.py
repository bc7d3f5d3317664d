"""Several runs at once: each equals the same run alone, and its noise is what its clients would have added."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from fulcrum.clipping import RULES
from fulcrum.clipping.rule import no_statistics_share
from fulcrum.engines.batched import run_many
from fulcrum.engines.stacked import sampling
from fulcrum.errors import ConfigError
from fulcrum.runs import prepare
from fulcrum.training.federation import Federation
from support.federations import play, toy_data, toy_settings
from support.rounds import last_model

DATA = toy_data()
PAID = [name for name, rule in RULES.items() if rule.share is not no_statistics_share]

CASES: dict[str, list[dict[str, Any]]] = {
    "settings that differ": [
        {"run": {"seed": s}, "clip": {"rule": "moo", "C0": C}, "train": {"lr": lr}, "privacy": {"sigma": sigma}}
        for s, C, lr, sigma in ((0, 1.0, 0.5, 1.0), (1, 0.1, 0.2, 2.0), (2, 10.0, 1.0, 0.5))
    ],
    "rules": [{"run": {"seed": i}, "clip": {"rule": rule}} for i, rule in enumerate(RULES)],
    "rules, local steps": [
        {"run": {"seed": i}, "clip": {"rule": rule}, "train": {"steps": 2}} for i, rule in enumerate(RULES)
    ],
    "another basis each": [{"run": {"seed": 0}, "clip": {"rule": "wav", "shrink": x}} for x in (0.0, 0.5, 2.0)],
    "local steps": [{"run": {"seed": s}, "train": {"steps": 3}} for s in (0, 1)],
    "server optimisers": [
        {"run": {"seed": s}, "train": {"server": "adam", "server_lr": 0.1 * (s + 1), "ema": 0.5}} for s in (0, 1)
    ],
    "participation": [{"run": {"seed": s}, "train": {"participation": 0.4, "rounds": 10, "ema": 0.3}} for s in (0, 1)],
    "participation and steps": [{"run": {"seed": s}, "train": {"participation": 0.4, "steps": 2}} for s in (0, 1)],
    "caps": [{"privacy": {"sigma": None, "epsilon": 2.0, "max_participations": 2}}],
    "noise schedules": [
        {
            "run": {"seed": i},
            "clip": {"rule": rule},
            "privacy": {"sigma": 1.0, **cast("dict[str, Any]", noise)},
            "train": {"participation": p},
        }
        for i, (rule, noise, p) in enumerate(
            (
                ("dynamic", {"noise_schedule": "growth", "rho_mu": 0.3}, 1.0),
                ("dynamic", {}, 1.0),
                ("moo", {"noise_schedule": "phases", "phases": (1.0, 4.0)}, 0.5),
            )
        )
    ],
    **{
        f"statistics now and then, {steps} steps": [
            {"run": {"seed": i}, "clip": {"rule": rule, "statistics_interval": refresh}, "train": {"steps": steps}}
            for i, (rule, refresh) in enumerate([(rule, 0.5) for rule in PAID] + [("quantile", 0.0), ("quantile", 0.6)])
        ]
        for steps in (1, 3)
    },
    "readings": [
        {"clip": {"rule": rule, "reading": reading}, "train": {"lr": 0.3}}
        for rule in ("moo-paper", "moo-paper-batch")
        for reading in ("loss", "hypergradient", "derivative")
    ],
    "layers": [
        {
            "run": {"seed": s, "evaluate_every": 2},
            "clip": {"groups": "layer"},
            "model": {"name": "mlp", "hidden": (4,)},
            "train": {"schedule": "cosine", "weight_decay": 0.1, "weights": "uniform"},
        }
        for s in (0, 1)
    ],
}


def federations(case: str) -> list[Federation]:
    return [prepare(toy_settings(**changes), DATA) for changes in CASES[case]]


@pytest.mark.parametrize("limit", [0, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(2)
def test_each_run_equals_itself_alone_on_the_reference_engine(case: str, limit: int) -> None:
    feds = federations(case)
    rounds = list(run_many(feds, limit))
    for r, federation in enumerate(feds):
        alone = play(federation)
        assert len(rounds) == len(alone)
        for many, one in zip(rounds, alone, strict=True):
            assert many.round == one.round
            assert many.participants[r] == one.participants
            assert many.C[r, : len(one.C)].tolist() == pytest.approx(one.C, rel=1e-4)
            assert bool(many.C[r, len(one.C) :].isnan().all())  # other runs have more groups
            if one.accuracy is None:
                assert bool(many.accuracy[r].isnan())
            else:
                assert float(many.accuracy[r]) == pytest.approx(one.accuracy, abs=0.012)  # one example of ninety
                # Long steps let the rounding of the first round grow in every one that follows.
                assert float(many.loss[r]) == pytest.approx(one.loss, rel=1e-4 if one.round <= 3 else 1e-3)
        assert rounds[-1].averaged is not None
        # Small coordinates carry the rounding of large ones, so that the whole vector is the measure.
        apart = torch.linalg.vector_norm(rounds[-1].averaged[r] - alone[-1].averaged)
        assert float(apart) <= 1e-4 * float(torch.linalg.vector_norm(alone[-1].averaged))


def test_runs_that_cannot_be_stacked_are_played_alone() -> None:
    data = toy_data(person=[i // 2 for i in range(60)])
    federation = prepare(toy_settings(privacy={"unit": "person"}), data)
    rounds, alone = list(run_many([federation])), play(federation)
    assert rounds[-1].averaged is not None
    assert torch.equal(rounds[-1].averaged[0], alone[-1].averaged)


def test_runs_of_different_lengths_are_refused() -> None:
    feds = [prepare(toy_settings(train={"rounds": n}), DATA) for n in (3, 4)]
    with pytest.raises(ConfigError, match=r"train\.rounds"):
        next(iter(run_many(feds)))
    with pytest.raises(ConfigError, match="no federations"):
        next(iter(run_many([])))


# --- as on a GPU: numbers drawn on the device, rounds in bursts -----------------------------------------


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)


@pytest.mark.usefixtures("on_device")
def test_the_noise_of_an_aggregate_has_the_variance_of_the_clients_noise() -> None:
    runs, lr, sigma, C = 60, 0.5, 50.0, 1.0
    feds = [
        prepare(
            toy_settings(
                run={"seed": s},
                data={"partition": "quantity"},
                clip={"rule": "fixed", "C0": C},
                train={"lr": lr, "rounds": 1},
                privacy={"sigma": sigma},
            ),
            DATA,
        )
        for s in range(runs)
    ]
    rounds = list(run_many(feds))
    assert rounds[-1].averaged is not None
    ratios, plain = [], []
    for r, federation in enumerate(feds):
        start = federation.problem.layout.flatten(federation.problem.model)
        sizes = [federation.plan.units(k) for k in range(3)]
        weights = [n / sum(sizes) for n in sizes]
        expected = sum((lr * w * sigma * C / (0.2 * n)) ** 2 for w, n in zip(weights, sizes, strict=True)) ** 0.5
        change = (rounds[-1].averaged[r] - start).square().mean().sqrt()
        ratios.append(float(change) / expected)
        plain.append(float(change) / (lr * sigma * C / (0.2 * sizes[0])))
    assert sum(ratios) / runs == pytest.approx(1.0, abs=0.05)  # 60 runs of 21 weights: 2% of standard error
    assert sum(plain) / runs != pytest.approx(1.0, abs=0.05)  # one client's noise alone is another amount


@pytest.mark.usefixtures("on_device")
def test_a_burst_in_which_a_sample_did_not_fit_is_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    feds = federations("settings that differ")
    roomy = last_model(feds)
    monkeypatch.setattr(sampling, "PAD_DEVIATIONS", -4.0)
    torch.testing.assert_close(last_model(feds), roomy, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr("fulcrum.engines.batched.single_step.SingleStepRounds.settled", lambda self: True)
    assert not torch.allclose(last_model(feds), roomy, rtol=1e-2)


@pytest.mark.usefixtures("on_device")
def test_seeds_decide_and_runs_differ() -> None:
    feds = federations("settings that differ")
    one = last_model(feds)
    assert torch.equal(one, last_model(feds))
    other = [prepare(toy_settings(**{**CASES["settings that differ"][0], "run": {"seed": s}}), DATA) for s in (0, 9)]
    two = last_model(other)
    torch.testing.assert_close(one[0], two[0], rtol=1e-4, atol=1e-6)  # the same run beside others
    assert not torch.allclose(two[0], two[1], rtol=1e-2)


@pytest.mark.usefixtures("on_device")
def test_a_run_that_overflows_does_not_touch_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = [
        prepare(toy_settings(run={"seed": s}, clip={"rule": "none"}, privacy={"sigma": None}), DATA) for s in (0, 1)
    ]
    wild = prepare(
        toy_settings(run={"seed": 1}, clip={"rule": "none"}, privacy={"sigma": None}, train={"lr": 1e30}), DATA
    )
    expected = last_model(calm)
    found = last_model([calm[0], wild])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found[1], expected[1])
