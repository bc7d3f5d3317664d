"""Trains the federations of a cell in stacks, and keeps what attacks need of each: a few numbers per record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulcrum.analysis.attacks.cells import MODEL, AttackCell, PoolScores, join_scores, read_scores, write_scores
from fulcrum.analysis.attacks.pool import ShadowPool, make_pool, make_shadows, take_pool_records
from fulcrum.analysis.attacks.release_scores import ReleaseScorer
from fulcrum.analysis.attacks.signals import measure_models
from fulcrum.data import Dataset
from fulcrum.engines.batched import run_many
from fulcrum.errors import RunError
from fulcrum.runs import prepare_unrehearsed
from fulcrum.settings.schema import Settings, TaskSettings

SayFn = Callable[[str], None]
RoundFn = Callable[[int, int], None]
"""Called with (rounds done, rounds) of a whole cell, in federations times rounds."""


def prepare_pool(cell: AttackCell, dataset: Dataset, device: str = "auto") -> ShadowPool:
    """The pool of a cell over its part of a data set."""
    records = take_pool_records(dataset, cell.settings, cell.size, cell.seed)
    return make_pool(prepare_unrehearsed(make_pool_settings(cell, device), records), cell.size, cell.seed)


def make_pool_settings(cell: AttackCell, device: str = "auto") -> Settings:
    """A cell's settings as its federations have them: all records train, and the last round alone is evaluated."""
    settings = cell.settings.replace(
        data={"validation": 0.0, "features": "none"},
        clip={"rehearse": False},
        run={"device": device, "ledger": "", "engine": "auto", "evaluate_every": cell.settings.train.rounds},
    )
    return replace(settings, task=TaskSettings())


def run_shadows(
    pool: ShadowPool,
    cell: AttackCell,
    numbers: range,
    on_round: Callable[[int], None] | None = None,
    rows_limit: int = 0,
) -> PoolScores:
    """Trains the federations of these numbers in one stack. on_round: called with each round's number, from 1.

    rows_limit: the most examples in one piece of a step; 0: chosen by device memory.
    """
    began = time.perf_counter()
    watched = pool.watched
    watch = ReleaseScorer(pool.party, pool.common, cell.size.known)
    last = None
    for result in run_many(make_shadows(pool, numbers, cell.seed), rows_limit, watch):
        last = result
        if on_round:
            on_round(result.round)
    assert last is not None
    assert last.averaged is not None
    confidence = measure_models(pool.base.problem, last.averaged, torch.from_numpy(watched)).numpy()
    return PoolScores(
        cell=cell,
        party=pool.party[watched],
        control=pool.control[watched],
        coins=pool.coins[numbers.start : numbers.stop, watched],
        scores={MODEL: confidence, **watch.collect()},
        metrics={name: values.numpy().astype(np.float32) for name, values in last.metrics.items()},
        facts={"seconds": round(time.perf_counter() - began, 3)},
    )


def run_cell(
    cell: AttackCell,
    dataset: Dataset,
    path: Path | None = None,
    stack: int = 64,
    device: str = "auto",
    on_round: RoundFn | None = None,
    out_of_time: Callable[[float], bool] = lambda seconds: False,
    facts: Mapping[str, Any] | None = None,
    rows_limit: int = 0,
) -> PoolScores | None:
    """All federations of a cell, `stack` at a time; None where nothing is done yet and time is up.

    path: a file that is written anew after each stack; what it holds already is not run again. out_of_time: asked
    before each stack, with the seconds that the last one took. rows_limit: see `run_shadows`.
    """
    done = read_scores(path) if path is not None and path.is_file() else None
    if done is not None and done.cell != cell:
        raise RunError(f"{path} holds another cell's scores; give another folder, or remove the file.")
    if done is not None and done.shadows >= cell.size.shadows:
        return done
    pool = prepare_pool(cell, dataset, device)
    first, took = (done.shadows if done else 0), 0.0
    rounds = cell.settings.train.rounds
    for start in range(first, cell.size.shadows, stack):
        if out_of_time(took):
            break
        numbers = range(start, min(cell.size.shadows, start + stack))

        def tell(t: int, numbers: range = numbers) -> None:
            if on_round:
                on_round(numbers.start * rounds + t * len(numbers), cell.size.shadows * rounds)

        part = run_shadows(pool, cell, numbers, tell, rows_limit)
        took = float(part.facts["seconds"])
        part = replace(part, facts={**part.facts, **(facts or {})})
        done = part if done is None else join_scores([done, part])
        if path is not None:
            write_scores(path, done)
    return done
