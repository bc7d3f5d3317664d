"""Tests of the contract of a clipping rule, to run on your own rule from your own tests.

    from fulcrum.testing import check_rule
    def test_my_rule():
        check_rule(MY_RULE)

Each check raises AssertionError with a message that says which property is violated. Rules
marked not sound are only checked for properties that do not concern privacy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from fulcrum.clipping.party_state import complete_party_state
from fulcrum.clipping.rule import ClipRule, ModelFacts, gradient_multiplier
from fulcrum.errors import ConfigError
from fulcrum.privacy.events import Gaussian, Unprotected
from fulcrum.privacy.mechanism import compute_charged_scale, release_with_noise
from fulcrum.rng import StreamKey
from fulcrum.settings.schema import Clip
from fulcrum.training.clipped_sum import Contribution, compute_contribution
from fulcrum.types import Bounds, Released, RuleState, Stats

TEST_MODELS = (
    ModelFacts(dim=12, tensors=(8, 4)),
    ModelFacts(dim=12, tensors=(8, 4), groups=(0, 1)),
    ModelFacts(dim=1, tensors=(1,)),  # a model with one 0-d parameter
)
TEST_ROUNDS = 10
TEST_RATE, TEST_SIGMA, TEST_BATCH_SIZE = 0.1, 1.3, 20.0
ROUNDING_TOLERANCE = 1 + 1e-4
"""Factor on bounds, for rounding."""


def check_rule(rule: ClipRule, settings: Clip | None = None) -> None:
    """Run every check on a rule; raises AssertionError at the first violated property.

    settings: the rule's settings, where the defaults are not enough. The suite checks flat and layer-wise
    clipping by itself, whatever settings.groups says.
    """
    settings = settings or Clip(rule=rule.name)
    for check in RULE_CHECKS:
        for shape in TEST_MODELS:
            check(rule, settings, shape)


def check_state(rule: ClipRule, settings: Clip, shape: ModelFacts) -> None:
    """The state is named tensors whose shapes and types never change: it is checkpointed and stacked."""
    states = list(_make_reachable_states(rule, settings, shape))
    for state in states:
        assert "C" in state, f"{rule.name}: the state has no C"
        for name, value in state.items():
            assert isinstance(value, torch.Tensor), f"{rule.name}: {name} is a {type(value).__name__}, not a tensor"
            first = states[0][name]
            assert (value.shape, value.dtype) == (first.shape, first.dtype), f"{rule.name}: the shape of {name} changes"
        assert state["C"].dim() == 1, f"{rule.name}: C is not a vector with an entry for each group"
        assert bool((state["C"] > 0).all()), f"{rule.name}: C is not above 0"


def check_output_shapes(rule: ClipRule, settings: Clip, shape: ModelFacts) -> None:
    """Factors are [B, G], extra [B, J] with the same J for every B, factors finite and not negative."""
    width = None
    for state in _make_reachable_states(rule, settings, shape):
        for gradients in _make_batches(shape):
            stats = _compute_finite_stats(rule, state, shape, gradients)
            factors, extra, _ = rule.clip(stats, state)
            rows = len(gradients)
            assert factors.shape == stats.norms.shape, f"{rule.name}: factors are {tuple(factors.shape)}, not [B, G]"
            assert extra.shape[0] == rows, f"{rule.name}: extra has {extra.shape[0]} rows for {rows} units"
            assert width in (None, extra.shape[1]), f"{rule.name}: the number of extra statistics changes"
            width = extra.shape[1]
            for name, found in (
                ("factors", factors),
                ("factors of the second sum", _compute_second_factors(rule, stats, state)),
            ):
                assert found.shape == stats.norms.shape, f"{rule.name}: {name} are {tuple(found.shape)}, not [B, G]"
                assert bool(torch.isfinite(found).all()), f"{rule.name}: {name} are not finite"
                assert bool((found >= 0).all()), f"{rule.name}: {name} are negative"


def check_sensitivity(rule: ClipRule, settings: Clip, shape: ModelFacts) -> None:
    """Removing any one unit changes the sums by no more than `bounds`."""
    if not (rule.sound and rule.private):
        return
    for state in _make_reachable_states(rule, settings, shape):
        bounds = rule.bounds(state)
        reach = float(torch.linalg.vector_norm(bounds.C))
        for gradients in _make_batches(shape):
            stats = _compute_finite_stats(rule, state, shape, gradients)
            sizes, rows = _compute_unit_norms(rule, stats, state)
            for i in range(len(gradients)):
                assert float(sizes[i]) <= reach * ROUNDING_TOLERANCE, (
                    f"{rule.name}: a unit contributes {float(sizes[i]):.6g}, bounds say {reach:.6g}"
                )
                assert float(rows[i]) <= bounds.extra * ROUNDING_TOLERANCE, (
                    f"{rule.name}: a unit's extra statistics have norm {float(rows[i]):.6g}, bounds say {bounds.extra}"
                )
                with_i = _compute_contribution(rule, state, shape, gradients)
                without = _compute_contribution(rule, state, shape, torch.cat([gradients[:i], gradients[i + 1 :]]))
                moved = float(torch.linalg.vector_norm(with_i.sum - without.sum))
                assert moved <= reach * ROUNDING_TOLERANCE + 1e-6, (
                    f"{rule.name}: a neighbouring batch moves the sum by {moved:.6g}, bounds say {reach:.6g}"
                )
                moved = float(torch.linalg.vector_norm(with_i.extra - without.extra))
                assert moved <= bounds.extra * ROUNDING_TOLERANCE + 1e-6, (
                    f"{rule.name}: a neighbour moves extra by {moved:.6g}"
                )


def check_unit_independence(rule: ClipRule, settings: Clip, shape: ModelFacts) -> None:
    """The outputs for a unit depend on that unit only, whichever other units are in the batch."""
    if not (rule.sound and rule.private):
        return
    for state in _make_reachable_states(rule, settings, shape):
        for gradients in _make_batches(shape):
            stats = _compute_finite_stats(rule, state, shape, gradients)
            together = _compute_unit_outputs(rule, stats, state)
            for i in range(len(gradients)):
                for name, single in _compute_unit_outputs(rule, _select_unit(stats, i), state).items():
                    if not torch.allclose(together[name][i], single[0], rtol=1e-5):
                        words = f"the {name} of a unit depend on the other units of its batch"
                        raise AssertionError(f"{rule.name}: {words}")


def check_padding(rule: ClipRule, settings: Clip, shape: ModelFacts) -> None:
    """Padding a batch changes nothing."""
    for state in _make_reachable_states(rule, settings, shape):
        for gradients in _make_batches(shape):
            padded = torch.cat([gradients, torch.full((3, shape.dim), 7.0)])
            mask = torch.arange(len(padded)) < len(gradients)
            plain = _compute_contribution(rule, state, shape, gradients)
            masked = _compute_contribution(rule, state, shape, padded, mask)
            pairs = {"sum": (masked.sum, plain.sum), "extra": (masked.extra, plain.extra)}
            pairs |= {name: (masked.state[name], plain.state[name]) for name in state}
            for name, (found, wanted) in pairs.items():
                torch.testing.assert_close(found, wanted, msg=f"{rule.name}: padding changes the {name}")


def check_sgd_limit(rule: ClipRule, settings: Clip, shape: ModelFacts) -> None:
    """With a C that clips nothing the sum is the plain sum; with a small C it is not. C is kept constant.

    Without clip.step, a first step that a rehearsal chose: it limits C.
    """
    if rule.bounds(rule.init(settings, shape)).C.isinf().all():
        return
    gradients = torch.randn(6, shape.dim, generator=torch.Generator().manual_seed(1))
    still = dataclasses.replace(settings, eta_C=0.0, step=0.0)
    loose = _compute_contribution(
        rule, rule.init(dataclasses.replace(still, C0=1e3, C_max=1e6), shape), shape, gradients
    )
    tight = _compute_contribution(rule, rule.init(dataclasses.replace(still, C0=1e-3), shape), shape, gradients)
    wanted = gradients.sum(dim=0)
    scale = _to_model_coordinates(rule, loose)
    if not rule.normalises:
        torch.testing.assert_close(
            scale, wanted, rtol=1e-4, atol=1e-5, msg=f"{rule.name}: with a huge C the sum is not the plain sum"
        )
    assert not torch.allclose(_to_model_coordinates(rule, tight), wanted, rtol=1e-2), (
        f"{rule.name}: a tiny C does not clip"
    )


def check_release_events(rule: ClipRule, settings: Clip, shape: ModelFacts) -> None:
    """The privacy event matches the release: the noise, in units of the bounds, has the event's sigma.

    Checked on an empty batch, with a generator that returns 1: the output is the noise's scale.
    """
    state = rule.init(settings, shape)
    given = _compute_contribution(rule, state, shape, torch.zeros((0, shape.dim)))
    if not rule.private:
        event = compute_charged_scale(rule, given.bounds, TEST_RATE, TEST_SIGMA, TEST_BATCH_SIZE).event
        assert event == Unprotected(), f"{rule.name}: is not private but claims {event}"
        return
    share = rule.share(TEST_SIGMA, TEST_BATCH_SIZE)
    assert 0 <= share < 1, f"{rule.name}: share is {share}, not a part of the precision"
    assert (share > 0) == (given.extra.numel() > 0), f"{rule.name}: a share of {share} for {given.extra.numel()} extra"
    for asked, sigma in ((True, TEST_SIGMA), (False, gradient_multiplier(rule.share, TEST_SIGMA, TEST_BATCH_SIZE))):
        event = Gaussian(TEST_RATE, sigma)
        scale = compute_charged_scale(rule, given.bounds, TEST_RATE, TEST_SIGMA, TEST_BATCH_SIZE, asked)
        assert scale.event == event, f"{rule.name}: releases {scale.event}, not {event}"
        noisy, noisy_extra = release_with_noise(given.sum, given.extra, scale, _ConstantRandomness(), (0, 0, 0))
        precision = _measure_noise_precision(given.bounds, noisy - given.sum, noisy_extra - given.extra, asked)
        assert abs(precision * sigma**2 - 1) < 1e-4, (
            f"{rule.name}: the noise released has multiplier {precision**-0.5:.6g}, the event says {sigma:.6g}"
        )


def check_soundness(rule: ClipRule, settings: Clip, shape: ModelFacts) -> None:
    """C is a function of releases only: different private batches with the same releases give the same states.

    The histories run one after the other, so that hidden state outside the rule's state is also detected.
    """
    if not rule.sound:
        return
    for one, two in zip(_run_history(rule, settings, shape, 0), _run_history(rule, settings, shape, 2), strict=True):
        for name in one:
            if not torch.equal(one[name], two[name]):
                raise AssertionError(f"{rule.name}: {name} depends on the private batch, not on releases alone")


def check_moves(rule: ClipRule, settings: Clip, shape: ModelFacts) -> None:
    """A party elsewhere that receives only what `moves` names clips as the rule does with its whole state."""
    if not (rule.sound and rule.private) or rule.where == "client":
        return
    start, *_, state = _make_reachable_states(rule, settings, shape)
    moved = {name: state[name] for name in rule.moves}
    assert all(value.is_floating_point() for value in moved.values()), f"{rule.name}: only numbers may move"
    own = complete_party_state(rule, start, moved, TEST_ROUNDS, TEST_ROUNDS, shape.dim)
    for gradients in _make_batches(shape):
        whole, party = (_compute_contribution(rule, each, shape, gradients) for each in (state, own))
        pairs = {"sum": (party.sum, whole.sum), "extra": (party.extra, whole.extra)}
        pairs["bounds"] = (party.bounds.C, whole.bounds.C)
        for name, (found, wanted) in pairs.items():
            assert torch.allclose(found, wanted, rtol=1e-6, equal_nan=True), (
                f"{rule.name}: the {name} needs more of the state than `moves` names, {rule.moves}"
            )


def check_stacking(rule: ClipRule, settings: Clip, shape: ModelFacts) -> None:
    """Two stacked clients give the same results as each alone: no function uses Python's `if` on values."""
    state = rule.init(settings, shape)
    twice = {name: torch.stack([value, value]) for name, value in state.items()}
    twice["C"] = torch.stack([state["C"], 2 * state["C"]])
    first, second = ({name: value[i] for name, value in twice.items()} for i in (0, 1))
    generator = torch.Generator().manual_seed(4)
    gradients = torch.randn(5, shape.dim, generator=generator)
    given = [_compute_contribution(rule, each, shape, gradients) for each in (first, second)]
    stats = [each.stats for each in given]
    released = _make_random_release(shape, len(given[0].extra), 1, generator)
    fields = {
        name: torch.stack([getattr(each, name) for each in stats])
        for name in ("norms", "mask", "dots", "losses", "probes")
        if getattr(stats[0], name) is not None
    }

    def clip(fields: dict[str, Any], state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
        return rule.clip(dataclasses.replace(stats[0], **fields), state)

    try:
        factors, extra, after = torch.func.vmap(clip)(fields, twice)
        moved = torch.func.vmap(lambda state: rule.adapt(state, released))(twice)
    except RuntimeError as error:
        raise AssertionError(f"{rule.name}: cannot be stacked: {error}") from error
    for i, (each, own) in enumerate(zip((first, second), stats, strict=True)):
        wanted = (*rule.clip(own, each)[:2], rule.clip(own, each)[2]["C"], rule.adapt(each, released)["C"])
        found = (factors[i], extra[i], after["C"][i], moved["C"][i])
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, msg=f"{rule.name}: stacked clients differ from single ones")


RULE_CHECKS = (
    check_state,
    check_output_shapes,
    check_sensitivity,
    check_unit_independence,
    check_padding,
    check_sgd_limit,
    check_release_events,
    check_soundness,
    check_moves,
    check_stacking,
)


def refuse_broken_rule(rule: ClipRule, settings: Clip) -> None:
    """Raise ConfigError where a rule that calls itself sound looks at other units or at private values.

    Bounds are enforced for each unit alone (`privacy.bounds`): no clamp helps where one unit changes the factors of all
    others, or moves C. For rules that are not built in, before they see private data.
    """
    try:
        for check in (check_unit_independence, check_soundness):
            for shape in TEST_MODELS:
                check(rule, settings, shape)
    except AssertionError as problem:
        raise ConfigError(
            f"clip.rule: {problem}, so no epsilon holds; correct the rule (fulcrum.testing.check_rule), or mark it "
            "sound = False and use it in simulations on public data."
        ) from problem


# --- inputs -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _ConstantRandomness:
    """A generator that always returns 1, so that the noise equals its scale."""

    mode: str = "recorded"

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.float64)

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        return torch.ones(count)


def _make_batches(shape: ModelFacts) -> Iterator[torch.Tensor]:
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


def _make_reachable_states(rule: ClipRule, settings: Clip, shape: ModelFacts) -> Iterator[RuleState]:
    """The initial state, and the states after some rounds of releases."""
    state = rule.init(settings, shape)
    yield state
    generator = torch.Generator().manual_seed(2)
    width = len(_compute_contribution(rule, state, shape, torch.zeros((0, shape.dim))).extra)
    for t in range(TEST_ROUNDS):
        state = rule.adapt(state, _make_random_release(shape, width, t, generator))
    yield state


def _run_history(rule: ClipRule, settings: Clip, shape: ModelFacts, size: int) -> list[RuleState]:
    """The states and the applied updates over some rounds; releases do not depend on the batch's size."""
    batch = torch.randn(5, shape.dim, generator=torch.Generator().manual_seed(size)) * 10.0**size
    state = rule.init(settings, shape)
    generator = torch.Generator().manual_seed(3)
    states: list[RuleState] = []
    for t in range(TEST_ROUNDS):
        given = _compute_contribution(rule, state, shape, batch)
        released = _make_random_release(shape, len(given.extra), t, generator)
        applied = rule.apply(given.state, released)
        assert applied.shape == (shape.dim,), f"{rule.name}: apply gives {tuple(applied.shape)}, not [d]"
        state = rule.adapt(given.state, released)
        states.append({**state, "what is applied": applied})
    return states


def _make_random_release(shape: ModelFacts, width: int, t: int, generator: torch.Generator) -> Released:
    aggregate = torch.randn(shape.dim, generator=generator) + 0.5
    extra = torch.randn(width, generator=generator)
    noise, moved = TEST_SIGMA / TEST_BATCH_SIZE, 0.7 * aggregate
    return Released(aggregate, extra, 0.5, 1.0, t, TEST_ROUNDS, asked=1.0, noise=noise, moved=moved)


def _coordinate_groups(shape: ModelFacts) -> torch.Tensor:
    return torch.repeat_interleave(torch.tensor(shape.groups or (0,) * len(shape.tensors)), torch.tensor(shape.tensors))


def _compute_contribution(
    rule: ClipRule, state: RuleState, shape: ModelFacts, gradients: torch.Tensor, mask: torch.Tensor | None = None
) -> Contribution:
    view = rule.view(state, 0, TEST_ROUNDS)
    losses = torch.nan_to_num(gradients).abs().clamp_max(10.0).mean(dim=1)
    groups, probes = _coordinate_groups(shape), None
    if view.probes is not None:  # any numbers will do, and some that are none
        probes = torch.stack([(1 + i) * gradients[:, 0] for i in range(len(view.probes))], dim=1)
    return compute_contribution(
        rule, view, state, gradients, losses, groups, TEST_SIGMA, TEST_BATCH_SIZE, mask, probes=probes
    )


def _compute_finite_stats(rule: ClipRule, state: RuleState, shape: ModelFacts, gradients: torch.Tensor) -> Stats:
    clean = torch.where(torch.isfinite(gradients).all(dim=1, keepdim=True), gradients, torch.zeros(()))
    return _compute_contribution(rule, state, shape, clean).stats


def _select_unit(stats: Stats, i: int) -> Stats:
    """The statistics of one unit."""
    named = ((name, getattr(stats, name)) for name in ("norms", "mask", "dots", "losses", "probes"))
    return dataclasses.replace(stats, **{name: value[i : i + 1] for name, value in named if value is not None})


def _compute_second_factors(rule: ClipRule, stats: Stats, state: RuleState) -> torch.Tensor:
    """Factors of the rule's second sum; zero if the rule has none."""
    return torch.zeros_like(stats.norms) if rule.second is None else rule.second(stats, state)


def _compute_unit_outputs(rule: ClipRule, stats: Stats, state: RuleState) -> dict[str, torch.Tensor]:
    """The rule's outputs for each unit, one row per unit."""
    factors, extra, _ = rule.clip(stats, state)
    return {
        "factors": factors,
        "extra statistics": extra,
        "factors of the second sum": _compute_second_factors(rule, stats, state),
    }


def _compute_unit_norms(rule: ClipRule, stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms [B] of what each unit adds to the sum and, second sum included, to the extra statistics."""
    factors, extra, _ = rule.clip(stats, state)
    second = _compute_second_factors(rule, stats, state) * stats.norms
    both = torch.cat([extra, second], dim=1)
    return torch.linalg.vector_norm(stats.norms * factors, dim=1), torch.linalg.vector_norm(both, dim=1)


def _measure_noise_precision(bounds: Bounds, on_sum: torch.Tensor, on_extra: torch.Tensor, asked: bool) -> float:
    """1 / multiplier^2 of noise with this scale, in units of what one unit can change."""
    found = (float(torch.linalg.vector_norm(bounds.C)) / float(on_sum.abs().min())) ** 2
    if on_extra.numel() and asked:
        found += (float(bounds.extra) / max(float(on_extra.abs().min()), 1e-30)) ** 2
    return found


def _to_model_coordinates(rule: ClipRule, given: Contribution) -> torch.Tensor:
    """The clipped sum in the model's coordinates."""
    view = rule.view(given.state, 0, TEST_ROUNDS)
    return view.restore_gradient(given.sum.clone(), 1.0)
