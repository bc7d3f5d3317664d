"""Results by party: an imbalanced yes-or-no problem over three parties of very different size, trained privately."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fulcrum
from fulcrum.cli import main, show
from fulcrum.data import from_arrays
from fulcrum.runs.folder import MAX_PARTIES_PER_LINE, load_metrics, load_summary, make_metrics_line
from fulcrum.settings.schema import TaskSettings
from fulcrum.types import RoundResult, mean_over_parties

SIZES = {"university": 2400, "county": 700, "village": 300}
SHIFTS = {"university": 0.0, "county": 2.5, "village": -2.0}
POSITIVES = 0.08
OPTIONS: dict[str, Any] = {"rounds": 25, "rate": 0.2, "lr": 2.0, "method": "dp-sgd", "epsilon": 8.0, "device": "cpu"}
WEIGHTS = (1.0, 8.0)


def hospitals() -> dict[str, Any]:
    """8% positives. The parties' scores lie at different heights, so that AUC of all records is another number."""
    rng = np.random.default_rng(0)
    party = np.concatenate([np.full(size, name) for name, size in SIZES.items()])
    y = (rng.random(len(party)) < POSITIVES).astype(np.int64)
    x = rng.normal(size=(len(party), 4)).astype(np.float32)
    x[:, 0] += 1.2 * y
    x[:, 0] += np.array([SHIFTS[name] for name in party], dtype=np.float32)
    test = rng.random(len(party)) < 0.5
    return {
        "x": x[~test],
        "y": y[~test],
        "party": party[~test],
        "x_test": x[test],
        "y_test": y[test],
        "party_test": party[test],
    }


@dataclass(frozen=True)
class Trained:
    folder: Path
    summary: dict
    out: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run from the command line, and what it printed."""
    import contextlib
    import io

    place = tmp_path_factory.mktemp("hospitals")
    np.savez(place / "hospitals.npz", **hospitals())
    words = [f"--{name}={value}" for name, value in OPTIONS.items()]
    task = ["--task", "binary", "--set", f"task.class_weights={list(WEIGHTS)}", "--partition", "given"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(
            ["run", "--data", str(place / "hospitals.npz"), "--public", *task, *words, "--out", str(place / "run")]
        )
    assert code == 0
    return Trained(place / "run", load_summary(place / "run"), said.getvalue())


def from_python(**more: Any) -> fulcrum.Result:
    data = from_arrays(**hospitals(), task=TaskSettings("binary", class_weights=WEIGHTS), public=True)
    return fulcrum.train(data=data, partition="given", **{**OPTIONS, **more})


def test_auc_of_each_party_of_all_records_and_the_mean_stand_in_the_summary(trained: Trained) -> None:
    summary = trained.summary
    assert (summary["score"], summary["higher_is_better"]) == ("auc", True)
    assert set(summary["party_metrics"]) == set(SIZES)
    parties = {name: metrics["auc"] for name, metrics in summary["party_metrics"].items()}
    mean = sum(parties.values()) / len(parties)
    assert summary["mean_over_parties"]["auc"] == pytest.approx(mean, abs=1e-9)
    assert abs(summary["metrics"]["auc"] - mean) > 0.01, "the AUC of all records is not the mean over the parties"
    assert min(parties.values()) > 0.65
    twin = from_python(method="none", epsilon=None)
    assert twin.mean_over_parties["auc"] == pytest.approx(mean, abs=0.05), "the same training without privacy"
    assert summary["epsilon"] <= 8
    assert summary["accuracy"] == summary["metrics"]["accuracy"]


def test_auc_of_each_party_is_that_of_scikit_learn(trained: Trained) -> None:
    from sklearn.metrics import roc_auc_score

    result, arrays = from_python(), hospitals()
    with torch.no_grad():
        scores = result.model(torch.from_numpy(arrays["x_test"]))[:, 0].numpy()
    for name in SIZES:
        own = arrays["party_test"] == name
        exact = roc_auc_score(arrays["y_test"][own], scores[own])
        assert result.party_metrics[name]["auc"] == pytest.approx(exact, abs=1e-3)
        others = roc_auc_score(arrays["y_test"][~own], scores[~own])
        assert abs(result.party_metrics[name]["auc"] - others) > 1e-3, "other records would be noticed"
    assert result.metrics["auc"] == pytest.approx(roc_auc_score(arrays["y_test"], scores), abs=1e-3)
    assert result.party_metrics == trained.summary["party_metrics"], "Python and the command line train alike"
    assert result.mean_over_parties == pytest.approx(trained.summary["mean_over_parties"])


def test_the_run_and_show_print_a_line_per_party_and_the_mean(trained: Trained, capsys) -> None:
    assert main(["show", str(trained.folder)]) == 0
    shown = capsys.readouterr().out
    summary = trained.summary
    for out in (trained.out, shown):
        rows = {line.rsplit(None, 4)[0].strip(): line.split()[-4:] for line in out.splitlines()}
        for name, metrics in summary["party_metrics"].items():
            assert rows[name][0] == f"{metrics['auc']:.4g}"
        assert rows["mean over parties"][0] == f"{summary['mean_over_parties']['auc']:.4g}"
        assert rows["all records"][0] == f"{summary['metrics']['auc']:.4g}"
        mean = f"mean over parties {summary['mean_over_parties']['auc']:.4g}"
        assert f"auc       {summary['metrics']['auc']:.4g} on public test data; {mean}" in out
        assert "None" not in out


def test_rounds_and_metrics_jsonl_have_them_where_they_were_evaluated(trained: Trained) -> None:
    last = load_metrics(trained.folder)[-1]
    assert last["party_metrics"] == trained.summary["party_metrics"]
    assert last["mean_over_parties"] == trained.summary["mean_over_parties"]
    seen: list[RoundResult] = []
    from_python(rounds=3, run={"evaluate_every": 2}, on_round=seen.append)
    assert [bool(result.party_metrics) for result in seen] == [False, True, True]
    assert seen[-1].mean_over_parties == mean_over_parties(seen[-1].party_metrics)


def test_a_resumed_run_ends_with_the_same_results_by_party(tmp_path: Path) -> None:
    whole = from_python(rounds=4, out=tmp_path / "whole", run={"evaluate_every": 3})

    class Stop(Exception):
        pass

    def stop(result: RoundResult) -> None:
        if result.round == 3:
            raise Stop

    with pytest.raises(Stop):
        from_python(rounds=4, out=tmp_path / "cut", run={"evaluate_every": 3}, on_round=stop)
    data = from_arrays(**hospitals(), task=TaskSettings("binary", class_weights=WEIGHTS), public=True)
    resumed = fulcrum.resume(tmp_path / "cut", dataset=data)
    assert resumed.party_metrics == whole.party_metrics
    assert resumed.mean_over_parties == whole.mean_over_parties
    names = ("party_metrics", "mean_over_parties", "metrics", "score", "higher_is_better")
    cut, kept = (load_summary(tmp_path / name) for name in ("cut", "whole"))
    assert [cut[name] for name in names] == [kept[name] for name in names]


def test_an_unfinished_run_shows_its_last_evaluated_score(tmp_path: Path, capsys) -> None:
    def stop(result: RoundResult) -> None:
        if result.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        from_python(rounds=9, out=tmp_path / "run", run={"evaluate_every": 2}, on_round=stop)
    assert main(["show", str(tmp_path / "run")]) == 0
    line = load_metrics(tmp_path / "run")[1]
    assert f"{line['metrics']['auc']:.4g} after round 2; mean over parties" in capsys.readouterr().out


def round_of(parties: int) -> RoundResult:
    nothing = torch.zeros(1)
    own = {f"party-{k}": {"rmse": float(k), "loss": 1.0} for k in range(parties)}
    return RoundResult(1, 1, nothing, nothing, (1.0,), 1.0, (), (0,), 0.1, {"rmse": 3.0}, own)


def test_many_parties_are_left_out_of_the_lines_and_their_mean_is_not() -> None:
    few, many = make_metrics_line(round_of(MAX_PARTIES_PER_LINE)), make_metrics_line(round_of(MAX_PARTIES_PER_LINE + 1))
    assert len(few["party_metrics"]) == MAX_PARTIES_PER_LINE
    assert "party_metrics" not in many
    assert many["mean_over_parties"]["rmse"] == MAX_PARTIES_PER_LINE / 2
    assert "mean_over_parties" not in make_metrics_line(round_of(0))


def test_of_many_parties_the_best_and_the_worst_are_shown_by_the_direction_of_the_score(capsys) -> None:
    parties = round_of(50).party_metrics
    for higher, best, worst in ((False, "party-0", "party-49"), (True, "party-49", "party-0")):
        score = {"score": "rmse", "higher_is_better": higher}
        show.print_parties({**score, "metrics": {"rmse": 3.0}, "party_metrics": parties, "mean_over_parties": {}})
        out = capsys.readouterr().out
        assert f"{best} (best of 50)" in out
        assert f"{worst} (worst of 50)" in out
        assert "party-7" not in out


def test_a_party_without_both_answers_has_no_auc_and_does_not_count(tmp_path: Path, capsys) -> None:
    arrays = hospitals()
    arrays["y_test"] = np.where(arrays["party_test"] == "village", 0, arrays["y_test"])
    data = from_arrays(**arrays, task="binary")
    result = fulcrum.train(data=data, partition="given", out=tmp_path / "run", **{**OPTIONS, "rounds": 2})
    assert math.isnan(result.party_metrics["village"]["auc"])
    two = [result.party_metrics[name]["auc"] for name in ("university", "county")]
    assert result.mean_over_parties["auc"] == pytest.approx(sum(two) / 2)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["party_metrics"]["village"]["auc"] is None
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "nan" not in capsys.readouterr().out
