"""The privacy statement of a run: privacy.json for programs, PRIVACY.md for whoever signs it.

words.py      sentences: the guarantee, what it relies on, warnings
releases.py   what left a party or the server, and how often
facts.py      privacy.json: every number and sentence under a stable key
page.py       PRIVACY.md, from these facts alone
markdown.py   pieces of Markdown

It says what is promised, to whom, against whom, at what price so far, and what is not promised. Every number comes from
the accountant; every sentence from the settings that produced the run.
"""

from __future__ import annotations

from fulcrum.privacy.statement.facts import statement
from fulcrum.privacy.statement.page import to_markdown

__all__ = ["statement", "to_markdown"]
