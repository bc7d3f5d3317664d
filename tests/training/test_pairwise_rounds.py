"""Rounds with pairwise masks in one process: noise on the sum, equal engines, refusals, ledger and statement."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fulcrum.engines import find_engine
from fulcrum.engines.batched import run_many
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.engines.stacked import sampling
from fulcrum.errors import ConfigError
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.pairwise.graph import is_connected_without, list_neighbours
from fulcrum.privacy.pairwise.integers import sum_messages
from fulcrum.privacy.pairwise.shares import compute_own_variances
from fulcrum.privacy.plan.collusion import list_shown_counts, make_collusion_table
from fulcrum.privacy.statement import statement_to_markdown
from fulcrum.rng import Randomness, SeededRandomness
from fulcrum.runs import execute, prepare
from fulcrum.settings.checks import check_settings
from fulcrum.training.federation import Federation
from fulcrum.training.round import compute_aggregate_noise, run_round
from fulcrum.training.snapshot import make_first_snapshot
from fulcrum.types import ClientReply, RoundRequest
from support.federations import play, toy_data, toy_settings

DATA = toy_data()
RATE, LR, C = 0.2, 0.5, 1.5


def federation(engine: str = "reference", seed: int = 0, data: Any = DATA, **changes: Any) -> Federation:
    """Three parties of unequal size, one round of dp-sgd with pairwise masks unless told otherwise."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"engine": engine, "seed": seed},
        "data": {"partition": "quantity"},
        "clip": {"rule": "fixed", "C0": C},
        "train": {"lr": LR, "rate": RATE, "ema": 0.0},
        "privacy": {"sigma": 1.0, "aggregation": "pairwise"},
    }
    merged = {name: {**sections.get(name, {}), **changes.get(name, {})} for name in {**sections, **changes}}
    return prepare(toy_settings(**merged), data)


def with_randomness(made: Federation, randomness: Randomness) -> Federation:
    problem = dataclasses.replace(made.problem, randomness=randomness)
    return dataclasses.replace(made, problem=problem, engine=find_engine(made.settings.run.engine, problem))


def play_rounds(made: Federation, rounds: int = 1) -> tuple[torch.Tensor, list[ClientReply]]:
    """The change of the model, and the last round's replies."""
    snapshot = start = make_first_snapshot(made)
    replies: list[ClientReply] = []
    for t in range(rounds):
        snapshot, replies, _ = run_round(made, snapshot, range(made.plan.parties), t)
    return snapshot.params - start.params, replies


# --- masks and integers -----------------------------------------------------------------------------


def without_masks(made: Federation) -> Federation:
    return dataclasses.replace(made, engine=ReferenceEngine(made.problem, masks=False))


def test_masks_change_every_message_and_no_bit_of_the_sum() -> None:
    made = federation(train={"rounds": 2})
    masked, bare = play_rounds(made, 2), play_rounds(without_masks(made), 2)
    assert all(reply.delta.dtype == torch.int32 for reply in (*masked[1], *bare[1]))
    assert all((a.delta == b.delta).sum() < 3 for a, b in zip(masked[1], bare[1], strict=True))
    assert torch.equal(sum_messages(r.delta for r in masked[1]), sum_messages(r.delta for r in bare[1]))
    assert torch.equal(masked[0], bare[0])
    # A message alone, or the sum without one, says nothing: bits of masks are left in it.
    left = sum_messages(r.delta for r in masked[1][1:]) - sum_messages(r.delta for r in bare[1][1:])
    assert left.abs().double().mean() > 2**28


@pytest.mark.parametrize("rule", ["fixed", "moo", "auto-s"])
@pytest.mark.parametrize("colluders", [0.0, 1.0, 0.6])
def test_all_engines_agree(rule: str, colluders: float) -> None:
    changes: dict[str, Any] = {"clip": {"rule": rule}, "privacy": {"colluders": colluders}, "train": {"rounds": 3}}
    changes["train"]["weight_decay"] = 0.1
    expected = play_rounds(federation("reference", **changes), 3)[0]
    for engine in ("parallel", "stacked"):
        torch.testing.assert_close(
            play_rounds(federation(engine, **changes), 3)[0], expected, rtol=1e-2, atol=1e-3
        )  # one unit of the grid is 1e-4
    made = federation(**changes)
    plain = federation(**{**changes, "privacy": {"aggregation": "plain"}})
    *_, last = run_many([made, plain])  # two adversaries in one stack
    assert last.averaged is not None
    many = last.averaged[0] - made.problem.layout.flatten(made.problem.model)
    torch.testing.assert_close(many, expected, rtol=1e-2, atol=1e-3)  # one unit of the grid is 1e-4


# --- the noise on the sum ---------------------------------------------------------------------------


def on_host(made: Federation) -> torch.Tensor:
    return play_rounds(made)[0]


def on_device(made: Federation) -> torch.Tensor:
    """As on a GPU, which makes the parties' noise itself and adds it up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)
        last = list(run_many([made]))[-1].averaged
    assert last is not None
    return last[0] - made.problem.layout.flatten(made.problem.model)


@pytest.mark.parametrize("by", [on_host, on_device])
@pytest.mark.parametrize(("colluders", "expected"), [(0.0, 1.0), (1.0, 3 / 2), (2.0, 3.0)])
def test_the_sums_noise_is_tau2_P_over_H(by: Any, colluders: float, expected: float) -> None:
    sigma, squares = 200.0, []
    for seed in range(16):
        made = federation(seed=seed, train={"rounds": 1}, privacy={"sigma": sigma, "colluders": colluders})
        whole = sum(made.plan.units(k) for k in range(3))
        squares.append(float((by(made) / (LR * sigma * C / (RATE * whole))).square().mean()))
    assert sum(squares) / len(squares) == pytest.approx(expected, rel=0.2)  # 16 x 48 draws: 5% of standard error


def test_unequal_weights_and_budgets_get_the_shares_of_the_formula() -> None:
    made = federation(
        train={"weights": "uniform"}, privacy={"sigma": None, "epsilon": 3.0, "budgets": {"party-0": 1.0}}
    )
    plan = made.plan
    assert len({group.sigma for group in plan.groups}) == 2
    tasks = plan.assignments(range(3), 0, LR)
    needs = [(task.sigma / 3 / (RATE * plan.units(task.client))) ** 2 for task in tasks]
    own = compute_own_variances(needs, 1)
    assert [task.noise_parties for task in tasks] == pytest.approx([n / s for n, s in zip(needs, own, strict=True)])
    noises, weights = plan.compute_round_noises(range(3)), torch.full((3,), 1 / 3)
    assert compute_aggregate_noise(tasks, noises, weights) == pytest.approx(math.sqrt(sum(own)))
    # Two participants: another set, other shares.
    two = plan.assignments([0, 2], 0, LR)
    needs = [(task.sigma / 2 / (RATE * plan.units(task.client))) ** 2 for task in two]
    assert [task.noise_parties for task in two] == pytest.approx(
        [n / s for n, s in zip(needs, compute_own_variances(needs, 1), strict=True)]
    )


def test_a_message_carries_the_partys_own_share_of_the_noise_and_no_more() -> None:
    """Noise of two sigmas on the same draws: what differs is the share, on the grid."""
    source = SeededRandomness(5)
    loud, quiet = (with_randomness(federation("parallel", privacy={"sigma": s}), source) for s in (2.0, 1.0))
    found = play_rounds(loud)[0] - play_rounds(quiet)[0]
    plan, d = quiet.plan, quiet.problem.layout.dim
    draws = torch.stack([source.normal(("noise", 0, k, 0), d).float() for k in range(3)])
    whole = sum(plan.units(k) for k in range(3))
    part = LR * C / (RATE * whole) / math.sqrt(2)  # H = 2 of 3
    torch.testing.assert_close(found, -part * draws.sum(dim=0), rtol=1e-3, atol=1e-5)
    for wrong in (1.0, 3.0):  # a whole dose each; shared among all three
        assert not torch.allclose(found, -part * math.sqrt(2 / wrong) * draws.sum(dim=0), rtol=1e-2)


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"steps": 2}}, "train.steps = 2 .* it must be 1"),
        ({"train": {"steps": 0, "epochs": 1.0}}, "train.steps"),
        ({"privacy": {"unit": "client"}}, "privacy.unit = 'client'"),
        ({"privacy": {"colluders": 1.5}}, "privacy.colluders = 1.5 .* whole number"),
        ({"privacy": {"colluders": -1.0}}, "privacy.colluders = -1.0 is out of range"),
        ({"privacy": {"colluders": 3.0}}, "leaves no honest party among 3"),
        ({"clip": {"rule": "moo-client"}}, "follows from the party's own sum before it is masked"),
        ({"clip": {"rule": "moo-paper"}}, "raw private values"),
        ({"clip": {"rule": "quantile"}}, "releases statistics"),
        ({"clip": {"rule": "wav"}}, "another basis"),
        ({"clip": {"rule": "none"}, "privacy": {"sigma": None}}, "adds no noise"),
    ],
)
def test_what_is_not_proved_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_settings(federation(**changes).settings)


def test_no_colluders_is_said_to_cover_no_participant() -> None:
    assert any("covers no participant" in text for text in federation(privacy={"colluders": 0.0}).plan.warnings)
    assert not any("covers no participant" in text for text in federation().plan.warnings)


def test_nobody_takes_part_where_all_might_collude() -> None:
    made = federation(train={"participation": 0.4, "rounds": 12}, privacy={"colluders": 1.0})
    sizes = [len(result.participants or ()) for result in play(made)]
    assert 1 not in sizes
    assert {0, 2} <= set(sizes)


def test_a_run_ends_when_those_with_budget_left_might_all_collude() -> None:
    made = federation(train={"rounds": 6})

    class Poor(type(made.engine)):  # type: ignore[misc]
        """Two of the three parties have spent their budgets after the second round."""

        played = 0

        def run(self, request: RoundRequest) -> Any:
            type(self).played += 1
            return super().run(request)

        def spent(self) -> set[int]:
            return {0, 1} if self.played >= 2 else set()

    ended = play(dataclasses.replace(made, engine=Poor(made.problem)))
    assert len(ended) < 6
    assert all(len(result.participants or ()) in (0, 3) for result in ended)


# --- accounting and statement -----------------------------------------------------------------------


def test_each_party_is_charged_sigma_eff(tmp_path: Path) -> None:
    made = federation(train={"rounds": 2}, privacy={"colluders": 1.0})
    result = execute(made, tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "privacy.json").read_text())
    page = (tmp_path / "run" / "PRIVACY.md").read_text()
    assert page == statement_to_markdown(facts)
    assert facts["aggregation"] == "pairwise"
    assert facts["pairwise"]["colluders"] == 1
    assert facts["pairwise"]["sigma_eff"] == pytest.approx(1.0)
    table = facts["pairwise"]["table"]
    assert [row["colluders"] for row in table] == [1, 2]
    assert table[1]["sigma_eff"] == pytest.approx(math.sqrt(1 / 2))
    assert table[0]["epsilon"] == pytest.approx(result.epsilon, rel=1e-6)
    assert table[1]["epsilon"] > result.epsilon
    two = facts["pairwise"]["two_parties"]
    assert two["composed_epsilon"] == pytest.approx(2 * result.epsilon)
    assert "COMPUTATIONAL" in facts["adversary"]
    assert "up to 1 of the parties" in facts["adversary"]
    assert "Colluding parties" in page
    assert "mixture of shifts" in page
    assert not any("adds up the epsilons" in text for text in facts["adds_up"])
    assert any("do not simply add up" in text for text in facts["adds_up"])
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        for account in ledger.accounts().values():
            assert "masked sums only, by the server and up to 1 colluding" in account.population
            assert ledger.spent(account.name).events == (Gaussian(RATE, 1.0, 2),)


def test_the_statement_of_no_colluders_names_whom_it_leaves_out(tmp_path: Path) -> None:
    execute(federation(privacy={"colluders": 0.0}), tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "NO PARTICIPANT IS" in facts["adversary"]
    assert "no participant at all" in facts["guarantee_text"]


def test_persons_and_secure_randomness_in_one_process(tmp_path: Path) -> None:
    data = toy_data(public=False, person=torch.arange(60) // 2)
    made = federation("auto", data=data, privacy={"unit": "person"}, train={"rounds": 2})
    assert made.problem.randomness.mode == "secure"
    execute(made, tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert (facts["guarantee"], facts["unit"]) == ("yes", "person")
    assert "computational" in facts["guarantee_text"]


def test_the_table_of_colluders_where_sets_vary_takes_the_worst_set() -> None:
    fixed, varying = (make_collusion_table(federation(train={"participation": p}).plan) for p in (1.0, 0.9))
    assert [row.sigma_eff for row in fixed] == pytest.approx([1.0, math.sqrt(1 / 2)])
    assert [row.sigma_eff for row in varying] == pytest.approx([1.0, math.sqrt(1 / 2)])
    # Across machines any party may be missing from a round, whatever the plan says.
    ten = prepare(
        federation().settings.replace(data={"parties": 10, "partition": "iid", "min_examples": 1}), toy_data()
    )
    here, there = (make_collusion_table(ten.plan, varying) for varying in (False, True))
    assert here[4].sigma_eff == pytest.approx(math.sqrt(5 / 9))
    assert there[4].sigma_eff == pytest.approx(math.sqrt(1 / 5))  # six take part, five of whom collude
    assert list_shown_counts(1, 10) == list(range(1, 10))
    assert list_shown_counts(1, 1000)[-1] == 999
    assert len(list_shown_counts(1, 1000)) <= 12


def test_the_table_counts_parties_that_colluders_cut_off() -> None:
    """Brute force over a sparse graph: the least noise of what j colluders see of some honest parties' messages."""
    made = hundred_parties()
    parties, c = 100, 2
    rows = {row.colluders: row.sigma_eff for row in make_collusion_table(made.plan)}
    for j, sigma in rows.items():
        worst = list_neighbours(0, parties, c)[:j]  # next to one party, as many as there are
        left = set(range(parties)) - set(worst) - set(range(50, 50 + j - len(worst)))
        connected = is_connected_without(set(range(parties)) - left, parties, c)
        honest = len(left) if connected else 1
        assert sigma <= math.sqrt(honest / (parties - c)) * 1.001
    assert rows[2] == pytest.approx(1.0)
    assert rows[18] == rows[99] == pytest.approx(math.sqrt(1 / 98), rel=0.01)  # 16 neighbours: one stands alone


def hundred_parties() -> Federation:
    return prepare(
        federation(privacy={"colluders": 2.0}, train={"rate": 0.3}).settings.replace(
            data={"parties": 100, "partition": "iid", "min_examples": 1}
        ),
        toy_data(n=400),
    )


def test_a_hundred_parties_with_few_masks_each() -> None:
    made = hundred_parties()
    masked, bare = play_rounds(made), play_rounds(without_masks(made))
    assert len(masked[1]) == 100
    assert torch.equal(masked[0], bare[0])
    assert all((a.delta == b.delta).sum() < 3 for a, b in zip(masked[1], bare[1], strict=True))
