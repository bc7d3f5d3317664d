"""`fulcrum data changes`: who of the data is new, stays or is gone since the runs of a ledger, and each one's total."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import show, view
from fulcrum.cli.options import DebugOption, JsonOption, with_settings
from fulcrum.errors import ConfigError, InputError
from fulcrum.settings.schema import Settings

if TYPE_CHECKING:
    from fulcrum.privacy.ledger import Ledger, UnitCost

UNIT_BYTES = 16
MEANING = {
    "stay": "keep what was spent on them; a new run adds to it",
    "new": "nothing was spent on them yet",
    "gone": "what was released stays released; nothing is added as long as they are left out",
}
"""What each group means for a person's total."""


@with_settings
def changes(
    settings: Settings,
    person: Annotated[
        str, typer.Option("--person", help="Also say the total of this person, by the id in the data.")
    ] = "",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare the data with the people on record in a ledger: who stays, is new or gone, and what each has spent.

    Nothing is trained, spent or stored. Units are known by keyed hashes, so it needs the key that the runs had.
    """
    from pathlib import Path

    from fulcrum import runs as api
    from fulcrum.privacy.ledger import Ledger
    from fulcrum.runs.binding import check_record_key
    from fulcrum.runs.preparation import list_unit_digests

    path = settings.run.ledger
    if not path or not Path(path).is_file():
        raise InputError("give --ledger FILE, the ledger of the runs so far; `fulcrum run --ledger FILE` starts one.")
    if settings.privacy.epsilon is None and settings.privacy.sigma is None:
        settings = settings.replace(privacy={"epsilon": 1.0})  # nothing is trained, so any will do
    federation = api.prepare(settings)
    if federation.problem.dataset.public:
        raise ConfigError("the data is declared public, and of public records no ledger knows whose they are.")
    show.print_own_notes(federation.problem.dataset, as_json)
    with Ledger.open(path) as ledger:
        check_record_key(ledger)
        rows = [
            row
            for party, digests in list_unit_digests(federation).items()
            for row in _compare_party(ledger, party, digests)
        ]
        found = _find_person(ledger, person) if person else []
    unit = "person" if federation.problem.dataset.person is not None else "example"
    if as_json:
        view.print_json({"unit": unit, "groups": rows, **({"person": found} if person else {})})
        return
    _print_groups(rows, unit)
    if person:
        _print_person(person, found)


def _compare_party(ledger: Ledger, party: str, digests: bytes) -> list[dict[str, Any]]:
    """The groups of a party's units: those that stay, are new and are gone, with their total."""
    if party not in ledger.accounts():
        return [_make_row(party, "new", len(digests) // UNIT_BYTES, 0, 0.0, None)]
    past = ledger.list_past_units(party)
    now = {digests[at : at + UNIT_BYTES] for at in range(0, len(digests), UNIT_BYTES)}
    gone = b"".join(each for at in range(0, len(past), UNIT_BYTES) if (each := past[at : at + UNIT_BYTES]) not in now)
    rows = [_describe_group(party, "gone", group) for group in ledger.list_unit_costs(party, gone)] if gone else []
    known = ledger.list_unit_costs(party, digests)
    here = [_describe_group(party, "stay" if group.runs else "new", group) for group in known]
    return _join_equal_rows([*here, *rows])


def _join_equal_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for people with the same total: it does not matter here which runs made it."""
    joined: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(value for name, value in row.items() if name != "count")
        joined[key] = {**row, "count": joined.get(key, {"count": 0})["count"] + row["count"]}
    return list(joined.values())


def _describe_group(party: str, who: str, group: UnitCost) -> dict[str, Any]:
    runs = {run for _, run in group.runs}
    return _make_row(party, who, group.count, len(runs), group.epsilon, group.delta)


def _make_row(party: str, who: str, count: int, runs: int, epsilon: float, delta: float | None) -> dict[str, Any]:
    return {"party": party, "who": who, "count": count, "runs": runs, "epsilon": epsilon, "delta": delta}


def _find_person(ledger: Ledger, person: str) -> list[dict[str, Any]]:
    """Where a person is on record, by the hash of the id; no data is needed, so it finds those who are gone too."""
    from fulcrum.data.fingerprints import compute_person_digest

    digest = compute_person_digest(person)
    found = []
    for party in ledger.accounts():
        for group in ledger.list_unit_costs(party, digest):
            if any(name == party for name, _ in group.runs):
                found.append(_describe_group(party, "on record", group))
    return found


def _print_groups(rows: list[dict[str, Any]], unit: str) -> None:
    view.print_table(
        ("party", "who", f"{unit}s", "in runs", "epsilon so far", "delta"),
        [
            (
                row["party"],
                row["who"],
                row["count"],
                row["runs"],
                view.format_epsilon(row["epsilon"]),
                "" if row["delta"] is None else f"{row['delta']:g}",
            )
            for row in rows
        ],
    )
    for who in dict.fromkeys(row["who"] for row in rows):
        view.print_line(f"{who}: {MEANING[who]}.")


def _print_person(person: str, found: list[dict[str, Any]]) -> None:
    if not found:
        view.print_line(f"{person!r} is in no run of this ledger: nothing was released of this person's records.")
    for row in sorted(found, key=lambda each: -each["epsilon"])[:1]:  # every account that has the person counts all
        times = "1 run" if row["runs"] == 1 else f"{row['runs']} runs"
        view.print_line(
            f"{person!r} was in {times}, among others at party {row['party']!r}: epsilon "
            f"{view.format_epsilon(row['epsilon'])} at delta {row['delta']:g} over all of them."
        )
