"""`fulcrum account`: the privacy calculator. Any two of sigma, epsilon and steps give the third."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption, JsonOption
from fulcrum.errors import ConfigError


def account(
    q: Annotated[float, typer.Option("--q", help="Poisson sampling rate of each step, in (0, 1].")],
    sigma: Annotated[float | None, typer.Option("--sigma", help="Noise multiplier.")] = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="Target, in place of --sigma or --steps.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Number of noised steps, all rounds together.")] = None,
    delta: Annotated[float, typer.Option("--delta", help="Failure probability.")] = 1e-5,
    accountant: Annotated[str | None, typer.Option("--accountant", help="rdp or pld; without it both.")] = None,
    parties: Annotated[
        int, typer.Option("--parties", min=0, help="With pairwise masks: how many parties take part in a round.")
    ] = 0,
    colluders: Annotated[
        float, typer.Option("--colluders", help="With --parties: how many may collude, a count or a fraction.")
    ] = 1.0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """What steps of Poisson-sampled Gaussian noise cost.

    Give two of --sigma, --epsilon and --steps; the third is the answer. With --parties also what holds if more parties
    collude with the server than pairwise masks cover (docs/pairwise.md); sigma is then sigma_eff.
    """
    if [sigma, epsilon, steps].count(None) != 1:
        raise ConfigError("give exactly two of --sigma, --epsilon and --steps; the third is the answer.")
    check_account_options(q, sigma, epsilon, steps, colluders)
    from fulcrum.privacy import accounting
    from fulcrum.privacy.plan.text import warn_about_masks
    from fulcrum.privacy.statement.meaning import wrap_meaning

    names = list(accounting.ACCOUNTANTS) if accountant is None else [accountant]
    rows = {name: compute_account_row(q, sigma, epsilon, steps, delta, name) for name in names}
    more = list_collusion_costs(q, rows, delta, parties, colluders) if parties else []
    meaning = explain_account(q, next(iter(rows.values())), delta)
    if as_json:
        masks = {"pairwise": more} if parties else {}
        view.print_json({"q": q, "delta": delta, "accountants": rows, "meaning": meaning, **masks})
        return
    columns = ("accountant", "sigma", "steps", "epsilon", "delta")
    shown = [
        (
            name,
            row["sigma"]
            if sigma is not None
            else accounting.format_epsilon(row["sigma"], 5),  # up: less noise costs more
            row["steps"],
            accounting.format_epsilon(row["epsilon"]),
            delta,
        )
        for name, row in rows.items()
    ]
    view.print_table(columns, shown)
    differ = len({row["sigma"] for row in rows.values()} | {row["steps"] for row in rows.values()}) > 2
    view.print_block(wrap_meaning(meaning["text"], f"in words, by {names[0]}" if differ else "in words"))
    if more:
        view.print_line(f"pairwise masks among {parties} equal parties, {more[0]['colluders']} of which may collude")
        names = [key for key in more[0] if key.startswith("epsilon_")]
        table: list[tuple[view.TableValue, ...]] = [
            (row["colluders"], row["sigma_eff"], *(accounting.format_epsilon(row[name]) for name in names))
            for row in more
        ]
        view.print_table(("parties that collude", "sigma_eff", *(name.replace("_", " ") for name in names)), table)
        for words in warn_about_masks(more[0]["colluders"]):
            view.print_message(f"warning: {words}")


def explain_account(q: float, row: dict[str, Any], delta: float) -> dict[str, Any]:
    """What the epsilon of a row means for one unit, if the noise is fresh and secret."""
    from fulcrum.privacy.accounting import Spend
    from fulcrum.privacy.events import Gaussian
    from fulcrum.privacy.meaning import make_promise
    from fulcrum.privacy.statement.meaning import CALCULATOR, make_meaning

    spend = Spend.empty().add_events([Gaussian(q, row["sigma"], row["steps"])])
    return make_meaning(make_promise(row["epsilon"], delta, [spend]), CALCULATOR, "unit", "yes")


def list_collusion_costs(
    q: float, rows: dict[str, dict[str, Any]], delta: float, parties: int, colluders: float
) -> list[dict[str, Any]]:
    """Epsilon with c, c + 1, ..., all other parties colluding, by accountant, for parties of equal terms."""
    from fulcrum.privacy import accounting
    from fulcrum.privacy.events import Gaussian
    from fulcrum.privacy.pairwise.graph import can_be_cut_off
    from fulcrum.privacy.pairwise.shares import count_colluders
    from fulcrum.privacy.plan.collusion import list_shown_counts

    covered = count_colluders(colluders, parties)
    first = next(iter(rows.values()))
    found = []
    for count in list_shown_counts(covered, parties):
        honest = 1 if can_be_cut_off(count, parties, covered) else parties - count
        ratio = (honest / (parties - covered)) ** 0.5
        costs = {
            f"epsilon_{name}": accounting.compute_epsilon(
                [Gaussian(q, row["sigma"] * ratio, row["steps"])], delta, name
            )
            for name, row in rows.items()
        }
        found.append({"colluders": count, "sigma_eff": first["sigma"] * ratio, **costs})
    return found


SIGMA_RANGE, EPSILON_RANGE, MAX_STEPS = (1e-6, 1e9), (1e-9, 1e9), 10**9
"""What the calculator takes: beyond, nothing is hidden or nothing is learned."""


def check_account_options(
    q: float, sigma: float | None, epsilon: float | None, steps: int | None, colluders: float = 1.0
) -> None:
    """Refuse invalid options."""
    if not 0 < q <= 1:
        raise ConfigError(f"--q {q:g} is out of range; it must be greater than 0 and at most 1.")
    for name, value, low, high in (
        ("--sigma", sigma, *SIGMA_RANGE),
        ("--epsilon", epsilon, *EPSILON_RANGE),
        ("--steps", steps, 1, MAX_STEPS),
    ):
        if value is not None and not low <= value <= high:
            shown = f"{value:g}" if isinstance(value, float) else f"{value}" if len(f"{value}") <= 30 else "that large"
            raise ConfigError(f"{name} {shown} is out of range; it must be at least {low:g} and at most {high:g}.")
    if not (0 <= colluders < math.inf):
        raise ConfigError(f"--colluders {colluders:g} is out of range; it must be a count or a fraction of at least 0.")


def compute_account_row(
    q: float, sigma: float | None, epsilon: float | None, steps: int | None, delta: float, accountant: str
) -> dict[str, Any]:
    """The complete row by one accountant: the missing value and the total epsilon."""
    from fulcrum.privacy import accounting
    from fulcrum.privacy.events import Gaussian

    if sigma is None:
        assert epsilon is not None
        assert steps is not None
        length = steps
        sigma = accounting.calibrate_sigma(lambda noise: [Gaussian(q, noise, length)], epsilon, delta, accountant)
    if steps is None:
        assert epsilon is not None
        steps = accounting.compute_max_steps(q, sigma, epsilon, delta, accountant)
    return {
        "sigma": sigma,
        "steps": steps,
        "epsilon": accounting.compute_epsilon([Gaussian(q, sigma, steps)], delta, accountant),
    }
