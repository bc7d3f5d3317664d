"""Runs as people start, interrupt, continue and read them: real processes, real kills."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import fulcrum
from fulcrum.errors import RunError
from fulcrum.privacy.ledger import Ledger
from fulcrum.runs import folder as record
from fulcrum.runs import resume
from fulcrum.settings import files as settings_file

WORDS = ["--data", "digits", "--epsilon", "4", "--rounds", "24", "--set", "run.checkpoint_every=5"]
WORDS += ["--set", "train.participation=0.7", "--set", "train.server=momentum", "--set", "train.ema=0.5"]
WORDS += ["--no-rehearsal"]  # seconds per process; its own tests resume rehearsed runs


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fulcrum", *words]


def run(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=300)
    assert not check or done.returncode == 0, done.stderr
    return done


def outcome(folder: Path) -> dict[str, Any]:
    """What must be equal bit for bit: the weights, and the metrics but for the time they took."""
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in record.load_metrics(folder)]
    return {"lines": lines, "model": (folder / "model.safetensors").read_bytes()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run("run", *WORDS, "--out", str(folder))
    return folder


def lines_so_far(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def start_and_stop(words: list[str], folder: Path, after: int, how: signal.Signals, delay: float) -> int:
    # Where the tests run in the background their shell ignores SIGINT, and a child would inherit that.
    process = subprocess.Popen(
        command(*words),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.poll() is None and lines_so_far(folder) < after:
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(how)
    return process.wait(timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_killed_at_random_points_ends_as_if_it_had_not_been(seed: int, whole: Path, tmp_path: Path) -> None:
    chance = random.Random(seed)
    folder = tmp_path / "run"
    at = sorted(chance.sample(range(1, 20), 2))
    start_and_stop(["run", *WORDS, "--out", str(folder)], folder, at[0], signal.SIGKILL, chance.uniform(0, 0.02))
    start_and_stop(["resume", str(folder)], folder, at[1], signal.SIGKILL, chance.uniform(0, 0.02))
    released = record.load_metrics(folder)
    with Ledger.open(folder / "ledger.sqlite") as ledger:  # never below what was released
        for party, epsilon in enumerate(released[-1]["epsilons"]):
            held = ledger.epsilon(f"party-{party}") if f"party-{party}" in ledger.accounts() else 0.0
            assert held >= epsilon * (1 - 1e-12)
    run("resume", str(folder))
    assert outcome(folder) == outcome(whole)
    with Ledger.open(folder / "ledger.sqlite") as mine, Ledger.open(whole / "ledger.sqlite") as other:
        assert mine.epsilons() == other.epsilons(), "no round is paid twice when the same bits are released again"


@pytest.mark.slow
def test_the_comparison_can_fail(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run("run", *WORDS, "--seed", "1", "--out", str(other))
    assert outcome(other) != outcome(whole)


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_loses_nothing(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = start_and_stop(["run", *WORDS, "--out", str(folder)], folder, 7, signal.SIGINT, 0.0)
    assert code == 130
    kept = sorted((folder / "checkpoints").glob("round-*.safetensors"))[-1]
    assert int(kept.stem.split("-")[1]) >= 7, "the rounds after the last regular checkpoint are kept too"
    assert json.loads((folder / "privacy.json").read_text())["epsilon"] > 0
    assert (folder / "PRIVACY.md").exists()
    done = run("resume", str(folder), "--json")
    assert json.loads(done.stdout)["status"] == "finished"
    assert outcome(folder) == outcome(whole)


def test_the_folder_holds_what_the_format_promises(whole: Path) -> None:
    names = {"settings.toml", "environment.json", "run.json", "metrics.jsonl", "privacy.json", "PRIVACY.md"}
    names |= {"summary.json", "model.safetensors", "ledger.sqlite", "checkpoints"}
    assert names <= {path.name for path in whole.iterdir()}
    summary = record.load_summary(whole)
    assert {"accuracy", "epsilon", "delta", "sound", "method", "C", "settings"} <= summary.keys()
    assert 0 <= summary["accuracy"] <= 1
    assert len(summary["C"]) == 24
    assert summary["epsilon"] <= 4
    weights = load_file(whole / "model.safetensors")
    assert sum(value.numel() for value in weights.values()) == summary["parameters"]
    lines = record.load_metrics(whole)
    assert [line["round"] for line in lines] == list(range(1, 25))
    assert {"loss", "accuracy", "C", "epsilon", "seconds"} <= lines[0].keys()
    assert json.loads((whole / "privacy.json").read_text())["randomness"]


@pytest.mark.slow
def test_the_settings_file_of_a_run_reruns_it(whole: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    run("run", str(whole / "settings.toml"), "--out", str(again))
    assert outcome(again) == outcome(whole)


@pytest.mark.slow
def test_resuming_a_finished_run_changes_nothing(whole: Path) -> None:
    before = outcome(whole)
    run("resume", str(whole))
    assert outcome(whole) == before


@pytest.mark.slow
def test_show_reads_a_run_and_json_is_json(whole: Path) -> None:
    assert "accuracy" in run("show", str(whole)).stdout
    assert json.loads(run("show", str(whole), "--json").stdout)["rounds"] == 24


@pytest.mark.slow
def test_a_taken_folder_a_missing_run_and_a_damaged_one_get_one_sentence(whole: Path, tmp_path: Path) -> None:
    before = outcome(whole)
    for words, says in (
        (("run", *WORDS, "--out", str(whole)), "holds a run; choose another --out"),
        (("resume", str(tmp_path / "nothing")), "no folder"),
        (("show", str(tmp_path / "nothing")), "no folder"),
        (("resume", str(tmp_path)), "run.json"),
    ):
        done = run(*words, check=False)
        assert done.returncode == 2, done.stderr
        assert says in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert outcome(whole) == before


@pytest.mark.slow
def test_when_files_can_grow_no_further_it_is_one_sentence_and_the_run_goes_on_later(
    whole: Path, tmp_path: Path
) -> None:
    """A limit on file sizes stands in for a full disk: writes fail midway, in the ledger or the metrics."""
    folder = tmp_path / "run"
    most = (whole / "ledger.sqlite").stat().st_size - 8192  # the ledger is the largest file
    limit = f"import resource, signal, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}));"
    limit += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from fulcrum.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", limit, "run", *WORDS, "--out", str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert 0 < lines_so_far(folder) < 24
    run("resume", str(folder))
    assert outcome(folder) == outcome(whole)


def test_other_data_than_the_run_had_is_refused(tmp_path: Path) -> None:
    from support.federations import toy_data

    names: dict[str, Any] = {"parties": 2, "partition": "iid", "rounds": 3, "rate": 0.5, "sigma": 1.0}
    fulcrum.train(toy_data(), out=tmp_path / "run", **names)
    assert resume(tmp_path / "run", dataset=toy_data()).summary["status"] == "finished"
    with pytest.raises(RunError, match="other data"):
        resume(tmp_path / "run", dataset=toy_data(seed=9))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    from support.federations import toy_data

    names: dict[str, Any] = {"parties": 2, "partition": "iid", "rounds": 8, "rate": 0.5, "sigma": 1.0}
    names["run"] = {"checkpoint_every": 2}
    fulcrum.train(toy_data(), out=tmp_path / "run", **names)
    before = outcome(tmp_path / "run")
    last = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:40])
    resume(tmp_path / "run", dataset=toy_data())
    assert outcome(tmp_path / "run") == before


def test_a_run_in_use_is_not_resumed_twice(tmp_path: Path) -> None:
    folder = record.RunFolder.create(tmp_path / "run")
    folder.write_json("run.json", {})
    with pytest.raises(RunError, match="in use"):
        record.RunFolder.open(tmp_path / "run")
    folder.close()
    record.RunFolder.open(tmp_path / "run").close()


def test_a_secure_run_pays_again_for_a_round_it_must_draw_anew(tmp_path: Path) -> None:
    """Kill between release and checkpoint: the new draw is a new release, and the ledger shows both."""
    from support.federations import toy_data

    names: dict[str, Any] = {"parties": 2, "partition": "iid", "rounds": 4, "rate": 0.5, "sigma": 1.0}
    fulcrum.train(toy_data(), out=tmp_path / "run", randomness="secure", **names)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        once = ledger.epsilons()
    for file in sorted((tmp_path / "run" / "checkpoints").iterdir())[-1:]:
        file.unlink()  # as if the machine had died after round 4 was released and before it was kept
    resume(tmp_path / "run", dataset=toy_data())
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        twice = ledger.epsilons()
        assert all(len(ledger.entries(party)) == 5 for party in twice)
    assert all(twice[party] > once[party] for party in once)
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["epsilon"] == pytest.approx(max(twice.values()))
    assert settings_file.read_settings(tmp_path / "run" / "settings.toml").privacy.randomness == "secure"
