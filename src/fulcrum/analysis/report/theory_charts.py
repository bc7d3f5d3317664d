"""L(C) at moments of a run, where `fulcrum theory objective RUN --out RUN/theory.json` measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fulcrum.analysis.report.chart_types import Axis, Chart, Series

OVER_C = {"C": Axis("clipping norm C", log=True)}


def read_moments(told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The moments of theory.json that are whole; somebody may have edited the file."""
    found = told.get("moments")
    kept = []
    for moment in found if isinstance(found, list) else []:
        try:
            points = [{name: float(point[name]) for name in POINT_FIELDS} for point in moment["points"]]
            numbers = {name: float(moment[name]) for name in ("best_C", "C_of_the_rule")}
            kept.append({"round": int(moment["round"]), "draws": int(moment["draws"]), **numbers, "points": points})
        except (KeyError, TypeError, ValueError):
            continue
    return [moment for moment in kept if moment["points"]]


POINT_FIELDS = ("C", "total", "interval", "start", "step", "clipping")


def make_objective_charts(moments: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """L(C) and its parts at each moment, from what `fulcrum theory objective` tells."""
    charts = []
    for moment in moments:
        points = moment["points"]
        at = {"C": tuple(point["C"] for point in points)}

        def line(name: str, values: Sequence[float], colour: int, at: Mapping[str, Any] = at, **more: Any) -> Series:
            return Series(name, tuple(values), at, colour, **more)

        total = [point["total"] for point in points]
        charts.append(
            Chart(
                key=f"theory-{moment['round']}",
                title=f"L(C) after round {moment['round']}",
                caption=f"Expected loss after one private round plus kappa C (95% band over {moment['draws']} draws); "
                f"least at C = {moment['best_C']:.3g}, the rule has {moment['C_of_the_rule']:.3g}.",
                group="theory",
                y=Axis("loss", log=max(total) > 10 * min(total)),
                x=OVER_C,
                series=(
                    line(
                        "L(C)",
                        total,
                        0,
                        low=tuple(p["total"] - p["interval"] for p in points),
                        high=tuple(p["total"] + p["interval"] for p in points),
                    ),
                    line("clipped step, no noise", [p["start"] + p["step"] + p["clipping"] for p in points], 1),
                ),
                levels=(("before the round", points[0]["start"]),),
            )
        )
    return charts
