"""What a person at a party reads before agreeing to a coordinator's proposal."""

from __future__ import annotations

from fulcrum.flower.terms import Terms


def consent_text(terms: Terms, units: int) -> str:
    """The terms in sentences, with what they cost; units: the party's number of units n_k."""
    limit = f"1/{units}"
    warning = "" if terms.delta < 1 / units else f" WARNING: not below {limit}, so the guarantee means little."
    interval, privacy = terms.statistics_interval, f"at delta {terms.delta:g} ({terms.accountant})"
    lines = [
        f"The coordinator proposes, for party {terms.party} with {units} {terms.unit}s:",
        f"  up to {terms.rounds} rounds of {terms.steps} step(s), each on a {terms.rate:g} sample of the {terms.unit}s",
        f"  noise multiplier of at least {terms.sigma:.5g}, clipping rule {', '.join(terms.rules)} ({terms.groups})",
        *([f"  the clipping rule's own statistics at most every {interval} steps"] if interval > 1 else []),
        f"  clipping norm within {terms.C_min:g} to {terms.C_max:g}, learning rate up to {terms.lr:g}",
        f"  model {terms.model.name}, built by this party's own software",
        f"  epsilon of at most {terms.budget:.4g} {privacy}, over all runs.{warning}",
    ]
    return "\n".join(lines)
