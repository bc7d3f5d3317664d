"""Answers of rehearsals that come with the package: found by the digest of the facts, remade by one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fulcrum.runs import prepare_unrehearsed
from fulcrum.runs.rehearsal import Candidate, apply_rehearsal, choice, memory, read_rehearsal_facts
from fulcrum.settings.schema import Settings
from support.federations import toy_data
from support.scripts import load_script


@pytest.fixture(scope="module")
def tables() -> Any:
    return load_script("benchmarks/rehearsal_tables.py")


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: Any) -> Path:
    """A table of the test's own, and no rehearsal beside it."""
    file = tmp_path / "shipped.json"
    monkeypatch.setattr(memory, "SHIPPED_FILE", file)
    monkeypatch.setattr(tables, "SHIPPED_FILE", file)
    monkeypatch.setattr(memory, "get_memory_folder", lambda: tmp_path / "none")
    return file


def make_federation(sigma: float = 2.0) -> Any:
    settings = Settings().replace(
        data={"parties": 3, "partition": "iid"},
        train={"rounds": 4, "rate": 0.2},
        clip={"rehearse": True},
        privacy={"sigma": sigma, "randomness": "seeded"},
    )
    return prepare_unrehearsed(settings, toy_data(90))


@pytest.mark.rehearsal
def test_a_run_whose_facts_are_in_the_table_takes_its_answer_without_a_rehearsal(
    shipped: Path, tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = read_rehearsal_facts(make_federation())
    answer = choice.Rehearsed(Candidate("linear", 2.0, 3.0), facts.digest(), {"linear": 0.5}, seconds=9.0)
    tables.write_table({facts.digest(): tables.to_row("toy", answer)})
    row = json.loads(shipped.read_text())[facts.digest()]
    assert row["for"] == "toy"
    assert "seconds" not in row

    def fail(*args: Any, **words: Any) -> Any:
        raise AssertionError("rehearsed, though the answer is known")

    monkeypatch.setattr(memory, "rehearse", fail)
    found = apply_rehearsal(make_federation()).settings
    assert (found.clip.step, found.clip.C0, found.train.schedule) == (3.0, 2.0, "linear")
    with pytest.raises(AssertionError, match="rehearsed"):  # other facts have another digest
        apply_rehearsal(make_federation(sigma=20.0))


def test_facts_survive_the_way_to_another_machine(tables: Any) -> None:
    facts = read_rehearsal_facts(make_federation())
    back = tables.facts_from_json(json.loads(json.dumps(tables.facts_to_json(facts), default=str)))
    assert back.digest() == facts.digest()
    assert back.settings == facts.settings
    assert back.effort == facts.effort


def test_the_table_of_the_package_answers_the_demo_and_the_first_command_of_the_readme(tables: Any) -> None:
    """Where this fails after a change of the rehearsal: benchmarks/rehearsal_tables.py make --only demo, readme."""
    table = json.loads(memory.SHIPPED_FILE.read_text(encoding="utf-8"))
    for digest, row in table.items():
        answer = choice.rehearsed_from_json(row)
        assert answer.digest == digest
        assert answer.candidate.step > 0
    for name in ("demo", "readme"):
        (settings,) = [settings for known, settings in tables.list_shapes() if known == name]
        facts = read_rehearsal_facts(prepare_unrehearsed(settings))
        assert facts.digest() in table, name
        other = settings.replace(train={"rounds": settings.train.rounds + 1})
        assert read_rehearsal_facts(prepare_unrehearsed(other)).digest() not in table
