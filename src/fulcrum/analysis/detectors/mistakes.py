"""The mistakes of `planted.py`: each makes a wrong function of a right one, or puts a wrong one in its place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fulcrum.clipping.fixed import FIXED
from fulcrum.data import sampling
from fulcrum.data.sampling import PartyData
from fulcrum.gradients.rounding import NormTable, SquaredNorms, to_norm_table
from fulcrum.privacy import bounds
from fulcrum.privacy.events import Event, Gaussian
from fulcrum.privacy.exact_noise import GridRelease
from fulcrum.privacy.ledger import Ledger
from fulcrum.rng import CipherRandomness, Randomness, StreamKey, make_randomness
from fulcrum.training import client
from fulcrum.types import RuleState, Stats, View

Plant = Callable[[], AbstractContextManager[Any]]
"""Opens a context in which a mistake is in the code."""


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


def scaled(on_sum: float, on_extra: float = 1.0) -> Callable[[Any], Any]:
    """Noise of another strength on the sum and on the statistics."""

    def make(original: Any) -> Any:
        def scale(*given: Any, **named: Any) -> Any:
            found = original(*given, **named)
            return dataclasses.replace(found, sum=found.sum * on_sum, extra=found.extra * on_extra)

        return scale

    return make


def first_C_only(original: Any) -> Any:
    """Noise for the C of the first round, whatever C is now."""
    first: list[Any] = []

    def scale(given: Any, *rest: Any, **named: Any) -> Any:
        first.append(given.C)
        return original(dataclasses.replace(given, C=first[0]), *rest, **named)

    return scale


def other_streams(change: Callable[[StreamKey], StreamKey]) -> Callable[[Any], Any]:
    """Streams under other names."""

    def make(original: Any) -> Any:
        def locate(self: CipherRandomness, key: StreamKey) -> Any:
            return original(self, change(key))

        return locate

    return make


def for_purpose(purpose: str, change: Callable[[StreamKey], StreamKey]) -> Callable[[StreamKey], StreamKey]:
    return lambda key: change(key) if key[0] == purpose else key


def released_by(add: Callable[[Tensor, float, torch.Generator], Tensor]) -> Callable[[Any], Any]:
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


def add_laplace(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    u = torch.rand(row.shape, dtype=torch.float64, generator=generator) - 0.5
    return row - scale / math.sqrt(2) * u.sign() * torch.log1p(-2 * u.abs())


def add_to_first_half(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    noise = scale * torch.randn(row.shape, dtype=torch.float64, generator=generator)
    noise[len(noise) // 2 :] = 0
    return row + noise


def add_coarse(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(row.shape, dtype=torch.float64, generator=generator)
    return row + scale * (noise * 8).round() / 8


def add_correlated(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    own = torch.randn(row.shape, dtype=torch.float64, generator=generator)
    shared = torch.randn((), dtype=torch.float64, generator=generator)
    return row + scale * (math.sqrt(0.7) * own + math.sqrt(0.3) * shared)


# --- clipping -----------------------------------------------------------------------------------


def leave_layer(original: Any) -> Any:
    """The sum with the third of the layout's tensors as it was before clipping."""

    def add_up(factors: Tensor, coefficients: Tensor, *rest: Any, **named: Any) -> Tensor:
        total: Tensor = original(factors, coefficients, *rest, **named)
        total = total.clone()
        total[-21:-3] = coefficients[:, -21:-3].sum(dim=0).to(total)
        return total

    return add_up


def use_largest_entry(original: Any) -> Any:
    """Norms that are the largest absolute number."""

    def measure(coefficients: Tensor, where: Tensor, groups: int) -> NormTable:
        largest = coefficients.double().abs().amax(dim=1, keepdim=True) if coefficients.shape[1] else coefficients
        squares = largest.square().expand(-1, groups)
        return to_norm_table(SquaredNorms(squares, squares, squares), coefficients.dtype)

    return measure


def clip_the_batch(original: Any) -> Any:
    """One norm for the whole batch: the gradients are added up first, and the sum is clipped."""

    def contribute(
        rule: Any, view: Any, state: Any, gradients: Tensor, losses: Tensor, *rest: Any, **named: Any
    ) -> Any:
        whole = gradients.sum(dim=0, keepdim=True) if len(gradients) else gradients
        return original(rule, view, state, whole, losses[: len(whole)], *rest, **named)

    return contribute


def negative(stats: Stats, state: RuleState) -> tuple[Tensor, Tensor, RuleState]:
    """The fixed rule with a sign error for large gradients."""
    factors, extra, state = FIXED.clip(stats, state)
    return torch.where(stats.norms > 100.0, -40.0 * factors, factors), extra, state


def add_up_twice(original: Any) -> Any:
    """Both records of a person are added up at the person's own factor."""
    return lambda *given, **named: 2 * original(*given, **named)


def limit_above_only(factors: Tensor, C: Tensor, limits: bounds.NormLimits, share: float = 1.0) -> Tensor:
    """Factors that are held below their limit, and not above 0."""
    return torch.minimum(factors.double(), C.double() / limits.norms.clamp_min(1e-300)).to(factors.dtype)


def compute_careless_norms(inputs: Tensor, grads: Tensor) -> SquaredNorms:
    """Ghost norms from float32 Gram matrices, and nothing for their rounding."""
    gram, other = torch.bmm(inputs.transpose(1, 2), inputs), torch.bmm(grads, grads.transpose(1, 2))
    squares = (gram * other).sum(dim=(1, 2)).double().clamp_min(0)
    return SquaredNorms(squares, squares, squares)


# --- sampling and divisor -----------------------------------------------------------------------


def twice_the_rate(original: Any) -> Any:
    def sample(randomness: Randomness, key: StreamKey, party: PartyData, rate: float) -> Any:
        return original(randomness, key, party, min(1.0, 2 * rate))

    return sample


def choose(party: PartyData, joins: Tensor) -> tuple[Tensor, Tensor, int]:
    slot = joins.cumsum(0) - 1
    here = joins[party.unit_of]
    return party.index[here], slot[party.unit_of[here]], int(joins.sum())


def shuffle(original: Any) -> Any:
    """Batches of one size from a permutation that is new in every epoch."""

    def sample(randomness: Randomness, key: StreamKey, party: PartyData, rate: float) -> Any:
        size = max(1, round(rate * party.units))
        per_epoch = max(1, party.units // size)
        turn = int(key[1])
        order = torch.argsort(randomness.uniform(("sample", turn // per_epoch, *key[2:]), party.units))
        joins = torch.zeros(party.units, dtype=torch.bool)
        first = (turn % per_epoch) * size
        joins[order[first : first + size]] = rate > 1e-6
        return choose(party, joins)

    return sample


def one_sample_for_all(original: Any) -> Any:
    def sample(randomness: Randomness, key: StreamKey, party: PartyData, rate: float) -> Any:
        return original(randomness, (key[0], 0, *key[2:]), party, rate)

    return sample


def prefer_some(original: Any) -> Any:
    """Half of the units come 1.6 times as often, the others 0.4 times."""

    def sample(randomness: Randomness, key: StreamKey, party: PartyData, rate: float) -> Any:
        chances = torch.where(torch.arange(party.units) % 2 == 0, 1.6 * rate, 0.4 * rate)
        return choose(party, randomness.uniform(key, party.units) < chances)

    return sample


@contextlib.contextmanager
def divide_by_actual_batch() -> Iterator[None]:
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


def forgotten(rounds: Callable[[int], bool]) -> Plant:
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


def cheaper_event(original: Any) -> Any:
    """The event of a step with statistics, at a sigma that it does not have."""

    def event(rule: Any, rate: float, sigma: float, batch: float, asked: bool = True) -> Event:
        found: Event = original(rule, rate, sigma, batch, asked)
        return dataclasses.replace(found, sigma=1.3 * found.sigma) if isinstance(found, Gaussian) and asked else found

    return event


def rotate_costs(original: Any) -> Any:
    def costs(run: Any, names: Sequence[str], *rest: Any) -> list[float]:
        found: list[float] = original(run, names, *rest)
        return [*found[1:], found[0]]

    return costs


def change_statement(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def statement(run: Any) -> dict[str, Any]:
            found: dict[str, Any] = original(run)
            return found | {name: change(found[name]) for name, change in changes.items()}

        return statement

    return make


def halve_rdp(original: Any) -> Any:
    return lambda rate, sigma: 0.5 * original(rate, sigma)


def round_down(original: Any) -> Any:
    return lambda *given, **named: math.floor(10 * original(*given, **named)) / 10


def exact_sums(original: Any) -> Any:
    return lambda exact, *rest: exact


def unpaid(original: Any) -> Any:
    return lambda federation, plan, *rest: {account.name for account in plan.accounts}


def settle_known(original: Any) -> Any:
    """Settle what is on record, and pass over the rest."""

    def settle(self: Ledger, run: str, round: int, digests: Mapping[str, str], attempt: int | None = None) -> None:
        known = self.accounts()
        original(self, run, round, {name: digest for name, digest in digests.items() if name in known}, attempt)

    return settle


def same_run(original: Any) -> Any:
    return lambda *given: "one"


def unseeded(original: Any) -> Any:
    """Every run draws from the same secret."""
    return lambda mode, seed, run="": make_randomness("seeded", 7, "")
