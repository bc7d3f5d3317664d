"""What people see: results on stdout, messages and progress on stderr. Colour, bars and boxes on a terminal only."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fulcrum.cli.failures import RunInterrupted
from fulcrum.privacy import accounting
from fulcrum.study.records import StudyScore

if TYPE_CHECKING:
    from fulcrum.runs import Observer, Result, RunInfo
    from fulcrum.training.federation import Federation
    from fulcrum.types import RoundResult

TableValue = object
SPARKLINE_BARS = "▁▂▃▄▅▆▇█"


def print_message(line: str, quiet: bool = False) -> None:
    """A message to the person, not part of the result."""
    if not quiet:
        print(fitted(line, Console(stderr=True)), file=sys.stderr)


def print_line(line: str) -> None:
    """A sentence of the result; broken between words where a terminal is narrow, whole in a pipe."""
    print(fitted(line, Console()))


PIPE_WIDTH = 80
"""Columns of a text for people where there is no terminal to ask."""


def print_sentence(line: str) -> None:
    """A sentence of a text for people, which fits 80 columns in a pipe too; programs take `--json`."""
    console = Console()
    if console.is_terminal:
        print(fitted(line, console, 2))
        return
    print(textwrap.fill(line, PIPE_WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def print_block(lines: Sequence[str]) -> None:
    """Lines that were made to fit; narrower terminals break them further."""
    for line in lines:
        print_line(line)


def fitted(line: str, console: Console, indent: int = 0) -> str:
    """The line broken between words for a terminal, further lines indented; in a pipe as it is.

    Long words stay whole: paths and commands are copied.
    """
    if not console.is_terminal:
        return line
    return textwrap.fill(
        line,
        max(console.width, indent + 20),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_json(value: Any) -> None:
    """The result for a program: valid JSON, infinities as "inf"."""
    from fulcrum.runs.folder import to_json_value

    print(json.dumps(to_json_value(value), indent=2))


MIN_WRAPPED = 20


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[TableValue]], title: str = "", fit: bool = False
) -> None:
    """A table: boxed on a terminal; plain aligned columns in a pipe, where a program may cut them.

    fit: for people, who read 80 columns in a pipe too: columns that do not fit follow below, after the first one again,
    and a last column of long words goes on below itself.
    """
    cells = [[format_value(cell) for cell in row] for row in rows]
    console = Console()
    if console.is_terminal:
        # Narrow padding: tables of eight columns fit into 80 characters.
        table = Table(
            title=title or None,
            title_justify="left",
            box=SIMPLE_HEAD,
            show_edge=False,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for name in columns:
            table.add_column(name, min_width=max(map(len, name.split())))  # no word of a heading is cut
        for row in cells:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        return
    if title:
        print(title)
    for part in _split_columns([list(columns), *cells]) if fit else [[list(columns), *cells]]:
        _print_plain_table(part, fit)


def _split_columns(rows: list[list[str]]) -> list[list[list[str]]]:
    """The table as tables of at most 80 columns of text, each with the first column; a last one may be long."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    groups: list[list[int]] = [[0]]
    for place in range(1, len(widths)):
        taken = sum(widths[i] + 2 for i in groups[-1])
        wanted = min(widths[place], MIN_WRAPPED) if place == len(widths) - 1 else widths[place]
        if taken + wanted > PIPE_WIDTH and len(groups[-1]) > 1:
            groups.append([0])
        groups[-1].append(place)
    return [[[row[i] for i in group] for row in rows] for group in groups]


def _print_plain_table(rows: list[list[str]], fit: bool) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    before = sum(width + 2 for width in widths[:-1])
    room = max(PIPE_WIDTH - before, MIN_WRAPPED) if fit else max(widths)
    for *first, last in rows:
        start = "".join(f"{text.ljust(width)}  " for text, width in zip(first, widths[:-1], strict=True))
        parts = textwrap.wrap(last, room) if len(last) > room else [last]
        print("\n".join([(start + parts[0]).rstrip(), *(" " * before + part for part in parts[1:])]))


def print_name_value_lines(facts: Sequence[tuple[str, TableValue]]) -> None:
    """Name and value, one per line; on a terminal long values go on in further lines below their beginning."""
    width, console = max(len(name) for name, _ in facts), Console()
    for name, value in facts:
        print(fitted(f"{name.ljust(width)}  {format_value(value)}", console, width + 2))


def format_value(value: TableValue) -> str:
    """A value in a table: four digits for numbers, - for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return "inf" if value == math.inf else f"{value:.4g}"
    return str(value)


def format_epsilon(value: float | str | None) -> str:
    """An epsilon to four digits, rounded up: what is printed is never less than what was spent."""
    number = math.nan if value is None else float(value)  # our JSON has infinity as the text "inf"
    return format_value(None) if math.isnan(number) else accounting.format_epsilon(number)


def format_bytes(count: float) -> str:
    """Bytes with three digits: 2.6 kB, 1.3 MB; thousands, not 1024."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.9995 * limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration with two or three digits: 12 ms, 3.4 s, 5 min 20 s, 2 h 10 min, 3 d 4 h."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    for (large, size), (small, part) in itertools.pairwise((("d", 86400), ("h", 3600), ("min", 60), ("s", 1))):
        count, rest = divmod(round(seconds / part), size // part)
        if count:
            return f"{count} {large} {rest} {small}" if rest else f"{count} {large}"
    return f"{seconds:.3g} s"


def format_percent(fraction: float | None) -> str:
    """0.912 -> 91.2%."""
    return "-" if fraction is None else f"{100 * fraction:.1f}%"


def format_metric(name: str, value: float | str | None) -> str:
    """A metric's value as people read it: 91.2% for fractions of records, four digits for others, - for none."""
    number = math.nan if value is None else float(value)  # our JSON has infinity as the text "inf"
    if math.isnan(number):
        return format_value(None)
    return format_percent(number) if StudyScore(name).is_fraction else format_value(number)


def format_few_values(values: Sequence[float], count: int = 4) -> str:
    """Some values from first to last, evenly spaced: 1 → 1.82 → 3.3."""
    if not values:
        return "-"
    picked = sorted({round(i * (len(values) - 1) / max(count - 1, 1)) for i in range(count)})
    return " → ".join(f"{values[i]:.3g}" for i in picked)


def make_sparkline(values: Sequence[float], width: int = 12) -> str:
    """The course of positive numbers as small bars, on a log scale; empty where they do not move or are not finite."""
    if not values or not all(0 < value < math.inf for value in values):
        return ""
    logs = [math.log(values[round(i * (len(values) - 1) / (width - 1))]) for i in range(width)]
    low, high = min(logs), max(logs)
    if high - low < 1e-9:
        return ""
    return "".join(SPARKLINE_BARS[round((x - low) / (high - low) * (len(SPARKLINE_BARS) - 1))] for x in logs)


def rehearse_aloud(federation: Federation, quiet: bool = False) -> Federation:
    """The federation with what a rehearsal chose, after a message where it takes its time, and with its progress."""
    from fulcrum import runs as api

    coming = api.describe_coming_rehearsal(federation)
    if not coming:
        return api.apply_rehearsal(federation)
    print_message(coming, quiet)
    with show_part_done("rehearsing", quiet) as tell:
        return api.apply_rehearsal(federation, tell=tell)


SECONDS_BETWEEN_LINES = 10.0
"""How long work is silent at least between two lines about its progress, where stderr is no terminal."""


@contextlib.contextmanager
def show_part_done(title: str, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """Gives a function that takes the part that is done, 0 to 1: a bar on a terminal, else a line now and then.

    Ctrl-C is answered with what was kept.
    """
    console, began = Console(stderr=True), time.monotonic()
    spoken = began
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:.0f}%"),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
    task = bar.add_task(title, total=1.0)

    def tell(part: float) -> None:
        nonlocal spoken
        bar.update(task, completed=part)
        now = time.monotonic()
        if bar.disable and now - spoken >= SECONDS_BETWEEN_LINES:
            spoken = now
            left = (now - began) * (1 - part) / max(part, 1e-3)
            print_message(f"{title}: {part:.0%}, about {left:.0f} s left", quiet)

    try:
        with bar:
            yield tell
    except KeyboardInterrupt:
        raise RunInterrupted(
            f"interrupted while {title}; nothing was spent or written, and the same command goes on from here."
        ) from None


def make_notes_observer() -> Observer:
    """Prints warnings about a run that goes on, before its first release."""
    from fulcrum.runs.observers import Observer

    class NotesPrinter(Observer):
        """Prints the run's notes to stderr, also where the user asked for quiet: they say what is paid twice."""

        def started(self, run: RunInfo) -> None:
            for note in run.notes:
                print_message(f"warning: {note}")

    return NotesPrinter()


FIRST_LINE_SECONDS, MOST_LINE_SECONDS = 10.0, 60.0
"""Where stderr is no terminal: a line after so many seconds, then after twice as many each time, up to the most."""


def make_line_observer(title: str, rounds: int, clock: Callable[[], float] = time.perf_counter) -> Observer:
    """A line on stderr now and then while rounds come in, for logs and pipes; none for a run of a few seconds."""
    from fulcrum.runs.folder import compute_total_C
    from fulcrum.runs.observers import Observer

    class LinePrinter(Observer):
        """Prints rounds done, the last score, C, epsilon and what is left, at growing intervals."""

        def started(self, run: RunInfo) -> None:
            self.began = clock()
            self.wait, self.due = FIRST_LINE_SECONDS, self.began + FIRST_LINE_SECONDS
            self.name = run.score if run else ""
            self.first, self.score = 0, ""

        def round(self, result: RoundResult) -> None:
            self.first = self.first or result.round
            for name in [self.name, *result.metrics][: 1 if self.name else 2]:
                if name in result.metrics:
                    self.score = f", {name} {format_metric(name, result.metrics[name])}"
            now = clock()
            if now < self.due:
                return
            self.wait = min(2 * self.wait, MOST_LINE_SECONDS)
            self.due = now + self.wait
            seen = result.round - self.first + 1
            left = format_seconds((now - self.began) / seen * max(rounds - result.round, 0))
            facts = f"C {format_value(compute_total_C(result.C))}, epsilon {format_epsilon(result.epsilon)}"
            with contextlib.suppress(OSError):  # nobody reads it any more: no reason to stop the run
                print_message(f"{title}: round {result.round} of {rounds}{self.score}, {facts}, about {left} left")

    return LinePrinter()


def make_progress_observer(title: str, rounds: int, quiet: bool = False) -> Observer:
    """A live bar on stderr while rounds come in; where stderr is not a terminal, a line now and then."""
    from fulcrum.runs.folder import compute_total_C
    from fulcrum.runs.observers import Observer

    console = Console(stderr=True)
    if quiet:
        return Observer()
    if not console.is_terminal:
        return make_line_observer(title, rounds)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    )

    class ProgressBar(Observer):
        """The bar, with the speed, the last value of the task's score, C and epsilon behind it."""

        def started(self, run: RunInfo) -> None:
            self.task = bar.add_task(title, total=rounds, facts="")
            self.began, self.seen, self.score = time.perf_counter(), 0, ""
            self.name = run.score if run else ""
            bar.start()

        def round(self, result: RoundResult) -> None:
            self.seen += 1
            for name in [self.name, *result.metrics][: 1 if self.name else 2]:
                if name in result.metrics:
                    self.score = f"{name} {format_metric(name, result.metrics[name])}  "
            speed = self.seen / max(time.perf_counter() - self.began, 1e-9)
            norm = f"C {format_value(compute_total_C(result.C))}"
            facts = f"{speed:.1f} rounds/s  {self.score}{norm}  epsilon {format_epsilon(result.epsilon)}"
            bar.update(self.task, completed=result.round, facts=facts)

        def ended(self, result: Result | None) -> None:
            bar.stop()

    return ProgressBar()


@contextlib.contextmanager
def show_progress(title: str, rounds: int, quiet: bool = False) -> Iterator[Callable[[RoundResult], None]]:
    """`make_progress_observer` for callers that take a function per round."""
    observer = make_progress_observer(title, rounds, quiet)
    observer.started(None)  # type: ignore[arg-type]  # the bar does not use the run
    try:
        yield observer.round
    finally:
        observer.ended(None)
