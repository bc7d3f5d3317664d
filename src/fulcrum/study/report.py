"""Writes the output of a study: tables in three formats, figures, and their provenance."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulcrum.privacy.accounting import format_epsilon
from fulcrum.runs.folder import to_json_value
from fulcrum.study import figures, tables
from fulcrum.study.calibrate import calibrate_jobs
from fulcrum.study.experiment import (
    Experiment,
    list_paper_jobs,
    list_parties_jobs,
    list_protocol_jobs,
    list_tuning_jobs,
)
from fulcrum.study.job import StudyJob
from fulcrum.study.provenance import collect_provenance, provenance_to_line, provenance_to_markdown
from fulcrum.study.records import StudyScore
from fulcrum.study.selection import compute_tuning_cost
from fulcrum.study.store import RunRecord
from fulcrum.study.table_cells import OUR_METHOD, TableCell, count_wins, make_table_cells

TABLE_CAPTION = (
    "Test {title}, mean over seeds with 95% t interval; in brackets the figure of the paper. "
    "Privacy of one run at delta = {delta:g}; tuning is not charged."
)


def write_text_file(file: Path, text: str) -> None:
    """Write a text file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def write_json_file(file: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text_file(file, json.dumps(to_json_value(value), indent=1) + "\n")


def file_stem(dataset: str) -> str:
    """A data set as part of a file's name: mnist, patients (for a/patients.npz)."""
    name = Path(dataset).stem if dataset.endswith(".npz") else dataset
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def select_job_results(jobs: Iterable[StudyJob], done: Mapping[str, RunRecord]) -> list[RunRecord]:
    """The results that belong to these jobs."""
    return [done[job.id] for job in jobs if job.id in done]


# --- the paper's table ----------------------------------------------------------------------------


def write_table(
    folder: Path, experiment: Experiment, done: Mapping[str, RunRecord], name: str = "table"
) -> list[TableCell]:
    """The main table ("table"), or that of the paper's own protocol ("protocol"), with its figures."""
    protocol = name == "protocol"
    jobs = (list_protocol_jobs if protocol else list_paper_jobs)(experiment)
    cells = make_table_cells(experiment, jobs, done, protocol)
    facts = collect_provenance(describe_experiment(experiment), experiment.seeds, select_job_results(jobs, done))
    filled = [cell for cell in cells if cell.values]
    write_json_file(folder / f"{name}.json", [cell.to_json() for cell in filled])
    write_json_file(
        folder / f"{name}-cells.json", {"provenance": facts, "cells": [cell.to_detailed_json() for cell in filled]}
    )
    tuned = experiment.name == "paper" or any(cell.choice for cell in cells)
    costs = compute_selection_costs(experiment, protocol) if tuned else {}
    write_text_file(folder / f"{name}.md", make_table_page(experiment, cells, facts, costs, protocol))
    groups = [
        (
            tables.make_dataset_label(dataset, cells),
            tables.make_score_rows(_select_cells(cells, dataset), experiment.epsilons),
        )
        for dataset in experiment.datasets
    ]
    delta = float(experiment.settings.get("privacy", {}).get("delta", 1e-5))
    comment = "\n".join([provenance_to_line(facts), *make_table_notes(cells, costs)])
    write_text_file(
        folder / f"{name}.tex",
        tables.make_latex_table(
            groups, TABLE_CAPTION.format(title=make_score_title(cells), delta=delta), f"tab:{name}", comment
        ),
    )
    write_curves(folder / "figures", name, cells, provenance_to_line(facts))
    return cells


def _select_cells(cells: Iterable[TableCell], dataset: str, epsilon: float | None = None) -> list[TableCell]:
    return [c for c in cells if c.dataset == dataset and (epsilon is None or c.epsilon in (epsilon, None))]


def make_score_title(cells: Iterable[TableCell]) -> str:
    """The score and unit of a table's numbers; several if data sets have different scores."""
    return " or ".join(dict.fromkeys(cell.score.title for cell in cells if cell.values)) or StudyScore().title


def score_of_cells(cells: Iterable[TableCell]) -> StudyScore:
    """The score of the first cell with results; that of old records if there is none."""
    return next((cell.score for cell in cells if cell.values), StudyScore())


def describe_experiment(experiment: Experiment) -> dict[str, Any]:
    """The study's own settings, as the files give them."""
    return {
        "epsilons": list(experiment.epsilons),
        "settings": experiment.settings,
        "by_dataset": experiment.by_dataset,
        "search": dataclasses.asdict(experiment.search),
    }


def make_table_page(
    experiment: Experiment,
    cells: Sequence[TableCell],
    facts: dict[str, Any],
    costs: TuningCosts,
    protocol: bool = False,
) -> str:
    """The Markdown page."""
    title = "The paper's own protocol: one C0 for all methods" if protocol else experiment.title
    parts = [f"# {title}\n", f"Test {make_score_title(cells)}, mean over seeds ± half of the 95% t interval.\n"]
    if protocol:
        parts.append(f"All methods start from C0 = {experiment.protocol['C0']:g}; nothing else of C is tuned.\n")
    for dataset in experiment.datasets:
        own = _select_cells(cells, dataset)
        parts += [
            f"## {tables.make_dataset_label(dataset, cells)}\n",
            tables.make_markdown_table(tables.make_score_rows(own, experiment.epsilons)),
        ]
        ahead = tables.make_lead_rows(own, experiment.epsilons)
        if len(ahead) > 1:
            score = score_of_cells(own)
            by = (
                "Points by which `moo` is ahead" if score.is_fraction else f"By how much `moo` is ahead in {score.name}"
            )
            parts += [f"{by}, paired by seed:\n", tables.make_markdown_table(ahead)]
    good, all_, behind = count_wins(cells)
    if all_:
        lost = f" Behind: {'; '.join(behind)}." if behind else ""
        parts.append(f"`moo` is not behind any sound baseline of its unit in {good} of {all_} cells.{lost}\n")
    parts += compare_with_paper(cells)
    said = [*experiment.notes, *make_table_notes(cells, costs)]
    parts += ["## Notes\n", "".join(f"- {note}\n" for note in said)]
    parts += ["## Settings\n", describe_settings(experiment), "### Chosen\n", make_choices_table(cells)]
    return "\n".join([*parts, "---\n", provenance_to_markdown(facts)])


def compare_with_paper(cells: Sequence[TableCell]) -> list[str]:
    """A sentence on how many of moo's cells reach the paper's figure, and which do not; empty without any cell."""
    own = [c for c in cells if c.row == OUR_METHOD and c.paper is not None and c.values]
    if not own:
        return []
    below = [
        f"{tables.make_dataset_label(c.dataset, cells)} at {format_epsilon(c.epsilon or 0.0, 6)}, "
        f"{tables.format_interval(c.stats, c.score)} "
        f"against {c.paper:.2f}"
        for c in own
        if c.paper is not None and c.stats.mean < c.paper
    ]
    rest = f" Below it: {'; '.join(below)}." if below else ""
    return [f"`moo` has at least the paper's figure in {len(own) - len(below)} of {len(own)} cells.{rest}\n"]


def describe_settings(experiment: Experiment) -> str:
    """The study's settings as the files give them, and the rules of the search."""
    search = experiment.search
    lines = [
        "```",
        *(f"[{s}] " + ", ".join(f"{k} = {v}" for k, v in t.items()) for s, t in experiment.settings.items()),
    ]
    for dataset, sections in experiment.by_dataset.items():
        lines += [f"{dataset}: [{s}] " + ", ".join(f"{k} = {v}" for k, v in t.items()) for s, t in sections.items()]
    if not search.trials:
        return "\n".join([*lines, "```"]) + "\n"
    lines += [
        f"search: {search.trials} trials a cell, seed {search.seed}, judged on {search.validation:g} of the data",
        *(f"  {path}: {dimension}" for path, dimension in search.space.items()),
        *(
            f"  {row.name}: {own}"
            for row in experiment.rows
            if (own := _describe_own_ranges(search.rows.get(row.name, {})))
        ),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _describe_own_ranges(own: Mapping[str, Any]) -> str:
    """What one row searches in addition to or instead of the shared space, in words."""
    dropped, instead = own.get("drop", ()), own.get("instead", {})
    ranges = {f"{d['path']} (in place of {path})": d for path, d in instead.items()} | dict(own.get("space", {}))
    parts = [f"{path} { ({k: v for k, v in d.items() if k != 'path'}) }" for path, d in ranges.items()]
    for dataset, space in own.get("datasets", {}).items():
        parts += [f"on {dataset} {path} {dimension}" for path, dimension in space.items()]
    return ", ".join([*parts, *([f"without {' and '.join(dropped)}"] if dropped else [])])


def make_choices_table(cells: Sequence[TableCell]) -> str:
    """What was chosen for each cell, from how many trials."""
    unit = " %" if all(cell.score.is_fraction for cell in cells if cell.values) else ""
    judged_on = [f"validation{unit}", f"worst trial{unit}"]
    rows = [["data", "ε", "method", "trial", "of", *judged_on, "tuned at ε", "settings"]]
    for cell in cells:
        c, at = cell.choice, _format_epsilon(cell.epsilon)
        if c is None:
            rows.append([cell.dataset, at, cell.label, "-", "0", "-", "-", "-", "not tuned: the preset as it is"])
            continue
        words = ", ".join(f"{path} {value}" for path, value in c.settings.items()) or "the preset as it is"
        shown = cell.score.format_number
        judged = shown(c.validation_score), "-" if c.worst is None else shown(c.worst)
        rows.append(
            [cell.dataset, at, cell.label, str(c.trial), str(c.trials), *judged, _format_epsilon(c.epsilon), words]
        )
    return tables.make_markdown_table(rows)


def _format_epsilon(epsilon: float | None) -> str:
    return "-" if epsilon is None else format_epsilon(epsilon, 6)


def make_table_notes(cells: Sequence[TableCell], costs: TuningCosts) -> list[str]:
    """Notes for readers of the table."""
    found = []
    if any(not cell.sound for cell in cells):
        found.append(
            f"{tables.NOMINAL_MARK} not sound: the rule sets C from raw private values, so its epsilon is nominal."
        )
    if any(cell.aggregation == "ideal-secagg" for cell in cells):
        found.append(
            f"{tables.ASSUMED_MARK} ANOTHER ADVERSARY: the server is taken to see nothing but the sum over all "
            "parties, through an ideal secure aggregation that is simulated and not implemented; no party colludes, "
            "all take part. The parties share one dose of noise, so a single update by itself would NOT be private at "
            f"this epsilon. Rows without {tables.ASSUMED_MARK} protect examples from a server that sees every update, "
            "and are not compared."
        )
    if any(cell.unit == "client" for cell in cells):
        found.append(
            "DP-FedAvg protects whole parties against outsiders who see the models, with a trusted server that adds "
            "the noise: another unit and another adversary than the other rows, which protect single examples against "
            "the server. It is not compared with moo, and its natural setting has thousands of parties."
        )
    found += sorted({note for cell in cells for note in cell.notes if "not the public file" in note})
    reused: dict[tuple[str, float], list[str]] = {}
    for c in cells:
        if c.choice is not None and c.choice.epsilon is not None and c.choice.epsilon != c.epsilon:
            reused.setdefault((c.dataset, c.choice.epsilon), []).append(c.label)
    for (dataset, at), labels in reused.items():
        found.append(
            f"{dataset}: tuned at epsilon {format_epsilon(at, 6)} and reused at the others: "
            f"{', '.join(dict.fromkeys(labels))}."
        )
    bare = [c for c in cells if c.choice is None]
    if bare:
        found.append(f"Not tuned, the presets as they are: {len(bare)} of {len(cells)} cells.")
    counts = sorted({c.choice.trials for c in cells if c.choice})
    if len(counts) > 1:
        found.append(f"The number of trials differs between cells: {', '.join(map(str, counts))}.")
    holes = sum(cell.wanted - len(cell.values) for cell in cells)
    if holes:
        found.append(f"{holes} of {sum(cell.wanted for cell in cells)} runs have not been made yet.")
    found += [describe_tuning_cost(epsilon, cost) for epsilon, cost in costs.items()]
    return found


TuningCosts = Mapping[float, Mapping[str, float]]


def compute_selection_costs(experiment: Experiment, protocol: bool = False) -> dict[float, dict[str, float]]:
    """What tuning one cell of `moo` would cost at each epsilon, were it run on the private data."""
    rows = [row for row in experiment.rows if row.method == OUR_METHOD][:1]
    if not rows or not experiment.datasets or not experiment.search.trials:
        return {}
    one = dataclasses.replace(experiment, rows=tuple(rows), datasets=experiment.datasets[:1])
    delta = float(experiment.settings.get("privacy", {}).get("delta", 1e-5))
    costs = {}
    for epsilon in experiment.epsilons:
        costs[epsilon] = compute_tuning_cost(calibrate_jobs(list_tuning_jobs(one, protocol, at=[epsilon])), delta)
        costs[epsilon]["trials"] = experiment.search.trials
    return costs


def describe_tuning_cost(epsilon: float, cost: Mapping[str, float]) -> str:
    """The privacy cost of tuning, as a sentence for the table."""
    return (
        f"Tuning is not in the table's epsilon. At {format_epsilon(epsilon, 6)}, the best of {cost['trials']:g} "
        "trials on private data "
        f"would cost {cost['logarithmic']:.2f} by private selection with a random number of trials of that mean "
        f"(Papernot and Steinke 2022, logarithmic; {cost['geometric']:.2f} geometric), and {cost['all']:.2f} if all "
        "trials were published."
    )


def write_curves(folder: Path, name: str, cells: Sequence[TableCell], note: str) -> None:
    """C and the score over the rounds, one figure each for every data set and epsilon; means over seeds."""
    order = list(dict.fromkeys(cell.label for cell in cells))
    for dataset, epsilon in dict.fromkeys((c.dataset, c.epsilon) for c in cells if c.epsilon is not None):
        own = [c for c in _select_cells(cells, dataset, epsilon) if c.curves]
        if not own:
            continue
        where = f"{tables.make_dataset_label(dataset, cells)}, ε = {format_epsilon(epsilon, 6)}"
        score = score_of_cells(own)
        scores = {
            c.label: [(t, score.to_table_scale(v)) for t, v in compute_mean_curve(c.curves, "curve")] for c in own
        }
        clip = {c.label: compute_mean_curve(c.curves, "C") for c in own if c.unit}
        spread = {
            c.label: [
                (t, score.to_table_scale(low), score.to_table_scale(high))
                for t, low, high in compute_curve_range(c.curves, "curve")
            ]
            for c in own
        }
        stem = f"{name}-{file_stem(dataset)}-{epsilon:g}"
        shown = figures.draw_line_plot(
            scores, f"{score.name.capitalize()}, {where}", "round", score.unit, note=note, order=order, bands=spread
        )
        write_text_file(folder / f"{stem}-{score.name}.svg", shown)
        shown = figures.draw_line_plot(
            clip, f"Clipping norm C, {where}", "round", "C", log=True, note=note, order=order
        )
        write_text_file(folder / f"{stem}-C.svg", shown)


def compute_mean_curve(runs: Sequence[RunRecord], name: str) -> list[tuple[float, float]]:
    """Mean over runs of a kept curve, at the rounds all of them have."""
    tracks = [{t: float(value) for t, value in run[name]} for run in runs]
    common = sorted(set.intersection(*map(set, tracks))) if tracks else []
    return [(t, sum(track[t] for track in tracks) / len(tracks)) for t in common]


def compute_curve_range(runs: Sequence[RunRecord], name: str) -> list[tuple[float, float, float]]:
    """(round, smallest, largest) over runs of a kept curve, at the rounds all of them have; nothing of a single run."""
    tracks = [{t: float(value) for t, value in run[name]} for run in runs]
    common = sorted(set.intersection(*map(set, tracks))) if len(tracks) > 1 else []
    return [(t, min(track[t] for track in tracks), max(track[t] for track in tracks)) for t in common]


# --- over the number of parties -------------------------------------------------------------------


def write_parties_table(folder: Path, experiment: Experiment, done: Mapping[str, RunRecord]) -> list[TableCell]:
    """The score over the number of parties: JSON, Markdown, LaTeX and figures."""
    jobs = list_parties_jobs(experiment)
    cells = make_table_cells(experiment, jobs, done)
    counts = [int(k) for k in experiment.parties["counts"]]
    facts = collect_provenance(
        describe_experiment(experiment), sorted({job.seed for job in jobs}), select_job_results(jobs, done)
    )
    write_json_file(folder / "parties.json", [cell.to_json() for cell in cells if cell.values])
    score = score_of_cells(cells)
    heading = score.name.capitalize()
    changed = ", ".join(f"{path} = {value}" for path, value in experiment.parties.get("set", {}).items())
    but = f", but for {changed}" if changed else ""
    page = [f"# {heading} over the number of parties\n", f"The settings are those chosen for the table's own K{but}.\n"]
    groups = []
    for dataset in experiment.datasets:
        for epsilon in experiment.epsilons:
            own = _select_cells(cells, dataset, epsilon)
            rows, title = (
                tables.make_parties_rows(own, counts),
                f"{tables.make_dataset_label(dataset, cells)}, ε = {format_epsilon(epsilon, 6)}",
            )
            page += [f"## {title}\n", tables.make_markdown_table(rows), tables.describe_paper_reach(own, counts)]
            groups.append((title, rows))
            series = {
                first.label: [(k, by[k].stats.mean) for k in counts if k in by and by[k].values]
                for first, by in tables.arrange_cells(own, lambda c: c.parties)
            }
            if any(series.values()):
                file = folder / "figures" / f"parties-{file_stem(dataset)}-{epsilon:g}.svg"
                order, note = [row.label for row in experiment.rows], provenance_to_line(facts)
                shown = figures.draw_line_plot(
                    series, f"{heading}, {title}", "parties K", score.unit, note=note, order=order, log_x=True
                )
                write_text_file(file, shown)
    page += [
        "## Notes\n",
        "".join(f"- {note}\n" for note in make_table_notes(cells, {})),
        "---\n",
        provenance_to_markdown(facts),
    ]
    write_text_file(folder / "parties.md", "\n".join(page))
    caption = f"Test {score.title} over the number of parties K."
    write_text_file(
        folder / "parties.tex", tables.make_latex_table(groups, caption, "tab:parties", provenance_to_line(facts))
    )
    return cells
