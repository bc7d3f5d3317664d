"""Advice for a budget, and rehearsals on public records of the user's own: declared facts only, a file that runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fulcrum.cli import app
from fulcrum.data import Dataset, from_arrays
from fulcrum.errors import ConfigError
from fulcrum.privacy.statement.text import describe_rehearsal
from fulcrum.runs import advice as module
from fulcrum.runs import advise, apply_rehearsal, prepare_unrehearsed
from fulcrum.runs.advice import PlayedRecipe, Recipe, choose
from fulcrum.runs.rehearsal import memory, read_rehearsal_facts
from fulcrum.runs.rehearsal.public_set import check_public_set, draw_part, fit_facts, load_public_set
from fulcrum.runs.rehearsal.stage import Stage
from fulcrum.settings.reading import read_settings
from fulcrum.settings.schema import Settings


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are kept in the test's own folder; few recipes, few rounds."""
    monkeypatch.setattr(memory, "get_memory_folder", lambda: tmp_path / "rehearsals")
    monkeypatch.setattr(module, "RECIPE_EFFORTS", (module.RecipeEffort(1, 16, 4, 2),))
    monkeypatch.setattr(module, "STEP_SCALES", (2.0,))
    monkeypatch.setattr(module, "PART", 0.0)  # no last rehearsal


def make_data(seed: int = 0, scale: float = 1.0, count: int = 300, width: int = 5, **more: Any) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, width, generator=generator)
    y = torch.randint(3, (count,), generator=generator)
    return from_arrays(x, y, x[:90], y[:90], classes=3, public=True, **more)


def make_settings(**sections: dict[str, Any]) -> Settings:
    base = Settings().replace(
        data={"parties": 3, "partition": "iid"},
        train={"rounds": 8, "rate": 0.1},
        privacy={"epsilon": 4.0, "randomness": "seeded"},
        model={"name": "linear"},
    )
    return base.replace(**sections)


def test_the_advice_is_the_same_for_all_records_of_the_same_shape_and_another_for_another_budget() -> None:
    one, two = (advise(make_settings(), make_data(seed, scale)) for seed, scale in ((0, 1.0), (1, 50.0)))
    assert one.settings == two.settings
    assert one.played == two.played
    richer = advise(make_settings(privacy={"epsilon": 40.0}), make_data())
    assert [each.noise for each in richer.played] != [each.noise for each in one.played]
    assert one.recipe.rounds <= 8
    assert one.settings.train.rounds == one.recipe.rounds
    assert one.settings.privacy.epsilon == 4.0
    assert one.settings.clip.rehearse
    assert any("costs no privacy" in reason for reason in one.reasons)


def test_the_rounds_of_the_user_stay_unless_another_way_is_clearly_better() -> None:
    own = Recipe(0.1, 100, 1, "sgd", "random")

    def played(rounds: int, score: float, merged: float = 1.0) -> PlayedRecipe:
        return PlayedRecipe(dataclasses.replace(own, rounds=rounds), score, 0.1, merged)

    # Fewer rounds that look as good, or a little better, on made-up records were six points worse on MNIST.
    assert choose([played(100, 96.0), played(25, 96.4)], own) == played(100, 96.0)
    assert choose([played(100, 80.0), played(25, 83.0)], own) == played(25, 83.0)
    # A run whose rounds are merged cannot show what they are worth.
    assert choose([played(100, 80.0, 2.0), played(25, 82.0)], own) == played(100, 80.0, 2.0)


def test_the_rate_is_the_smallest_one_with_about_the_least_noise_that_can_be_afforded() -> None:
    table = module.RecipeTable(prepare_unrehearsed(make_settings(), make_data()), None, None, print)
    chosen = table.choose_rate(table.own)
    noise = {
        rate: table.measure_noise(dataclasses.replace(table.own, rate=rate)) for rate in (0.1, 0.2, chosen.rate, 1.0)
    }
    assert chosen.passes <= module.MOST_PASSES * max(table.own.passes, 1.0)
    assert noise[chosen.rate] < noise[0.1]
    assert noise[1.0] < noise[0.2]
    assert {recipe.steps for recipe in table.list_rounds(dataclasses.replace(chosen, steps=4))} == {1}


@pytest.mark.parametrize(("gain", "moves"), [(5.0, True), (0.5, False)])
def test_what_wins_in_small_runs_must_win_again_with_a_larger_batch(
    monkeypatch: pytest.MonkeyPatch, gain: float, moves: bool
) -> None:
    def play(self: Stage, candidates: Any, rounds: int, tasks: Any) -> Any:
        larger = self.facts.batch > 16
        ahead = (gain if larger else 9.0) if self.facts.settings.train.server == "momentum" else 0.0
        return {each: {str(task): 50.0 + ahead for task in tasks} for each in candidates}

    monkeypatch.setattr(Stage, "play", play)
    found = advise(make_settings(), make_data(count=900))
    assert (found.recipe.server == "momentum") == moves
    assert any("larger batch" in reason for reason in found.reasons) != moves


def test_advice_needs_a_budget_and_something_to_rehearse() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.epsilon is missing"):
        advise(make_settings(privacy={"epsilon": None, "sigma": 1.0}), make_data())
    with pytest.raises(ConfigError, match="no advice can be given"):
        advise(make_settings(privacy={"unit": "client"}, train={"participation": 0.5}), make_data())


@pytest.mark.slow
def test_the_written_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = make_data()
    np.savez("own.npz", x=data.x, y=data.y, x_test=data.x_test, y_test=data.y_test)
    words = ["--data", "own.npz", "--public", "--model", "linear", "--epsilon", "4", "--rounds", "4", "--parties", "3"]
    found = CliRunner().invoke(app, ["plan", *words, "--advise", "--out", "advice.toml"])
    assert found.exit_code == 0, found.output
    assert "costs no privacy" in found.output
    text = Path("advice.toml").read_text()
    assert text.startswith("# Recommended by")
    assert read_settings(Path("advice.toml")).privacy.epsilon == 4.0
    run = CliRunner().invoke(app, ["run", "advice.toml", "--no-rehearsal", "--out", "run", "--quiet"])
    assert run.exit_code == 0, run.output
    again = CliRunner().invoke(app, ["plan", *words, "--advise", "--out", "advice.toml"])
    assert isinstance(again.exception, ConfigError)
    lost = CliRunner().invoke(app, ["plan", *words, "--out", "other.toml"])
    assert isinstance(lost.exception, ConfigError)


# --- public records of the user's own ---------------------------------------------------------------


@pytest.mark.rehearsal
def test_public_records_take_the_place_of_made_up_ones(tmp_path: Path) -> None:
    public = make_data(5, 3.0)
    np.savez(tmp_path / "public.npz", x=public.x, y=public.y, x_test=public.x_test, y_test=public.y_test)
    settings = make_settings(clip={"rehearse": True, "rehearse_on": str(tmp_path / "public.npz")})
    federation = prepare_unrehearsed(settings, make_data())
    found = load_public_set(federation)
    assert found is not None
    plain = read_rehearsal_facts(federation)
    facts = fit_facts(plain, found)
    assert facts.digest() != plain.digest() == fit_facts(plain, None).digest()
    assert facts.examples <= 300
    parts = [draw_part(found, facts.data.task, 100, 50, seed) for seed in (0, 0, 1)]
    assert torch.equal(parts[0].x, parts[1].x)
    assert not torch.equal(parts[0].x, parts[2].x)
    assert len(parts[0].x) == 100
    assert len(parts[0].x_test) == 50
    rehearsed = apply_rehearsal(federation)
    assert rehearsed.settings.clip.step > 0
    assert "declared public" in describe_rehearsal(rehearsed.settings)
    assert "declared public" not in describe_rehearsal(make_settings())


def test_a_public_set_without_test_records_keeps_some_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    public = from_arrays(torch.randn(200, 5, generator=generator), torch.arange(200) % 3, classes=3, public=True)
    federation = prepare_unrehearsed(make_settings(), make_data())
    facts = fit_facts(read_rehearsal_facts(federation), check_public_set(public, federation))
    part = draw_part(public, facts.data.task, facts.examples, 60, 0)
    assert facts.examples == 140
    both = torch.cat([part.x, part.x_test])
    assert len(torch.unique(both, dim=0)) == 200  # nobody is on both sides


def test_the_private_data_itself_and_other_shapes_are_refused(tmp_path: Path) -> None:
    own = make_data()
    federation = prepare_unrehearsed(make_settings(), own)
    for data, words in (
        (own, "same records as the run"),
        (make_data(), "same records as the run"),  # a copy
        (make_data(1, width=6), "must be alike"),
        (make_data(1, count=50), "at least 100"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_public_set(data, federation)
    assert check_public_set(make_data(1), federation) is not None
    file = tmp_path / "own.npz"
    np.savez(file, x=own.x, y=own.y)
    settings = dataclasses.replace(
        federation.settings,
        data=dataclasses.replace(federation.settings.data, source=str(file)),
        clip=dataclasses.replace(federation.settings.clip, rehearse_on=str(tmp_path / "." / "own.npz")),
    )
    with pytest.raises(ConfigError, match="is the data of the run itself"):
        load_public_set(dataclasses.replace(federation, settings=settings))
