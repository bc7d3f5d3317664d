"""Ask the OSV database for known vulnerabilities of the pinned dependencies: python tools/audit_deps.py [--service URL]

Asks https://api.osv.dev, the source that pip-audit takes with --vulnerability-service osv, with the names and
versions of requirements.lock and of torch; nothing else is sent. Ends with 0 where nothing is known, 1 where something
is, and 3 with one sentence where the service cannot be reached: then nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from typing import Any

from lock_hashes import read_lock

SERVICE = "https://api.osv.dev"
TORCH = ("torch", "2.13.0")


def ask(service: str, packages: list[tuple[str, str]], timeout: float = 30.0) -> dict[str, list[str]]:
    """Names of known vulnerabilities by package, of one request for all of them."""
    queries = [
        {"package": {"ecosystem": "PyPI", "name": name.lower()}, "version": version} for name, version in packages
    ]
    request = urllib.request.Request(
        f"{service}/v1/querybatch",
        data=json.dumps({"queries": queries}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        results: list[dict[str, Any]] = json.loads(answer.read())["results"]
    return {
        f"{name} {version}": [str(entry["id"]) for entry in result.get("vulns", ())]
        for (name, version), result in zip(packages, results, strict=True)
        if result.get("vulns")
    }


def main() -> int:
    """Ask, and print one line per package with a known vulnerability."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", default=SERVICE)
    options = parser.parse_args()
    packages = [*((name, version) for name, version, _ in read_lock()), TORCH]
    try:
        found = ask(options.service, packages)
    except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
        reason = getattr(error, "reason", error)
        print(f"{options.service} cannot be reached ({reason}): nothing was checked; try again where it can be.")
        return 3
    for package, names in found.items():
        print(f"{package}: {', '.join(names)}")
    print(f"{len(packages)} packages, {len(found)} with known vulnerabilities")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
