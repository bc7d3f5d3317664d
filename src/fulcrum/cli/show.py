"""`fulcrum show` and `fulcrum methods`, and the summary that ends every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption, JsonOption
from fulcrum.study.records import StudyScore, get_record_metrics, get_record_score

if TYPE_CHECKING:
    from fulcrum.data import Dataset
    from fulcrum.training.federation import Federation

NOMINAL_NOTE = "nominal: this rule looks at private values to set C, so no epsilon holds"
ASSUMED_NOTE = (
    "‡ assumes an ideal secure aggregation, simulated: the server sees only sums; no single update is private"
)
SIMULATION_NOTE = "SIMULATION: the random numbers follow from a seed, so this holds only while the seed is secret"
LEDGER_NOTES = {
    "simulation": "; a simulation, since a run is seeded",
    "nominal": "; nominal, since a run used a rule that is not sound",
    "unknown": "; not known to be a guarantee, since an earlier version wrote rows without saying what their run was",
    "none": "; no guarantee, since a run released values without noise",
}
"""By the statement's level: what the worst run of a kept ledger makes of its epsilon."""
MAX_EPSILONS_SHOWN = 8
"""More parties than this are summed up as a range."""
RANKINGS = ("auc", "average_precision")
"""Metrics of which a constant prediction says nothing."""
LISTED = 20
"""Of more parties than this, only the best and the worst have their metrics printed."""


def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show a run: its score, what it cost each party, and how C moved."""
    from fulcrum.runs import folder as record
    from fulcrum.runs.result import last_evaluated

    run = record.load_run_json(folder, "run.json")
    if (folder / "summary.json").is_file():
        print_summary(record.load_summary(folder), folder, as_json)
        return
    lines = record.load_metrics(folder)
    if as_json:
        view.print_json(
            {"finished": False, "rounds_done": len(lines), "run": run, "last": lines[-1] if lines else None}
        )
        return
    spent, trouble = read_spent_so_far(folder, lines)
    judged = last_evaluated(lines)
    score = get_record_score(run)
    seen = [(score.name, score_text(score, judged, f"after round {judged['round']}"))] if judged["metrics"] else []
    view.print_name_value_lines(
        [
            ("rounds done", len(lines)),
            *seen,
            (
                "epsilon so far",
                f"{view.format_epsilon(spent)}{describe_unit(run.get('unit'))}"
                f"{describe_simulation(run)}{describe_assumption(run)}",
            ),
            ("folder", folder),
        ]
    )
    if trouble:
        view.print_message(f"warning: {trouble}")
    view.print_message(f"The run is not finished; continue with: fulcrum resume {folder}")


def read_spent_so_far(folder: Path, lines: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
    """The largest epsilon of an unfinished run as its ledger says, and why that is not known ("" where it is).

    Folders of earlier versions are not bound to their ledger: there the last line counts.
    """
    from fulcrum.errors import InputError
    from fulcrum.privacy.evaluation import is_held_out_account
    from fulcrum.runs import folder as record
    from fulcrum.runs.binding import RUN_FORMAT, StoredRun

    if record.load_run_json(folder, "run.json").get("format", 1) != RUN_FORMAT:
        return (lines[-1].get("epsilon") if lines else 0.0), ""
    try:
        stored = StoredRun.read(folder)
        with stored.open_ledger() as ledger:
            costs = ledger.epsilons(stored.id)
    except InputError as error:
        return None, str(error)
    # The accounts of held-out units pay for their own scores; the statement tells of them.
    trained = [cost for name, cost in costs.items() if not is_held_out_account(name)]
    return max(trained, default=0.0), ""


def print_summary(summary: Mapping[str, Any], folder: Path | None, as_json: bool) -> None:
    """A run's summary.json for a program, or its main facts for a person."""
    if as_json:
        view.print_json({**summary, "folder": None if folder is None else str(folder)})
        return
    facts: list[tuple[str, view.TableValue]] = [
        (
            "method",
            format_method_name(summary["method"], summary["sound"]) + (" ‡" if describe_assumption(summary) else ""),
        ),
        ("rounds", f"{summary['rounds']}, {summary['status']}"),
        *format_score_line(summary),
        *list_comparisons(summary),
        ("epsilon", describe_guarantee(summary)),
    ]
    if summary["private"] and summary.get("epsilons"):
        facts.append(("by party", format_epsilon_spread(summary["epsilons"])))
    if summary["private"] and summary.get("settings", {}).get("run", {}).get("ledger"):
        facts.append(("ledger", describe_ledger_total(summary)))
    if summary.get("start", {}).get("added"):
        total, first = view.format_epsilon(summary["epsilon_scope"]), summary["start"]["run"]
        facts.append(("with its start", f"{total} in all, with run {first}, whose model it starts from"))
    facts += [("C", format_C_course(summary["C"])), ("folder", folder)]
    view.print_name_value_lines(facts)
    print_parties(summary)


def format_score_line(summary: Mapping[str, Any]) -> list[tuple[str, view.TableValue]]:
    """The score of a run's task under its name, or that there is none, since nothing was evaluated."""
    score, metrics = get_record_score(summary), get_record_metrics(summary)
    if not summary.get("metrics", metrics):
        return [("score", "none: there is no test set" if "no test set" in summary["evaluated_on"] else "none")]
    return [(score.name, score_text(score, summary, f"on {summary['evaluated_on']}"))]


def score_text(score: StudyScore, record: Mapping[str, Any], where: str) -> str:
    """The score's value in a record, with its direction where lower is better, and its mean over parties.

    where: what it was measured on, or when.
    """
    value = view.format_metric(score.name, get_record_metrics(record).get(score.name))
    mean = record.get("mean_over_parties", {})
    of_parties = f"; mean over parties {view.format_metric(score.name, mean[score.name])}" if score.name in mean else ""
    return f"{value}{'' if score.higher_is_better else ' (lower is better)'} {where}{of_parties}"


def list_comparisons(summary: Mapping[str, Any]) -> list[tuple[str, view.TableValue]]:
    """What the score is to be compared with: a constant prediction, and the model without privacy where it was trained.

    Where the score is a ranking metric, the accuracy is compared, too: a constant ranks nothing.
    """
    score, metrics = get_record_score(summary), get_record_metrics(summary)
    names = [score.name, *(["accuracy"] if "accuracy" in metrics and score.name != "accuracy" else [])]

    def describe(values: Mapping[str, Any], mean: Mapping[str, Any]) -> str:
        found = [f"{name} {view.format_metric(name, values[name])}" for name in names if values.get(name) is not None]
        means = [f"{name} {view.format_metric(name, mean[name])}" for name in names if mean.get(name) is not None]
        return ", ".join(found) + (f"; mean over parties {', '.join(means)}" if means else "")

    rows: list[tuple[str, view.TableValue]] = []
    if summary.get("baseline"):
        what = "the more frequent class" if "accuracy" in metrics else "the mean"
        rows.append(("baseline", f"{describe(summary['baseline'], summary.get('mean_baseline', {}))} (always {what})"))
    if summary.get("reference"):
        made = summary["reference"]
        text = describe(made["metrics"], made.get("mean_over_parties", {}))
        rows.append(("not private", f"{text} (the same without privacy, by {made['optimiser']})"))
    chosen = summary.get("threshold")
    if chosen:
        best = view.format_metric(chosen["for"], chosen[chosen["for"]])
        rows.append(
            (
                "threshold",
                f"{view.format_value(chosen['value'])} has the largest {chosen['for']}, {best}, on the same records",
            )
        )
    return rows


def print_parties(summary: Mapping[str, Any]) -> None:
    """The score and up to two more metrics on each party's test records; nothing where they name no party."""
    parties, mean = summary.get("party_metrics", {}), summary.get("mean_over_parties", {})
    if not parties:
        return
    score, metrics = get_record_score(summary), get_record_metrics(summary)
    others = [name for name in metrics if name not in (score.name, "loss")]
    names = [score.name, *others[:2]]

    def row(title: str, values: Mapping[str, Any]) -> tuple[view.TableValue, ...]:
        return title, *(view.format_metric(name, values.get(name)) for name in names)

    constants, reference = summary.get("party_baselines", {}), summary.get("reference", {})
    # A constant ranks nothing, so its accuracy says more.
    judged = "accuracy" if score.name in RANKINGS and "accuracy" in metrics else score.name
    columns = ["test records of", *names]
    columns += [f"{judged} of a constant"] if constants else []
    columns += [f"{judged} without privacy"] if reference.get("party_metrics") else []

    def compare(baseline: Mapping[str, Any], plain: Mapping[str, Any]) -> tuple[view.TableValue, ...]:
        cells = [view.format_metric(judged, baseline.get(judged))] if constants else []
        cells += [view.format_metric(judged, plain.get(judged))] if reference.get("party_metrics") else []
        return tuple(cells)

    rows = []
    for title, values in shown_parties(parties, score):
        party = title.partition(" (")[0]
        plain = reference.get("party_metrics", {}).get(party, {})
        rows.append((*row(f"  {title}", values), *compare(constants.get(party, {}), plain)))
    means = compare(summary.get("mean_baseline", {}), reference.get("mean_over_parties", {}))
    whole = compare(summary.get("baseline", {}), reference.get("metrics", {}))
    rows += [(*row("mean over parties", mean), *means), (*row("all records", metrics), *whole)]
    view.print_table(columns, rows)


def shown_parties(parties: Mapping[str, Mapping[str, Any]], score: StudyScore) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, metrics) of each party; of many parties, the best and the worst by the score."""
    if len(parties) <= LISTED:
        return list(parties.items())
    known = {party: float(own[score.name]) for party, own in parties.items() if own[score.name] is not None}
    picked = (("best", score.best), ("worst", score.worst)) if known else ()
    found = []
    for which, pick in picked:
        party = next(party for party, value in known.items() if value == pick(known.values()))
        found.append((f"{party} ({which} of {len(parties)})", parties[party]))
    return found


def format_method_name(method: str, sound: bool) -> str:
    """A method's name in a table; a dagger marks those whose epsilon is nominal."""
    return method if sound else f"{method} †"


def describe_guarantee(summary: Mapping[str, Any]) -> str:
    """The epsilon of a run, in words that do not overstate the guarantee."""
    if not summary["private"]:
        return "none: nothing was protected"
    nominal = "" if summary["sound"] else f"; {NOMINAL_NOTE}"
    by = "by pld" if summary["accountant"] == "pld" else f"by rdp; {view.format_epsilon(summary['epsilon_pld'])} by pld"
    largest = f"at delta {summary['delta']:g}, the largest of any party"
    value = view.format_epsilon(summary["epsilon"])
    caveats = f"{nominal}{describe_simulation(summary)}{describe_assumption(summary)}"
    return f"{value}{describe_unit(summary['unit'])} {largest} ({by}){caveats}"


def describe_assumption(facts: Mapping[str, Any]) -> str:
    """Text after an epsilon that assumes a secure aggregation which is not implemented; otherwise ""."""
    return f"; {ASSUMED_NOTE}" if facts.get("aggregation") == "ideal-secagg" else ""


def describe_ledger_total(summary: Mapping[str, Any]) -> str:
    """The epsilon over all runs of a kept ledger, and what the worst of them makes of it."""
    total, path = view.format_epsilon(summary["epsilon_scope"]), summary["settings"]["run"]["ledger"]
    return f"{total} over all its runs{LEDGER_NOTES.get(summary.get('guarantee', 'yes'), '')} ({path})"


def describe_simulation(facts: Mapping[str, Any]) -> str:
    """Text after an epsilon whose noise can be drawn again; otherwise "". Earlier summaries do not say it."""
    return f"; {SIMULATION_NOTE}" if facts.get("simulation") else ""


def describe_unit(unit: str | None) -> str:
    """Text after an epsilon: its privacy unit. An epsilon without its unit means nothing."""
    from fulcrum.privacy.statement.units import UNIT_TEXTS

    return "" if unit is None else f" for one {UNIT_TEXTS[unit].short}"


def format_epsilon_spread(epsilons: Mapping[str, Any]) -> str:
    """Each party's epsilon; the common one, or the range, of many."""
    known = [float(value) for value in epsilons.values()]
    if max(known) == min(known):
        return f"{view.format_epsilon(known[0])} each of {len(known)}"
    if len(known) > MAX_EPSILONS_SHOWN:
        return f"{view.format_epsilon(min(known))} to {view.format_epsilon(max(known))} over {len(known)}"
    return ", ".join(f"{name} {view.format_epsilon(value)}" for name, value in zip(epsilons, known, strict=True))


def format_C_course(C: Sequence[Any]) -> str:
    """How C moved: some values, and small bars where it moved at all."""
    values = [float(value) for value in C]
    if not values or values[0] == float("inf"):
        return "no clipping"
    if max(values) == min(values):
        return f"{view.format_value(values[0])} throughout"
    return f"{view.format_few_values(values)}  {view.make_sparkline(values)}"


def collect_run_warnings(federation: Federation) -> list[str]:
    """What a user must know before trusting the run."""
    return [*federation.problem.dataset.warnings, *federation.plan.warnings]


def print_own_notes(dataset: Dataset, quiet: bool = False) -> None:
    """What follows from private values, for whoever holds the data: on this terminal alone, and stored nowhere."""
    for note in dataset.own_notes:
        view.print_message(f"only you see this: {note}", quiet)


def methods(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List the methods that --method takes: their parts, what they protect, what they cost."""
    from fulcrum.clipping import find_rule
    from fulcrum.settings.presets import METHODS

    rules = {method.name: find_rule(method.parts["clip"]["rule"]) for method in METHODS.values()}
    if as_json:
        view.print_json(
            [
                dataclasses.asdict(method) | {"rule": rule.name, "sound": rule.sound, "cost": rule.cost}
                for method, rule in ((method, rules[name]) for name, method in METHODS.items())
            ]
        )
        return
    columns = ("method", "parts", "protects", "sound", "cost", "what it does", "from")
    rows = [
        (
            format_method_name(name, rules[name].sound),
            format_preset_parts(method.parts),
            f"one {method.unit}" if method.unit else "nothing",
            ("yes" if rules[name].sound else "no") if rules[name].private else "-",
            rules[name].cost,
            method.summary,
            method.reference,
        )
        for name, method in METHODS.items()
    ]
    view.print_table(columns, rows)
    view.print_message(f"† {NOMINAL_NOTE}.")


def format_preset_parts(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The settings of a preset on one line: the rule first, by its name alone, then the others."""
    others = [
        f"{section}.{name} {value}"
        for section, values in sections.items()
        for name, value in values.items()
        if (section, name) != ("clip", "rule")
    ]
    return ", ".join([str(sections["clip"]["rule"]), *others])
