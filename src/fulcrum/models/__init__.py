"""Models: parameters as one vector, built-in and own models, whitening, pretraining, what cannot be trained."""

from __future__ import annotations

from fulcrum.models.build import build
from fulcrum.models.checks import refuse_mixing
from fulcrum.models.layout import Layout, call

__all__ = ["Layout", "build", "call", "refuse_mixing"]
