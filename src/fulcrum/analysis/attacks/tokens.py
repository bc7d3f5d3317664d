"""Tokens from gradients: a row of an embedding's gradient is zero unless the batch holds its token.

The attacker ranks the rows by their norms and takes as many as the batch has different tokens, a number that it is
told. Guessing gets that share of the vocabulary right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.analysis.attacks.server_view import ServerView
from fulcrum.errors import ModelError


@dataclass(frozen=True)
class TokensFound:
    """Share of the batch's different tokens that are found, the share that guessing finds, and their number."""

    found: float
    guessing: float
    tokens: int


def recover_tokens(view: ServerView, ignored: int = -1) -> TokensFound:
    """Rank the rows of the first embedding. ignored: a padding token, which nobody looks for."""
    if not view.layout.lookups:
        raise ModelError("tokens are read off an embedding's gradient, and the model has no nn.Embedding.")
    name = view.layout.names[view.layout.lookups[0]]
    norms = torch.linalg.vector_norm(view.layout.unflatten(view.total)[name], dim=1)
    if 0 <= ignored < len(norms):
        norms[ignored] = -1.0
    true = _list_tokens(view.x, ignored)
    taken = norms.argsort(descending=True)[: len(true)]
    hits = int(torch.isin(taken, true).sum())
    return TokensFound(hits / max(1, len(true)), len(true) / len(norms), len(true))


def _list_tokens(x: Tensor, ignored: int) -> Tensor:
    found: Tensor = torch.unique(x.long())
    return found[found != ignored]
