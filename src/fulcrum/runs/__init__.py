"""What people call from Python: `train`, `rounds`, `resume`; and the steps they are made of.

one_call.py   `train` and `rounds`: from names to a result in one call
preparing.py  settings -> a federation: everything that can go wrong before training
running.py    a federation played to its end, kept in a folder, continued from one
underway.py   a run that is being played, and its privacy statement as things stand
results.py    what a finished run hands back, and its summary.json

Settings files are read where they are needed, so that ready-made `Settings` train without pydantic.
"""

from __future__ import annotations

from fulcrum.runs.execution import OnRound, execute, go_on, resume
from fulcrum.runs.one_call import rounds, train
from fulcrum.runs.preparation import find_device, ledger_warnings, prepare
from fulcrum.runs.result import Result

__all__ = [
    "OnRound",
    "Result",
    "execute",
    "find_device",
    "go_on",
    "ledger_warnings",
    "prepare",
    "resume",
    "rounds",
    "train",
]
