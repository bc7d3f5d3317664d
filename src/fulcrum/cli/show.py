"""`fulcrum show` and `fulcrum methods`, and the summary that ends every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import view
from fulcrum.cli.options import Debug, Json
from fulcrum.privacy.statement.units import UNITS
from fulcrum.study.records import Score, metrics_of_record, score_of_record

if TYPE_CHECKING:
    from fulcrum.training.federation import Federation

NOMINAL = "nominal: this rule looks at private values to set C, so no epsilon holds"
ASSUMED = "‡ assumes an ideal secure aggregation, simulated: the server sees only sums; no single update is private"
MANY = 8
"""More parties than this are summed up as a range."""
LISTED = 20
"""Of more parties than this, only the best and the worst have their metrics printed."""


def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a run: its score, what it cost each party, and how C moved."""
    from fulcrum.runs import folder as record
    from fulcrum.runs.result import last_evaluated

    run = record.load_json(folder, "run.json")
    if (folder / "summary.json").is_file():
        print_summary(record.load_summary(folder), folder, as_json)
        return
    lines = record.load_metrics(folder)
    if as_json:
        view.print_json(
            {"finished": False, "rounds_done": len(lines), "run": run, "last": lines[-1] if lines else None}
        )
        return
    last, judged = lines[-1] if lines else {}, last_evaluated(lines)
    score = score_of_record(run)
    seen = [(score.name, score_text(score, judged, f"after round {judged['round']}"))] if judged["metrics"] else []
    view.print_facts(
        [
            ("rounds done", len(lines)),
            *seen,
            ("epsilon so far", f"{view.epsilon(last.get('epsilon'))}{whose(run.get('unit'))}{assumed(run)}"),
            ("folder", folder),
        ]
    )
    view.say(f"The run is not finished; continue with: fulcrum resume {folder}")


def print_summary(summary: Mapping[str, Any], folder: Path | None, as_json: bool) -> None:
    """A run's summary.json for a program, or its main facts for a person."""
    if as_json:
        view.print_json({**summary, "folder": None if folder is None else str(folder)})
        return
    facts: list[tuple[str, view.Cell]] = [
        ("method", named(summary["method"], summary["sound"]) + (" ‡" if assumed(summary) else "")),
        ("rounds", f"{summary['rounds']}, {summary['status']}"),
        *score_line(summary),
        ("epsilon", guarantee(summary)),
    ]
    if summary["private"] and summary.get("epsilons"):
        facts.append(("by party", spread(summary["epsilons"])))
    facts += [("C", course(summary["C"])), ("folder", folder)]
    view.print_facts(facts)
    print_parties(summary)


def score_line(summary: Mapping[str, Any]) -> list[tuple[str, view.Cell]]:
    """The score of a run's task under its name, or that there is none, since nothing was evaluated."""
    score, metrics = score_of_record(summary), metrics_of_record(summary)
    if not summary.get("metrics", metrics):
        return [("score", "none: there is no test set" if "no test set" in summary["evaluated_on"] else "none")]
    return [(score.name, score_text(score, summary, f"on {summary['evaluated_on']}"))]


def score_text(score: Score, record: Mapping[str, Any], where: str) -> str:
    """The score's value in a record, with its direction where lower is better, and its mean over parties.

    where: what it was measured on, or when.
    """
    value = view.metric(score.name, metrics_of_record(record).get(score.name))
    mean = record.get("mean_over_parties", {})
    of_parties = f"; mean over parties {view.metric(score.name, mean[score.name])}" if score.name in mean else ""
    return f"{value}{'' if score.higher_is_better else ' (lower is better)'} {where}{of_parties}"


def print_parties(summary: Mapping[str, Any]) -> None:
    """The score and up to two more metrics on each party's test records; nothing where they name no party."""
    parties, mean = summary.get("party_metrics", {}), summary.get("mean_over_parties", {})
    if not parties:
        return
    score, metrics = score_of_record(summary), metrics_of_record(summary)
    others = [name for name in metrics if name not in (score.name, "loss")]
    names = [score.name, *others[:2]]

    def row(title: str, values: Mapping[str, Any]) -> tuple[view.Cell, ...]:
        return title, *(view.metric(name, values.get(name)) for name in names)

    rows = [row(f"  {party}", values) for party, values in shown_parties(parties, score)]
    rows += [row("mean over parties", mean), row("all records", metrics)]
    view.print_table(("test records of", *names), rows)


def shown_parties(parties: Mapping[str, Mapping[str, Any]], score: Score) -> list[tuple[str, Mapping[str, Any]]]:
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


def named(method: str, sound: bool) -> str:
    """A method's name in a table; a dagger marks those whose epsilon is nominal."""
    return method if sound else f"{method} †"


def guarantee(summary: Mapping[str, Any]) -> str:
    """The epsilon of a run in words that claim no more than it gives."""
    if not summary["private"]:
        return "none: nothing was protected"
    nominal = "" if summary["sound"] else f"; {NOMINAL}"
    by = "by pld" if summary["accountant"] == "pld" else f"by rdp; {view.epsilon(summary['epsilon_pld'])} by pld"
    largest = f"at delta {summary['delta']:g}, the largest of any party"
    return f"{view.epsilon(summary['epsilon'])}{whose(summary['unit'])} {largest} ({by}){nominal}{assumed(summary)}"


def assumed(facts: Mapping[str, Any]) -> str:
    """Behind an epsilon: that it rests on a secure aggregation which is not there; "" where it does not."""
    return f"; {ASSUMED}" if facts.get("aggregation") == "ideal-secagg" else ""


def whose(unit: str | None) -> str:
    """Behind an epsilon: what it protects one of. An epsilon without its unit means nothing."""
    return "" if unit is None else f" for one {UNITS[unit].short}"


def spread(epsilons: Mapping[str, Any]) -> str:
    """Each party's epsilon; the common one, or the range, of many."""
    known = [float(value) for value in epsilons.values()]
    if max(known) == min(known):
        return f"{view.epsilon(known[0])} each of {len(known)}"
    if len(known) > MANY:
        return f"{view.epsilon(min(known))} to {view.epsilon(max(known))} over {len(known)}"
    return ", ".join(f"{name} {view.epsilon(value)}" for name, value in zip(epsilons, known, strict=True))


def course(C: Sequence[Any]) -> str:
    """How C moved: some values, and small bars where it moved at all."""
    values = [float(value) for value in C]
    if not values or values[0] == float("inf"):
        return "no clipping"
    if max(values) == min(values):
        return f"{view.show(values[0])} throughout"
    return f"{view.few(values)}  {view.sparkline(values)}"


def warnings(federation: Federation) -> list[str]:
    """What a user must know before trusting the run."""
    return [*federation.problem.dataset.warnings, *federation.plan.warnings]


def methods(as_json: Json = False, debug: Debug = False) -> None:
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
            named(name, rules[name].sound),
            parts(method.parts),
            f"one {method.unit}" if method.unit else "nothing",
            ("yes" if rules[name].sound else "no") if rules[name].private else "-",
            rules[name].cost,
            method.summary,
            method.reference,
        )
        for name, method in METHODS.items()
    ]
    view.print_table(columns, rows)
    view.say(f"† {NOMINAL}.")


def parts(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The settings of a preset on one line: the rule first, by its name alone, then the others."""
    others = [
        f"{section}.{name} {value}"
        for section, values in sections.items()
        for name, value in values.items()
        if (section, name) != ("clip", "rule")
    ]
    return ", ".join([str(sections["clip"]["rule"]), *others])
