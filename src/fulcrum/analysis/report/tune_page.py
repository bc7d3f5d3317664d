"""A page about a search: the front, the history, and what is recommended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fulcrum.analysis.report.chart_types import Axis, Chart, Series
from fulcrum.analysis.report.formats import ABSENT, format_number, format_setting
from fulcrum.analysis.report.html import Child, Html, make_table, tag
from fulcrum.analysis.report.numbers import write_csv
from fulcrum.analysis.report.page import assemble_page
from fulcrum.analysis.report.sections import make_facts, make_figures, make_section
from fulcrum.study.records import StudyScore
from fulcrum.study.search_run import Outcome
from fulcrum.study.tuning import Objective, Trial

CONTENTS = (("result", "Result"), ("charts", "Charts"), ("trials", "Trials"))


def make_tune_page(
    title: str,
    trials: Sequence[Trial],
    objectives: Sequence[Objective],
    outcome: Outcome,
    settings_text: str,
    notes: Sequence[str] = (),
) -> str:
    """The page. settings_text: the recommended settings file. notes: sentences about what the search cost."""
    charts = make_tune_charts(trials, objectives, outcome)
    chosen = trials[outcome.chosen]
    facts: list[tuple[str, Child]] = [(each.name, format_objective(each, chosen)) for each in objectives]
    facts += [(tag("code", name), format_setting(value)) for name, value in chosen.values.items()]
    if outcome.hypervolume is not None and outcome.reference is not None:
        corner = ", ".join(
            f"{each.name} {value:.4g}" for each, value in zip(objectives, outcome.reference, strict=True)
        )
        facts.append(("hypervolume", f"{outcome.hypervolume:.4g} (from the corner {corner})"))
        facts.append(("on the front", f"{len(outcome.front)} of {len(trials)} trials"))
    words = "The bend of the front" if len(objectives) > 1 else "The best trial"
    card = tag("div", tag("p", f"{words}: trial {chosen.number + 1} of {len(trials)}."), make_facts(facts),
               [tag("p", note, class_="small") for note in notes], class_="card")  # fmt: skip
    file = tag("details", tag("summary", "The recommended settings file"), tag("pre", tag("code", settings_text)),
               id="recommended")  # fmt: skip
    meta = tag("div", tag("span", f"{len(trials)} trials"), class_="meta")
    body: list[Child] = [
        make_section("result", "What is recommended", card, file),
        make_section("charts", "Charts", make_figures(charts, [chart.group or chart.key for chart in charts])),
        make_section("trials", "Trials", tag("div", make_trial_table(trials, objectives, outcome), class_="card")),
    ]
    return assemble_page(title, meta, body, charts, CONTENTS)


def format_objective(objective: Objective, trial: Trial) -> str:
    """The value of an objective as people read it."""
    value = trial.objectives[objective.name]
    return f"{100 * value:.2f}%" if StudyScore(objective.name).is_fraction else format_number(value)


def make_trial_table(trials: Sequence[Trial], objectives: Sequence[Objective], outcome: Outcome) -> Html:
    """A line per trial; those on the front have a star."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))
    rows = []
    for place, trial in enumerate(trials):
        star = " ★" if place in outcome.front else ""
        cells: list[Any] = [(f"{trial.number + 1}{star}", trial.number)]
        cells += [(format_objective(each, trial), trial.objectives[each.name]) for each in objectives]
        for name in names:
            value = trial.values.get(name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            shown = ABSENT if value is None else format_number(float(value)) if number else format_setting(value)
            cells.append((shown, float(value)) if number and value is not None else shown)
        rows.append(cells)
    return make_table(("trial", *(each.name for each in objectives), *names), rows, "trials; a star: on the front")


def make_tune_charts(trials: Sequence[Trial], objectives: Sequence[Objective], outcome: Outcome) -> list[Chart]:
    """The front of two objectives, or the best so far of one; and the first objective over each setting."""
    found = []
    score = next(each for each in objectives if each.name not in ("epsilon", "rounds", "bytes"))
    percent = StudyScore(score.name).is_fraction
    axis = Axis(score.name, percent=percent)
    values = [trial.objectives[score.name] for trial in trials]
    if len(objectives) > 1:
        cost = next(each for each in objectives if each is not score)
        others = tuple(trial.objectives[cost.name] for trial in trials)
        front = sorted(outcome.front, key=lambda i: others[i])
        line = Series(
            "front", tuple(values[i] for i in front), {"cost": tuple(others[i] for i in front)}, -1, dash=True
        )
        rest = [i for i in range(len(trials)) if i not in outcome.front]
        groups = [("other trials", rest, 5), ("on the front", [i for i in front if i != outcome.chosen], 0),
                  ("recommended", [outcome.chosen], 1)]  # fmt: skip
        dots = [
            Series(name, tuple(values[i] for i in own), {"cost": tuple(others[i] for i in own)}, colour)
            for name, own, colour in groups
            if own
        ]
        wide = min(others) > 0 and max(others) > 4 * min(others)
        words = f"Each point is a trial. The line joins those that no other beats in both {cost.name} and {score.name}."
        axes = {"cost": Axis(cost.name, log=wide, up=cost.name == "epsilon")}
        found.append(Chart("front", f"{score.name.capitalize()} against {cost.name}", words, axis, kind="dots",
                           x=axes, series=(line, *dots)))  # fmt: skip
    best, course = math.nan, []
    for value in values:
        better = math.isnan(best) or (value < best if score.lower_is_better else value > best)
        best = value if better else best
        course.append(best)
    numbers = {"trial": tuple(float(trial.number + 1) for trial in trials)}
    series = (
        Series("best so far", tuple(course), numbers, 0),
        Series("each trial", tuple(values), numbers, 5, dash=True),
    )
    found.append(Chart("history", "Over the trials", "What the search found, trial by trial.", axis,
                       x={"trial": Axis("trial")}, series=series))  # fmt: skip
    for name in dict.fromkeys(name for trial in trials for name in trial.values):
        known = [(trial.values[name], trial.objectives[score.name]) for trial in trials if name in trial.values]
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value, _ in known):
            continue
        xs = tuple(float(value) for value, _ in known)
        log = min(xs) > 0 and max(xs) > 4 * min(xs)
        dots_of = Series("trials", tuple(value for _, value in known), {"setting": xs}, 0)
        words = f"{score.name.capitalize()} over {name}; each point is a trial."
        across = {"setting": Axis(name, log=log)}
        found.append(Chart(f"setting-{name}", name, words, axis, "dots", "settings", across, (dots_of,)))
    return found


def trials_to_csv(trials: Sequence[Trial], objectives: Sequence[Objective], outcome: Outcome) -> str:
    """A line per trial."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))
    lines: list[list[str | float]] = [["trial", "front", *(each.name for each in objectives), *names]]
    for place, trial in enumerate(trials):
        known = [trial.values.get(name, "") for name in names]
        mark = "yes" if place in outcome.front else "no"
        lines.append([trial.number + 1, mark, *(trial.objectives[each.name] for each in objectives), *known])
    return write_csv(lines)
