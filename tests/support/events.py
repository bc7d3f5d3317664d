"""Privacy events as tests read them."""

from __future__ import annotations

from fulcrum.privacy.events import Event, Gaussian


def as_gaussian(event: Event) -> Gaussian:
    """The event, which must be a Gaussian release."""
    assert isinstance(event, Gaussian)
    return event
