"""The rehearsal: what public facts decide about the step is measured on made-up data before anything is spent.

facts.py    the public facts of a run, and the small run that stands for it
stage.py    plays candidates on made-up data, many in one tensor program
choice.py   coarse to fine: which candidates are played, and which one is chosen
apply.py    from the answer to the run's settings
weak.py     where moo is known to be weak without a rehearsal
memory.py   answers kept by a digest of the facts: shipped with the package, and in the user's cache

The rehearsal never sees a record: shapes, types, declared sizes, the model and the settings decide everything.
"""

from __future__ import annotations

from fulcrum.runs.rehearsal.apply import apply_rehearsal, choose_settings, describe_coming_rehearsal, find_refusal
from fulcrum.runs.rehearsal.choice import Rehearsed, rehearse
from fulcrum.runs.rehearsal.facts import RehearsalFacts, read_rehearsal_facts
from fulcrum.runs.rehearsal.memory import recall_or_rehearse
from fulcrum.runs.rehearsal.stage import Candidate
from fulcrum.runs.rehearsal.weak import list_weaknesses

__all__ = [
    "Candidate",
    "RehearsalFacts",
    "Rehearsed",
    "apply_rehearsal",
    "choose_settings",
    "describe_coming_rehearsal",
    "find_refusal",
    "list_weaknesses",
    "read_rehearsal_facts",
    "recall_or_rehearse",
    "rehearse",
]
