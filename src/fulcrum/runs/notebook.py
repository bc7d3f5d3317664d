"""A result in a notebook: what it shows of itself, and its rounds as a data frame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fulcrum.errors import RunError
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.privacy.statement.units import UNIT_TEXTS

WORTH = {
    "yes": ("#0a7d52", "sound: this epsilon holds"),
    "simulation": ("#8a5a00", "simulation: holds only while the seed is secret"),
    "assumed": ("#8a5a00", "assumes a secure aggregation that is simulated"),
    "unknown": ("#8a5a00", "not known to be a guarantee"),
    "nominal": ("#b3261e", "not sound: the epsilon is nominal"),
    "none": ("#b3261e", "nothing was protected"),
}
"""By the statement's `guarantee`: a colour, and words."""
MAX_PARTIES_SHOWN = 12


def result_to_html(summary: Mapping[str, Any], folder: object) -> str:
    """The main facts of a finished run as a small table; every name in it is escaped."""
    colour, worth = WORTH.get(str(summary.get("guarantee")), WORTH["unknown"])
    unit = UNIT_TEXTS[summary["unit"]].short if summary.get("unit") in UNIT_TEXTS else "unit"
    rows = [("method", summary["method"]), ("rounds", f"{summary['rounds']}, {summary['status']}")]
    rows += [(name, _format_metric(name, value)) for name, value in summary["metrics"].items()]
    if summary["private"]:
        epsilon = f"{format_epsilon(summary['epsilon'])} for one {unit} at delta {summary['delta']:g}"
        rows.append(("epsilon", epsilon))
    rows.append(("parties", summary["parties"]))
    if folder is not None:
        rows.append(("folder", folder))
    body = "".join(_make_row(name, value) for name, value in rows)
    mark = f'<p style="color:{colour};font-weight:600;margin:.2em 0">{escape(worth)}</p>'
    return f"<div>{mark}<table>{body}</table>{_make_party_table(summary)}</div>"


def _make_row(name: object, value: object) -> str:
    left = 'style="text-align:left"'
    return f"<tr><th {left}>{escape(str(name))}</th><td {left}>{escape(str(value))}</td></tr>"


def _make_party_table(summary: Mapping[str, Any]) -> str:
    parties = summary.get("party_metrics", {})
    if not 0 < len(parties) <= MAX_PARTIES_SHOWN:
        return ""
    score = str(summary["score"])
    rows = "".join(_make_row(name, _format_metric(score, own.get(score))) for name, own in parties.items())
    return f"<p>{escape(score)} on each party's records</p><table>{rows}</table>"


def _format_metric(name: str, value: Any) -> str:
    number = math.nan if value is None else float(value)
    if math.isnan(number):
        return "-"
    return f"{100 * number:.1f}%" if name.endswith("accuracy") else f"{number:.4g}"


def lines_to_columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The lines of metrics.jsonl as columns of equal length: round, epsilon, C, seconds, participants (how many), each
    metric by its name, "mean NAME" over parties, and "course NAME". None where a round has no value."""
    rows = []
    for line in lines:
        row: dict[str, Any] = {name: line.get(name) for name in ("round", "epsilon", "C", "seconds")}
        if line.get("participants") is not None:
            row["participants"] = len(line["participants"])
        row |= line.get("metrics", {})
        row |= {f"mean {name}": value for name, value in line.get("mean_over_parties", {}).items()}
        row |= {f"course {name}": value for name, value in line.get("course", {}).items()}
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_to_value(row.get(name)) for row in rows] for name in names}


def _to_value(value: Any) -> Any:
    return math.inf if value == "inf" else value


def lines_to_frame(lines: Sequence[Mapping[str, Any]]) -> Any:
    """The rounds as a pandas DataFrame, one row per round, indexed by it."""
    try:
        import pandas
    except ImportError as error:
        raise RunError("to_frame needs pandas: pip install 'fulcrum-fl[figures]'.") from error
    columns = lines_to_columns(lines)
    frame = pandas.DataFrame(columns)
    return frame.set_index("round") if "round" in columns else frame
