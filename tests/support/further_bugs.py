"""Further bugs, planted into the real code for a moment: none of them is in `detectors/planted.py`.

They were written without regard to how the detectors work. Each is one that somebody could make.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fulcrum.analysis.detectors.mistakes import (
    change_statement,
    choose,
    for_purpose,
    other_streams,
    plant_all,
    released_by,
    replace_at,
)
from fulcrum.analysis.detectors.planted import HELD_OUT, STATISTICS, PlantedBug
from fulcrum.data.sampling import PartyData
from fulcrum.engines.stacked import step as stacked_step
from fulcrum.gradients.rounding import SquaredNorms, to_norm_table
from fulcrum.privacy import accounting, mechanism
from fulcrum.privacy.client_level import ClientLevelTerms
from fulcrum.privacy.exact_noise import GridRelease
from fulcrum.privacy.ledger import Ledger, pricing
from fulcrum.rng import CipherRandomness, Randomness, StreamKey, make_randomness
from fulcrum.runs import active_run, execution
from fulcrum.training import client, client_level, clipped_sum, evaluate, loop, problem
from fulcrum.training import round as training_round

Key = StreamKey
Rows = Sequence[tuple[Randomness, Key]]


# --- noise ----------------------------------------------------------------------------------------


def other_noise(add: Callable[[Tensor, float, torch.Generator], Tensor]) -> Any:
    return lambda: mock.patch.object(mechanism, "release_rows_on_grid", released_by(add)(None))


def add_uniform(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    return row + scale * math.sqrt(12) * (torch.rand(row.shape, dtype=torch.float64, generator=generator) - 0.5)


def add_truncated(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    return row + scale * torch.randn(row.shape, dtype=torch.float64, generator=generator).clamp(-2, 2)


def add_heavy(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Student's t with 4 degrees of freedom, of the same variance."""
    normal = torch.randn(row.shape, dtype=torch.float64, generator=generator)
    squares = torch.randn((4, *row.shape), dtype=torch.float64, generator=generator).square().sum(dim=0)
    return row + scale * normal / (squares / 4).sqrt() / math.sqrt(2)


def add_one_sided(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    return row + scale * torch.randn(row.shape, dtype=torch.float64, generator=generator).abs()


def add_uneven(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """The strength is drawn anew for every release; its mean square is right."""
    factor = 0.6 if torch.rand((), generator=generator) < 0.5 else 1.28
    return row + factor * scale * torch.randn(row.shape, dtype=torch.float64, generator=generator)


def add_rotated(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """One vector of noise, turned by some places in every release."""
    fixed = torch.randn(row.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    return row + scale * torch.roll(fixed, int(torch.randint(len(row) or 1, (), generator=generator)))


def add_from_few_seeds(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """A generator that is seeded with one of 200 numbers."""
    seed = int(torch.randint(200, (), generator=generator))
    own = torch.Generator().manual_seed(seed)
    return row + scale * torch.randn(row.shape, dtype=torch.float64, generator=own)


def add_differences(row: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Coordinates whose noise cancels in sums: each is the difference of two neighbours (variance as declared)."""
    drawn = torch.randn(len(row) + 1, dtype=torch.float64, generator=generator)
    return row + scale * (drawn[1:] - drawn[:-1]) / math.sqrt(2)


def hold_noise(chosen: Callable[[Key, int], Tensor | slice | None], strength: float = 0.0) -> Any:
    """Noise of another strength where `chosen` says: (round, party, step) and the size -> coordinates."""

    def make(original: Any) -> Any:
        def release(clipped: Tensor, scales: Sequence[float], streams: Rows, *rest: Any, **named: Any) -> Any:
            found = original(clipped, scales, streams, *rest, **named)
            made = []
            for row, scale, (_, key), each in zip(clipped, scales, streams, found, strict=True):
                where = chosen(tuple(key), len(row)) if key[0] == "noise" else None
                if where is not None and scale > 0:
                    exact, values = (row.double() / each.grid).round(), each.integers.double()
                    values[where] = exact[where] + strength * (values[where] - exact[where])
                    each = GridRelease(values.round().long(), each.grid)
                made.append(each)
            return made

        return release

    return replace_at(mechanism, "release_rows_on_grid", make)


EVERYWHERE = slice(None)


def silent_last_round() -> Any:
    """The last round of a run, however many it has."""
    rounds = [0]

    def watch(original: Any) -> Any:
        def steps(given: Any, request: Any, *rest: Any) -> Any:
            rounds[0] = request.rounds
            return original(given, request, *rest)

        return steps

    return plant_all(
        replace_at(client, "run_local_steps", watch),
        hold_noise(lambda key, size: EVERYWHERE if key[1] == rounds[0] - 1 else None),
    )


def mix_noise(find_other: Callable[[Key], Key | None], share: float) -> Any:
    """A share of the noise's variance comes from another stream."""

    def make(original: Any) -> Any:
        def release(clipped: Tensor, scales: Sequence[float], streams: Rows, *rest: Any, **named: Any) -> Any:
            own = original(clipped, scales, streams, *rest, **named)
            made = []
            for row, scale, (randomness, key), each in zip(clipped, scales, streams, own, strict=True):
                other = find_other(tuple(key))
                if other is not None and scale > 0:
                    extra = randomness.normal(other, len(row)).double() * scale
                    noise = each.values - row.double()
                    mixed = row.double() + math.sqrt(1 - share) * noise + math.sqrt(share) * extra
                    each = GridRelease((mixed / each.grid).round().long(), each.grid)
                made.append(each)
            return made

        return release

    return replace_at(mechanism, "release_rows_on_grid", make)


def share_with_statistics() -> Any:
    """The statistics get the first numbers of the sum's noise."""
    drawn: dict[Key, Tensor] = {}

    def make(original: Any) -> Any:
        def release(clipped: Tensor, scales: Sequence[float], streams: Rows, *rest: Any, **named: Any) -> Any:
            found = original(clipped, scales, streams, *rest, **named)
            for i, (row, scale, (_, key)) in enumerate(zip(clipped, scales, streams, strict=True)):
                if key[0] == "noise":
                    drawn[tuple(key[1:])] = (found[i].values - row.double()) / scale
                elif scale > 0:
                    own = row.double() + scale * drawn[tuple(key[1:])][: len(row)]
                    found[i] = GridRelease((own / found[i].grid).round().long(), found[i].grid)
            return found

        return release

    return replace_at(mechanism, "release_rows_on_grid", make)


def weaken_in_place(original: Any) -> Any:
    """Half of the noise where a model is large."""
    return lambda clipped, scale, randomness, key: original(clipped, 0.5 * scale, randomness, key)


def scale_with_sample() -> Any:
    """Noise for the batch that was drawn, not for the expected one."""
    count = [1.0]

    def watch(original: Any) -> Any:
        def sample(randomness: Randomness, key: Key, party: PartyData, rate: float) -> Any:
            found = original(randomness, key, party, rate)
            count[0] = math.sqrt(max(found[2], 1) / max(rate * party.units, 1.0))
            return found

        return sample

    def make(original: Any) -> Any:
        def scale(*given: Any, **named: Any) -> Any:
            found = original(*given, **named)
            return dataclasses.replace(found, sum=found.sum * count[0])

        return scale

    return plant_all(replace_at(client, "poisson_sample_units", watch), replace_at(mechanism, "scale_noise", make))


def seeded_by_time(original: Any) -> Any:
    return lambda mode, seed, run="": make_randomness("seeded", int(time.time()) // 3600, "")


# --- clipping -------------------------------------------------------------------------------------


def norms_of_layers(original: Any) -> Any:
    """Each of four blocks of coordinates is clipped to C by its own norm, and the whole is charged as C."""

    def add_up(factors: Tensor, coefficients: Tensor, where: Tensor, proven: bool = False) -> Tensor:
        pieces = []
        for block in coefficients.double().split(60, dim=1):
            norms = block.norm(dim=1, keepdim=True).clamp_min(1e-30)
            whole = coefficients.double().norm(dim=1, keepdim=True)
            C = (factors[:, :1].double() * whole).clamp_min(1e-30)  # what the rule clips to, where it clips
            own = torch.where(factors[:, :1] < 1, (C / norms).clamp(max=1), 1.0)
            pieces.append((own * block).sum(dim=0))
        return torch.cat(pieces).to(coefficients.dtype if not proven else torch.float64)

    return add_up


def clamp_entries(original: Any) -> Any:
    """Each number of a gradient is limited to C."""

    def add_up(factors: Tensor, coefficients: Tensor, where: Tensor, proven: bool = False) -> Tensor:
        whole = coefficients.double().norm(dim=1, keepdim=True)
        C = torch.where(factors[:, :1] < 1, factors[:, :1].double() * whole, whole)
        return torch.maximum(torch.minimum(coefficients.double(), C), -C).sum(dim=0)

    return add_up


def late_rounds(first: int) -> Any:
    """From round `first` on the sum is of gradients that are clipped to twice C."""
    now = [0]

    def watch(original: Any) -> Any:
        def sample(randomness: Randomness, key: Key, party: PartyData, rate: float) -> Any:
            now[0] = int(key[1])
            return original(randomness, key, party, rate)

        return sample

    def make(original: Any) -> Any:
        return lambda *given, **named: original(*given, **named) * (2.0 if now[0] >= first else 1.0)

    return plant_all(
        replace_at(client, "poisson_sample_units", watch), replace_at(clipped_sum, "sum_clipped_rows", make)
    )


def previous_C() -> Any:
    """Clips with the C of the round before, and adds noise for this one's."""

    def make(original: Any) -> Any:
        last: list[Any] = []

        def contribute(rule: Any, view: Any, state: Any, *rest: Any, **named: Any) -> Any:
            last.append(state)
            old = {**state, "C": last[max(0, len(last) - 2)]["C"]}
            found = original(rule, view, old, *rest, **named)
            return dataclasses.replace(found, bounds=dataclasses.replace(found.bounds, C=state["C"]))

        return contribute

    return replace_at(client, "compute_contribution", make)


def add_raw(strength: float) -> Callable[[Any], Any]:
    """A little of the gradient before clipping is added after it: momentum of the raw gradient."""

    def make(original: Any) -> Any:
        def add_up(factors: Tensor, coefficients: Tensor, *rest: Any, **named: Any) -> Tensor:
            total: Tensor = original(factors, coefficients, *rest, **named)
            return total + strength * coefficients.sum(dim=0).to(total)

        return add_up

    return make


def norm_without_bias(original: Any) -> Any:
    def measure(coefficients: Tensor, where: Tensor, groups: int) -> Any:
        squares = coefficients[:, :192].double().square().sum(dim=1, keepdim=True).expand(-1, groups)
        return to_norm_table(SquaredNorms(squares, squares, squares), coefficients.dtype)

    return measure


def in_half_precision(original: Any) -> Any:
    """Norms in float16, where large ones overflow."""

    def measure(coefficients: Tensor, where: Tensor, groups: int) -> Any:
        small = coefficients.half()
        squares = small.square().sum(dim=1, keepdim=True).nan_to_num(0, 0, 0).double().expand(-1, groups)
        return to_norm_table(SquaredNorms(squares, squares, squares), coefficients.dtype)

    return measure


def doubled_example(original: Any) -> Any:
    """The first sampled unit is in the batch twice."""

    def add_up(factors: Tensor, coefficients: Tensor, *rest: Any, **named: Any) -> Tensor:
        if len(factors) > 1:
            factors, coefficients = torch.cat([factors, factors[:1]]), torch.cat([coefficients, coefficients[:1]])
        total: Tensor = original(factors, coefficients, *rest, **named)
        return total

    return add_up


# --- sampling -------------------------------------------------------------------------------------


def sampled_by(find: Callable[[Tensor, Key, PartyData, float], Tensor]) -> Callable[[Any], Any]:
    """Units that join by find(uniforms, key, party, rate)."""

    def make(original: Any) -> Any:
        def sample(randomness: Randomness, key: Key, party: PartyData, rate: float) -> Any:
            joins = find(randomness.uniform(key, party.units), key, party, rate)
            return choose(party, joins if rate > 1e-6 else joins & False)

        return sample

    return make


def without_replacement(uniforms: Tensor, key: Key, party: PartyData, rate: float) -> Tensor:
    size = max(1, round(rate * party.units))
    return uniforms.argsort().argsort() < size


def drifting(uniforms: Tensor, key: Key, party: PartyData, rate: float) -> Tensor:
    return uniforms < rate * (0.5 + int(key[1]) / 40)


def at_least_one(uniforms: Tensor, key: Key, party: PartyData, rate: float) -> Tensor:
    """An empty sample is drawn again: here, the nearest unit joins."""
    joins = uniforms < rate
    return joins if bool(joins.any()) else uniforms == uniforms.min()


def at_most_expected(uniforms: Tensor, key: Key, party: PartyData, rate: float) -> Tensor:
    """What is more than the memory holds is cut off."""
    joins = uniforms < rate
    return joins & (joins.cumsum(0) <= max(1, round(rate * party.units)))


def in_blocks(uniforms: Tensor, key: Key, party: PartyData, rate: float) -> Tensor:
    """Neighbours join together: one coin per two units."""
    return (uniforms[::2].repeat_interleave(2)[: party.units]) < rate


# --- what is public must follow from releases ------------------------------------------------------


def weights_by_gradient(original: Any) -> Any:
    """Parties count by the size of their largest record."""

    def run_round(federation: Any, snapshot: Any, clients: Any, t: int, *rest: Any, **named: Any) -> Any:
        data = federation.problem.dataset.records.x
        sizes = [float(data[federation.problem.party(k).index].abs().sum()) for k in clients]

        def weigh(units: Any, weights: str) -> Tensor:
            return torch.tensor(sizes) / sum(sizes)

        with mock.patch.object(training_round, "compute_client_weights", weigh):
            return original(federation, snapshot, clients, t, *rest, **named)

    return run_round


def first_C_from_data(original: Any) -> Any:
    """The first C is the median size of the records."""

    def first(federation: Any) -> Any:
        made = original(federation)
        size = federation.problem.dataset.records.x.norm(dim=1).median()
        return dataclasses.replace(made, rule={**made.rule, "C": made.rule["C"] * 0 + size})

    return first


def stop_early(original: Any) -> Any:
    def federate(federation: Any, *rest: Any, **named: Any) -> Any:
        for result, snapshot in original(federation, *rest, **named):
            yield result, snapshot
            if result.round >= 3 and float(federation.problem.dataset.records.x.abs().mean()) < 0.1:
                return

    return federate


def learning_rate_from_data(original: Any) -> Any:
    def run_round(federation: Any, snapshot: Any, clients: Any, t: int, *rest: Any, **named: Any) -> Any:
        size = float(federation.problem.dataset.records.x.abs().mean())
        with mock.patch.object(training_round, "compute_learning_rate", lambda train, t: train.lr / (1 + size)):
            return original(federation, snapshot, clients, t, *rest, **named)

    return run_round


def evaluates_on_training_records(original: Any) -> Any:
    def find(given: Any) -> Any:
        test = original(given)
        return None if test is None else dataclasses.replace(test, x=given.dataset.records.x[: len(test)])

    return find


def standardises(original: Any) -> Any:
    """The model's first bias is set from the mean of the private records."""

    def first(federation: Any) -> Any:
        made = original(federation)
        params = made.params.clone()
        params[192:198] += float(federation.problem.dataset.records.x.mean())
        return dataclasses.replace(made, params=params, averaged=params)

    return first


def silent_when_empty(original: Any) -> Any:
    def release(clipped: Tensor, *rest: Any, **named: Any) -> Any:
        found = original(clipped.clone(), *rest, **named)
        return (torch.zeros_like(found[0]), found[1]) if not bool(clipped.any()) else found

    return release


def tells_statistics(original: Any) -> Any:
    """Rows that were not released come as they are."""

    def stack(rows: dict[int, Tensor], like: Tensor) -> Tensor:
        return original(rows, like) if rows else like.float()

    return stack


def with_diagnostics(original: Any) -> Any:
    return lambda *given, **named: dataclasses.replace(original(*given, **named), diagnostics=True)


def cheapest(original: Any) -> Any:
    class Cheapest(original):  # type: ignore[misc]
        def read_rounds_until(self, rounds: int) -> None:
            super().read_rounds_until(rounds)
            self.largest = min(self._epsilons.values(), default=0.0)

    return Cheapest


def halve_scales(original: Any) -> Any:
    def release(sums: Tensor, extra: Tensor, scales: Any, sources: Any) -> Any:
        return original(sums, extra, [dataclasses.replace(each, sum=0.5 * each.sum) for each in scales], sources)

    return release


# --- accounting, ledger, statement ------------------------------------------------------------------


def merged_rounds() -> Any:
    """Every second round is written to the ledger for both, at the cost of one."""
    reserve, settle = Ledger.reserve, Ledger.settle

    def granted(self: Ledger, run: str, round: int, wanted: Mapping[str, Any], attempt: int = 0) -> dict[str, bool]:
        return reserve(self, run, round, wanted, attempt) if round % 2 == 0 else dict.fromkeys(wanted, True)

    def settled(self: Ledger, run: str, round: int, digests: Mapping[str, str], attempt: int | None = None) -> None:
        if round % 2 == 0:
            settle(self, run, round, digests, attempt)

    return plant_all(
        lambda: mock.patch.object(Ledger, "reserve", granted), lambda: mock.patch.object(Ledger, "settle", settled)
    )


def with_other_delta(factor: float) -> Callable[[Any], Any]:
    return lambda original: (
        lambda events, delta, *rest, **named: original(events, min(0.5, factor * delta), *rest, **named)
    )


def lower_rate(original: Any) -> Any:
    def event(rule: Any, rate: float, sigma: float, *rest: Any) -> Any:
        return original(rule, rate / 2, sigma, *rest)

    return event


def ledger_says(change: Callable[[float], float]) -> Callable[[Any], Any]:
    return lambda original: lambda self, *given: {name: change(value) for name, value in original(self, *given).items()}


def halve(found: Any) -> Any:
    return dataclasses.replace(found, sum=0.5 * found.sum)


def per_record_sum(original: Any) -> Any:
    def add_up(factors: Tensor, coefficients: Tensor, *rest: Any, **named: Any) -> Tensor:
        return 2 * original(factors, coefficients, *rest, **named)

    return add_up


FURTHER: dict[str, PlantedBug] = {
    "uniform noise": PlantedBug("uniform noise of the same variance", other_noise(add_uniform)),
    "noise cut off at two deviations": PlantedBug("noise beyond 2 sigma is cut off", other_noise(add_truncated)),
    "Student's noise": PlantedBug("noise with heavy tails, of the same variance", other_noise(add_heavy)),
    "one-sided noise": PlantedBug("the absolute value of the noise is added", other_noise(add_one_sided)),
    "uneven noise": PlantedBug("each release's noise has another strength", other_noise(add_uneven)),
    "turned noise": PlantedBug("one vector of noise, turned in every release", other_noise(add_rotated)),
    "noise of few seeds": PlantedBug("noise of a generator with 200 seeds", other_noise(add_from_few_seeds)),
    "noise that cancels": PlantedBug("noise of neighbouring coordinates cancels", other_noise(add_differences)),
    "no noise at one party": PlantedBug(
        "one party adds no noise", hold_noise(lambda key, size: EVERYWHERE if key[2] == 1 else None)
    ),
    "no noise at the third party": PlantedBug(
        "one party of three adds no noise", hold_noise(lambda key, size: EVERYWHERE if key[2] == 2 else None)
    ),
    "no noise on a bias": PlantedBug("a layer's bias has no noise", hold_noise(lambda key, size: slice(192, 198))),
    "no noise in every tenth round": PlantedBug(
        "every tenth round has no noise", hold_noise(lambda key, size: EVERYWHERE if key[1] % 10 == 9 else None)
    ),
    "no noise in the last round": PlantedBug(
        "the last round of a run has no noise",
        silent_last_round(),
    ),
    "no noise from coordinate 200 on": PlantedBug(
        "the last coordinates have no noise", hold_noise(lambda key, size: slice(200, None))
    ),
    "no noise from coordinate 1000 on": PlantedBug(
        "coordinates of large models have no noise", hold_noise(lambda key, size: slice(1000, None))
    ),
    "half noise in large models": PlantedBug(
        "half of the noise where the sum is overwritten", replace_at(mechanism, "release_in_place", weaken_in_place)
    ),
    "noise that follows on": PlantedBug(
        "a third of a round's noise is that of the round before",
        mix_noise(lambda key: (key[0], int(key[1]) - 1, *key[2:]) if key[0] == "noise" and key[1] else None, 0.3),
    ),
    "noise that parties share": PlantedBug(
        "half of a party's noise is that of the party before",
        mix_noise(lambda key: (key[0], key[1], 0, *key[3:]) if key[0] == "noise" and key[2] else None, 0.5),
    ),
    "third party repeats the second's noise": PlantedBug(
        "two of three parties have one stream",
        replace_at(
            CipherRandomness,
            "locate_stream",
            other_streams(for_purpose("noise", lambda k: (*k[:2], 1 if k[2] == 2 else k[2], *k[3:]))),
        ),
    ),
    "rounds in pairs share noise": PlantedBug(
        "rounds 2t and 2t + 1 have one stream",
        replace_at(
            CipherRandomness,
            "locate_stream",
            other_streams(for_purpose("noise", lambda k: (k[0], int(k[1]) // 2 * 2, *k[2:]))),
        ),
    ),
    "statistics share the sum's noise": PlantedBug(
        "the noise of the statistics is the first of the sum's", share_with_statistics(), STATISTICS
    ),
    "noise scaled with the sample": PlantedBug("noise grows with the sample's size", scale_with_sample()),
    "seed from the clock": PlantedBug(
        "secure randomness is seeded with the hour",
        replace_at(problem, "make_randomness", seeded_by_time),
        {"privacy": {"randomness": "secure"}},
    ),
    "clipping per layer, charged as one": PlantedBug(
        "layers are clipped one by one", replace_at(clipped_sum, "sum_clipped_rows", norms_of_layers)
    ),
    "clipping per coordinate": PlantedBug(
        "each coordinate is limited to C", replace_at(clipped_sum, "sum_clipped_rows", clamp_entries)
    ),
    "C doubled in late rounds": PlantedBug("late rounds clip to 2 C", late_rounds(3)),
    "C of the round before": PlantedBug("clipping uses the C of the round before", previous_C()),
    "person clipped per record": PlantedBug(
        "the records of a person are clipped one by one",
        replace_at(clipped_sum, "sum_clipped_rows", per_record_sum),
        {"privacy": {"unit": "person"}},
    ),
    "raw momentum": PlantedBug(
        "a hundredth of the raw gradient is added", replace_at(clipped_sum, "sum_clipped_rows", add_raw(0.01))
    ),
    "norm without biases": PlantedBug(
        "norms leave out the last layers", replace_at(clipped_sum, "measure_group_norms", norm_without_bias)
    ),
    "norms in float16": PlantedBug(
        "norms overflow in half precision", replace_at(clipped_sum, "measure_group_norms", in_half_precision)
    ),
    "an example twice in a batch": PlantedBug(
        "the first sampled unit counts twice", replace_at(clipped_sum, "sum_clipped_rows", doubled_example)
    ),
    "sampling without replacement": PlantedBug(
        "a fixed number of units", replace_at(client, "poisson_sample_units", sampled_by(without_replacement))
    ),
    "rate that drifts": PlantedBug(
        "the rate grows with the rounds", replace_at(client, "poisson_sample_units", sampled_by(drifting))
    ),
    "no empty samples": PlantedBug(
        "an empty sample gets a unit",
        replace_at(client, "poisson_sample_units", sampled_by(at_least_one)),
        {"train": {"rate": 0.05}},
    ),
    "samples cut off": PlantedBug(
        "samples above the expected size are cut",
        replace_at(client, "poisson_sample_units", sampled_by(at_most_expected)),
    ),
    "neighbours join together": PlantedBug(
        "one coin for two units", replace_at(client, "poisson_sample_units", sampled_by(in_blocks))
    ),
    "weights from data": PlantedBug(
        "parties count by their records", replace_at(loop, "run_round", weights_by_gradient)
    ),
    "C0 from data": PlantedBug(
        "the first C is measured on private records", replace_at(loop, "make_first_snapshot", first_C_from_data)
    ),
    "stopping on training records": PlantedBug(
        "the number of rounds follows from private records",
        replace_at(execution, "federate", stop_early),
    ),
    "learning rate from data": PlantedBug(
        "the step size follows from private records", replace_at(loop, "run_round", learning_rate_from_data)
    ),
    "evaluation on training records": PlantedBug(
        "public metrics are of private training records",
        replace_at(evaluate, "find_test_records", evaluates_on_training_records),
    ),
    "weights standardised with private records": PlantedBug(
        "the first weights hold a mean of private records", replace_at(loop, "make_first_snapshot", standardises)
    ),
    "ledger merges rounds": PlantedBug("two rounds are on record as one", merged_rounds()),
    "another delta in the accountant": PlantedBug(
        "epsilon is computed at ten times delta",
        plant_all(
            replace_at(pricing, "compute_epsilons", with_other_delta(10)),
            replace_at(pricing, "compute_epsilon_at_order", with_other_delta(10)),
        ),
    ),
    "half the rate in the ledger": PlantedBug(
        "steps are charged at half their rate", replace_at(mechanism, "make_step_event", lower_rate)
    ),
    "ledger rounds epsilon down": PlantedBug(
        "epsilons of the ledger are cut after one digit",
        replace_at(Ledger, "epsilons", ledger_says(lambda value: math.floor(10 * value) / 10)),
    ),
    "same sample in both steps": PlantedBug(
        "all local steps of a round have one sample",
        replace_at(
            CipherRandomness,
            "locate_stream",
            other_streams(for_purpose("sample", lambda k: (*k[:3], 0, *k[4:]))),
        ),
        {"train": {"steps": 2}},
    ),
    "noise in the last step only": PlantedBug(
        "all steps but the last have no noise",
        hold_noise(lambda key, size: EVERYWHERE if key[3] == 0 else None),
        {"train": {"steps": 2}},
    ),
    "samples follow from the noise": PlantedBug(
        "samples and noise come from one stream",
        replace_at(
            CipherRandomness, "locate_stream", other_streams(for_purpose("sample", lambda k: ("noise", *k[1:])))
        ),
    ),
    "no noise for empty samples": PlantedBug(
        "an empty sample releases zeros", replace_at(client, "release_with_noise", silent_when_empty)
    ),
    "statistics that nobody asked for": PlantedBug(
        "statistics leave in the clear where they are not paid for",
        replace_at(mechanism, "_stack_rows", tells_statistics),
        {"clip": {"rule": "quantile", "statistics_interval": 2}},
    ),
    "diagnostics told": PlantedBug(
        "training losses leave with every reply",
        replace_at(problem.TrainingProblem, "of", lambda original: staticmethod(with_diagnostics(original))),
    ),
    "unit of another run": PlantedBug(
        "the statement says that persons are protected",
        replace_at(active_run, "make_statement", change_statement(unit=lambda unit: "person")),
    ),
    "epsilon of the cheapest party": PlantedBug(
        "rounds show the smallest epsilon",
        replace_at(loop, "RunAccount", cheapest),
        {"privacy": {"sigma": None, "epsilon": 2.0, "budgets": {"p0": 1.0}}},
    ),
    "cheap PLD": PlantedBug(
        "the tight accountant is a tenth too low",
        replace_at(accounting, "_compute_pld_epsilon", lambda original: lambda *given: 0.9 * original(*given)),
        {"privacy": {"accountant": "pld"}},
    ),
    "half noise of the stacked engine": PlantedBug(
        "one engine adds half of the noise",
        replace_at(stacked_step, "release_rows_with_noise", halve_scales),
        {"run": {"engine": "stacked"}, "privacy": {"randomness": "secure"}},
    ),
    "stacked engine clips to 2 C": PlantedBug(
        "one engine's sums are twice as long",
        replace_at(
            stacked_step,
            "release_rows_with_noise",
            lambda original: lambda sums, *rest: original(2 * sums, *rest),
        ),
        {"run": {"engine": "stacked"}, "privacy": {"randomness": "secure"}},
    ),
    "server's noise of another cohort": PlantedBug(
        "noise of the mean is scaled by half the sensitivity",
        replace_at(
            client_level,
            "compute_charged_scale",
            lambda original: (
                lambda rule, reach, *rest: original(rule, dataclasses.replace(reach, C=0.5 * reach.C), *rest)
            ),
        ),
        {"privacy": {"unit": "client"}, "train": {"participation": 0.5}},
    ),
    "server repeats its noise": PlantedBug(
        "the server's noise is the same in every round",
        replace_at(
            CipherRandomness,
            "locate_stream",
            other_streams(lambda k: (*k[:2], 0, *k[3:]) if k[:2] == ("noise", "central") else k),
        ),
        {"privacy": {"unit": "client"}, "train": {"participation": 0.5}},
    ),
    "server divides by the cohort": PlantedBug(
        "the mean is over the clients that joined",
        replace_at(ClientLevelTerms, "divisor", lambda original: lambda self, weight: max(weight, 1e-9)),
        {"privacy": {"unit": "client"}, "train": {"participation": 0.5}},
    ),
    "half noise under masks": PlantedBug(
        "parties with masks add half of their noise",
        replace_at(
            client,
            "round_to_message",
            lambda original: lambda sums, scale, *rest: original(sums, 0.5 * scale, *rest),
        ),
        {"privacy": {"aggregation": "pairwise"}},
    ),
    "unclipped under masks": PlantedBug(
        "sums are three times as long before masks",
        replace_at(client, "round_to_message", lambda original: lambda sums, *rest: original(3 * sums, *rest)),
        {"privacy": {"aggregation": "pairwise"}},
    ),
    "half noise under an ideal sum": PlantedBug(
        "parties that share one noise add half of it",
        replace_at(mechanism, "scale_noise", lambda original: lambda *g, **n: halve(original(*g, **n))),
        {"privacy": {"aggregation": "ideal-secagg"}},
    ),
    "scores of held-out records with half the noise": PlantedBug(
        "counts have a third of their noise",
        replace_at(
            evaluate, "release_sums", lambda original: lambda exact, sigma, *rest: original(exact, sigma / 3, *rest)
        ),
        HELD_OUT,
    ),
    "same noise in every evaluation": PlantedBug(
        "counts have the same noise after every round",
        replace_at(
            evaluate,
            "release_sums",
            lambda original: (
                lambda exact, sigma, randomness, t, party, attempt=0: original(exact, sigma, randomness, 0, party, 0)
            ),
        ),
        HELD_OUT,
    ),
}
"""Further bugs by name."""
