"""The privacy statement of a run: privacy.json for programs, PRIVACY.md for whoever signs it.

facts.py  privacy.json: every number and sentence under a stable key, and what left a party or the server
text.py   sentences: the guarantee, what it relies on, warnings
units.py  what one epsilon protects, from whom, and what it leaves out, per unit
page.py   PRIVACY.md, from these facts alone

It says what is promised, to whom, against whom, at what price so far, and what is not promised. Every number comes from
the accountant; every sentence from the settings that produced the run.
"""

from __future__ import annotations

from fulcrum.privacy.statement.facts import AccountedRun, make_statement
from fulcrum.privacy.statement.page import statement_to_markdown

__all__ = ["AccountedRun", "make_statement", "statement_to_markdown"]
