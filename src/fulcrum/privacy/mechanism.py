"""The mechanism: it adds the noise to a clipped sum, and states the privacy event.

A rule states the bounds of a unit's contribution (`Bounds`), and `bounds.apply_rule` enforces them. This file derives
the scale of the noise and the event from them, so no rule can misstate its cost. Each privacy-critical step is written
once: `release_with_noise` releases a sum as integers on a grid (`exact_noise`), `make_step_event` gives the event.
`add_noise` is the form of a release for simulations of many runs or parties at once: float32, without rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fulcrum.clipping.rule import ClipRule, gradient_multiplier
from fulcrum.privacy.events import Event, Gaussian, Unprotected
from fulcrum.privacy.exact_noise import release_in_place, release_rows_on_grid
from fulcrum.rng import CipherRandomness, Randomness, StreamKey
from fulcrum.types import Assignment, Bounds, RuleState

# --- what is released -----------------------------------------------------------------------


@dataclass(frozen=True)
class NoiseMultipliers:
    """The noise of a release in units of the bounds: a multiplier for the sum and one for the extra statistics.

    Numbers, or tensors [T] for T tasks; 0: no noise. noise_parties: parties jointly add one noise vector, and this one
    adds 1/noise_parties of its variance.
    """

    sum: float | Tensor
    extra: float | Tensor
    noise_parties: float = 1


def make_step_event(rule: ClipRule, rate: float, sigma: float, batch: float, asked: bool = True) -> Event:
    """The event of one step at noise multiplier `sigma`. asked: whether the step releases the rule's statistics.

    The plan, the mechanism and the check after a round all use this function.
    """
    if sigma == 0 or not rule.private:
        return Unprotected()
    return Gaussian(rate, sigma if asked else gradient_multiplier(rule.share, sigma, batch))


def compute_planned_events(task: Assignment, rule: ClipRule, batch: float, round: int) -> tuple[Event, ...]:
    """The events of a task in a round (from 0), one per kind of step. batch: expected batch size q n_k."""
    if task.sigma == 0 or not rule.private:
        return (Unprotected(task.steps),)
    asked = task.asked(round)
    counts = ((True, asked), (False, task.steps - asked))
    return tuple(
        make_step_event(rule, task.rate, task.sigma, batch, with_extra).with_count(count)
        for with_extra, count in counts
        if count
    )


def compute_noise_multipliers(
    rule: ClipRule, sigma: float, batch: float, asked: bool = True, shares: float = 1
) -> NoiseMultipliers:
    """The noise of one step at multiplier `sigma`, split between the sum and the extra statistics.

    The pair costs exactly one Gaussian release at sigma: the precisions (1 - s)/sigma^2 on the sum,
    scaled by its bound, and s/sigma^2 on the extra, scaled by its own, add up to 1/sigma^2. A step without
    extra statistics has the same noise on the sum, and costs only that.

    If `shares` parties jointly add one noise vector, this party's noise has 1/shares of the variance. The event is that
    of the sum over these parties, and only that sum may be released (privacy.aggregation).
    """
    if sigma == 0 or not rule.private:
        return NoiseMultipliers(0.0, 0.0)
    share = rule.share(sigma, batch)
    if shares != 1 and share > 0:
        raise ValueError("parties share the noise of gradients only, and this rule releases statistics too")
    on_extra = sigma / share**0.5 if share > 0 and asked else 0.0
    return NoiseMultipliers(gradient_multiplier(rule.share, sigma, batch), on_extra, shares)


# --- noise ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoiseScale:
    """Standard deviations of the noise on the sum and on the extra statistics: numbers, or tensors [T] for T tasks.

    asked: whether the extra statistics are released; False, or 0 in a tensor [T], where they are not.
    """

    sum: float | Tensor
    extra: float | Tensor
    asked: bool | Tensor = True


@dataclass(frozen=True)
class ChargedNoiseScale(NoiseScale):
    """The noise of one client's step, and the event that is charged for the step."""

    event: Event = field(default_factory=Unprotected)


def scale_noise(bounds: Bounds, multipliers: NoiseMultipliers, asked: bool | Tensor = True) -> NoiseScale:
    """Multiply the bounds by the multipliers: bounds.C [G] or [T, G], bounds.extra a number or [T].

    C may be infinite where the multiplier is 0; the scale is then 0.
    """
    # float64, and a little more than the norm: its own rounding must not make the noise too small.
    reach = torch.linalg.vector_norm(bounds.C.double(), dim=-1) * (1 + 2.0**-40)
    on_sum: float | Tensor = reach * multipliers.sum
    if multipliers.noise_parties != 1:
        on_sum = on_sum / multipliers.noise_parties**0.5
    if isinstance(multipliers.sum, Tensor):
        on_sum = on_sum.masked_fill(multipliers.sum == 0, 0)  # type: ignore[union-attr]
    elif multipliers.sum == 0:
        on_sum = 0.0
    return NoiseScale(on_sum, bounds.extra * multipliers.extra, asked)


def refuse_unnoised_statistics(on_extra: float | Tensor) -> None:
    """Refuse a private release of extra statistics without noise. on_extra: the scale of their noise."""
    if on_extra <= 0:
        raise ValueError("a rule releases extra statistics but gives them no share of the noise (ClipRule.share)")


def add_noise(
    clipped: Tensor,
    extra: Tensor,
    scale: NoiseScale,
    normals: tuple[Tensor | None, Tensor | None],
    state: RuleState,
) -> tuple[Tensor, Tensor, RuleState]:
    """The i.i.d. Gaussian mechanism: a clipped sum and its extra statistics with noise, ready for release.

    clipped [m] and extra [J] of one task, or [T, m] and [T, J] of T tasks. normals: standard normal numbers of the same
    two shapes; None without noise. Statistics that are not released become zeros. `state` is returned unchanged: this
    mechanism has no state.
    """
    for_sum, for_extra = normals
    noisy = clipped if for_sum is None else (clipped + for_sum * _broadcast_over_tasks(scale.sum)).to(clipped.dtype)
    if for_extra is not None:
        extra = (extra + for_extra * _broadcast_over_tasks(scale.extra)).to(extra.dtype)
    if isinstance(scale.asked, Tensor):
        extra = extra * scale.asked[..., None]
    elif not scale.asked:
        extra = torch.zeros_like(extra)
    return noisy, extra, state


def _broadcast_over_tasks(value: float | Tensor) -> float | Tensor:
    """A number unchanged; a tensor [T] as [T, 1], to scale the rows of [T, m]."""
    return value[..., None] if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Mechanism:
    """Turns a clipped sum into a release.

    init(d) -> state: the mechanism's state between releases, as named tensors.
    scale(bounds, multipliers, asked) -> NoiseScale.
    release(sum, extra, scale, normals, state) -> (noisy sum, noisy extra, state); see `add_noise` for the shapes.
    """

    init: Callable[[int], RuleState]
    scale: Callable[[Bounds, NoiseMultipliers, bool | Tensor], NoiseScale]
    release: Callable[
        [Tensor, Tensor, NoiseScale, tuple[Tensor | None, Tensor | None], RuleState], tuple[Tensor, Tensor, RuleState]
    ]


GAUSSIAN_MECHANISM = Mechanism(init=lambda dim: {}, scale=scale_noise, release=add_noise)
"""Independent Gaussian noise for every release, without state."""


# --- one client's step ----------------------------------------------------------------------

LARGE_SUM = 2**20
"""Numbers from which a release is written over the sum, if the caller allows it: fresh memory of that size is slow."""


def compute_charged_scale(
    rule: ClipRule, bounds: Bounds, rate: float, sigma: float, batch: float, asked: bool = True, shares: float = 1
) -> ChargedNoiseScale:
    """Noise and event of one step at multiplier `sigma`; see `compute_noise_multipliers`."""
    multipliers = compute_noise_multipliers(rule, sigma, batch, asked, shares)
    found = scale_noise(bounds, multipliers, asked)
    return ChargedNoiseScale(found.sum, found.extra, asked, make_step_event(rule, rate, sigma, batch, asked))


def release_with_noise(
    clipped: Tensor,
    extra: Tensor,
    scale: ChargedNoiseScale,
    randomness: Randomness,
    key: StreamKey,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """What a client may release of a sum [m] and extra statistics [J], float32: integers on a grid, times the grid.

    key: the release's place, (round, client, step); the noise comes from two streams of that name. Statistics that are
    not released are zeros. Without noise (a rule that is not private) the sums are returned as they are.
    overwrite: whether the sum's memory may hold the release: the caller must not read the sum any more.
    """
    rows = (clipped[None], extra[None], [scale], [(randomness, key)])
    large = overwrite and len(clipped) >= LARGE_SUM and not isinstance(scale.event, Unprotected)
    if large and isinstance(randomness, CipherRandomness):
        _, noisy_extra = release_rows_with_noise(clipped[None, :0], *rows[1:])  # the statistics alone
        return release_in_place(clipped, float(scale.sum), randomness, ("noise", *key)), noisy_extra[0]
    noisy, noisy_extra = release_rows_with_noise(*rows)
    return noisy[0], noisy_extra[0]


def release_rows_with_noise(
    clipped: Tensor,
    extra: Tensor,
    scales: Sequence[ChargedNoiseScale],
    sources: Sequence[tuple[Randomness, StreamKey]],
) -> tuple[Tensor, Tensor]:
    """`release_with_noise` of several clients: sums [T, m] and statistics [T, J], each with its own scale and streams.

    There may be more rows than scales; those rows are padding, and zeros are returned for them.
    """
    noised = [i for i, scale in enumerate(scales) if not isinstance(scale.event, Unprotected)]
    asked = [i for i, scale in enumerate(scales) if extra.shape[1] and scale.asked]
    for i in set(asked) & set(noised):
        refuse_unnoised_statistics(scales[i].extra)
    plain = set(range(len(scales))) - set(noised)
    sums = {i: clipped[i].float() for i in plain}
    sums |= _release_rows(clipped, noised, [float(scale.sum) for scale in scales], sources, "noise")
    both = [i for i in asked if i in noised]
    statistics = {i: extra[i].float() for i in plain if i in asked}
    statistics |= _release_rows(extra, both, [float(scale.extra) for scale in scales], sources, "noise-extra")
    return _stack_rows(sums, clipped), _stack_rows(statistics, extra)


def _stack_rows(rows: dict[int, Tensor], like: Tensor) -> Tensor:
    """Rows [m] at their numbers in float32 [T, m], in the shape of `like`; zeros elsewhere."""
    if len(like) == 1 and 0 in rows:
        alone = rows[0][None]
        return alone.clone() if alone.data_ptr() == like.data_ptr() else alone
    table = torch.zeros(like.shape, device=like.device)
    if rows:
        table[list(rows)] = torch.stack(list(rows.values()))
    return table


def _release_rows(
    clipped: Tensor,
    rows: Sequence[int],
    scales: Sequence[float],
    sources: Sequence[tuple[Randomness, StreamKey]],
    purpose: str,
) -> dict[int, Tensor]:
    """The releases of some rows of clipped [T, m], float32 [m] each. Recorded numbers, for tests, are added as is."""
    exact: list[int] = []
    streams: list[tuple[CipherRandomness, StreamKey]] = []
    found: dict[int, Tensor] = {}
    for i in rows:
        source, place = sources[i]
        if isinstance(source, CipherRandomness):
            exact.append(i)
            streams.append((source, (purpose, *place)))
            continue
        noise = source.normal((purpose, *place), clipped.shape[1]).to(clipped.device, torch.float64)
        found[i] = (clipped[i].double() + noise * scales[i]).float()
    if exact:
        chosen = clipped if exact == list(range(len(clipped))) else clipped[exact]
        releases = release_rows_on_grid(chosen, [scales[i] for i in exact], streams)
        found |= {i: release.floats for i, release in zip(exact, releases, strict=True)}
    return found
