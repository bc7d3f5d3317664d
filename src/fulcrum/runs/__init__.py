"""The Python interface: `train`, `rounds`, `resume`; and their steps.

one_call.py     `train` and `rounds`: from names to a result in one call
preparation.py  settings -> a federation: everything that can go wrong before training
execution.py    train a federation to its end, store it in a folder, resume from a folder
forecast/       before a run: layers, seconds and bytes
advice.py       a whole settings file for a budget, from rehearsals
binding.py      what ties a folder, its settings and its ledger together, and the checks before a run goes on
observers.py    observers of a run: progress, metrics.jsonl with checkpoints, users' own
trackers/       observers that send a run to TensorBoard, MLflow or Weights & Biases
notebook.py     a result in a notebook: what it shows of itself, its rounds as a data frame
active_run.py   a run in progress, and its current privacy statement
result.py       the result of a finished run, and its summary.json
stored_model.py the trained model in a run's folder, and back: `load`
model_card.py   the model card, and the code that loads a model without Fulcrum
export.py       the model for other software: torch, safetensors, torchscript, program, onnx, transformers

Settings files are read on demand, so that ready-made `Settings` train without pydantic.
"""

from __future__ import annotations

from fulcrum.runs.advice import Advice, advise
from fulcrum.runs.execution import execute, resume, resume_prepared
from fulcrum.runs.forecast import Forecast, make_forecast, plan
from fulcrum.runs.observers import OBSERVERS, Observer, RoundCallback, RunInfo, find_observer
from fulcrum.runs.one_call import rounds, train
from fulcrum.runs.preparation import (
    collect_ledger_warnings,
    derive_federation,
    find_device,
    list_ledger_balances,
    list_unit_digests,
    prepare,
    prepare_unrehearsed,
)
from fulcrum.runs.rehearsal import apply_rehearsal, describe_coming_rehearsal
from fulcrum.runs.result import Result
from fulcrum.runs.stored_model import TrainedModel, load, load_trained
from fulcrum.runs.trackers import make_tensorboard as _register_trackers  # noqa: F401  # adds them to OBSERVERS

__all__ = [
    "OBSERVERS",
    "Advice",
    "Forecast",
    "Observer",
    "Result",
    "RoundCallback",
    "RunInfo",
    "TrainedModel",
    "advise",
    "apply_rehearsal",
    "collect_ledger_warnings",
    "derive_federation",
    "describe_coming_rehearsal",
    "execute",
    "find_device",
    "find_observer",
    "list_ledger_balances",
    "list_unit_digests",
    "load",
    "load_trained",
    "make_forecast",
    "plan",
    "prepare",
    "prepare_unrehearsed",
    "resume",
    "resume_prepared",
    "rounds",
    "train",
]
