"""Each party scores a finished model on units kept out of training, pays in its ledger, and hands over noised sums."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fulcrum.cli import main
from fulcrum.data import from_arrays
from fulcrum.data.fingerprints import add_record_digests, compute_unit_digests, select_held_out
from fulcrum.data.held_out import keep_training_units
from fulcrum.errors import ConfigError
from fulcrum.privacy.ledger import Ledger
from fulcrum.runs import execute, prepare
from fulcrum.runs.stored_model import load_trained
from fulcrum.settings.schema import Settings

FRACTION = 0.3


def make_party(seed: int, n: int = 700) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] + 0.3 * rng.normal(size=n) > 0.4).astype(np.int64), "classes": np.array(2)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parties' files, and a model that was trained without the units that they hold out."""
    folder = tmp_path_factory.mktemp("served")
    kept = []
    for number, name in enumerate("ab"):
        arrays = make_party(number)
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        whole = from_arrays(arrays["x"], arrays["y"], classes=2, name=name)
        kept.append(keep_training_units(whole, FRACTION))
    x, y = torch.cat([each.x for each in kept]), torch.cat([each.y for each in kept])  # type: ignore[misc]
    party = np.repeat(["a", "b"], [len(each.y) for each in kept])
    data = from_arrays(x, y, classes=2, party=party, name="both")
    settings = Settings().replace(
        data={"source": "both", "min_examples": 2},
        task={"classes": 2},
        model={"name": "linear"},
        train={"rounds": 10, "rate": 0.5},
        privacy={"epsilon": 8.0},
        run={"device": "cpu"},
    )
    execute(prepare(settings, data), folder / "run")
    return folder


def call(folder: Path, name: str, ledger: str, *more: str, epsilon: str = "200") -> int:
    words = ["score", str(folder / "run"), "--data", str(folder / f"{name}.npz"), "--party", name]
    words += ["--ledger", str(folder / ledger), "--hold-out", str(FRACTION), "--epsilon", epsilon, *more]
    return main(words)


def test_parties_score_and_the_files_add_up(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        assert call(served, name, f"{name}.sqlite", "--out", str(served / f"{name}.json")) == 0
    capsys.readouterr()
    files = [word for name in "ab" for word in ("--merge", str(served / f"{name}.json"))]
    assert main(["score", str(served / "run"), *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    trained = load_trained(served / "run")
    right = total = 0
    for number, name in enumerate("ab"):
        arrays = make_party(number)
        held = select_held_out(from_arrays(arrays["x"], arrays["y"], classes=2, name=name), FRACTION).numpy()
        guess = trained.outputs(torch.from_numpy(arrays["x"][held])).argmax(dim=-1).numpy()
        exact = float((guess == arrays["y"][held]).mean())
        assert found["party_metrics"][name]["accuracy"] == pytest.approx(exact, abs=0.02)
        right, total = right + int((guess == arrays["y"][held]).sum()), total + int(held.sum())
    assert found["metrics"]["accuracy"] == pytest.approx(right / total, abs=0.02)
    assert 0.5 < found["baseline"]["accuracy"] < 0.8
    assert np.array(found["confusion"]).sum() == pytest.approx(total)
    with Ledger.open(served / "a.sqlite") as ledger:
        assert 180 < ledger.epsilon("a/held-out") <= 200
    # The account's budget is spent: a second release is refused, and nothing is computed.
    assert call(served, "a", "a.sqlite") == 2
    assert "fulcrum ledger" in capsys.readouterr().err


def test_a_file_of_another_model_or_a_damaged_one_is_refused(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = served / "one.json"
    assert call(served, "a", "one.sqlite", "--out", str(made)) == 0
    content = json.loads(made.read_text())
    other, broken, twice = served / "other.json", served / "broken.json", served / "twice.json"
    other.write_text(json.dumps({**content, "model": "0" * 64}))
    broken.write_text(json.dumps({**content, "sums": ["many"]}))
    twice.write_text(made.read_text())
    for files, words in (([other], "another model"), ([broken], "not a file of scores"), ([made, twice], "same party")):
        assert main(["score", str(served / "run"), *(w for f in files for w in ("--merge", str(f)))]) == 2
        assert words in capsys.readouterr().err
    short = served / "short.json"
    short.write_text(json.dumps({**content, "sums": content["sums"][:-1]}))
    assert main(["score", str(served / "run"), "--merge", str(short)]) == 2
    assert "of another task" in capsys.readouterr().err


def test_units_that_trained_are_not_scored(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ledger knows them by their digests: their scores would flatter the model, and they would pay twice."""
    arrays = make_party(0)
    whole = add_record_digests(from_arrays(arrays["x"], arrays["y"], classes=2, name="a"))
    with Ledger.open(served / "trained.sqlite") as ledger:
        ledger.bring_to_current_format()
        ledger.enroll("a", budget=8.0, delta=1e-5, accountant="pld", unit="example", population="a")
        ledger.register_units("earlier", "a", compute_unit_digests(whole, torch.arange(len(whole.y)), "example"))
    assert call(served, "a", "trained.sqlite") == 2
    assert "they were trained on" in capsys.readouterr().err


def test_the_same_units_stay_out(served: Path) -> None:
    arrays = make_party(0)
    whole = from_arrays(arrays["x"], arrays["y"], classes=2, name="a")
    kept = keep_training_units(whole, FRACTION)
    held = select_held_out(whole, FRACTION)
    assert torch.equal(kept.x, whole.x[~held])  # type: ignore[index, arg-type]
    fewer = from_arrays(arrays["x"][10:], arrays["y"][10:], classes=2, name="a")
    rows = {row.numpy().tobytes() for row in keep_training_units(fewer, FRACTION).x}
    assert rows <= {row.numpy().tobytes() for row in kept.x}, "others that leave move nobody"
    assert keep_training_units(whole, 0.0) is whole
    with pytest.raises(ConfigError, match="must be at least 0 and below 1"):
        keep_training_units(whole, 1.0)


def test_a_missing_option_is_named(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(served / "run")]) == 2
    assert "--data is missing" in capsys.readouterr().err
