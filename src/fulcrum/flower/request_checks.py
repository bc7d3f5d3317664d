"""Checks of a round's request against a party's terms: it may ask for less, never for more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fulcrum.flower.refusals import TermsRefusal
from fulcrum.flower.rule_terms import are_others_within, is_C_within
from fulcrum.flower.terms import MAX_SIGMA, ROUNDING_TOLERANCE, PartyTerms, find_allowed_rule
from fulcrum.types import Assignment, RuleState

MAX_WEIGHT = 1e6
"""The largest weight, in absolute value, of a model that a request may send: beyond it gradients may overflow."""

MIN_RATE = 1e-9
"""The smallest sampling rate of a request: below it the mean over an expected batch may overflow."""

MAX_PARTIES = 1_000_000
"""A party's number in a run must be below this: its own memory grows with the number."""

ASSIGNMENT_LIMITS: dict[str, tuple[str, Callable[[PartyTerms, Any], bool]]] = {
    "client": ("party", lambda terms, value: 0 <= value < MAX_PARTIES),
    "rate": ("rate", lambda terms, value: MIN_RATE <= value <= terms.rate * (1 + ROUNDING_TOLERANCE)),
    "sigma": ("sigma", lambda terms, value: terms.sigma * (1 - ROUNDING_TOLERANCE) <= value <= MAX_SIGMA),
    "steps": ("steps", lambda terms, value: 1 <= value <= terms.steps),
    "lr": ("lr", lambda terms, value: 0 < value <= terms.lr * (1 + ROUNDING_TOLERANCE)),
    # A multiple, so that the steps are among the agreed ones: any other larger number could name other steps each time.
    "statistics_interval": (
        "interval",
        lambda terms, value: value >= 1 and value % terms.statistics_interval == 0,
    ),
    # With pairwise masks the party's share of the noise follows from the manifest, and from nothing in a request.
    "noise_parties": ("shared-noise", lambda terms, value: value == 1),
    "message": ("shared-noise", lambda terms, value: value is None),
}
"""Field of an `Assignment` -> the code of its refusal, and whether the terms allow a value."""


def check_assignment(terms: PartyTerms, task: Assignment) -> None:
    """Refuse an assignment that goes beyond the terms. A field that has no limit must keep its default."""
    for each in dataclasses.fields(task):
        value = getattr(task, each.name)
        if each.name in ASSIGNMENT_LIMITS:
            code, allows = ASSIGNMENT_LIMITS[each.name]
            fine = allows(terms, value)
        else:
            code, fine = "field", value == each.default
        if not fine:
            raise TermsRefusal(code)


def check_round_request(
    terms: PartyTerms, header: Mapping[str, Any], assignment: Assignment, model: str, task: str, simulation: bool
) -> None:
    """Refuse a round that goes beyond the terms. model, task: fingerprints of this party's own model and task."""
    checks: tuple[tuple[str, bool], ...] = (
        ("party", header["party"] == terms.party),
        ("unit", header["unit"] == terms.unit),
        ("groups", header["groups"] == terms.groups),
        ("model", header["model"] == model),
        ("task", header["task"] == task),
        ("rounds", header["round"] < header["rounds"] <= terms.rounds),
        ("lr", 0 <= header["weight_decay"] <= terms.weight_decay * (1 + ROUNDING_TOLERANCE)),
        ("seed", simulation or not header["simulation"]),
        ("no-seed", not simulation or bool(header["simulation"])),
    )
    for code, fine in checks:
        if not fine:
            raise TermsRefusal(code)
    check_assignment(terms, assignment)
    find_allowed_rule(terms, header["rule"])


def check_params(params: torch.Tensor) -> None:
    """Refuse weights that are not finite or so large that gradients would overflow.

    Whether a record's gradient overflows depends on the record.
    """
    if params.numel() and not float(params.abs().max()) <= MAX_WEIGHT:  # NaN is not
        raise TermsRefusal("params")


def check_clipping_state(terms: PartyTerms, state: RuleState, moved: Mapping[str, torch.Tensor]) -> None:
    """Refuse a C that is not finite, not positive or outside the agreed range, and other numbers of unusual size.

    state: the whole state, as this party made it. moved: what of it was received.
    """
    if not is_C_within(state["C"], terms.C_min, terms.C_max):
        raise TermsRefusal("C")
    if not are_others_within(moved):
        raise TermsRefusal("state")
