"""Checks of our own statements: the rule on a bowl, what public facts decide, where it fails, the prediction."""

from __future__ import annotations

from fulcrum.analysis.theory import bowl as bowls
from fulcrum.analysis.theory.findings import CONDITIONAL, FAILS, UNMEASURED, Finding, format_numbers
from fulcrum.analysis.theory.prediction import score_against
from fulcrum.analysis.theory.studies import read_grids
from fulcrum.runs.one_call import resolve_keywords
from fulcrum.runs.preparation import prepare_unrehearsed
from fulcrum.runs.rehearsal import list_weaknesses

# --- our own rule -----------------------------------------------------------------------------------

BOWLS = (
    bowls.Bowl(1.0, 2_000, 10.0, 0.05, 200, 5.0),
    bowls.Bowl(1.0, 2_000, 10.0, 0.2, 200, 5.0),
    bowls.Bowl(1.0, 5_000, 10.0, 0.04, 50, 5.0),
    bowls.Bowl(1.0, 2_000, 10.0, 0.05, 20, 5.0),
)
"""Two long runs, a short and a very short one."""


def check_rule_recursion() -> Finding:
    """The recursion of averages against the rule's own code on the bowl, and the regret against the best fixed cell."""
    rows, worst = [], 0.0
    for bowl in BOWLS:
        predicted = bowls.follow_rule(bowl)
        ends = [bowls.simulate_rule(bowl, seed).end for seed in range(5)]
        mean = sum(ends) / len(ends)
        fixed = min(bowls.find_best_fixed(bowl).end, bowls.find_best_normalised(bowl).end)
        worst = max(worst, abs(predicted.end - mean) / bowl.distance)
        rows.append(
            (
                f"T = {bowl.rounds}, nu^2 d = {format_numbers(bowl.spread)}: r_T by recursion, simulated, best fixed",
                format_numbers(predicted.end, mean, fixed),
            )
        )
    rows.append(("largest difference between recursion and simulation, of r_0", format_numbers(worst)))
    return Finding(CONDITIONAL if worst < 0.05 else FAILS, tuple(rows))


def check_public_facts() -> Finding:
    """The best step for a C below the norms does not depend on the curvature; above the norms it does."""
    below = bowls.compare_curvatures(BOWLS[0], (0.01, 1.0, 100.0))
    above = [
        min(
            (bowls.follow_fixed(bowls.Bowl(h, 2_000, 10.0, 0.0, 200, 5.0), s, 1e6).end, s)
            for s in (10 ** (k / 8) for k in range(-16, 65))
        )[1]
        for h in (1.0, 100.0)
    ]
    same = max(below) / min(below) < 1.0001
    differs = above[0] / above[1] > 10
    return Finding(
        CONDITIONAL if same and differs else FAILS,
        (
            ("best step with C below the norms at curvature 0.01, 1, 100", format_numbers(*below)),
            ("best step with C = 1e6 and no noise at curvature 1, 100", format_numbers(*above)),
        ),
    )


def check_where_it_fails() -> Finding:
    """Runs too short to mend the first step end behind the best fixed cell, and `fulcrum plan` warns of them."""
    bowl, rows = BOWLS[3], []
    path = bowls.follow_rule(bowl)
    best = bowls.find_best_normalised(bowl)
    needed = bowls.compute_rounds_to_mend(path.steps[0], best.step, 0.03)
    rows.append(
        (
            "T = 20: first step, best fixed step, rounds needed to mend it",
            format_numbers(path.steps[0], best.step, needed),
        )
    )
    rows.append(("r_T of the rule, of the best fixed step", format_numbers(path.end, best.end)))
    settings, _, _ = resolve_keywords(
        "digits", "mlp", None, {"epsilon": 4.0, "parties": 5, "rounds": 20, "method": "moo"}
    )
    federation = prepare_unrehearsed(settings.replace(clip={"rehearse": False}))
    warned = any("round" in warning for warning in list_weaknesses(federation))
    rows.append(("fulcrum plan warns of 20 rounds without a rehearsal", "yes" if warned else "no"))
    behind = path.end > best.end and needed > 0.5 * bowl.rounds
    return Finding(CONDITIONAL if behind and warned else FAILS, tuple(rows))


def check_prediction() -> Finding:
    """The prediction before training against the measured grids that lie in results/."""
    found = [score_against(*grid) for grid in read_grids()]
    if not found:
        return Finding(UNMEASURED, (("grids", "none at hand: results/ is not part of the installation"),))
    by_study: dict[str, list[tuple[float, float]]] = {}
    for each in found:
        by_study.setdefault(each.name.partition("/")[0], []).append((each.correlation, each.regret))
    rows = []
    for study, values in by_study.items():
        correlations, regrets = [c for c, _ in values], [r for _, r in values]
        rows.append(
            (
                f"{study}: grids, mean and least rank correlation",
                format_numbers(len(values), sum(correlations) / len(values), min(correlations)),
            )
        )
        rows.append(
            (
                f"{study}: mean and largest regret of the predicted cell, points",
                format_numbers(sum(regrets) / len(values), max(regrets)),
            )
        )
    mean = sum(each.correlation for each in found) / len(found)
    return Finding(CONDITIONAL if mean > 0.5 else FAILS, tuple(rows))
