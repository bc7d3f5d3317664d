"""One function turns an epsilon into text, and it rounds up. No other format is used where people read."""

from __future__ import annotations

import ast
from pathlib import Path

from fulcrum.analysis.report.page import round_up
from fulcrum.privacy.accounting import format_epsilon

ROOT = Path(__file__).parents[2] / "src" / "fulcrum"
NAMES = ("epsilon", "budget")
"""Parts of names that are epsilons."""
IDENTIFIERS = {
    "study/compare.py": 1,  # the name of a run's folder
    "study/experiment.py": 1,  # the name of a cell
    "study/report.py": 2,  # names of files
    "study/robustness.py": 1,  # the name of a cell
    "study/robustness_report.py": 1,  # the name of a file
}
"""Where an epsilon is a part of a name, which must stay as it is: how many times."""
MEASURED = ("analysis/attacks/", "analysis/audit/", "analysis/detectors/", "cli/attack.py", "cli/check.py")
"""Attacks, audits and detectors print lower bounds, which are not rounded up, beside the claims that they test."""


def find_formatted(source: str) -> list[str]:
    """Expressions with an epsilon that an f-string formats as a number."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FormattedValue) or node.format_spec is None:
            continue
        spec = "".join(str(part.value) for part in ast.walk(node.format_spec) if isinstance(part, ast.Constant))
        words = ast.unparse(node.value)
        called = isinstance(node.value, ast.Call)
        if (
            any(name in words for name in NAMES)
            and "delta" not in words
            and not called
            and spec[-1:] in ("g", "f", "e")
        ):
            found.append(words)
    return found


def test_an_epsilon_is_formatted_by_one_function():
    found = {
        str(file.relative_to(ROOT)): find_formatted(file.read_text(encoding="utf-8")) for file in ROOT.rglob("*.py")
    }
    spent = {name: len(rows) for name, rows in found.items() if rows and not name.startswith(MEASURED)}
    assert spent == IDENTIFIERS, found


def test_another_format_would_be_noticed():
    assert find_formatted('f"{run.epsilon:.4g} and {budget:g} and {sigma:g} and {format_epsilon(epsilon)}"') == [
        "run.epsilon",
        "budget",
    ]


def test_it_rounds_up():
    for value in (1.00004, 3.6123451, 0.41912538, 12.345678, 1e-7, 99999.4):
        assert float(format_epsilon(value)) >= value
        assert float(format_epsilon(value, 6)) >= value
        assert round_up(value) >= value
    assert format_epsilon(1.64, 6) == "1.64"
