"""Reads the score of a finished run's record, of any version. Only this module handles old record formats.

A record holds `metrics` (name -> value after the last round), `score` (the name of the metric for choices, tables
and searches) and `higher_is_better`. Records of the first versions have `accuracy` and `loss` only; later
ones keep these two keys where the run has such metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_SCORE = "accuracy"
"""The score of records that do not name one."""
TOP_LEVEL_METRICS = (DEFAULT_SCORE, "loss")
"""Metrics that are also top-level keys of a record."""


@dataclass(frozen=True)
class StudyScore:
    """The metric for choices, tables and searches."""

    name: str = DEFAULT_SCORE
    higher_is_better: bool = True

    @property
    def is_fraction(self) -> bool:
        """Whether the metric is a fraction, shown in %."""
        return self.name.endswith(DEFAULT_SCORE)

    @property
    def unit(self) -> str:
        """The unit of its values in tables: "%" or nothing."""
        return "%" if self.is_fraction else ""

    @property
    def title(self) -> str:
        """Name, unit and direction, for headings: "accuracy in %", "rmse (lower is better)"."""
        named = f"{self.name} in %" if self.is_fraction else self.name
        return named if self.higher_is_better else f"{named} (lower is better)"

    def to_table_scale(self, value: float) -> float:
        """The value as tables show it."""
        return 100 * value if self.is_fraction else value

    def text(self, value: float) -> str:
        """The value for people: 97.31%, or 0.1234 if it is not a fraction."""
        return self.format_number(value) + self.unit

    def format_number(self, value: float) -> str:
        """The value for a table whose heading has the unit."""
        return f"{100 * value:.2f}" if self.is_fraction else f"{value:.4g}"

    def cell(self, scaled: float, sign: str = "") -> str:
        """A value of a table, `scaled` already: two decimals of a percentage, else four digits. sign: "+" or ""."""
        return f"{scaled:{sign}.2f}" if self.is_fraction else f"{scaled:{sign}.4g}"

    def rounded(self, scaled: float) -> float:
        """A value of a table as its JSON file keeps it: four decimals of a percentage, else six digits."""
        return round(scaled, 4) if self.is_fraction else float(f"{scaled:.6g}")

    def best(self, values: Iterable[float]) -> float:
        """The best of the values."""
        return max(values) if self.higher_is_better else min(values)

    def worst(self, values: Iterable[float]) -> float:
        """The worst of the values."""
        return min(values) if self.higher_is_better else max(values)

    def compute_lead(self, one: float, other: float) -> float:
        """By how much one value is better than another; negative where it is worse."""
        return one - other if self.higher_is_better else other - one


def get_record_score(record: Mapping[str, Any]) -> StudyScore:
    """The score of a record's run."""
    return StudyScore(record.get("score", DEFAULT_SCORE), record.get("higher_is_better", True))


def get_common_score(records: Iterable[Mapping[str, Any]]) -> StudyScore:
    """The common score of these records: that of the first; that of old records if there are none."""
    return next(map(get_record_score, records), StudyScore())


def get_record_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """All metrics of a record after its last round; a run's summary.json is also a record."""
    former = {name: record[name] for name in TOP_LEVEL_METRICS if record.get(name) is not None}
    return {**former, **record.get("metrics", {})}


def get_score_value(record: Mapping[str, Any]) -> float:
    """The value of a record's score after its last round."""
    return float(get_record_metrics(record)[get_record_score(record).name])


def make_score_entries(metrics: Mapping[str, float], score: StudyScore) -> dict[str, Any]:
    """The entries of a new record; metrics that old records have as top-level keys are also included."""
    former = {name: metrics[name] for name in TOP_LEVEL_METRICS if name in metrics}
    return {**former, "metrics": dict(metrics), "score": score.name, "higher_is_better": score.higher_is_better}


# --- chosen settings ------------------------------------------------------------------------------

OLD_CHOICE_KEY = f"validation_{DEFAULT_SCORE}"
"""Key of a choice's score in table-cells.json, and in files of chosen settings by the first versions."""


def update_choice_keys(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of a file of chosen settings with the current names."""
    return {"validation_score" if name == OLD_CHOICE_KEY else name: value for name, value in entry.items()}


def choice_to_cell_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """A choice with the keys of table-cells.json, which do not change."""
    return {OLD_CHOICE_KEY if name == "validation_score" else name: value for name, value in values.items()}
