"""A rule's state at a party elsewhere: made by the party itself, except for the entries that move."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fulcrum.clipping.rule import ClipRule
from fulcrum.types import Released, RuleState


def complete_party_state(
    rule: ClipRule, start: RuleState, moved: Mapping[str, torch.Tensor], round: int, rounds: int, dim: int
) -> RuleState:
    """The state with which a party clips in `round` (from 0) of `rounds`, for a rule with one state for all parties.

    start: from `rule.init` with the party's own settings. moved: the entries that `rule.moves` names, as received and
    checked. Where nothing moves, the state follows from the round numbers alone: `adapt` is called once for each round
    before this one, with releases of zeros [dim].
    """
    if set(moved) != set(rule.moves):
        raise ValueError(f"{rule.name}: {sorted(moved)} was received, but {sorted(rule.moves)} moves")
    if rule.moves:
        return {**start, **moved}
    state, nothing = start, torch.zeros(dim, device=start["C"].device)
    for t in range(round):
        state = rule.adapt(state, Released(nothing, nothing[:0], 1.0, 1.0, t, rounds, asked=0.0))
    return state


def select_moving_entries(moves: tuple[str, ...], state: RuleState) -> dict[str, torch.Tensor]:
    """The entries of a state that travel from a coordinator to a party."""
    return {name: state[name] for name in moves}
