"""Models: parameters as one vector, built-in and own models, whitening, pretraining, checks."""

from __future__ import annotations

from fulcrum.models.build import build_model
from fulcrum.models.checks import validate_model
from fulcrum.models.layout import ParameterLayout, call_with_parameters
from fulcrum.models.norms import convert_norms

__all__ = ["ParameterLayout", "build_model", "call_with_parameters", "convert_norms", "validate_model"]
