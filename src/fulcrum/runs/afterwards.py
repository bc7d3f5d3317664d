"""What is done with a trained model: scores on public records, and predictions."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulcrum.data import Dataset, compute_features, from_arrays
from fulcrum.data import load as load_data
from fulcrum.data.arrays import check_inputs
from fulcrum.data.records import ModelInputs, get_input_shape, select_rows
from fulcrum.data.tasks import Task, merge_metric_sums
from fulcrum.errors import DataError, RunError
from fulcrum.models.build import is_built_in
from fulcrum.runs import folder as record
from fulcrum.runs.stored_model import TrainedModel, read_task_settings
from fulcrum.types import mean_over_parties

BATCH = 250
"""Examples per pass."""


def load_test_records(trained: TrainedModel, source: str = "", folder: str = "") -> Dataset:
    """The public test records of a source, as the model takes them; source "": that of the run.

    The training records of the run are not needed.
    """
    settings = trained.settings
    if (trained.folder / "schema.toml").is_file():
        return load_test_table(trained, source or settings.table.test)
    given = {name: getattr(settings, name) for name in ("table", "images") if hasattr(settings, name)}
    where = (source or settings.data.source, folder or settings.data.dir)
    data = load_data(*where, task=choose_task(trained), need=("test",), **given)
    data = dataclasses.replace(data, train=None)
    data.test_records  # noqa: B018  a DataError where there are none
    data = compute_features(data, settings.data, torch.device("cpu"))
    data = data.with_float_inputs() if is_built_in(settings.model) else data
    check_shapes(trained, data.test_records.x, data.name)
    return data


def load_test_table(trained: TrainedModel, source: str) -> Dataset:
    """The rows of a table as public test records, by the schema of the run."""
    if not source:
        raise DataError("the run had no public table (table.test); name one with --data, whose rows everybody may see.")
    schema = read_schema(trained.folder)
    rows = Path(source)
    if not rows.is_file():
        raise DataError(f"--data {source}: there is no such file.")
    x, y = schema.encode(rows), schema.encode_target(rows)
    data = from_arrays(x_test=x, y_test=y, task=choose_task(trained), name=rows.name, public=True)
    check_shapes(trained, data.test_records.x, data.name)
    return data


def choose_task(trained: TrainedModel) -> Any:
    """The task settings of the run, with its number of classes declared."""
    told = trained.facts["task"]["settings"]
    return trained.settings.task if told is None else read_task_settings(told)


def check_shapes(trained: TrainedModel, x: ModelInputs, name: str) -> None:
    """DataError where records do not have the shape of the model's inputs."""
    seen = get_input_shape(x)
    if seen != trained.inputs:
        raise DataError(f"{name} has records of shape {seen}, and the model takes {trained.inputs}.")


@torch.no_grad()
def score_model(trained: TrainedModel, data: Dataset) -> dict[str, Any]:
    """The task's metrics on public test records: `metrics`, and by party where the records name their party."""
    test, task = data.test_records, data.task
    if task.outputs != trained.facts["task"]["outputs"]:
        raise DataError(
            f"{data.name} has {task.outputs} outputs for the task {task.name!r}, and the model has "
            f"{trained.facts['task']['outputs']}; declare task.classes as in training."
        )
    parties = {} if test.party is None else dict(enumerate(data.party_names))
    groups = {name: torch.nonzero(test.party == k).flatten() for k, name in parties.items()}  # type: ignore[arg-type]
    found = {name: _score_rows(trained, task, test.x, test.y, rows) for name, rows in groups.items() if len(rows)}
    summary: dict[str, Any] = {
        "metrics": _score_rows(trained, task, test.x, test.y, torch.arange(len(test))),
        "records": len(test),
        "score": task.score,
        "higher_is_better": task.higher_is_better,
        "sha256": trained.sha256,
    }
    if found:
        summary |= {"party_metrics": found, "mean_over_parties": mean_over_parties(found)}
    return summary


def _score_rows(trained: TrainedModel, task: Task, x: ModelInputs, y: Tensor, rows: Tensor) -> dict[str, float]:
    sums: Mapping[str, Tensor] | None = None
    for part in rows.split(BATCH):
        sums = merge_metric_sums(sums, task.sums(trained.outputs(select_rows(x, part)), y[part]))
    return task.results(sums or {})


# --- predictions ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Predictions in the targets' own units [n, ...], and probabilities [n, k] with their names where there are any.

    words: each prediction in the words of a table's schema.
    """

    values: Tensor
    chances: Tensor | None = None
    names: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def to_columns(self) -> dict[str, Any]:
        """Columns of a table, by name."""
        flat = self.values if self.values.dim() > 1 else self.values[:, None]
        names = ["prediction"] if self.values.dim() == 1 else [f"prediction_{k}" for k in range(flat.shape[1])]
        columns: dict[str, Any] = {name: flat[:, k].numpy() for k, name in enumerate(names)}
        if self.words and self.values.dim() == 1:
            columns["prediction"] = list(self.words)
        if self.chances is not None:
            columns |= {name: self.chances[:, k].numpy() for k, name in enumerate(self.names)}
        return columns


def predict(trained: TrainedModel, x: ModelInputs) -> Predictions:
    """Predictions for records x, in the targets' own units: classes, labels, numbers or tokens.

    Where the run was trained on a table, classes have the names of its schema.
    """
    outputs, task, schema = trained.outputs(x), trained.task, read_schema(trained.folder)
    found = _predict_values(outputs, task)
    if schema is None or task is None:
        return found
    return dataclasses.replace(found, words=tuple(str(each) for each in schema.decode_target(found.values)))


def read_schema(folder: Path) -> Any:
    """The schema of the table that a run was trained on; None where there was none."""
    file = folder / "schema.toml"
    return importlib.import_module("fulcrum.data.table").Schema.read(file) if file.is_file() else None


def _predict_values(outputs: Tensor, task: Task | None) -> Predictions:
    if task is None:
        return Predictions(outputs)
    values = task.predict(outputs)
    count = task.outputs
    if task.name == "classification":
        return Predictions(values, outputs.softmax(dim=-1), tuple(f"probability_{k}" for k in range(count)))
    if task.name == "binary":
        return Predictions(values, torch.sigmoid(outputs), ("probability",))
    if task.name == "multilabel":
        return Predictions(values, torch.sigmoid(outputs), tuple(f"probability_{k}" for k in range(count)))
    return Predictions(values)


def load_inputs(trained: TrainedModel, source: str, folder: str = "") -> ModelInputs:
    """Records to predict: x of an .npz file (x_test where there is no x; several inputs as x.NAME), a table with the
    columns of the run's schema, or the test records of a source.
    """
    path, schema = Path(source), read_schema(trained.folder)
    if schema is not None and path.is_file() and path.suffix != ".npz":
        encoded: ModelInputs = schema.encode(path)
        check_shapes(trained, encoded, path.name)
        return encoded
    if path.suffix == ".npz" and path.is_file():
        with np.load(path, allow_pickle=False) as arrays:
            found = read_input_arrays({name: arrays[name] for name in arrays.files}, path.name)
        data = found
    else:
        data = load_test_records(trained, source, folder).test_records.x
    data = to_model_inputs(trained, data)
    check_shapes(trained, data, path.name)
    return data


def read_input_arrays(arrays: Mapping[str, Any], name: str) -> ModelInputs:
    """Inputs among the arrays of a file: x or x_test; or x.NAME of each."""
    for word in ("x", "x_test"):
        if word in arrays:
            return check_inputs(word, arrays[word], [])
        parts = {key.removeprefix(f"{word}."): value for key, value in arrays.items() if key.startswith(f"{word}.")}
        if parts:
            return check_inputs(word, parts, [])
    raise DataError(f"{name} holds no x; save the records to predict as an array named x.")


def to_model_inputs(trained: TrainedModel, x: ModelInputs) -> ModelInputs:
    """Records with the run's fixed features, as the model takes them."""
    settings = trained.settings.data
    if settings.features == "none" or not isinstance(x, Tensor) or get_input_shape(x) == trained.inputs:
        return x
    made = from_arrays(x, torch.arange(len(x)) % 2, name="records", classes=2, public=True)
    features: ModelInputs = compute_features(made, settings, torch.device("cpu")).records.x
    return features


def write_predictions(found: Predictions, out: Path | None) -> str:
    """Write predictions to a .csv or .npz file, or return them as the text of a .csv."""
    columns = found.to_columns()
    if out is not None and out.suffix == ".npz":
        named = {"prediction": found.values.numpy()}
        named |= {} if found.chances is None else {"probability": found.chances.numpy()}
        held = io.BytesIO()
        np.savez_compressed(held, **named)  # type: ignore[arg-type]
        record.write_file_atomically(out, held.getvalue())
        return ""
    if out is not None and out.suffix != ".csv":
        raise RunError(f"--out {out} must end in .csv or .npz.")
    text = _to_csv(list(columns), list(columns.values()))
    if out is None:
        return text
    record.write_file_atomically(out, text.encode())
    return ""


def _to_csv(names: Sequence[str], columns: Sequence[Any]) -> str:
    held = io.StringIO()
    writer = csv.writer(held, lineterminator="\n")
    writer.writerow(names)
    for row in zip(*columns, strict=True):
        writer.writerow([f"{value:.6g}" if isinstance(value, np.floating) else value for value in row])
    return held.getvalue()
