"""Events write and read themselves by kind; what is not an event is refused in one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fulcrum.errors import InputError
from fulcrum.privacy.events import EVENT_KINDS, Event, Gaussian, Unprotected, events_from_json, events_to_json


def test_events_come_back_with_every_digit():
    events: tuple[Event, ...] = (Gaussian(0.1 + 0.2, 1 / 3, 7), Unprotected(2), Gaussian(1, 2))
    text = json.dumps(events_to_json(events))
    assert events_from_json(json.loads(text)) == events
    assert set(EVENT_KINDS) == {"gaussian", "unprotected"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([["laplace", 1.0, 1]], "kind 'laplace' is not known to this Fulcrum, which knows gaussian, unprotected"),
        ("gaussian", "list of lists"),
        ([[]], "name of its kind"),
        ([[0.1, 1.0, 1]], "name of its kind"),
        ([["gaussian", 0.1, 1.0]], "rate, sigma, count"),
        ([["gaussian", 0.1, float("nan"), 1]], "rate, sigma, count"),
        ([["gaussian", 0.1, 10**400, 1]], "rate, sigma, count"),
        ([["gaussian", "0.1", 1.0, 1]], "rate, sigma, count"),
        ([["gaussian", 0.1, 1.0, 1.5]], "rate, sigma, count"),
        ([["gaussian", 0.1, 1.0, True]], "rate, sigma, count"),
        ([["gaussian", 0.1, 1.0, -1]], "rate, sigma, count"),
        ([["unprotected"]], "count"),
        ([["unprotected", -1]], "count"),
    ],
)
def test_what_is_not_an_event_is_refused(rows: Any, words: str):
    with pytest.raises(InputError, match=words):
        events_from_json(rows)
