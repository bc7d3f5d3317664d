"""What people call from Python: `train`, `rounds`, `resume`; and the steps they are made of.

one_call.py     `train` and `rounds`: from names to a result in one call
preparation.py  settings -> a federation: everything that can go wrong before training
execution.py    a federation played to its end, kept in a folder, continued from one
observers.py    what watches a run: progress, metrics.jsonl with checkpoints, users' own
active_run.py   a run that is being played, and its privacy statement as things stand
result.py       what a finished run hands back, and its summary.json

Settings files are read where they are needed, so that ready-made `Settings` train without pydantic.
"""

from __future__ import annotations

from fulcrum.runs.execution import execute, resume, resume_prepared
from fulcrum.runs.observers import OBSERVERS, Observer, RoundCallback, RunInfo, find_observer
from fulcrum.runs.one_call import rounds, train
from fulcrum.runs.preparation import collect_ledger_warnings, find_device, prepare
from fulcrum.runs.result import Result

__all__ = [
    "OBSERVERS",
    "Observer",
    "Result",
    "RoundCallback",
    "RunInfo",
    "collect_ledger_warnings",
    "execute",
    "find_device",
    "find_observer",
    "prepare",
    "resume",
    "resume_prepared",
    "rounds",
    "train",
]
