"""Exit codes, and one sentence for every failure. No traceback unless `--debug` asks for it."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from fulcrum.errors import LONG_WORD, BudgetError, FulcrumError, InputError, UserNote

EXIT_OK, EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
# Some versions of typer include their own copy of click, others import click; both have these classes.
UsageError = typer.BadParameter.__bases__[0]
ClickException = UsageError.__bases__[0]


class RunInterrupted(Exception):
    """Ctrl-C during a run; its message says how to continue."""


class RunStopped(FulcrumError):
    """A run that had begun ended early; what was released before stays released."""


@contextlib.contextmanager
def explain_interruption(folder: Path) -> Iterator[None]:
    """Around a run: Ctrl-C ends it with the command that continues it."""
    try:
        yield
    except BudgetError as error:
        metrics = folder / "metrics.jsonl"
        if metrics.is_file() and metrics.stat().st_size:
            raise RunStopped(str(error)) from error
        raise
    except KeyboardInterrupt:
        if (folder / "run.json").is_file():
            raise RunInterrupted(f"interrupted; continue with: fulcrum resume {shlex.quote(str(folder))}") from None
        raise RunInterrupted("interrupted before the first round; nothing was kept.") from None


def run_guarded(call: Callable[[], Any], words: Sequence[str]) -> int:
    """Call, and turn any result or error into an exit code and at most one sentence on stderr."""
    try:
        with notice_interruption() as interruption, hide_library_warnings("--debug" in words):
            code = call()
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; Python would report it again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in words:
            traceback.print_exc()
        lost = interruption.is_set() and not isinstance(error, (FulcrumError, RunInterrupted, OSError))
        code, sentence = explain_failure(KeyboardInterrupt() if lost else error)
        print(sentence, file=sys.stderr)
        return code
    if code == EXIT_INTERRUPTED:  # some versions of typer turn Ctrl-C into this code, others into Abort
        print("interrupted.", file=sys.stderr)
    return code if isinstance(code, int) else EXIT_OK


LIBRARIES = r"(torch|torchvision|fulcrum|numpy|scipy|sklearn|pandas|pyarrow|transformers|dp_accounting|flwr)(\.|$)"
"""Modules whose warnings speak to programmers. What Fulcrum has to say to users is printed, not warned."""


@contextlib.contextmanager
def hide_library_warnings(shown: bool = False) -> Iterator[None]:
    """Leave warnings of the libraries below out, unless `--debug` or Python's -W asks for them; own code's stay."""
    with warnings.catch_warnings():
        if not shown and not sys.warnoptions:
            warnings.filterwarnings("ignore", module=LIBRARIES)
        warnings.filterwarnings("always", category=UserNote)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, UserNote):
                print(f"warning: {message}", file=sys.stderr)
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


@contextlib.contextmanager
def notice_interruption() -> Iterator[threading.Event]:
    """Remembers that Ctrl-C was pressed: a library that was interrupted may raise another error of its own."""
    noticed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noticed  # signals are the main thread's
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield noticed  # somebody else handles it, or it is ignored, as under nohup
        return

    def interrupt(number: int, frame: Any) -> None:
        noticed.set()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGINT, before)


def explain_failure(error: BaseException) -> tuple[int, str]:
    """Exit code and sentence of a failure; the first matching row."""
    for kind, (code, words) in FAILURE_SENTENCES.items():
        if isinstance(error, kind):
            return (EXIT_WRONG_INPUT if is_disk_full(error.__cause__) else code), words(error)
    if is_disk_full(error):
        return (
            EXIT_WRONG_INPUT,
            "error: the disk is full; free some space, then start again or continue with fulcrum resume.",
        )
    if is_out_of_memory(error):
        return EXIT_WRONG_INPUT, (
            "error: there is not enough memory on the machine or its GPU; free some, take fewer run.workers, a smaller "
            "train.rate or model, or --device cpu, then start again or continue with fulcrum resume."
        )
    if isinstance(error, OSError) and error.strerror is not None:
        where = (
            f"{_to_one_line(error.filename)}: "
            if error.filename is not None
            else "a file could not be read or written: "
        )
        return EXIT_WRONG_INPUT, f"error: {where}{error.strerror}."
    return (
        EXIT_FAILED,
        f"internal error: {type(error).__name__}: {_to_one_line(error)}; run again with --debug to see where.",
    )


def is_disk_full(error: BaseException | None) -> bool:
    """Whether the disk (or the user's share of it) is full, whichever library noticed."""
    return (
        (isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS)
        or getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
        or "No space left on device" in str(error)
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, on the host or on the device, whichever library noticed."""
    kinds = {kind.__name__ for kind in type(error).__mro__}  # torch's own class by name: it may not be imported
    return isinstance(error, MemoryError) or "OutOfMemoryError" in kinds or "can't allocate memory" in str(error)


def _format_error(error: BaseException) -> str:
    return f"error: {error}"


def _format_usage_error(error: Any) -> str:
    """typer's message, with one suggestion instead of its list."""
    near = difflib.get_close_matches(
        getattr(error, "option_name", ""), getattr(error, "possibilities", None) or [], n=1
    )
    if near:
        return f"error: no such option: {error.option_name}; did you mean {near[0]}?"
    said = _to_one_line(error.format_message())
    for theirs, ours in VALUE_TEXTS.items():
        said = said.replace(theirs, ours)
    context = getattr(error, "ctx", None)
    more = "" if context is None or said.endswith("?") else f" (see {context.command_path} --help)"
    return f"error: {said.rstrip('.')}{more}" + ("" if said.endswith("?") else ".")


VALUE_TEXTS = {
    "Input should be a valid number, unable to parse string as a number": "it must be a number",
    "Input should be a valid integer, unable to parse string as an integer": "it must be a whole number",
}
"""What some versions of typer say of a value that is no number, and what we say."""


def _to_one_line(error: object) -> str:
    return LONG_WORD.sub(lambda word: f"{word[0][:80]}[...]", " ".join(str(error).split()))


FAILURE_SENTENCES: dict[type[BaseException], tuple[int, Callable[[Any], str]]] = {
    RunInterrupted: (EXIT_INTERRUPTED, str),
    KeyboardInterrupt: (EXIT_INTERRUPTED, lambda _: "interrupted."),
    typer.Abort: (EXIT_INTERRUPTED, lambda _: "interrupted."),
    UsageError: (EXIT_WRONG_INPUT, _format_usage_error),
    ClickException: (EXIT_WRONG_INPUT, _format_usage_error),
    InputError: (EXIT_WRONG_INPUT, _format_error),
    BudgetError: (EXIT_WRONG_INPUT, _format_error),
    FulcrumError: (EXIT_FAILED, _format_error),
}
