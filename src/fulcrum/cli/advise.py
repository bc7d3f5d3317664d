"""`fulcrum plan --advise`: a whole settings file for a budget, from rehearsals on made-up data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from fulcrum.cli import view
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import Settings

if TYPE_CHECKING:
    from fulcrum.runs.advice import Advice


def print_advice(settings: Settings, out: Path | None, as_json: bool) -> None:
    """Recommend a settings file, say why, and write it where `out` says."""
    from fulcrum.runs.advice import advise

    if out is not None and out.exists():
        raise ConfigError(f"--out {out} exists already; give a new file.")
    found = advise(settings, say=lambda line: view.print_message(line, as_json))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(make_advice_file(found), encoding="utf-8")
    if as_json:
        view.print_json(
            {
                "settings": dataclasses.asdict(found.settings),
                "recipes": [{**vars(one.recipe), "score": one.score, "noise": one.noise} for one in found.played],
                "rehearsed": None if found.rehearsed is None else found.rehearsed.to_json(),
                "reasons": list(found.reasons),
                "seconds": found.seconds,
            }
        )
        return
    rows: list[tuple[view.TableValue, ...]] = [
        (
            one.recipe.rounds,
            one.recipe.steps,
            one.recipe.rate,
            one.recipe.server,
            one.recipe.passes,
            one.noise,
            one.score,
        )
        for one in found.played[:10]
    ]
    columns = ("rounds", "local steps", "rate q", "server", "passes over the data", "noise along v / C", "points")
    view.print_table(columns, rows)
    for reason in found.reasons:
        view.print_line(reason)
    where = (
        f"fulcrum run {out}" if out is not None else "--out FILE.toml writes the settings; then fulcrum run FILE.toml"
    )
    view.print_line(f"{found.seconds:.0f} s; {where}")


def make_advice_file(found: Advice) -> str:
    """The recommended settings as TOML, with the reasons as comments."""
    from fulcrum.settings.files import dump_settings

    reasons = "".join(f"# {reason}\n" for reason in found.reasons)
    return (
        f"# Recommended by `fulcrum plan --advise`; start it with:  fulcrum run THIS_FILE\n{reasons}\n"
        + dump_settings(found.settings)
    )
