"""The digest of the weights and the clipping state at which all participants of a round have computed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor


def digest_model(params: Tensor, state: Mapping[str, Tensor]) -> str:
    """What all participants must have computed at: the weights, and what travelled of the clipping state."""
    found = hashlib.sha256(b"fulcrum pairwise model 1")
    for name, value in (("params", params), *sorted(state.items())):
        raw = value.detach().cpu().contiguous().numpy().tobytes()
        found.update(f"{name}:{len(raw)}:".encode() + raw)
    return found.hexdigest()
