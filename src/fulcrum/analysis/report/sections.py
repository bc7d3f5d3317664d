"""The parts of the page about one run. Each returns markup, or nothing where the folder says nothing of it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fulcrum.analysis.report.chart_types import Chart
from fulcrum.analysis.report.formats import (
    ABSENT,
    format_metric,
    format_number,
    format_seconds,
    format_setting,
    format_spent,
)
from fulcrum.analysis.report.html import Child, Html, make_table, tag
from fulcrum.analysis.report.meaning import UNIT_WORDS, Verdict, find_verdict
from fulcrum.analysis.report.model import STATES, Party, RunView
from fulcrum.analysis.report.reading import get_mapping, to_number, to_text

STATE_LEVELS = {"finished": "good", "running": "good", "stopped": "care", "unreadable": "bad", "missing": "bad"}
MAX_PARTIES_LISTED = 2000
"""More parties than this are not listed one by one: the page would be slow to open."""
MAX_EVENTS_LISTED = 100
REHEARSED_SETTINGS = ("clip.step", "clip.C0", "clip.search", "train.lr", "train.schedule")


def make_badge(level: str, words: str) -> Html:
    """A coloured word; the word says it too."""
    return tag("span", words, class_=f"badge {level}")


def make_section(id: str, title: str, *children: Child) -> Html:
    """A section with its heading; nothing where it is empty."""
    shown = [child for child in children if child]
    return tag("section", tag("h2", title), shown, id=id, aria_label=title) if shown else Html("")


def make_facts(facts: Sequence[tuple[str, Child]]) -> Html:
    """Names and values."""
    return tag("dl", [[tag("dt", name), tag("dd", value)] for name, value in facts], class_="facts")


def make_figures(charts: Sequence[Chart], groups: Sequence[str]) -> Html:
    """Places for the charts of these groups; the script fills them."""
    known = {chart.group or chart.key: chart for chart in reversed(charts)}
    found = [
        tag(
            "figure",
            tag("h3", known[group].title),
            tag("figcaption", known[group].caption),
            tag("noscript", "This chart needs JavaScript; the tables do not."),
            class_="chart card",
            data_group=group,
        )
        for group in dict.fromkeys(groups)
        if group in known
    ]
    return tag("div", found, class_="grid") if found else Html("")


# --- headline -----------------------------------------------------------------------------------------


def make_headline(run: RunView) -> Html:
    """Score, epsilon, and whether the epsilon is a guarantee."""
    verdict = find_verdict(run.guarantee)
    return tag(
        "section",
        _make_score_card(run),
        _make_epsilon_card(run),
        _make_verdict_card(run, verdict),
        class_="hero",
        id="headline",
        aria_label="Headline",
    )


def _make_score_card(run: RunView) -> Html:
    name, value = run.score.name, run.score_value
    lower = "" if run.score.higher_is_better else ", lower is better"
    words: list[Child] = []
    if math.isnan(value):
        words.append("Nothing was evaluated yet." if run.state == "running" else "Nothing was evaluated.")
    elif run.evaluated_on:
        words.append(f"on {run.evaluated_on}")
    comparisons = [
        f"{format_metric(name, values[name])} {what}"
        for what, values in (("for a constant prediction", run.baseline), ("without privacy", run.reference))
        if name in values
    ]
    if comparisons:
        words.append(f"{'; ' if words else ''}compare {', '.join(comparisons)}")
    return tag(
        "div",
        tag("div", f"{name.replace('_', ' ')}{lower}", class_="label"),
        tag("div", format_metric(name, value), class_="big"),
        tag("p", words, ".") if words else None,
        class_="card",
    )


def _make_epsilon_card(run: RunView) -> Html:
    if not run.is_private:
        value: Child = "none"
        words = "Nothing was protected."
    else:
        value = [tag("small", "ε = "), format_spent(run.epsilon)]
        unit = UNIT_WORDS.get(run.unit, "one unit")
        words = f"for {unit} at δ = {format_number(run.delta)}, the largest of any party"
        if run.state != "finished":
            words = f"at least, so far, {words}"
        if math.isfinite(run.target):
            words += f"; the budget is {format_spent(run.target)}"
    label = "epsilon spent" if run.guarantee != "nominal" else "epsilon, nominal"
    shown = [tag("div", label, class_="label"), tag("div", value, class_="big"), tag("p", words, ".")]
    return tag("div", shown, class_="card")


def _make_verdict_card(run: RunView, verdict: Verdict) -> Html:
    return tag(
        "div",
        tag("div", "is it a guarantee?", class_="label"),
        tag("div", verdict.short, class_="big"),
        tag("p", verdict.long),
        class_=f"card verdict {verdict.level}",
    )


def make_state_notes(run: RunView) -> Html:
    """How far the run is, and what could not be read."""
    found: list[Html] = []
    if run.state != "finished" and run.rounds_planned:
        share = min(run.rounds_done / run.rounds_planned, 1.0)
        bar = tag(
            "div",
            tag("i", style=f"width:{100 * share:.1f}%"),
            class_="progress",
            role="progressbar",
            aria_valuenow=str(run.rounds_done),
            aria_valuemin="0",
            aria_valuemax=str(run.rounds_planned),
            aria_label="rounds done",
        )
        done = f"{run.rounds_done} of {run.rounds_planned} rounds"
        more: Child = f"{done} are done."
        if run.state == "stopped":
            command = tag("code", f"fulcrum resume {shlex.quote(run.folder)}")
            more = [f"{done} are done; the run stopped. ", command, " continues it."]
        found.append(tag("div", tag("p", more), bar, class_="card", id="progress"))
    if run.problems:
        words = tag("p", tag("strong", "Not all of this folder can be shown."))
        found.append(
            tag("div", words, tag("ul", [tag("li", each) for each in run.problems]), class_="note bad", role="status")
        )
    return Html("".join(found))


# --- clipping and rehearsal ---------------------------------------------------------------------------


def make_rehearsal(run: RunView) -> Html:
    """What a rehearsal on made-up data chose before anything was spent."""
    candidate = get_mapping(run.rehearsal, "candidate")
    if not candidate and run.settings.get("clip.rehearse") is not True:
        return Html("")
    chosen = [(name, run.settings[name]) for name in REHEARSED_SETTINGS if name in run.settings]
    rows = [(tag("code", name), format_setting(value)) for name, value in chosen]
    words = (
        "Before anything was spent, candidates were played on made-up records, or on a public set that the settings "
        "name. No private record was seen, so "
    )
    found = [
        tag("p", words, "it cost nothing. This run took:"),
        make_table(("setting", "value"), rows, "chosen by the rehearsal", sortable=False),
    ]
    regrets = get_mapping(run.rehearsal, "regrets")
    if regrets:
        ranked = sorted(((name, to_number(value)) for name, value in regrets.items()), key=lambda each: each[1])
        table = make_table(
            ("candidate", "mean regret in %"),
            [(name, (format_number(value), value)) for name, value in ranked],
            "finalists of the rehearsal",
        )
        found.append(tag("details", tag("summary", "The finalists"), table, id="finalists"))
    return tag("div", tag("h3", "What the rehearsal chose"), found, class_="card")


# --- parties ------------------------------------------------------------------------------------------


def make_parties(run: RunView) -> Html:
    """A table of the parties; of very many, what they have in common."""
    if not run.parties:
        return Html("")
    names = [name for name in (run.score.name, "loss") if any(name in party.metrics for party in run.parties)]
    columns: list[tuple[str, Any]] = [("party", None)]
    if run.unit != "client":
        columns.append((f"{run.unit or 'unit'}s", lambda party: _cell(party.units)))
    columns.append(("epsilon", lambda party: (format_spent(party.epsilon), party.epsilon)))
    if any(math.isfinite(party.budget) for party in run.parties):
        columns.append(("budget", lambda party: _cell(party.budget)))
    columns += [(name.replace("_", " "), _make_metric_reader(name, "metrics")) for name in names]
    if names and any(party.baseline for party in run.parties):
        columns.append(("of a constant", _make_metric_reader(names[0], "baseline")))
    if names and any(party.reference for party in run.parties):
        columns.append(("without privacy", _make_metric_reader(names[0], "reference")))
    columns += [
        ("sampling rate", lambda party: _cell(party.rate)),
        ("noise sigma", lambda party: _cell(party.sigma)),
        ("releases", lambda party: _cell(party.releases)),
    ]
    kept = [(title, read) for title, read in columns if read is None or _has_values(run.parties, read)]
    listed = run.parties[:MAX_PARTIES_LISTED]
    rows = [[party.name, *(read(party) for _, read in kept[1:])] for party in listed]
    table = tag("div", make_table([title for title, _ in kept], rows, "the parties"), id="party-table")
    more = None
    if len(listed) < len(run.parties):
        more = tag(
            "p", f"The first {len(listed)} of {len(run.parties)} parties are listed; privacy.json has all of them."
        )
    search = None
    if len(listed) > 12:
        search = tag(
            "div",
            tag(
                "input",
                type="search",
                data_filter="party-table",
                aria_label="search parties",
                placeholder="search parties",
            ),
            tag("span", id="party-table-count", class_="small", aria_live="polite"),
            class_="filters",
        )
    return tag("div", search, table, more, class_="card")


def _make_metric_reader(name: str, part: str) -> Any:
    def read(party: Party) -> tuple[str, float]:
        value = getattr(party, part).get(name, math.nan)
        return format_metric(name, value), value

    return read


def _cell(value: float) -> tuple[str, float]:
    return format_number(value), value


def _has_values(parties: Sequence[Party], read: Any) -> bool:
    return any(not math.isnan(read(party)[1]) for party in parties)


PARTY_LEVELS = {"online": "good", "late": "care", "offline": "care", "refused": "bad", "out of budget": "bad"}
ATTENTION = ("refused", "out of budget", "late", "offline", "expected", "online")
"""Party states, those that somebody must look at first."""


def make_federation(run: RunView) -> Html:
    """Who of a federation across machines is online, late, refused or out of budget, and why."""
    if run.federation is None:
        return Html("")
    parties = sorted(
        run.federation.parties,
        key=lambda party: (ATTENTION.index(party.state) if party.state in ATTENTION else 0, party.name),
    )
    counts = {state: sum(party.state == state for party in parties) for state in reversed(ATTENTION)}
    words = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    rows = [
        (
            party.name,
            make_badge(PARTY_LEVELS.get(party.state, ""), party.state),
            party.why or ABSENT,
            party.since.replace("T", " ").replace("+00:00", " UTC") or ABSENT,
            _cell(party.answered),
        )
        for party in parties
    ]
    table = make_table(("party", "state", "why", "since", "rounds answered"), rows, "the federation")
    needed = run.federation.needed
    more = f" A round needs {format_number(needed)} of them." if math.isfinite(needed) else ""
    when = run.federation.time.replace("T", " ").replace("+00:00", " UTC")
    return tag("div", tag("h3", "The federation"), tag("p", f"{words}, as of {when}.{more}"), table, class_="card")


def make_events(run: RunView) -> Html:
    """What happened to the parties of a federation across machines."""
    if not run.events:
        return Html("")
    rows = [
        (to_text(each.get("time"), ABSENT), str(each.get("party") or ABSENT), str(each.get("what") or ABSENT))
        for each in reversed(run.events[-MAX_EVENTS_LISTED:])
    ]
    table = make_table(("time", "party", "what happened"), rows, "events of the parties")
    return tag(
        "details", tag("summary", f"What happened to the parties ({len(run.events)} events)"), table, id="events"
    )


# --- settings, machine, repetition --------------------------------------------------------------------


def make_settings(run: RunView, defaults: Mapping[str, Any]) -> Html:
    """The settings that differ from the defaults, and all of them to be opened."""
    if not run.settings:
        return Html("")
    own = {name: value for name, value in run.settings.items() if name not in defaults or defaults[name] != value}

    def table(values: Mapping[str, Any], caption: str) -> Html:
        rows = [(tag("code", name), format_setting(value)) for name, value in values.items()]
        return make_table(("setting", "value"), rows, caption)

    other = table(run.settings, "all settings")
    return tag(
        "div",
        tag("p", "Settings that differ from the defaults:"),
        table(own, "settings that differ from the defaults"),
        tag("details", tag("summary", f"All {len(run.settings)} settings"), other, id="all-settings"),
        class_="card",
    )


def make_rerun(run: RunView) -> Html:
    """How to repeat, continue and check the run."""
    folder = shlex.quote(run.folder)
    commands = [
        (f"fulcrum run {shlex.quote(run.folder + '/settings.toml')}", "run the same settings again"),
        (f"fulcrum show {folder}", "the main facts on a terminal"),
    ]
    if run.state in ("stopped", "running"):
        commands.insert(0, (f"fulcrum resume {folder}", "continue where it stopped"))
    lines = [tag("pre", tag("code", f"{command}    # {words}")) for command, words in commands]
    seeded = run.guarantee in ("simulation", "assumed", "nominal", "none")
    note = (
        "The run is seeded: the same settings on the same data give the same numbers."
        if seeded
        else "The random numbers came from the operating system: a new run draws others, costs its own epsilon, and "
        "ends near these numbers, not at them."
    )
    facts: list[tuple[str, Child]] = [
        (name, str(run.environment[key]))
        for name, key in (
            ("date", "date"),
            ("Python", "python"),
            ("torch", "torch"),
            ("machine", "platform"),
            ("processor", "processor"),
            ("device", "device"),
            ("threads", "threads"),
        )
        if run.environment.get(key) not in (None, "")
    ]
    facts.insert(0, ("Fulcrum", run.version or ABSENT))
    return tag("div", lines, tag("p", note), make_facts(facts), class_="card")


def make_run_meta(run: RunView) -> Html:
    """The line under the title."""
    facts: list[Child] = [make_badge(STATE_LEVELS[run.state], STATES[run.state])]
    if run.dataset:
        facts.append(tag("span", f"data {run.dataset}"))
    if run.party_count or run.parties:
        facts.append(tag("span", f"{run.party_count or len(run.parties)} parties"))
    facts.append(tag("span", f"{run.rounds_done} rounds"))
    if math.isfinite(run.parameters):
        facts.append(tag("span", f"{int(run.parameters):,} parameters"))
    if math.isfinite(run.seconds):
        facts.append(tag("span", format_seconds(run.seconds)))
    if run.created:
        facts.append(tag("time", run.created.replace("T", " ").replace("+00:00", " UTC"), datetime=run.created))
    return tag("div", facts, class_="meta")
