"""What decides how a party clips: the rule's settings, from its own terms, and the few numbers that move.

A party makes the rule's whole state itself (`clipping.party_state`). From the coordinator it takes only what the rule's
`moves` names, above all C, and each number must lie in a range that the arithmetic bears.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fulcrum.settings.schema import FORBID_EXTRA_FIELDS, Clip

MAX_MOVED_NORM = 1e6
"""The largest Euclidean norm of an entry of a rule's state that moves, other than C: no product with it overflows."""
MIN_C_SHARE = 1e-20
"""The smallest share of C that a group of parameters may have: far from the smallest numbers of float32."""
C_RANGE_SLACK = 1e-6
"""C is float32 and accumulates rounding; its agreed range is in decimal."""


@dataclass(frozen=True)
class RuleTerms:
    """The settings of `[clip]` that decide a rule's state at a party, with the defaults of `Clip`.

    What only the coordinator uses (moo's balance, reach and growth) is not here: it decides no release.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    C0: float = Clip.C0
    kappa: float = Clip.kappa
    eta_C: float = Clip.eta_C
    beta: float = Clip.beta
    phi: str = Clip.phi
    gamma: float = Clip.gamma
    rho_c: float = Clip.rho_c
    shrink: float = Clip.shrink
    stability: float = Clip.stability
    options: dict[str, bool | int | float | str] = field(default_factory=dict, hash=False)

    @staticmethod
    def of(clip: Clip) -> RuleTerms:
        """Those settings of a run's `[clip]`."""
        return RuleTerms(**{each.name: getattr(clip, each.name) for each in dataclasses.fields(RuleTerms)})

    def to_clip(self, **more: Any) -> Clip:
        """These settings as a section of a run's settings. more: the fields that the terms have elsewhere."""
        return Clip(**{each.name: getattr(self, each.name) for each in dataclasses.fields(self)}, **more)


def is_C_within(C: torch.Tensor, C_min: float, C_max: float) -> bool:
    """Whether C [G] is positive in every group, and within the agreed range in total."""
    exact = C.double()
    total = float(torch.linalg.vector_norm(exact))
    in_range = C_min * (1 - C_RANGE_SLACK) <= total <= C_max * (1 + C_RANGE_SLACK)  # False for NaN
    return in_range and bool((exact >= MIN_C_SHARE * total).all())


def are_others_within(moved: Mapping[str, torch.Tensor]) -> bool:
    """Whether every entry that moves beside C is a vector of finite numbers of an ordinary size."""
    others = (value for name, value in moved.items() if name != "C")
    return all(
        value.is_floating_point() and float(torch.linalg.vector_norm(value.double())) <= MAX_MOVED_NORM
        for value in others
    )
