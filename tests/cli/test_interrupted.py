"""Ctrl-C is one sentence, from the first moment on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulcrum.cli import failures
from fulcrum.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell's background job ignores Ctrl-C, and so would these tests and the processes that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_import_that_is_interrupted_is_a_sentence(tmp_path: Path):
    # A package that takes forever to import stands for PyTorch on a slow disk.
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "fulcrum", "run", "--data", "digits"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "interrupted; nothing was begun.\n"


def test_the_command_line_imports_nothing_heavy():
    code = "import sys, fulcrum.cli; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0


def interrupt_and(error: BaseException | None) -> int:
    """Ctrl-C in a call that turns it into another error, as libraries do when their import is interrupted."""

    def call() -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            if error is not None:
                raise error from None
        return 0

    return failures.run_guarded(call, [])


@pytest.mark.parametrize("error", [ImportError("numpy could not be loaded"), RuntimeError("x"), KeyboardInterrupt()])
def test_what_a_library_makes_of_an_interruption_is_still_one(error: BaseException, capsys: pytest.CaptureFixture[str]):
    assert interrupt_and(error) == 130
    assert capsys.readouterr().err == "interrupted.\n"


def test_a_sentence_of_our_own_stays(capsys: pytest.CaptureFixture[str]):
    assert interrupt_and(ConfigError("the reason.")) == 2
    assert interrupt_and(failures.RunInterrupted("continue with: x")) == 130
    assert interrupt_and(None) == 0
    assert capsys.readouterr().err == "error: the reason.\ncontinue with: x\n"


def test_an_error_without_an_interruption_is_not_called_one(capsys: pytest.CaptureFixture[str]):
    def call() -> int:
        raise RuntimeError("broken")

    assert failures.run_guarded(call, []) == 1
    assert "internal error: RuntimeError: broken" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
