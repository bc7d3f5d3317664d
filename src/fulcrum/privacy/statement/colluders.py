"""What the statement says of masked sums: sigma_eff, colluders, persons at two parties, and the parties' keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fulcrum.privacy.plan import Plan
from fulcrum.privacy.plan.collusion import bound_two_parties, make_collusion_table
from fulcrum.privacy.plan.text import infinity_to_text

COMPUTATIONAL_TEXT = (
    "Messages are integers modulo 2^32 under masks from ChaCha20, whose keys each pair of parties agrees on by X25519 "
    "for this run alone. What is seen of honest parties is the sum of their integers. The guarantee is computational: "
    "it holds for whoever cannot break these, and cannot replace a party's signing key where it was pinned."
)
ONE_PROCESS_TEXT = (
    "One process played all parties, so there were no keys to pin: whoever reads its memory sees every party's data."
)
KEYS_TEXT = (
    "The other parties' signing keys were pinned beforehand, as listed; a party that is not listed as pinned is taken "
    "for a colluder."
)


NO_KEYS_TEXT = "NO other party's signing key was pinned here: every other participant is taken for a colluder."
EACH_PINS_TEXT = (
    "Each party has its own statement, which lists whose signing keys it had pinned; the coordinator only relays keys."
)


def describe_pairwise(
    plan: Plan, epsilon: float, delta: float, keys: Sequence[Mapping[str, Any]], across_machines: bool = False
) -> dict[str, Any]:
    """The value of `pairwise` in privacy.json. keys: of the other parties, as this party pinned them.

    across_machines: whether each party was a process of its own.
    """
    if not across_machines:
        held = ONE_PROCESS_TEXT
    elif plan.peers:  # one party's own statement
        held = KEYS_TEXT if keys else NO_KEYS_TEXT
    else:
        held = EACH_PINS_TEXT
    table = make_collusion_table(plan, across_machines)  # a party that drops out leaves a smaller set
    two = bound_two_parties(plan, epsilon, delta)
    return {
        "colluders": plan.colluders,
        "parties": plan.parties + plan.peers,
        "sigma_eff": table[0].sigma_eff,
        "table": [
            {"colluders": row.colluders, "sigma_eff": row.sigma_eff, "epsilon": infinity_to_text(row.epsilon)}
            for row in table
        ],
        "two_parties": {name: value if value is None else infinity_to_text(value) for name, value in two.items()},
        "keys": [dict(key) for key in keys],
        "text": f"{COMPUTATIONAL_TEXT} {held}",
    }


def describe_masked_sums(sums: str) -> tuple[str, str]:
    """What is released where messages are masked, and what that says about participation."""
    return (
        f"The weighted sum over the participants of each round, one step each: {sums} on the sum of the honest "
        "parties (sigma_eff). Single messages are masked, and look random to whoever has neither end of a mask.",
        "Who takes part in each round. Public; it depends on no private data. Each participant's share of the noise "
        "follows from the set.",
    )
