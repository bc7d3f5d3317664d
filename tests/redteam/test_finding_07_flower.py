"""Finding 7 over the wire: a party counted the classes in its private labels, and sent the number.

243f1c8's welcome carried `classes`, and terms could leave it to the labels (classes = 0): one label 2 -> 9 turned 3
classes into 10. Now the terms declare it, labels outside are an error that the party alone reads, and whatever a party
says before its first paid release is the same for any records of the same number and shape.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum.data import Dataset, from_arrays
from fulcrum.data.tasks import make_task
from fulcrum.errors import ConfigError
from fulcrum.flower.messages import HEADER_SCHEMAS, Envelope, pack_envelope, read_message_header
from fulcrum.flower.party import load_arrays
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.terms import read_terms_file
from fulcrum.privacy import mechanism
from fulcrum.privacy.exact_noise import GridRelease
from fulcrum.settings.schema import TaskSettings
from support.federations import toy_data
from support.flower import toy_party, toy_request, toy_settings, toy_terms

SETTINGS = toy_settings()


def code(reply: Envelope) -> str:
    return str(read_message_header(reply, ("update", "refused", "welcome", "noted")).get("code", ""))


def hello(task: TaskSettings, outputs: int) -> Envelope:
    proposal = make_proposal(SETTINGS, outputs, task)
    return pack_envelope({"kind": "hello", "run": "run-1", "nonce": "n", "proposal": proposal})


def other_records(data: Dataset, labels: torch.Tensor) -> Dataset:
    """Records of the same number and shape, with other values and these labels."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(data.x.shape, generator=generator) * 50
    return from_arrays(x, labels, data.x_test, data.y_test, classes=3)


def test_a_label_changes_no_number_that_leaves(tmp_path):
    data = toy_data(120)
    two = other_records(data, torch.zeros_like(data.y))
    assert [make_task(TaskSettings(), [each.numpy()]).outputs for each in (data.y, data.y + 7)] == [3, 10]  # 243f1c8
    said = []
    for folder, own in (("a", data), ("b", two)):
        with toy_party(tmp_path / folder, SETTINGS, data=own) as service:
            header = json.loads(service.answer(hello(TaskSettings(), 3)).header)
            ledger = header.pop("ledger")  # its name is random, and its rows are no records
            assert (set(ledger), ledger["id"], ledger["rows"]) == (
                {"id", "rows", "digest"},
                service.ledger.identity,
                service.ledger.head().sequence,
            )
            said.append(header)
    assert said[0] == said[1]
    assert "classes" not in said[0]
    assert "classes" not in HEADER_SCHEMAS["welcome"]


def test_a_label_outside_is_said_to_the_party_alone(tmp_path):
    data = toy_data(120)
    labels = data.y.clone()
    labels[labels == 2] = 9
    wide = from_arrays(data.x, labels, data.x_test, data.y_test, classes=10)
    said: list[str] = []
    with toy_party(tmp_path, SETTINGS, data=wide, say=said.append) as service:
        reply = service.answer(hello(TaskSettings(), 3))
        assert code(reply) == "data"
        assert "9" in said[-1]
        assert set(json.loads(reply.header)) == {"v", "kind", "nonce", "run", "party", "request", "code"}
        assert service.ledger.accounts() == {}


def test_proposals_with_other_numbers_of_classes_do_not_find_out_which_one_fits(tmp_path):
    """Nobody has agreed yet: whether the records fit a proposal is answered like a person's no."""
    said: list[str] = []

    def counts_first(terms: Any) -> bool:  # as `fulcrum party` does, to show how many units there are
        service.load_records(terms.agreed_task)
        return False

    with toy_party(tmp_path, SETTINGS, terms=None, say=said.append) as service:
        for agrees in (counts_first, lambda terms: True):
            service.consent = agrees
            answers = [code(service.answer(hello(TaskSettings("classification", classes=n), n))) for n in (2, 3)]
            wanted = "consent" if agrees is counts_first else ""
            assert answers == ["consent", wanted]
    assert sum("labels hold 2" in words for words in said) == 2, "the party itself is told"


@pytest.mark.parametrize("name", ["auto", "classification", "multilabel", "tokens", "next-token"])
def test_terms_that_leave_the_number_to_the_labels_are_refused(tmp_path, name):
    proposal = make_proposal(SETTINGS, 0, TaskSettings(name))
    with pytest.raises(ConfigError, match="never counted in private labels"):
        accept_proposal("party-0", proposal)
    terms = dataclasses.replace(toy_terms(SETTINGS), classes=0, task=TaskSettings(name))
    with pytest.raises(ConfigError, match="classes"), toy_party(tmp_path, SETTINGS, terms=terms):
        pass
    with toy_party(tmp_path / "asked", SETTINGS, terms=None, consent=lambda terms: pytest.fail("asked")) as service:
        ask = pack_envelope({"kind": "hello", "run": "r", "nonce": "n", "proposal": proposal})
        assert code(service.answer(ask)) == "task"


COUNTING_TASK = """
from fulcrum.data.tasks import task_from_loss

def counts_its_labels(settings, targets):
    most = int(max(each.max() for each in targets))
    return task_from_loss(lambda outputs, y: (outputs[..., 0] - y) ** 2, outputs=most + 1)
"""


def test_a_task_of_ones_own_cannot_count_labels_either(tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(COUNTING_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    task = TaskSettings("counting:counts_its_labels")
    data = toy_data(120)
    terms = accept_proposal("party-0", make_proposal(SETTINGS, 1, task), 50.0)
    said: list[str] = []
    for public, wanted in ((False, ""), (True, "data")):  # private targets are not even shown to a task's code
        own = from_arrays(data.x, data.y, data.x_test, data.y_test, task=task, public=public)
        folder = tmp_path / str(public)
        with toy_party(folder, SETTINGS, terms=terms, data=own, say=said.append) as service:
            assert code(service.answer(hello(task, 1))) == wanted
            assert public or service.dataset.task.outputs == 1
    assert "must follow from the terms" in said[-1]


def test_terms_of_version_0_1_that_left_it_open_are_read_and_not_used(tmp_path, monkeypatch, capsys):
    from fulcrum.cli import main

    keep = [line for line in TERMS_0_1.splitlines() if line]
    (tmp_path / "terms.toml").write_text("\n".join(keep))
    terms = read_terms_file(tmp_path / "terms.toml")
    assert terms.party == "site-a"
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 3)), y=np.array([0, 1, 2, 1]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fulcrum.cli.flower.require_flower", lambda: None)
    words = ["party", "--data", "d.npz", "--server", "h:1", "--key", "site-a", "--ledger", "l/x.sqlite", "--ca", "x"]
    assert main(words) == 2
    assert "classes = N in the terms" in capsys.readouterr().err


TERMS_0_1 = """
party = "site-a"
budget = 1.9999
delta = 1e-05
rate = 0.05
steps = 1
sigma = 1.0996077442782783
rounds = 20
rules = ["moo"]
unit = "example"
accountant = "rdp"
groups = "flat"
C_min = 0.001
C_max = 1000.0
lr = 1.0
weight_decay = 0.0
classes = 0
"""


# --- neighbours: what else an answer could say ------------------------------------------------------


def answer_rounds(folder, settings, data: Dataset, rounds: int, steps: int = 1) -> list[Envelope]:
    with toy_party(folder, settings, data=data, simulation=True) as service:
        replies = [service.answer(toy_request(service, settings, round=t, steps=steps)) for t in range(rounds)]
        assert [code(reply) for reply in replies] == [""] * rounds
        return replies


class Tap:
    """Stands at the one place where releases are made: it keeps them, or puts stored ones in their place."""

    def __init__(self, monkeypatch: Any) -> None:
        self.released: list[list[GridRelease]] = []
        self.exact = mechanism.release_rows_on_grid
        self.patch = lambda release: monkeypatch.setattr(mechanism, "release_rows_on_grid", release)
        self.patch(self.record)

    def record(self, *given: Any) -> list[GridRelease]:
        self.released.append(list(self.exact(*given)))
        return self.released[-1]

    def replay(self) -> None:
        stored = iter(self.released)
        self.patch(lambda *given: next(stored))

    def stop(self) -> None:
        self.patch(self.exact)


@pytest.mark.parametrize("rule", ["moo", "fixed", "quantile", "oso", "wav", "moo-client", "moo-scalar"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.every(4)
def test_an_update_is_a_function_of_the_request_and_of_the_released_integers(tmp_path, monkeypatch, rule, steps):
    """Other records, and the integers of the first party in place of their own: the same bytes leave."""
    settings = toy_settings(rule=rule, steps=steps)
    data = toy_data(120)
    tap = Tap(monkeypatch)
    first = answer_rounds(tmp_path / "a", settings, data, 3, steps)
    assert tap.released
    tap.replay()
    other = other_records(data, (data.y + 1) % 3)
    second = answer_rounds(tmp_path / "b", settings, other, 3, steps)
    for one, two in zip(first, second, strict=True):
        assert (one.header, one.body) == (two.header, two.body)

    # The wrong case: without the first party's integers the records show, as they must.
    tap.stop()
    third = answer_rounds(tmp_path / "c", settings, other, 1, steps)
    assert third[0].body != first[0].body


def test_one_step_sends_the_integers_times_public_numbers(tmp_path, monkeypatch):
    """delta = -lr grid k / (rate n): whoever knows the request can read the integers k off the update."""
    tap = Tap(monkeypatch)
    (reply,) = answer_rounds(tmp_path, SETTINGS, toy_data(120), 1)
    delta = load_arrays(reply.body)["delta"]
    release = tap.released[0][0]
    wanted = -0.5 * (release.integers.double() * release.grid) / (0.2 * 40)
    torch.testing.assert_close(delta.double(), wanted, rtol=1e-5, atol=1e-6)
