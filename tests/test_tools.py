"""tools/: the lock with its hashes, the bill of materials, the question for vulnerabilities, the wheel's contents."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def tools_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def run_tool(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / name), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


# --- the lock -----------------------------------------------------------------------------------


def test_every_line_of_the_lock_has_hashes() -> None:
    from lock_hashes import normalise, read_lock

    rows = read_lock()
    assert all(hashes for _, _, hashes in rows)
    names = [normalise(name) for name, _, _ in rows]
    assert len(set(names)) == len(names)
    project = PYPROJECT["project"]
    wanted = {
        normalise(re.split("[^A-Za-z0-9._-]", word)[0])
        for word in [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    }
    assert wanted - set(names) == {"torch"}, "torch is installed first and alone, all else by the lock"
    assert "setuptools" in names, "the project is built without another trip to the index"


def test_a_line_that_is_no_pin_is_refused(tmp_path: Path) -> None:
    from lock_hashes import read_lock

    (tmp_path / "requirements.lock").write_text("rich>=13\n")
    with pytest.raises(SystemExit, match="cannot read 'rich>=13'"):
        read_lock(tmp_path / "requirements.lock")


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("rich-15.0.0-py3-none-any.whl", True),
        ("rich-15.0.0.tar.gz", True),
        ("rich-14.0.0-py3-none-any.whl", False),
        ("rich_argparse-15.0.0-py3-none-any.whl", False),
        ("rich-15.0.0-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("rich-15.0.0-cp313-cp313-macosx_14_0_arm64.whl", True),
        ("rich-15.0.0-cp37-abi3-manylinux_2_28_aarch64.whl", True),
        ("rich-15.0.0-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("rich-15.0.0-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("rich-15.0.0-cp312-cp312-win_amd64.whl", False),
    ],
)
def test_the_lock_takes_the_files_that_fit(file: str, wanted: bool) -> None:
    from lock_hashes import is_wanted

    assert is_wanted(file, "rich", "15.0.0") == wanted


# --- the bill of materials ----------------------------------------------------------------------


def test_the_bill_lists_what_fulcrum_needs_and_who_needs_whom(tmp_path: Path) -> None:
    done = run_tool("sbom.py", "--out", str(tmp_path / "bill.json"))
    assert done.returncode == 0, done.stderr
    bill = json.loads((tmp_path / "bill.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "fulcrum-fl"
    parts = {part["name"]: part for part in bill["components"]}
    assert {"torch", "numpy", "scipy", "dp-accounting", "typer", "d3"} <= set(parts)
    assert all(part["version"] for part in parts.values())
    refs = {bill["metadata"]["component"]["bom-ref"], *(part["bom-ref"] for part in parts.values())}
    assert len(refs) == len(parts) + 1
    needs = {edge["ref"]: set(edge["dependsOn"]) for edge in bill["dependencies"]}
    assert set().union(*needs.values()) <= refs
    assert parts["scipy"]["bom-ref"] in needs[parts["dp-accounting"]["bom-ref"]]
    run_tool("sbom.py", "--out", str(tmp_path / "again.json"))
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "bill.json").read_bytes()


def test_the_bill_names_the_libraries_that_the_package_carries() -> None:
    from sbom import BUNDLED

    licences = (ROOT / "src/fulcrum/analysis/report/assets/LICENSES.txt").read_text(encoding="utf-8")
    versions = {name: version for name, version, _, _ in BUNDLED}
    assert f"D3 {versions['d3']}" in licences
    assert f"Observable Plot {versions['@observablehq/plot']}" in licences


# --- known vulnerabilities ----------------------------------------------------------------------


class FakeService(BaseHTTPRequestHandler):
    """Knows of one vulnerability, in the first package that it is asked about."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        answer = json.dumps({"results": [{"vulns": [{"id": "PYSEC-1"}]}, *[{}] * (len(asked) - 1)]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words: object) -> None:
        """Says nothing."""


def test_a_known_vulnerability_is_named_and_no_service_is_one_sentence() -> None:
    with HTTPServer(("127.0.0.1", 0), FakeService) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = run_tool("audit_deps.py", "--service", f"http://127.0.0.1:{server.server_port}")
        thread.join()
    assert done.returncode == 1
    assert "absl-py 2.5.1: PYSEC-1" in done.stdout or "PYSEC-1" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[-1].endswith("1 with known vulnerabilities")
    done = run_tool("audit_deps.py", "--service", f"http://127.0.0.1:{server.server_port}")
    assert done.returncode == 3
    assert "nothing was checked" in done.stdout
    assert len(done.stdout.splitlines()) == 1


# --- the wheel ----------------------------------------------------------------------------------


def test_every_file_of_the_package_is_packed() -> None:
    """Without a build: each file that is no Python is matched by package-data, and each pattern matches something."""
    source = ROOT / "src/fulcrum"
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["fulcrum"]
    files = [
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert [file for file in files if not any(fnmatch(file, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(file, pattern) for file in files)] == []
    folders = {path.parent for path in source.rglob("*.py") if "__pycache__" not in path.parts}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == [], "setuptools packs packages"


@pytest.mark.slow
def test_the_wheel_is_whole_and_the_same_bytes_every_time(tmp_path: Path) -> None:
    from build_wheel import build_wheel, find_missing_files

    wheel = build_wheel(tmp_path / "one")
    assert find_missing_files(wheel) == []
    copy = tmp_path / "copy"
    for name in ("src", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        part = ROOT / name
        if part.is_dir():
            shutil.copytree(part, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(part, copy / name)
    (copy / "src/fulcrum/demo.toml").chmod(0o600)  # another user's umask
    assert build_wheel(tmp_path / "two", copy).read_bytes() == wheel.read_bytes()
    (copy / "src/fulcrum/new.bin").write_text("a file that package-data does not name")
    assert find_missing_files(build_wheel(tmp_path / "three", copy), copy) == ["fulcrum/new.bin"]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        told = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert not [name for name in names if not name.startswith(("fulcrum/", "fulcrum_fl-"))]
    assert "Classifier: Operating System :: POSIX" in told
