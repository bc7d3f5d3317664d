"""How many units a party may say it has: the number decides how much its updates weigh.

A number that was fixed at registration (`units=480` behind the key in NAME.pub) bounds the claim. Without one the claim
must be of the order of the others'. Whoever claims more, or next to nothing, does not take part and is named.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fulcrum.errors import ConfigError

PartyReportFn = Callable[[str, str], None]
"""Called with a party's name (or "") and one sentence on what happened."""


@dataclass(frozen=True)
class PartyInfo:
    """What is public about a party: its name, and its number of units n_k."""

    name: str
    units: int


LARGEST_CLAIM = 10**9
"""The most units of a party; a proposal is made for parties of up to this many."""
MOST_TIMES_MEDIAN = 10
"""A claim that nobody registered may be so many times the median of all claims."""
LEAST_SHARE_OF_MEDIAN = 0.01
"""And must be at least this share of it: with very few units a party's noise, and the bound on it, is very large."""
LEAST_SHARE_OF_REGISTERED = 0.1
"""A registered party may have lost units since, down to this share."""
_UNITS_WORD = re.compile(r"units=([0-9]{1,10})")


def read_registered_units(folder: Path) -> dict[str, int]:
    """The numbers of units that were fixed at registration: `units=N` in the comment of NAME.pub, by name."""
    found = {}
    for path in sorted(folder.glob("*.pub")):
        words = path.read_text(encoding="utf-8", errors="replace").split()
        numbers = [match[1] for word in words[2:] if (match := _UNITS_WORD.fullmatch(word))]
        if len(numbers) > 1 or any(int(number) < 1 for number in numbers):
            raise ConfigError(f"{path}: write one units=N behind the key, the number of units that was agreed on.")
        if numbers:
            found[path.stem] = int(numbers[0])
    return found


def find_wrong_claim(name: str, units: int, registered: Mapping[str, int]) -> str:
    """Why a claim cannot be right whatever the others say; "" where it may be."""
    fixed = registered.get(name)
    if fixed is not None and not max(1, LEAST_SHARE_OF_REGISTERED * fixed) <= units <= fixed:
        return f"it says that it has {units} units, and {fixed} were registered in {name}.pub"
    if not 1 <= units <= LARGEST_CLAIM:
        return f"it says that it has {units} units, and a party has 1 to {LARGEST_CLAIM}"
    return ""


def keep_plausible_parties(
    parties: Sequence[PartyInfo], registered: Mapping[str, int], report: PartyReportFn
) -> tuple[PartyInfo, ...]:
    """The parties whose claims are of one order, those with registered numbers in any case; the others are reported."""
    if len(parties) < 2:
        return tuple(parties)
    median = statistics.median_low([party.units for party in parties])
    kept = []
    for party in parties:
        fits = LEAST_SHARE_OF_MEDIAN * median <= party.units <= MOST_TIMES_MEDIAN * median
        if fits or party.name in registered:
            kept.append(party)
            continue
        report(
            party.name,
            f"does not take part: it says that it has {party.units} units where the parties' median is {median}, and a "
            f"party's number decides its weight; if it is right, write units={party.units} behind the key in "
            f"{party.name}.pub",
        )
    return tuple(kept)
