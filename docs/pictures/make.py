"""Makes the pictures of README.md from real runs: `make pictures`, about a minute on two cores.

five-starts.svg  accuracy over rounds of dp-sgd and of moo, each from five clipping norms C0
five-starts.json the numbers behind it, which the README quotes and a test compares
report.png       the page of `fulcrum report` about the README's first command, by Chromium; skipped where it is missing

The runs are the README's own: scikit-learn's digits over five parties, epsilon 4, seed 0.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fulcrum

FOLDER = Path(__file__).parent
STARTS = (0.01, 0.1, 1.0, 10.0, 100.0)
FIRST: dict[str, Any] = {"data": "digits", "parties": 5, "epsilon": 4.0, "rounds": 50, "rate": 0.5}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "dp-sgd": {"method": "dp-sgd"},
    "moo": {"method": "moo"},
    "moo, no rehearsal": {"method": "moo", "rehearse": False},
}
COLOURS = ("#2a6f97", "#8a5a00", "#1b7f5c", "#a4243b", "#6a4c93")
INK, GREY, LINE = "#16202b", "#566171", "#e3e7ec"
WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 960, 420, 56, 70, 340, 260

Curves = dict[str, dict[str, list[float]]]


def train_all() -> Curves:
    """Accuracy in % after every round, by variant and start."""
    return {
        variant: {
            f"{start:g}": [round(100 * (r.accuracy or 0.0), 2) for r in fulcrum.rounds(**FIRST, **settings, C0=start)]
            for start in STARTS
        }
        for variant, settings in VARIANTS.items()
    }


def draw_figure(curves: Curves) -> str:
    """The figure: dp-sgd from five starts on the left, moo on the right."""
    left = draw_panel(0, "dp-sgd: C stays at C0", curves["dp-sgd"])
    right = draw_panel(480, "moo: five starts, one end", curves["moo, no rehearsal"])
    rehearsed = draw_line(480, curves["moo"]["1"], INK, 3.0)
    notes = [
        f"thick: moo, {name_ends(curves['moo'])} from every C0",
        f"thin: moo --no-rehearsal, {name_ends(curves['moo, no rehearsal'])}",
    ]
    caption = (
        "Digits over five parties, epsilon 4, 50 rounds, test accuracy. "
        "Numbers at the lines: C0. Made by docs/pictures/make.py."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'font-family="system-ui, sans-serif" font-size="14">',
            "<title>Accuracy over rounds of dp-sgd and of moo from five clipping norms</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
            *left,
            *right,
            rehearsed,
            *(
                draw_text(480 + LEFT + PLOT_WIDTH, TOP + 66 + 22 * number, words, size=13, anchor="end")
                for number, words in enumerate(notes)
            ),
            draw_text(LEFT, HEIGHT - 14, caption, size=12, colour=GREY),
            "</svg>",
            "",
        ]
    )


def draw_panel(shift: int, title: str, curves: Mapping[str, Sequence[float]]) -> list[str]:
    """One panel: axes, a line per start, and C0 at each line's end."""
    parts = [draw_text(shift + LEFT, 40, title, size=17, weight="600")]
    for percent in range(0, 101, 20):
        y = place_y(percent)
        parts.append(f'<path d="M{shift + LEFT} {y:.1f}h{PLOT_WIDTH}" stroke="{LINE}"/>')
        parts.append(draw_text(shift + LEFT - 8, y + 5, f"{percent}%", size=12, anchor="end", colour=GREY))
    rounds = max(len(values) for values in curves.values())
    for number in (1, *range(10, rounds + 1, 10)):
        x = shift + place_x(number, rounds)
        parts.append(draw_text(x, TOP + PLOT_HEIGHT + 20, f"{number}", size=12, anchor="middle", colour=GREY))
    parts.append(
        draw_text(shift + LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT + 38, "round", size=12, anchor="end", colour=GREY)
    )
    parts += [draw_line(shift, values, colour, 1.8) for colour, values in zip(COLOURS, curves.values(), strict=True)]
    spots = place_labels([place_y(values[-1]) for values in curves.values()])
    for colour, start, y in zip(COLOURS, curves, spots, strict=True):
        parts.append(draw_text(shift + LEFT + PLOT_WIDTH + 8, y + 5, start, colour=colour, weight="600"))
    return parts


def draw_line(shift: int, values: Sequence[float], colour: str, width: float) -> str:
    points = " ".join(
        f"{shift + place_x(number, len(values)):.1f},{place_y(value):.1f}" for number, value in enumerate(values, 1)
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def name_ends(curves: Mapping[str, Sequence[float]]) -> str:
    """The accuracies of the last round: "91.1%" or "91.4 to 93.6%"."""
    low, high = (f"{end(values[-1] for values in curves.values()):.1f}" for end in (min, max))
    return f"{low}%" if low == high else f"{low} to {high}%"


def place_x(number: int, rounds: int) -> float:
    return LEFT + PLOT_WIDTH * (number - 1) / max(rounds - 1, 1)


def place_y(percent: float) -> float:
    return TOP + PLOT_HEIGHT * (1 - percent / 100)


def place_labels(heights: Sequence[float], apart: float = 17) -> list[float]:
    """The heights, moved down where two labels would overlap."""
    placed = list(heights)
    order = sorted(range(len(placed)), key=placed.__getitem__)
    for above, below in itertools.pairwise(order):
        placed[below] = max(placed[below], placed[above] + apart)
    return placed


def draw_text(
    x: float, y: float, words: str, size: int = 14, anchor: str = "start", colour: str = INK, weight: str = "400"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
        f'font-weight="{weight}">{words}</text>'
    )


def photograph_report(target: Path) -> str:
    """A picture of the report about the README's first command; returns what was done, in a sentence."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        return f"{target.name} stays as it is: Chromium is not installed."
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        fulcrum.train(**FIRST, out=folder / "first")
        command = [
            sys.executable,
            "-m",
            "fulcrum",
            "report",
            str(folder / "first"),
            "--out",
            str(folder / "report.html"),
        ]
        subprocess.run(command, check=True, capture_output=True)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1180,990"]
        page = (folder / "report.html").as_uri()
        shot = [browser, *options, f"--screenshot={folder / 'shot.png'}", page]
        subprocess.run(shot, check=True, capture_output=True, timeout=120)
        shutil.copyfile(folder / "shot.png", target)
    return f"{target.name}: written."


def main(again: bool) -> None:
    """Make all pictures; with `again` the figure is drawn from the numbers at hand and nothing is trained."""
    numbers = FOLDER / "five-starts.json"
    if again:
        (FOLDER / "five-starts.svg").write_text(draw_figure(json.loads(numbers.read_text())), encoding="utf-8")
        return
    curves = train_all()
    numbers.write_text(json.dumps(curves) + "\n", encoding="utf-8")
    (FOLDER / "five-starts.svg").write_text(draw_figure(curves), encoding="utf-8")
    print("five-starts.svg, five-starts.json: written.")
    print(photograph_report(FOLDER / "report.png"))


if __name__ == "__main__":
    main("--draw-only" in sys.argv)
