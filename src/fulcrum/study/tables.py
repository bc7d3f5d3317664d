"""Cells -> Markdown and LaTeX. Numbers are scores (fractions in %) with the half-width of a 95% interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from fulcrum.study.records import Score
from fulcrum.study.stats import Interval
from fulcrum.study.table_cells import Cell

NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "digits": "digits"}
DAGGER, ASSUMED = "†", "‡"
SUMS_ONLY = "server sees sums only, simulated"
UNITS = {"example": "example", "person": "person", "client": "whole party (trusted server)", "": "nothing"}


def dataset_label(dataset: str, cells: Iterable[Cell]) -> str:
    """The data set as the tables name it; a copy that is not the public file is called one."""
    name = NAMES.get(dataset, dataset)
    copied = any("not the public file" in note for cell in cells if cell.dataset == dataset for note in cell.notes)
    if not copied:
        return name
    return f"{name} (JPEG copy)" if dataset == "cifar10" else f"{name} (changed copy)"


def number(stats: Interval, score: Score, sign: str = "") -> str:
    """97.31 ± 0.20, or 0.8123 ± 0.0101 where the score is no percentage; the interval from two values on."""
    if stats.n == 0:
        return "-"
    return score.cell(stats.mean, sign) + ("" if math.isnan(stats.half) else f" ± {_half_width(stats.half, score)}")


def _half_width(half: float, score: Score) -> str:
    return score.cell(half) if score.is_fraction else f"{half:.2g}"


def signed(cell: Cell | None) -> str:
    """By how much moo is ahead of a cell: +0.31 ± 0.20."""
    return "" if cell is None or cell.ahead is None else number(cell.ahead, cell.score, "+")


def grid(cells: Sequence[Cell], column: Callable[[Cell], float | int | None]) -> list[tuple[Cell, dict[object, Cell]]]:
    """Rows of a table in order of appearance: (a cell of the row, its cells by column)."""
    rows: dict[tuple[str, int | str], dict[object, Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.row, cell.unit), {})[column(cell)] = cell
    return [(next(iter(by.values())), by) for by in rows.values()]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is the head."""
    head, *rest = rows
    lines = ["| " + " | ".join(row) + " |" for row in rest]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]) + "\n"


def score_rows(cells: Sequence[Cell], epsilons: Sequence[float]) -> list[list[str]]:
    """The table of scores of one data set: ours with the paper's figure beside it."""
    head = ["method", "protects", "K", *(f"ε = {e:g}" for e in epsilons)]
    rows = [head]
    for first, by in grid(cells, lambda c: c.epsilon):
        shown = [by.get(e, by.get(None)) for e in epsilons]
        rows.append([marked(first), protects(first), str(first.parties), *map(_with_paper, shown)])
    return rows


def marked(cell: Cell) -> str:
    """A row's label; marks say that its epsilon is nominal, or rests on a secure aggregation that is not there."""
    marks = [mark for mark, due in ((DAGGER, not cell.sound), (ASSUMED, cell.aggregation != "plain")) if due]
    return " ".join([cell.label, *marks])


def protects(cell: Cell) -> str:
    """What one epsilon protects, and from whom where that is not a server that sees every update."""
    return UNITS[cell.unit] + (f" ({SUMS_ONLY})" if cell.aggregation != "plain" else "")


def _with_paper(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    paper = f" (paper {cell.paper:.2f})" if cell.paper is not None else ""
    short = f" [{cell.stats.n} of {cell.wanted} seeds]" if 0 < cell.stats.n < cell.wanted else ""
    return number(cell.stats, cell.score) + short + paper


def ahead_rows(cells: Sequence[Cell], epsilons: Sequence[float]) -> list[list[str]]:
    """By how much moo is ahead of each row, paired by seed; in points where the score is a percentage."""
    rows = [["moo ahead of", *(f"ε = {e:g}" for e in epsilons)]]
    for first, by in grid([c for c in cells if c.ahead is not None], lambda c: c.epsilon):
        rows.append([marked(first), *(signed(by.get(e)) for e in epsilons)])
    return rows


def parties_rows(cells: Sequence[Cell], counts: Sequence[int]) -> list[list[str]]:
    """The score over the number of parties, of one data set and epsilon."""
    rows = [["method", *(f"K = {k}" for k in counts), "paper (K not stated)"]]
    for first, by in grid(cells, lambda c: c.parties):
        paper = f"{first.paper:.2f}" if first.paper is not None else ""
        rows.append([first.label, *(number(by[k].stats, by[k].score) if k in by else "-" for k in counts), paper])
    return rows


def within_reach(cells: Sequence[Cell], counts: Sequence[int]) -> str:
    """A sentence: for which numbers of parties each row is at the paper's figure or above it; empty if none has one."""
    found = []
    for first, by in grid(cells, lambda c: c.parties):
        measured = [k for k in counts if k in by and by[k].values]
        paper = first.paper
        if paper is None or not measured:
            continue
        there = [k for k in measured if by[k].stats.mean >= paper]
        where = "every K measured" if there == measured else f"K = {', '.join(map(str, there))}" if there else "no K"
        found.append(f"{first.label} at {where}")
    return f"At the paper's figure or above: {'; '.join(found)}.\n" if found else ""


# --- LaTeX ----------------------------------------------------------------------------------------

SPECIAL = {
    "&": r"\&",
    "%": r"\%",
    "_": r"\_",
    "#": r"\#",
    "±": r"$\pm$",
    DAGGER: r"$^\dagger$",
    ASSUMED: r"$^\ddagger$",
    "ε": r"$\varepsilon$",
}
SPECIAL |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def tex_text(words: str) -> str:
    """Words with what LaTeX takes for commands escaped."""
    return "".join(SPECIAL.get(letter, letter) for letter in words.replace("\\", "/"))


def latex(groups: Sequence[tuple[str, Sequence[Sequence[str]]]], caption: str, label: str, comment: str) -> str:
    """One table of several groups (title, rows with a common head) for booktabs."""
    head = groups[0][1][0]
    lines = [f"% {line}" for line in comment.splitlines()]
    lines += [
        r"\begin{table}",
        r"\centering",
        r"\small",
        rf"\begin{{tabular}}{{{'l' * min(3, len(head))}{'r' * (len(head) - 3)}}}",
    ]
    lines += [r"\toprule", " & ".join(map(tex_text, head)) + r" \\"]
    for title, rows in groups:
        lines += [r"\midrule", rf"\multicolumn{{{len(head)}}}{{l}}{{\textit{{{tex_text(title)}}}}} \\"]
        lines += [" & ".join(map(tex_text, row)) + r" \\" for row in rows[1:]]
    lines += [
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{tex_text(caption)}}}",
        rf"\label{{{label}}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"
