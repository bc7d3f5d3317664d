"""Every task across machines: the same result as in one process, and no party trains on another loss than agreed."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum import runs as api
from fulcrum.data import Dataset, from_arrays
from fulcrum.data.dataset import compute_dataset_fingerprint
from fulcrum.data.tasks import task_from_loss
from fulcrum.errors import ConfigError, DataError
from fulcrum.flower.consent import make_consent_text
from fulcrum.flower.messages import Envelope, pack_envelope, read_message_header
from fulcrum.flower.party_data import load_party_data, population_fingerprint
from fulcrum.flower.prepare import load_public_data
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.task_terms import declare_task, same_task, task_fingerprint
from fulcrum.flower.terms import read_terms_file, terms_to_toml
from fulcrum.models.layout import ParameterLayout
from fulcrum.settings.schema import Settings, TaskSettings
from support.federations import toy_data
from support.flower import NAMES, part, serve, share_streams, toy_federation, toy_party, toy_request, toy_settings

TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}
N, TEST = 120, 60


def toy_targets(kind: str) -> Dataset:
    """120 records in six dimensions with targets of one kind, and 60 public ones that name their parties."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N + TEST, 6, generator=generator)
    number = x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0, 0.3])
    token_ids = torch.randint(0, 7, (N + TEST, 5), generator=generator)
    inputs, targets, settings = {
        "regression": (x, 20 + 5 * number, TaskSettings("regression", loss="huber", low=0.0, high=40.0)),
        "binary": (x, (number > 3).long(), TaskSettings("binary", class_weights=(1.0, 6.0))),
        "multilabel": (x, (x[:, :3] > 0.3).long(), TaskSettings("multilabel")),
        "classification": (
            x,
            torch.arange(N + TEST) % 3,
            TaskSettings("classification", class_weights=(1.0, 2.0, 3.0)),
        ),
        "next-token": (token_ids, None, TaskSettings("next-token", classes=7)),
        "own": (x, number, TaskSettings("toy_hospital:loss_of_fourth_powers")),
    }[kind]
    return from_arrays(
        inputs[:N],
        None if targets is None else targets[:N],
        inputs[N:],
        None if targets is None else targets[N:],
        party_test=[NAMES[k % 3] for k in range(TEST)],
        task=settings,
        public=True,
    )


OWN_CODE = """
from torch import nn
from fulcrum.data.tasks import task_from_loss

def loss_of_fourth_powers(settings, targets):
    return task_from_loss(lambda outputs, y: (outputs[..., 0] - y) ** 4, name="fourth")

def next_tokens(outputs):
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, outputs))
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A module that every party has installed: a task and a model."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "toy_hospital.py").write_text(OWN_CODE)
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.delitem(sys.modules, "toy_hospital", raising=False)


def settings_of(data: Dataset, **changes) -> Settings:
    """Three rounds of two steps over three parties, with the data's task in the settings."""
    assert data.task_settings is not None
    settings = dataclasses.replace(toy_settings(3, steps=2), task=data.task_settings, **changes)
    tokens = data.task_settings.name == "next-token"
    return settings.replace(model={"name": "toy_hospital:next_tokens"}) if tokens else settings


def terms_of(settings: Settings, data: Dataset):
    """What each party agrees to: the settings' task as public data declare it, and a large budget."""
    proposal = make_proposal(settings, data.task.outputs, declare_task(data))
    return lambda name: accept_proposal(name, proposal, 50.0)


@pytest.mark.parametrize("kind", ["regression", "binary", "multilabel", "classification", "next-token", "own"])
@pytest.mark.every(3)
def test_every_task_gives_the_same_across_machines(tmp_path, monkeypatch, own_code, kind):
    data = toy_targets(kind)
    settings = settings_of(data)
    share_streams(monkeypatch)
    alone = api.execute(api.prepare(settings, data), tmp_path / "alone")
    with toy_federation(tmp_path, settings, terms=terms_of(settings, data), data=data) as bus:
        result = serve(bus, settings, tmp_path / "served", monkeypatch, data=data)
    flat = ParameterLayout.of(alone.model).flatten
    torch.testing.assert_close(flat(result.model), flat(alone.model), **TOLERANCE)
    assert pytest.approx(alone.C, rel=1e-6) == result.C
    assert result.epsilons == alone.epsilons
    assert set(result.metrics) == set(data.task.metrics)
    assert result.metrics == pytest.approx(alone.metrics, rel=1e-5, nan_ok=True)
    served, own = (
        json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[-1]) for run in ("served", "alone")
    )
    assert set(served["party_metrics"]) == set(NAMES), "public test records name their parties"
    assert served["party_metrics"][NAMES[1]] == pytest.approx(own["party_metrics"][NAMES[1]], rel=1e-5)


# --- what a party refuses -----------------------------------------------------------------------


def code(reply: Envelope) -> str:
    return read_message_header(reply, ("update", "refused", "welcome", "noted")).get("code", "")


def hello(settings: Settings, task: TaskSettings, outputs: int = 0) -> Envelope:
    proposal = make_proposal(settings, outputs, task)
    return pack_envelope({"kind": "hello", "run": "run-1", "nonce": "n", "proposal": proposal})


OUTSIDE = {
    "a class": (TaskSettings("classification", classes=2), toy_data(120), "labels hold 2"),
    "a yes": (TaskSettings("binary"), toy_data(120), "labels hold 2"),
    "a token": (TaskSettings("next-token", classes=5), toy_targets("next-token"), "token 6"),
}


@pytest.mark.parametrize(("task", "data", "words"), OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize("agreed", [True, False])
def test_a_label_outside_the_declared_range_is_said_to_the_party_alone(tmp_path, task, data, words, agreed):
    settings = toy_settings()
    said: list[str] = []
    terms = accept_proposal("party-0", make_proposal(settings, 0, task), 50.0) if agreed else None
    options = {"terms": terms, "data": data, "say": said.append, "consent": lambda terms: True}
    with toy_party(tmp_path, settings, **options) as service:
        reply = service.answer(hello(settings, task))
        header = {"kind": "done", "run": "run-1", "nonce": "n", "rounds": 1}
        assert code(reply) == ("data" if agreed else "consent")
        assert any(words in sentence for sentence in said)
        assert words.encode() not in reply.header
        assert reply.body == b""
        assert not (tmp_path / "party-0.toml").exists(), "terms that the records do not fit are not pinned"
        if agreed:
            assert code(service.answer(pack_envelope(header))) == "data"
            with pytest.raises(DataError, match=words):
                service.prepare()
        assert service.ledger.accounts() == {}


REGRESSION = TaskSettings("regression", loss="huber", low=0.0, high=40.0)
OTHER_TASKS = {
    "another task": dataclasses.replace(REGRESSION, name="classification"),
    "another loss": dataclasses.replace(REGRESSION, loss="absolute"),
    "another range": dataclasses.replace(REGRESSION, high=4000.0),
    "no range": TaskSettings("regression", loss="huber"),
    "another scale": dataclasses.replace(REGRESSION, scale=1e-3),
    "code": dataclasses.replace(REGRESSION, name="evil:task"),
}


@pytest.mark.parametrize("task", OTHER_TASKS.values(), ids=OTHER_TASKS)
def test_a_proposal_with_another_task_than_agreed_is_refused(tmp_path, task):
    data = toy_targets("regression")
    settings = toy_settings()
    terms = accept_proposal("party-0", make_proposal(settings, 1, REGRESSION), 50.0)
    with toy_party(tmp_path, settings, terms=terms, data=data) as service:
        assert code(service.answer(hello(settings, REGRESSION, 1))) == ""
        assert code(service.answer(hello(settings, task, 1))) == "task"
    assert "evil" not in sys.modules


def test_a_round_with_another_loss_than_agreed_is_refused_and_costs_nothing(tmp_path):
    """Two losses with the same model: the model's fingerprint cannot tell them apart, the task's can."""
    plain, weighted = TaskSettings("binary"), TaskSettings("binary", class_weights=(1.0, 6.0))
    data, settings = toy_targets("binary"), toy_settings()
    terms = accept_proposal("party-0", make_proposal(settings, 1, plain), 50.0)
    with toy_party(tmp_path, settings, terms=terms, data=dataclasses.replace(data, task_settings=plain)) as service:
        assert service.dataset.task_settings == plain
        other = task_fingerprint(data)
        assert data.task_settings == weighted
        assert code(service.answer(toy_request(service, settings, task=other))) == "task"
        assert service.ledger.entries(service.name) == []
        assert code(service.answer(toy_request(service, settings))) == ""


def test_parties_with_another_task_do_not_join(tmp_path, monkeypatch):
    data = toy_targets("binary")
    settings = settings_of(data)
    other = dataclasses.replace(settings, task=TaskSettings("binary"))
    with toy_federation(
        tmp_path, settings, terms=lambda name: accept_proposal(name, make_proposal(other, 1), 50.0), data=data
    ) as bus:
        said: list[str] = []
        with pytest.raises(Exception, match="joined"):
            serve(bus, settings, tmp_path / "run", monkeypatch, data=data, said=said)
    assert any("the task" in words for words in said)


def test_records_that_declare_another_task_than_the_terms_are_refused(tmp_path):
    """A source of the party's own that sets a range must not change the loss that was agreed."""
    agreed = TaskSettings("regression", scale=5.0)
    terms = accept_proposal("party-0", make_proposal(toy_settings(), 1, agreed), 50.0)
    said: list[str] = []
    with toy_party(tmp_path, toy_settings(), terms=terms, data=toy_targets("regression"), say=said.append) as service:
        assert code(service.answer(hello(toy_settings(), agreed, 1))) == "data"
    assert "leave the task to the terms" in said[-1]


# --- what is agreed -------------------------------------------------------------------------------


def test_terms_keep_the_task(tmp_path):
    task = TaskSettings("regression", loss="huber", huber_width=0.5, low=0.0, high=40.0, metrics=("rmse",), score="mae")
    terms = accept_proposal("party-0", make_proposal(toy_settings(), 1, task), 50.0)
    (tmp_path / "terms.toml").write_text(terms_to_toml(terms))
    assert read_terms_file(tmp_path / "terms.toml") == terms
    assert terms.agreed_task == dataclasses.replace(task, metrics=(), score=""), "parties do not evaluate"
    text = make_consent_text(terms, 40)
    assert "task regression: loss huber, huber_width 0.5, low 0.0, high 40.0" in text


def test_a_number_of_classes_says_nothing_about_a_regression(tmp_path):
    """`fulcrum terms --classes 10` for a regression: the party's model still has one output."""
    terms = accept_proposal("party-0", make_proposal(dataclasses.replace(toy_settings(), task=REGRESSION), 10), 50.0)
    with toy_party(tmp_path, toy_settings(), terms=terms, data=toy_targets("regression")) as service:
        assert code(service.answer(hello(toy_settings(), REGRESSION, 1))) == ""
        assert service.dataset.task.outputs == 1


def test_terms_without_a_task_are_a_classification_with_their_classes(tmp_path):
    terms = accept_proposal("party-0", make_proposal(toy_settings(), 3), 50.0)
    text = terms_to_toml(terms)
    before, _, after = text.partition("# What is predicted")
    (tmp_path / "terms.toml").write_text(before + "[model]" + after.partition("[model]")[2])
    old = read_terms_file(tmp_path / "terms.toml")
    assert old.task == TaskSettings()
    assert old.agreed_task == terms.agreed_task == TaskSettings("classification", classes=3)
    with toy_party(tmp_path, toy_settings(), terms=old) as service:
        assert code(service.answer(hello(toy_settings(), TaskSettings(classes=3), 3))) == ""
        assert code(service.answer(hello(toy_settings(), TaskSettings("binary"), 1))) == "task"


def test_a_party_without_a_class_learns_its_number_from_the_terms(tmp_path):
    data = toy_data(120)
    few = from_arrays(data.x[data.y < 2], data.y[data.y < 2], data.x_test, data.y_test, classes=3)
    terms = accept_proposal("party-0", make_proposal(toy_settings(), 3), 50.0)
    with toy_party(tmp_path, toy_settings(), terms=terms, data=few) as service:
        welcome = read_message_header(service.answer(hello(toy_settings(), TaskSettings(), 3)), ("welcome",))
        assert service.dataset.task.outputs == 3
    assert welcome["task"] == task_fingerprint(data)


def test_no_code_of_a_task_runs_before_somebody_agreed(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    proposal = make_proposal(toy_settings(), 1, TaskSettings("evil:task"))
    proposal["task"]["metrics"] = ["evil:metric"]
    ask = pack_envelope({"kind": "hello", "run": "run-1", "nonce": "n", "proposal": proposal})
    with toy_party(tmp_path, toy_settings(), terms=None, consent=lambda terms: False) as service:
        assert code(service.answer(ask)) == "consent"
    proposal["task"]["name"] = "binary"
    terms = accept_proposal("party-0", proposal)
    assert "evil" not in terms_to_toml(dataclasses.replace(terms, task=terms.agreed_task))
    assert "evil" not in sys.modules
    assert "counted once" in make_consent_text(terms, None)


def test_a_task_that_parties_cannot_find_is_refused_by_the_coordinator():
    own = from_arrays(torch.zeros(4, 2), torch.zeros(4), task=task_from_loss(lambda o, y: o[..., 0] - y, name="mine"))
    with pytest.raises(ConfigError, match=r"package\.module:task"):
        declare_task(own)


def test_what_only_judges_predictions_is_no_other_task():
    assert same_task(TaskSettings("binary", threshold=0.3, metrics=("auc",), score="f1"), TaskSettings("binary"))
    assert same_task(TaskSettings(classes=3), TaskSettings("classification"))
    assert not same_task(TaskSettings(classes=3), TaskSettings(classes=4))
    assert not same_task(TaskSettings("binary", class_weights=(1.0, 2.0)), TaskSettings("binary"))


# --- records --------------------------------------------------------------------------------------


def test_a_party_needs_training_records_alone_and_the_coordinator_test_records(tmp_path):
    data = toy_data(30)
    np.savez(tmp_path / "own.npz", x=data.x, y=data.y)
    np.savez(tmp_path / "public.npz", x_test=data.x_test, y_test=data.y_test, classes=3)
    own = load_party_data(str(tmp_path / "own.npz"), task=TaskSettings("classification", classes=5))
    assert (own.test, own.task.outputs, len(own.y)) == (None, 5, 30)
    public = load_public_data(str(tmp_path / "public.npz"), task=TaskSettings())
    assert (public.train, public.task.outputs, len(public.y_test)) == (None, 3, 90)
    with pytest.raises(DataError, match="no training records"):
        load_party_data(str(tmp_path / "public.npz"))
    with pytest.raises(DataError, match="no test set"):
        load_public_data(str(tmp_path / "own.npz"))


def test_a_ledger_of_version_0_1_still_knows_the_records():
    """That version had the first training record in the place of a party's test set."""
    own = part(toy_data(30), toy_settings(), 0)
    before = from_arrays(own.x, own.y, own.x[:1], own.y[:1], classes=3)
    assert population_fingerprint(own) == before.fingerprint != own.fingerprint
    assert own.fingerprint == compute_dataset_fingerprint(own)
    assert population_fingerprint(toy_data(30)) == toy_data(30).fingerprint
