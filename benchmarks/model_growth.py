"""How the time of a private step grows with width, depth, tokens, batch and parties: one command, one figure.

    PYTHONPATH=src:.carry python benchmarks/model_growth.py                      # on a GPU if there is one, tf32
    PYTHONPATH=src:.carry python benchmarks/model_growth.py --device cpu         # small sizes, minutes
    PYTHONPATH=src python benchmarks/model_growth.py --report                    # only draw the figure again

Three families (a text transformer, a residual network with GroupNorm, linear layers over positions), each with one of
its sizes changed at a time. The methods are those of models.py and take turns, a step each, in one process; seconds are
medians. Writes bench-growth.json (one row per size and method; a failure has null and a word) and bench-growth.svg to
--out. Work that does not fit into --seconds has a word too, and the next call does it: rows that are there stay.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from model_methods import METHODS, Setup
from model_works import CLASSES, BasicBlock, ModelWork, ResNet, TextTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from models import PRECISIONS, Row, clock, describe_here, free_memory, say

AXES = ("width", "depth", "tokens", "batch", "parties")


class PositionwiseNetwork(nn.Module):
    """Linear layers over the 4x4 patches of an image, mean over the patches, a linear head."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(48, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(F.unfold(x, 4, stride=4).transpose(1, 2)))
        for layer in self.layers:
            h = F.relu(layer(h))
        found: Tensor = self.head(h.mean(dim=1))
        return found


@dataclass(frozen=True)
class Family:
    """A kind of model with five sizes. build: (depth, width, tokens) -> model. tokens: what positions are called here.
    patch: images have so many patches of `patch` x `patch` pixels; 0: inputs are texts of so many tokens. base: sizes
    of each device; grown: those of a panel."""

    build: Callable[[int, int, int], nn.Module]
    tokens: str
    patch: int
    base: Mapping[str, Mapping[str, int]]
    grown: Mapping[str, Mapping[str, tuple[int, ...]]]

    def work(self, name: str, device: str, axis: str, size: int) -> ModelWork:
        """The work with one size changed."""
        sizes = {**self.base[device], axis: size}
        depth, width, tokens, parties = (sizes[key] for key in ("depth", "width", "tokens", "parties"))
        batch = max(1, sizes["batch"] // parties) * parties
        side = self.patch * round(tokens**0.5)
        return ModelWork(
            f"{name}-{axis}-{size}",
            lambda **options: self.build(depth, width, tokens),
            batch,
            side=side,
            tokens=0 if self.patch else tokens,
            parties=parties,
        )


def _sizes(width: int, depth: int, tokens: int, batch: int) -> dict[str, int]:
    return {"width": width, "depth": depth, "tokens": tokens, "batch": batch, "parties": 1}


FAMILIES = {
    "transformer": Family(
        lambda depth, width, tokens: TextTransformer(depth, width, max(1, width // 64), tokens),
        "tokens",
        0,
        {"cuda": _sizes(256, 4, 128, 128), "cpu": _sizes(64, 2, 32, 16)},
        {
            "cuda": {
                "width": (64, 256, 768),
                "depth": (2, 4, 12),
                "tokens": (32, 128, 512),
                "batch": (32, 128, 512),
                "parties": (1, 4, 16),
            },
            "cpu": {
                "width": (64, 128, 256),
                "depth": (1, 2, 4),
                "tokens": (8, 32, 128),
                "batch": (4, 16, 64),
                "parties": (1, 2, 8),
            },
        },
    ),
    "resnet": Family(
        lambda depth, width, tokens: ResNet(BasicBlock, (depth,) * 4, width),
        "pixels",
        1,
        {"cuda": _sizes(32, 2, 1024, 256), "cpu": _sizes(8, 1, 256, 16)},
        {
            "cuda": {
                "width": (16, 32, 64),
                "depth": (1, 2, 4),
                "tokens": (256, 1024, 4096),
                "batch": (64, 256, 1024),
                "parties": (1, 4, 16),
            },
            "cpu": {
                "width": (4, 8, 16),
                "depth": (1, 2, 3),
                "tokens": (64, 256, 1024),
                "batch": (4, 16, 64),
                "parties": (1, 2, 8),
            },
        },
    ),
    "linear": Family(
        lambda depth, width, tokens: PositionwiseNetwork(depth, width),
        "positions",
        4,
        {"cuda": _sizes(512, 4, 16, 1024), "cpu": _sizes(128, 3, 4, 64)},
        {
            "cuda": {
                "width": (128, 512, 2048),
                "depth": (2, 4, 16),
                "tokens": (1, 16, 64),
                "batch": (256, 1024, 4096),
                "parties": (1, 4, 16),
            },
            "cpu": {
                "width": (32, 128, 512),
                "depth": (2, 3, 6),
                "tokens": (1, 4, 16),
                "batch": (16, 64, 256),
                "parties": (1, 2, 8),
            },
        },
    ),
}


def main() -> None:
    """Measure what is missing, size by size over all families; after every size what was found is on disk."""
    asked = parse_arguments()
    warnings.filterwarnings("ignore", message="There is a performance drop")
    folder, began = Path(asked.out), time.perf_counter()
    rows = read_rows(folder)
    if asked.report:
        report(folder, rows)
        return
    about = describe_here(asked, torch.device(asked.device))
    done: dict[tuple[Any, ...], dict[str, Row]] = {}
    for family, axis, size in list_sizes(asked.device, asked.families):
        work = FAMILIES[family].work(family, asked.device, axis, size)
        keys = [(work.name, asked.device, asked.precision, method) for method in asked.methods]
        if not asked.again and all(rows.get(key, {}).get("seconds") is not None for key in keys):
            continue
        found = {
            method: make_row(work, asked, family, axis, size, method)
            for method in dict.fromkeys(["plain", *asked.methods])
        }
        same = (family, *sorted({**FAMILIES[family].base[asked.device], axis: size}.items()))
        if same in done:  # the size that all panels of a family share
            for method, row in found.items():
                row |= {
                    name: value for name, value in done[same][method].items() if name not in row or row[name] is None
                }
        elif time.perf_counter() - began > asked.seconds:
            for row in found.values():
                row["word"] = "not run: out of time"
        else:
            measure(asked, work, found)
            done[same] = found
        for row in found.values():
            rows[identify(row)] = row | about
            say(row)
        report(folder, rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if gpu else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="", choices=("", *PRECISIONS), help="default: tf32; on a CPU float32")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seconds", type=float, default=130.0, help="no new work after so many seconds")
    parser.add_argument("--repeat", type=int, default=5, help="timed steps of each method")
    parser.add_argument("--warm", type=int, default=2, help="steps of each method before")
    parser.add_argument("--limit", type=float, default=3.0, help="seconds for the timed steps of one work")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the batch")
    parser.add_argument("--again", action="store_true", help="measure also what is there")
    parser.add_argument("--report", action="store_true", help="only draw the figure again")
    parser.add_argument("--out", default="results", help="folder of bench-growth.json and bench-growth.svg")
    asked = parser.parse_args()
    asked.precision = asked.precision or ("tf32" if asked.device == "cuda" else "float32")
    return asked


def list_sizes(device: str, families: list[str]) -> list[tuple[str, str, int]]:
    """(family, axis, size), small sizes of all panels first: a figure that is cut short has points in every panel."""
    found = []
    for place in range(3):
        for family in families:
            for axis in AXES:
                found.append((family, axis, FAMILIES[family].grown[device][axis][place]))
    return found


def make_row(work: ModelWork, asked: argparse.Namespace, family: str, axis: str, size: int, method: str) -> Row:
    return {
        "work": work.name,
        "family": family,
        "axis": axis,
        "size": size,
        "device": asked.device,
        "precision": asked.precision,
        "method": method,
        "seconds": None,
        "ratio_to_plain": None,
        "gigabytes": None,
        "batch": work.batch,
        "parties": work.parties,
    }


def measure(asked: argparse.Namespace, work: ModelWork, rows: dict[str, Row]) -> None:
    """Fills in the rows of one work, by method."""
    setup = Setup(work.scaled(asked.scale), torch.device(asked.device), asked.precision)
    with setup.arithmetic():
        clock(asked, setup, rows)
    free_memory()


# --- report -------------------------------------------------------------------------------------------


def identify(row: Row) -> tuple[str, ...]:
    return row["work"], row["device"], row["precision"], row["method"]


def read_rows(folder: Path) -> dict[tuple[str, ...], Row]:
    path = folder / "bench-growth.json"
    return {identify(row): row for row in (json.loads(path.read_text()) if path.exists() else [])}


def report(folder: Path, rows: Mapping[tuple[str, ...], Row]) -> None:
    """bench-growth.json, and a figure per device and precision: bench-growth.svg for the first, GPUs before CPUs."""
    folder.mkdir(parents=True, exist_ok=True)
    every = sorted(rows.values(), key=lambda row: (row["device"] != "cuda", list(FAMILIES).index(row["family"])))
    (folder / "bench-growth.json").write_text(json.dumps(every, indent=1) + "\n")
    kinds = list(dict.fromkeys((row["device"], row["precision"]) for row in every))
    for number, (device, precision) in enumerate(kinds):
        figure = draw([row for row in every if (row["device"], row["precision"]) == (device, precision)])
        name = "bench-growth.svg" if number == 0 else f"bench-growth-{device}-{precision}.svg"
        if figure:
            (folder / name).write_text(figure)


def draw(rows: list[Row]) -> str:
    """A panel per family and axis: milliseconds of a step over the size, a line per method."""
    try:
        from fulcrum.study.figures import LinePanel, draw_panels
    except ImportError:  # a machine with torch and numpy alone: --report draws it elsewhere
        return ""
    panels: list[Any] = []
    for family in dict.fromkeys(row["family"] for row in rows):
        for axis in AXES:
            mine = [row for row in rows if (row["family"], row["axis"]) == (family, axis) and row["seconds"]]
            series = {
                method: sorted((row["size"], 1e3 * row["seconds"]) for row in mine if row["method"] == method)
                for method in METHODS
            }
            word = FAMILIES[family].tokens if axis == "tokens" else axis
            panels.append(
                LinePanel(f"{family}: {word}", word, {name: points for name, points in series.items() if points})
            )
    first = rows[0]
    title = (
        f"Milliseconds of one step, noise included: {first['hardware']}, {first['precision']}, torch {first['torch']}"
    )
    note = f"{first['command']}, {first['commit']}, {first['date']}"
    return draw_panels(panels, title, len(AXES), order=list(METHODS), note=note)


if __name__ == "__main__":
    main()
