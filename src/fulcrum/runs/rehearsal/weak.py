"""Where moo is known to be weak without a rehearsal: on the development half of the no-tuning suite it was more than 2
points behind the best fixed C and learning rate there (results/no-tuning/development.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fulcrum.clipping.moo import MOO
from fulcrum.runs.rehearsal.apply import find_refusal
from fulcrum.settings.derived import compute_local_steps
from fulcrum.training.federation import Federation

FEW_ROUNDS = 50
VERY_FEW_ROUNDS = 30


def _has_embeddings(federation: Federation) -> bool:
    return any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in federation.problem.model.modules())


WEAK_SETTINGS: Mapping[str, Callable[[Federation], bool]] = {
    "few rounds of several local steps": lambda run: (
        run.settings.train.rounds <= FEW_ROUNDS and compute_local_steps(run.settings.train) >= 4
    ),
    "so few rounds of a network of several layers": lambda run: (
        run.settings.train.rounds <= VERY_FEW_ROUNDS
        and compute_local_steps(run.settings.train) == 1
        and run.problem.layout.depth > 1
    ),
    "a server optimiser with a memory": lambda run: run.settings.train.server != "sgd",
    "a model with embeddings": _has_embeddings,
}
"""Settings in which moo's own first step is often wrong, by public facts."""


def list_weaknesses(federation: Federation) -> list[str]:
    """A warning where moo goes without a rehearsal and this run is like those in which it was behind; else nothing."""
    settings = federation.settings
    if federation.problem.rule != MOO or settings.clip.step > 0 or federation.plan.central:
        return []
    found = [name for name, applies in WEAK_SETTINGS.items() if applies(federation)]
    refusal = find_refusal(federation) if settings.clip.rehearse else ""
    if not found or (settings.clip.rehearse and not refusal):
        return []
    advice = (
        f"nothing can be rehearsed here, for {refusal}: prefer 100 rounds or more of one step with the plain server"
        if refusal
        else "rehearse it on made-up data, at no privacy cost (clip.rehearse = true, without --no-rehearsal)"
    )
    return [f"moo's first step comes from a formula that is often wrong with {' and '.join(found)}; {advice}."]
