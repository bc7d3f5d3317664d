"""What an attacker can reach at most, and what the audit's attacker reached: as a chart and for the section on privacy.

The bound is `meaning` of privacy.json; of runs that have none it follows from (epsilon, delta). The audit's points are
in audit.json, which `fulcrum audit` writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fulcrum.analysis.report.chart_types import Axis, Chart, Series
from fulcrum.analysis.report.model import RunView
from fulcrum.analysis.report.reading import get_list, get_mapping, to_number, to_text
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.privacy.meaning import Promise, list_roc_points
from fulcrum.privacy.statement.meaning import UNIT_WORDS, find_watcher, make_meaning

FALSE_POSITIVES = "false_positives"
MAX_AUDITED = 8
"""Points of so many parties are drawn."""
LOWEST_RATE = 1e-4
"""The chart begins at this rate of false positives."""
PROMISING = ("yes", "simulation", "assumed")
"""Verdicts under which the sentences are shown, with their conditions; with others nothing is promised."""


def find_meaning(run: RunView) -> Mapping[str, Any]:
    """What the run's epsilon means, as privacy.json has it or made anew; empty where there is no finite epsilon."""
    if run.guarantee not in PROMISING or not math.isfinite(run.epsilon) or not 0 <= run.delta < 1 or run.epsilon < 0:
        return {}
    told = get_mapping(run.statement, "meaning")
    if _is_whole(told):
        return told
    watcher = find_watcher(run.unit, to_text(run.statement.get("aggregation"), "plain"))
    return make_meaning(Promise(((run.epsilon, run.delta),)), watcher, run.unit, run.guarantee)


def _is_whole(told: Mapping[str, Any]) -> bool:
    """Whether every number is there; somebody may have edited the file."""
    rows = [
        (get_list(told, "beliefs"), ("prior", "posterior")),
        (get_list(told, "tests"), (FALSE_POSITIVES, "true_positives")),
    ]
    numbers = [
        to_number(each.get(name)) if isinstance(each, dict) else math.nan
        for part, names in rows
        for each in part
        for name in names
    ]
    numbers += [
        to_number(told.get("guess")),
        to_number(told.get("exception")),
        float(len(read_points(told, "roc")) - 2),
    ]
    return (
        all(map(math.isfinite, numbers))
        and min(numbers) >= 0
        and all(part for part, _ in rows)
        and bool(get_list(told, "text"))
    )


def read_points(told: Mapping[str, Any], name: str) -> list[tuple[float, float]]:
    """Points (false positives, true positives) from 0 to 1, in the order of the first; others are left out."""
    pairs = [
        (to_number(each[0]), to_number(each[1]))
        for each in get_list(told, name)
        if isinstance(each, list) and len(each) == 2
    ]
    return sorted(pair for pair in pairs if all(0 <= value <= 1 for value in pair))


def make_attack_charts(run: RunView) -> list[Chart]:
    """The bound on every attacker's true positives over its false positives, with the audit's points in it."""
    told = find_meaning(run)
    if not told:
        return []
    rates = np.geomspace(LOWEST_RATE, 1.0, 81)

    def line(name: str, points: Sequence[tuple[float, float]], colour: int, dash: bool = False) -> Series:
        heights = np.interp(rates, *(np.array(points).T)).tolist()
        return Series(name, tuple(heights), {FALSE_POSITIVES: tuple(rates.tolist())}, colour, dash=dash)

    alone = list_roc_points(Promise(((run.epsilon, run.delta),)))
    series = [line("no attacker is above", read_points(told, "roc"), 0)]
    if told.get("source") == "pld":
        series.append(line("by (epsilon, delta) alone", alone, 5, dash=True))
    series.append(line("guessing", [(0.0, 0.0), (1.0, 1.0)], 3, dash=True))
    what = UNIT_WORDS.get(run.unit, "one unit")
    words = (
        f"Tests for whether {what} took part: how many members any attacker finds at most, at each rate of false "
        f"positives, if epsilon = {format_epsilon(run.epsilon)} at delta = {run.delta:g} holds."
    )
    if told.get("holds") is not True:
        words += " It does not hold here without conditions: see the sentences above."
    points = list_audit_points(run.audit)
    series += [Series(name, (hits,), {FALSE_POSITIVES: (alarms,)}, 1, names=(name,)) for name, alarms, hits in points]
    if points:
        words += " The dots are what the audit's attacker reached."
    axes = {FALSE_POSITIVES: Axis("false positives", log=True, percent=True)}
    return [
        Chart(
            "attack",
            "What an attacker can reach",
            words,
            Axis("true positives", log=True, percent=True),
            x=axes,
            series=tuple(series),
        )
    ]


def list_audit_points(audit: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(name, false positives, true positives) that audit.json's counts give; what is not whole is left out.

    Of all parties together where the audit has that, else of each party.
    """
    whole = get_mapping(audit, "together")
    entries = [whole] if whole else [each for each in get_list(audit, "parties") if isinstance(each, dict)]
    found = []
    for entry in entries[:MAX_AUDITED]:
        for bound in get_list(entry, "bounds"):
            point = _read_point(get_mapping(bound, "numbers"), entry) if isinstance(bound, dict) else None
            if point is not None:
                alarms, hits = (max(rate, LOWEST_RATE) for rate in point)
                found.append((f"audit, {to_text(bound.get('method'))}, {to_text(entry.get('name'))}", alarms, hits))
    return list({point[1:]: point for point in found}.values())


def _read_point(numbers: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[float, float] | None:
    """(false positives, true positives) as rates, from counts of canaries that were in and out."""
    if "guesses" in numbers:  # of both sides, half of the guesses are about canaries that are in
        sides = to_number(numbers.get("sides"))
        right, made = (to_number(numbers.get(name)) / max(sides, 1.0) for name in ("correct", "guesses"))
        members = to_number(entry.get("included"))
        hits, alarms, others = right, made - right, to_number(entry.get("canaries")) - members
    else:
        hits, members, alarms, others = (
            to_number(numbers.get(name)) for name in ("true_positives", "members", "false_positives", "others")
        )
    rates = (alarms / others, hits / members) if members > 0 and others > 0 else (math.nan, math.nan)
    return rates if all(0 <= rate <= 1 for rate in rates) else None


def describe_audit(audit: Mapping[str, Any]) -> str:
    """What the audit measured beside the claim, in a sentence; "" where there is none."""
    measured = get_mapping(audit, "measured")
    least, claimed = (to_number(measured.get(name)) for name in ("epsilon", "claimed"))
    if not (math.isfinite(least) and math.isfinite(claimed)):
        return ""
    sure, method = to_number(audit.get("confidence")), to_text(measured.get("method"))
    how = f"{method}, {100 * sure:.4g}% confidence" if sure > 0 else method
    shown = f"{math.floor(100 * least) / 100:g}"  # down: it is a lower bound
    words = f"The audit measured an epsilon of at least {shown} ({how}) where {format_epsilon(claimed)} is claimed"
    if audit.get("passed") is False:
        return f"{words}: IT CONTRADICTS THE CLAIM."
    assumed = to_text(measured.get("assumes"))
    more = f" It assumes that {assumed}." if assumed else ""
    return f"{words}. A low bound says nothing: a better attacker may find more.{more}"
