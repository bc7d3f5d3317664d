"""The part of the page about privacy: the statement in plain words, and what its epsilon means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fulcrum.analysis.report.formats import format_number, format_spent
from fulcrum.analysis.report.html import Child, Html, make_table, tag
from fulcrum.analysis.report.meaning import UNIT_WORDS, explain_epsilon, find_verdict, list_beliefs
from fulcrum.analysis.report.model import RunView
from fulcrum.analysis.report.reading import get_list, get_mapping, to_number, to_text


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
    if run.guarantee in ("yes", "simulation", "assumed") and math.isfinite(run.epsilon):
        parts.append(_make_meaning(run))
    parts.append(_make_statement_details(facts))
    return tag("div", parts, class_="prose")


def _make_meaning(run: RunView) -> Html:
    sentences = explain_epsilon(run.epsilon, run.delta, run.unit)
    if not sentences:
        return Html("")
    rows = list_beliefs(run.epsilon)
    what = UNIT_WORDS.get(run.unit, "one unit")
    table = make_table(
        (f"how sure somebody is beforehand that {what} took part", "and at most afterwards"),
        rows,
        "what epsilon lets somebody learn",
        sortable=False,
    )
    condition = {
        "simulation": "All of this holds only while the seed is secret.",
        "assumed": "All of this assumes that the server sees nothing but sums.",
    }.get(run.guarantee)
    heading = tag("h3", f"What epsilon = {format_spent(run.epsilon)} means")
    return tag(
        "div",
        heading,
        [tag("p", each) for each in sentences],
        table,
        tag("p", condition, class_="small") if condition else None,
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
