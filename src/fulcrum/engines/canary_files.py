"""The file format of releases with canaries: FILE.npz and FILE.json (docs/audit.md)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fulcrum.errors import InputError

RELEASES_FORMAT = "fulcrum-releases-1"
RELEASE_ARRAYS = (
    *("included", "releases", "directions", "coordinates", "values", "projections"),
    *("run", "party", "sampled"),
)


def write_releases(path: Path | str, arrays: Mapping[str, npt.NDArray[Any]], claim: Mapping[str, Any]) -> None:
    """Write FILE.npz (arrays by their names, numbers only) and FILE.json (the claim), each whole or not at all."""
    unknown = set(arrays) - set(RELEASE_ARRAYS)
    if unknown:
        raise InputError(f"{', '.join(sorted(unknown))} is no array of releases; known: {', '.join(RELEASE_ARRAYS)}.")
    path = Path(path)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False, suffix=".npz") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    told = json.dumps({"format": RELEASES_FORMAT, **claim}, indent=1) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as claimed:
        claimed.write(told)
    os.replace(file.name, path)
    os.replace(claimed.name, path.with_suffix(".json"))
