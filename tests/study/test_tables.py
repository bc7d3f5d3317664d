"""What studies say: statistics, choices, the cost of choosing, tables, figures, and the commands that write them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest

from fulcrum.cli import main
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import ORDERS, Spend
from fulcrum.privacy.events import Gaussian
from fulcrum.study import choosing, figures, provenance, report, selection, store, tables
from fulcrum.study.experiment import (
    list_paper_jobs,
    list_parties_jobs,
    list_protocol_jobs,
    list_tuning_jobs,
    read_experiment,
    reduce_to_one_cell,
    replace_choices,
)
from fulcrum.study.robustness import (
    ScoreMap,
    list_robustness_jobs,
    make_score_maps,
    read_robustness_grid,
    summarise_maps,
)
from fulcrum.study.search import ChosenSettings, find_choice, make_trials, read_search_file
from fulcrum.study.stats import MeanInterval, compute_mean_interval, compute_paired_interval, student_t_quantile
from fulcrum.study.table_cells import PAPER_RESULTS, TableCell, count_wins, find_paper_figure, make_table_cells
from support.studies import experiments, record, small

# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (10, 2.22814), (1000, 1.96234)]
)
def test_t_quantiles_are_those_of_the_tables(freedom, expected):
    assert student_t_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-5)


def test_t_quantile_refuses_what_has_none():
    with pytest.raises(ValueError, match="freedom"):
        student_t_quantile(0.975, 0)


def test_an_interval_by_hand():
    # mean 3, s^2 = (4 + 1 + 0 + 1 + 4) / 4 = 2.5, half = 2.77645 sqrt(2.5 / 5) = 1.96325
    found = compute_mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.mean, found.n) == (3.0, 5)
    assert found.half == pytest.approx(1.96325, rel=1e-5)
    assert (found.low, found.high) == pytest.approx((1.03675, 4.96325), rel=1e-5)
    assert found.half != pytest.approx(1.96 * math.sqrt(2.5 / 5), rel=0.1), "not the normal quantile"
    assert found.half != pytest.approx(2.77645 * math.sqrt(2.0 / 5), rel=0.05), "not the population's variance"


def test_one_value_has_no_interval_and_none_has_no_mean():
    assert math.isnan(compute_mean_interval([1.0]).half)
    assert math.isnan(compute_mean_interval([]).mean)


def test_a_paired_difference_by_hand():
    one, other = {0: 90.0, 1: 80.0, 2: 70.0, 9: 1.0}, {0: 89.0, 1: 78.0, 2: 69.0, 5: 1.0}
    # differences 1, 2, 1: mean 4/3, s^2 = 1/3, half = 4.30265 sqrt(1/9) = 1.43422
    found = compute_paired_interval(one, other)
    assert (found.mean, found.n) == (pytest.approx(4 / 3), 3)
    assert found.half == pytest.approx(1.43422, rel=1e-5)
    apart = compute_mean_interval([one[s] for s in range(3)]).half
    assert apart > 10 * found.half, "what the seeds share must cancel"


def test_intervals_cover_as_often_as_they_say():
    chance = random.Random(4)

    def covered(level: float) -> float:
        hits = 0
        for _ in range(2000):
            found = compute_mean_interval([chance.gauss(5.0, 2.0) for _ in range(5)], level)
            hits += found.low <= 5.0 <= found.high
        return hits / 2000

    assert covered(0.95) == pytest.approx(0.95, abs=0.02)
    assert covered(0.88) != pytest.approx(0.95, abs=0.02), "the wrong level is noticed"


# --- the cost of choosing ----------------------------------------------------------------------------


def test_private_selection_of_pure_dp_costs_the_known_factor():
    # Liu and Talwar: the best of a geometric number of eps-DP trials is 3 eps-DP; here 2 + eta in general.
    for eta in (0.0, 1.0):
        rdp = np.full(len(ORDERS), 0.7)  # pure DP: the same at all orders, and large orders matter
        large = ORDERS.max() == ORDERS
        found = selection.compute_selection_rdp(rdp, 10, eta)[large][0]
        assert found == pytest.approx((2 + eta) * 0.7, abs=0.02)
        assert found > (1.5 + eta) * 0.7


@pytest.mark.parametrize(("eta", "trials_"), [(1.0, 5.0), (1.0, 40.0), (0.0, 5.0), (0.0, 24.0)])
def test_gamma_gives_the_number_of_trials(eta, trials_):
    gamma = selection.solve_gamma(trials_, eta)
    assert selection.compute_mean_trials(eta, gamma) == pytest.approx(trials_, rel=1e-6)
    weights = (
        [gamma * (1 - gamma) ** (k - 1) for k in range(1, 20000)]
        if eta
        else [(1 - gamma) ** k / (k * math.log(1 / gamma)) for k in range(1, 20000)]
    )
    assert sum(weights) == pytest.approx(1, abs=1e-6)
    assert sum(k * w for k, w in enumerate(weights, 1)) == pytest.approx(trials_, rel=1e-3)


def best_of(p: np.ndarray, gamma: float, eta: float) -> np.ndarray:
    """Exact distribution of the best (the largest outcome) of a random number of draws from p [outcomes]."""
    below = np.concatenate([[0.0], np.cumsum(p)])
    k = np.arange(1, 4000)
    weights = gamma * (1 - gamma) ** (k - 1) if eta else (1 - gamma) ** k / (k * math.log(1 / gamma))
    at_most = (weights[None, :] * below[:, None] ** k[None, :]).sum(axis=1)
    return np.diff(at_most) / weights.sum()


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_the_bound_holds_for_an_exact_case(eta):
    # Eight outcomes, equally likely; in the neighbour the best one is e times as likely.
    p = np.full(8, 1 / 8)
    q = np.append(np.full(7, (1 - math.e / 8) / 7), math.e / 8)

    def renyi(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        terms = ORDERS[:, None] * np.log(one) + (1 - ORDERS)[:, None] * np.log(other)
        return np.maximum(np.logaddexp.reduce(terms, axis=1) / (ORDERS - 1), 0)

    trial = np.maximum(renyi(p, q), renyi(q, p))
    gamma = selection.solve_gamma(6.0, eta)
    chosen = [best_of(dist, gamma, eta) for dist in (p, q)]
    exact = np.maximum(renyi(chosen[0], chosen[1]), renyi(chosen[1], chosen[0]))
    bound = selection.compute_selection_rdp(trial, 6.0, eta)
    assert (bound >= exact).all()
    assert (exact > trial).any(), "choosing is not free: one trial's cost is exceeded, so leaving the rest out is wrong"


def test_choosing_costs_more_than_one_trial_and_less_than_all():
    rdp = Spend.empty().add_events([Gaussian(0.05, 2.0738, 200)]).rdp
    one = selection.compute_selection_epsilon(rdp, 1.0001, 1e-5)
    many = selection.compute_selection_epsilon(rdp, 24, 1e-5)
    more = selection.compute_selection_epsilon(rdp, 100, 1e-5)
    for family in selection.STOPPING_FAMILIES:
        assert 1.64 < one[family] < many[family] < more[family]
        assert many[family] < 9
    with pytest.raises(ConfigError, match="trials"):
        selection.compute_selection_epsilon(rdp, 0, 1e-5)


# --- search and choice ------------------------------------------------------------------------------


def test_every_method_gets_the_same_number_of_trials_and_the_same_shared_values(tmp_path):
    search = small(tmp_path).search
    by_row = {row: search.make_row_trials(row, "digits") for row in ("none", "dp-sgd", "moo")}
    assert {len(found) for found in by_row.values()} == {3}
    assert all(found[0] == {} for found in by_row.values())
    for plain, ours, free in zip(*(by_row[row][1:] for row in ("dp-sgd", "moo", "none")), strict=True):
        assert {path: ours[path] for path in plain} == plain
        assert set(ours) - set(plain) == {"clip.eta_C"}
        assert "clip.C0" not in free
        assert free["train.lr"] == plain["train.lr"]
    assert set(search.make_row_trials("moo", "digits", clipping=False)[1]) == {"train.lr", "train.steps"}


def test_a_row_may_have_ranges_of_its_own_on_one_data_set(tmp_path):
    search = small(tmp_path).search
    row = {**search.rows.get("moo", {}), "datasets": {"digits": {"train.lr": {"low": 1e-6, "high": 1e-5}}}}
    narrow = dataclasses.replace(search, rows={**search.rows, "moo": row})
    assert all(1e-6 <= trial["train.lr"] <= 1e-5 for trial in narrow.make_row_trials("moo", "digits")[1:])
    assert narrow.make_row_trials("moo", "mnist") == search.make_row_trials("moo", "mnist")
    assert narrow.make_row_trials("dp-sgd", "digits") == search.make_row_trials("dp-sgd", "digits")


def test_a_row_may_have_another_setting_in_place_of_a_shared_one(tmp_path):
    search = small(tmp_path).search
    row = {**search.rows.get("moo", {}), "instead": {"train.lr": {"path": "clip.balance", "low": 0.5, "high": 8.0}}}
    other = dataclasses.replace(search, rows={**search.rows, "moo": row})
    low, high = search.space["train.lr"]["low"], search.space["train.lr"]["high"]
    for ours, shared in zip(
        other.make_row_trials("moo", "digits")[1:], search.make_row_trials("moo", "digits")[1:], strict=True
    ):
        assert "train.lr" not in ours
        place = math.log(shared["train.lr"] / low) / math.log(high / low)  # the same point of the sequence
        assert math.log(ours["clip.balance"] / 0.5) / math.log(16) == pytest.approx(place, abs=1e-3)
        rest = {path: value for path, value in ours.items() if path != "clip.balance"}
        assert rest == {path: value for path, value in shared.items() if path != "train.lr"}
    assert set(other.make_row_trials("moo", "digits", clipping=False)[1]) == {"clip.balance", "train.steps"}
    assert other.make_row_trials("dp-sgd", "digits") == search.make_row_trials("dp-sgd", "digits")


@pytest.mark.parametrize("wrong", ['"train.lrr" = { path = "clip.balance" }', '"train.lr" = { low = 1.0, high = 2.0 }'])
def test_a_place_that_nobody_has_is_refused(tmp_path, wrong):
    folder = small(tmp_path).folder
    file = folder / "search.toml"
    file.write_text(file.read_text() + f"\n[rows.moo.instead]\n{wrong}\n")
    with pytest.raises(ConfigError, match=r"rows\.moo\.instead .* takes the place"):
        read_search_file(file)


def test_trials_are_fixed_by_the_seed_and_fill_the_space():
    space: dict[str, dict[str, Any]] = {"a": {"low": 0.01, "high": 100.0}, "b": {"choices": [1, 2, 3]}}
    found = make_trials(space, 60, 5)
    assert found == make_trials(space, 60, 5)
    assert found != make_trials(space, 60, 6)
    values = sorted(words["a"] for words in found[1:])
    assert 0.01 <= values[0] < 0.05
    assert 20 < values[-1] <= 100
    assert 0.3 < values[30] < 3, "log scale: half of them below the geometric middle"
    assert {words["b"] for words in found[1:]} == {1, 2, 3}
    with pytest.raises(ConfigError, match="low"):
        make_trials({"a": {"high": 1.0}}, 2, 0)


def test_tuning_without_held_out_data_is_refused(tmp_path):
    place = experiments(tmp_path)
    file = place / "search.toml"
    file.write_text(file.read_text().replace("validation = 0.1", "validation = 0.0"))
    with pytest.raises(ConfigError, match="held-out"):
        read_search_file(file)


def test_the_best_trial_is_chosen_and_kept(tmp_path):
    experiment = small(tmp_path)
    part = experiment.only(methods=["dp-sgd"])
    jobs = list_tuning_jobs(part)
    accuracies = [0.5, 0.9, 0.9, 0.1, 0.2, 0.3]  # trials 0..2 at 8.0, then at 4.0
    done = {j.id: record(j, a) for j, a in zip(jobs, accuracies, strict=True)}
    made, lacking = choosing.choose_settings(part, done)
    assert [(c.epsilon, c.trial, c.trials, c.validation_score) for c in made] == [(8.0, 1, 3, 0.9), (4.0, 2, 3, 0.3)]
    assert [c.worst for c in made] == [0.5, 0.1]
    assert lacking == {}
    choosing.save_choices(experiment, made)
    again = read_experiment(experiment.folder)
    assert find_choice(again.choices, "digits", 4.0, "dp-sgd") == made[1]
    final = [j for j in list_paper_jobs(again) if j.row == "dp-sgd" and j.epsilon == 4.0]
    assert {j.settings.train.lr for j in final} == {made[1].settings["train.lr"]}
    assert {j.settings.data.validation for j in final} == {0.0}


def test_a_cell_with_missing_trials_is_not_decided_unless_asked(tmp_path):
    part = small(tmp_path).only(methods=["dp-sgd"], epsilons=[4.0])
    jobs = list_tuning_jobs(part)
    done = {j.id: record(j, 0.5) for j in jobs[:2]}
    assert choosing.choose_settings(part, done) == ([], {"digits/4/dp-sgd": 1})
    made, _ = choosing.choose_settings(part, done, partial=True)
    assert made[0].trials == 2


def test_a_choice_of_another_epsilon_is_reused_and_said(tmp_path):
    experiment = small(tmp_path).only(methods=["moo"])
    choice = ChosenSettings("digits", "moo", 1, 3, 0.9, 8.0, settings={"train.lr": 3.0})
    experiment = replace_choices(experiment, [choice])
    assert {j.settings.train.lr for j in list_paper_jobs(experiment)} == {3.0}
    cells = make_table_cells(experiment, list_paper_jobs(experiment), {})
    said = [note for note in report.make_table_notes(cells, {}) if "reused" in note]
    assert said == ["digits: tuned at epsilon 8 and reused at the others: MOO."]
    own = replace_choices(experiment, [choice, dataclasses.replace(choice, epsilon=4.0)])
    assert not [
        n for n in report.make_table_notes(make_table_cells(own, list_paper_jobs(own), {}), {}) if "reused" in n
    ]
    assert find_choice([choice], "digits", 4.0, "moo", protocol=True) is None


def test_the_protocol_shares_one_C0_and_tunes_nothing_of_C(tmp_path):
    experiment = small(tmp_path)
    jobs = list_protocol_jobs(experiment)
    assert {j.settings.clip.C0 for j in jobs} == {0.5}
    assert {j.row for j in jobs} == {"dp-sgd", "dp-fedavg", "moo"}
    presets = {j.row: j.settings.clip for j in jobs}
    for trial in list_tuning_jobs(experiment, protocol=True):
        assert trial.settings.clip == presets[trial.row]


def test_parties_vary_and_the_rest_stays(tmp_path):
    jobs = list_parties_jobs(small(tmp_path))
    assert {(j.row, j.settings.data.parties) for j in jobs} == set(itertools.product(("moo", "dp-sgd"), (1, 3)))
    assert {j.seed for j in jobs} == {0}


# --- cells and tables ----------------------------------------------------------------------------------


def test_the_papers_figures_are_those_of_the_paper():
    assert find_paper_figure("MOO", "mnist", 1.64) == 88.16
    assert find_paper_figure("DP-SGD", "cifar10", 6.38) == 60.53
    assert find_paper_figure("non-private FL", "fashion-mnist", None) == 89.45
    assert find_paper_figure("MOO", "mnist", 2.0) is None
    assert find_paper_figure("MOO", "digits", 1.64) is None
    assert all(
        len(v) == (1 if row == "non-private FL" else 3) for row, by in PAPER_RESULTS.items() for v in by.values()
    )


KEYS = ["dataset", "epsilon", "method", "unit", "parties", "sound", "mean", "ci95", "seeds"]


def finished(experiment, accuracy):
    """Records of all final jobs; accuracy(job) is a fraction."""
    jobs = list_paper_jobs(experiment)
    return jobs, {j.id: record(j, accuracy(j)) for j in jobs}


def test_the_table_has_the_agreed_format(tmp_path):
    experiment = small(tmp_path)
    _, done = finished(experiment, lambda j: 0.9 + 0.01 * j.seed if j.row == "moo" else 0.8 + 0.02 * j.seed)
    report.write_table(tmp_path / "out", experiment, done)
    entries = json.loads((tmp_path / "out" / "table.json").read_text())
    assert all(list(entry) == KEYS for entry in entries)
    ours = next(e for e in entries if e["method"] == "moo" and e["epsilon"] == 4.0)
    assert ours["mean"] == pytest.approx(90.5)
    assert ours["ci95"] == pytest.approx(12.7062 * math.sqrt(0.5 / 2), rel=1e-4)
    assert (ours["dataset"], ours["unit"], ours["parties"], ours["sound"]) == ("digits", "example", 2, True)
    assert ours["seeds"] == [0, 1]
    free = [e for e in entries if e["method"] == "none"]
    assert [(e["epsilon"], e["unit"]) for e in free] == [(None, "none")]
    assert [e["unit"] for e in entries if e["method"] == "dp-fedavg"] == ["client", "client"]
    details = json.loads((tmp_path / "out" / "table-cells.json").read_text())
    assert {"command", "date", "hardware", "seeds", "settings", "version"} <= set(details["provenance"])
    other = next(c for c in details["cells"] if c["method"] == "dp-sgd" and c["epsilon"] == 4.0)
    assert other["moo_ahead"]["mean"] == pytest.approx(9.5)
    assert next(c for c in details["cells"] if c["method"] == "dp-fedavg")["moo_ahead"] is None, "another unit"


def test_an_entry_has_its_methods_name_where_that_and_the_parties_tell_rows_apart(tmp_path):
    experiment = small(tmp_path)
    ours = next(row for row in experiment.rows if row.name == "moo")
    more = dataclasses.replace(ours, name="moo-more", set={**ours.set, "data.parties": 7})
    same = dataclasses.replace(ours, name="moo-same", set={**ours.set, "train.rounds": 1})
    for extra, expected in ((more, [("moo", 2), ("moo", 7)]), (same, [("moo", 2), ("moo-same", 2)])):
        wider = dataclasses.replace(experiment, rows=(*experiment.rows, extra))
        cells = make_table_cells(wider, list_paper_jobs(wider), {})
        named = [c.method or c.row for c in cells if c.row.startswith("moo") and c.epsilon == 4.0]
        parties = [c.parties for c in cells if c.row.startswith("moo") and c.epsilon == 4.0]
        assert list(zip(named, parties, strict=True)) == expected


def test_the_page_says_what_a_reader_must_know(tmp_path):
    experiment = small(tmp_path)
    _, done = finished(experiment, lambda j: 0.5 + 0.01 * j.seed)
    report.write_table(tmp_path, experiment, done)
    page = (tmp_path / "table.md").read_text()
    assert "| MOO | example | 2 | 50.50 ± 6.35 |" in page
    assert "whole party (trusted server)" in page
    assert "Not tuned, the presets as they are: 7 of 7 cells." in page
    assert "private selection" in page
    assert "3 trials a cell" in page
    assert "parties = 2" in page
    assert "Made by `" in page
    tex = (tmp_path / "table.tex").read_text()
    assert tex.count(r"\begin{") == tex.count(r"\end{") == 2
    assert r"50.50 $\pm$ 6.35" in tex
    body = tex[tex.index(r"\toprule") : tex.index(r"\bottomrule")]
    assert {line.count("&") for line in body.splitlines() if "&" in line} == {4}
    for file in (tmp_path / "figures").iterdir():
        ElementTree.fromstring(file.read_text())
    assert len(list((tmp_path / "figures").iterdir())) == 4


def test_missing_runs_leave_holes_that_are_counted(tmp_path):
    experiment = small(tmp_path)
    jobs, done = finished(experiment, lambda j: 0.5)
    gone = [j for j in jobs if j.row == "moo" and j.epsilon == 4.0]
    del done[gone[0].id]
    cells = make_table_cells(experiment, jobs, done)
    assert "[1 of 2 seeds]" in tables.make_markdown_table(tables.make_score_rows(cells, experiment.epsilons))
    assert "1 of 14 runs have not been made yet." in report.make_table_notes(cells, {})
    report.write_table(tmp_path, experiment, {})
    assert json.loads((tmp_path / "table.json").read_text()) == []


def cell(**changes) -> TableCell:
    base = TableCell("mnist", 1.64, "x", "X", "example", 10, True, {0: 90.0, 1: 92.0}, 2, 88.16)
    return dataclasses.replace(base, **changes)


def test_unsound_rows_carry_a_dagger_and_copies_their_name():
    rows = tables.make_score_rows([cell(sound=False)], [1.64])
    assert rows[1] == ["X †", "example", "10", "91.00 ± 12.71 (paper 88.16)"]
    assert any(note.startswith("†") for note in report.make_table_notes([cell(sound=False)], {}))
    assert not any(note.startswith("†") for note in report.make_table_notes([cell()], {}))
    copy = cell(dataset="cifar10", notes=("cifar10 in x is not the public file: ...",))
    assert tables.make_dataset_label("cifar10", [copy]) == "CIFAR-10 (JPEG copy)"
    assert tables.make_dataset_label("cifar10", [cell(dataset="cifar10")]) == "CIFAR-10"
    assert r"$^\dagger$" in tables.make_latex_table([("t", rows)], "50% & more", "tab:x", "c")
    assert r"50\% \& more" in tables.make_latex_table([("t", rows)], "50% & more", "tab:x", "c")


def test_standing_counts_cells_in_which_moo_is_not_behind():
    ahead, level, behind = MeanInterval(1.0, 0.5, 5), MeanInterval(-0.2, 0.5, 5), MeanInterval(-1.0, 0.5, 5)
    assert count_wins([cell(ahead=ahead), cell(ahead=level)])[:2] == (1, 1)
    assert count_wins([cell(ahead=ahead), cell(ahead=behind)]) == (0, 1, ["mnist at 1.64: X"])
    assert count_wins([cell(ahead=behind, sound=False), cell(ahead=ahead)])[:2] == (1, 1), "unsound rows do not count"
    assert count_wins([cell(ahead=behind), cell(ahead=ahead, epsilon=3.61)])[:2] == (1, 2)


def test_the_page_counts_the_cells_that_have_the_papers_figure():
    one = TableCell("mnist", 1.64, "moo", "MOO", "example", 10, True, {0: 88.0, 1: 89.0}, 2, paper=88.16)
    low = dataclasses.replace(one, epsilon=3.61, values={0: 80.0, 1: 81.0}, paper=90.21)
    baseline = dataclasses.replace(low, row="dp-sgd")
    assert report.compare_with_paper([one, baseline]) == ["`moo` has at least the paper's figure in 1 of 1 cells.\n"]
    (said,) = report.compare_with_paper([one, low])
    assert "in 1 of 2 cells" in said
    assert "MNIST at 3.61, 80.50" in said
    assert "against 90.21" in said
    assert report.compare_with_paper([dataclasses.replace(one, paper=None)]) == []


def test_the_table_over_parties(tmp_path):
    experiment = small(tmp_path)
    done = {j.id: record(j, 0.01 * j.settings.data.parties) for j in list_parties_jobs(experiment)}
    report.write_parties_table(tmp_path, experiment, done)
    entries = json.loads((tmp_path / "parties.json").read_text())
    assert all(list(entry) == KEYS for entry in entries)
    assert {(e["method"], e["parties"]): e["mean"] for e in entries if e["epsilon"] == 4.0} == {
        ("moo", 1): 1.0,
        ("moo", 3): 3.0,
        ("dp-sgd", 1): 1.0,
        ("dp-sgd", 3): 3.0,
    }
    assert "| MOO | 1.00 | 3.00 |" in (tmp_path / "parties.md").read_text()
    assert "paper's figure or above" not in (tmp_path / "parties.md").read_text(), "digits are not in the paper"


@pytest.mark.parametrize(
    ("means", "said"), [((90, 80), "K = 1"), ((90, 86), "every K measured"), ((80, 70), "no K")], ids=str
)
def test_a_sentence_says_for_which_K_the_papers_figures_are_within_reach(means, said):
    row = TableCell("mnist", 1.64, "moo", "MOO", "example", 1, True, {0: means[0]}, 1, paper=85.0)
    other = dataclasses.replace(row, parties=9, values={0: means[1]})
    unmeasured = dataclasses.replace(row, parties=50, values={})
    sentence = tables.describe_paper_reach([row, other, unmeasured], [1, 9, 50])
    assert sentence == f"At the paper's figure or above: MOO at {said}.\n"
    assert tables.describe_paper_reach([dataclasses.replace(row, paper=None)], [1]) == ""


# --- robustness -----------------------------------------------------------------------------------------


def test_gaps_of_the_grid_by_hand(tmp_path):
    grid = read_robustness_grid(experiments(tmp_path))
    fixed = ScoreMap("digits", 4.0, "dp-sgd", ((10.0, 20.0), (90.0, 70.0)))
    ours = ScoreMap("digits", 4.0, "moo", ((80.0, 88.5), (86.0, 89.5)))
    holes = ScoreMap("digits", 4.0, "quantile", ((80.0, math.nan), (86.0, 89.5)))
    shown = {f.rule: f for f in summarise_maps(grid, [fixed, ours, holes])}
    assert set(shown) == {"dp-sgd", "moo"}, "a map with holes shows nothing"
    own = shown["moo"]
    assert (own.best_fixed, own.worst, own.best, own.mean) == (90.0, 80.0, 89.5, 86.0)
    assert own.worst_gap_default_lr == 1.5  # at lr = 1: 88.5 and 89.5
    assert own.worst_gap_grid == 10.0
    assert shown["dp-sgd"].worst_gap_grid == 80.0
    assert list(own.to_json()) == [
        "dataset",
        "epsilon",
        "rule",
        "worst_gap_default_lr",
        "worst_gap_grid",
        "best_fixed",
    ]
    assert summarise_maps(grid, [ours]) == [], "without the fixed rule there is nothing to compare with"


def test_the_grid_of_the_repository():
    from fulcrum.study.experiment import BUILT_IN_FOLDER as place

    grid = read_robustness_grid(place)
    assert grid.C0 == (0.01, 0.1, 1.0, 10.0, 100.0)
    assert grid.lr == (0.0625, 0.25, 1.0, 4.0, 16.0)
    assert grid.datasets == ("mnist", "fashion-mnist", "digits")
    jobs = list_robustness_jobs(read_robustness_grid(place, ["digits"], ["moo"], [1.64]))
    assert {(j.row, j.settings.train.rounds, j.settings.data.parties) for j in jobs} == {
        ("moo", 50, 5),
        ("dp-sgd", 50, 5),
    }
    assert len(jobs) == len({j.id for j in jobs}) == 50 * 5
    with pytest.raises(ConfigError, match="cifar10"):
        read_robustness_grid(place, ["cifar10"])


def test_a_page_says_what_it_was_made_from_or_that_nothing_has_run(tmp_path):
    job = list_robustness_jobs(read_robustness_grid(experiments(tmp_path)))[0]
    some, none = (
        provenance.provenance_to_markdown(provenance.collect_provenance({}, [0], runs))
        for runs in ([record(job, 0.5)], [])
    )
    assert "from 1 runs between 2026-01-01T00:00:00+00:00 and" in some
    assert none.endswith("Nothing has run yet.\n")
    assert "None" not in some + none


def test_a_data_set_of_the_grid_may_have_seeds_of_its_own(tmp_path):
    place = experiments(tmp_path)
    before = list_robustness_jobs(read_robustness_grid(place))
    file = place / "robustness.toml"
    own = "[datasets.digits]\nseeds = [3, 4, 5]\n[datasets.digits.data]\nparties = 2\n[datasets.mnist.data]"
    file.write_text(file.read_text().replace("[datasets.digits.data]", own))
    grid = read_robustness_grid(place)
    jobs = list_robustness_jobs(grid)
    assert {j.seed for j in jobs if j.dataset == "digits"} == {3, 4, 5}
    assert {j.seed for j in jobs if j.dataset == "mnist"} == {j.seed for j in before} == {0}
    done = {j.id: record(j, 0.1 * (j.seed - 2)) for j in jobs}
    shown = [one for one in make_score_maps(grid, done) if one.dataset == "digits"]
    assert shown
    assert all(value == pytest.approx(20.0) for one in shown for value in one.flat)
    del done[next(j.id for j in jobs if j.dataset == "digits")]
    assert not all(one.is_complete for one in make_score_maps(grid, done)), "two of three seeds are no mean"
    assert {j.seed for j in list_robustness_jobs(read_robustness_grid(place, ["digits"], seeds=2))} == {3, 4}


# --- figures ---------------------------------------------------------------------------------------------


def test_figures_are_well_formed_and_hold_their_numbers():
    series = {"a & b": [(1.0, 1.0), (2.0, 10.0)], "inf": [(1.0, math.inf)], "flat": [(1.0, 5.0)]}
    drawn = figures.draw_line_plot(series, "<title>", "round", "C", log=True, note="made -- here")
    root = ElementTree.fromstring(drawn)
    kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert kinds.count("polyline") == 2, "what is not finite cannot be drawn"
    assert "a & b" in [element.text for element in root.iter()]
    band: dict[str, list[tuple[float, float, float]]] = {
        "a": [(1, 0.1, 0.3), (2, 0.2, 40.0)],
        "gone": [(1, 0, 1)],
        "b": [(1, -1.0, 2.0)],
    }
    shaded = figures.draw_line_plot({"a": [(1, 0.2), (2, 0.3)], "b": [(1, 1.0)]}, "t", "x", "C", log=True, bands=band)
    polygons = [each for each in ElementTree.fromstring(shaded).iter() if each.tag.endswith("polygon")]
    assert [len(each.get("points", "").split()) for each in polygons] == [4], "what a log axis cannot show is left out"
    many = figures.draw_line_plot({str(k): [(0, k), (1, k)] for k in range(9)}, "t", "x", "y")
    assert many.count("stroke-dasharray") == 1, "the ninth line has the first colour, and a dash"
    ElementTree.fromstring(figures.draw_line_plot({}, "empty", "x", "y"))
    heat = figures.draw_heat_map([[1.0, math.nan], [50.0, 99.9]], ["r", "s"], ["c", "d"], "t")
    texts = [element.text for element in ElementTree.fromstring(heat).iter()]
    assert {"1.0", "50.0", "99.9"} <= set(texts)
    assert "nan" not in heat


def _shown(drawn: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(drawn).iter()]


def test_legends_have_room_and_log_axes_have_round_numbers():
    name = "a rather long name of a method, with its noise"
    narrow, wide = (
        float(ElementTree.fromstring(figures.draw_line_plot({n: [(1, 1), (2, 2)]}, "", "x", "y")).get("width") or 0)
        for n in ("a", name)
    )
    assert wide > narrow + 5 * (len(name) - 24)
    drawn = _shown(figures.draw_line_plot({"a": [(1, 0.2), (2, 0.3), (100, 1.0)]}, "", "K", "C", log=True, log_x=True))
    assert {"0.2", "0.5", "1", "2", "5", "10", "20", "50", "100"} <= set(drawn)
    assert not [text for text in drawn if text.startswith("0.63")], "between the round ones"
    assert {"0.001", "1", "1000"} <= set(
        _shown(figures.draw_line_plot({"a": [(1, 1e-3), (2, 1e3)]}, "", "x", "C", log=True))
    )


# --- commands ---------------------------------------------------------------------------------------------


def test_notes_of_the_whole_study_are_not_those_of_the_reduced_cell(tmp_path):
    experiment = dataclasses.replace(small(tmp_path), notes=("tuned at length",), title="whole")
    assert (reduce_to_one_cell(experiment).notes, reduce_to_one_cell(experiment).title) == ((), "whole")
    own = dataclasses.replace(experiment, subset={**experiment.subset, "notes": ["a quick look"], "title": "reduced"})
    assert (reduce_to_one_cell(own).notes, reduce_to_one_cell(own).title) == (("a quick look",), "reduced")


def test_reproduce_a_subset_then_resume_and_report(tmp_path, capsys, monkeypatch):
    place = experiments(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "paper", "--subset", "--experiments", str(place), "--backend", "sequential"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "3 of 3 jobs" in err
    assert "| MOO | example | 2 |" in out
    assert [job.settings.train.rounds for job in list_paper_jobs(reduce_to_one_cell(read_experiment(place)))] == [
        2,
        2,
        2,
    ]
    entries = json.loads((tmp_path / "results" / "subset" / "table.json").read_text())
    assert {e["method"] for e in entries} == {"none", "dp-sgd", "moo"}
    assert all(e["ci95"] is None and e["seeds"] == [0] for e in entries)
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert "jobs to run" not in err
    assert json.loads(out) == entries


def test_tune_then_final_runs_in_one_command(tmp_path, capsys, monkeypatch):
    place = experiments(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "paper", "--tune", "--tune-at", "4.0", "--methods", "dp-sgd,moo", "--seeds", "1"]
    words += ["--experiments", str(place), "--backend", "sequential", "-q"]
    assert main(words) == 0
    chosen = read_experiment(place).choices
    assert [(c.row, c.epsilon, c.trials) for c in chosen] == [("dp-sgd", 4.0, 3), ("moo", 4.0, 3)]
    page = (tmp_path / "results" / "paper" / "table.md").read_text()
    assert "digits: tuned at epsilon 4 and reused at the others" in page
    done = store.load_results(tmp_path / "results" / "paper")
    by_study = {study: [r for r in done.values() if r["study"] == study] for study in ("tune", "paper")}
    assert len(by_study["tune"]) == 6
    assert len(by_study["paper"]) == 4
    assert {r["evaluated_on"] for r in by_study["tune"]} == {"held-out training data"}
    assert {r["evaluated_on"] for r in by_study["paper"]} == {"test data"}
    capsys.readouterr()


def test_prepare_work_merge_choose_and_report(tmp_path, capsys, monkeypatch):
    from fulcrum.study import worker

    place = experiments(tmp_path)
    monkeypatch.chdir(tmp_path)
    part = ["--methods", "dp-sgd", "--epsilons", "4.0", "--experiments", str(place)]
    assert main(["study", "prepare", "paper-tune", *part]) == 0
    (tmp_path / "jobs.json").write_text(capsys.readouterr().out)
    for shard in ("0/2", "1/2"):
        words = ["jobs.json", "--out", f"there{shard[0]}", "--shard", shard, "--backend", "sequential"]
        assert worker.main(words) == 0
    capsys.readouterr()
    folders = [name for name in ("there0", "there1") if (tmp_path / name).is_dir()]
    assert main(["study", "merge", *folders, "--into", "results/paper", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tune": 3}
    assert main(["study", "prepare", "paper-tune", *part]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == []
    assert main(["study", "choose", *part]) == 0
    assert [c.row for c in read_experiment(place).choices] == ["dp-sgd"]
    assert main(["study", "prepare", "nonsense"]) == 2
    assert main(["study", "prepare", "paper", "--epsilons", "a"]) == 2
    assert main(["study", "prepare", "paper", "--experiments", str(place), "--methods", "mooo"]) == 2
    assert "'mooo'" in capsys.readouterr().err


def test_robustness_protocol_and_parties_write_their_pages(tmp_path, capsys, monkeypatch):
    place = experiments(tmp_path)
    monkeypatch.chdir(tmp_path)
    end = ["--experiments", str(place), "--backend", "sequential", "-q"]
    assert main(["study", "robustness", *end]) == 0
    entries = json.loads((tmp_path / "results" / "robustness" / "summary.json").read_text())
    assert [(e["dataset"], e["epsilon"], e["rule"]) for e in entries] == [
        ("digits", 4.0, "dp-sgd"),
        ("digits", 4.0, "moo"),
    ]
    assert entries[0]["best_fixed"] == entries[1]["best_fixed"]
    assert len(list((tmp_path / "results" / "robustness" / "figures").glob("*.svg"))) == 2
    assert main(["study", "protocol", "--methods", "moo", "--epsilons", "4.0", *end]) == 0
    assert main(["study", "parties", "--methods", "moo", "--epsilons", "4.0", *end]) == 0
    out = capsys.readouterr().out
    assert "All methods start from C0 = 0.5" in out
    assert "K = 3" in out


# --- scores ------------------------------------------------------------------------------------------------


def judged(job, value, score="rmse", higher_is_better=False, **changes):
    """A record of a run that is judged by another score than accuracy."""
    old = record(job, 0.0, curve=[[2, value]], **changes)
    del old["accuracy"]
    return {**old, "metrics": {score: value, "loss": 1.0}, "score": score, "higher_is_better": higher_is_better}


def test_old_records_and_new_ones_tell_their_score():
    from fulcrum.study import records

    old = {"accuracy": 0.5, "loss": 1.25}
    new = records.make_score_entries({"accuracy": 0.5, "loss": 1.25}, records.StudyScore())
    for entry in (old, new):
        assert records.get_record_score(entry) == records.StudyScore("accuracy", True)
        assert records.get_score_value(entry) == 0.5
        assert records.get_record_metrics(entry) == {"accuracy": 0.5, "loss": 1.25}
    assert {**old}.items() <= new.items(), "the keys of old records stay"
    other = records.make_score_entries({"rmse": 2.0, "loss": 4.0}, records.StudyScore("rmse", False))
    assert "accuracy" not in other
    assert records.get_score_value(other) == 2.0
    assert (records.StudyScore("rmse", False).text(2.0), records.StudyScore().text(0.5)) == ("2", "50.00%")


def test_the_lower_score_wins_where_lower_is_better(tmp_path):
    experiment = small(tmp_path).only(methods=["dp-sgd"], epsilons=[4.0])
    trials = list_tuning_jobs(experiment)
    values: dict[int | None, float] = {0: 0.5, 1: 0.2, 2: 0.9}
    low, _ = choosing.choose_settings(experiment, {j.id: judged(j, values[j.trial]) for j in trials})
    high, _ = choosing.choose_settings(experiment, {j.id: judged(j, values[j.trial], "auc", True) for j in trials})
    assert [(c.trial, c.validation_score, c.worst, c.score) for c in low] == [(1, 0.2, 0.9, "rmse")]
    assert [(c.trial, c.validation_score, c.worst, c.score) for c in high] == [(2, 0.9, 0.2, "auc")]


def test_a_table_is_headed_by_its_score_and_moo_is_ahead_where_its_error_is_lower(tmp_path):
    experiment = small(tmp_path).only(methods=["moo", "dp-sgd"])
    jobs = list_paper_jobs(experiment)
    done = {j.id: judged(j, (1.0 if j.row == "moo" else 3.0) + 0.1 * j.seed) for j in jobs}
    cells = {cell.row: cell for cell in make_table_cells(experiment, jobs, done)}
    assert cells["moo"].values == {0: 1.0, 1: 1.1}, "no fraction, so not in %"
    ahead = cells["dp-sgd"].ahead
    assert ahead is not None
    assert ahead.mean == pytest.approx(2.0)
    report.write_table(tmp_path / "out", experiment, done)
    page = (tmp_path / "out" / "table.md").read_text()
    assert "Test rmse (lower is better), mean over seeds" in page
    assert "accuracy" not in page
    assert list((tmp_path / "out" / "figures").glob("*-rmse.svg"))


def test_gaps_of_a_grid_are_how_much_worse_a_rule_is(tmp_path):
    grid = read_robustness_grid(experiments(tmp_path))
    done = {
        j.id: judged(j, {"dp-sgd": 1.0, "moo": 1.5}[j.row] + (j.settings.clip.C0 == 0.1))
        for j in list_robustness_jobs(grid)
    }
    shown = {f.rule: f for f in summarise_maps(grid, make_score_maps(grid, done))}
    assert shown["moo"].best_fixed == 1.0
    assert (shown["moo"].worst_gap_grid, shown["moo"].worst, shown["moo"].best) == (1.5, 2.5, 1.5)
