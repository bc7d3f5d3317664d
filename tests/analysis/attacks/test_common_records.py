"""Pools whose parties also hold records that are in every federation, and learning rates found outside of a pool."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fulcrum.analysis.attacks import PoolSize, attack_pool, prepare_cell
from fulcrum.analysis.attacks.membership import load_attack_data
from fulcrum.analysis.attacks.pool import make_shadows, order_records, take_pool_records
from fulcrum.analysis.attacks.rates import choose_lr
from fulcrum.analysis.attacks.release_scores import ReleaseScorer
from fulcrum.analysis.attacks.shadows import prepare_pool, run_cell, run_shadows
from fulcrum.engines.batched import run_many
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import Settings

SIZE = PoolSize(shadows=8, candidates=16, controls=8, common=40)


def make_settings(**train):
    return Settings(method="dp-sgd").replace(
        data={"parties": 2, "partition": "iid"},
        model={"name": "linear"},
        train={"rounds": 12, "rate": 0.3, "lr": 0.5, "ema": 0.0, **train},
        clip={"rule": "fixed", "C0": 1.0, "rehearse": False},
        privacy={"epsilon": 3.0},
        run={"device": "cpu"},
    )


@pytest.fixture(scope="module")
def digits():
    return load_attack_data(make_settings())


def test_common_records_are_in_every_federation_and_are_not_attacked(digits):
    cell = prepare_cell(make_settings(rounds=2), None, SIZE, digits)
    pool = prepare_pool(cell, digits)
    assert int(pool.common.sum()) == 80
    assert not (pool.common & pool.control).any()
    for s, shadow in enumerate(make_shadows(pool, range(8), 0)):
        held = np.zeros(len(pool.party), dtype=bool)
        held[shadow.problem.partition.order.numpy()] = True
        assert held[pool.common].all()
        assert not held[pool.control].any()
        assert (held[pool.watched] == (pool.coins[s] & ~pool.control)[pool.watched]).all()
    scores = run_shadows(pool, cell, range(4))
    assert scores.coins.shape == (4, 48)
    assert all(values.shape == (4, 48) for values in scores.scores.values())
    assert (scores.coins == pool.coins[:4, pool.watched]).all()
    assert (scores.party == pool.party[pool.watched]).all()


def test_a_server_that_knows_the_common_records_finds_the_members_among_them(digits):
    known = run_cell(prepare_cell(make_settings(), None, SIZE, digits), digits)
    blind = run_cell(prepare_cell(make_settings(), None, dataclasses.replace(SIZE, known=0), digits), digits)
    assert known is not None
    assert blind is not None
    found, unknown = (attack_pool(scores, draws=40).best("releases-joint").roc.auc for scores in (known, blind))
    assert found.low > 0.85
    assert found.low > unknown.value


def test_attacks_on_private_releases_of_such_pools_stay_below_the_bound(digits):
    scores = run_cell(prepare_cell(make_settings(), 3.0, SIZE, digits), digits)
    assert scores is not None
    report = attack_pool(scores, draws=40)
    assert report.violations == ()
    for result in report.results:
        assert abs(result.control.auc.value - 0.5) < 4 * result.control.auc.error, (result.view, result.attack)


def test_scores_of_a_record_do_not_depend_on_which_others_are_scored(digits):
    """Places in the list are those of the data set: a slip would give one record's score to another."""
    cell = prepare_cell(make_settings(rounds=2), 3.0, SIZE, digits)
    pool = prepare_pool(cell, digits)
    found = []
    for common in (pool.common, np.zeros_like(pool.common)):
        watch = ReleaseScorer(pool.party, common, 0)
        for _ in run_many(make_shadows(pool, range(2), 0), watch=watch):
            pass
        found.append(watch.collect())
    for name in ("dot", "cosine", "centred"):
        np.testing.assert_allclose(found[0][name], found[1][name][:, pool.watched], rtol=1e-4, atol=1e-5)


def test_rates_are_tried_on_records_outside_of_the_pool_and_never_on_test_records(digits, monkeypatch):
    import fulcrum.analysis.attacks.rates as rates

    cell = prepare_cell(make_settings(), 6.0, SIZE, digits)
    seen = []
    real = rates.prepare_unrehearsed

    def keep(settings, dataset):
        seen.append(dataset)
        return real(settings, dataset)

    monkeypatch.setattr(rates, "prepare_unrehearsed", keep)
    best, tried = choose_lr(cell, digits, [1e-6, 1.0], "cpu")
    assert best == 1.0
    assert tried["1"] > tried["1e-06"]
    pool = {row.tobytes() for row in take_pool_records(digits, cell.settings, SIZE, cell.seed).x.numpy()}
    test = {row.tobytes() for row in digits.test_records.x.numpy()}
    trained = {row.tobytes() for row in seen[0].x.numpy()}
    scored = {row.tobytes() for row in seen[0].test_records.x.numpy()}
    assert not trained & scored
    assert not (trained | scored) & pool
    assert not (trained | scored) & test
    assert len(order_records(digits, 0)) == len(digits.records)


def test_a_pool_that_leaves_no_records_for_a_choice_is_refused(digits):
    size = dataclasses.replace(SIZE, common=len(digits.records) // 2 - 40)
    with pytest.raises(ConfigError, match="outside of the pool"):
        choose_lr(prepare_cell(make_settings(), None, size, digits), digits, [1.0], "cpu")
    with pytest.raises(ConfigError, match="above 0"):
        choose_lr(prepare_cell(make_settings(), None, SIZE, digits), digits, [0.0], "cpu")
    with pytest.raises(ConfigError, match="common = -1"):
        dataclasses.replace(SIZE, common=-1).check()
