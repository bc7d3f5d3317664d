"""Trains the pools of prepared cells where little is installed: Python, torch, numpy and safetensors.

    fulcrum attack membership --data mnist --prepare DIR                       # here, where the accountant is
    python -m fulcrum.analysis.attacks.worker DIR --out OUT [--lrs 0.3,1,3]    # there
    fulcrum attack membership --scored OUT                                     # here again

DIR holds cells.json and the pools' records. Without records the worker loads the whole data set itself (FULCRUM_DATA),
and can choose each cell's learning rate on records outside of its pool (--lrs). Scores are written after every stack of
federations, one file per cell; what a file holds is not run again, so the same command goes on after a crash. With
--seconds it stops before the time is up.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulcrum.analysis.attacks.cells import AttackCell, cell_from_json
from fulcrum.analysis.attacks.pool import take_pool_records
from fulcrum.analysis.attacks.rates import choose_lr
from fulcrum.analysis.attacks.shadows import run_cell
from fulcrum.data import Dataset, from_arrays
from fulcrum.errors import ConfigError, FulcrumError, RunError
from fulcrum.runs.folder import current_utc_time
from fulcrum.study.backends import TimeBudget
from fulcrum.study.job import parse_shard
from fulcrum.study.provenance import describe_command, get_source_commit
from fulcrum.study.run_job import describe_machine, load_study_data

CELLS_FILE = "cells.json"
TEST_RECORDS = 2000
"""Public test records that travel with a pool, to score its models on."""


def pack_cells(folder: Path, cells: Sequence[AttackCell], dataset: Dataset, records: bool = True) -> list[Path]:
    """Write the cells and the records of their pools into a folder; several calls add to it.

    records: False where the other machine has the data set itself.
    """
    if not dataset.task.classes or not isinstance(dataset.x, torch.Tensor):
        raise ConfigError(f"{dataset.name} is no classification of single tensors; attack it on this machine instead.")
    folder.mkdir(parents=True, exist_ok=True)
    first = cells[0]
    written = [_pack_records(folder, first, dataset)] if records else []
    listed = folder / CELLS_FILE
    names = {cell.name for cell in cells}
    kept = [cell for cell in read_cells(folder) if cell.name not in names] if listed.is_file() else []
    listed.write_text(json.dumps({"cells": [cell.to_json() for cell in (*kept, *cells)]}, indent=1) + "\n", "utf-8")
    return [*written, listed]


def _pack_records(folder: Path, first: AttackCell, dataset: Dataset) -> Path:
    pool = take_pool_records(dataset, first.settings, first.size, first.seed)
    test = dataset.test_records.take(torch.arange(min(TEST_RECORDS, len(dataset.test_records))))
    data = folder / f"{Path(first.settings.data.source).stem}.npz"
    np.savez_compressed(
        data,
        x=pool.x.numpy(),
        y=pool.y.numpy(),
        x_test=test.x.numpy(),  # type: ignore[union-attr]
        y_test=test.y.numpy(),
        classes=np.array(dataset.classes),
    )
    return data


def read_cells(folder: Path) -> list[AttackCell]:
    """The cells of a folder that `pack_cells` wrote."""
    try:
        return [cell_from_json(plain) for plain in json.loads((folder / CELLS_FILE).read_text("utf-8"))["cells"]]
    except OSError as error:
        raise RunError(f"{folder / CELLS_FILE} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / CELLS_FILE} is not what --prepare writes: {error}.") from error


def read_packed(folder: Path, cell: AttackCell) -> Dataset:
    """The records of a cell's pool; the whole data set where the folder has none of its records."""
    source = Path(cell.settings.data.source).stem
    path = folder / f"{source}.npz"
    if not path.is_file():
        return load_study_data(cell.settings)
    try:
        with np.load(path) as held:
            parts = [torch.from_numpy(held[name]) for name in ("x", "y", "x_test", "y_test")]
            classes = int(held["classes"])
    except (OSError, KeyError, ValueError) as error:
        raise RunError(f"{path} does not hold the records of {cell.name}: {error}.") from error
    return from_arrays(*parts, name=source, classes=classes, public=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0 when all cells are done, 3 when some are left, 2 for wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m fulcrum.analysis.attacks.worker", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="folder that `fulcrum attack membership --prepare` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the scores, one file per cell")
    parser.add_argument("--cells", default="", help="names of cells, separated by commas; default: all")
    parser.add_argument("--shard", default="0/1", help="i/n: only every n-th cell, from the i-th on")
    parser.add_argument("--stack", type=int, default=64, help="the most federations in one tensor program")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--rows", type=int, default=0, help="the most examples in one piece; 0: by free memory")
    parser.add_argument("--precision", default="", help="float32, tf32 or bf16; default: that of each cell")
    parser.add_argument(
        "--lrs", default="", help="learning rates to choose from per cell, on records outside of its pool"
    )
    parser.add_argument("--plain-lrs", default="", help="the same for cells without privacy; default: --lrs")
    parser.add_argument("--commit", default="", help="of the source, where no git tells it")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop cleanly before this time is up; 0: no limit")
    words = parser.parse_args(argv)
    try:
        words.command = describe_command("fulcrum.analysis.attacks.worker", argv)
        return _run(words)
    except FulcrumError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _set_lr(
    cell: AttackCell, dataset: Dataset, rates: str, words: argparse.Namespace
) -> tuple[AttackCell, dict[str, float]]:
    """The cell with the best of the rates, and the accuracy of each; found once, and kept beside the scores."""
    kept = words.out / f"{cell.name}.lr.json"
    if kept.is_file():
        held = json.loads(kept.read_text("utf-8"))
        best, tried = float(held["lr"]), dict(held["tried"])
    else:
        try:
            numbers = [float(rate) for rate in rates.split(",")]
        except ValueError:
            raise ConfigError(f"--lrs {rates} is not a list of numbers; write for example 0.3,1,3.") from None
        best, tried = choose_lr(cell, dataset, numbers, words.device)
        words.out.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"lr": best, "tried": tried}) + "\n", "utf-8")
    print(f"{cell.name}: lr {best:g} of {tried}", file=sys.stderr, flush=True)
    return replace(cell, settings=cell.settings.replace(train={"lr": best})), tried


def _run(words: argparse.Namespace) -> int:
    clock, shard = TimeBudget(words.seconds), parse_shard(words.shard)
    cells = read_cells(words.folder)
    wanted = [name for name in words.cells.split(",") if name] or [cell.name for cell in cells]
    unknown = set(wanted) - {cell.name for cell in cells}
    if unknown:
        raise ConfigError(
            f"--cells {min(unknown)} is not in {words.folder}; it has {', '.join(c.name for c in cells)}."
        )
    chosen = [cell for cell in cells if cell.name in wanted][shard.index :: shard.count]
    facts: dict[str, Any] = {**describe_machine(words.device), "backend": "stacked", "date": current_utc_time()}
    facts |= {"commit": words.commit or get_source_commit(), "command": words.command}
    left = 0
    for cell in chosen:
        if words.precision:
            cell = replace(cell, settings=cell.settings.replace(run={"precision": words.precision}))
        path = words.out / f"{cell.name}.npz"
        dataset = read_packed(words.folder, cell)
        rates = words.plain_lrs if cell.epsilon is None and words.plain_lrs else words.lrs
        if rates:
            cell, tried = _set_lr(cell, dataset, rates, words)
            facts = {**facts, "lrs": tried}
        print(f"{cell.name}: {cell.size.shadows} federations of {cell.settings.train.rounds} rounds", file=sys.stderr)
        done = run_cell(
            cell,
            dataset,
            path,
            words.stack,
            words.device,
            out_of_time=lambda took: clock.remaining_seconds <= 1.1 * took,
            facts=facts,
            rows_limit=words.rows,
        )
        have = done.shadows if done else 0
        left += have < cell.size.shadows
        seconds = done.facts["seconds"] if done else 0.0
        scores = {name: round(float(np.nanmean(values)), 4) for name, values in (done.metrics if done else {}).items()}
        print(f"{cell.name}: {have}/{cell.size.shadows} done in {seconds:.1f} s {scores}", file=sys.stderr, flush=True)
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
