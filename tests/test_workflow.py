"""The workflow for outsiders is valid, its make targets exist, and its Pythons are those that pyproject.toml names."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_workflow_is_valid_and_has_three_jobs() -> None:
    yaml = pytest.importorskip(
        "yaml", reason="PyYAML reads the workflow; it comes with the trackers that .ci/run installs"
    )
    told = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert set(told["jobs"]) == {"test", "site", "wheel"}
    for job in told["jobs"].values():
        assert job["timeout-minutes"] <= 40
        assert all(set(step) & {"run", "uses"} for step in job["steps"])
    assert told["permissions"] == {"contents": "read"}


def test_its_commands_are_targets_and_its_pythons_are_those_that_the_project_names() -> None:
    text = WORKFLOW.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    asked = set(re.findall(r"make ([a-z-]+)", text))
    assert {"test", "smoke", "site"} <= asked <= targets
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)}
    for row in re.findall(r"python: \[(.+)\]", text):
        assert set(re.findall(r"3\.\d+", row)) == named


def test_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    phony = {name for line in re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE) for name in line.split()}
    told = re.findall(r"^  make (\S+) +(\S.*)$", shown, re.MULTILINE)
    assert {name for name, _ in told} == phony
    assert all(len(line) <= 120 for line in shown.splitlines())


def test_one_version_of_torch_is_named_everywhere() -> None:
    places = [
        ROOT / "Makefile",
        ROOT / "deploy/Containerfile",
        ROOT / "tools/smoke_wheel.py",
        ROOT / "requirements.lock",
    ]
    found = {
        version for path in places for version in re.findall(r"torch==([\d.]+\d)", path.read_text(encoding="utf-8"))
    }
    assert len(found) == 1
    assert f'("torch", "{found.pop()}")' in (ROOT / "tools/audit_deps.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["CITATION.cff", "CHANGELOG.md"])
def test_version_and_date_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import release_check

    assert release_check.find_version_fault() == ""
    assert release_check.find_citation_fault() == ""
    monkeypatch.setattr(release_check, "read_version", lambda: "9.9.9")
    finder = release_check.find_citation_fault if name == "CITATION.cff" else release_check.find_version_fault
    assert "9.9.9" in finder(), "another version is noticed"
