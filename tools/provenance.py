"""Write results/*/PROVENANCE.md: where each file's numbers come from: python tools/provenance.py [--check]

Commit, command, hardware, date and seeds are taken from what the files themselves state (or a page or an environment
file beside them); where they state nothing it says "not recorded", and since when the repository has the file.
A NOTE.md or README.md beside it, in a person's words, is linked. --check writes nothing and ends with 1 where a folder
has no such file or a file of it is not listed.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAGE = "PROVENANCE.md"
COLUMNS = ("command", "commit", "date", "hardware", "seeds")
NOT_RECORDED = "not recorded"
MADE_BY = re.compile(
    r"Made by `(?P<command>[^`]+)`(?: on (?P<date>\d{4}-\d\d-\d\d)\S* with fulcrum \S+ \((?P<commit>[^)]*)\))?"
    r"(?:.*?; seeds (?P<seeds>[\d, ]+)\.)?(?: Hardware: (?P<hardware>.+?)\.)?$",
    re.MULTILINE,
)
KEPT_OUT = ("subset", "figures")
"""Folders that git leaves out: of quick runs, and figures that a command makes from the rows."""


def list_folders() -> list[Path]:
    """results/ itself, and each folder in it."""
    return [RESULTS, *sorted(path for path in RESULTS.iterdir() if path.is_dir() and path.name not in KEPT_OUT)]


def list_files(folder: Path) -> list[Path]:
    """The files that a folder's page speaks of: of results/ its own, of the others those of sub-folders, too."""
    found = folder.glob("*") if folder == RESULTS else folder.rglob("*")
    return sorted(
        path
        for path in found
        if path.is_file() and path.name not in (PAGE, "README.md") and not set(path.parts) & set(KEPT_OUT)
    )


def read_facts(path: Path) -> dict[str, str]:
    """What a file states about its own making."""
    if path.suffix == ".npz":
        return _read_scores(path)
    name = path.name.removesuffix(".gz")
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode(errors="replace")
    if name.endswith(".json"):
        return _find_in_value(json.loads(text))
    if name.endswith(".jsonl"):
        return _find_in_rows([json.loads(line) for line in text.splitlines()])
    if name.endswith((".md", ".tex", ".svg")):
        match = MADE_BY.search(text)
        return {key: value.strip() for key, value in (match.groupdict() if match else {}).items() if value}
    return {}


def _read_scores(path: Path) -> dict[str, str]:
    """What the scores of an attack say in their text `about`."""
    with np.load(path, allow_pickle=False) as held:
        about = json.loads(str(held["about"])) if "about" in held.files else {}
    return _find_in_value({"seed": about.get("cell", {}).get("seed"), **about.get("facts", {})})


def _find_in_value(value: Any) -> dict[str, str]:
    if isinstance(value, list):
        return _find_in_rows(value)
    facts: dict[str, Any] = {}
    for place in (
        value,
        value.get("provenance"),
        value.get("environment"),
        value.get("hardware"),
        value.get("machine"),
    ):
        if isinstance(place, dict):
            facts = {**{key: place[key] for key in COLUMNS if place.get(key) not in (None, "", {})}, **facts}
            if not facts.get("hardware") or isinstance(facts["hardware"], dict):
                facts["hardware"] = _describe_machine(place)
    if "seed" in value and "seeds" not in facts:
        facts["seeds"] = value["seed"]
    if "splits" in value and "seeds" not in facts:
        facts["seeds"] = f"splits {_to_words(value['splits'])}"
    return {key: words for key in COLUMNS if (words := _to_words(facts.get(key)))}


def _find_in_rows(rows: list[Any]) -> dict[str, str]:
    rows = [row for row in rows if isinstance(row, dict)]
    dates = sorted(str(row["date"])[:10] for row in rows if row.get("date"))
    machines = {_describe_machine(row.get("machine") or row) for row in rows} - {""}
    seeds = {row["seed"] for row in rows if isinstance(row.get("seed"), int)}
    commits = {str(row["commit"]) for row in rows if row.get("commit")}
    facts = {
        "date": " to ".join(sorted({dates[0], dates[-1]})) if dates else "",
        "hardware": "; ".join(sorted(machines)),
        "seeds": _to_words(sorted(seeds)),
        "commit": ", ".join(sorted(commits)),
    }
    return {key: value for key, value in facts.items() if value}


def _describe_machine(facts: Any) -> str:
    if not isinstance(facts, dict):
        return str(facts)
    device = str(facts.get("device") or "")
    named = [device if device not in ("", "cpu", "cuda") else str(facts.get("processor") or device)]
    if facts.get("cores") and "NVIDIA" not in named[0]:
        named[0] += f" ({facts['cores']} cores)"
    named += [f"{what} {facts[key]}" for key, what in (("python", "Python"), ("torch", "torch")) if facts.get(key)]
    return ", ".join(word for word in named if word)


def _to_words(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
        whole = len(value) > 3 and value == list(range(value[0], value[-1] + 1))
        return f"{value[0]} to {value[-1]}" if whole else ", ".join(map(str, value))
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return "" if value is None or isinstance(value, dict) else str(value)


def _shorten_date(words: str) -> str:
    return words[:10] if re.match(r"\d{4}-\d\d-\d\dT", words) else words


def find_first_commit(path: Path) -> str:
    """The commit that brought a file, and its day; nothing without git."""
    words = ["git", "log", "--follow", "--format=%h, %as", "--", str(path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else ""


def make_page(folder: Path) -> str:
    """The page of a folder."""
    facts = {path: read_facts(path) for path in list_files(folder)}
    lines = [f"# Where the numbers of {folder.relative_to(ROOT).as_posix()}/ come from", ""]
    lines += [
        "Made by `make provenance` from what the files state about themselves; a + after a commit: with changes.",
        "",
    ]
    if (folder / "README.md").is_file():
        lines += ["[README.md](README.md) says more.", ""]
    lines += ["| file | command | commit | date | hardware | seeds |", "|---|---|---|---|---|---|"]
    for path, own in facts.items():
        told = {**_find_beside(path, facts), **own}
        cells = [_shorten_date(told.get(key, NOT_RECORDED)) for key in COLUMNS]
        if cells[0] != NOT_RECORDED:
            cells[0] = f"`{cells[0]}`"
        if told.get("date") is None and (first := find_first_commit(path)):
            cells[2] = f"{NOT_RECORDED}; in the repository since {first}"
        row = [path.relative_to(folder).as_posix(), *(cell.replace("|", "\\|") for cell in cells)]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _find_beside(path: Path, facts: dict[Path, dict[str, str]]) -> dict[str, str]:
    """Facts of the page, the cells or the environment that were written with a file."""
    stem = path.name.partition(".")[0]
    found: dict[str, str] = {}
    for other in _list_siblings(path, stem):
        found = {**facts.get(other, {}), **found}
    return found


def _list_siblings(path: Path, stem: str) -> Iterator[Path]:
    for name in (f"{stem}.json", f"{stem}.md", f"{stem}-cells.json", f"{stem}-provenance.json"):
        yield path.with_name(name)
    head, _, tail = path.name.rpartition("-")
    if path.suffix == ".svg":
        words = path.stem.split("-")
        yield from (path.with_name(f"{'-'.join(words[:n])}.json") for n in range(len(words) - 1, 0, -1))
    if tail in ("privacy.json", "settings.toml", "summary.json"):
        yield path.with_name(f"{head}-environment.json")


def find_fault() -> str:
    """What is missing, in a sentence; nothing where all is listed."""
    for folder in list_folders():
        if not (folder / PAGE).is_file():
            return f"{folder.relative_to(ROOT)} has no {PAGE}; run make provenance."
        text = (folder / PAGE).read_text(encoding="utf-8")
        for path in list_files(folder):
            if f"| {path.relative_to(folder).as_posix()} |" not in text:
                return f"{path.relative_to(ROOT)} is not in {PAGE}; run make provenance."
    return ""


def main() -> int:
    """Write the pages, or check them."""
    if "--check" in sys.argv:
        fault = find_fault()
        print(fault or "every file of results/ is listed")
        return 1 if fault else 0
    for folder in list_folders():
        (folder / PAGE).write_text(make_page(folder), encoding="utf-8")
    print(f"{len(list_folders())} pages written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
