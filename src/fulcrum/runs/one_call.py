"""`train` and `rounds`: from names, as on the command line, to a result in one call."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fulcrum.data import Dataset
from fulcrum.data.sources.objects import name_object, read_object
from fulcrum.data.table import Schema
from fulcrum.errors import ConfigError, ModelError, UserNote
from fulcrum.runs.binding import register_run
from fulcrum.runs.execution import execute, open_run_ledger
from fulcrum.runs.observers import Observer, RoundCallback
from fulcrum.runs.preparation import prepare
from fulcrum.runs.result import Result
from fulcrum.settings.schema import Settings
from fulcrum.training.loop import federate
from fulcrum.types import RoundResult


def train(
    data: Any = None,
    model: str | nn.Module | Mapping[str, Any] | None = None,
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

    data: a source's name or path; a `Dataset` (`fulcrum.data.from_arrays` makes one); a pandas, polars or Arrow
    table, with schema= (a file, or a `fulcrum.data.Schema`); a torch Dataset; a generator of records; or {"train":
    ..., "test": ...} with two of these. model: a name, a dict of [model] settings, or an nn.Module whose weights
    are the public start. Other names are those of the command line and the settings file: method, epsilon, delta,
    parties, rounds, lr, kappa, or whole sections such as train={"server": "adam"}. settings: ready-made ones instead
    of names. out: a new folder for the run. on_round is called with each RoundResult; observers observe the run
    (`fulcrum.Observer`).
    """
    federation = prepare(*resolve_keywords(data, model, settings, names))
    _warn_of_own_notes(federation.problem.dataset)
    return execute(federation, out, on_round, observers=observers)


def rounds(
    data: Any = None,
    model: str | nn.Module | Mapping[str, Any] | None = None,
    *,
    settings: Settings | None = None,
    **names: Any,
) -> Iterator[RoundResult]:
    """Like `train`, one round at a time, for notebooks. Nothing is stored; you can stop at any round.

    for r in fulcrum.rounds(data="digits", epsilon=4.0):
        print(r.round, r.metrics, r.C, r.epsilon)
    """
    federation = prepare(*resolve_keywords(data, model, settings, names))
    _warn_of_own_notes(federation.problem.dataset)
    run = uuid.uuid4().hex
    with open_run_ledger(federation.settings) as ledger:
        register_run(federation, ledger, run)
        for result, _ in federate(federation, ledger, run):
            yield result


def _warn_of_own_notes(dataset: Dataset) -> None:
    """What follows from private values is told to the caller alone: a warning, which nothing stores."""
    for note in dataset.own_notes:
        warnings.warn(f"only you see this: {note}", UserNote, stacklevel=3)


def resolve_keywords(
    data: Any,
    model: str | nn.Module | Mapping[str, Any] | None,
    settings: Settings | None,
    names: dict[str, Any],
) -> tuple[Settings, Dataset | None, nn.Module | None]:
    """Settings, and the data and model that were given as objects."""
    if settings is not None and names:
        raise ConfigError(f"settings and {', '.join(names)} are both given; put the names into the settings.")
    words = dict(names)
    dataset = data if isinstance(data, Dataset) else None
    other = None if data is None or isinstance(data, str | Dataset) else data
    if isinstance(words.get("schema"), Schema):
        words["table"] = {**words.pop("schema").to_mapping(), **words.get("table", {})}
    module = model if isinstance(model, nn.Module) else None
    if data is not None:
        words["data"] = dataset.name if dataset else data if other is None else name_object(other)
    if model is not None and module is None and not isinstance(model, str | Mapping):
        what = (
            f"the class {model.__name__}; make one: {model.__name__}(...)"
            if isinstance(model, type)
            else str(type(model))
        )
        raise ModelError(f"model is {what}; hand over a torch.nn.Module, or the name of a model.")
    if model is not None:
        words["model"] = model if module is None else type(module).__name__
    if settings is None:
        from fulcrum.settings import files as settings_file

        settings = settings_file.settings_from_keywords(words)
    if other is not None:
        dataset = read_object(other, settings.table, settings.task, settings.data.public)
        settings = settings.replace(data={"source": dataset.name})
    return settings, dataset, module
