"""Commands of Fulcrum in forked children, and faults that strike them at a chosen point.

One process imports everything once and forks a child per command: a child starts in milliseconds, is a process of its
own for the kernel, and `kill -9` ends it as it would end any other. A fault is armed in the child before its command
begins. Points are counted in executed lines of Fulcrum's own code, so that a seed names the same point again.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

Arm = Callable[[], None]
"""Called in the child before its command: plants the fault."""

TRACED = ("/fulcrum/runs/", "/fulcrum/privacy/ledger/", "/fulcrum/training/loop", "/fulcrum/flower/")
"""Lines of these files are counted: what writes, and what decides the order of writes."""
NOBODY = 65534
COMMAND_SECONDS = 120.0


@dataclass(frozen=True)
class Ended:
    """How a child ended. code: its exit code, or minus the signal that ended it. said: the end of its stderr."""

    code: int
    said: str
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether kill -9 ended it."""
        return self.code == -signal.SIGKILL

    @property
    def in_words(self) -> bool:
        """Whether it ended well, or with one sentence and no traceback."""
        wrong = ("Traceback" in self.said) or ("internal error" in self.said)
        return self.code in (0, 2, 130) and not wrong


def fork_command(call: Callable[[], int], log: Path, arm: Arm | None = None) -> int:
    """Start `call` in a child whose output goes to `log`; returns the child's process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        gc.freeze()
        opened = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        if arm is not None:
            arm()
        code = call()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.settrace(None)
        import traceback

        traceback.print_exc()
    finally:
        sys.settrace(None)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


def wait_for(child: int, log: Path, kill_after: float | None = None) -> Ended:
    """Wait for a child; kill -9 after so many seconds, or after more than any command needs (code -SIGALRM)."""
    began = time.monotonic()
    hung = False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - began
        if done:
            break
        if (kill_after is not None and seconds > kill_after) or seconds > COMMAND_SECONDS:
            hung = kill_after is None
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.002)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    said = log.read_text(errors="replace") if log.is_file() else ""
    return Ended(-signal.SIGALRM if hung else code, said[-1500:], time.monotonic() - began)


def run_command(call: Callable[[], int], log: Path, arm: Arm | None = None, kill_after: float | None = None) -> Ended:
    """Start a command in a child and wait for it."""
    return wait_for(fork_command(call, log, arm), log, kill_after)


def fulcrum_command(words: Sequence[str]) -> Callable[[], int]:
    """`fulcrum WORDS`, as a function."""

    def call() -> int:
        from fulcrum.cli import main

        return int(main(list(words)) or 0)

    return call


# --- points -------------------------------------------------------------------------------------


def count_lines(when: int, then: Callable[[], None], traced: Sequence[str] = TRACED) -> Arm:
    """Call `then` before line number `when` of the traced files; 0 counts only, into the file of `write_count`."""

    def arm() -> None:
        seen = 0

        def on_line(frame: FrameType, event: str, given: Any) -> Any:
            nonlocal seen
            if event == "line":
                seen += 1
                if seen == when:
                    then()
            return on_line

        def on_call(frame: FrameType, event: str, given: Any) -> Any:
            return on_line if any(part in frame.f_code.co_filename for part in traced) else None

        sys.settrace(on_call)
        COUNTERS.append(lambda: seen)

    return arm


COUNTERS: list[Callable[[], int]] = []
"""How many lines were counted, in the child that counted them."""


def kill_now() -> None:
    """kill -9 of this very process."""
    os.kill(os.getpid(), signal.SIGKILL)


# --- faults -------------------------------------------------------------------------------------


def limit_file_size(size: int) -> Arm:
    """No file grows beyond `size` bytes: a write fails with EFBIG."""

    def arm() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return arm


def limit_ledger_pages(more: int) -> Arm:
    """The ledger finds the disk full after so many further pages."""

    def arm() -> None:
        import sqlite3

        from fulcrum.privacy.ledger import store

        connect = sqlite3.connect

        class Limited:
            Connection, Error = sqlite3.Connection, sqlite3.Error
            DatabaseError, IntegrityError = sqlite3.DatabaseError, sqlite3.IntegrityError
            ProgrammingError, OperationalError = sqlite3.ProgrammingError, sqlite3.OperationalError
            complete_statement = staticmethod(sqlite3.complete_statement)

            @staticmethod
            def connect(*given: Any, **named: Any) -> sqlite3.Connection:
                db = connect(*given, **named)
                (pages,) = db.execute("PRAGMA page_count").fetchone()
                db.execute(f"PRAGMA max_page_count = {pages + more}")
                return db

        store.sqlite3 = Limited  # type: ignore[assignment]

    return arm


def jump_clock(jumps: Sequence[tuple[int, float]]) -> Arm:
    """From the n-th look at the wall clock on it is wrong by so many seconds: (n, seconds), in order."""

    def arm() -> None:
        import datetime

        from fulcrum.runs import folder

        real, looked = time.time, 0

        def wrong() -> float:
            nonlocal looked
            looked += 1
            passed = [seconds for n, seconds in jumps if n <= looked]
            return real() + (passed[-1] if passed else 0.0)

        class Wrong(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
                return datetime.datetime.fromtimestamp(wrong(), tz)

        time.time = wrong
        folder.datetime = SimpleNamespace(datetime=Wrong, UTC=datetime.UTC)  # type: ignore[assignment]

    return arm


def run_out_of_memory(when: int, host: bool) -> Arm:
    """The n-th gradient does not fit into memory: of the device, or of the host."""

    def arm() -> None:
        import torch

        real, seen = torch.Tensor.to, 0

        def to(self: Any, *given: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == when:
                if host:
                    raise MemoryError
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
            return real(self, *given, **named)

        torch.Tensor.to = to  # type: ignore[method-assign]

    return arm


def forbid_writing(folder: Path, when: int) -> Arm:
    """The folder becomes read-only before line `when`. Root may write all the same: the child becomes a plain user."""

    def forbid() -> None:
        for path in (folder, folder / "checkpoints"):
            if path.is_dir():
                path.chmod(0o555)

    def arm() -> None:
        become_nobody()
        count_lines(when, forbid)()

    return arm


def become_nobody() -> None:
    """Give up the rights of root, for which permissions do not count."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


# --- small disks --------------------------------------------------------------------------------

CLONE_NEWNS, MS_PRIVATE, MS_REC, MS_NOSUID = 0x20000, 1 << 18, 1 << 14, 2


def enter_own_mounts() -> bool:
    """Mounts of this process are its own from now on and go with it; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(CLONE_NEWNS) == 0 and libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0


def mount_small_disk(at: Path, size: int) -> bool:
    """A disk of `size` bytes in memory, mounted at a folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.mount(b"tmpfs", str(at).encode(), b"tmpfs", MS_NOSUID, f"size={size},mode=0777".encode()) == 0


def unmount(at: Path) -> None:
    """Remove a mount."""
    ctypes.CDLL(None).umount2(str(at).encode(), 2)


def resize_disk(at: Path, size: int) -> None:
    """Give a small disk another size: somebody freed some space."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount(b"tmpfs", str(at).encode(), b"tmpfs", MS_NOSUID | 32, f"size={size},mode=0777".encode())
