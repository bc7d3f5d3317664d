"""The contract of a clipping rule, as a suite to run on your own rule from your own tests.

    from fulcrum.testing import check_rule
    def test_my_rule():
        check_rule(MY_RULE)

Each check raises AssertionError with a sentence that says which promise was broken. Rules that are
marked not sound are only held to the promises that do not concern privacy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from fulcrum.clip.rule import ClipRule, Shape
from fulcrum.config import Clip
from fulcrum.local import Contribution, contribute
from fulcrum.noise import release, scales
from fulcrum.rng import Seeded
from fulcrum.types import Gaussian, Released, State, Stats, Unprotected

SHAPES = (
    Shape(dim=12, tensors=(8, 4)),
    Shape(dim=12, tensors=(8, 4), groups=(0, 1)),
    Shape(dim=1, tensors=(1,)),  # a model with one 0-d parameter
)
ROUNDS = 10
SIGMA = 1.3


def check_rule(rule: ClipRule, settings: Clip | None = None) -> None:
    """Run every check on a rule; raises AssertionError at the first broken promise."""
    settings = settings or Clip(rule=rule.name)
    for check in CHECKS:
        for shape in SHAPES:
            check(rule, settings, shape)


def check_shapes(rule: ClipRule, settings: Clip, shape: Shape) -> None:
    """Factors are [B, G], extra [B, J] with the same J for every B, factors finite and not negative."""
    width = None
    for state in _states(rule, settings, shape):
        for gradients in _batches(shape):
            stats = _stats(rule, state, shape, gradients)
            factors, extra, _ = rule.clip(stats, state)
            rows = len(gradients)
            assert factors.shape == stats.norms.shape, f"{rule.name}: factors are {tuple(factors.shape)}, not [B, G]"
            assert extra.shape[0] == rows, f"{rule.name}: extra has {extra.shape[0]} rows for {rows} units"
            assert width in (None, extra.shape[1]), f"{rule.name}: the number of extra statistics changes"
            width = extra.shape[1]
            assert bool(torch.isfinite(factors).all()), f"{rule.name}: factors are not finite"
            assert bool((factors >= 0).all()), f"{rule.name}: factors are negative"


def check_sensitivity(rule: ClipRule, settings: Clip, shape: Shape) -> None:
    """Taking one unit out changes the sums by no more than `bounds` says, whatever the unit is."""
    if not (rule.sound and rule.private):
        return
    for state in _states(rule, settings, shape):
        bounds = rule.bounds(state)
        reach = float(torch.linalg.vector_norm(bounds.C))
        for gradients in _batches(shape):
            clean = torch.where(torch.isfinite(gradients).all(dim=1, keepdim=True), gradients, torch.zeros(()))
            stats = _stats(rule, state, shape, clean)
            factors, extra, _ = rule.clip(stats, state)
            sizes = torch.linalg.vector_norm(stats.norms * factors, dim=1)
            for i in range(len(gradients)):
                assert float(sizes[i]) <= reach * (1 + 1e-4), (
                    f"{rule.name}: a unit contributes {float(sizes[i]):.6g}, bounds say {reach:.6g}"
                )
                row = float(torch.linalg.vector_norm(extra[i]))
                assert row <= bounds.extra * (1 + 1e-4), (
                    f"{rule.name}: a unit's extra statistics have norm {row:.6g}, bounds say {bounds.extra:.6g}"
                )
                with_i = _contribute(rule, state, shape, gradients)
                without = _contribute(rule, state, shape, torch.cat([gradients[:i], gradients[i + 1 :]]))
                moved = float(torch.linalg.vector_norm(with_i.sum - without.sum))
                assert moved <= reach * (1 + 1e-4) + 1e-6, (
                    f"{rule.name}: a neighbouring batch moves the sum by {moved:.6g}, bounds say {reach:.6g}"
                )
                moved = float(torch.linalg.vector_norm(with_i.extra - without.extra))
                assert moved <= bounds.extra * (1 + 1e-4) + 1e-6, f"{rule.name}: a neighbour moves extra by {moved:.6g}"


def check_padding(rule: ClipRule, settings: Clip, shape: Shape) -> None:
    """Padding a batch changes nothing."""
    for state in _states(rule, settings, shape):
        for gradients in _batches(shape):
            padded = torch.cat([gradients, torch.full((3, shape.dim), 7.0)])
            mask = torch.arange(len(padded)) < len(gradients)
            plain = _contribute(rule, state, shape, gradients)
            masked = _contribute(rule, state, shape, padded, mask)
            for name in ("sum", "extra"):
                torch.testing.assert_close(
                    getattr(masked, name), getattr(plain, name), msg=f"{rule.name}: padding changes the {name}"
                )


def check_sgd_limit(rule: ClipRule, settings: Clip, shape: Shape) -> None:
    """With a C that clips nothing the sum is the plain sum; with a small C it is not."""
    if rule.bounds(rule.init(settings, shape)).C.isinf().all():
        return
    gradients = torch.randn(6, shape.dim, generator=torch.Generator().manual_seed(1))
    loose = _contribute(rule, rule.init(dataclasses.replace(settings, C0=1e3, C_max=1e6), shape), shape, gradients)
    tight = _contribute(rule, rule.init(dataclasses.replace(settings, C0=1e-3), shape), shape, gradients)
    wanted = gradients.sum(dim=0)
    scale = _back(rule, loose)
    if not rule.normalises:
        torch.testing.assert_close(
            scale, wanted, rtol=1e-4, atol=1e-5, msg=f"{rule.name}: with a huge C the sum is not the plain sum"
        )
    assert not torch.allclose(_back(rule, tight), wanted, rtol=1e-2), f"{rule.name}: a tiny C does not clip"


def check_events(rule: ClipRule, settings: Clip, shape: Shape) -> None:
    """The event says what was released: the noise, seen in units of the bounds, has the event's sigma."""
    state = rule.init(settings, shape)
    given = _contribute(rule, state, shape, torch.zeros((0, shape.dim)))
    scale = scales(rule, given.bounds, 0.1, SIGMA, 20.0)
    if not rule.private:
        assert scale.event == Unprotected(), f"{rule.name}: is not private but claims {scale.event}"
        return
    assert scale.event == Gaussian(0.1, SIGMA), f"{rule.name}: releases {scale.event}"
    precision = (float(torch.linalg.vector_norm(given.bounds.C)) / float(scale.sum)) ** 2
    if given.extra.numel():
        precision += (given.bounds.extra / scale.extra) ** 2
    assert abs(precision * SIGMA**2 - 1) < 1e-4, f"{rule.name}: the noise does not add up to sigma"
    noisy, noisy_extra = release(given.sum, given.extra, scale, Seeded(1), (0, 0, 0))
    assert bool((noisy != given.sum).all()), f"{rule.name}: an empty batch was released without noise"
    assert given.extra.numel() == 0 or bool((noisy_extra != given.extra).all()), f"{rule.name}: extra without noise"


def check_sound(rule: ClipRule, settings: Clip, shape: Shape) -> None:
    """C is a function of releases alone: another private batch with the same releases leaves the same state."""
    if not rule.sound:
        return
    calm, wild = (torch.randn(5, shape.dim, generator=torch.Generator().manual_seed(s)) * 10.0**s for s in (0, 2))
    one = two = rule.init(settings, shape)
    generator = torch.Generator().manual_seed(3)
    for t in range(ROUNDS):
        first, second = _contribute(rule, one, shape, calm), _contribute(rule, two, shape, wild)
        released = _released(shape, len(first.extra), t, generator)
        one, two = rule.adapt(first.state, released), rule.adapt(second.state, released)
        for name in one:
            assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(two[name])), (
                f"{rule.name}: {name} depends on the private batch, not on releases alone"
            )


CHECKS = (check_shapes, check_sensitivity, check_padding, check_sgd_limit, check_events, check_sound)


# --- inputs -------------------------------------------------------------------------------------


def _batches(shape: Shape) -> Iterator[torch.Tensor]:
    """Batches with ordinary, zero, NaN, infinite, huge and tiny gradients, and an empty one."""
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.randn(5, shape.dim, generator=generator)
    strange = ordinary.clone()
    strange[0] = 0.0
    strange[1, 0] = torch.nan
    strange[2, 0] = torch.inf
    strange[3] *= 1e20
    strange[4] *= 1e-20
    yield ordinary
    yield ordinary * 100
    yield strange
    yield torch.zeros((0, shape.dim))


def _states(rule: ClipRule, settings: Clip, shape: Shape) -> Iterator[State]:
    """The state at the start, and after some rounds of releases."""
    state = rule.init(settings, shape)
    yield state
    generator = torch.Generator().manual_seed(2)
    width = len(_contribute(rule, state, shape, torch.zeros((0, shape.dim))).extra)
    for t in range(ROUNDS):
        state = rule.adapt(state, _released(shape, width, t, generator))
    yield state


def _released(shape: Shape, width: int, t: int, generator: torch.Generator) -> Released:
    aggregate = torch.randn(shape.dim, generator=generator) + 0.5
    return Released(aggregate, torch.randn(width, generator=generator), 0.5, 1.0, t, ROUNDS)


def _groups(shape: Shape) -> torch.Tensor:
    return torch.repeat_interleave(torch.tensor(shape.groups or (0,) * len(shape.tensors)), torch.tensor(shape.tensors))


def _contribute(
    rule: ClipRule, state: State, shape: Shape, gradients: torch.Tensor, mask: torch.Tensor | None = None
) -> Contribution:
    view = rule.view(state, 0, ROUNDS)
    losses = torch.nan_to_num(gradients).abs().clamp_max(10.0).mean(dim=1)
    return contribute(rule, view, state, gradients, losses, _groups(shape), SIGMA, 20.0, mask)


def _stats(rule: ClipRule, state: State, shape: Shape, gradients: torch.Tensor) -> Stats:
    clean = torch.where(torch.isfinite(gradients).all(dim=1, keepdim=True), gradients, torch.zeros(()))
    return _contribute(rule, state, shape, clean).stats


def _back(rule: ClipRule, given: Contribution) -> torch.Tensor:
    """The clipped sum in the model's own coordinates."""
    view = rule.view(given.state, 0, ROUNDS)
    return given.sum if view.transform is None else view.transform.inverse(given.sum)
