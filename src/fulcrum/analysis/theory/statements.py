"""Every statement of the paper's theory and of ours, with its status and the numbers that show it.

`fulcrum theory check` runs all of them, compares each status with that of docs/theory.md and writes the page's tables.
A statement's check returns numbers and the status that they support; none is written by hand.
"""

from __future__ import annotations

from fulcrum.analysis.theory.findings import CONDITIONAL, FAILS, Statement
from fulcrum.analysis.theory.own_checks import (
    check_prediction,
    check_public_facts,
    check_rule_recursion,
    check_where_it_fails,
)
from fulcrum.analysis.theory.paper_checks import (
    check_convexity,
    check_lemma_1,
    check_lemma_1_without_noise,
    check_lemma_2,
    check_lemma_2_on_run,
    check_measured_objective,
    check_pl_along_run,
    check_printed_derivative,
    check_readings,
)

STATEMENTS = (
    Statement(
        "derivative",
        "paper, A2",
        "The derivative of L(C) = L_model(C) + kappa C is kappa - (dL_model/dC) / C; its descent finds the minimum.",
        FAILS,
        check_printed_derivative,
    ),
    Statement(
        "readings",
        "paper, Algorithm 1",
        "C, moved example by example, converges to a C that balances the model's loss and kappa C.",
        CONDITIONAL,
        check_readings,
    ),
    Statement(
        "objective",
        "paper, A1",
        "L(C), the expected loss after a private round plus kappa C, has one minimum inside.",
        CONDITIONAL,
        check_measured_objective,
    ),
    Statement(
        "convexity",
        "paper, convexity analysis",
        "PL plus a linear term is well posed with a unique minimiser.",
        FAILS,
        check_convexity,
    ),
    Statement(
        "pl", "paper, assumption 3", "The training loss satisfies the PL inequality.", CONDITIONAL, check_pl_along_run
    ),
    Statement(
        "lemma-2",
        "paper, Lemma 2",
        "C converges linearly at rate 1 - 2 mu eta_C for eta_C up to 2/L, to within eta_C sigma_g^2 / (2 mu).",
        FAILS,
        check_lemma_2,
    ),
    Statement(
        "lemma-2-run",
        "ours",
        "Lemma 2 as corrected bounds descent on the measured L(C) of a run.",
        CONDITIONAL,
        check_lemma_2_on_run,
    ),
    Statement("lemma-1", "paper, Lemma 1", "The federation's loss obeys the printed recursion.", FAILS, check_lemma_1),
    Statement(
        "lemma-1-plain",
        "paper, Lemma 1",
        "Without noise and clipping it does.",
        CONDITIONAL,
        check_lemma_1_without_noise,
    ),
    Statement(
        "rule",
        "ours",
        "On a round bowl a recursion of averages says where moo's step, C and distance go.",
        CONDITIONAL,
        check_rule_recursion,
    ),
    Statement(
        "public-facts",
        "ours",
        "With C below the norms the best step depends on public facts and the first distance only.",
        CONDITIONAL,
        check_public_facts,
    ),
    Statement(
        "failure",
        "ours",
        "Runs too short to mend the first step end behind the best fixed cell; fulcrum plan warns.",
        CONDITIONAL,
        check_where_it_fails,
    ),
    Statement(
        "prediction",
        "ours",
        "The bowl orders fixed (C, learning rate) cells of real networks before training.",
        CONDITIONAL,
        check_prediction,
    ),
)
