"""Fulcrum: private federated learning that finds its own balance.

    import fulcrum
    result = fulcrum.train(data="digits", parties=5, epsilon=4.0, rounds=50)
    result.metrics, result.epsilon, result.model

Names are imported when first used, so that `import fulcrum` costs nothing and the core runs with
torch and numpy alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulcrum.analysis.detectors.foreign import check
    from fulcrum.data import Dataset
    from fulcrum.errors import FulcrumError, InputError
    from fulcrum.integrations import private
    from fulcrum.runs import Forecast, Observer, Result, execute, load, plan, prepare, resume, rounds, train
    from fulcrum.settings.schema import Settings
    from fulcrum.types import RoundResult

__version__ = "0.2.0"

os.environ.setdefault("MKL_CBWR", "AUTO")
"""Products of matrices have the same bits wherever their operands lie in memory: MKL reads this at its first product.
Without it processors that are not Intel's round a row by its address; see `gradients.same_bits`."""

__all__ = [
    "Dataset",
    "Forecast",
    "FulcrumError",
    "InputError",
    "Observer",
    "Result",
    "RoundResult",
    "Settings",
    "__version__",
    "check",
    "execute",
    "load",
    "plan",
    "prepare",
    "private",
    "resume",
    "rounds",
    "train",
]

_HOME = {
    "Dataset": "fulcrum.data",
    "Forecast": "fulcrum.runs",
    "FulcrumError": "fulcrum.errors",
    "InputError": "fulcrum.errors",
    "Observer": "fulcrum.runs",
    "Result": "fulcrum.runs",
    "RoundResult": "fulcrum.types",
    "Settings": "fulcrum.settings.schema",
    "check": "fulcrum.analysis.detectors.foreign",
    "execute": "fulcrum.runs",
    "load": "fulcrum.runs",
    "plan": "fulcrum.runs",
    "prepare": "fulcrum.runs",
    "private": "fulcrum.integrations",
    "resume": "fulcrum.runs",
    "rounds": "fulcrum.runs",
    "train": "fulcrum.runs",
}
_MODULES = ("clipping", "data")
"""Modules that users reach as `fulcrum.data.from_arrays` without importing them first."""


_ELSEWHERE = {
    "attacks": "fulcrum.analysis.attacks",
    "audit": "fulcrum.analysis.audit",
    "parts": "fulcrum.integrations.parts",
    "theory": "fulcrum.analysis.theory",
}
"""Modules that users reach under a shorter name: `from fulcrum import parts`."""


_LOCKING = ("fulcrum.runs", "fulcrum.integrations")
"""Modules that lock files with fcntl, which Windows lacks."""


def refuse_windows() -> None:
    """Raise InputError on Windows: runs, ledgers and studies are locked as POSIX systems lock files."""
    if sys.platform == "win32":
        from fulcrum.errors import InputError

        raise InputError(
            "Fulcrum runs on Linux and macOS: it locks runs and ledgers with fcntl, which Windows lacks. On Windows, "
            "install it inside WSL 2 (wsl --install)."
        )


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fulcrum.{name}")
    if name in _ELSEWHERE:
        return importlib.import_module(_ELSEWHERE[name])
    if name in _HOME:
        if _HOME[name] in _LOCKING:
            refuse_windows()
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'fulcrum' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
