"""Neighbour replay, hostile records: one step with a record that was made to break a bound, and without it.

The records are those on which engines went wrong before: products that cancel over the positions of a convolution, so
that the norm of a gradient is rounding alone; numbers near the ends of float32; a record that is not a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.clipping import find_rule
from fulcrum.engines import choose_engine
from fulcrum.engines.neighbours import FAST_MARGIN, STEP_SUMS, build_replay_problem, replay_neighbours
from fulcrum.settings.schema import Settings
from fulcrum.training.problem import TrainingProblem

NAME = "neighbour replay"
CHANNELS, POSITIONS, CLASSES = 24, 9, 3
SPREADS = (1e-3, 1e-4, 3e-5, 1e-5, 1e-4, 3e-5, 1e-5)
SCALES = (168.0, 3.6e4)


def make_network() -> nn.Module:
    """A convolution with few positions and many outputs, whose norms come from Gram matrices, and a linear layer."""
    return nn.Sequential(nn.Conv2d(1, CHANNELS, 3, stride=2), nn.Flatten(), nn.Linear(CHANNELS * POSITIONS, CLASSES))


def make_cancelling_weights(problem: TrainingProblem) -> Tensor:
    """Weights with which an almost constant image has slopes that cancel over the positions of the convolution."""
    filters, bias, _, last = problem.layout.unflatten(torch.zeros(problem.layout.dim)).values()
    linear = torch.randn(CLASSES, CHANNELS, POSITIONS, generator=torch.Generator().manual_seed(0))
    linear = linear - linear.mean(dim=2, keepdim=True)
    return torch.cat([filters.flatten(), bias, linear.flatten(), last])


def list_hostile_records(generator: torch.Generator) -> Iterator[tuple[str, Tensor, bool]]:
    """(what it is, record [1, 7, 7], whether the weights cancel)."""
    for scale in SCALES:
        for spread in SPREADS:
            yield "products that cancel", scale * (1 + spread * torch.randn(1, 7, 7, generator=generator)), True
    for scale in (1.0, 1e6, 3e38):
        yield (
            f"features of size {scale:g}",
            (scale * torch.randn(1, 7, 7, generator=generator)).clamp(-3e38, 3e38),
            False,
        )
    yield "features that are no numbers", torch.full((1, 7, 7), torch.nan), False


def read_hostile_records(settings: Settings, arithmetics: tuple[str, ...] = ("proven", "fast")) -> Iterator[Reading]:
    """Whether hostile records stay within the bound, with the engine and the rule of these settings."""
    rule = find_rule(settings.clip.rule)
    engine = choose_engine(settings.run.engine, _stand_in(rule.name))
    if engine not in STEP_SUMS or not rule.private or settings.privacy.unit == "client":
        return
    precision = settings.run.precision
    for arithmetic in arithmetics:
        limit = 1.0 if arithmetic == "proven" else 1.0 + FAST_MARGIN[precision]
        worst, which = 0.0, ""
        generator = torch.Generator().manual_seed(1)
        for what, record, cancels in list_hostile_records(generator):
            ratio = _replay(settings, rule.name, engine, record, cancels, arithmetic == "proven")
            if ratio > worst or ratio != ratio:
                worst, which = (float("inf") if ratio != ratio else ratio), what
        yield contradict(
            NAME,
            f"hostile records, {arithmetic} arithmetic",
            worst > limit,
            f"a record with {which} moves a step's sum by {worst:.4g} times its bound (engine {engine})",
        )


def _stand_in(rule: str) -> TrainingProblem:
    """A problem that says which engine `auto` is."""
    return build_replay_problem(torch.zeros(CLASSES, 1, 7, 7), torch.arange(CLASSES), make_network(), rule)


def _replay(settings: Settings, rule: str, engine: str, record: Tensor, cancels: bool, proven: bool) -> float:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 1, 7, 7, generator=generator)
    x[0] = record.nan_to_num(0.0)
    problem = build_replay_problem(
        x,
        torch.arange(8) % CLASSES,
        make_network(),
        rule,
        layers=settings.clip.groups == "layer",
        proven=proven,
        precision=settings.run.precision,
    )
    if bool(record.isnan().any()):  # a data set refuses it; an overflow on the way to an engine does not
        records = problem.dataset.records
        spoiled = records.x.clone()  # type: ignore[union-attr]
        spoiled[0] = torch.nan
        problem = dataclasses.replace(problem, dataset=problem.dataset.with_changes(x=spoiled))
    state = problem.rule.init(dataclasses.replace(settings.clip, C0=0.1), problem.shape)
    theta = make_cancelling_weights(problem) if cancels else None
    return replay_neighbours(problem, engine, state, torch.arange(8), 0, theta=theta).ratio
