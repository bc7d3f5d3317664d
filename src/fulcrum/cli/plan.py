"""`fulcrum plan`: what a configuration will cost and how noisy it will be, before training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import show, view
from fulcrum.cli.advise import print_advice
from fulcrum.cli.forecast import forecast_run, print_forecast
from fulcrum.cli.options import DebugOption, JsonOption, with_settings
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import Settings

if TYPE_CHECKING:
    from fulcrum.privacy.plan import Plan
    from fulcrum.runs.preparation import PartyBalance

MAX_PARTIES_SHOWN = 20
"""More parties than this are shown by group: those with the same terms in one line."""
CLIENT_LEVEL_COLUMNS = (
    "parties",
    "protects",
    "rate",
    "cohort",
    "sigma z",
    "epsilon",
    "noise/C",
    "along v",
)
PARTY_COLUMNS = ("party", "units", "rate", "batch", "sigma", "epsilon", "noise/C", "along v")


@with_settings
def plan(
    settings: Settings,
    for_epsilon: Annotated[
        float | None, typer.Option("--for-epsilon", help="With --sigma: say how many rounds this budget allows.")
    ] = None,
    timing: Annotated[
        bool,
        typer.Option(
            "--timing/--no-timing", help="Time a few steps on made-up records, to say how long the run will take."
        ),
    ] = True,
    advice: Annotated[
        bool,
        typer.Option(
            "--advise",
            help="Recommend rate, rounds (at most --rounds), local steps, server, step, C and schedule for --epsilon, "
            "by training on made-up records; about two minutes, no privacy cost.",
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="With --advise: new file for the settings (TOML).")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a run would cost, how noisy it would be, how long it would take and what would travel."""
    if out is not None and not advice:
        raise ConfigError("--out is the file of --advise; give --advise too, or leave --out out.")
    if advice:
        print_advice(settings, out, as_json)
        return
    if for_epsilon is not None:
        print_affordable_rounds(settings, for_epsilon, as_json)
        return
    from fulcrum import runs as api
    from fulcrum.privacy.evaluation import describe_evaluation
    from fulcrum.privacy.statement.meaning import describe_plan_meaning, wrap_meaning
    from fulcrum.privacy.statement.units import UNIT_TEXTS

    federation = api.prepare_unrehearsed(settings)  # a plan takes seconds, a rehearsal may take minutes
    made, dim = federation.plan, federation.problem.layout.dim
    from fulcrum.runs.rehearsal import list_weaknesses

    short = api.collect_ledger_warnings(federation)  # refuses as `run` does where nobody can pay for a round
    left = api.list_ledger_balances(federation)
    forecast = forecast_run(federation, timing)
    meaning = describe_plan_meaning(made, federation.problem.randomness.mode)
    if as_json:
        of_ledger = {"ledger": {name: vars(balance) for name, balance in left.items()}} if left else {}
        scored = {} if federation.evaluation is None else {"evaluation": describe_evaluation(federation.evaluation)}
        masks = {"pairwise": make_collusion_rows(made)} if made.is_pairwise else {}
        view.print_json({**forecast.to_json(), "meaning": meaning, **scored, **of_ledger, **masks})
        return
    for warning in [*show.collect_run_warnings(federation), *list_weaknesses(federation), *short]:
        view.print_message(f"warning: {warning}")
    show.print_own_notes(federation.problem.dataset)
    if made.has_trusted_server:
        view.print_table(add_accountant_columns(CLIENT_LEVEL_COLUMNS, made), make_server_rows(made, dim), fit=True)
    else:
        rows = make_party_rows(made, dim) if made.parties <= MAX_PARTIES_SHOWN else make_group_rows(made, dim)
        view.print_table(add_accountant_columns(PARTY_COLUMNS, made), rows, fit=True)
    for line in describe_schedule(made):
        view.print_sentence(line)
    if made.is_pairwise:
        print_collusion_table(made)
    whole = made.compute_noise_to_signal(dim)
    view.print_sentence(
        f"all parties together  noise / C {view.format_value(whole.ratio)}, "
        f"along one direction {view.format_value(whole.direction)}"
    )
    curve = [
        f"{rounds}: {view.format_epsilon(epsilon)}" for rounds, epsilon in made.curve(made.costliest_party) if rounds
    ]
    unit = UNIT_TEXTS[made.unit].short
    terms = f"epsilon of one {unit} ({made.accountant}) at delta {made.delta:g}"
    terms += f" [{show.ASSUMED_NOTE}]" if made.shares_noise else ""
    view.print_sentence(f"{terms} by rounds, costliest party  {', '.join(curve)}")
    view.print_block(wrap_meaning(meaning["text"]))
    view.print_sentence(describe_columns(made, dim, unit))
    if federation.evaluation is not None:
        scores = federation.evaluation
        view.print_sentence(
            f"evaluation  {scores.units} held-out {unit}s pay epsilon {view.format_epsilon(scores.epsilon)} at "
            f"delta {scores.delta:g} for "
            f"{scores.releases} release{'s' if scores.releases > 1 else ''} of {scores.form.columns} numbers per party "
            f"with sigma {view.format_value(scores.sigma)}: {scores.form.words}"
        )
    print_forecast(forecast)
    if left:
        print_ledger_balances(settings.run.ledger, left, made.rounds)


def describe_columns(made: Plan, dim: int, unit: str) -> str:
    """What the columns of the table are. dim: the model's number of parameters; unit: its word."""
    whole = made.has_trusted_server
    counted = "cohort is the expected number of parties" if whole else f"batch is the expected number of {unit}s"
    moment, what = ("round", "update") if whole else ("step", "gradient")
    return (
        f"{counted} in a {moment}; noise/C is the noise of a {moment}'s mean {what} over its {dim:,} parameters, as a "
        "multiple of the clipping norm; along v, its part in any one direction."
    )


def make_collusion_rows(made: Plan) -> list[dict[str, Any]]:
    """The table of colluders as JSON: colluders, sigma_eff, epsilon."""
    from fulcrum.privacy.plan.collusion import make_collusion_table
    from fulcrum.privacy.plan.text import infinity_to_text

    return [{**vars(row), "epsilon": infinity_to_text(row.epsilon)} for row in make_collusion_table(made)]


def print_collusion_table(made: Plan) -> None:
    """Epsilon by the number of parties that collude with the server."""
    from fulcrum.privacy.plan.collusion import make_collusion_table

    view.print_sentence(f"pairwise masks  {made.colluders} of {made.parties} parties may collude with the server")
    rows: list[tuple[view.TableValue, ...]] = [
        (f"{row.colluders}", view.format_value(row.sigma_eff), view.format_epsilon(row.epsilon))
        for row in make_collusion_table(made)
    ]
    view.print_table(("parties that collude", "sigma_eff", "epsilon at the end"), rows, fit=True)


def print_ledger_balances(path: str, left: Mapping[str, PartyBalance], rounds: int) -> None:
    """What each party has spent in a kept ledger, what its budget is, and how much of this plan it can pay for."""
    view.print_sentence(f"left in {path}")
    rows: list[tuple[view.TableValue, ...]] = [
        (
            name,
            view.format_epsilon(balance.spent),
            "no limit" if balance.budget is None else view.format_value(balance.budget),
            f"{balance.rounds} of {rounds}",
        )
        for name, balance in list(left.items())[:MAX_PARTIES_SHOWN]
    ]
    view.print_table(("party", "spent", "budget", "rounds that it can pay for"), rows, fit=True)
    if len(left) > MAX_PARTIES_SHOWN:
        view.print_sentence(f"and {len(left) - MAX_PARTIES_SHOWN} more parties: fulcrum ledger {path}")


def describe_schedule(made: Plan) -> list[str]:
    """The noise schedule over the rounds, and when statistics are released; empty if both are constant."""
    from fulcrum.clipping.rule import gradient_multiplier

    lines = []
    group = made.groups[0]
    if made.schedule != "constant":
        first, last = group.sigmas()
        lines.append(
            f"noise schedule {made.schedule}  sigma {view.format_value(first)} in round 1, "
            f"{view.format_value(last)} in round "
            f"{made.rounds}; noise / C is that of round 1"
        )
    if group.statistics_interval > 1:
        task = group.assignment(0, 0, 1.0)
        other = gradient_multiplier(group.share, task.sigma, group.batch)
        lines.append(
            f"statistics  with every {group.statistics_interval}th step, "
            f"at sigma {view.format_value(task.sigma)} together with the "
            f"gradient; other steps cost sigma {view.format_value(other)}"
        )
    return lines


def make_server_rows(made: Plan, dim: int) -> list[tuple[view.TableValue, ...]]:
    """One line for all parties with the same terms, where the server adds one noise vector for all of them."""
    from fulcrum.privacy.statement.units import UNIT_TEXTS

    noise = made.compute_noise_to_signal(dim)
    members = [int((made.group_of == number).sum()) for number in range(len(made.groups))]
    return [
        (
            count,
            UNIT_TEXTS[made.unit].short,
            group.rate,
            made.get_server_terms.cohort,
            format_range(*group.sigmas()),
            *make_epsilon_cells(ends),
            noise.ratio,
            noise.direction,
        )
        for count, group, ends in zip(members, made.groups, made.ends, strict=True)
    ]


def make_party_rows(made: Plan, dim: int) -> list[tuple[view.TableValue, ...]]:
    """One line per party."""
    rows: list[tuple[view.TableValue, ...]] = []
    for k in range(made.parties):
        party, noise = made.party(k), made.compute_noise_to_signal(dim, k)
        costs = (
            format_range(party.sigma, party.sigma_last),
            *make_epsilon_cells(party.epsilons),
            noise.ratio,
            noise.direction,
        )
        rows.append((party.name, party.units, party.rate, party.batch, *costs))
    return rows


def make_group_rows(made: Plan, dim: int) -> list[tuple[view.TableValue, ...]]:
    """One line for all parties with the same terms; sizes and what follows from them as ranges."""
    rows: list[tuple[view.TableValue, ...]] = []
    for number, (group, epsilons) in enumerate(zip(made.groups, made.ends, strict=True)):
        sizes = made.sizes[made.group_of == number]
        ends = [int(sizes.argmin()), int(sizes.argmax())]
        members = (made.group_of == number).nonzero()[0]
        noises = [made.compute_noise_to_signal(dim, int(members[end])) for end in reversed(ends)]
        few, most = (int(sizes[end]) for end in ends)
        rows.append(
            (
                f"{len(sizes)} parties",
                format_range(few, most),
                group.rate,
                format_range(group.rate * few, group.rate * most),
                format_range(*group.sigmas()),
                *make_epsilon_cells(epsilons),
                format_range(noises[0].ratio, noises[1].ratio),
                format_range(noises[0].direction, noises[1].direction),
            )
        )
    return rows


def add_accountant_columns(columns: tuple[str, ...], made: Plan) -> tuple[str, ...]:
    """The columns with one for each accountant whose epsilon the plan shows, where "epsilon" stands."""
    at = columns.index("epsilon")
    return (*columns[:at], *(f"epsilon {name}" for name in made.ends[0]), *columns[at + 1 :])


def make_epsilon_cells(epsilons: Mapping[str, float]) -> list[view.TableValue]:
    """One cell per accountant."""
    return [view.format_epsilon(value) for value in epsilons.values()]


def format_range(low: float, high: float) -> str:
    """A range, or the one value."""
    return view.format_value(low) if low == high else f"{view.format_value(low)} to {view.format_value(high)}"


def print_affordable_rounds(settings: Settings, epsilon: float, as_json: bool) -> None:
    """The inverse question: how many rounds fit into a budget at a given noise."""
    from fulcrum.privacy.plan import compute_round_terms, compute_rounds_for_budget

    if settings.privacy.sigma is None:
        raise ConfigError("--for-epsilon asks how many rounds a budget allows at a given noise; give --sigma too.")
    rounds = compute_rounds_for_budget(settings, epsilon=epsilon)
    privacy = settings.privacy
    rate, steps = compute_round_terms(settings)
    if as_json:
        terms = {"sigma": privacy.sigma, "schedule": privacy.noise_schedule, "rate": rate, "steps": steps}
        spent = {"epsilon": epsilon, "delta": privacy.delta, "accountant": privacy.accountant}
        view.print_json({"rounds": rounds, **terms, **spent})
        return
    moving = (
        ""
        if privacy.noise_schedule == "constant"
        else f" (of the {settings.train.rounds} of schedule {privacy.noise_schedule})"
    )
    print(
        f"{rounds} rounds of {steps} step{'s' if steps > 1 else ''} at rate {rate:g} and sigma "
        f"{privacy.sigma:g}{moving} fit into epsilon {view.format_epsilon(epsilon)} at delta {privacy.delta:g} "
        f"({privacy.accountant})."
    )
