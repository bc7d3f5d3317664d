"""Write the hashes of requirements.lock anew from the package index: python tools/lock_hashes.py [--check]

One line per package, `name==version --hash=sha256:...`, with the hashes of every file that Linux or macOS with Python
3.11 to 3.13 may take. `make setup` installs them with --require-hashes and --no-deps: what is not in the lock does not
come in. torch is not in the lock: it is installed first and alone, since its build (CPU, CUDA, ROCm) is the machine's
choice, and builds from elsewhere than PyPI have other hashes.

To change a version: edit the part before --hash in requirements.lock, then run this. --check writes nothing and ends
with 1 where a line is wrong or lacks hashes.
"""

from __future__ import annotations

import argparse
import html.parser
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
INDEX = "https://pypi.org/simple"
LINE = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)((?: --hash=sha256:[0-9a-f]{64})*)$")


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def normalise(name: str) -> str:
    """A project's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path = LOCK) -> list[tuple[str, str, tuple[str, ...]]]:
    """(name, version, hashes) of each line."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        match = LINE.match(line)
        if match is None:
            raise SystemExit(f"{path.name}: cannot read {line[:80]!r}; a line is name==version --hash=sha256:...")
        rows.append((match[1], match[2], tuple(re.findall(r"[0-9a-f]{64}", match[3]))))
    return rows


def is_wanted(file: str, name: str, version: str) -> bool:
    """Whether a file is of that version, and one that Linux or macOS with Python 3.11 to 3.13 may take."""
    stem = normalise(name).replace("-", "_")
    if file.endswith(".tar.gz"):
        return normalise(file.removesuffix(".tar.gz")) == normalise(f"{name}-{version}")
    parts = file.removesuffix(".whl").split("-")
    if not file.endswith(".whl") or normalise(parts[0]).replace("-", "_") != stem or parts[1] != version:
        return False
    pythons, abi, platform = parts[-3:]
    fits = "py3" in pythons.split(".") or any(f"cp31{minor}" in pythons.split(".") for minor in "123")
    fits = fits or (abi == "abi3" and pythons.startswith("cp3"))
    return fits and not abi.endswith("t") and not platform.startswith(("win", "musllinux", "ios", "android"))


def fetch_hashes(name: str, version: str, index: str) -> tuple[str, ...]:
    """SHA-256 of the files of a version on the index."""
    with urllib.request.urlopen(f"{index}/{normalise(name)}/", timeout=60) as answer:
        parser = _Links()
        parser.feed(answer.read().decode())
    hashes = set()
    for link in parser.found:
        address, fragment = urldefrag(link)
        if is_wanted(unquote(address).rpartition("/")[2], name, version) and fragment.startswith("sha256="):
            hashes.add(fragment.removeprefix("sha256="))
    if not hashes:
        raise SystemExit(f"{index} has no file of {name} {version} for Linux or macOS and Python 3.11 to 3.13.")
    return tuple(sorted(hashes))


def main() -> int:
    """Write the lock, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", default=INDEX)
    parser.add_argument("--check", action="store_true", help="write nothing; compare with the index")
    options = parser.parse_args()
    head = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    lines = []
    try:
        for name, version, hashes in read_lock():
            found = fetch_hashes(name, version, options.index)
            if options.check and set(hashes) != set(found):
                print(f"{name} {version}: the index has other files than the lock; if that is right, run make lock.")
                return 1
            lines.append(" ".join([f"{name}=={version}", *(f"--hash=sha256:{value}" for value in found)]))
    except urllib.error.URLError as error:
        print(f"error: {options.index} cannot be reached ({error.reason}); the lock stays as it is.")
        return 2
    if not options.check:
        LOCK.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    print(f"{len(lines)} packages {'agree with the index' if options.check else 'written to requirements.lock'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
