"""Canaries in a run: they are units like all others, and the bound is below the claim unless the code is wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fulcrum.analysis.audit.bounds import bound_by_known_samples, bound_by_noise_fit
from fulcrum.analysis.audit.in_run import add_canaries, collect_view, measure_run, run_audit
from fulcrum.engines.canaries import REACH, SparseTape, draw_canaries
from fulcrum.errors import ConfigError
from fulcrum.runs import execute
from fulcrum.runs.preparation import prepare_unrehearsed
from fulcrum.settings.files import parse_settings
from support.federations import toy_data


def prepared(method: str = "dp-sgd", **more):
    words = {
        "data.parties": 2,
        "data.partition": "iid",
        "data.min_examples": 1,
        "privacy.epsilon": 4.0,
        "train.rounds": 10,
        "train.rate": 0.3,
        "model.name": "mlp",
        "run.evaluate_every": 10,
        "clip.rehearse": False,
        **more,
    }
    return prepare_unrehearsed(parse_settings({}, words, method), toy_data(40))


def included(audited):
    """The coins, [m]."""
    return audited.canaries.included.numpy()


def test_a_small_audit_of_right_code_is_below_the_claim_and_not_far(tmp_path):
    result, audit = run_audit(add_canaries(prepared(), 300), tmp_path / "run")
    assert audit.passed
    assert audit.together is not None
    best = audit.together.best
    assert 0.4 * result.epsilon < best.epsilon < result.epsilon
    assert {bound.method for bound in audit.together.bounds} == {"known-samples", "noise-fit", "one-run-fdp", "one-run"}
    told = audit.to_json()
    # The highest of twelve bounds is told at the level that all of them share, so it is lower.
    assert 0 < told["measured"]["epsilon"] < max(b.epsilon for e in audit.entries for b in e.bounds)
    assert (tmp_path / "run" / "audit.json").is_file()
    assert [party["canaries"] for party in told["parties"]] == [300, 300]


def test_noise_at_half_strength_contradicts_the_claim(monkeypatch):
    from fulcrum.training import client

    right = client.compute_charged_scale

    def halved(*args, **kwargs):
        found = right(*args, **kwargs)
        return dataclasses.replace(found, sum=found.sum / 2)

    monkeypatch.setattr(client, "compute_charged_scale", halved)
    audited = add_canaries(prepared(), 300)
    execute(audited.federation)
    view = collect_view(audited.engine.seen, 0, (mine := audited.canaries.party.numpy() == 0), included(audited)[mine])
    assert view.sampled is not None
    fit = bound_by_noise_fit(view.projections, view.included, view.events, 1e-5, 0.99)
    known = bound_by_known_samples(view.projections, view.sampled, view.included, view.events, 1e-5, 0.99)
    assert known.epsilon > 4.0
    assert fit.epsilon > 4.0  # what the server sees is enough


def test_canaries_count_as_units_and_are_paid_like_them():
    plain = prepared()
    audited = add_canaries(plain, 7)
    assert [audited.federation.plan.units(k) - plain.plan.units(k) for k in range(2)] == [7, 7]
    assert (audited.federation.plan.rates == plain.plan.rates).all()
    assert audited.federation.plan.largest_final_epsilons == plain.plan.largest_final_epsilons
    with pytest.raises(ConfigError, match="no noise"):
        add_canaries(prepared("none", **{"privacy.epsilon": None}), 5)
    with pytest.raises(ConfigError, match="directions"):
        add_canaries(prepared(), 100_000)


@pytest.mark.parametrize("more", [{}, {"clip.groups": "layer"}])
def test_an_included_canary_adds_exactly_its_bound_and_another_one_nothing(more):
    """Without noise: the release of a round in which all are sampled, with and without each canary."""
    audited = add_canaries(prepared(**{"train.rounds": 1, "train.rate": 1.0, **more}), 6)
    problem, canaries = audited.federation.problem, audited.canaries
    execute(audited.federation)
    (first, second) = audited.engine.seen
    assert (first.sampled[canaries.party == 0] == 1).all()
    assert (first.sampled[canaries.party == 1] == 0).all()  # those of the other party
    state = problem.rule.init(audited.federation.settings.clip, problem.shape)
    values = REACH * canaries.weigh(state["C"])
    tape = SparseTape(canaries.places, values.float(), problem.layout.dim)
    assert torch.allclose(tape.norms(), (REACH * state["C"]).expand(len(canaries), -1))
    bound = tape.weighted_sum(torch.full((len(canaries), len(state["C"])), 1 / REACH))
    assert canaries.project(bound, state["C"]).numpy() == pytest.approx(1.0, rel=1e-6)
    assert second.client == 1


def test_both_steps_show_the_server_the_same():
    seen = []
    for fast in (False, True):
        audited = add_canaries(prepared("moo"), 20, fast=fast)
        execute(audited.federation)
        mine = audited.canaries.party.numpy() == 0
        seen.append(collect_view(audited.engine.seen, 0, mine, included(audited)[mine]))
    assert np.abs(seen[0].projections - seen[1].projections).max() < 1e-3
    assert np.array_equal(seen[0].sampled, seen[1].sampled)  # type: ignore[arg-type]
    assert seen[0].events == seen[1].events


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("wav", {}),
        ("dp-macadam", {}),
        ("dp-sgd", {"train.steps": 3, "train.rounds": 8}),
        ("dp-sgd", {"privacy.aggregation": "ideal-secagg"}),
        ("dp-sgd", {"privacy.aggregation": "pairwise", "privacy.colluders": 0}),
    ],
)
def test_every_kind_of_release_is_seen_in_units_of_the_bound(method, more):
    """What a canary adds when it is sampled is about 1 and the noise is at least the claimed one, whatever is sent."""
    audited = add_canaries(prepared(method, **more), 300)
    result = execute(audited.federation)
    view = collect_view(audited.engine.seen, 0, (mine := audited.canaries.party.numpy() == 0), included(audited)[mine])
    assert view.sampled is not None
    known = bound_by_known_samples(
        view.projections, view.sampled, included(audited)[mine], view.events, 1e-5, 0.95, view.steps
    )
    assert known.numbers["shift"] == pytest.approx(1.0, abs=0.25)
    assert 0.9 < known.numbers["noise"] < 1.6
    assert known.numbers["rate"] == pytest.approx(1.0, abs=0.1)
    assert known.epsilon < max(result.epsilons)


def test_examples_are_scored_by_the_models_alone():
    _, audit = run_audit(add_canaries(prepared(), 60, "example"))
    assert audit.passed
    assert audit.kind == "example"
    assert {bound.method for entry in audit.entries for bound in entry.bounds} == {"one-run-fdp", "one-run"}


def test_persons_and_private_records_may_have_canaries(tmp_path, monkeypatch):
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "record.key"))
    person = np.arange(40) // 2
    words = {"data.parties": 2, "privacy.epsilon": 4.0, "privacy.unit": "person", "train.rounds": 3, "train.rate": 0.3}
    settings = parse_settings({}, {**words, "clip.rehearse": False, "data.min_examples": 1}, "dp-sgd")
    federation = prepare_unrehearsed(settings, toy_data(40, person=person, public=False, classes=3))
    audited = add_canaries(federation, 5)
    assert sum(audited.federation.plan.units(k) for k in range(2)) == 20 + 10
    assert audited.federation.problem.randomness.mode == "secure"
    result = execute(audited.federation, tmp_path / "run")
    assert measure_run(audited, result).passed


def test_coins_are_fair_and_directions_differ():
    groups = torch.zeros(500, dtype=torch.int64)
    drawn = draw_canaries([0] * 400, 10, groups, "gradient", torch.Generator().manual_seed(0))
    assert len(set(drawn.places[:, 0].tolist())) == 400
    assert 150 < int(drawn.included.sum()) < 250
