"""Membership inference: a pool that must give its members away, twins that must not, and the bound of epsilon."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fulcrum.analysis.attacks import PoolSize, attack_pool, limit_by_pair, prepare_cell, read_scores
from fulcrum.analysis.attacks.membership import load_attack_data
from fulcrum.analysis.attacks.pages import COLUMNS, make_rows, write_report
from fulcrum.analysis.attacks.pool import make_shadows
from fulcrum.analysis.attacks.shadows import prepare_pool, run_cell
from fulcrum.analysis.attacks.worker import pack_cells
from fulcrum.engines.batched import run_many
from fulcrum.errors import ConfigError, DataError, RunError
from fulcrum.settings.schema import Settings
from fulcrum.training.loop import federate

SIZE = PoolSize(shadows=8, candidates=16, controls=8)


def make_settings(**more):
    sections: dict[str, dict[str, Any]] = {
        "data": {"parties": 2, "partition": "iid"},
        "model": {"name": "linear"},
        "train": {"rounds": 12, "rate": 0.3, "lr": 0.5, "ema": 0.0},
        "clip": {"rule": "fixed", "C0": 1.0, "rehearse": False},
        "privacy": {"epsilon": 3.0},
        "run": {"device": "cpu"},
    }
    for name, values in more.items():
        sections[name] = {**sections[name], **values}
    return Settings(method="dp-sgd").replace(**sections)


@pytest.fixture(scope="module")
def digits():
    return load_attack_data(make_settings())


@pytest.fixture(scope="module")
def plain_scores(digits):
    return run_cell(prepare_cell(make_settings(), None, SIZE, digits), digits)


@pytest.fixture(scope="module")
def private_scores(digits):
    return run_cell(prepare_cell(make_settings(), 3.0, SIZE, digits), digits)


def test_each_record_has_its_own_coin_and_controls_are_never_members(digits):
    pool = prepare_pool(prepare_cell(make_settings(), None, SIZE, digits), digits)
    assert pool.coins.shape == (8, 2 * 24)
    assert int(pool.control.sum()) == 16
    assert not pool.members[:, pool.control].any()
    for s, shadow in enumerate(make_shadows(pool, range(8), 0)):
        held = np.zeros(48, dtype=bool)
        held[shadow.problem.partition.order.numpy()] = True
        assert (held == pool.members[s]).all()
        for k in range(2):
            assert (pool.party[shadow.problem.partition.indices(k).numpy()] == k).all()


class Recorder:
    """A watch that keeps every release."""

    def begin(self, server, steps):
        self.seen = torch.zeros((server.rounds, len(server.federations) * 2, server.theta.shape[1]))
        self.server = server

    def look(self, releases):
        self.seen[int(self.server.t)] = releases

    def list_state_tensors(self):
        return [self.seen]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_watch_sees_what_the_reference_engine_releases(digits, steps, monkeypatch):
    cell = prepare_cell(make_settings(train={"steps": steps, "rounds": 3}), 3.0, SIZE, digits)
    shadows = make_shadows(prepare_pool(cell, digits), range(2), 0)
    watch = Recorder()
    for _ in run_many(shadows, watch=watch):
        pass
    import fulcrum.training.round as played

    updates = []
    real = played.average_replies

    def keep(replies, *rest, **named):
        updates.append([reply.delta.clone() for reply in replies])
        return real(replies, *rest, **named)

    monkeypatch.setattr(played, "average_replies", keep)
    for r, shadow in enumerate(shadows):
        updates.clear()
        for _ in federate(shadow):
            pass
        for t, own in enumerate(updates):
            for k, update in enumerate(own):
                torch.testing.assert_close(watch.seen[t, 2 * r + k], update, rtol=1e-4, atol=1e-6)


def test_releases_that_nobody_may_see_one_by_one_are_refused(digits):
    cell = prepare_cell(make_settings(), 3.0, SIZE, digits)
    hidden = dataclasses.replace(cell, settings=cell.settings.replace(privacy={"aggregation": "ideal-secagg"}))
    with pytest.raises(ConfigError, match="aggregation"):
        run_cell(hidden, digits)


def test_without_privacy_members_are_found(plain_scores):
    report = attack_pool(plain_scores, draws=60)
    assert report.best("releases-joint").roc.auc.low > 0.9
    assert report.best("releases").roc.auc.low > 0.55
    assert report.best("model").roc.auc.low > 0.55
    assert report.limit is None
    assert report.violations == ()


def test_twins_that_were_never_members_are_not_found(plain_scores):
    for result in attack_pool(plain_scores, draws=60).results:
        found = result.control.auc
        assert abs(found.value - 0.5) < 4 * found.error, (result.view, result.attack)


def test_a_leak_of_the_coins_would_show_in_the_twins(plain_scores):
    """The wrong case: scores that know the coins, members or not."""
    leaked = {name: values + 10 * plain_scores.coins for name, values in plain_scores.scores.items()}
    report = attack_pool(dataclasses.replace(plain_scores, scores=leaked), draws=20)
    assert all(result.control.auc.value > 0.9 for result in report.results if result.attack != "rmia")


def test_private_releases_stay_below_the_bound_and_plain_ones_pass_it(private_scores, plain_scores):
    right = attack_pool(private_scores, draws=60)
    assert right.violations == ()
    assert right.limit is not None
    assert 0.5 < right.limit.auc < limit_by_pair(3.0, 1e-5).auc
    # Planted: a run without noise that claims the same epsilon.
    planted = attack_pool(plain_scores, epsilon=3.0, draws=60)
    assert any("releases-joint" in words for words in planted.violations)


def test_report_files_hold_every_attack(private_scores, plain_scores, tmp_path):
    reports = [attack_pool(scores, draws=10) for scores in (plain_scores, private_scores)]
    rows = make_rows(reports)
    assert len(rows) == 6
    assert all(len(row) == len(COLUMNS) for row in rows)
    written = write_report(tmp_path / "digits.json", reports, "cpu")
    assert all(path.is_file() for path in written)
    held = json.loads((tmp_path / "digits.json").read_text())
    assert {cell["cell"] for cell in held["cells"]} == {"digits-none", "digits-3"}
    assert len(held["cells"][1]["attacks"]) == 12
    assert held["commit"]
    assert held["cells"][1]["limit"]["tpr"]["0.001"] < held["cells"][1]["pair_limit"]["tpr"]["0.001"] * 1.001


def test_a_cell_goes_on_from_its_file_with_the_same_numbers(digits, plain_scores, tmp_path):
    path, cell = tmp_path / "cell.npz", plain_scores.cell
    first = run_cell(cell, digits, path, stack=5, out_of_time=lambda took: took > 0)
    assert first is not None
    assert first.shadows == 5
    whole = run_cell(cell, digits, path, stack=5)
    assert whole is not None
    assert read_scores(path).shadows == 8
    for view, values in plain_scores.scores.items():
        np.testing.assert_allclose(whole.scores[view], values, rtol=2e-2, atol=2e-3)
    with pytest.raises(RunError, match="another cell"):
        run_cell(dataclasses.replace(cell, seed=1), digits, path)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (PoolSize(2, 10, 5), "shadows = 2"),
        (PoolSize(8, 2, 5), "candidates = 2"),
        (PoolSize(8, 5000, 5), "records"),
    ],
)
def test_pools_that_cannot_be_are_refused(digits, size, words):
    with pytest.raises(ConfigError, match=words):
        prepare_pool(prepare_cell(make_settings(), None, size, digits), digits)


def test_private_data_is_refused(digits):
    private = dataclasses.replace(digits, public=False)
    cell = prepare_cell(make_settings(), None, SIZE, digits)
    with pytest.raises((DataError, ConfigError)):
        prepare_pool(cell, private)


WORKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pydantic", "dp_accounting", "typer", "rich", "sklearn", "platformdirs"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
from fulcrum.analysis.attacks.worker import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_worker_needs_torch_and_numpy_alone(digits, tmp_path):
    cell = prepare_cell(make_settings(train={"rounds": 2}), 3.0, PoolSize(4, 8, 4), digits)
    pack_cells(tmp_path / "job", [cell], digits)
    words = [sys.executable, "-c", WORKER, str(tmp_path / "job"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    source = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(words, capture_output=True, text=True, cwd=source, timeout=120)
    assert done.returncode == 0, done.stderr
    scores = read_scores(tmp_path / "out" / "digits-3.npz")
    assert scores.shadows == 4
    assert np.isfinite(scores.scores["joint"]).all()
    assert attack_pool(scores, draws=5).limit is not None
