"""Write a software bill of materials (CycloneDX 1.6, JSON) of this environment: python tools/sbom.py [--out FILE]

It lists fulcrum-fl and every package that it needs, directly or through others, as installed: version, licence, and
who needs whom. Packages of extras are listed where they are installed. Made from installed metadata alone; the same
environment gives the same file, but for the serial number, which follows from the contents.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "fulcrum-fl"
BUNDLED = (
    ("d3", "7.9.2", "ISC", "pkg:npm/d3@7.9.2"),
    ("@observablehq/plot", "0.6.17", "ISC", "pkg:npm/%40observablehq/plot@0.6.17"),
    ("optical-recognition-of-handwritten-digits", "1998", "CC-BY-4.0", ""),
)
"""What the package carries inside: (name, version, licence, address)."""


def normalise(name: str) -> str:
    """A project's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def list_installed() -> dict[str, metadata.Distribution]:
    """Every installed distribution by its normalised name."""
    return {normalise(dist.name): dist for dist in metadata.distributions() if dist.name}


def list_requirements(dist: metadata.Distribution, installed: Iterable[str]) -> list[str]:
    """Normalised names of the installed packages that a distribution asks for, those of extras too."""
    known = set(installed)
    names = {normalise(re.split(r"[^A-Za-z0-9._-]", word.strip())[0]) for word in dist.requires or ()}
    return sorted((names & known) - {normalise(dist.name)})


def get_licences(dist: metadata.Distribution) -> list[dict[str, Any]]:
    """The licence as the package states it: an SPDX expression, else its classifiers, else its own words."""
    facts: Any = dist.metadata
    if facts.get("License-Expression"):
        return [{"expression": facts["License-Expression"]}]
    named = [
        line.rpartition(" :: ")[2] for line in facts.get_all("Classifier") or () if line.startswith("License :: OSI")
    ]
    words = named or [line.strip() for line in (facts.get("License") or "").splitlines()[:1] if line.strip()]
    return [{"license": {"name": word}} for word in words]


def make_component(dist: metadata.Distribution) -> dict[str, Any]:
    """One entry of the list."""
    name, version = normalise(dist.name), dist.version
    address = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    entry: dict[str, Any] = {"type": "library", "bom-ref": address, "name": name, "version": version, "purl": address}
    facts: Any = dist.metadata
    if facts.get("Summary"):
        entry["description"] = facts["Summary"]
    licences = get_licences(dist)
    if licences:
        entry["licenses"] = licences
    return entry


def make_bill() -> dict[str, Any]:
    """The bill of the environment that this Python runs in."""
    installed = list_installed()
    if PROJECT not in installed:
        raise SystemExit(f"{PROJECT} is not installed in {sys.prefix}; run make setup.")
    reached, todo = {PROJECT}, [PROJECT]
    while todo:
        new = set(list_requirements(installed[todo.pop()], installed)) - reached
        reached |= new
        todo += sorted(new)
    parts = {name: make_component(installed[name]) for name in sorted(reached)}
    bundled = [
        {
            **{
                "type": "library" if address else "data",
                "bom-ref": f"bundled:{name}",
                "name": name,
                "version": version,
            },
            "licenses": [{"license": {"id": licence}}],
            **({"purl": address} if address else {}),
        }
        for name, version, licence, address in BUNDLED
    ]
    edges = [
        {
            "ref": parts[name]["bom-ref"],
            "dependsOn": [
                *(parts[other]["bom-ref"] for other in list_requirements(installed[name], reached)),
                *((entry["bom-ref"] for entry in bundled) if name == PROJECT else ()),
            ],
        }
        for name in sorted(reached)
    ]
    main = {**parts.pop(PROJECT), "type": "application"}
    bill: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": main, "tools": {"components": [{"type": "application", "name": "tools/sbom.py"}]}},
        "components": [*parts.values(), *bundled],
        "dependencies": edges,
    }
    digest = hashlib.sha256(json.dumps(bill, sort_keys=True).encode()).digest()
    return {"serialNumber": f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}", **bill}


def main() -> int:
    """Write the bill and say how many parts it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: dist/fulcrum_fl-VERSION.cdx.json")
    options = parser.parse_args()
    bill = make_bill()
    out = options.out or ROOT / "dist" / f"fulcrum_fl-{bill['metadata']['component']['version']}.cdx.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
    print(f"{out}  {len(bill['components'])} parts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
