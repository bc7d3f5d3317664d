"""Charts of the theory, as plain values that the report's page and its figure files draw."""

from __future__ import annotations

from fulcrum.analysis.report.chart_types import Axis, Chart, Series
from fulcrum.analysis.theory import bowl as bowls
from fulcrum.analysis.theory.clip_descent import ClipDescent, compute_quadratic_gaps

OVER_ROUNDS = {"round": Axis("round")}


def make_lemma_2_chart(rounds: int = 30) -> Chart:
    """Lemma 2 on a quadratic: the exact gap, the printed and the corrected bound."""
    descent = ClipDescent(1.0, 1.0, 0.3, 0.4, 1.0)
    at = {"round": tuple(float(t) for t in range(rounds + 1))}
    return Chart(
        key="lemma-2",
        title="Lemma 2 on a quadratic",
        caption="Expected L(C) - L*; the printed bound is below it, the corrected one equal to it.",
        y=Axis("L(C) - L*", log=True),
        x=OVER_ROUNDS,
        series=(
            Series("exact", tuple(compute_quadratic_gaps(descent, rounds).tolist()), at, 0),
            Series("corrected bound", tuple(descent.bound(rounds).tolist()), at, 1, dash=True),
            Series("printed bound", tuple(descent.bound_as_printed(rounds).tolist()), at, 2),
        ),
    )


def make_bowl_chart(bowl: bowls.Bowl) -> Chart:
    """The rule on a bowl: recursion, one simulated run, the best fixed cell."""
    at = {"round": tuple(float(t) for t in range(bowl.rounds + 1))}
    fixed = bowls.find_best_fixed(bowl)
    return Chart(
        key=f"bowl-{bowl.rounds}",
        title=f"moo on a bowl, {bowl.rounds} rounds",
        caption="Distance from the optimum: averages by the recursion, one run by the rule's own code, and the best "
        f"fixed (C = {fixed.C:.2g}, step {fixed.step:.2g}).",
        y=Axis("distance", log=True),
        x=OVER_ROUNDS,
        series=(
            Series("recursion", bowls.follow_rule(bowl).distances, at, 0),
            Series("one run", bowls.simulate_rule(bowl, 0).distances, at, 1, dash=True),
            Series("best fixed", bowls.follow_fixed(bowl, fixed.step, fixed.C).distances, at, 2),
        ),
    )
