"""Every kind of thing that left a party or the server, how often, and in which form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fulcrum.clipping.rule import ClipRule, no_share
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.client_level import Terms
from fulcrum.privacy.plan import Plan
from fulcrum.settings.schema import Settings


def schedule(plan: Plan) -> dict[str, Any]:
    """How the noise moves over the rounds: the schedule's name, and the least and the most sigma of any party."""
    ends = [g.sigma * factor for g in plan.groups for factor in (min(g.factors), max(g.factors))]
    return {"name": plan.schedule, "sigma_min": min(ends), "sigma_max": max(ends)}


def releases(
    settings: Settings, plan: Plan, rule: ClipRule, spends: Sequence[Spend], rounds_done: int
) -> list[dict[str, Any]]:
    """[{kind, times, text}]. spends: what each party has released [K]."""
    counts = [spend.releases for spend in spends]
    what, text, participation = _main(plan, rule, counts)
    moved = (
        "computed from what was released before, so they reveal nothing more"
        if rule.sound
        else "computed from raw private values: THEY REVEAL MORE than the epsilon says"
    )
    found = [_item(what, max(counts), text)]
    if rule.private and rule.share is not no_share:
        group = plan.groups[0]
        asked = sum(group.assignment(0, t, 1.0).asked(t) for t in range(rounds_done))
        every = "each sum" if group.every == 1 else f"the sum of every {group.every}th step"
        text = (
            f"Statistics that the rule {rule.name!r} releases beside {every}: noised together with it, at "
            "the joint multiplier sigma, so their cost is within the epsilon."
        )
        found.append(_item("statistics", min(asked, max(counts)), text))
    found += [
        _item("C", rounds_done, f"The clipping norm of each round (rule {rule.name!r}), {moved}."),
        _item(
            "models",
            rounds_done,
            f"The model after each round, its moving average and the final model: computed from the {what}.",
        ),
        _item("participation", 0 if plan.central else rounds_done, participation),
    ]
    if settings.run.diagnostics:
        text = (
            "Non-private diagnostics (clip fractions, norms, losses) were recorded. They are NOT covered "
            "by epsilon and must not leave a party; they are for simulations on public data."
        )
        found.append(_item("diagnostics", rounds_done, text))
    return found


def _item(kind: str, times: int, text: str) -> dict[str, Any]:
    return {"kind": kind, "times": times, "text": text}


def _main(plan: Plan, rule: ClipRule, counts: Sequence[int]) -> tuple[str, str, str]:
    """What training releases: its kind, in words, and what becomes known of who takes part."""
    noise = _noise(plan) if rule.private else ""
    if plan.central:
        return "means", *_of_server(plan.central, rule, noise)
    sums = (
        f"noised sums of clipped gradients, Poisson-sampled at rate {plan.groups[0].rate:g}"
        if rule.private
        else "sums of gradients without noise"
    )
    if plan.shared:
        return "sums", *_of_all_parties(plan.parties, f"{sums}{noise}")
    return "updates", *_of_each_party(plan.groups[0].steps, counts, f"{sums}{noise}")


def _noise(plan: Plan) -> str:
    low, high = (schedule(plan)[end] for end in ("sigma_min", "sigma_max"))
    spread = f"{low:.5g}" if low == high else f"{low:.5g} to {high:.5g}"
    moving = "" if plan.schedule == "constant" else f", moving over the rounds by the public schedule {plan.schedule!r}"
    return f", noise multiplier sigma = {spread}{moving}"


def _of_each_party(steps: int, counts: Sequence[int], sums: str) -> tuple[str, str]:
    """The server sees every update."""
    return (
        f"Each party's update of each round it takes part in, the total of {steps} step(s): {sums}. "
        f"Between {min(counts)} and {max(counts)} such sums a party so far.",
        "Who takes part in each round. Public; it depends on no private data. Sampling parties lowers no epsilon "
        "here: a party pays for every round it takes part in.",
    )


def _of_all_parties(parties: int, sums: str) -> tuple[str, str]:
    """The server is taken to see nothing but the parties' sum."""
    return (
        f"The weighted sum over all {parties} parties of each round's updates, one step each: "
        f"{sums} on the sum; each party adds 1/{parties} of the variance, sigma / "
        f"sqrt({parties}) times C to its own sum. Single updates are NOT released and must not be seen by "
        "anybody: the epsilon relies on it.",
        "All parties take part in every round; that is public, and the noise relies on it.",
    )


def _of_server(terms: Terms, rule: ClipRule, noise: str) -> tuple[str, str]:
    """What a trusted server releases, and what it keeps to itself."""
    divisor = {
        "fixed": f"divided by the expected weight q_c W = {terms.rate * terms.total:.6g}",
        "clipped": f"divided by the weight that took part, at least q_c W_min = {terms.floor:.6g}",
    }[terms.estimator]
    if rule.private:
        divisor += f"; one party moves it by at most {terms.sensitivity:.5g} times C"
    return (
        f"The server's mean update of each round: the clipped updates of the parties that joined (each of "
        f"{terms.clients} with probability q_c = {terms.rate:g}), {divisor}{noise}. Released in every round, also in "
        "one that nobody joined.",
        "Who joins a round is NOT released and must not be published: the epsilon relies on it. Neither are single "
        "updates, nor how many joined.",
    )
