"""Ties the pages of docs/privacy/ to the functions they speak of.

A page lists its functions in a table, each with a digest of its code (without docstrings, comments and layout). When a
function changes, tests/test_proofs.py fails until somebody has read the page again and run

    make proofs        # or: python docs/proofs.py --write
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parent / "privacy"
ROW = re.compile(r"^\| `(fulcrum\.[\w.]+)` \| `([0-9a-f]{12}|new)` \|$", re.MULTILINE)


def find_object(path: str) -> Any:
    """The function, class or value at a dotted path."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:  # a method: the part before the last is a class
        return getattr(find_object(module), name)


def compute_code_digest(found: Any) -> str:
    """Twelve hexadecimal digits of the code: the same when only words, comments or layout change."""
    if not callable(found):
        return hashlib.blake2b(repr(found).encode(), digest_size=6).hexdigest()
    return digest_source(textwrap.dedent(inspect.getsource(found)))


def digest_source(source: str) -> str:
    """As `compute_code_digest`, of source text."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return hashlib.blake2b(ast.dump(tree).encode(), digest_size=6).hexdigest()


def list_rows(text: str) -> list[tuple[str, str]]:
    """(function, digest) of each row of a page's table."""
    return ROW.findall(text)


def find_outdated(text: str) -> list[str]:
    """The functions of a page whose code is no longer what the page was written about."""
    return [path for path, digest in list_rows(text) if compute_code_digest(find_object(path)) != digest]


def update_page(text: str) -> str:
    """The page with the digests of the code as it is now."""
    return ROW.sub(lambda row: f"| `{row[1]}` | `{compute_code_digest(find_object(row[1]))}` |", text)


def main(write: bool) -> int:
    """Print the outdated functions; with `write`, bring the digests up to date."""
    outdated = 0
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for path in find_outdated(text):
            outdated += 1
            print(f"{page.name}: {path} has changed")
        if write:
            page.write_text(update_page(text), encoding="utf-8")
    return 0 if write or not outdated else 1


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv))
