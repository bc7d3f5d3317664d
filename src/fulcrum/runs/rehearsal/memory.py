"""Answers of rehearsals by a digest of their facts: shipped with the package, or kept in the user's cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import nn

from fulcrum.data import Dataset
from fulcrum.data.sources.public.registry import user_cache_folder
from fulcrum.runs.rehearsal.choice import Rehearsed, rehearse, rehearsed_from_json
from fulcrum.runs.rehearsal.facts import RehearsalFacts

SHIPPED_FILE = Path(__file__).parent / "shipped.json"
"""Answers for common models and budgets, by digest."""


def get_memory_folder() -> Path:
    """Folder of the answers: rehearsals/ in the user's cache."""
    return user_cache_folder() / "rehearsals"


def recall(digest: str) -> Rehearsed | None:
    """A known answer, or None."""
    if SHIPPED_FILE.is_file():
        shipped = json.loads(SHIPPED_FILE.read_text(encoding="utf-8"))
        if digest in shipped:
            return rehearsed_from_json(shipped[digest])
    kept = get_memory_folder() / f"{digest}.json"
    try:
        return rehearsed_from_json(json.loads(kept.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: rehearse again
        return None


def remember(answer: Rehearsed) -> None:
    """Keep an answer; a cache that cannot be written is no reason to stop."""
    folder = get_memory_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{answer.digest}.{os.getpid()}.part"
        part.write_text(json.dumps(answer.to_json()), encoding="utf-8")
        part.replace(folder / f"{answer.digest}.json")
    except OSError:
        return


def recall_or_rehearse(
    facts: RehearsalFacts, model: nn.Module | None = None, public: Dataset | None = None
) -> Rehearsed:
    """The known answer for these facts, or a new rehearsal, which is kept. public: records in place of made-up ones."""
    known = recall(facts.digest())
    if known is not None:
        return known
    answer = rehearse(facts, model, public)
    remember(answer)
    return answer
