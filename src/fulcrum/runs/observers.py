"""Observers of a run in progress. Write your own in a few lines; see docs/own-observer.md.

    class Printer(Observer):
        def round(self, result):
            print(result.round, result.metrics, result.epsilon)

    fulcrum.train(data="digits", observers=[Printer()])

The command line's progress bar, metrics.jsonl with the checkpoints, and users' own observers all use this interface.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulcrum.errors import ConfigError, RunError
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.plan import Plan
from fulcrum.runs import folder as record
from fulcrum.runs.binding import HEAD_FILE, head_to_json, identify_file
from fulcrum.runs.folder import RunFolder
from fulcrum.settings.registry import Registry
from fulcrum.settings.schema import Settings
from fulcrum.training.snapshot import Snapshot
from fulcrum.types import RoundResult

if TYPE_CHECKING:
    from fulcrum.runs.result import Result

RoundCallback = Callable[[RoundResult], None]


@dataclass(frozen=True)
class RunInfo:
    """The run that starts or resumes. id: its name in ledgers. folder: None where nothing is stored.

    score: the name of the run's main metric. notes: warnings about a run that goes on, such as rounds that are paid a
    second time. public: whether everybody may see the training records.
    """

    id: str
    settings: Settings
    folder: Path | None
    plan: Plan
    score: str = ""
    notes: tuple[str, ...] = ()
    public: bool = False

    @property
    def parties(self) -> tuple[str, ...]:
        """The names of the parties, in the order of their numbers."""
        return tuple(map(self.plan.name, range(self.plan.parties)))


class Observer:
    """Observes a run. Override what you need; every method does nothing by default.

    An observer gets released values only, so it costs no privacy. An observer that raises stops the run like Ctrl-C:
    nothing is lost, and the run can be resumed.
    """

    def started(self, run: RunInfo) -> None:
        """Called before the first round, also when an interrupted run is resumed."""

    def snapshot(self, snapshot: Snapshot) -> None:
        """Called after each round, before `round`, with the state from which the run can be resumed."""

    def round(self, result: RoundResult) -> None:
        """Called after each round, when it is paid and settled."""

    def ended(self, result: Result | None) -> None:
        """Called at the end, once per `started`. None: the run was interrupted (Ctrl-C, error) and can be resumed."""


# --- built-in observers -----------------------------------------------------------------------


@dataclass(frozen=True)
class CallbackObserver(Observer):
    """`on_round=f`: a function as an observer. Its exceptions end the run unchanged."""

    function: RoundCallback

    def round(self, result: RoundResult) -> None:
        """Call the function."""
        self.function(result)


@dataclass
class RunRecorder(Observer):
    """Keeps the lines of metrics.jsonl, and in a folder the file itself and the checkpoints.

    lines: of the rounds before `latest`, the snapshot from which the run resumes. checkpoint_every: rounds between two
    checkpoints; the last round always has one. ledger: the run's; the folder keeps its head with each checkpoint, and
    the run stops if its file is removed or replaced meanwhile.
    """

    folder: RunFolder | None
    checkpoint_every: int
    rounds: int
    latest: Snapshot | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    ledger: Ledger | None = None

    def __post_init__(self) -> None:
        self._saved = self.latest.round if self.latest else 0
        self._next: Snapshot | None = None
        self._file = identify_file(self.ledger.path) if self.ledger and self.folder else None

    def snapshot(self, snapshot: Snapshot) -> None:
        """Kept until the round's line is written."""
        self._next = snapshot

    def round(self, result: RoundResult) -> None:
        """Append the round's line, then write a checkpoint if one is due.

        In this order, since a resumed run can drop lines after its checkpoint but cannot restore missing ones.
        """
        line = record.to_json_value(record.make_metrics_line(result))
        self.lines.append(line)
        if self.folder:
            self.folder.append_metrics_line(line)
        self.latest = self._next
        if self.ledger and self._file and identify_file(self.ledger.path) != self._file:
            raise RunError(
                f"ledger {self.ledger.path} was removed or replaced while the run went on; bring the file back: it "
                "alone says what was spent."
            )
        if result.round % self.checkpoint_every == 0 or result.round == self.rounds:
            self._write_checkpoint()

    def ended(self, result: Result | None) -> None:
        """Write the last checkpoint, also where the run was interrupted."""
        self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        if self.folder and self.latest and self.latest.round > self._saved:
            self.folder.write_checkpoint(self.latest)
            self._saved = self.latest.round
            if self.ledger:
                head = head_to_json(self.ledger.head())
                self.folder.write_json(HEAD_FILE, {"round": self.latest.round, **head})


class ProgressLines(Observer):
    """Prints one line per evaluated round to stderr, for log files; `--observe lines`."""

    def round(self, result: RoundResult) -> None:
        """Print the round's number, its metrics, C and epsilon."""
        if result.metrics:
            metrics = "  ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
            C = f"C {record.compute_total_C(result.C):.4g}"
            epsilon = f"epsilon {format_epsilon(result.epsilon)}"
            print(f"round {result.round}/{result.rounds}  {metrics}  {C}  {epsilon}", file=sys.stderr)


# --- observers by name ------------------------------------------------------------------------

OBSERVERS: Registry[Observer | Callable[[], Observer]] = Registry(
    "--observe", noun="observer", entry_points="fulcrum.observers"
)
"""Observers, or functions and classes that make one, by name. Packages add theirs under `fulcrum.observers`."""
OBSERVERS.add("lines", ProgressLines)


def find_observer(given: str | Observer) -> Observer:
    """The given observer, or the one of that name; a function or class of that name is called without arguments."""
    if isinstance(given, Observer):
        return given
    found = OBSERVERS.find(given)
    made = found if isinstance(found, Observer) else found() if callable(found) else found
    if not isinstance(made, Observer):
        raise ConfigError(
            f"--observe = {given!r} gives a {type(made).__name__}; it must be a fulcrum.Observer, or make one without "
            "arguments."
        )
    return made


# --- calling them -----------------------------------------------------------------------------


class ObserverList:
    """All observers of a run, called in order: the recorder first, then the users' own."""

    def __init__(self, recorder: RunRecorder, others: Sequence[Observer], on_round: RoundCallback | None) -> None:
        own = [CallbackObserver(on_round)] if on_round else []
        self.recorder = recorder
        self._all: list[Observer] = [recorder, *own, *others]
        self._started: list[Observer] = []

    def started(self, run: RunInfo) -> None:
        """The run begins."""
        for observer in self._all:
            with self._name_observer_errors(observer, "started"):
                observer.started(run)
            self._started.append(observer)

    def round(self, result: RoundResult, snapshot: Snapshot) -> None:
        """A round is done: first write it to disk, then call the other observers."""
        for observer in self._all:
            with self._name_observer_errors(observer, "snapshot"):
                observer.snapshot(snapshot)
            with self._name_observer_errors(observer, "round"):
                observer.round(result)

    def ended(self, result: Result) -> None:
        """The run has ended normally. Call every observer, then raise the first failure."""
        failures = self._notify_ended(result)
        if failures:
            raise failures[0]

    def notify_interrupted(self) -> None:
        """The run stops early. Observers' exceptions are dropped here, so that the cause of the stop is raised."""
        self._notify_ended(None)

    def _notify_ended(self, result: Result | None) -> list[Exception]:
        failures: list[Exception] = []
        while self._started:
            observer = self._started.pop(0)
            try:
                with self._name_observer_errors(observer, "ended"):
                    observer.ended(result)
            except Exception as error:
                failures.append(error)
        return failures

    @contextlib.contextmanager
    def _name_observer_errors(self, observer: Observer, method: str) -> Iterator[None]:
        """Translate an exception of a user's observer to one sentence that names the observer."""
        try:
            yield
        except Exception as error:
            if isinstance(observer, RunRecorder | CallbackObserver):
                raise
            words = " ".join(str(error).split())
            kind = type(error).__name__ + (f": {words}" if words else "")
            where = f"{type(observer).__module__}.{type(observer).__qualname__}"
            folder = f" in {self.recorder.folder.path}" if self.recorder.folder else ""
            rest = "is complete" if method == "ended" else "stopped" + (" and can be continued" if folder else "")
            raise RunError(f"observer {where} failed in {method} ({kind}); the run{folder} {rest}.") from error
