"""`fulcrum compare`: jobs, charges on private data, the ranking, and the page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fulcrum.analysis.report.reading import Problems
from fulcrum.analysis.report.study_page import (
    format_ranking_rows,
    is_study_folder,
    make_study_page,
    ranking_to_csv,
    ranking_to_json,
    read_study,
)
from fulcrum.cli import main
from fulcrum.cli.compare import make_live_table, parse_seeds
from fulcrum.errors import BudgetError, ConfigError
from fulcrum.privacy.ledger import Ledger
from fulcrum.runs.choices import check_choices
from fulcrum.settings.files import parse_settings
from fulcrum.settings.schema import Settings
from fulcrum.study.compare import (
    check_charges,
    compute_total_epsilon,
    describe_request,
    list_comparison_jobs,
    make_compared_cells,
)
from fulcrum.study.job import StudyJob

BASE = {"data.source": "digits", "data.parties": 3, "train.rounds": 2, "train.rate": 0.2}


def make(method: str, words: Mapping[str, Any] = {}) -> Settings:
    return check_choices(parse_settings({}, {**BASE, **words}, method))


def test_a_job_per_method_epsilon_and_seed() -> None:
    jobs = list_comparison_jobs(make, ["moo", "dp-sgd", "none"], [1.0, 4.0], [0, 1, 2])
    assert len(jobs) == 2 * 2 * 3 + 3, "without privacy there is no epsilon to vary"
    assert {(job.row, job.epsilon) for job in jobs} == {
        *(("moo", 1.0), ("moo", 4.0), ("dp-sgd", 1.0), ("dp-sgd", 4.0), ("none", None))
    }
    assert len({job.id for job in jobs}) == len(jobs)
    (own,) = list_comparison_jobs(lambda m, w: make(m, {"privacy.epsilon": 2.5, **w}), ["moo"], [], [7])
    assert (own.epsilon, own.seed) == (2.5, 7)


@pytest.mark.parametrize(
    ("methods", "epsilons", "seeds", "words"),
    [
        (["mooo"], [1.0], [0], "did you mean 'moo'"),
        ([], [1.0], [0], "names no method"),
        (["moo"], [1.0], [], "names no seed"),
        (["moo"], [], [0], "how private"),
    ],
)
def test_what_is_wrong_is_said(methods: list[str], epsilons: list[float], seeds: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list_comparison_jobs(make, methods, epsilons, seeds)


def test_seeds() -> None:
    assert parse_seeds("3") == [0, 1, 2]
    assert parse_seeds("0,7") == [0, 7]
    assert parse_seeds("5,") == [5]
    for wrong in ("x", "1.5", "-2"):
        with pytest.raises(ConfigError):
            parse_seeds(wrong)


# --- private data ------------------------------------------------------------------------------------------


def make_private(words: Mapping[str, Any], count: int = 2) -> list[StudyJob]:
    return list_comparison_jobs(lambda m, w: make(m, {**words, **w}), ["moo", "dp-sgd"][:count], [1.0], [0])


def test_private_data_is_charged_or_refused() -> None:
    with pytest.raises(ConfigError, match="--ledger FILE"):
        check_charges(make_private({}), "patients")
    charged = {"run.ledger": "x.sqlite"}
    total = compute_total_epsilon(make_private(charged))
    with pytest.raises(BudgetError, match="allow that much"):
        check_charges(make_private(charged), "patients")
    with pytest.raises(BudgetError, match=r"more than privacy\.budget"):
        check_charges(make_private({**charged, "privacy.budget": 0.99 * total}), "patients")
    assert check_charges(make_private({**charged, "privacy.budget": 1.01 * total}), "patients") == total
    for method in ("none", "moo-paper"):
        jobs = list_comparison_jobs(lambda m, w: make(m, {**charged, **w}), [method], [1.0], [0])
        with pytest.raises(ConfigError, match="is private"):
            check_charges(jobs, "patients")


def test_several_runs_cost_more_than_one_and_less_than_their_sum() -> None:
    one, two = (compute_total_epsilon(make_private({}, count)) for count in (1, 2))
    assert one == pytest.approx(1.0, rel=0.02)
    assert one < two < 2 * one


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    """A private table of two parties with a public test set."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 4)).astype(np.float32)
    arrays = {"x": x, "y": (x[:, 0] > 0).astype(np.int64), "x_test": x + 5, "y_test": (x[:, 0] > 0).astype(np.int64)}
    np.savez(tmp_path / "patients.npz", **arrays)  # type: ignore[arg-type]
    return tmp_path / "patients.npz"


def test_a_comparison_on_private_data(
    patients: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "key"))
    out, ledger = tmp_path / "out", tmp_path / "ledger.sqlite"
    words = ["compare", "--data", str(patients), "--rounds", "2", "--parties", "2", "--epsilons", "1", "--seeds", "1"]
    words += ["--set", "task.classes=2", "--out", str(out)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "is private" in said
    assert not out.exists(), "nothing is written"
    assert main([*words, "--ledger", str(ledger)]) == 2
    assert "allow that much" in capsys.readouterr().err
    assert not ledger.exists(), "nothing is spent"
    words += ["--ledger", str(ledger), "--set", "privacy.budget=3"]
    assert main(words) == 0, capsys.readouterr().err
    with Ledger.open(str(ledger)) as opened:
        spent = opened.epsilons()
        assert len(opened.runs()) == 2
        assert 1.0 < max(spent.values()) < 2.0, "both runs are on record"
    assert len(list((out / "runs").iterdir())) == 2
    assert main(words) == 0, "nothing is trained or charged again"
    with Ledger.open(str(ledger)) as opened:
        assert opened.epsilons() == spent


# --- on public data ------------------------------------------------------------------------------------------


def test_a_comparison_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = [
        "compare",
        "--data",
        "digits",
        "--rounds",
        "2",
        "--parties",
        "3",
        "--epsilons",
        "2",
        "--backend",
        "sequential",
    ]
    words += ["--out", str(out), "--methods", "dp-sgd,moo"]
    assert main([*words, "--seeds", "1", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["ranking"]
    assert sorted(each["method"] for each in first) == ["dp-sgd", "moo"]
    assert main([*words, "--seeds", "2"]) == 0
    said = capsys.readouterr()
    assert "2 of 2 jobs to run" in said.err, "two of four were there"
    assert "better than dp-sgd by" in said.out
    assert is_study_folder(out)
    for name in ("ranking.csv", "ranking.json", "report.html", "compare.json"):
        assert (out / name).stat().st_size
    cells, request = read_study(out, Problems())
    assert request["against"] == "dp-sgd"
    assert [len(cell.values) for cell in cells] == [2, 2]
    page = make_study_page(out)
    assert "Ranking" in page
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(out), "--out", "again.html"]) == 0
    assert "a study" in capsys.readouterr().out


# --- the ranking ------------------------------------------------------------------------------------------------


def make_record(row: str, seed: int, value: float, epsilon: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    job = StudyJob(make("moo", {"run.seed": seed, "privacy.epsilon": 1.0}), "compare", "c", "digits", row, epsilon)
    curve = [[1, value / 2], [2, value]]
    made = {
        **job.to_json(),
        "seed": seed,
        "metrics": {"accuracy": value},
        "score": "accuracy",
        "higher_is_better": True,
    }
    return {
        **made,
        "id": f"{row}-{seed}-{epsilon}",
        "sound": True,
        "curve": curve,
        "C": [[1, 1.0], [2, 0.5]],
        **changes,
    }


def test_the_ranking_pairs_seeds() -> None:
    # Seeds differ by far more than methods do; only pairs can tell them apart.
    base = {0: 0.5, 1: 0.7, 2: 0.9}
    records = [make_record("moo", s, v) for s, v in base.items()]
    records += [make_record("better", s, v + 0.010 + 0.001 * s) for s, v in base.items()]
    records += [make_record("same", s, v + (0.012 if s else -0.02)) for s, v in base.items()]
    better, same, moo = make_compared_cells(records, "moo")
    assert [cell.row for cell in (better, same, moo)] == ["better", "same", "moo"]
    assert better.lead is not None
    assert better.lead.mean == pytest.approx(0.011)
    assert better.is_clear
    assert not same.is_clear, "what is within the noise is not called clear"
    assert moo.lead is None
    apart = [make_record("other", 10 + s, v) for s, v in base.items()]
    (other, _) = make_compared_cells([*records[:3], *apart], "moo")
    assert other.lead is None, "no common seed, no difference"


def test_lower_scores_may_be_better() -> None:
    words: dict[str, Any] = {"score": "rmse", "higher_is_better": False}
    records = [
        make_record("moo", 0, 3.0, metrics={"rmse": 3.0}, **words),
        make_record("x", 0, 2.0, metrics={"rmse": 2.0}, **words),
    ]
    first, _ = make_compared_cells(records, "moo")
    assert first.row == "x"
    assert first.lead is not None
    assert first.lead.mean == pytest.approx(1.0)


def test_every_output_of_a_ranking(tmp_path: Path) -> None:
    records = [make_record(row, s, 0.5 + 0.1 * s, eps) for row in ("moo", "<b>") for s in (0, 1) for eps in (1.0, 4.0)]
    records += [make_record("none", 0, 0.9, None), make_record("=bad", 0, 0.4, sound=False)]
    (tmp_path / "runs-x.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records) + '{"torn')
    cells, _ = read_study(tmp_path, Problems())
    rows = list(csv.DictReader(io.StringIO(ranking_to_csv(cells))))
    assert len(rows) == len(cells)
    assert any(row["method"] == "'=bad" for row in rows)
    assert any(math.isnan(each["ci95"]) for each in ranking_to_json(cells))
    assert any("†" in row[2] for row in format_ranking_rows(cells))
    assert make_live_table(cells, "x").row_count == len(cells)
    page = make_study_page(tmp_path)
    assert "&lt;b&gt;" in page
    assert "<b>" not in page.split("<main")[1].split("application/json")[0]
    assert "not sound" in page


def test_a_damaged_study_gets_a_page_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "runs-a.jsonl").write_text('{"row": "moo", "settings": {}}\nnonsense\n')
    (tmp_path / "compare.json").write_text("{")
    page = make_study_page(tmp_path)
    assert "Not all of this folder can be shown" in page
    jobs = list_comparison_jobs(make, ["moo"], [1.0], [0, 1])
    (tmp_path / "runs-a.jsonl").unlink()
    (tmp_path / "compare.json").write_text(json.dumps(describe_request(jobs, "fulcrum compare", "moo")))
    assert "0 of 2 runs" in make_study_page(tmp_path)
    assert not is_study_folder(tmp_path / "nowhere")
