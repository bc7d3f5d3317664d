"""`fulcrum account`: the privacy calculator. Any two of sigma, epsilon and steps give the third."""

from __future__ import annotations

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
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """What steps of Poisson-sampled Gaussian noise cost.

    Give two of --sigma, --epsilon and --steps; the third is the answer.
    """
    if [sigma, epsilon, steps].count(None) != 1:
        raise ConfigError("give exactly two of --sigma, --epsilon and --steps; the third is the answer.")
    check_account_options(q, sigma, epsilon, steps)
    from fulcrum.privacy import accounting

    names = list(accounting.ACCOUNTANTS) if accountant is None else [accountant]
    rows = {name: compute_account_row(q, sigma, epsilon, steps, delta, name) for name in names}
    if as_json:
        view.print_json({"q": q, "delta": delta, "accountants": rows})
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


def check_account_options(q: float, sigma: float | None, epsilon: float | None, steps: int | None) -> None:
    """Refuse invalid options."""
    if not 0 < q <= 1:
        raise ConfigError(f"--q {q:g} is out of range; it must be greater than 0 and at most 1.")
    for name, value in (("--sigma", sigma), ("--epsilon", epsilon), ("--steps", steps)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} {value:g} is out of range; it must be greater than 0.")


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
