"""Bugs that are planted into the real code for a moment, to see that the suite finds them.

    with PLANTED["half noise"].planted():
        report = run_suite(PLANTED["half noise"].settings)
    assert report.alarms

Each replaces one function of the library at the place where it is used. Nothing here is used by the library itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fulcrum.clipping import RULES
from fulcrum.clipping.fixed import FIXED
from fulcrum.data import sampling
from fulcrum.data.sampling import PartyData
from fulcrum.gradients import outer_products
from fulcrum.gradients.rounding import NormTable, SquaredNorms, to_norm_table
from fulcrum.gradients.stacked import passes
from fulcrum.privacy import accounting, bounds, mechanism
from fulcrum.privacy.events import Event, Gaussian
from fulcrum.privacy.exact_noise import GridRelease
from fulcrum.privacy.ledger import Ledger, composition
from fulcrum.privacy.plan import party_group
from fulcrum.privacy.statement import facts as statement_facts
from fulcrum.rng import CipherRandomness, Randomness, StreamKey, make_randomness
from fulcrum.runs import active_run
from fulcrum.runs import preparation as run_preparation
from fulcrum.settings.schema import Settings
from fulcrum.training import client, clipped_sum, evaluate, loop, pairwise, problem
from fulcrum.training import round as training_round
from fulcrum.types import RuleState, Stats, View

Plant = Callable[[], AbstractContextManager[Any]]

BASE = Settings().replace(
    data={"source": "probe"},
    train={"rate": 0.25, "rounds": 4, "lr": 0.5},
    clip={"rule": "fixed", "C0": 1.0},
    privacy={"sigma": 1.3, "unit": "example", "randomness": "seeded"},
    run={"engine": "reference"},
)
"""Settings of cases that need no others."""


@dataclass(frozen=True)
class PlantedBug:
    """A bug, the settings under which it shows, and how it is planted."""

    what: str
    plant: Plant
    changes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        """The case."""
        return BASE.replace(**{name: dict(values) for name, values in self.changes.items()})

    def planted(self) -> AbstractContextManager[Any]:
        """The bug is in the code while this is open."""
        return self.plant()


def replace_at(target: Any, name: str, made: Callable[[Any], Any]) -> Plant:
    """Replace `target.name` by made(the original)."""
    return lambda: mock.patch.object(target, name, made(getattr(target, name)))


def plant_all(*plants: Plant) -> Plant:
    """Several at once."""

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant())
            yield

    return planted


# --- noise --------------------------------------------------------------------------------------


def _scaled(on_sum: float, on_extra: float = 1.0) -> Callable[[Any], Any]:
    """Noise of another strength on the sum and on the statistics."""

    def make(original: Any) -> Any:
        def scale(*given: Any, **named: Any) -> Any:
            found = original(*given, **named)
            return dataclasses.replace(found, sum=found.sum * on_sum, extra=found.extra * on_extra)

        return scale

    return make


def _first_C_only(original: Any) -> Any:
    """Noise for the C of the first round, whatever C is now."""
    first: list[Any] = []

    def scale(given: Any, *rest: Any, **named: Any) -> Any:
        first.append(given.C)
        return original(dataclasses.replace(given, C=first[0]), *rest, **named)

    return scale


def _other_streams(change: Callable[[StreamKey], StreamKey]) -> Callable[[Any], Any]:
    """Streams under other names."""

    def make(original: Any) -> Any:
        def locate(self: CipherRandomness, key: StreamKey) -> Any:
            return original(self, change(key))

        return locate

    return make


def _for_purpose(purpose: str, change: Callable[[StreamKey], StreamKey]) -> Callable[[StreamKey], StreamKey]:
    return lambda key: change(key) if key[0] == purpose else key


def _released_by(add: Callable[[Tensor, float, torch.Generator], Tensor]) -> Callable[[Any], Any]:
    """A release made by add(sum, scale, generator) instead of exact Gaussian noise."""
    generator = torch.Generator().manual_seed(12345)

    def make(original: Any) -> Any:
        def release(clipped: Tensor, scales: Sequence[float], *rest: Any, **named: Any) -> list[GridRelease]:
            grid = [2.0 ** (math.floor(math.log2(scale)) - 20) for scale in scales]
            return [
                GridRelease((add(row.double(), scale, generator) / each).round().long(), each)
                for row, scale, each in zip(clipped, scales, grid, strict=True)
            ]

        return release

    return make


def _add_laplace(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    u = torch.rand(row.shape, dtype=torch.float64, generator=generator) - 0.5
    return row - scale / math.sqrt(2) * u.sign() * torch.log1p(-2 * u.abs())


def _add_to_first_half(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    noise = scale * torch.randn(row.shape, dtype=torch.float64, generator=generator)
    noise[len(noise) // 2 :] = 0
    return row + noise


def _add_coarse(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(row.shape, dtype=torch.float64, generator=generator)
    return row + scale * (noise * 8).round() / 8


def _add_correlated(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    own = torch.randn(row.shape, dtype=torch.float64, generator=generator)
    shared = torch.randn((), dtype=torch.float64, generator=generator)
    return row + scale * (math.sqrt(0.7) * own + math.sqrt(0.3) * shared)


# --- clipping -----------------------------------------------------------------------------------


def _leave_layer(original: Any) -> Any:
    """The sum with the third of the layout's tensors as it was before clipping."""

    def add_up(factors: Tensor, coefficients: Tensor, *rest: Any, **named: Any) -> Tensor:
        total: Tensor = original(factors, coefficients, *rest, **named)
        total = total.clone()
        total[-21:-3] = coefficients[:, -21:-3].sum(dim=0).to(total)
        return total

    return add_up


def _use_largest_entry(original: Any) -> Any:
    """Norms that are the largest absolute number."""

    def measure(coefficients: Tensor, where: Tensor, groups: int) -> NormTable:
        largest = coefficients.double().abs().amax(dim=1, keepdim=True) if coefficients.shape[1] else coefficients
        squares = largest.square().expand(-1, groups)
        return to_norm_table(SquaredNorms(squares, squares, squares), coefficients.dtype)

    return measure


def _clip_the_batch(original: Any) -> Any:
    """One norm for the whole batch: the gradients are added up first, and the sum is clipped."""

    def contribute(
        rule: Any, view: Any, state: Any, gradients: Tensor, losses: Tensor, *rest: Any, **named: Any
    ) -> Any:
        whole = gradients.sum(dim=0, keepdim=True) if len(gradients) else gradients
        return original(rule, view, state, whole, losses[: len(whole)], *rest, **named)

    return contribute


def _negative(stats: Stats, state: RuleState) -> tuple[Tensor, Tensor, RuleState]:
    """The fixed rule with a sign error for large gradients."""
    factors, extra, state = FIXED.clip(stats, state)
    return torch.where(stats.norms > 100.0, -40.0 * factors, factors), extra, state


def _add_up_twice(original: Any) -> Any:
    """Both records of a person are added up at the person's own factor."""
    return lambda *given, **named: 2 * original(*given, **named)


def _limit_above_only(factors: Tensor, C: Tensor, limits: bounds.NormLimits, share: float = 1.0) -> Tensor:
    """Factors that are held below their limit, and not above 0."""
    return torch.minimum(factors.double(), C.double() / limits.norms.clamp_min(1e-300)).to(factors.dtype)


def _compute_careless_norms(inputs: Tensor, grads: Tensor) -> SquaredNorms:
    """Ghost norms from float32 Gram matrices, and nothing for their rounding."""
    gram, other = torch.bmm(inputs.transpose(1, 2), inputs), torch.bmm(grads, grads.transpose(1, 2))
    squares = (gram * other).sum(dim=(1, 2)).double().clamp_min(0)
    return SquaredNorms(squares, squares, squares)


# --- sampling and divisor -----------------------------------------------------------------------


def _twice_the_rate(original: Any) -> Any:
    def sample(randomness: Randomness, key: StreamKey, party: PartyData, rate: float) -> Any:
        return original(randomness, key, party, min(1.0, 2 * rate))

    return sample


def _choose(party: PartyData, joins: Tensor) -> tuple[Tensor, Tensor, int]:
    slot = joins.cumsum(0) - 1
    here = joins[party.unit_of]
    return party.index[here], slot[party.unit_of[here]], int(joins.sum())


def _shuffle(original: Any) -> Any:
    """Batches of one size from a permutation that is new in every epoch."""

    def sample(randomness: Randomness, key: StreamKey, party: PartyData, rate: float) -> Any:
        size = max(1, round(rate * party.units))
        per_epoch = max(1, party.units // size)
        turn = int(key[1])
        order = torch.argsort(randomness.uniform(("sample", turn // per_epoch, *key[2:]), party.units))
        joins = torch.zeros(party.units, dtype=torch.bool)
        first = (turn % per_epoch) * size
        joins[order[first : first + size]] = rate > 1e-6
        return _choose(party, joins)

    return sample


def _one_sample_for_all(original: Any) -> Any:
    def sample(randomness: Randomness, key: StreamKey, party: PartyData, rate: float) -> Any:
        return original(randomness, (key[0], 0, *key[2:]), party, rate)

    return sample


def _prefer_some(original: Any) -> Any:
    """Half of the units come 1.6 times as often, the others 0.4 times."""

    def sample(randomness: Randomness, key: StreamKey, party: PartyData, rate: float) -> Any:
        chances = torch.where(torch.arange(party.units) % 2 == 0, 1.6 * rate, 0.4 * rate)
        return _choose(party, randomness.uniform(key, party.units) < chances)

    return sample


@contextlib.contextmanager
def _divide_by_actual_batch() -> Iterator[None]:
    """The mean over the units that were sampled."""
    counts = [1]
    sample, restore = sampling.poisson_sample_units, View.restore_gradient

    def watched(*given: Any) -> Any:
        found = sample(*given)
        counts[0] = max(1, found[2])
        return found

    def divide(self: View, noisy: Tensor, batch: Any) -> Tensor:
        return restore(self, noisy, batch if batch < 1e-6 else counts[0])

    with (
        mock.patch.object(client, "poisson_sample_units", watched),
        mock.patch.object(View, "restore_gradient", divide),
    ):
        yield


# --- ledger and statement -----------------------------------------------------------------------


def _forgotten(rounds: Callable[[int], bool]) -> Plant:
    """A ledger that grants these rounds and writes nothing."""
    reserve, settle = Ledger.reserve, Ledger.settle

    def granted(self: Ledger, run: str, round: int, wanted: Mapping[str, Any], attempt: int = 0) -> dict[str, bool]:
        return dict.fromkeys(wanted, True) if rounds(round) else reserve(self, run, round, wanted, attempt)

    def settled(self: Ledger, run: str, round: int, digests: Mapping[str, str], attempt: int | None = None) -> None:
        if not rounds(round):
            settle(self, run, round, digests, attempt)

    return plant_all(
        lambda: mock.patch.object(Ledger, "reserve", granted), lambda: mock.patch.object(Ledger, "settle", settled)
    )


def _cheaper_event(original: Any) -> Any:
    """The event of a step with statistics, at a sigma that it does not have."""

    def event(rule: Any, rate: float, sigma: float, batch: float, asked: bool = True) -> Event:
        found: Event = original(rule, rate, sigma, batch, asked)
        return dataclasses.replace(found, sigma=1.3 * found.sigma) if isinstance(found, Gaussian) and asked else found

    return event


def _rotate_costs(original: Any) -> Any:
    def costs(run: Any, names: Sequence[str], *rest: Any) -> list[float]:
        found: list[float] = original(run, names, *rest)
        return [*found[1:], found[0]]

    return costs


def _change_statement(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def statement(run: Any) -> dict[str, Any]:
            found: dict[str, Any] = original(run)
            return found | {name: change(found[name]) for name, change in changes.items()}

        return statement

    return make


def _halve_rdp(original: Any) -> Any:
    return lambda rate, sigma: 0.5 * original(rate, sigma)


def _round_down(original: Any) -> Any:
    return lambda *given, **named: math.floor(10 * original(*given, **named)) / 10


def _exact_sums(original: Any) -> Any:
    return lambda exact, *rest: exact


def _unpaid(original: Any) -> Any:
    return lambda federation, plan, *rest: {account.name for account in plan.accounts}


def _settle_known(original: Any) -> Any:
    """Settle what is on record, and pass over the rest."""

    def settle(self: Ledger, run: str, round: int, digests: Mapping[str, str], attempt: int | None = None) -> None:
        known = self.accounts()
        original(self, run, round, {name: digest for name, digest in digests.items() if name in known}, attempt)

    return settle


def _same_run(original: Any) -> Any:
    return lambda *given: "one"


def _unseeded(original: Any) -> Any:
    """Every run draws from the same secret."""
    return lambda mode, seed, run="": make_randomness("seeded", 7, "")


HELD_OUT: dict[str, dict[str, Any]] = {
    "data": {"validation": 0.25},
    "privacy": {"evaluation_epsilon": 4.0, "randomness": "secure"},
    "run": {"evaluate_every": 1},
}
STATISTICS: dict[str, dict[str, Any]] = {"clip": {"rule": "quantile"}}

PLANTED: dict[str, PlantedBug] = {
    # --- those that the project names
    "half noise": PlantedBug(
        "the noise has half of its declared strength", replace_at(mechanism, "scale_noise", _scaled(0.5))
    ),
    "noise of another C": PlantedBug(
        "the noise is scaled to the C of the first round, not to that of the clipping",
        lambda: mock.patch.object(mechanism, "scale_noise", _first_C_only(mechanism.scale_noise)),
    ),
    "one layer unclipped": PlantedBug(
        "the weights of one layer are added up without their factors",
        replace_at(clipped_sum, "sum_clipped_rows", _leave_layer),
    ),
    "same noise in every round": PlantedBug(
        "the stream of the noise does not depend on the round",
        replace_at(
            CipherRandomness, "locate_stream", _other_streams(_for_purpose("noise", lambda k: (k[0], 0, *k[2:])))
        ),
    ),
    "twice the sampling rate": PlantedBug(
        "units are sampled twice as often", replace_at(client, "poisson_sample_units", _twice_the_rate)
    ),
    "shuffling": PlantedBug(
        "batches of a fixed size from shuffled records in place of Poisson sampling",
        replace_at(client, "poisson_sample_units", _shuffle),
    ),
    "actual batch as divisor": PlantedBug(
        "the sum is divided by the number of units that were sampled", _divide_by_actual_batch
    ),
    "ghost norms without rounding bound": PlantedBug(
        "norms from float32 Gram matrices, without a bound for their rounding",
        plant_all(
            replace_at(passes, "ghost_squared_norms", lambda _: _compute_careless_norms),
            replace_at(outer_products, "ghost_squared_norms", lambda _: _compute_careless_norms),
        ),
        {"run": {"engine": "parallel"}},
    ),
    "reused pair stream": PlantedBug(
        "the mask of a pair is the same in every round",
        replace_at(
            pairwise, "name_stream", lambda original: lambda what, round, *pair, attempt=0: original(what, 0, *pair)
        ),
        {"privacy": {"aggregation": "pairwise"}},
    ),
    "forgotten round": PlantedBug("the ledger forgets the second round", _forgotten(lambda round: round == 1)),
    "moo-paper sold as sound": PlantedBug(
        "C follows from raw losses of the batch (moo-paper)",
        lambda: mock.patch.dict(RULES._values, {"moo-paper": dataclasses.replace(RULES["moo-paper"], sound=True)}),
        {"clip": {"rule": "moo-paper"}},
    ),
    "validation in the clear": PlantedBug(
        "counts of private held-out records are released without noise",
        replace_at(evaluate, "release_sums", _exact_sums),
        HELD_OUT,
    ),
    "negative factors": PlantedBug(
        "a rule returns negative factors, and nobody limits them",
        plant_all(
            lambda: mock.patch.dict(RULES._values, {"fixed": dataclasses.replace(FIXED, clip=_negative)}),
            replace_at(bounds, "keep_nonnegative", lambda _: torch.nan_to_num),
            replace_at(bounds, "limit_factors", lambda _: _limit_above_only),
        ),
    ),
    "seed reused over runs": PlantedBug(
        "runs with other settings draw the same noise from the same seed",
        plant_all(
            replace_at(problem, "identify_releases", _same_run),
            replace_at(loop, "identify_releases", _same_run),
            replace_at(run_preparation, "identify_releases", _same_run),
        ),
    ),
    # --- and others
    "Laplace noise": PlantedBug(
        "the noise is Laplace's of the same deviation",
        lambda: mock.patch.object(mechanism, "release_rows_on_grid", _released_by(_add_laplace)(None)),
    ),
    "noise on half of the coordinates": PlantedBug(
        "only the first half of the coordinates has noise",
        lambda: mock.patch.object(mechanism, "release_rows_on_grid", _released_by(_add_to_first_half)(None)),
    ),
    "coarse noise": PlantedBug(
        "the noise has few different values",
        lambda: mock.patch.object(mechanism, "release_rows_on_grid", _released_by(_add_coarse)(None)),
    ),
    "correlated coordinates": PlantedBug(
        "a third of the noise's variance is the same number in all coordinates",
        lambda: mock.patch.object(mechanism, "release_rows_on_grid", _released_by(_add_correlated)(None)),
    ),
    "same noise at all parties": PlantedBug(
        "the stream of the noise does not depend on the party",
        replace_at(
            CipherRandomness,
            "locate_stream",
            _other_streams(_for_purpose("noise", lambda k: (*k[:2], 0, *k[3:]))),
        ),
    ),
    "same noise in every step": PlantedBug(
        "the stream of the noise does not depend on the local step",
        replace_at(
            CipherRandomness,
            "locate_stream",
            _other_streams(_for_purpose("noise", lambda k: (*k[:3], 0, *k[4:]))),
        ),
        {"train": {"steps": 2}},
    ),
    "sigma rounded down": PlantedBug(
        "the calibrated sigma is cut after one digit",
        replace_at(party_group, "calibrate_sigma", _round_down),
        {"privacy": {"sigma": None, "epsilon": 2.0}},
    ),
    "one secret for all runs": PlantedBug(
        "secure randomness is seeded with a constant",
        plant_all(replace_at(problem, "make_randomness", _unseeded)),
        {"privacy": {"randomness": "secure"}},
    ),
    "clipping by the largest entry": PlantedBug(
        "gradients are clipped by their largest entry, not by their Euclidean norm",
        replace_at(clipped_sum, "measure_group_norms", _use_largest_entry),
    ),
    "clipped batch": PlantedBug(
        "the gradient of the whole batch is clipped, not that of each unit",
        replace_at(client, "compute_contribution", _clip_the_batch),
    ),
    "units counted twice": PlantedBug(
        "each person counts once per record",
        replace_at(clipped_sum, "sum_clipped_rows", _add_up_twice),
        {"privacy": {"unit": "person"}},
    ),
    "one sample for all rounds": PlantedBug(
        "the sample is drawn once and used in every round",
        replace_at(client, "poisson_sample_units", _one_sample_for_all),
    ),
    "preferred units": PlantedBug(
        "some units are sampled more often than others", replace_at(client, "poisson_sample_units", _prefer_some)
    ),
    "statistics without noise": PlantedBug(
        "the statistics of a rule have a hundredth of their noise",
        replace_at(mechanism, "scale_noise", _scaled(1.0, 0.01)),
        STATISTICS,
    ),
    "statistics at a wrong sigma": PlantedBug(
        "steps with statistics are charged at a larger sigma than they have",
        replace_at(mechanism, "make_step_event", _cheaper_event),
        STATISTICS,
    ),
    "unpaid evaluation": PlantedBug(
        "held-out private records are scored without an entry in a ledger",
        plant_all(replace_at(evaluate, "reserve_evaluation", _unpaid), replace_at(Ledger, "settle", _settle_known)),
        HELD_OUT,
    ),
    "resumed run does not pay": PlantedBug(
        "rounds after a resume are not written to the ledger", _forgotten(lambda round: round >= 2)
    ),
    "epsilon of another party": PlantedBug(
        "the statement shows one party's epsilon for another",
        replace_at(statement_facts, "_list_costs", _rotate_costs),
        {"privacy": {"sigma": None, "epsilon": 2.0, "budgets": {"p0": 1.0}}},
    ),
    "delta halved in the statement": PlantedBug(
        "the statement has another delta than the run",
        replace_at(active_run, "make_statement", _change_statement(delta=lambda delta: delta / 2)),
    ),
    "epsilon of one round": PlantedBug(
        "the statement has the epsilon of one round in place of that of all",
        replace_at(active_run, "make_statement", _change_statement(epsilon=lambda epsilon: epsilon / 2)),
    ),
    "cheap accountant": PlantedBug(
        "the accountant counts half of each step's cost",
        plant_all(
            replace_at(accounting, "compute_step_rdp", _halve_rdp),
            replace_at(composition, "compute_step_rdp", _halve_rdp),
        ),
        {"privacy": {"sigma": 1.3725}},
    ),
    "half noise of the server": PlantedBug(
        "a trusted server adds half of its noise",
        replace_at(mechanism, "scale_noise", _scaled(0.5)),
        {"privacy": {"unit": "client"}, "train": {"participation": 0.5}},
    ),
    "clients that always join": PlantedBug(
        "every client takes part in every round, and secret sampling is accounted",
        replace_at(
            training_round,
            "draw_cohort",
            lambda original: lambda randomness, t, terms, attempt=0: list(range(terms.clients)),
        ),
        {"privacy": {"unit": "client"}, "train": {"participation": 0.5}},
    ),
}
"""Planted bugs by name."""
