"""`fulcrum check`: the known mistakes of anybody's private client, by replaying it on neighbouring data sets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption, JsonOption

EXIT_MISTAKES = 3


def check(
    client: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE.MODULE:CLIENT",
            help="A function client(params, data, seed), or a factory make(data, seed) of (model, optimizer, loader) "
            "or of a Flower client.",
        ),
    ],
    claims: Annotated[Path | None, typer.Option("--claims", metavar="FILE.toml", help="What the code claims.")] = None,
    sigma: Annotated[float | None, typer.Option("--sigma", help="Claimed noise multiplier.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Claimed sampling rate.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Releases in the whole training.")] = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="Promised total epsilon.")] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="Its delta; default 1e-5.")] = None,
    sampling: Annotated[str | None, typer.Option("--sampling", help="poisson, shuffle or full.")] = None,
    clip: Annotated[float | None, typer.Option("--clip", help="Claimed clipping norm; shown only.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="auto, function, opacus or flower.")] = None,
    output: Annotated[str | None, typer.Option("--output", help="update or params: what a function returns.")] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="PACKAGE.MODULE:NAME", help="Records (x, y); default: made up.")
    ] = None,
    features: Annotated[int | None, typer.Option("--features", help="Features of made-up records.")] = None,
    classes: Annotated[int | None, typer.Option("--classes", help="Classes of made-up records.")] = None,
    examples: Annotated[int | None, typer.Option("--examples", help="Records of a data set; default: enough.")] = None,
    parameters: Annotated[int | None, typer.Option("--parameters", help="Numbers in params, which are zeros.")] = None,
    local_steps: Annotated[
        int | None, typer.Option("--local-steps", help="Noised steps in one call, of which the sum is released.")
    ] = None,
    replays: Annotated[int, typer.Option("--replays", help="Calls per data set; about ten data sets.")] = 600,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Say which known mistakes a private client makes: its noise, clipping, sampling, divisor, seeds and budget.

    The client is called some thousand times on made-up neighbouring data sets, and compared with what it claims. Exit
    code 0: nothing found; 3: mistakes found; 2: wrong input, or the client's own code failed.
    """
    from fulcrum.analysis.detectors.foreign import check as run_check
    from fulcrum.analysis.detectors.foreign.claims import make_claims, read_claims

    given: dict[str, Any] = {
        "sigma": sigma,
        "rate": rate,
        "steps": steps,
        "epsilon": epsilon,
        "delta": delta,
        "sampling": sampling,
        "clip": clip,
        "kind": kind,
        "output": output,
        "data": data,
        "features": features,
        "classes": classes,
        "examples": examples,
        "parameters": parameters,
        "local_steps": local_steps,
    }
    named = {name: value for name, value in given.items() if value is not None}
    stated = make_claims(named) if claims is None else read_claims(claims, named)
    result = run_check(client, stated, replays=replays)
    if as_json:
        view.print_json(result.to_json())
    else:
        print_result(client, result)
    if not result.ok:
        raise typer.Exit(EXIT_MISTAKES)


def print_result(client: str, result: Any) -> None:
    """A table of mistakes, and what was measured beside what is claimed."""
    if result.ok:
        view.print_line(
            f"{client}: no mistake found in {result.calls} calls ({len(result.report.readings)} comparisons)."
        )
    else:
        count = len(result.mistakes)
        view.print_line(f"{client}: {count} mistake{'s' if count > 1 else ''} found in {result.calls} calls.")
        view.print_table(
            ("mistake", "found by", "chance", "why"),
            [(m.what, m.detector, "0" if m.p == 0 else f"{m.p:.0e}", m.says) for m in result.mistakes],
        )
    claims = result.claims
    promised = "no promise" if claims.epsilon is None else f"{claims.epsilon:g}"
    view.print_name_value_lines(
        [
            ("called as", result.kind),
            ("sigma", f"{result.sigma:.3g} +- {result.sigma_error:.2g} measured, {claims.sigma:g} claimed"),
            ("epsilon, promised", promised),
            ("epsilon, claimed mechanism", _tell(result.epsilon_claimed, claims)),
            ("epsilon, measured mechanism", _tell(result.epsilon_measured, claims)),
            ("epsilon, one release", f"at least {result.lower:.3g} (95%, assumes nothing)"),
            (
                "epsilon, all steps",
                f"at least {result.lower_total:.3g} (95%, assumes sampled Gaussian releases)"
                if result.lower_total
                else "no lower bound",
            ),
        ]
    )
    view.print_message(
        "Nothing found is no proof: only these mistakes are looked for, on made-up records. A right client raises an "
        f"alarm in at most {result.report.level:g} of all checks."
    )


def _tell(epsilon: float, claims: Any) -> str:
    """An epsilon with its terms."""
    value = "infinite" if not math.isfinite(epsilon) else f"{epsilon:.4g}"
    return f"{value} for {claims.steps} step{'s' if claims.steps > 1 else ''}, delta = {claims.delta:g}"
