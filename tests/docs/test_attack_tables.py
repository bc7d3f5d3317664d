"""The tables of docs/attacks.md, the stored reports and the kept scores say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fulcrum.analysis.attacks.calibrated import ATTACKS, RELEASE_ATTACKS
from fulcrum.analysis.attacks.cells import MODEL, read_scores
from fulcrum.analysis.attacks.membership import JOINT_STATISTIC
from fulcrum.analysis.attacks.roc import measure_roc
from support.scripts import load_script

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "attacks"
TABLES = ("cifar10-small", "digits", "mnist", "mnist-small")


@pytest.fixture(scope="module")
def tables():
    return load_script("docs/attack_tables.py")


def read_report(name):
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def test_the_page_says_what_the_reports_hold(tables):
    text = (ROOT / "docs" / "attacks.md").read_text("utf-8")
    sections = tables.make_sections()
    assert set(sections) >= set(TABLES)
    assert tables.fill_page(text, sections) == text
    assert "TO SAY" not in text


def test_a_page_with_another_number_is_told_apart(tables):
    text = (ROOT / "docs" / "attacks.md").read_text("utf-8")
    row = re.search(r"^\| 1\.64 \| final model \|.*$", text, re.MULTILINE)
    assert row is not None
    wrong = text.replace(row[0], row[0].replace("0.5", "0.6", 1))
    assert wrong != text
    assert tables.fill_page(wrong, tables.make_sections()) == text


def test_a_report_without_a_place_on_the_page_is_refused(tables):
    with pytest.raises(SystemExit, match="attacks-elsewhere"):
        tables.fill_page("# A page\n", {"elsewhere": "a table"})


@pytest.mark.parametrize("name", TABLES)
def test_reports_agree_with_the_kept_scores(name):
    """AUC and TPR of an attack on the final model and on releases, and the models' accuracy, computed anew."""
    report = read_report(name)
    assert [cell["epsilon"] for cell in report["cells"]] == [None, 1.64, 3.61, 6.38]
    for cell in report["cells"]:
        held = read_scores(RESULTS / "scores" / name / f"{cell['cell']}.npz")
        assert held.shadows == cell["shadows"] == 64
        assert float(held.metrics["accuracy"].mean()) == pytest.approx(cell["metrics"]["accuracy"], rel=1e-3)
        inside = ~held.control
        for view, scores, attack in ((MODEL, MODEL, ATTACKS["lira"]), ("releases-joint", JOINT_STATISTIC, None)):
            found = (attack or RELEASE_ATTACKS["lira"])(
                held.scores[scores].astype(np.float64), held.coins, held.control
            )
            roc = measure_roc(found[:, inside], held.coins[:, inside], draws=2)
            stored = next(each for each in cell["attacks"] if (each["view"], each["attack"]) == (view, "lira"))
            assert roc.auc.value == pytest.approx(stored["auc"]["value"], abs=2e-4)
            assert roc.tpr[0.001].value == pytest.approx(stored["tpr"]["0.001"]["value"], abs=2e-4)


@pytest.mark.parametrize("name", [*TABLES, "inversion"])
def test_reports_say_how_they_were_made(name):
    facts = read_report(name)
    for key in ("command", "commit", "date", "machine", "seeds"):
        assert facts[key], key
    assert facts["seeds"] == [0]


def test_no_attack_passes_its_bound_and_no_attack_tells_the_twins_apart():
    """Twins have coins that nothing depends on: over 16 cells and 10 attacks each, five standard errors."""
    for name in TABLES:
        for cell in read_report(name)["cells"]:
            for attack in cell["attacks"]:
                where = (name, cell["cell"], attack["view"], attack["attack"])
                assert attack["violations"] == [], where
                assert abs(attack["control_auc"]["value"] - 0.5) < 5 * attack["control_auc"]["error"], where


def test_the_numbers_of_the_audit_page_are_those_of_the_results():
    """docs/audit.md, "Measured on right code": rounded to two decimals."""
    found = json.loads((ROOT / "results" / "audit" / "summary.json").read_text("utf-8"))
    text = (ROOT / "docs" / "audit.md").read_text("utf-8")
    for epsilon, many in found["many_runs"].items():
        seeds = ", ".join(f"{value:.2f}" for value in found["one_run"][epsilon]["seeds"])
        line = next(line for line in text.splitlines() if line.startswith(f"| {epsilon} |"))
        told = [cell.strip().removesuffix(" of it") for cell in line.strip("|").split("|")]
        fit, plain = many["noise_fit_over_claimed"], many["clopper_pearson_over_claimed"]
        assert told == [epsilon, f"{fit:.2f}", f"{plain:.2f}", seeds]
    assert f"d = {found['parameters']:,}" in text
