"""Models: parameters as one vector, built-in and own models, whitening, pretraining, checks."""

from __future__ import annotations

from fulcrum.models.build import build_model
from fulcrum.models.checks import validate_model
from fulcrum.models.layout import ParameterLayout, call_with_parameters

__all__ = ["ParameterLayout", "build_model", "call_with_parameters", "validate_model"]
