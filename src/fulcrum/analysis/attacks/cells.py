"""A cell of an attack's table: one mechanism, attacked by one pool of shadow federations; and its stored scores."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fulcrum.analysis.attacks.pool import BoolArray, IntArray, PoolSize
from fulcrum.errors import RunError
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.settings.schema import Settings
from fulcrum.study.job import settings_from_json

ScoreArray = npt.NDArray[np.float32]
MODEL = "model"
"""The view of whoever has the final model; the other views are the statistics of `release_scores`."""


def name_epsilon(epsilon: float | None) -> str:
    """A cell's epsilon in tables and names: none, 3.61."""
    return "none" if epsilon is None else format_epsilon(epsilon)


@dataclass(frozen=True)
class AttackCell:
    """Settings with their noise calibrated, and the pool that attacks them.

    name: of the cell and of its file. epsilon: the target, None without privacy. accounted: what the noise costs by
    the settings' accountant. settings.privacy.sigma holds the noise: no accountant is needed where a cell runs.
    """

    name: str
    settings: Settings
    size: PoolSize
    epsilon: float | None = None
    accounted: float | None = None
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values; `cell_from_json` reads them back."""
        return dataclasses.asdict(self)


def cell_from_json(plain: Mapping[str, Any]) -> AttackCell:
    """A cell from the values of `AttackCell.to_json`."""
    rest = {name: plain[name] for name in ("name", "epsilon", "accounted", "seed")}
    return AttackCell(settings=settings_from_json(plain["settings"]), size=PoolSize(**plain["size"]), **rest)


@dataclass(frozen=True, eq=False)
class PoolScores:
    """What came back of a pool: S federations, N records.

    coins [S, N], control [N], party [N]: see `ShadowPool`. scores: by view, [S, N] each, larger for members.
    metrics: of the final models on public test data, by name, [S]. facts: seconds, device, versions.
    """

    cell: AttackCell
    party: IntArray
    control: BoolArray
    coins: BoolArray
    scores: Mapping[str, ScoreArray]
    metrics: Mapping[str, ScoreArray] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shadows(self) -> int:
        """Number of federations S."""
        return len(self.coins)


def join_scores(parts: list[PoolScores]) -> PoolScores:
    """Stacks of one pool as one."""
    first = parts[0]

    def rows(values: list[Any]) -> Any:
        return np.concatenate(values)

    return dataclasses.replace(
        first,
        coins=rows([part.coins for part in parts]),
        scores={view: rows([part.scores[view] for part in parts]) for view in first.scores},
        metrics={name: rows([part.metrics[name] for part in parts]) for name in first.metrics},
        facts={**first.facts, "seconds": round(sum(part.facts.get("seconds", 0.0) for part in parts), 3)},
    )


def write_scores(path: Path, scores: PoolScores) -> None:
    """Write the scores into one .npz file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = json.dumps({"cell": scores.cell.to_json(), "facts": dict(scores.facts)})
    arrays: dict[str, Any] = {
        **{f"score:{view}": values for view, values in scores.scores.items()},
        **{f"metric:{name}": values for name, values in scores.metrics.items()},
        "party": scores.party,
        "control": scores.control,
        "coins": scores.coins,
        "about": np.array(about),
    }
    draft = path.with_suffix(".part.npz")
    np.savez_compressed(draft, **arrays)
    os.replace(draft, path)


def read_scores(path: Path) -> PoolScores:
    """The scores of a file that `write_scores` wrote."""
    try:
        with np.load(path, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
        about = json.loads(str(arrays["about"]))
        return PoolScores(
            cell=cell_from_json(about["cell"]),
            party=arrays["party"],
            control=arrays["control"],
            coins=arrays["coins"],
            scores={name[6:]: value for name, value in arrays.items() if name.startswith("score:")},
            metrics={name[7:]: value for name, value in arrays.items() if name.startswith("metric:")},
            facts=about["facts"],
        )
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} does not hold the scores of an attack: {error}.") from error
