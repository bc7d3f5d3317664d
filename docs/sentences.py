"""One sentence per line in the Markdown sources, so that a change of a sentence is a change of a line.

    python docs/sentences.py            # names the files that differ from that
    python docs/sentences.py --write    # formats them; `make docs` does it too

Paragraphs and items of lists are joined and cut after each sentence. Headings, tables, quotes, comments, fenced and
indented code stay as they are, and so do a paragraph with a hard line break, what a program writes between
`<!-- name -->` and `<!-- end name -->`, and whole pages that a program writes ("do not edit").
What is rendered does not change.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ITEM = re.compile(r"^( *)([*+-]|\d+[.)]) +(?=\S)")
KEPT = re.compile(r"^\s*(#|\||>|<|!\[[^\]]*\]\([^)]*\)$|\[[^\]]+\]: |([-*_] ?){3,}$)")
ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "al.", "cf.", "approx.", "resp.", "no.", "Fig.", "Eq.", "Sec.", "Dr.")
ENDED = re.compile(r"[.!?:][\"')*_`\]]*$")
END = re.compile(r"[.!?][\"')*_\]]*(?= +[\"'(*_`\[]*[A-Z0-9`\[])")


def list_sources() -> list[Path]:
    """The files that are kept in this form."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def format_text(text: str) -> str:
    """The text with one sentence per line."""
    if "; do not edit." in text[:300]:
        return text
    return "\n".join(line for block in cut_blocks(text.split("\n")) for line in block)


def cut_blocks(lines: list[str]) -> Iterator[list[str]]:
    """Blocks of finished lines: what is kept line by line, paragraphs formatted."""
    paragraph: list[str] = []
    fence = ""
    in_comment = False
    inside_list = False
    written_by = ""
    ends = set(re.findall(r"^<!-- end ([\w-]+) -->$", "\n".join(lines), re.MULTILINE))
    for line in lines:
        if found := re.match(r"^<!-- (end )?([\w-]+) -->$", line):
            written_by = "" if found[1] else found[2] if found[2] in ends else written_by
        mark = re.match(r"^\s*(```+|~~~+)", line)
        blank = not line.strip()
        indent = len(line) - len(line.lstrip())
        kept = bool(fence or mark or in_comment or written_by or blank or KEPT.match(line))
        kept = kept or (not paragraph and not inside_list and indent >= 4)
        if kept or (paragraph and ITEM.match(line)):
            yield format_paragraph(paragraph)
            paragraph = []
        if kept:
            yield [line]
            if mark:
                fence = "" if fence and line.strip().startswith(fence) else fence or mark[1]
            in_comment = ("<!--" in line or in_comment) and "-->" not in line
            inside_list = inside_list and (blank or indent > 0)
            continue
        if ITEM.match(line):
            inside_list = True
        elif not paragraph and indent == 0:
            inside_list = False
        paragraph.append(line)
    yield format_paragraph(paragraph)


def format_paragraph(lines: list[str]) -> list[str]:
    """A paragraph or an item of a list, one sentence per line, continued at the depth of its text."""
    if not lines or any(line.endswith(("  ", "\\")) for line in lines[:-1]):
        return lines
    item = ITEM.match(lines[0])
    first = item[0] if item else lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    rest = " " * len(first)
    pieces = [lines[0][len(first) :].strip()]
    for line in (line.strip() for line in lines[1:]):
        if ENDED.search(pieces[-1]) and is_end(pieces[-1], len(pieces[-1])) and pieces[-1].count("`") % 2 == 0:
            pieces.append(line)
        else:
            pieces[-1] += f" {line}"
    sentences = [sentence for piece in pieces for sentence in cut_sentences(piece)]
    return [(first if number == 0 else rest) + sentence for number, sentence in enumerate(sentences)]


def cut_sentences(text: str) -> list[str]:
    """The sentences of one line of prose; ends within code, links, brackets and abbreviations do not count."""
    hidden = hide(text)
    found, start = [], 0
    for end in END.finditer(hidden):
        if is_end(text, end.end()):
            found.append(text[start : end.end()].strip())
            start = end.end()
    return [*found, text[start:].strip()]


def hide(text: str) -> str:
    """The text with code, the targets of links and what stands in brackets made of letters, at the same places."""
    for pattern in (r"`[^`]*`", r"\]\([^)]*\)", r"\([^()]*\)", r"\[[^\[\]]*\]"):
        text = re.sub(pattern, lambda m: m[0][0] + "x" * (len(m[0]) - 2) + m[0][-1], text)
    return text


def is_end(text: str, place: int) -> bool:
    """Whether what ends at `place` is no abbreviation, initial or ellipsis."""
    word = text[:place].rstrip("\"')*_]").rpartition(" ")[2].lstrip("(\"'*_[")
    return word not in ABBREVIATIONS and not re.fullmatch(r"[A-Z]\.|.*\.\.", word)


def main(write: bool) -> int:
    """Name the files that are not in this form; with `write`, bring them into it."""
    different = [path for path in list_sources() if format_text(path.read_text("utf-8")) != path.read_text("utf-8")]
    for path in different:
        print(path.relative_to(ROOT))
        if write:
            path.write_text(format_text(path.read_text("utf-8")), encoding="utf-8")
    return 0 if write or not different else 1


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv))
