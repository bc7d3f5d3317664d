"""The privacy statement of a run: privacy.json for programs, PRIVACY.md for the person who signs it.

facts.py     privacy.json: every number and sentence under a stable key, and what a party or the server released
coverage.py  the runs within the scope, and the worst of each of their properties
text.py      sentences: the guarantee, its assumptions, warnings
units.py     what epsilon protects, from whom, and what it does not cover, per unit
meaning.py   what the epsilon means: beliefs, tests and guesses of an attacker
page.py      PRIVACY.md, from these facts alone

The statement names the guarantee, the protected unit, the adversary, the epsilon spent so far, and what is not covered.
Every number comes from the accountant; every sentence from the settings of the run.
"""

from __future__ import annotations

from fulcrum.privacy.statement.coverage import Coverage, CoveredRun
from fulcrum.privacy.statement.facts import AccountedRun, EvaluationData, make_statement
from fulcrum.privacy.statement.page import statement_to_markdown

__all__ = ["AccountedRun", "Coverage", "CoveredRun", "EvaluationData", "make_statement", "statement_to_markdown"]
