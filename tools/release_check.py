"""The release checklist: python tools/release_check.py [--quick] [--list]

Each line is a check that passes or says in one sentence what to do. --quick leaves out those that take minutes.
Ends with 0 where all passed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from build_wheel import read_release_date, read_version
from lock_hashes import read_lock

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable


@dataclass(frozen=True)
class Check:
    """One line of the list. find_fault: returns what is wrong, or nothing."""

    name: str
    find_fault: Callable[[], str]
    minutes: bool = False


def find_version_fault() -> str:
    """The newest section of CHANGELOG.md has this version and a date that is not in the future."""
    first = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    version = read_version()
    if first is None or not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d{{2}}-\d{{2}}", first[1]):
        return f"the first section of CHANGELOG.md must be '## {version} - YYYY-MM-DD', and is {first and first[1]!r}."
    if read_release_date() > datetime.datetime.now(datetime.UTC).date().isoformat():
        return f"the date of {version} in CHANGELOG.md, {read_release_date()}, is in the future."
    return ""


def find_citation_fault() -> str:
    """CITATION.cff has this version and date."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    wanted = {"version": read_version(), "date-released": read_release_date()}
    for key, value in wanted.items():
        if not re.search(rf"^{key}: [\"']?{re.escape(value)}[\"']?$", text, re.MULTILINE):
            return f"CITATION.cff must have {key}: {value}."
    return ""


def find_tree_fault() -> str:
    """Nothing is uncommitted."""
    done = _run("git", "status", "--short")
    return f"commit or remove first: {done.stdout.split()[1]} ..." if done.stdout.strip() else ""


def find_settings_page_fault() -> str:
    """docs/settings.md is what the settings' own words make."""
    made = _run(PYTHON, "docs/settings_page.py").stdout
    path = next(iter(sorted((ROOT / "docs").rglob("settings.md"))))
    return "" if made == path.read_text(encoding="utf-8") else f"{path.relative_to(ROOT)} is old; run make docs."


def find_lock_fault() -> str:
    """Every line of the lock has hashes."""
    bare = [name for name, _, hashes in read_lock() if not hashes]
    return f"{bare[0]} has no hash in requirements.lock; run make lock." if bare else ""


def by_command(*words: str) -> Callable[[], str]:
    """A check that passes where a command ends with 0."""

    def find_fault() -> str:
        done = _run(*words)
        said = (done.stdout + done.stderr).strip().splitlines()
        return "" if done.returncode == 0 else f"{' '.join(words[-2:])} ended with {done.returncode}: {said[-1:]}"

    return find_fault


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


CHECKS = (
    Check("the changelog's first section is this version, with its date", find_version_fault),
    Check("CITATION.cff has the version and the date", find_citation_fault),
    Check("nothing is uncommitted", find_tree_fault),
    Check("the settings page is current", find_settings_page_fault),
    Check("the proofs' digests are those of the code", by_command(PYTHON, "docs/proofs.py")),
    Check("public names are as frozen", by_command(PYTHON, "tools/public_names.py", "--check")),
    Check("the lock has hashes", find_lock_fault),
    Check("every file of results/ has its provenance", by_command(PYTHON, "tools/provenance.py", "--check")),
    Check("the wheel is whole and the same bytes twice", by_command(PYTHON, "tools/build_wheel.py", "--check")),
    Check("the bill of materials can be written", by_command(PYTHON, "tools/sbom.py")),
    Check("format, lint and types", by_command("make", "check"), minutes=True),
    Check("the documentation builds", by_command("make", "site"), minutes=True),
    Check("the tests", by_command("make", "test"), minutes=True),
    Check("the slow tests", by_command("make", "test-slow"), minutes=True),
    Check("the tests across machines", by_command("make", "test-flower"), minutes=True),
    Check("the wheel in an empty environment", by_command("make", "smoke"), minutes=True),
)


def main() -> int:
    """Go through the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out what takes minutes")
    parser.add_argument("--list", action="store_true", help="print the list and check nothing")
    options = parser.parse_args()
    failed = 0
    for check in CHECKS:
        if options.list or (options.quick and check.minutes):
            print(f"{'-':>8}  {check.name}{' (minutes)' if check.minutes else ''}")
            continue
        began = time.monotonic()
        fault = check.find_fault()
        failed += bool(fault)
        seconds = time.monotonic() - began
        print(
            f"{'FAULT' if fault else 'ok':>8}  {check.name} ({seconds:.0f} s){': ' + fault if fault else ''}",
            flush=True,
        )
    print(f"{failed} of {len(CHECKS)} failed" if failed else "ready" if not options.list else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
