"""Rehearsal on the user's own public records in place of made-up ones (clip.rehearse_on).

Whoever names a source there declares it public: the rehearsal reads its values. So it must not be the private data, and
it must have the shape of it: the same inputs, the same task.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from fulcrum.data import Dataset, from_arrays, load
from fulcrum.data.made_up import read_data_facts
from fulcrum.data.records import Records, select_rows
from fulcrum.errors import ConfigError
from fulcrum.runs.rehearsal.facts import RehearsalFacts
from fulcrum.settings.schema import Settings, TaskSettings
from fulcrum.training.federation import Federation

LEAST_RECORDS = 100
"""Public records below which a rehearsal would measure luck."""
TEST_SHARE = 0.3
"""Part of the records that is scored, where the public set has no test records of its own."""


def load_public_set(federation: Federation) -> Dataset | None:
    """The public data set that clip.rehearse_on names; None where it names none.

    ConfigError where it is the data that the run protects, or has another shape or task.
    """
    settings = federation.settings
    source = settings.clip.rehearse_on
    if not source:
        return None
    if _is_same_source(source, settings):
        raise ConfigError(
            f"clip.rehearse_on = {source!r} is the data of the run itself; a rehearsal reads values, so it must be "
            "public records that nobody's epsilon covers."
        )
    data = load(
        source, settings.data.dir, task=settings.task, public=True, table=settings.table, images=settings.images
    )
    return check_public_set(data, federation)


def check_public_set(data: Dataset, federation: Federation) -> Dataset:
    """The data set, or ConfigError where it cannot stand for that of the run."""
    own, model = federation.problem.dataset, federation.problem.model
    if data is own or (data.fingerprint and data.fingerprint == own.fingerprint):
        raise ConfigError(
            "clip.rehearse_on holds the same records as the run itself; a rehearsal reads values, so it must be public "
            "records that nobody's epsilon covers."
        )
    if data.train is None or len(data.train) < LEAST_RECORDS:
        count = 0 if data.train is None else len(data.train)
        raise ConfigError(f"clip.rehearse_on has {count} records; a rehearsal needs at least {LEAST_RECORDS}.")
    given, wanted = (read_data_facts(each, model) for each in (data, own))
    if dict(given.inputs) != dict(wanted.inputs):
        shapes = [{name: each.shape for name, each in facts.inputs.items()} for facts in (given, wanted)]
        raise ConfigError(
            f"clip.rehearse_on has inputs {shapes[0]}, and the run's are {shapes[1]}; they must be alike."
        )
    if (given.task.name, given.outputs) != (wanted.task.name, wanted.outputs):
        raise ConfigError(
            f"clip.rehearse_on is a {given.task.name} with {given.outputs} outputs, and the run a {wanted.task.name} "
            f"with {wanted.outputs}; they must be alike."
        )
    return data


def fit_facts(facts: RehearsalFacts, data: Dataset | None) -> RehearsalFacts:
    """The facts for a rehearsal on a public set: with as many records as it has, and its digest."""
    if data is None:
        return facts
    assert data.train is not None
    there = len(data.train) if data.test is not None else int(len(data.train) * (1 - TEST_SHARE))
    examples, more = min(facts.examples, there), min(facts.check_examples, there)
    return dataclasses.replace(
        facts,
        examples=examples,
        batch=min(facts.batch, examples),
        check_examples=more,
        check_batch=min(facts.check_batch, more),
        public=data.fingerprint,
    )


def draw_part(data: Dataset, task: TaskSettings, count: int, test: int, seed: int) -> Dataset:
    """`count` records to train on and at most `test` to score, drawn by the seed: another part for each seed."""
    assert data.train is not None
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.train), generator=generator)
    if data.test is not None:
        scored = data.test_records
        chosen = torch.randperm(len(scored), generator=generator)[:test]
    else:
        scored, chosen = data.train, order[count : count + test]
    train: Records = data.train
    return from_arrays(
        select_rows(train.x, order[:count]),
        train.y[order[:count]],
        select_rows(scored.x, chosen),
        scored.y[chosen],
        name=f"{data.name}-part-{seed}",
        task=task,
        public=True,
    )


def _is_same_source(source: str, settings: Settings) -> bool:
    if source == settings.data.source:
        return True
    both = [Path(source), Path(settings.data.source)]
    return all(path.exists() for path in both) and both[0].resolve() == both[1].resolve()
