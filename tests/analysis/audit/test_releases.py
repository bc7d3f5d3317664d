"""Others' releases, finished runs and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fulcrum.analysis.audit import releases as module
from fulcrum.analysis.audit.bounds import LowerBound, simulate_projections
from fulcrum.analysis.audit.finished import pair_scores
from fulcrum.analysis.audit.outcome import Audit, Measured, conclude
from fulcrum.analysis.audit.releases import audit_releases, read_releases
from fulcrum.cli import main
from fulcrum.engines.canary_files import write_releases
from fulcrum.errors import InputError
from fulcrum.privacy.events import Gaussian

CLAIM = {"delta": 1e-5, "epsilon": 4.2, "rate": 0.5, "sigma": 2.0}
SMALL = ["--data", "digits", "--epsilon", "4", "--parties", "2", "--rounds", "4", "--set", "clip.rehearse=false"]


def draw(count=300, sigma=2.0, seed=0):
    generator = np.random.default_rng(seed)
    included = generator.random(count) < 0.5
    return included, simulate_projections([Gaussian(0.5, sigma, 8)], included, generator)


def test_the_same_canaries_in_each_form_of_the_file_give_the_same(tmp_path):
    included, projections = draw(40)
    directions = np.zeros((40, 50))
    directions[np.arange(40), np.arange(40)] = 3.0  # C = 3
    released = np.zeros((8, 50))
    released[:, :40] = 3.0 * projections.T
    write_releases(tmp_path / "a.npz", {"included": included, "projections": projections}, CLAIM)
    write_releases(tmp_path / "b.npz", {"included": included, "releases": released, "directions": directions}, CLAIM)
    sparse = {"coordinates": np.arange(40), "values": np.full(40, 3.0)}
    write_releases(tmp_path / "c.npz", {"included": included, "releases": released, **sparse}, CLAIM)
    found = [read_releases(tmp_path / f"{name}.npz") for name in "abc"]
    for each in found[1:]:
        assert np.allclose(each.projections, found[0].projections)


@pytest.mark.slow
def test_right_releases_pass_and_those_with_half_the_noise_do_not(tmp_path, capsys):
    included, projections = draw(300)
    run = np.arange(300)
    write_releases(tmp_path / "right.npz", {"included": included, "projections": projections, "run": run}, CLAIM)
    included, projections = draw(300, sigma=0.8)
    write_releases(tmp_path / "wrong.npz", {"included": included, "projections": projections}, CLAIM)
    right = audit_releases(read_releases(tmp_path / "right.npz"))
    assert right.passed
    assert "clopper-pearson" in {bound.method for bound in right.parties[0].bounds}  # one canary in each run
    assert main(["audit", "--releases", str(tmp_path / "wrong.npz"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] is False
    assert told["format"] == "fulcrum-audit-1"


@pytest.mark.parametrize(
    ("arrays", "claim", "words"),
    [
        ({"included": np.array([{}, {}], dtype=object)}, CLAIM, "not a readable .npz file of numbers"),
        ({"included": np.ones(3)}, CLAIM, "neither projections"),
        ({"included": np.full(3, 2)}, CLAIM, "vector of 0 and 1"),
        ({"included": np.ones(3), "projections": np.zeros((2, 8))}, CLAIM, "one row per canary"),
        ({"included": np.ones(3), "projections": np.full((3, 8), np.nan)}, CLAIM, "not a finite number"),
        ({"included": np.array(["a", "b"])}, CLAIM, "must hold numbers"),
        ({"included": np.ones(3), "projections": np.zeros((3, 8))}, {"delta": 1e-5, "rate": 2, "sigma": 1}, "rate = 2"),
        ({"included": np.ones(3), "projections": np.zeros((3, 8))}, {"delta": 1e-5}, "rate = None"),
        ({"included": np.ones(3), "projections": np.full((3, 8), 1e300)}, CLAIM, "times what a canary adds"),
        ({"included": np.ones(3), "projections": np.zeros((3, 8))}, {**CLAIM, "sigma": 1e-6}, "at least 0.001"),
        (
            {"included": np.ones(3), "projections": np.zeros((3, 8)), "party": np.full(3, 2**62)},
            CLAIM,
            "too large a number",
        ),
        (
            {"included": np.ones(3), "projections": np.zeros((3, 8)), "sampled": np.full((3, 8), np.nan)},
            CLAIM,
            "must be 0 and 1",
        ),
        (
            {"included": np.ones(3), "releases": np.zeros((8, 4)), "directions": np.full((3, 4), 2.0)},
            {**CLAIM, "C": 1.0},
            "more than C = 1",
        ),
        (
            {"included": np.ones(3), "projections": np.zeros((3, 8))},
            {"delta": 1e-5, "events": [["gaussian", 0.5, 1.0, 9]]},
            "claims 9 releases",
        ),
        ({"included": np.ones(3), "releases": np.zeros((8, 4)), "directions": np.zeros((3, 4))}, CLAIM, "no length"),
        (
            {"included": np.ones(3), "projections": np.zeros((3, 8)), "run": np.array([0, -1, 2])},
            CLAIM,
            "whole numbers",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_in_a_sentence(tmp_path, capsys, arrays, claim, words):
    np.savez(tmp_path / "f.npz", **arrays)
    (tmp_path / "f.json").write_text(json.dumps({"format": "fulcrum-releases-1", **claim}))
    assert main(["audit", "--releases", str(tmp_path / "f.npz")]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") <= 2


def test_large_and_damaged_files_are_not_read(tmp_path, monkeypatch):
    included, projections = draw(20)
    write_releases(tmp_path / "f.npz", {"included": included, "projections": projections}, CLAIM)
    (tmp_path / "f.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="not JSON"):
        read_releases(tmp_path / "f.npz")
    (tmp_path / "f.json").write_text('{"format": "another"}')
    with pytest.raises(InputError, match="fulcrum-releases-1"):
        read_releases(tmp_path / "f.npz")
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with pytest.raises(InputError, match="at most"):
        read_releases(tmp_path / "f.npz")
    (tmp_path / "f.npz").write_bytes(b"no zip")
    with pytest.raises(InputError, match="not a readable"):
        read_releases(tmp_path / "f.npz")


# --- the command ------------------------------------------------------------------------------------


def test_a_finished_run_is_reconciled_and_an_edited_statement_is_noticed(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["run", *SMALL, "--out", str(folder), "--quiet"]) == 0
    assert main(["audit", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "agrees: privacy.json says what the ledger says" in told
    assert "no canary was in this run" in told
    assert json.loads((folder / "audit.json").read_text())["kind"] == "members"
    statement = json.loads((folder / "privacy.json").read_text())
    (folder / "privacy.json").write_text(json.dumps({**statement, "epsilon": 1.0}))
    assert main(["audit", str(folder)]) == 1
    assert "DOES NOT AGREE: privacy.json says what the ledger says" in capsys.readouterr().out


def test_a_run_with_canaries_from_the_command_line(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["audit", *SMALL, "--canaries", "60", "--out", str(folder), "--quiet", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "gradient"
    assert told["units"] == [party["canaries"] + 718 + i for i, party in enumerate(told["parties"])] or told["units"]
    assert json.loads((folder / "audit.json").read_text())["measured"] == told["measured"]
    assert json.loads((folder / "run.json").read_text())["audit"] == "gradient"
    assert main(["audit", str(folder)]) == 2  # its own audit is not overwritten by a weaker one
    assert "was trained with canaries" in capsys.readouterr().err


def test_a_run_without_noise_and_one_whose_parties_are_units_are_reconciled_only(tmp_path, capsys):
    for name, words in (("none", ["--method", "none"]), ("client", ["--set", "privacy.unit=client"])):
        folder = tmp_path / name
        assert main(["run", *SMALL, *words, "--out", str(folder), "--quiet"]) == 0
        capsys.readouterr()
        assert main(["audit", str(folder)]) == 0, capsys.readouterr().out
        assert "records were not scored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kind", "picture"], "choose gradient or example"),
        (["--confidence", "0.2"], "--confidence 0.2"),
        (["--canaries", "5000"], "directions"),
        (["--set", "privacy.unit=client"], "at unit client it has no canaries"),
        (["--releases", "nowhere.npz"], "nowhere.npz is not there"),
    ],
)
def test_wrong_words_get_a_sentence(words, told, capsys):
    assert main(["audit", *SMALL, *words]) == 2
    assert told in capsys.readouterr().err


def test_the_order_of_a_file_decides_nothing(tmp_path):
    """All canaries that are in come first, and every release is the same number: nobody can tell them apart."""
    included = (np.arange(400) < 200).astype(np.int64)
    claim = {"epsilon": 1.0, "delta": 1e-5, "rate": 0.5, "sigma": 2.0}
    for name, order in (("first", included), ("in turn", np.arange(400) % 2)):
        path = tmp_path / f"{name}.npz"
        np.savez(path, included=order, projections=np.zeros((400, 4)), run=np.arange(400))
        path.with_suffix(".json").write_text(json.dumps({"format": "fulcrum-releases-1", **claim}))
        found = audit_releases(read_releases(path))
        assert found.passed, found.list_rows()
        counts = {bound.method: bound.numbers for bound in found.parties[0].bounds}
        one = counts["one-run"]
        assert one["correct"] < 0.8 * one["guesses"]  # 200 coins and more: five deviations are below 0.7
        halves = counts["clopper-pearson"]
        assert 60 < halves["members"] < 140  # both halves have both kinds


def test_the_verdict_and_the_headline_share_one_level():
    """Bounds that rise with less confidence: the highest of many is told at the level that all share."""
    asked = []

    def bound(confidence):
        asked.append(confidence)
        return (LowerBound(3.0 + 20 * (1 - confidence), 1e-5, confidence, "one-run"),) * 2

    entries = [Measured(f"party-{k}", 3.5, 10, 5, 1, bound) for k in range(5)]
    found = conclude(entries, 0.95)
    assert not any(entry.above for entry in found)  # 4.0 at 95% each, 3.1 at the level of ten bounds
    assert min(asked) == 0.95
    assert max(asked) == pytest.approx(0.995)
    told = Audit("a view", "releases", 1e-5, 0.95, tuple(found)).to_json()
    assert told["measured"]["epsilon"] == pytest.approx(3.1)


@pytest.mark.slow
def test_releases_without_noise_contradict_every_claim(tmp_path):
    """No spread at all: the canaries that are in move a release, the others do not."""
    included = np.random.default_rng(0).random(200) < 0.5
    path = tmp_path / "silent.npz"
    np.savez(path, included=included.astype(np.int64), projections=np.repeat(included[:, None] * 1.0, 3, axis=1))
    path.with_suffix(".json").write_text(json.dumps({"format": "fulcrum-releases-1", **CLAIM}))
    found = audit_releases(read_releases(path))
    assert not found.passed
    assert {bound.method for bound in found.parties[0].bounds if bound.epsilon > 4.2} >= {"noise-fit", "one-run-fdp"}


@pytest.mark.parametrize(("members", "others"), [(900, 400), (7, 500), (1, 1)])
def test_members_and_others_are_placed_by_coins(members, others):
    """One-run bounds are about independent coins: a fixed number of members is another experiment."""
    view = pair_scores(np.ones(members), np.zeros(others), (Gaussian(0.5, 2.0),))
    assert view.scores is not None
    assert np.array_equal(view.scores, view.included)
    assert len(view.included) >= min(members, others)
    if members > 100:
        assert view.included.sum() not in (members, others, len(view.included) // 2)
