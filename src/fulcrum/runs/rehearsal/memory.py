"""Answers of rehearsals by a digest of their facts: shipped with the package, or kept in the user's cache."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

from torch import nn

from fulcrum.data import Dataset
from fulcrum.data.sources.public.registry import user_cache_folder
from fulcrum.runs.rehearsal.choice import Rehearsed, rehearse, rehearsed_from_json
from fulcrum.runs.rehearsal.effort import CHECK_FINALISTS, CHECK_TASKS, count_runs
from fulcrum.runs.rehearsal.facts import RehearsalFacts
from fulcrum.runs.rehearsal.stage import RehearsalLog

ProgressFn = Callable[[float], None]
"""Called with the part that is done, 0 to 1."""
SHIPPED_FILE = Path(__file__).parent / "shipped.json"
"""Answers for common models and budgets, by digest."""


SCORES_FOLDER = "scores"
"""Below the answers: the scores of rehearsals that have ended, by the same names."""


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
    """Keep an answer; a cache that cannot be written is no reason to stop.

    The scores that it was chosen by move to `SCORES_FOLDER`, for those who want to know what another rule would choose.
    """
    _write(f"{answer.digest}.json", json.dumps(answer.to_json()))
    folder, name = get_memory_folder(), name_scores_file(answer.digest)
    with contextlib.suppress(OSError):
        (folder / SCORES_FOLDER).mkdir(exist_ok=True)
        (folder / name).replace(folder / SCORES_FOLDER / name)


def forget(digest: str) -> None:
    """Drop what the user's cache holds of some facts; shipped answers stay."""
    scores = name_scores_file(digest)
    for name in (f"{digest}.json", scores, f"{SCORES_FOLDER}/{scores}"):
        _remove(name)


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        (get_memory_folder() / name).unlink(missing_ok=True)


def _write(name: str, text: str) -> None:
    folder = get_memory_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{name}.{os.getpid()}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)
    except OSError:
        return


def recall_or_rehearse(
    facts: RehearsalFacts,
    model: nn.Module | None = None,
    public: Dataset | None = None,
    tell: ProgressFn | None = None,
) -> Rehearsed:
    """The known answer for these facts, or a new rehearsal, which is kept. public: records in place of made-up ones.

    tell: called with the part that is done, 0 to 1. A rehearsal that is cut off goes on from there the next time.
    """
    known = recall(facts.digest())
    if known is not None:
        return known
    answer = rehearse(facts, model, public, open_log(facts, tell))
    remember(answer)
    return answer


def name_scores_file(digest: str) -> str:
    """Name of the file with the scores of a rehearsal that has not ended."""
    return f"{digest}.scores.json"


def open_log(facts: RehearsalFacts, tell: ProgressFn | None = None) -> RehearsalLog:
    """The scores of an earlier rehearsal of these facts that was cut off; they are kept after each task."""
    effort = dataclasses.replace(facts.effort, final=facts.final_tasks)
    total = count_runs(effort) + CHECK_FINALISTS * CHECK_TASKS * facts.has_check
    name, done = name_scores_file(facts.digest()), 0
    try:
        scores = json.loads((get_memory_folder() / name).read_text(encoding="utf-8"))
        log = RehearsalLog({str(key): float(value) for key, value in scores.items()})
    except (OSError, ValueError, TypeError, AttributeError):  # missing or damaged: from the start
        log = RehearsalLog()

    def on_task(count: int) -> None:
        nonlocal done
        done += count
        _write(name, json.dumps(log.scores))
        if tell is not None:
            tell(min(done / total, 1.0))

    log.on_task = on_task
    return log
