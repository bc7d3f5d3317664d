"""Who the parties are: their names, their sizes, which data they hold, and which of them have terms of their own."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import Spend
from fulcrum.settings.schema import Settings

SEARCHED = 1000
"""The most names that are searched for one that a misspelt name may have meant."""


class Named(Protocol):
    """Parties that know their number and names, such as a `data.Partition`."""

    @property
    def parties(self) -> int: ...

    def name(self, k: int) -> str: ...


def named(names: Sequence[str] | Named | int) -> tuple[int, Callable[[int], str]]:
    """How many parties there are, and the name of each by its number."""
    if isinstance(names, int):
        return names, "party-{}".format
    if isinstance(names, Sequence):
        if len(set(names)) < len(names):
            raise ConfigError("two parties have the same name; each needs its own, since budgets are kept by name.")
        return len(names), names.__getitem__
    return names.parties, names.name


def sizes_of(units: Any, count: int) -> npt.NDArray[np.int64]:
    """n_k of each party [K], at least 1."""
    sizes = np.asarray(units)
    if sizes.shape != (count,) or count == 0:
        raise ConfigError(f"units has shape {sizes.shape}; it must hold one number for each of {count} parties.")
    whole = sizes.astype(np.int64)
    if (whole != sizes).any() or (whole < 1).any():
        raise ConfigError("units holds a number that is not a whole number of at least 1; every party needs data.")
    return whole


def special(
    budgets: Mapping[str, float], spent: Mapping[str, Spend], count: int, name: Callable[[int], str]
) -> dict[int, tuple[float | None, Spend | None]]:
    """(budget, past) of the parties that have one or the other of their own, by number; None for what they share."""
    past = {party: spend for party, spend in spent.items() if spend.releases}
    if not budgets and not past:
        return {}
    number = {name(k): k for k in range(count)}
    for party in budgets:
        if party not in number:
            near = difflib.get_close_matches(party, list(number)[:SEARCHED], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the parties are {name(0)!r} to {name(count - 1)!r}."
            raise ConfigError(f"privacy.budgets names party {party!r}, which is not there; {hint}")
    return {number[p]: (budgets.get(p), past.get(p)) for p in {**budgets, **past} if p in number}


def population_of(settings: Settings) -> str:
    """Which data a party of that name holds: the same only for the same source, split and seed."""
    data = settings.data
    if data.partition == "given":
        split = "given parties"
    else:
        method = "dirichlet" if data.partition == "auto" else data.partition  # what "auto" means for classes
        split = f"{method} over {data.parties}, alpha {data.alpha:g}, shards {data.shards}"
        split += f", floor {data.min_examples}, seed {settings.run.seed}"
    held = f", {data.validation:g} held out" if data.validation else ""
    return f"{data.source}, {split}{held}"
