"""HTML from values. Every text is escaped unless it is `Html`, which only this module makes from texts of its own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

NAME = re.compile(r"[a-z][a-z0-9-]*\Z")
VOID = frozenset({"input", "meta", "br", "hr", "link", "col"})
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
"""Characters that HTML forbids, or that turn the direction of the text around them."""


class Html(str):
    """Markup that is safe to put on a page."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def clean(text: str) -> str:
    """The text with characters that no page may hold replaced."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.encode("utf-8", "replace").decode("utf-8"))


def render(child: Child) -> Html:
    """A child of an element: markup as it is, text escaped, None as nothing, lists one after the other."""
    if isinstance(child, Html):
        return child
    if child is None:
        return Html("")
    if isinstance(child, str):
        return Html(escape(clean(child)))
    if isinstance(child, int | float):
        return Html(escape(str(child)))
    return Html("".join(render(each) for each in child))


def tag(name: str, /, *children: Child, **attributes: str | bool | None) -> Html:
    """An element. Attributes: `class_` is class, `data_x` is data-x; True stands alone, None and False are left out."""
    assert NAME.match(name), name
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        assert NAME.match(attribute), attribute
        words.append(attribute if value is True else f'{attribute}="{escape(clean(str(value)), quote=True)}"')
    head = f"<{' '.join(words)}>"
    return Html(head if name in VOID else f"{head}{render(children)}</{name}>")


def make_json_block(id: str, value: Any) -> Html:
    """A block of data that scripts read and no browser runs."""
    text = json.dumps(to_plain(value), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(f'<script type="application/json" id="{escape(id, quote=True)}">{text}</script>')


def to_plain(value: Any) -> Any:
    """The value for JSON: numbers of five digits, null where they are not finite."""
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.5g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    if isinstance(value, Mapping):
        return {clean(str(name)): to_plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(each) for each in value]
    return clean(str(value))


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Child | tuple[Child, float | str]]],
    caption: str,
    *,
    sortable: bool = True,
    class_: str = "",
) -> Html:
    """A table. A cell may be (what is shown, the value to sort by); numbers stand at the right. caption: what a screen
    reader says."""
    body, numeric = [], set()
    for row in rows:
        cells = []
        for place, cell in enumerate(row):
            shown, value = cell if isinstance(cell, tuple) else (cell, None)
            number = isinstance(value, int | float) or isinstance(shown, int | float)
            key = value if value is not None else shown if isinstance(shown, int | float) else None
            sort = None if key is None else ("" if isinstance(key, float) and math.isnan(key) else str(key))
            kind = "n" if number else None
            numeric |= {place} if number else set()
            name = "th" if place == 0 else "td"
            cells.append(tag(name, shown, class_=kind, data_sort=sort, scope="row" if place == 0 else None))
        body.append(tag("tr", cells))
    head = [
        tag(
            "th",
            tag("button", name, type="button", class_="sort") if sortable else name,
            scope="col",
            class_="n" if place in numeric else None,
        )
        for place, name in enumerate(columns)
    ]
    table = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", head)),
        tag("tbody", body),
        class_=f"{'sortable ' if sortable else ''}{class_}".strip() or None,
    )
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)
