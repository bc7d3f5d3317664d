"""The part of the page about privacy: the statement in plain words, and what its epsilon means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulcrum.analysis.report.attack_charts import describe_audit, find_meaning
from fulcrum.analysis.report.formats import format_number, format_spent
from fulcrum.analysis.report.html import Child, Html, make_table, tag
from fulcrum.analysis.report.meaning import describe_scale, find_verdict
from fulcrum.analysis.report.model import RunView
from fulcrum.analysis.report.reading import get_list, get_mapping, to_number, to_text
from fulcrum.privacy.meaning import format_share
from fulcrum.privacy.statement.meaning import SOURCES, UNIT_WORDS, find_watcher


def make_privacy(run: RunView) -> Html:
    """The statement in plain words, and what its epsilon means."""
    verdict, facts = find_verdict(run.guarantee), run.statement
    parts: list[Child] = []
    sentence = to_text(facts.get("guarantee_text"))
    words = [tag("p", tag("strong", sentence))] if sentence else []
    parts.append(tag("div", words, tag("p", verdict.long), class_=f"note {verdict.level}"))
    if run.warnings:
        parts.append(
            tag(
                "div",
                tag("p", tag("strong", "Warnings")),
                tag("ul", [tag("li", each) for each in run.warnings]),
                class_="note",
            )
        )
    measured = describe_audit(run.audit)
    if measured:
        parts.append(
            tag("div", tag("p", measured), class_=f"note {'bad' if run.audit.get('passed') is False else 'good'}")
        )
    parts += [_make_meaning(run, find_meaning(run)), _make_statement_details(facts)]
    return tag("div", parts, class_="prose")


def _make_meaning(run: RunView, told: Mapping[str, Any]) -> Html:
    """What the epsilon lets an attacker learn at most, and why that does not hold where it does not."""
    if not told:
        return Html("")
    rows = [
        (
            f"{format_share(to_number(each['prior']))} sure beforehand",
            f"{format_share(to_number(each['posterior']))} sure afterwards",
        )
        for each in told["beliefs"]
    ]
    rows += [
        (
            f"a test with {format_share(to_number(each['false_positives']))} false positives",
            f"{format_share(to_number(each['true_positives']))} of members found",
        )
        for each in told["tests"]
    ]
    rows.append(("a guess, right by chance 50% of the time", f"{format_share(to_number(told['guess']))} right"))
    table = make_table(
        (f"an attacker who asks whether {UNIT_WORDS.get(run.unit, 'one unit')} took part", "reaches at most"),
        rows,
        "what epsilon lets somebody learn",
        sortable=False,
    )
    why = [str(each) for each in told["text"][1:]]
    attacker = to_text(told.get("attacker"), find_watcher(run.unit))
    worlds = (
        f"Take two worlds: in the first {UNIT_WORDS.get(run.unit, 'one unit')} took part, in the second it contributed "
        f"nothing. The attacker is {attacker}, knows everything else, and wants to tell them apart."
    )
    exception = to_number(told["exception"])
    unless = f"Beliefs are bounded but for a probability of {exception:.3g}. " if exception else ""
    return tag(
        "div",
        tag("h3", f"What epsilon = {format_spent(run.epsilon)} means"),
        [tag("p", tag("strong", each)) for each in why],
        tag("p", worlds),
        table,
        tag("p", f"{unless}{SOURCES.get(to_text(told.get('source')), '')}", class_="small"),
        tag("p", describe_scale(run.epsilon)),
        class_="card",
    )


def _make_statement_details(facts: Mapping[str, Any]) -> Html:
    """The rest of the statement, to be opened."""
    released = [
        f"{to_text(each.get('kind'))} ({each.get('times')}): {to_text(each.get('text'))}"
        for each in get_list(facts, "releases")
        if isinstance(each, dict)
    ]
    groups = [
        (
            str(each.get("records")),
            (format_spent(to_number(each.get("epsilon"))), to_number(each.get("epsilon"))),
            (format_number(to_number(each.get("delta"))), to_number(each.get("delta"))),
        )
        for each in get_list(facts, "groups_of_records")
        if isinstance(each, dict)
    ]
    table = (
        make_table(("units of one person", "epsilon", "delta"), groups, "several units of one person", sortable=False)
        if groups
        else None
    )
    blocks: list[tuple[str, str, Child]] = [
        ("who", "Against whom it protects", [tag("p", to_text(facts.get(name))) for name in ("adversary", "relation")]),
        ("released", "What was released", tag("ul", [tag("li", each) for each in released])),
        ("adds", "How it adds up", [tag("ul", [tag("li", str(each)) for each in get_list(facts, "adds_up")]), table]),
        ("scored", "What the model was scored on", tag("p", to_text(get_mapping(facts, "evaluation").get("text")))),
        (
            "random",
            "Random numbers and arithmetic",
            [tag("p", to_text(get_mapping(facts, name).get("text"))) for name in ("randomness", "arithmetic")],
        ),
        (
            "uncovered",
            "What it does not cover",
            tag("ul", [tag("li", str(each)) for each in get_list(facts, "not_covered")]),
        ),
    ]
    if not facts:
        return tag("p", "There is no privacy statement in this folder: a run has one once it ended or was interrupted.")
    return Html("".join(tag("details", tag("summary", title), body, id=f"privacy-{id}") for id, title, body in blocks))
