"""`train` and `rounds`: from names, as on the command line, to a result in one call."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fulcrum.data import Dataset
from fulcrum.errors import ConfigError
from fulcrum.runs.binding import register_run
from fulcrum.runs.execution import execute, open_run_ledger
from fulcrum.runs.observers import Observer, RoundCallback
from fulcrum.runs.preparation import prepare
from fulcrum.runs.result import Result
from fulcrum.settings.schema import Settings
from fulcrum.training.loop import federate
from fulcrum.types import RoundResult


def train(
    data: str | Dataset | None = None,
    model: str | nn.Module | None = None,
    *,
    settings: Settings | None = None,
    out: Path | str | None = None,
    on_round: RoundCallback | None = None,
    observers: Sequence[str | Observer] = (),
    **names: Any,
) -> Result:
    """Train one model over several parties, privately.

        result = fulcrum.train(data="mnist", epsilon=1.64, parties=10, rounds=200)
        result.metrics, result.epsilon, result.model

    data: a source's name, or a `Dataset` (`fulcrum.data.from_arrays` makes one). model: a name, or an
    nn.Module whose weights are the public start. Other names are those of the command line and the
    settings file: method, epsilon, delta, parties, rounds, lr, kappa, or whole sections such as
    train={"server": "adam"}. settings: ready-made ones instead of names. out: a new folder for
    the run. on_round is called with each RoundResult; observers observe the run (`fulcrum.Observer`).
    """
    federation = prepare(*resolve_keywords(data, model, settings, names))
    return execute(federation, out, on_round, observers=observers)


def rounds(
    data: str | Dataset | None = None,
    model: str | nn.Module | None = None,
    *,
    settings: Settings | None = None,
    **names: Any,
) -> Iterator[RoundResult]:
    """Like `train`, one round at a time, for notebooks. Nothing is stored; you can stop at any round.

    for r in fulcrum.rounds(data="digits", epsilon=4.0):
        print(r.round, r.metrics, r.C, r.epsilon)
    """
    federation = prepare(*resolve_keywords(data, model, settings, names))
    run = uuid.uuid4().hex
    with open_run_ledger(federation.settings) as ledger:
        register_run(federation, ledger, run)
        for result, _ in federate(federation, ledger, run):
            yield result


def resolve_keywords(
    data: str | Dataset | None, model: str | nn.Module | None, settings: Settings | None, names: dict[str, Any]
) -> tuple[Settings, Dataset | None, nn.Module | None]:
    """Settings, and the data and model that were given as objects."""
    if settings is not None and names:
        raise ConfigError(f"settings and {', '.join(names)} are both given; put the names into the settings.")
    words = dict(names)
    dataset = data if isinstance(data, Dataset) else None
    module = model if isinstance(model, nn.Module) else None
    if data is not None:
        words["data"] = dataset.name if dataset else data
    if model is not None:
        words["model"] = type(module).__name__ if module else model
    if settings is None:
        from fulcrum.settings import files as settings_file

        settings = settings_file.settings_from_keywords(words)
    return settings, dataset, module
