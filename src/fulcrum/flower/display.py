"""Text that somebody else sent, made fit to be shown: nothing in it can move a cursor, hide a line or fill a screen."""

from __future__ import annotations

SHOWN_CHARACTERS = 120
"""The most characters that are shown of one value of a proposal."""
LINE_CHARACTERS = 4000
"""The most characters of one message on a terminal or in a log."""


def show_value(value: object, limit: int = SHOWN_CHARACTERS) -> str:
    """A received value as one short piece of text: what is not printable is written as an escape, the rest is cut."""
    return cut_text(escape_text(str(value)), limit)


def escape_text(text: str) -> str:
    """The text with everything that is not printable as an escape: controls, line ends, directions of writing."""
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def clean_message(text: str) -> str:
    """A message of ours that may quote what others sent: escaped and cut, its own line ends kept."""
    return cut_text("\n".join(escape_text(line) for line in text.split("\n")), LINE_CHARACTERS)


def cut_text(text: str, limit: int) -> str:
    """At most `limit` characters of it, with how many there were."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
