"""Attacks on masked sums: a canary that is always sampled, and adversaries who pool what they see.

Each of m coordinates is one release with its own canary, at sigma_eff = 1 and rate 1, so the claim is Gaussian: an
optimal test has mu = 1. The lower bound of mu must not pass it as far as the claim reaches, and must pass it beyond.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from fulcrum.engines import find_engine
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.privacy.pairwise.graph import list_neighbours
from fulcrum.privacy.pairwise.integers import (
    add_masks,
    choose_shared_grid,
    draw_mask,
    round_rows_to_messages,
    sum_messages,
)
from fulcrum.privacy.pairwise.shares import compute_own_variances
from fulcrum.rng import SeededRandomness, name_stream
from fulcrum.runs import prepare
from fulcrum.training.federation import Federation
from fulcrum.training.pairwise import add_message_terms
from fulcrum.training.snapshot import make_first_snapshot
from fulcrum.types import MessageTerms, RoundRequest
from support.federations import toy_data, toy_settings

PARTIES, COVERED = 10, 1
CLAIM = 1.0


def bound_mu(without: Tensor, within: Tensor, middle: float = 0.5, z: float = 3.7) -> float:
    """A lower bound of mu, wrong with probability 2e-4: of a test at a fixed threshold, by Wilson's intervals."""

    def rate(hits: float, count: int, side: int) -> float:
        p = (hits + z * z / 2 + side * z * math.sqrt(hits * (count - hits) / count + z * z / 4)) / (count + z * z)
        return min(max(p, 1e-12), 1 - 1e-12)

    hit, false = (float((scores > middle).sum()) for scores in (within, without))
    return NormalDist().inv_cdf(rate(hit, len(within), -1)) - NormalDist().inv_cdf(rate(false, len(without), +1))


@dataclasses.dataclass(frozen=True)
class Mistakes:
    """What a wrong implementation might do."""

    reused_stream: bool = False
    lost_pair: bool = False
    no_own_noise: bool = False
    wrong_sign: bool = False


def play(seed: int, canary: float, m: int, mistakes: Mistakes, attempt: int = 0) -> tuple[Tensor, list[Tensor], float]:
    """Messages [P][m], what each party knows of its own (integers before masks), and the grid.

    Party 0 holds the canary; the others' sums are some numbers that everybody knows to be 0.
    """
    own = [math.sqrt(v) for v in compute_own_variances([1.0] * PARTIES, COVERED)]
    grid, _ = choose_shared_grid(own, 50.0)
    noise = SeededRandomness(seed)
    sums = torch.zeros((PARTIES, m), dtype=torch.float64)
    sums[0] = canary
    places = [(noise, (0, k, 0, attempt)) for k in range(PARTIES)]
    integers = round_rows_to_messages(sums, own, [MessageTerms(1.0, grid)] * PARTIES, places)
    if mistakes.no_own_noise:
        integers[0] = round(canary / grid)
    keys = SeededRandomness(seed + 1000)
    messages = []
    for k in range(PARTIES):
        masks = []
        for j in list_neighbours(k, PARTIES, COVERED):
            if mistakes.lost_pair and (k, j) == (3, 7):
                continue
            stream = name_stream("mask", 0, *sorted((k, j)), attempt=0 if mistakes.reused_stream else attempt)
            masks.append((k < j or mistakes.wrong_sign, draw_mask(*keys.locate_stream(stream), m)))
        messages.append(add_masks(integers[k], masks))
    return torch.stack(messages), list(integers), grid


def attack_sum(colluders: Iterable[int], m: int, mistakes: Mistakes = Mistakes()) -> float:  # noqa: B008
    """The lower bound for a server that adds up all messages and takes off what its colluders know of theirs."""
    scores = []
    for world in (0.0, 1.0):
        messages, own, grid = play(int(world), world, m, mistakes)
        known = sum_messages([own[k] for k in colluders] or [torch.zeros_like(own[0])])
        scores.append((sum_messages([*messages, -known]).double()) * grid)
    return bound_mu(scores[0], scores[1])


def attack_two_messages(m: int, mistakes: Mistakes) -> float:
    """The lower bound for a server that has two messages of party 0, from before and after a rollback."""
    scores = []
    for world in (0.0, 1.0):
        first, _, grid = play(int(world), world, m, mistakes)
        second, _, _ = play(int(world), 0.0, m, mistakes, attempt=1)  # a model at which the canary adds nothing
        scores.append(sum_messages([first[0], -second[0]]).double() * grid)
    return bound_mu(scores[0], scores[1])


def test_the_server_alone_and_with_the_colluders_covered_learns_no_more_than_claimed() -> None:
    for colluders in ((), (9,), (4,)):
        low = attack_sum(colluders, 100_000)
        assert low <= CLAIM
        assert low > 0.85 * math.sqrt(9 / (10 - len(colluders)))  # the attack is a good one


def test_one_colluder_more_passes_the_claim() -> None:
    assert attack_sum((8, 9), 100_000) > CLAIM  # mu = sqrt(9 / 8): 1e5 releases tell it from 1


def test_all_but_one_pass_it_by_far() -> None:
    low = attack_sum(range(1, PARTIES), 20_000)
    assert 2.5 < low <= 3.0  # sqrt(9)


def test_single_messages_say_nothing() -> None:
    scores = []
    for world in (0.0, 1.0):
        messages, _, grid = play(int(world), world, 20_000, Mistakes())
        scores.append(messages[0].double() * grid)
    assert bound_mu(scores[0], scores[1], middle=0.0) <= 0.02


def test_planted_mistakes_are_found() -> None:
    m = 20_000
    assert attack_two_messages(m, Mistakes()) <= 0.02  # new masks: two messages say as little as one
    assert attack_two_messages(m, Mistakes(reused_stream=True)) > 1.5 * CLAIM  # 3 / sqrt(2)
    assert attack_sum((9,), 100_000, Mistakes(no_own_noise=True)) > CLAIM  # the others' eight ninths are not enough
    for wrong in (Mistakes(lost_pair=True), Mistakes(wrong_sign=True)):
        messages, own, _ = play(0, 0.0, 1000, wrong)
        assert not torch.equal(sum_messages(messages), sum_messages(own))
    messages, own, _ = play(0, 0.0, 1000, Mistakes())
    assert torch.equal(sum_messages(messages), sum_messages(own))


# --- through an engine ------------------------------------------------------------------------------


def make_federation(engine: str) -> Federation:
    settings = toy_settings(
        run={"engine": engine},
        data={"partition": "iid", "parties": 4, "min_examples": 1},
        clip={"rule": "fixed", "C0": 1.0},
        train={"rate": 1.0, "rounds": 400},
        privacy={"sigma": 1.0, "aggregation": "pairwise", "colluders": 1.0},
    )
    return prepare(settings, toy_data(n=16))


def collect_scores(engine: str, colluders: Iterable[int], present: bool, releases: int) -> Tensor:
    """Honest sums of many rounds at one model, along the direction in which the canary moves them, in units of b_k."""
    made = make_federation(engine)
    problem, plan = made.problem, made.plan
    snapshot = make_first_snapshot(made)
    tasks = plan.assignments(range(4), 0, 1.0)
    tasks = add_message_terms(tasks, [plan.units(k) for k in range(4)], [0.25] * 4, problem.rule, snapshot.rule)
    canary = int(problem.partition.order[int(problem.partition.starts[0])])
    records = problem.dataset.records
    if not present:  # zero-out: an input of zeros and no part in the sum; its gradient is scaled to nothing
        assert isinstance(records.x, Tensor)
        x = records.x.clone()
        x[canary] = torch.nan  # what is not finite counts as zero
        problem = dataclasses.replace(
            problem, dataset=dataclasses.replace(problem.dataset, train=dataclasses.replace(records, x=x))
        )
    engine_here = ReferenceEngine(problem, masks=False) if engine == "reference" else find_engine(engine, problem)
    totals = []
    for t in range(releases):
        request = RoundRequest(t, 400, snapshot.params, tasks, (snapshot.rule,) * 4, colluders=1)
        honest = [r.delta for r in engine_here.run(request) if r.client not in set(colluders)]
        totals.append(sum_messages(honest).double() * tasks[0].message.grid / tasks[0].message.weight)  # type: ignore[union-attr]
    return torch.stack(totals)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "parallel", "stacked"])
def test_the_engines_keep_the_claim_on_a_canary(engine: str) -> None:
    for colluders, passes in (((3,), False), ((1, 2, 3), True)):
        without, within = (collect_scores(engine, colluders, present, 400) for present in (False, True))
        direction = within[:200].mean(dim=0) - without[:200].mean(dim=0)
        direction = direction / direction.norm()
        scores = [(values[200:] - without[:200].mean(dim=0)) @ direction for values in (without, within)]
        low = bound_mu(scores[0], scores[1], middle=float(scores[1].mean() / 2), z=2.5)
        assert (low > CLAIM) == passes
