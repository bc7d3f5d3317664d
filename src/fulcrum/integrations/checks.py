"""What is refused before a private loop starts."""

from __future__ import annotations

from torch import nn

from fulcrum.errors import ModelError
from fulcrum.models.checks import validate_by_type
from fulcrum.models.prepared import refuse_odd_module


def check_model(model: nn.Module) -> None:
    """ModelError for layers that mix examples, keep statistics or rewrite weights, and for wrapped models."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}; give the nn.Module that the loop calls.")
    refuse_odd_module(model)
    validate_by_type(model)
