"""Build the wheel, the same bytes every time: python tools/build_wheel.py [--out dist] [--check]

The files of the package are copied into an empty folder first, so that nothing of an older build gets in, and built
there with fixed dates and modes. --check builds twice and compares the bytes, and compares the wheel's contents with
the source tree.
"""

from __future__ import annotations

import argparse
import calendar
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BESIDE_SOURCE = ("pyproject.toml", "README.md", "LICENSE")
NOT_PACKED = ("__pycache__", "*.pyc", "*.egg-info")


def read_version(root: Path = ROOT) -> str:
    """The version that src/fulcrum/__init__.py states."""
    found = re.search(r'^__version__ = "([^"]+)"$', (root / "src/fulcrum/__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("src/fulcrum/__init__.py states no __version__.")
    return found[1]


def read_release_date(root: Path = ROOT) -> str:
    """The newest date in CHANGELOG.md, as YYYY-MM-DD: that of the last release."""
    found = re.search(r"^## \S+ - (\d{4}-\d{2}-\d{2})$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("CHANGELOG.md has no dated version; a release is a line such as '## 0.2.0 - 2026-11-16'.")
    return found[1]


def build_wheel(out: Path, root: Path = ROOT) -> Path:
    """Build the wheel of a source tree into a folder and return its path."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "source"
        shutil.copytree(root / "src", source / "src", ignore=shutil.ignore_patterns(*NOT_PACKED))
        for name in BESIDE_SOURCE:
            shutil.copy(root / name, source / name)
        for path in [source, *source.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)  # a wheel keeps modes, and those depend on the user's umask
        epoch = calendar.timegm(time.strptime(read_release_date(root), "%Y-%m-%d"))
        words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
        subprocess.run(
            [*words, "--wheel-dir", str(Path(place) / "made"), str(source)],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"},
            umask=0o022,
            check=True,
        )
        (made,) = (Path(place) / "made").glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, out / made.name))


def find_missing_files(wheel: Path, root: Path = ROOT) -> list[str]:
    """Files of src/fulcrum that the wheel lacks."""
    source = root / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "fulcrum").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        return sorted(wanted - set(archive.namelist()))


def main() -> int:
    """Build; print the path and the digest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheel")
    parser.add_argument("--check", action="store_true", help="build twice and compare")
    options = parser.parse_args()
    wheel = build_wheel(options.out)
    missing = find_missing_files(wheel)
    if missing:
        print(f"error: {wheel.name} lacks {', '.join(missing)}; add them to package-data in pyproject.toml.")
        return 1
    if options.check:
        with tempfile.TemporaryDirectory() as second:
            if build_wheel(Path(second)).read_bytes() != wheel.read_bytes():
                print(f"error: two builds of {wheel.name} differ.")
                return 1
    print(f"{wheel}  sha256 {hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
