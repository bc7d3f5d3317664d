"""Cells -> Markdown and LaTeX. Numbers are scores (fractions in %) with the half-width of a 95% interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from fulcrum.study.records import StudyScore
from fulcrum.study.stats import MeanInterval
from fulcrum.study.table_cells import TableCell

DATASET_TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "digits": "digits"}
NOMINAL_MARK, ASSUMED_MARK = "†", "‡"
SUMS_ONLY_TEXT = "server sees sums only, simulated"
UNIT_TITLES = {"example": "example", "person": "person", "client": "whole party (trusted server)", "": "nothing"}


def make_dataset_label(dataset: str, cells: Iterable[TableCell]) -> str:
    """The data set as the tables name it; a copy that differs from the public file is marked."""
    name = DATASET_TITLES.get(dataset, dataset)
    copied = any("not the public file" in note for cell in cells if cell.dataset == dataset for note in cell.notes)
    if not copied:
        return name
    return f"{name} (JPEG copy)" if dataset == "cifar10" else f"{name} (changed copy)"


def format_interval(stats: MeanInterval, score: StudyScore, sign: str = "") -> str:
    """97.31 ± 0.20, or 0.8123 ± 0.0101 if the score is not a percentage; the interval needs two values."""
    if stats.n == 0:
        return "-"
    return score.cell(stats.mean, sign) + ("" if math.isnan(stats.half) else f" ± {_half_width(stats.half, score)}")


def _half_width(half: float, score: StudyScore) -> str:
    return score.cell(half) if score.is_fraction else f"{half:.2g}"


def format_signed_interval(cell: TableCell | None) -> str:
    """By how much moo is ahead of a cell: +0.31 ± 0.20."""
    return "" if cell is None or cell.ahead is None else format_interval(cell.ahead, cell.score, "+")


def arrange_cells(
    cells: Sequence[TableCell], column: Callable[[TableCell], float | int | None]
) -> list[tuple[TableCell, dict[object, TableCell]]]:
    """Rows of a table in order of appearance: (a cell of the row, its cells by column)."""
    rows: dict[tuple[str, int | str], dict[object, TableCell]] = {}
    for cell in cells:
        rows.setdefault((cell.row, cell.unit), {})[column(cell)] = cell
    return [(next(iter(by.values())), by) for by in rows.values()]


def make_markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is the head."""
    head, *rest = rows
    lines = ["| " + " | ".join(row) + " |" for row in rest]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]) + "\n"


def make_score_rows(cells: Sequence[TableCell], epsilons: Sequence[float]) -> list[list[str]]:
    """The table of scores of one data set: ours with the paper's figure beside it."""
    head = ["method", "protects", "K", *(f"ε = {e:g}" for e in epsilons)]
    rows = [head]
    for first, by in arrange_cells(cells, lambda c: c.epsilon):
        shown = [by.get(e, by.get(None)) for e in epsilons]
        rows.append(
            [make_row_label(first), describe_protection(first), str(first.parties), *map(_format_with_paper, shown)]
        )
    return rows


def make_row_label(cell: TableCell) -> str:
    """A row's label; marks say that its epsilon is nominal, or assumes a secure aggregation that is not implemented."""
    marks = [
        mark
        for mark, due in ((NOMINAL_MARK, not cell.sound), (ASSUMED_MARK, cell.aggregation == "ideal-secagg"))
        if due
    ]
    return " ".join([cell.label, *marks])


def describe_protection(cell: TableCell) -> str:
    """What one epsilon protects, and from whom where that is not a server that sees every update."""
    notes = {"ideal-secagg": f" ({SUMS_ONLY_TEXT})", "pairwise": " (masked sums)"}
    return UNIT_TITLES[cell.unit] + notes.get(cell.aggregation, "")


def _format_with_paper(cell: TableCell | None) -> str:
    if cell is None:
        return "-"
    paper = f" (paper {cell.paper:.2f})" if cell.paper is not None else ""
    short = f" [{cell.stats.n} of {cell.wanted} seeds]" if 0 < cell.stats.n < cell.wanted else ""
    return format_interval(cell.stats, cell.score) + short + paper


def make_lead_rows(cells: Sequence[TableCell], epsilons: Sequence[float]) -> list[list[str]]:
    """By how much moo is ahead of each row, paired by seed; in points where the score is a percentage."""
    rows = [["moo ahead of", *(f"ε = {e:g}" for e in epsilons)]]
    for first, by in arrange_cells([c for c in cells if c.ahead is not None], lambda c: c.epsilon):
        rows.append([make_row_label(first), *(format_signed_interval(by.get(e)) for e in epsilons)])
    return rows


def make_parties_rows(cells: Sequence[TableCell], counts: Sequence[int]) -> list[list[str]]:
    """The score over the number of parties, of one data set and epsilon."""
    rows = [["method", *(f"K = {k}" for k in counts), "paper (K not stated)"]]
    for first, by in arrange_cells(cells, lambda c: c.parties):
        paper = f"{first.paper:.2f}" if first.paper is not None else ""
        rows.append(
            [first.label, *(format_interval(by[k].stats, by[k].score) if k in by else "-" for k in counts), paper]
        )
    return rows


def describe_paper_reach(cells: Sequence[TableCell], counts: Sequence[int]) -> str:
    """A sentence: for which numbers of parties each row is at the paper's figure or above it; empty if none has one."""
    found = []
    for first, by in arrange_cells(cells, lambda c: c.parties):
        measured = [k for k in counts if k in by and by[k].values]
        paper = first.paper
        if paper is None or not measured:
            continue
        there = [k for k in measured if by[k].stats.mean >= paper]
        where = "every K measured" if there == measured else f"K = {', '.join(map(str, there))}" if there else "no K"
        found.append(f"{first.label} at {where}")
    return f"At the paper's figure or above: {'; '.join(found)}.\n" if found else ""


# --- LaTeX ----------------------------------------------------------------------------------------

LATEX_ESCAPES = {
    "&": r"\&",
    "%": r"\%",
    "_": r"\_",
    "#": r"\#",
    "±": r"$\pm$",
    NOMINAL_MARK: r"$^\dagger$",
    ASSUMED_MARK: r"$^\ddagger$",
    "ε": r"$\varepsilon$",
}
LATEX_ESCAPES |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def escape_latex(words: str) -> str:
    """The text with LaTeX's special characters escaped."""
    return "".join(LATEX_ESCAPES.get(letter, letter) for letter in words.replace("\\", "/"))


def make_latex_table(
    groups: Sequence[tuple[str, Sequence[Sequence[str]]]], caption: str, label: str, comment: str
) -> str:
    """One table of several groups (title, rows with a common head) for booktabs."""
    head = groups[0][1][0]
    lines = [f"% {line}" for line in comment.splitlines()]
    lines += [
        r"\begin{table}",
        r"\centering",
        r"\small",
        rf"\begin{{tabular}}{{{'l' * min(3, len(head))}{'r' * (len(head) - 3)}}}",
    ]
    lines += [r"\toprule", " & ".join(map(escape_latex, head)) + r" \\"]
    for title, rows in groups:
        lines += [r"\midrule", rf"\multicolumn{{{len(head)}}}{{l}}{{\textit{{{escape_latex(title)}}}}} \\"]
        lines += [" & ".join(map(escape_latex, row)) + r" \\" for row in rows[1:]]
    lines += [
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{escape_latex(caption)}}}",
        rf"\label{{{label}}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"
