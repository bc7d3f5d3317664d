"""`fulcrum reproduce paper --subset`: it says at once what is missing, and the digits stand in without a download."""

from __future__ import annotations

from pathlib import Path

import pytest

from fulcrum.cli import main
from fulcrum.errors import ConfigError
from fulcrum.study import calibrate
from fulcrum.study.experiment import list_paper_jobs, read_experiment, reduce_to_one_cell


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in an empty home, with no data set on the machine."""
    for name in ("FULCRUM_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_subset_is_one_cell_of_the_paper_or_of_the_digits() -> None:
    whole = read_experiment()
    assert reduce_to_one_cell(whole).datasets == ("mnist",)
    digits = reduce_to_one_cell(whole, ["digits"])
    assert digits.datasets == ("digits",)
    settings = [job.settings for job in list_paper_jobs(digits)]
    assert {each.data.source for each in settings} == {"digits"}
    assert {each.model.init for each in settings} == {"random"}, "no painted weights fit 8 x 8 images"
    assert {each.train.rounds for each in settings} == {50}
    with pytest.raises(ConfigError, match="choose from mnist, digits"):
        reduce_to_one_cell(whole, ["cifar10"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["reproduce", "paper", "--subset"], "or run `fulcrum reproduce paper --subset --datasets digits`"),
        (["reproduce", "paper"], "--data-dir or FULCRUM_DATA."),
        (["study", "protocol", "--datasets", "mnist"], "--data-dir or FULCRUM_DATA."),
    ],
)
def test_missing_data_is_said_before_the_noise_of_any_job_is_computed(
    words: list[str], hint: str, empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(jobs: object) -> None:
        raise AssertionError("calibrating takes a minute; the data is looked for first")

    monkeypatch.setattr(calibrate, "calibrate_jobs", never)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "mnist was not found" in said
    assert hint in said
