"""A rehearsal costs nothing: it sees declared facts and no record; what adapts afterwards sees released values only.

Each check has a wrong case that it rejects: a reader of facts that looks at values, a rule that reads a unit's norm.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fulcrum.clipping.moo import MOO
from fulcrum.clipping.testing import check_rule
from fulcrum.data import Dataset, from_arrays
from fulcrum.data.made_up import read_data_facts
from fulcrum.engines.neighbours import FAST_MARGIN, STEP_SUMS, build_replay_problem, replay_neighbours
from fulcrum.runs import apply_rehearsal, prepare_unrehearsed, train
from fulcrum.runs.rehearsal import Candidate, choice, effort, facts, memory
from fulcrum.settings.schema import Clip, Settings, TaskSettings
from fulcrum.training.federation import Federation
from fulcrum.types import RuleState, Stats

pytestmark = pytest.mark.rehearsal
COUNT = 60


@pytest.fixture(autouse=True)
def small_efforts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "EFFORTS", (effort.Effort(1, 1, 1, finalists=2, batch=20, rounds=150),))
    monkeypatch.setattr(choice, "LADDER_SCALES", (0.05, 1.0))
    monkeypatch.setattr(choice, "MOST_EXTENSIONS", 0)
    monkeypatch.setattr(facts, "LEAST_EXAMPLES", 40)
    monkeypatch.setattr(facts, "TEST_EXAMPLES", 40)


def own_settings(**more: dict[str, Any]) -> Settings:
    base = Settings().replace(
        data={"partition": "iid", "parties": 2},
        train={"rounds": 3, "rate": 0.3},
        clip={"rehearse": True},
        privacy={"sigma": 1.5},
    )
    return base.replace(**more)


def _draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(COUNT, *shape, generator=generator) * (1.0 + 30 * seed)


def _label(high: int, seed: int) -> torch.Tensor:
    # Another balance for each seed: most records are of one class.
    generator = torch.Generator().manual_seed(100 + seed)
    labels = torch.randint(high, (COUNT,), generator=generator)
    return torch.where(torch.rand(COUNT, generator=generator) < 0.3 * seed, torch.zeros_like(labels), labels)


def _private(x: torch.Tensor, y: torch.Tensor, task: TaskSettings) -> Dataset:
    return from_arrays(x, y, name="private", task=task)


KINDS: dict[str, tuple[Callable[[int], Dataset], dict[str, Any]]] = {
    "table": (lambda s: _private(_draw((5,), s), _label(3, s), TaskSettings("classification", classes=3)), {}),
    "picture": (
        lambda s: _private(_draw((1, 8, 8), s), _label(3, s), TaskSettings("classification", classes=3)),
        {"name": "linear"},
    ),
    "series": (
        lambda s: _private(_draw((2, 12), s), _label(2, s), TaskSettings("binary")),
        {"name": "linear"},
    ),
    "regression": (
        lambda s: _private(
            _draw((4,), s), _draw((), s).clamp(-1, 1), TaskSettings("regression", low=-1.0, high=1.0, scale=1.0)
        ),
        {"name": "linear"},
    ),
}


def choose(data: Dataset, place: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]) -> dict[str, Any]:
    """What a rehearsal with an empty memory makes of a data set: its whole answer, and the run's settings."""
    monkeypatch.setattr(memory, "get_memory_folder", lambda: place)
    run = apply_rehearsal(prepare_unrehearsed(own_settings(model=model), data))
    answer = {name: value for name, value in run.rehearsed.items() if name != "seconds"}
    assert answer, run.problem.dataset.warnings
    return {"answer": answer, "clip": dataclasses.asdict(run.settings.clip), "lr": run.settings.train.lr}


@pytest.mark.parametrize("kind", KINDS)
def test_other_private_values_give_the_same_choice_bit_for_bit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, model = KINDS[kind]
    one, two = (choose(make(seed), tmp_path / str(seed), monkeypatch, model) for seed in (0, 2))
    assert one == two


def test_a_reader_of_facts_that_looks_at_values_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong case of the test above: the class balance of the private labels in place of a declared one."""

    def peek(data: Dataset, model: torch.nn.Module, balance: tuple[float, ...] = ()) -> Any:
        shares = torch.bincount(data.y, minlength=3) / len(data.y)
        return read_data_facts(data, model, tuple(shares.tolist()))

    monkeypatch.setattr(facts, "read_data_facts", peek)
    make, model = KINDS["table"]
    one, two = (choose(make(seed), tmp_path / str(seed), monkeypatch, model) for seed in (0, 2))
    assert one["answer"]["digest"] != two["answer"]["digest"]
    assert one != two


def test_records_that_cannot_be_read_are_rehearsed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the run is prepared its records become NaN, and its labels out of range: nothing of them is touched."""
    monkeypatch.setattr(memory, "get_memory_folder", lambda: tmp_path)
    make, model = KINDS["table"]
    run = prepare_unrehearsed(own_settings(model=model), make(0))
    spoiled = dataclasses.replace(
        run.problem.dataset.records,
        x=torch.full_like(run.problem.dataset.x, torch.nan),
        y=torch.full_like(run.problem.dataset.y, 10**6),
    )
    dataset = dataclasses.replace(run.problem.dataset, train=spoiled)
    blind = dataclasses.replace(run, problem=dataclasses.replace(run.problem, dataset=dataset))
    chosen = apply_rehearsal(blind)
    monkeypatch.setattr(memory, "get_memory_folder", lambda: tmp_path / "other")
    assert chosen.settings.clip == apply_rehearsal(run).settings.clip
    assert chosen.settings.clip.step > 0


def test_the_number_of_records_counts_as_declared_with_two_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are public (a missing unit leaves a record of zeros); close sizes share an answer, others need not."""
    monkeypatch.setattr(memory, "get_memory_folder", lambda: tmp_path)

    def digest(count: int) -> str:
        x, y = torch.zeros(count, 5), torch.arange(count) % 3
        data = from_arrays(x, y, name="private", task=TaskSettings("classification", classes=3))
        return facts.read_rehearsal_facts(prepare_unrehearsed(own_settings(), data)).digest()

    assert digest(4000) == digest(4001)
    assert digest(4000) != digest(100)


def _rehearsed_clip(candidate: Candidate, steps: int = 1) -> Clip:
    return candidate.apply(own_settings(), steps).clip


CANDIDATES = [Candidate(mode, 0.3, 2.0) for mode in ("plain", "linear", "follow", "moo")]


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.mode)
def test_the_contract_suite_holds_for_what_a_rehearsal_chooses(candidate: Candidate) -> None:
    clip = _rehearsed_clip(candidate)
    assert clip.step == 2.0
    check_rule(MOO, clip)


def test_the_contract_suite_refuses_a_rule_that_adapts_by_what_is_not_released() -> None:
    def peek(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
        factors, extra, state = MOO.clip(stats, state)
        return factors, extra, {**state, "C": state["C"] * stats.norms.mean()}

    with pytest.raises(AssertionError):
        check_rule(dataclasses.replace(MOO, clip=peek), _rehearsed_clip(CANDIDATES[-1]))


@pytest.mark.parametrize("engine", STEP_SUMS)
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.mode)
def test_no_unit_moves_the_sum_of_a_rehearsed_run_further_than_is_charged(engine: str, candidate: Candidate) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 6, generator=generator)
    x[0] *= 3e4
    for proven in (True, False):
        model = torch.nn.Linear(6, 3)
        problem = build_replay_problem(x, torch.arange(12) % 3, model, "moo", proven=proven)
        state = problem.rule.init(_rehearsed_clip(candidate), problem.shape)
        rows = torch.arange(12)
        worst = max(replay_neighbours(problem, engine, state, rows, target).ratio for target in range(3))
        assert worst <= 1 + (0 if proven else FAST_MARGIN["float32"])


def test_the_statement_says_that_it_happened_and_why_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "get_memory_folder", lambda: tmp_path / "memory")
    make, _ = KINDS["table"]
    train(make(0), settings=own_settings(), out=tmp_path / "run")
    train(make(0), settings=own_settings(clip={"rehearse": False}), out=tmp_path / "plain")
    text = (tmp_path / "run" / "PRIVACY.md").read_text()
    assert "no value of any record" in text
    assert "costs no privacy" in text
    assert "made-up" not in (tmp_path / "plain" / "PRIVACY.md").read_text()
    both = [json.loads((tmp_path / name / "privacy.json").read_text())["epsilon"] for name in ("run", "plain")]
    assert both[0] == both[1]  # the same releases at the same noise: the rehearsal added none
    assert json.loads((tmp_path / "run" / "rehearsal.json").read_text())["candidate"]


def test_a_rehearsal_that_is_cut_off_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "get_memory_folder", lambda: tmp_path)
    run = prepare_unrehearsed(own_settings(), KINDS["table"][0](0))
    known = facts.read_rehearsal_facts(run)
    played: list[str] = []
    real = choice.Stage._play_task

    def counted(self: Any, candidates: Any, rounds: int, how: Any, seed: int) -> list[float]:
        played.append(how.name)
        return real(self, candidates, rounds, how, seed)

    monkeypatch.setattr(choice.Stage, "_play_task", counted)

    least = 0

    def stop(part: float) -> None:
        if len(played) >= least:
            raise KeyboardInterrupt

    for least in (1, 2):  # two are cut off, each after one more task
        with pytest.raises(KeyboardInterrupt):
            memory.recall_or_rehearse(known, tell=stop)
        assert len(played) == least
    parts: list[float] = []
    answer = memory.recall_or_rehearse(known, tell=parts.append)
    whole = len(played)
    assert parts == sorted(parts)
    assert parts[-1] <= 1.0
    assert not list(tmp_path.glob("*.scores.json"))
    (kept,) = (tmp_path / memory.SCORES_FOLDER).glob("*.json")  # all of them, for those who look at the choice
    assert any(key.endswith(f"/{answer.candidate.step!r}") for key in json.loads(kept.read_text()))
    memory.forget(known.digest())
    assert not list(tmp_path.rglob("*.json"))
    assert memory.recall_or_rehearse(known).candidate == answer.candidate
    assert len(played) == 2 * whole  # nothing was played twice before, all of it again after `forget`


def test_damaged_scores_are_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "get_memory_folder", lambda: tmp_path)
    run: Federation = prepare_unrehearsed(own_settings(), KINDS["table"][0](0))
    known = facts.read_rehearsal_facts(run)
    for text in ("{", "[1]", '{"a": "b"}', "3"):
        (tmp_path / memory.name_scores_file(known.digest())).write_text(text)
        assert memory.open_log(known).scores == {}
