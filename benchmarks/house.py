"""Figures about the source tree itself: size, depth, repetition, vocabulary. Run it on two trees to compare them.

python benchmarks/house.py src/fulcrum                       # a table
python benchmarks/house.py OLD/src/fulcrum src/fulcrum --json results/house.json
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

LOSSES = re.compile(r"cross_entropy|log_softmax")
WORDS = (
    "judge hold hold_both Desk Vault Roll Card Post Purse painted paint invent teach Lesson pupil alone heard "
    "keep as_released go_on Underway sum_up state_privacy Follower settle twin Pooled Locals Cohorts Apart How"
)
PRIVATE_WORDS = tuple(WORDS.split())
"""Names that HOUSE calls private vocabulary: how many of them are still defined."""


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a file."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters without self."""
    given = node.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def measure(root: Path) -> dict[str, Any]:
    """The figures of one tree (the folder `fulcrum`)."""
    files = sorted(root.rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    found = [node for tree in trees.values() for node in functions(tree)]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in found]
    names = [node.name for node in found if not node.name.startswith("__")]
    lines = [text.count("\n") for text in texts.values()]
    top = {file.relative_to(root).parts[0].removesuffix(".py") for file in files} - {"__init__", "__main__"}
    classes: dict[str, int] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = classes.get(node.name, 0) + 1
    defined = {*names, *classes}
    return {
        "files": len(files),
        "lines": sum(lines),
        "median_file": statistics.median(lines),
        "longest_file": max(lines),
        "files_under_40_lines": sum(count < 40 for count in lines),
        "functions": len(found),
        "median_function": statistics.median(lengths),
        "functions_over_60_lines": sum(length > 60 for length in lengths),
        "functions_with_8_parameters_or_more": sum(parameters(node) >= 8 for node in found),
        "mean_function_name": round(statistics.mean(map(len, names)), 2),
        "mean_public_function_name": round(statistics.mean(len(n) for n in names if not n.startswith("_")), 2),
        "names_at_the_top": len(top),
        "classes_with_the_same_name": sum(count > 1 for count in classes.values()),
        "files_that_hold_the_loss": sum(bool(LOSSES.search(text)) for text in texts.values()),
        "files_that_say_accuracy": sum(bool(re.search(r"\baccuracy\b", text)) for text in texts.values()),
        "private_words_defined": sum(word in defined for word in PRIVATE_WORDS),
        "isinstance_remote": sum(text.count("isinstance(") for text in texts.values() if "Remote" in text),
    }


def main() -> None:
    """Print a table, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=Path, help="folders named fulcrum")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    rows = {str(tree): measure(tree) for tree in given.trees}
    for name in next(iter(rows.values())):
        print(f"{name:38}" + "".join(f"{row[name]:>12}" for row in rows.values()))
    if given.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        facts = {"commit": commit, "command": " ".join(sys.argv), "python": platform.python_version()}
        facts["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        given.json.write_text(json.dumps({**facts, "trees": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
