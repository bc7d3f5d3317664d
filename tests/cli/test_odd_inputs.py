"""Odd inputs end in one sentence that names what is wrong: no traceback, no internal error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fulcrum import cli

MODELS = """
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.table(x).mean(1))


def words(*given, **more):
    return Words()


def empty(*given, **more):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 0), nn.Linear(0, 2))
"""
RUN = ["--public", "--rounds", "2", "--parties", "2", "--no-rehearsal", "--out", "run"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    generator, y = np.random.default_rng(0), np.arange(40) % 2
    x = generator.random((40, 4), dtype=np.float32)
    np.savez("own.npz", x=x, y=y, x_test=x[:9], y_test=y[:9], classes=2)
    np.savez("words.npz", x=np.full((40, 6), 999), y=y, x_test=np.full((9, 6), 5), y_test=y[:9], classes=2)
    Path("oddmodels.py").write_text(MODELS)
    return tmp_path


MANY = "9" * 40
ODD = {
    f"run --data own.npz --sigma 1 --set train.rounds={MANY}": "train.rounds = 999",
    "run --data own.npz --sigma 1 --model oddmodels:empty": "has shape [0, 4] and so no number in it",
    "run --data words.npz --sigma 1 --model oddmodels:words": "below the size of the model's embedding",
    f"run --data own.npz --sigma 1 --set clip.C0={'9' * 5000}": "[...]",
    f"run --data {'x' * 300}.npz --sigma 1": "File name too long",
    f"run --data own.npz --sigma 1 --set train.steps={MANY}": "train.steps = 999",
    f"run --data own.npz --sigma 1 --set run.evaluate_every={MANY}": "run.evaluate_every = 999",
    f"run --data own.npz --sigma 1 --set privacy.max_participations={MANY}": "privacy.max_participations = 999",
    "account --q 0.1 --sigma 1e-300 --steps 1": "--sigma 1e-300 is out of range",
    "account --q 0.1 --sigma 1e308 --steps 1": "--sigma 1e+308 is out of range",
    f"account --q 0.1 --sigma 1 --steps {'9' * 400}": "--steps that large is out of range",
    "account --q 0.1 --epsilon 1e308 --steps 5": "--epsilon 1e+308 is out of range",
    "account --q 0.1 --sigma 1 --steps 5 --parties 3 --colluders nan": "--colluders nan is out of range",
    "account --q 0.1 --sigma 1 --steps 5 --parties 3 --colluders -1": "--colluders -1 is out of range",
}


@pytest.mark.parametrize("words", ODD, ids=lambda words: words[:60])
def test_an_odd_input_is_one_sentence(words: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    name, *given = words.split()
    more = [*RUN[:1], *RUN[3:]] if "train.rounds" in words else RUN
    assert cli.main([name, *given, *(more if name == "run" else [])]) == 2
    said = capsys.readouterr().err
    assert ODD[words] in said
    assert said.startswith("error: ")
    assert len(said) < 700
    assert len(said.splitlines()) == 1
    assert not Path("run").exists()


@pytest.mark.slow
def test_next_to_no_noise_has_a_huge_epsilon_and_no_error(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["account", "--q", "1", "--sigma", "1e-5", "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert "at most 100%, 100%, 100% sure after" in " ".join(said.split())
    assert cli.main(["run", "--data", "own.npz", "--sigma", "1e-5", *RUN]) == 0
    assert "internal" not in capsys.readouterr().err


def test_nothing_to_report_an_archive_of_objects_and_a_file_as_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "objects.npz").write_bytes(b"\x80\x04no archive")
    (tmp_path / "file").write_text("x")
    for words, sentence in {
        "report empty": "empty holds none of the files of a run",
        "run --data objects.npz --epsilon 1": "it is no archive of plain arrays",
        "run --data digits --epsilon 1 --out file/run": "is no folder that can be written to; choose another --out.",
    }.items():
        assert cli.main(words.split()) == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert "rehears" not in said, "refused before the rehearsal"
        assert "allow_pickle" not in said
    assert not (tmp_path / "report.html").exists()
