"""The paper's Algorithm 1: as printed where it can be, loud about being unsound, and how far the fast form is off."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fulcrum.cli import main
from fulcrum.clipping import RULES, ModelFacts
from fulcrum.data import poisson_sample_units
from fulcrum.gradients import record_gradients
from fulcrum.privacy.ledger import Ledger
from fulcrum.settings.schema import Clip
from fulcrum.training.loop import federate
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Stats
from support.federations import one_client, toy_federation, toy_problem

EXACT, BATCH = RULES["moo-paper"], RULES["moo-paper-batch"]
READINGS = ("loss", "hypergradient", "derivative")


def algorithm_1(
    problem: TrainingProblem, reading: str, C: float, kappa: float, eta_C: float, eta: float, sigma: float, steps: int
) -> tuple[torch.Tensor, float]:
    """Algorithm 1 for one client, written out with plain numbers: the update and the C it ends with."""
    theta = start = problem.layout.flatten(problem.model)
    party = problem.party(0)
    for n in range(steps):
        rows, _, _ = poisson_sample_units(problem.randomness, ("sample", 0, 0, n), party, 0.5)
        tape = record_gradients(
            problem.model, problem.layout, theta, problem.dataset.x[rows], problem.dataset.y[rows], problem.dataset.task
        )
        total = torch.zeros_like(theta)
        for g, loss in zip(tape.matrix(), tape.losses.tolist(), strict=True):
            norm = float(g.norm())
            over = eta * norm if norm > C else 0.0
            slope = {"loss": kappa - loss / C, "hypergradient": kappa - over, "derivative": kappa + over / C}[reading]
            C = max(C - eta_C * slope, 1e-3)
            total = total + g / max(1.0, norm / C)
        noise = problem.randomness.normal(("noise", 0, 0, n), len(theta)).float()
        theta = theta - eta / (0.5 * party.units) * (total + sigma * C * noise)
    return theta - start, C


@pytest.mark.parametrize("reading", READINGS)
def test_every_step_of_the_algorithm(reading: str) -> None:
    problem = toy_problem("moo-paper")
    terms: dict[str, Any] = {"kappa": 0.3, "eta_C": 0.02, "sigma": 1.0, "steps": 3}
    wanted, C = algorithm_1(problem, reading, 1.0, eta=0.5, **terms)
    reply = one_client(problem, C0=1.0, lr=0.5, reading=reading, **terms)
    torch.testing.assert_close(reply.delta, wanted, rtol=1e-3, atol=1e-5)
    assert float(reply.state["C"]) == pytest.approx(C, rel=1e-4)
    others = [algorithm_1(problem, other, 1.0, eta=0.5, **terms)[1] for other in READINGS if other != reading]
    assert all(pytest.approx(other, rel=1e-2) != C for other in others)  # the readings are told apart


def test_the_readings_by_hand() -> None:
    """One example of norm 4 and loss 2 at C = 2, kappa = 0.5, eta = 0.3."""
    seen = Stats(torch.tensor([[4.0]]), torch.tensor([True]), losses=torch.tensor([2.0]), lr=0.3)
    slopes = {"loss": 0.5 - 2 / 2, "hypergradient": 0.5 - 0.3 * 4, "derivative": 0.5 + 0.3 * 4 / 2}
    for reading, slope in slopes.items():
        for rule in (EXACT, BATCH):
            state = rule.init(Clip(C0=2.0, kappa=0.5, eta_C=0.1, reading=reading), ModelFacts(3, (3,)))
            factors, _, after = rule.clip(seen, state)
            C = 2.0 - 0.1 * slope
            assert float(after["C"]) == pytest.approx(C)
            assert float(factors) == pytest.approx(C / 4)  # clipped with the C after its own move


def _batch(generator: torch.Generator, count: int = 50) -> Stats:
    norms = torch.exp(torch.randn(count, 1, generator=generator))
    return Stats(norms, torch.ones(count, dtype=torch.bool), losses=2 * torch.rand(count, generator=generator), lr=0.5)


def _last(rule: str, eta_C: float, reading: str, batches: int = 20) -> float:
    state = RULES[rule].init(Clip(C0=1.0, kappa=0.3, eta_C=eta_C, reading=reading), ModelFacts(3, (3,)))
    generator = torch.Generator().manual_seed(0)
    for _ in range(batches):
        _, _, state = RULES[rule].clip(_batch(generator), state)
    return float(state["C"])


@pytest.mark.parametrize("reading", READINGS)
def test_how_far_the_fast_form_is_from_the_exact_one(reading: str) -> None:
    """With eta_C shared out over the batch they agree to first order; with the same eta_C they do not."""
    fast = _last("moo-paper-batch", 0.01, reading)
    shared = _last("moo-paper", 0.01 / 50, reading)
    same = _last("moo-paper", 0.01, reading)
    assert abs(math.log(fast)) > 0.02  # C has moved
    assert shared == pytest.approx(fast, rel=0.02)
    assert abs(math.log(same / fast)) > 5 * abs(math.log(shared / fast))
    # the gap of the shared-out form falls with eta_C squared, as a first-order agreement must
    gaps = [
        abs(math.log(_last("moo-paper", eta / 50, reading, 1) / _last("moo-paper-batch", eta, reading, 1)))
        for eta in (0.4, 0.1)
    ]
    assert gaps[1] < gaps[0] / 6 or gaps[0] < 1e-4


def test_equation_A2_to_the_letter_drives_C_to_its_floor() -> None:
    assert _last("moo-paper", 0.1, "derivative", 40) == pytest.approx(1e-3)
    assert _last("moo-paper", 0.1, "loss", 40) > 0.5


def test_C_is_a_clients_own_and_stays_over_the_rounds() -> None:
    federation = toy_federation(clip={"rule": "moo-paper", "kappa": 0.3}, train={"rounds": 3}, run={"seed": 1})
    with Ledger.open(":memory:") as ledger:
        steps = list(federate(federation, ledger, "r"))
    norms = [[float(snapshot.clients[k]["C"]) for k in range(3)] for _, snapshot in steps]
    assert len(set(norms[0])) == 3
    assert all(a != b for a, b in zip(norms[0], norms[1], strict=True))
    assert steps[1][0].C[0] == pytest.approx(sum(norms[0]) / 3)  # round 2 starts where round 1 ended


def test_a_run_says_loudly_that_it_guarantees_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    words = ["--data", "digits", "--rounds", "2", "--epsilon", "3.61", "--out", str(folder), "--quiet"]
    assert main(["run", "--method", "moo-paper-batch", *words]) == 0
    said = capsys.readouterr()
    assert "NOT SOUND" in said.err  # even to the quiet
    assert "moo-paper-batch †" in said.out
    assert "nominal" in said.out
    summary, privacy = (json.loads((folder / name).read_text()) for name in ("summary.json", "privacy.json"))
    assert summary["sound"] is False
    assert (privacy["sound"], privacy["nominal"], privacy["guarantee"]) == (False, True, "nominal")
    page = (folder / "PRIVACY.md").read_text()
    assert "NOMINAL, not a guarantee" in page.splitlines()[2]
    assert "THEY REVEAL MORE" in page
    assert main(["show", str(folder)]) == 0
    assert "†" in capsys.readouterr().out
    assert main(["plan", "--method", "moo-paper", "--epsilon", "3.61"]) == 0
    assert "NOT SOUND" in capsys.readouterr().err


def test_a_sound_run_says_nothing_of_the_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    words = ["--data", "digits", "--rounds", "2", "--epsilon", "3.61", "--out", str(folder), "--quiet"]
    assert main(["run", "--method", "quantile", *words]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "†" not in said.out
    assert "nominal" not in said.out
    assert json.loads((folder / "summary.json").read_text())["sound"] is True
    assert "NOMINAL" not in (folder / "PRIVACY.md").read_text()
