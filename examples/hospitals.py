"""Three hospitals' data out of the digits: hospitals/{a,b,c}.npz, and the public hospitals/public.npz.

    python examples/hospitals.py [FOLDER] [NAMES]

Each file but the last belongs to one party; a run in one process over the same split is the comparison.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fulcrum.data import load, split
from fulcrum.settings.schema import Data


def write(folder: Path, names: list[str], partition: str = "iid", seed: int = 0) -> None:
    """One .npz a party (x, y, classes) and public.npz (x_test, y_test, classes)."""
    folder.mkdir(parents=True, exist_ok=True)
    data = load("digits")
    parts = split(data, Data(source="digits", parties=len(names), partition=partition), seed)
    for k, name in enumerate(names):
        rows = parts.indices(k)
        np.savez(folder / f"{name}.npz", x=data.x[rows], y=data.y[rows], classes=data.classes)
    np.savez(folder / "public.npz", x_test=data.x_test, y_test=data.y_test, classes=data.classes)


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals"), (sys.argv[2:] or ["a", "b", "c"]))
