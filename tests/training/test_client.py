"""The local step: what one example can change, what divides the sum, and what happens when nobody is sampled."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fulcrum.clipping.fixed import FIXED, no_extra
from fulcrum.data import poisson_sample_units
from fulcrum.privacy.events import Gaussian, Unprotected
from fulcrum.rng import SeededRandomness
from fulcrum.training.problem import TrainingProblem
from support.federations import CLASSES, one_client, toy_data, toy_model, toy_problem


def _sampled(problem: TrainingProblem, rate: float, step: int = 0, client: int = 0) -> torch.Tensor:
    rows, _, _ = poisson_sample_units(problem.randomness, ("sample", 0, client, step), problem.party(client), rate)
    return rows


def _plain_steps(
    problem: TrainingProblem, rate: float, lr: float, steps: int, weight_decay: float = 0.0
) -> torch.Tensor:
    """Ordinary SGD by autograd over the same samples, divided by the expected batch."""
    model = toy_model()
    for step in range(steps):
        rows = _sampled(problem, rate, step)
        loss = cross_entropy(model(problem.dataset.x[rows]), problem.dataset.y[rows], reduction="sum")
        gradients = torch.autograd.grad(loss / (rate * problem.party(0).units), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(lr * (gradient + weight_decay * parameter))
    return problem.layout.flatten(model) - problem.layout.flatten(problem.model)


@pytest.mark.parametrize(("rule", "C0"), [("none", 1.0), ("fixed", 1e3), ("moo", 1e3)])
def test_without_clipping_and_noise_it_is_plain_sgd(rule: str, C0: float) -> None:
    problem = toy_problem(rule)
    reply = one_client(problem, C0=C0, steps=3, weight_decay=0.01)
    torch.testing.assert_close(reply.delta, _plain_steps(problem, 0.5, 0.5, 3, 0.01), rtol=1e-4, atol=1e-6)


def test_with_clipping_or_noise_it_is_not_plain_sgd() -> None:
    problem = toy_problem("fixed")
    plain = _plain_steps(problem, 0.5, 0.5, 3)
    assert not torch.allclose(one_client(problem, C0=0.01, steps=3).delta, plain, rtol=1e-2)
    assert not torch.allclose(one_client(problem, C0=1e3, sigma=1.0, steps=3).delta, plain, rtol=1e-2)


def _without(problem: TrainingProblem, row: int) -> TrainingProblem:
    """The neighbour in which one example contributes nothing: its input is not a number, so it counts as zero."""
    x = problem.dataset.x.clone()
    x[row] = torch.nan
    return dataclasses.replace(problem, dataset=problem.dataset.with_changes(x=x))


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3, 1e12, torch.inf, torch.nan])
@pytest.mark.parametrize("rule", ["fixed", "moo"])
@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_neighbouring_data_sets_differ_by_at_most_C_over_the_expected_batch(
    rule: str, groups: str, scale: float
) -> None:
    problem = toy_problem(rule)
    row = int(_sampled(problem, 0.5)[0])
    x = problem.dataset.x.clone()
    x[row] *= scale
    problem = dataclasses.replace(
        problem,
        dataset=problem.dataset.with_changes(x=x),
        groups=problem.layout.layers if groups == "layer" else (),
    )
    C, lr, batch = 0.3, 0.5, 0.5 * problem.party(0).units
    moved = one_client(problem, C0=C, sigma=1.0).delta - one_client(_without(problem, row), C0=C, sigma=1.0).delta
    assert torch.isfinite(moved).all()
    assert float(torch.linalg.vector_norm(moved)) <= C * lr / batch * (1 + 1e-4) + 1e-7


def test_the_neighbour_test_rejects_a_client_that_does_not_clip() -> None:
    careless = dataclasses.replace(
        FIXED, clip=lambda s, state: (torch.ones_like(s.norms), no_extra(s), state), sound=False
    )
    problem = toy_problem(careless)
    row = int(_sampled(problem, 0.5)[0])
    moved = one_client(problem, C0=0.3).delta - one_client(_without(problem, row), C0=0.3).delta
    assert float(torch.linalg.vector_norm(moved)) > 0.3 * 0.5 / (0.5 * problem.party(0).units)


def test_a_rule_that_lies_about_its_bound_is_held_to_it() -> None:
    liar = dataclasses.replace(FIXED, clip=lambda s, state: (torch.ones_like(s.norms), no_extra(s), state))
    problem = toy_problem(liar)
    row = int(_sampled(problem, 0.5)[0])
    moved = one_client(problem, C0=0.3).delta - one_client(_without(problem, row), C0=0.3).delta
    assert float(torch.linalg.vector_norm(moved)) <= 0.3 * 0.5 / (0.5 * problem.party(0).units) * (1 + 1e-4)


def test_a_model_of_one_scalar_is_clipped_too() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 100.0 * x[:, :CLASSES] * self.scale

    problem = toy_problem("fixed", model=Scalar())
    rows = _sampled(problem, 0.5)
    reply = one_client(problem, C0=0.01, lr=1.0)
    assert reply.delta.shape == (1,)
    assert abs(float(reply.delta)) <= 0.01 * len(rows) / (0.5 * problem.party(0).units) * (1 + 1e-5)
    loose = one_client(problem, C0=1e3, lr=1.0)
    assert abs(float(loose.delta)) > abs(float(reply.delta))


def test_the_denominator_is_the_expected_batch_and_not_the_realised_one() -> None:
    problem = toy_problem("none")
    rows = _sampled(problem, 0.5)
    expected, realised = 0.5 * problem.party(0).units, len(rows)
    assert expected != realised, "choose another seed: this sample cannot tell the two apart"
    model = toy_model()
    loss = cross_entropy(model(problem.dataset.x[rows]), problem.dataset.y[rows], reduction="sum")
    summed = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    delta = one_client(problem, lr=1.0).delta
    torch.testing.assert_close(delta, -summed / expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(delta, -summed / realised, rtol=1e-3)


def test_an_empty_batch_is_noised_stepped_and_paid() -> None:
    problem = toy_problem("fixed")
    rate = 1e-9
    assert len(_sampled(problem, rate)) == 0
    reply = one_client(problem, rate=rate, sigma=1.0, steps=2)
    assert reply.events == (Gaussian(rate, 1.0), Gaussian(rate, 1.0))
    assert (reply.delta != 0).all()
    silent = one_client(problem, rate=rate, sigma=0.0, steps=2)
    assert not silent.delta.any()
    assert silent.events == (Unprotected(), Unprotected())


def test_sampling_is_poisson_and_not_a_shuffle() -> None:
    problem = toy_problem(dataset=toy_data(400), parties=1)
    sizes = [len(_sampled(problem, 0.3, step)) for step in range(400)]
    counts = torch.tensor(sizes, dtype=torch.float64)
    wanted = 400 * 0.3 * 0.7
    assert abs(float(counts.mean()) - 120) < 5 * (wanted / 400) ** 0.5
    assert 0.7 * wanted < float(counts.var()) < 1.4 * wanted  # a shuffle's batches have no variance at all
    chosen = torch.zeros(400)
    for step in range(400):
        chosen[_sampled(problem, 0.3, step)] += 1
    assert 0.7 * wanted < float(chosen.var()) < 1.4 * wanted


def test_a_person_with_many_records_moves_the_sum_by_at_most_C() -> None:
    person = torch.arange(60) // 3
    person[:30] = 0  # one person holds half the records
    dataset = toy_data(person=person)
    for unit, bounded in (("person", True), ("example", False)):
        problem = toy_problem("fixed", dataset=dataset, parties=1, unit=unit)
        x = dataset.x.clone()
        x[person == 0] = torch.nan
        neighbour = dataclasses.replace(problem, dataset=dataset.with_changes(x=x))
        C, batch = 0.05, 1.0 * problem.party(0).units
        moved = one_client(problem, C0=C, rate=1.0).delta - one_client(neighbour, C0=C, rate=1.0).delta
        assert (float(torch.linalg.vector_norm(moved)) <= C * 0.5 / batch * (1 + 1e-4)) is bounded


def test_a_persons_gradient_is_the_mean_over_their_records() -> None:
    dataset = toy_data(person=torch.arange(60) // 2)
    problem = toy_problem("none", dataset=dataset, parties=1, unit="person")
    model = toy_model()
    per_person = [cross_entropy(model(dataset.x[2 * i : 2 * i + 2]), dataset.y[2 * i : 2 * i + 2]) for i in range(30)]
    gradients = torch.autograd.grad(torch.stack(per_person).mean(), list(model.parameters()))
    delta = one_client(problem, rate=1.0, lr=1.0).delta
    torch.testing.assert_close(delta, -torch.cat([g.flatten() for g in gradients]), rtol=1e-4, atol=1e-6)


def test_events_count_every_step_and_other_keys_give_other_noise() -> None:
    problem = toy_problem("fixed")
    reply = one_client(problem, sigma=1.3, steps=4, rate=0.25)
    assert reply.events == (Gaussian(0.25, 1.3),) * 4
    assert torch.equal(reply.delta, one_client(problem, sigma=1.3, steps=4, rate=0.25).delta)
    other = dataclasses.replace(problem, randomness=SeededRandomness(4))
    assert not torch.equal(reply.delta, one_client(other, sigma=1.3, steps=4, rate=0.25).delta)


def test_noise_uses_the_C_the_clipping_used() -> None:
    """A rule whose C moves within the round must noise with the C it clipped with."""
    moving = dataclasses.replace(
        FIXED, when="step", where="client", adapt=lambda state, released: {**state, "C": state["C"] * 10}
    )
    problem = toy_problem(moving)
    empty = one_client(problem, rate=1e-9, sigma=1.0, steps=1, C0=1.0, lr=1e-9)
    noise = problem.randomness.normal(("noise", 0, 0, 0), problem.layout.dim).float()
    scale = 1e-9 / (1e-9 * problem.party(0).units)
    torch.testing.assert_close(empty.delta, -noise * scale, rtol=1e-4, atol=1e-6)
    assert float(empty.state["C"]) == pytest.approx(10.0)  # the new C is for the next step
