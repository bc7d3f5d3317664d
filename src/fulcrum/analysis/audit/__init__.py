"""The audit: lower bounds on epsilon, measured on the releases of a run (docs/audit.md).

    from fulcrum import audit
    audited = audit.add_canaries(fulcrum.prepare(settings), per_party=200)
    result, found = audit.run_audit(audited)
    found.passed, found.together.best.epsilon, result.epsilon

Names are imported when first used: the bounds alone need numpy and scipy, and PLD dp-accounting.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulcrum.analysis.audit.bounds import (
        Guesses,
        LowerBound,
        bound_by_known_samples,
        bound_by_noise_fit,
        bound_by_one_run,
        bound_by_one_run_fdp,
        bound_by_rates,
        bound_by_thresholds,
    )
    from fulcrum.analysis.audit.finished import audit_finished_run
    from fulcrum.analysis.audit.in_run import add_canaries, run_audit
    from fulcrum.analysis.audit.outcome import Audit
    from fulcrum.analysis.audit.releases import audit_releases, read_releases

__all__ = [
    "Audit",
    "Guesses",
    "LowerBound",
    "add_canaries",
    "audit_finished_run",
    "audit_releases",
    "bound_by_known_samples",
    "bound_by_noise_fit",
    "bound_by_one_run",
    "bound_by_one_run_fdp",
    "bound_by_rates",
    "bound_by_thresholds",
    "read_releases",
    "run_audit",
]

_HOME = {
    "Audit": "outcome",
    "add_canaries": "in_run",
    "audit_finished_run": "finished",
    "audit_releases": "releases",
    "read_releases": "releases",
    "run_audit": "in_run",
}
"""Where names are; all others are in `bounds`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fulcrum.analysis.audit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fulcrum.analysis.audit.{_HOME.get(name, 'bounds')}"), name)
