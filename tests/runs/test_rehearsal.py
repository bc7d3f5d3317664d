"""The rehearsal: it sees public facts only, its small run has the real noise, its answer is kept and applied."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from fulcrum.data import from_arrays
from fulcrum.rng import SeededRandomness
from fulcrum.runs import apply_rehearsal, derive_federation, prepare, prepare_unrehearsed, train
from fulcrum.runs.rehearsal import (
    Candidate,
    choice,
    effort,
    facts,
    find_refusal,
    list_weaknesses,
    memory,
    read_rehearsal_facts,
    rehearse,
    stage,
)
from fulcrum.runs.rehearsal.stage import Stage
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import make_model_facts
from fulcrum.training.loop import federate
from support.federations import with_randomness

EFFORTS = effort.EFFORTS
pytestmark = pytest.mark.rehearsal


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are kept in the test's own folder, and a rehearsal has few tasks and steps to try."""
    monkeypatch.setattr(memory, "get_memory_folder", lambda: tmp_path / "rehearsals")
    monkeypatch.setattr(effort, "EFFORTS", (effort.Effort(1, 1, 1, finalists=2, batch=40, rounds=150),))
    monkeypatch.setattr(choice, "LADDER_SCALES", (0.05, 1.0))
    monkeypatch.setattr(choice, "MOST_EXTENSIONS", 1)


def settings_for(rounds: int = 4, **more: dict) -> Settings:
    base = Settings().replace(
        data={"partition": "iid", "parties": 3},
        train={"rounds": rounds, "rate": 0.2},
        clip={"rehearse": True},
        privacy={"sigma": 2.0, "randomness": "seeded"},
    )
    return base.replace(**more)


def make_data(seed: int = 0, scale: float = 1.0, count: int = 90):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, 5, generator=generator)
    y = torch.randint(3, (count,), generator=generator)
    return from_arrays(x, y, x[:30], y[:30], classes=3, public=True)


def test_facts_are_those_of_every_data_set_of_the_same_shape() -> None:
    one, two = (
        read_rehearsal_facts(prepare_unrehearsed(settings_for(), make_data(seed, scale)))
        for seed, scale in ((0, 1.0), (1, 50.0))
    )
    assert one.digest() == two.digest()
    others = [
        settings_for(rounds=5),
        settings_for(privacy={"sigma": 8.0}),
        settings_for(train={"server": "momentum"}),
        settings_for(model={"name": "mlp"}),
    ]
    digests = {read_rehearsal_facts(prepare_unrehearsed(other, make_data())).digest() for other in others}
    assert len(digests | {one.digest()}) == 5


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("merged", [1, 4])
def test_the_small_run_has_the_noise_of_the_real_one(steps: int, merged: int) -> None:
    real = prepare_unrehearsed(settings_for(rounds=8, train={"steps": steps}), make_data())
    known = read_rehearsal_facts(real)
    stage = Stage(known)
    small = stage._prepare(choice.VARIATIONS[0], 0, 8 // merged)
    wanted = make_model_facts(real).noise / math.sqrt(merged)
    found = make_model_facts(small).noise
    assert 2**-0.3 < found / wanted < 2**0.3  # noise is rounded to half a factor of 2
    wrong = known.noise / math.sqrt(merged) * small.plan.parties / math.sqrt(steps)
    assert steps == 1 or not 2**-0.3 < wrong / wanted < 2**0.3


def test_a_step_of_merged_rounds_is_longer() -> None:
    known = read_rehearsal_facts(prepare_unrehearsed(settings_for(rounds=8), make_data()))
    assert facts.scale_step(known, 8) == 1
    assert facts.scale_step(known, 2) == 4
    momentum = dataclasses.replace(known, settings=settings_for(train={"server": "momentum", "server_momentum": 0.9}))
    assert facts.scale_step(momentum, 2) == pytest.approx(4 * (1 - 0.9**4) / 0.1)


def test_a_plain_candidate_is_dp_sgd() -> None:
    start = settings_for(train={"steps": 2})
    base = prepare_unrehearsed(start, make_data())
    plain = derive_federation(base, Candidate("plain", 0.5, 3.0).apply(base.settings, 2))
    fixed = prepare_unrehearsed(start.replace(clip={"rule": "fixed", "C0": 0.5}, train={"lr": 3.0}), make_data())
    ends = [list(federate(with_randomness(run, SeededRandomness(1))))[-1][1].params for run in (plain, fixed)]
    assert torch.allclose(ends[0], ends[1], atol=1e-6)
    others = [Candidate(mode, 0.5, 3.0) for mode in ("moo", "linear", "fade")]
    for other in others:
        moving = derive_federation(base, other.apply(base.settings, 2))
        ends.append(list(federate(with_randomness(moving, SeededRandomness(1))))[-1][1].params)
    assert not any(torch.allclose(end, ends[1], atol=1e-3) for end in ends[2:])


def test_the_answer_is_the_same_again_and_is_kept(tmp_path: Path) -> None:
    known = read_rehearsal_facts(prepare_unrehearsed(settings_for(), make_data()))
    first, second = rehearse(known), rehearse(known)
    assert (first.candidate, first.regrets) == (second.candidate, second.regrets)
    assert memory.recall(known.digest()) is None
    assert memory.recall_or_rehearse(known).candidate == first.candidate
    kept = memory.recall(known.digest())
    assert kept is not None
    assert kept.candidate == first.candidate
    file = tmp_path / "rehearsals" / f"{known.digest()}.json"
    file.write_text(json.dumps({**first.to_json(), "candidate": {"mode": "plain", "C": 7.0, "step": 1.0}}))
    assert memory.recall_or_rehearse(known).candidate.C == 7.0
    file.write_text("{")
    assert memory.recall_or_rehearse(known).candidate == first.candidate


def test_a_run_is_rehearsed_once_and_goes_on_with_what_was_chosen(tmp_path: Path, monkeypatch) -> None:
    result = train(make_data(), settings=settings_for(), out=tmp_path / "run")
    stored = prepare(result.settings, make_data()).settings
    assert stored.clip.step > 0
    assert stored.clip.rehearse
    assert "Rehearsal" in (tmp_path / "run" / "PRIVACY.md").read_text()
    monkeypatch.setattr(memory, "recall_or_rehearse", None)  # would fail if it were asked again
    assert prepare(stored, make_data()).settings == stored
    assert apply_rehearsal(
        prepare_unrehearsed(stored.replace(clip={"rehearse": False}), make_data())
    ).settings.clip.step


def test_starts_do_not_matter_to_a_rehearsed_run() -> None:
    near, far = (
        prepare(settings_for(clip={"rehearse": True, "C0": C}, train={"rounds": 4, "rate": 0.2, "lr": lr}), make_data())
        for C, lr in ((1.0, 1.0), (100.0, 1 / 16))
    )
    assert (near.settings.clip, near.settings.train) == (far.settings.clip, far.settings.train)


def test_moo_that_stays_is_moo_as_it_is() -> None:
    base = prepare_unrehearsed(settings_for(privacy={"sigma": 2.3}), make_data())
    known = read_rehearsal_facts(base)
    memory.remember(choice.Rehearsed(Candidate("moo", 1.0, known.default_step), known.digest()))
    kept = apply_rehearsal(base)
    before, after = (list(federate(with_randomness(run, SeededRandomness(1))))[-1][1].params for run in (base, kept))
    assert torch.allclose(before, after, atol=1e-6)
    assert kept.settings.clip.step != pytest.approx(known.default_step, rel=1e-3)  # whose noise is rounded


def test_a_larger_C_must_gain_more() -> None:
    prices = [choice.price(Candidate("linear", C, 1.0)) for C in choice.FINE_C]
    assert prices[0] == 0 < prices[1] < prices[2]
    assert choice.price(Candidate("fade", 1.0, 1.0)) == 0  # which searches for its own


def test_a_step_that_stays_must_gain_more_than_one_that_falls() -> None:
    for stays, falls in (("plain", "linear"), ("moo", "fade")):
        gap = choice.price(Candidate(stays, 0.3, 1.0)) - choice.price(Candidate(falls, 0.3, 1.0))
        assert gap == pytest.approx(choice.PRICE)


def test_dp_sgd_is_rehearsed_with_a_fixed_step() -> None:
    run = prepare(settings_for(clip={"rule": "fixed", "rehearse": True}), make_data())
    known = read_rehearsal_facts(run)
    answer = memory.recall(known.digest())
    assert answer is not None
    assert answer.candidate.mode == "plain"
    assert (run.settings.clip.C0, run.settings.train.lr) == (
        answer.candidate.C,
        answer.candidate.step / answer.candidate.C,
    )
    assert all(text.startswith("plain:") for text in answer.regrets)


def test_what_cannot_be_rehearsed_says_why() -> None:
    client = settings_for(privacy={"unit": "client", "sigma": 1.0}, train={"rounds": 2})
    assert any("nothing was rehearsed" in note for note in prepare(client, make_data()).problem.dataset.warnings)
    heavy = settings_for(train={"rounds": 200, "steps": 10**6})
    assert any("minutes" in note for note in prepare(heavy, make_data()).problem.dataset.warnings)
    other = prepare(settings_for(clip={"rule": "auto-s", "rehearse": True}), make_data())
    assert any("the rule is auto-s" in note for note in other.problem.dataset.warnings)
    assert prepare(settings_for(clip={"rehearse": False}), make_data()).settings.clip.step == 0


def test_smoothing_prefers_a_plateau_but_a_cliff_counts_as_a_few_points_only() -> None:
    def best(scores: dict[float, float], weight: float) -> float:
        regrets = {Candidate("plain", 1.0, step): {"task": value} for step, value in scores.items()}
        return choice.rank(regrets, weight)[0][0].step

    peak = {1.0: 9.0, 2.0: 0.0, 4.0: 9.0, 8.0: 1.0, 16.0: 1.0, 32.0: 1.0}
    assert best(peak, 0.25) == 16.0  # beyond 32 a cliff is assumed
    assert best(peak, 0.0) == 2.0
    assert best({1.0: 8.0, 2.0: 0.0, 4.0: 80.0}, 0.2) == 2.0
    assert best({1.0: 0.5, 2.0: 0.0}, 0.2) == 1.0


def play_by_mode(small: dict[str, float], larger: dict[str, float]):
    """Every candidate's score follows from its mode: in the small run, and with a larger batch."""

    def play(self: Stage, candidates, rounds, tasks):
        scores = larger if self.facts.batch > 40 else small
        self.history.append((rounds, {}))
        return {each: {str(task): scores.get(each.mode, 60.0) for task in tasks} for each in candidates}

    return play


@pytest.mark.parametrize(("larger", "chosen"), [(90.0, "fade"), (80.0, "linear"), (89.5, "fade")])
def test_what_a_shrunken_run_likes_is_played_again_with_a_larger_batch(
    monkeypatch: pytest.MonkeyPatch, larger: float, chosen: str
) -> None:
    known = read_rehearsal_facts(prepare_unrehearsed(settings_for(), make_data(count=900)))
    assert (known.batch, known.check_batch) == (40, 160)
    monkeypatch.setattr(choice, "climb_ladder", lambda stage, rounds: known.default_step)
    small = {"fade": 92.0, "linear": 90.0}
    monkeypatch.setattr(Stage, "play", play_by_mode(small, {"fade": larger, "linear": 90.0}))
    stage = Stage(dataclasses.replace(known, effort=dataclasses.replace(known.effort, finalists=6)))
    assert choice.rehearse_on_stage(stage).candidate.mode == chosen
    assert len(stage.history) == 3  # two grids and the check, which takes the place of the last tasks
    # Without a check, as where the batch is the real one, what the small run likes is taken.
    whole = Stage(dataclasses.replace(stage.facts, check_batch=known.batch))
    assert choice.rehearse_on_stage(whole).candidate.mode == "fade"
    assert whole.facts.final_tasks == known.effort.final > 0


def test_light_models_are_checked_after_their_last_tasks() -> None:
    known = read_rehearsal_facts(prepare_unrehearsed(settings_for(), make_data(count=900)))
    heavy, light = (dataclasses.replace(known, effort=dataclasses.replace(known.effort, final=n)) for n in (2, 3))
    assert (heavy.final_tasks, light.final_tasks) == (0, 3)
    merged = dataclasses.replace(known, rounds=200, check_batch=known.batch)
    assert merged.has_check  # 150 rounds are played of 200


def test_moo_as_it_is_has_no_advantage_but_is_among_the_candidates() -> None:
    known = read_rehearsal_facts(prepare_unrehearsed(settings_for(), make_data()))
    found = choice.list_moving(Candidate("plain", 0.3, 7.0), known)
    assert Candidate("moo", 1.0, known.default_step) in found
    assert {each.mode for each in found} == {"linear", "fade", "moo"}
    assert all(each.C == 0.3 for each in found if each.mode == "linear")


def test_the_check_has_the_noise_of_the_real_run_and_another_digest() -> None:
    known = read_rehearsal_facts(prepare_unrehearsed(settings_for(), make_data(count=900)))
    small, check = (facts.make_small_settings(each, 4, 0) for each in (known, known.enlarge()))
    assert small.privacy.sigma is not None
    assert check.privacy.sigma == pytest.approx(small.privacy.sigma * known.check_batch / known.batch)
    assert known.check_batch <= 900 * 0.2
    few = read_rehearsal_facts(prepare_unrehearsed(settings_for(), make_data(count=90)))
    assert not few.has_check  # the batch did not shrink
    assert dataclasses.replace(known, check_batch=80).digest() != known.digest()
    assert known.estimate_work() > dataclasses.replace(known, check_batch=known.batch).estimate_work()


def test_a_ladder_grows_where_its_best_step_is_at_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    known = read_rehearsal_facts(prepare_unrehearsed(settings_for(), make_data()))
    monkeypatch.setattr(choice, "LADDER_SCALES", (0.25, 1.0, 4.0))
    monkeypatch.setattr(choice, "MOST_EXTENSIONS", 2)
    wanted = known.default_step * 64

    def play(self: Stage, candidates, rounds, tasks):
        return {c: {"task": -abs(math.log2(c.step / wanted))} for c in candidates}

    monkeypatch.setattr(Stage, "play", play)
    assert choice.climb_ladder(Stage(known), 4) == pytest.approx(wanted)
    monkeypatch.setattr(choice, "MOST_EXTENSIONS", 1)
    assert choice.climb_ladder(Stage(known), 4) < wanted


def test_local_steps_are_rehearsed_with_the_skew_of_the_run() -> None:
    split = {"partition": "dirichlet", "alpha": 0.1, "parties": 3, "min_examples": 1}
    real = prepare_unrehearsed(settings_for(train={"steps": 2}, data=split), make_data())
    small = facts.make_small_settings(read_rehearsal_facts(real), 4, 0)
    assert (small.data.partition, small.data.alpha, small.data.parties) == ("dirichlet", 0.1, 3)
    one = facts.make_small_settings(
        read_rehearsal_facts(prepare_unrehearsed(settings_for(data=split), make_data())), 4, 0
    )
    assert (one.data.partition, one.data.parties) == ("iid", 1)  # with one step a round only the sum matters


def test_learned_weights_are_not_rehearsed(tmp_path: Path) -> None:
    first = train(make_data(), settings=settings_for(clip={"rehearse": False}), out=tmp_path / "run")
    again = settings_for(model={"init": str(tmp_path / "run")})
    assert "learned already" in find_refusal(prepare_unrehearsed(again, make_data()))
    assert find_refusal(prepare_unrehearsed(first.settings, make_data())) == ""


def test_candidates_of_a_stack_share_their_numbers_and_none_changes_them() -> None:
    base = prepare_unrehearsed(settings_for(), make_data())
    runs = [derive_federation(base, Candidate("plain", 1.0, 0.5).apply(base.settings, 1)) for _ in range(3)]
    scores = stage._play_stacked(stage._share_numbers(runs, 3))
    assert scores[0] == scores[1] == scores[2]
    assert scores[0] == pytest.approx(stage._play_one_by_one(stage._share_numbers(runs[:1], 3))[0], abs=1e-6)


def test_heavy_models_get_fewer_tasks_rather_than_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "EFFORTS", EFFORTS)
    loads = [effort.Load(work, rounds=100, steps=1, parties=1, own=False) for work in (1e2, 4e5, 1e9)]
    light, middle, heavy = map(effort.choose_effort, loads)
    assert (light, heavy) == (EFFORTS[0], EFFORTS[-1])
    assert middle.rounds == light.rounds
    assert middle.fine + middle.final < light.fine + light.final
    work = [effort.estimate_work(loads[0], each) for each in EFFORTS]
    assert work == sorted(work, reverse=True)


def test_adam_is_tried_with_much_shorter_steps() -> None:
    plain, adam = (
        read_rehearsal_facts(prepare_unrehearsed(settings_for(train={"server": server}), make_data()))
        for server in ("sgd", "adam")
    )
    shortest = [min(candidate.step for candidate in choice.list_ladder(one)) for one in (plain, adam)]
    assert shortest[1] < shortest[0] / 100


def test_plan_warns_where_moo_is_weak_without_a_rehearsal() -> None:
    def warned(**more: dict) -> str:
        plain = settings_for(rounds=100, clip={"rehearse": False}).replace(**more)
        return " ".join(list_weaknesses(prepare_unrehearsed(plain, make_data())))

    assert warned() == ""
    assert "several local steps" in warned(train={"rounds": 20, "steps": 4})
    assert "memory" in warned(train={"server": "momentum"})
    assert "so few rounds" in warned(train={"rounds": 10}, model={"name": "mlp"})
    assert warned(train={"rounds": 10}) == ""
    assert warned(train={"server": "momentum"}, clip={"step": 1.0}) == ""
    assert warned(train={"server": "momentum"}, clip={"rule": "fixed"}) == ""
    assert warned(train={"server": "momentum"}, clip={"rehearse": True}) == ""
    assert "nothing can be rehearsed" in warned(
        train={"server": "momentum", "steps": 10**6}, clip={"rehearse": True}
    )  # it would take hours


def test_runs_score_the_same_in_a_stack_and_one_by_one() -> None:
    base = prepare_unrehearsed(settings_for(), make_data())
    runs = [derive_federation(base, Candidate("plain", 1.0, step).apply(base.settings, 1)) for step in (0.5, 4.0)]
    stacked, alone = stage._play_stacked(runs), stage._play_one_by_one(runs)
    assert stacked == pytest.approx(alone, abs=1e-6)
    assert stacked[0] != stacked[1]
    assert not stage._is_faster_alone(base)
