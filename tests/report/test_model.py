"""Runs are read for viewing whatever state their folder is in; what is wrong is said, and nothing secret is kept."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
from pathlib import Path

import pytest

from fulcrum.analysis.report.discovery import expand_folders, find_runs
from fulcrum.analysis.report.model import SECRET, read_run
from fulcrum.analysis.report.page import make_page
from fulcrum.analysis.report.reading import MAX_LINE_BYTES, Problems, read_rounds
from support.run_folders import make_run_folder


def test_a_whole_run(tmp_path: Path) -> None:
    run = read_run(make_run_folder(tmp_path / "run", parties=3))
    assert (run.state, run.problems, run.rounds_done, run.rounds_planned) == ("finished", (), 20, 20)
    assert run.score_value == pytest.approx(0.9)
    assert [party.name for party in run.parties] == ["party-0", "party-1", "party-2"]
    assert run.columns["round"][-1] == 20
    assert run.columns["spent:party-2"][-1] == pytest.approx(4 * (1 - 0.5 * 2 / 3))
    assert run.labels == ((10, 5, 1), (20, 5, 1), (30, 5, 1))
    assert run.settings["run.seed"] == 0


def test_a_run_in_progress_is_told_from_one_that_stopped(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "run", done=7, finished=False)
    (folder / "lock").write_text("")
    assert read_run(folder).state == "stopped"
    with (folder / "lock").open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        assert read_run(folder).state == "running"
    run = read_run(folder)
    assert (run.state, run.rounds_done, run.guarantee) == ("stopped", 7, "simulation")
    assert "fulcrum resume" in make_page([run])


@pytest.mark.parametrize(
    ("facts", "guarantee"),
    [
        ({"sound": False}, "nominal"),
        ({"private": False}, "none"),
        ({"simulation": False}, "yes"),
        ({"aggregation": "ideal-secagg"}, "assumed"),
        ({"sound": "yes"}, "unknown"),
    ],
)
def test_what_the_epsilon_of_an_unfinished_run_is_worth(tmp_path: Path, facts: dict, guarantee: str) -> None:
    folder = make_run_folder(tmp_path / "run", done=3, finished=False, changes={"run.json": facts})
    assert read_run(folder).guarantee == guarantee


def test_a_torn_last_line_is_a_round_in_progress_and_a_torn_middle_is_damage(tmp_path: Path) -> None:
    file = make_run_folder(tmp_path / "run") / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"round": 21, "loss"')
    assert read_run(file.parent).problems == ()
    lines = whole.splitlines()
    file.write_text("\n".join([*lines[:3], '{"round": 4, ', *lines[4:]]) + "\n")
    run = read_run(file.parent)
    assert run.rounds_done == 19
    assert run.problems == ("metrics.jsonl is damaged: 1 of its lines cannot be read and are left out.",)


BROKEN = {
    "empty": b"",
    "torn": b'{"id": "a',
    "list": b"[1, 2]",
    "binary": b"\xff\xfe\x00\x01" * 100,
    "deep": b"[" * 200_000,
    "wrong types": json.dumps(
        {"score": 3, "parties": "x", "metrics": [], "epsilon": {}, "labels": 1, "C": None}
    ).encode(),
}
FILES = ("run.json", "summary.json", "privacy.json", "split.json", "settings.toml", "metrics.jsonl", "parties.jsonl")


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_files_get_a_page_that_says_so(tmp_path: Path, content: bytes) -> None:
    whole = make_page([read_run(make_run_folder(tmp_path / "whole"))])
    assert "Not all of this folder" not in whole
    for name in FILES:
        folder = make_run_folder(tmp_path / name)
        (folder / name).write_bytes(content)
        page = make_page([read_run(folder)])
        assert "<main" in page
        assert "Not all of this folder" in page or content == BROKEN["wrong types"] or name == "parties.jsonl"


def test_missing_files_and_folders(tmp_path: Path) -> None:
    for name in FILES[:-1]:
        folder = make_run_folder(tmp_path / name)
        (folder / name).unlink()
        assert "<main" in make_page([read_run(folder)])
    (tmp_path / "empty").mkdir()
    assert "holds none of the files of a run" in make_page([read_run(tmp_path / "empty")])
    assert "there is no folder" in make_page([read_run(tmp_path / "nowhere"), read_run(tmp_path / "empty")])
    (tmp_path / "file").write_text("x")
    assert read_run(tmp_path / "file").state == "missing"


def test_long_runs_are_thinned_evenly_and_keep_their_scores_and_their_end(tmp_path: Path) -> None:
    file, lines = tmp_path / "metrics.jsonl", []
    for t in range(1, 25_001):
        lines.append(json.dumps({"round": t, "C": 1.0, "metrics": {"accuracy": t / 25_000} if t % 50 == 0 else {}}))
    file.write_text("\n".join(lines) + "\n")
    kept = read_rounds(file, Problems(), 1000)
    rounds = [line["round"] for line in kept.lines]
    assert kept.total == 25_000
    assert 500 <= len(rounds) <= 1001
    assert rounds == sorted(set(rounds))
    assert rounds[-1] == 25_000
    assert max(b - a for a, b in itertools.pairwise(rounds)) < 200
    assert sum(bool(line["metrics"]) for line in kept.lines) >= 450  # of 500 evaluations


def test_a_line_of_any_length_takes_bounded_memory(tmp_path: Path) -> None:
    file, problems = tmp_path / "metrics.jsonl", Problems()
    long = b'{"round": 2, "x": "' + b"a" * (3 * MAX_LINE_BYTES) + b'"}\n'
    file.write_bytes(b'{"round": 1}\n' + long + b'{"round": 3}\n')
    assert [line["round"] for line in read_rounds(file, problems).lines] == [1, 3]
    assert problems.sentences == ["metrics.jsonl is damaged: 1 of its lines cannot be read and are left out."]


# --- nothing that must stay secret -----------------------------------------------------------------------


def test_the_seed_of_private_data_is_not_on_the_page(tmp_path: Path) -> None:
    seed = 918273645
    private = make_run_folder(tmp_path / "private", seed=seed, public=False)
    public = make_run_folder(tmp_path / "public", seed=seed)
    assert read_run(private).settings["run.seed"] == SECRET
    assert str(seed) not in make_page([read_run(private)])
    assert str(seed) in make_page([read_run(public)])
    (private / "split.json").unlink()  # not known to be public: not shown
    assert str(seed) not in make_page([read_run(private)])


def test_secrets_of_run_json_and_true_labels_are_not_on_the_page(tmp_path: Path) -> None:
    folder = make_run_folder(
        tmp_path / "run",
        public=False,
        changes={
            "run.json": {"flower": {"secret": "hush-hush"}},
            "split.json": {"labels": [[77771, 5, 1]] * 5},
        },
    )
    run = read_run(folder)
    assert "hush-hush" not in make_page([run])
    assert "77771" not in make_page([run])
    assert run.labels == ()


def test_with_unit_client_durations_are_left_out(tmp_path: Path) -> None:
    # How long a round takes tells how many joined it, and that must stay secret.
    secret = read_run(make_run_folder(tmp_path / "client", unit="client", public=False))
    assert "seconds" not in secret.columns
    assert math.isnan(secret.seconds)
    assert "seconds" in read_run(make_run_folder(tmp_path / "example", public=False)).columns


# --- finding runs ----------------------------------------------------------------------------------------


def test_runs_are_found_below_a_folder_once(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/d/e"):
        make_run_folder(tmp_path / name, rounds=1)
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    (tmp_path / "notes").mkdir()
    names = [str(found.relative_to(tmp_path)) for found in find_runs(tmp_path)]
    assert names == ["a", "b/c", "b/d/e"]
    assert expand_folders([tmp_path, tmp_path / "a"]) == [tmp_path / name for name in names]
    assert expand_folders([tmp_path / "nowhere"]) == [tmp_path / "nowhere"]
    assert len(find_runs(tmp_path, most=2)) == 2


def test_a_run_whose_metrics_were_cut_says_so(tmp_path):
    folder = make_run_folder(tmp_path / "run", rounds=6, changes={"summary.json": {"rounds": 6}})
    assert not read_run(folder).problems
    file = folder / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    assert any("was cut" in problem for problem in read_run(folder).problems)
