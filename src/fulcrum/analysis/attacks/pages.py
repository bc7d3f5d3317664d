"""What people see of membership attacks: a table, a curve, and the stored file with its provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fulcrum
from fulcrum.analysis.attacks.cells import name_epsilon
from fulcrum.analysis.attacks.inversion import InversionRow, TokensRow
from fulcrum.analysis.attacks.membership import AttackResult, CellReport
from fulcrum.analysis.attacks.roc import ROC_GRID, Estimate
from fulcrum.runs import folder as record
from fulcrum.study.figures import PALETTE, draw_line_plot
from fulcrum.study.provenance import get_command_line, get_source_commit
from fulcrum.study.run_job import describe_machine
from fulcrum.study.stats import compute_mean_interval

COLUMNS = ("epsilon", "view", "attack", "AUC", "at most", "TPR at 0.1% FPR", "at most", "twins' AUC")
VIEWS = {
    "model": "the final model",
    "releases": "one party's releases",
    "releases-joint": "one party's releases, candidates listed",
}
"""Views of the attacker, and their names in titles."""


def make_rows(reports: Sequence[CellReport], every: bool = False) -> list[list[str]]:
    """The rows of the table: of each view the attack with the largest AUC, or every attack."""
    rows = []
    for report in reports:
        epsilon = name_epsilon(report.cell.epsilon)
        for result in report.results if every else [report.best(view) for view in VIEWS]:
            rows.append([epsilon, result.view, result.attack, *_format_result(report, result)])
    return rows


def _format_result(report: CellReport, result: AttackResult) -> list[str]:
    limit = report.limit.to_json() if report.limit else None
    tpr: Any = limit["tpr"] if limit else {}
    return [
        format_estimate(result.roc.auc, 3),
        f"{limit['auc']:.3f}" if limit else "1",
        format_estimate(result.roc.tpr[0.001], 4),
        f"{tpr['0.001']:.4f}" if limit else "1",
        format_estimate(result.control.auc, 3),
    ]


def format_estimate(found: Estimate, digits: int) -> str:
    """0.664 [0.650, 0.685], from the values of the JSON file, so that all tables round alike."""
    kept = found.to_json()
    return f"{kept['value']:.{digits}f} [{kept['low']:.{digits}f}, {kept['high']:.{digits}f}]"


def make_markdown(reports: Sequence[CellReport], every: bool = False) -> str:
    """The same table for a page."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in make_rows(reports, every))]) + "\n"


def describe_making(device: str = "auto") -> dict[str, Any]:
    """Command, date, commit and machine of this process."""
    return {
        "command": get_command_line(),
        "date": record.current_utc_time(),
        "commit": get_source_commit(),
        "machine": describe_machine(device),
    }


def report_to_json(
    reports: Sequence[CellReport], device: str = "auto", made: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All cells, and where and how they were made: `made`, or by this process."""
    return {
        "kind": "membership",
        **(describe_making(device) if made is None else made),
        "seeds": sorted({report.cell.seed for report in reports}),
        "fpr_of_curves": [float(f"{rate:.4g}") for rate in ROC_GRID],
        "cells": [report.to_json() for report in reports],
    }


def inversion_to_json(
    rows: Sequence[InversionRow],
    texts: Sequence[TokensRow] = (),
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Both tables of gradient inversion, and where and how they were made. seed: the settings' run.seed."""
    return {
        "kind": "inversion",
        **describe_making("cpu"),
        "seeds": [seed],
        "images": [row.to_json() for row in rows],
        "tokens": [row.to_json() for row in texts],
        "settings": dict(settings or {}),
    }


INVERSION_COLUMNS = ("data", "epsilon", "attack", "model", "batch", "images", "PSNR (dB)", "SSIM", "mean image")
TOKEN_COLUMNS = ("data", "epsilon", "batch", "batches", "tokens found", "guessing")


def make_inversion_rows(rows: Sequence[InversionRow]) -> list[list[str]]:
    """The rows of the table: mean and half-width of the 95% t interval over images."""
    return [
        [
            row.data,
            name_epsilon(row.epsilon),
            row.attack,
            row.model,
            row.batch,
            str(len(row.psnr)),
            format_mean(row.psnr, 1),
            format_mean(row.ssim, 2),
            f"{row.baseline[0]:.1f}, {row.baseline[1]:.2f}",
        ]
        for row in rows
    ]


def make_token_rows(rows: Sequence[TokensRow]) -> list[list[str]]:
    """The rows of the table of tokens: shares of each batch's different tokens."""
    return [
        [
            row.data,
            name_epsilon(row.epsilon),
            row.batch,
            str(len(row.found)),
            format_mean(row.found, 3),
            f"{row.guessing:.3f}",
        ]
        for row in rows
    ]


def format_mean(values: Sequence[float], digits: int) -> str:
    """29.0 ± 3.1."""
    found = compute_mean_interval(list(values))
    return f"{found.mean:.{digits}f}" + (f" ± {found.half:.{digits}f}" if found.n > 1 else "")


def format_making(facts: Mapping[str, Any]) -> str:
    """One line for pages and figures, in the words that tools/provenance.py reads."""
    machine, seeds = facts["machine"], ", ".join(map(str, facts["seeds"]))
    hardware = (
        machine["device"] if "NVIDIA" in machine["device"] else f"{machine['processor']} ({machine['cores']} cores)"
    )
    return (
        f"Made by `{facts['command']}` on {facts['date']} with fulcrum {fulcrum.__version__} ({facts['commit']}); "
        f"seeds {seeds}. Hardware: {hardware}, Python {machine['python']}, torch {machine['torch']}."
    )


def draw_roc(reports: Sequence[CellReport], view: str, title: str, note: str = "") -> str:
    """ROC curves of a view's best attack per epsilon, beside what the accountant allows, both axes logarithmic: SVG.

    note: a comment kept in the file.
    """
    series: dict[str, list[tuple[float, float]]] = {}
    allowed: dict[str, list[tuple[float, float]]] = {}
    order = ["guessing"]
    dashed = ["" for _ in PALETTE]
    for report in reports:
        epsilon = name_epsilon(report.cell.epsilon)
        name = "no privacy" if report.cell.epsilon is None else f"epsilon {epsilon}"
        series[name] = list(zip(ROC_GRID.tolist(), report.best(view).roc.curve.tolist(), strict=True))
        order.append(name)
        if report.limit:
            bound = f"allowed by {epsilon} (dashed)"
            allowed[bound] = list(zip(ROC_GRID.tolist(), report.limit.tpr(ROC_GRID).tolist(), strict=True))
            dashed[(len(order) - 1) % len(PALETTE)] = bound
    # A bound has its curve's colour, one turn of the palette later, which is where lines are dashed.
    order += [""] * (-len(order) % len(PALETTE)) + dashed
    series = {**series, **allowed, "guessing": [(rate, rate) for rate in ROC_GRID.tolist()]}
    return draw_line_plot(series, title, "false positives", "true positives", True, note, order, True)


def write_report(
    path: Path, reports: Sequence[CellReport], device: str = "auto", made: Mapping[str, Any] | None = None
) -> list[Path]:
    """Write PATH (JSON), and beside it PATH.md and a ROC figure per view. made: see `report_to_json`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts: Mapping[str, Any] = report_to_json(reports, device, made)
    record.write_file_atomically(path, record.to_json_text(facts).encode())
    page, note = path.with_suffix(".md"), format_making(facts)
    page.write_text(f"{make_markdown(reports, True)}\n{note}\n", "utf-8")
    source = f"{facts['command']} | {facts['date']} | {facts['commit']}"
    written = [path, page]
    for view in VIEWS:
        figure = path.with_name(f"{path.stem}-{view}.svg")
        figure.write_text(draw_roc(reports, view, f"{path.stem}: membership from {VIEWS[view]}", source), "utf-8")
        written.append(figure)
    return written
