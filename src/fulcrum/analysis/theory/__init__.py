"""The paper's theory and our own, made checkable: `fulcrum theory`, `fulcrum.theory`.

objective.py         L(C) = L_model(C) + kappa C at one point of training, its parts and its exact slope
readings.py          equation A2 in each reading: sign, resting point, stability
clip_descent.py      Lemma 2, printed and corrected; functions that break the convexity claim
federation_bound.py  Lemma 1, printed and corrected
bowl.py              our own rule on a round bowl with noise
prediction.py        what that says before training; studies.py has the measured grids
on_run.py            the same quantities on a real federation with public records
statements.py        every statement with its status and its check; page.py writes docs/theory.md
"""

from fulcrum.analysis.theory.bowl import Bowl, find_best_fixed, find_best_normalised, follow_fixed, follow_rule
from fulcrum.analysis.theory.clip_descent import ClipDescent
from fulcrum.analysis.theory.federation_bound import LogisticRegression, Quadratics, bound_step, follow_bounds
from fulcrum.analysis.theory.findings import Finding, Statement
from fulcrum.analysis.theory.objective import ObjectivePoint, PrivateRound, find_minimiser, measure_objective
from fulcrum.analysis.theory.on_run import Constants, Moment, estimate_constants, look, replay
from fulcrum.analysis.theory.prediction import RunFacts, advise, predict_end
from fulcrum.analysis.theory.readings import find_resting_point, make_drift
from fulcrum.analysis.theory.statements import STATEMENTS

__all__ = [
    "STATEMENTS",
    "Bowl",
    "ClipDescent",
    "Constants",
    "Finding",
    "LogisticRegression",
    "Moment",
    "ObjectivePoint",
    "PrivateRound",
    "Quadratics",
    "RunFacts",
    "Statement",
    "advise",
    "bound_step",
    "estimate_constants",
    "find_best_fixed",
    "find_best_normalised",
    "find_minimiser",
    "find_resting_point",
    "follow_bounds",
    "follow_fixed",
    "follow_rule",
    "look",
    "make_drift",
    "measure_objective",
    "predict_end",
    "replay",
]
