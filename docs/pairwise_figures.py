"""The measured numbers of docs/pairwise.md and their figure, from files in results/.

    python docs/pairwise_figures.py            # whether page and figure hold what the files say; exit code 1 if not
    python docs/pairwise_figures.py --write

results/pairwise/table.json   accuracy by aggregation and colluders (`fulcrum study pairwise`)
results/bench-pairwise.json   seconds and bytes of a round (`python benchmarks/pairwise.py --tls --out ...`)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pairwise.md"
FIGURE = ROOT / "docs" / "pictures" / "pairwise.svg"
DATASETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
EPSILONS = (1.64, 3.61, 6.38)
COLUMNS = (
    ("ideal-secagg", 0, "ideal (simulated)"),
    ("pairwise", 0, "c = 0"),
    ("pairwise", 1, "c = 1"),
    ("pairwise", 5, "c = 5"),
    ("plain", 9, "own noise"),
)
COLOURS = {"c = 0": "#2a6f97", "c = 1": "#1b7f5c", "c = 5": "#8a5a00", "own noise": "#a4243b"}
INK, GREY, LINE = "#16202b", "#566171", "#e3e7ec"
WIDTH, HEIGHT, TOP, PLOT_WIDTH, PLOT_HEIGHT, MOST = 960, 380, 64, 230, 230, 5.0

Rows = Mapping[tuple[str, float, str, int], Mapping[str, Any]]


def read_rows() -> Rows:
    """The entries of table.json by data set, epsilon, aggregation and colluders."""
    table = json.loads((ROOT / "results" / "pairwise" / "table.json").read_text())
    return {(row["dataset"], row["epsilon"], row["aggregation"], row["colluders"]): row for row in table}


def make_accuracy_table(rows: Rows) -> list[str]:
    """Accuracy in percent, and how far behind the ideal, with 95% intervals."""
    lines = [
        "| data | epsilon | " + " | ".join(title for _, _, title in COLUMNS) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for dataset, name in DATASETS.items():
        for epsilon in reversed(EPSILONS):
            cells = []
            for aggregation, colluders, _ in COLUMNS:
                row = rows[dataset, epsilon, aggregation, colluders]
                own = f"{row['mean']:.2f}"
                behind = f" ({-row['behind_ideal']:+.2f} ± {row['behind_ideal_ci95']:.2f})"
                cells.append(own if aggregation == "ideal-secagg" else own + behind)
            lines.append(f"| {name} | {epsilon} | " + " | ".join(cells) + " |")
    return lines


def make_cost_table(bench: Mapping[str, Any]) -> list[str]:
    """Seconds of a round over those of a plain one, with 95% intervals, and bytes."""
    lines = ["| | plain | masked | masked / plain |", "|---|---|---|---|"]
    parts = {"in_process": "all in one process", "tls": "over Flower with TLS"}
    names = {"cpu_seconds": "CPU seconds", "seconds": "seconds"}
    for part, where in parts.items():
        for key, words in names.items():
            if part in bench:
                found = bench[part][f"{key}_per_round"]
                cells = [show(found[kind]["median"], found[kind]["ci95"], 3) for kind in ("plain", "pairwise")]
                ratio = show(found["over_plain"], found["over_plain_ci95"], 2)
                lines.append(f"| {words} per round, {where} | {' | '.join(cells)} | {ratio} |")
    sizes = [bench[kind]["bytes_without_keys"] for kind in ("plain", "pairwise")]
    lines.append(
        f"| bytes per round and party, without keys | {sizes[0]:,} | {sizes[1]:,} | {sizes[1] / sizes[0]:.2f} |"
    )
    keys = bench["pairwise"]["bytes_of_keys"]
    return [*lines, f"| bytes of keys per round and party | | {keys:,} | |"]


def describe_bench(bench: Mapping[str, Any]) -> list[str]:
    """How and where the costs were measured."""
    machine = bench["environment"]
    cpu = machine.get("cpu") or machine.get("processor") or "CPU"
    return [
        "",
        f"`{bench['command']}`, commit {bench['commit'][:10]}, {bench['date'][:10]}, {cpu}, "
        f"{bench['threads']} thread; K = {bench['parties']}, {bench['parameters']:,} parameters, "
        f"{bench['records_per_party']:,} records per party at rate 0.2.\nMedians with 95% intervals (bootstrap over "
        f"{bench['in_process']['runs_of_each']} runs of each kind, in turns"
        + (f"; {bench['tls']['runs_of_each']} over TLS" if "tls" in bench else "")
        + f"); load average {bench['load_average']:.1f}.",
    ]


def show(value: float, interval: Sequence[float], digits: int) -> str:
    return f"{value:.{digits}f} ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"


def draw_figure(rows: Rows) -> str:
    """Points behind the ideal over epsilon, a panel per data set."""
    parts = []
    for n, (dataset, name) in enumerate(DATASETS.items()):
        left = 56 + n * 300
        parts.append(text(left, 42, name, 16, weight="600"))
        for points in range(int(MOST) + 1):
            y = place(points)
            parts.append(f'<path d="M{left} {y:.1f}h{PLOT_WIDTH}" stroke="{LINE}"/>')
            parts.append(text(left - 8, y + 5, f"{points}", 12, "end", GREY))
        for i, epsilon in enumerate(EPSILONS):
            parts.append(text(left + 30 + i * 85, TOP + PLOT_HEIGHT + 26, f"{epsilon}", 12, "middle", GREY))
        for shift, (aggregation, colluders, title) in enumerate(COLUMNS[1:]):
            found = [rows[dataset, epsilon, aggregation, colluders] for epsilon in EPSILONS]
            xs = [left + 22 + i * 85 + 6 * shift for i in range(len(EPSILONS))]
            ys = [place(row["behind_ideal"]) for row in found]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
            parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[title]}" stroke-width="1.8"/>')
            for x, y, row in zip(xs, ys, found, strict=True):
                half = row["behind_ideal_ci95"] * PLOT_HEIGHT / MOST
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[title]}"/>')
                parts.append(f'<path d="M{x:.1f} {y - half:.1f}v{2 * half:.1f}" stroke="{COLOURS[title]}"/>')
    for n, (title, colour) in enumerate(COLOURS.items()):
        parts.append(text(56 + n * 110, 18, title, 13, colour=colour, weight="600"))
    caption = "Points behind the ideal by epsilon; K = 10, moo, ten seeds, 95% intervals. results/pairwise/table.json"
    parts.append(text(56, HEIGHT - 14, caption, 12, colour=GREY))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="14">'
    )
    title = "<title>How far masked sums are behind an ideal secure aggregation, by colluders covered</title>"
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>'
    return "\n".join([head, title, ground, *parts, "</svg>", ""])


def place(points: float) -> float:
    return TOP + 14 + (PLOT_HEIGHT - 14) * points / MOST


def text(
    x: float, y: float, words: str, size: int, anchor: str = "start", colour: str = INK, weight: str = "400"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
        f'font-weight="{weight}">{words}</text>'
    )


def fill_page(page: str, blocks: Mapping[str, Sequence[str]]) -> str:
    """The page with the lines of each block between its markers."""
    for name, lines in blocks.items():
        first, last = f"<!-- {name}: made by docs/pairwise_figures.py -->", f"<!-- end of {name} -->"
        before, rest = page.split(first, 1)
        page = "\n".join([before + first, "", *lines, "", last]) + rest.split(last, 1)[1]
    return page


def make_all() -> dict[Path, str]:
    """What page and figure must be."""
    rows = read_rows()
    bench = json.loads((ROOT / "results" / "bench-pairwise.json").read_text())
    blocks = {"accuracy": make_accuracy_table(rows), "costs": [*make_cost_table(bench), *describe_bench(bench)]}
    return {PAGE: fill_page(PAGE.read_text(encoding="utf-8"), blocks), FIGURE: draw_figure(rows)}


def main(write: bool) -> int:
    """Write both, or say which is not what the files say."""
    wrong = 0
    for path, content in make_all().items():
        if write:
            path.write_text(content, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != content:
            print(f"{path.relative_to(ROOT)} is not what results/ says: python docs/pairwise_figures.py --write")
            wrong = 1
    return wrong


if __name__ == "__main__":
    raise SystemExit(main("--write" in sys.argv))
