"""The GPU benchmark's work: federations on made-up images of the right shape, clocks, and counts of arithmetic."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fulcrum.clipping import find_rule
from fulcrum.data import Dataset, Partition, count_units_per_party, from_arrays, split
from fulcrum.engines import find_engine
from fulcrum.gradients.stacked.layers import StackedProgram, StackedSite
from fulcrum.models.build import build_model
from fulcrum.models.layout import ParameterLayout
from fulcrum.privacy.plan import make_plan
from fulcrum.rng import Randomness, make_randomness
from fulcrum.settings.schema import Model, Settings
from fulcrum.training.federation import Federation
from fulcrum.training.problem import TrainingProblem

SHAPES = {"mnist": (1, 28, 28), "cifar": (3, 32, 32)}
SIGMA = 2.0738
"""The paper's epsilon 1.64 at q 0.05, 200 rounds."""


def images(work: str, n: int, n_test: int = 10_000, seed: int = 0) -> Dataset:
    """Random bytes scaled as the real images are; labels that a linear model could learn a little of."""
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPES[work]

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)
        y = (x.flatten(1)[:, :10].float()).argmax(dim=1)
        return (x.float() / 255.0 - 0.5) / 0.5, y

    return from_arrays(*draw(n), *draw(n_test), name=f"made-up {work}", classes=10, public=True)


_parts: dict[tuple[int, int, str, int], tuple[Partition, Dataset]] = {}


def federation(
    dataset: Dataset,
    model: nn.Module | str,
    device: torch.device,
    rule: str = "moo",
    seed: int = 0,
    precision: str = "float32",
    engine: str = "stacked",
    parties: int = 10,
    partition: str = "dirichlet",
    randomness: Randomness | None = None,
    sigma: float | None = SIGMA,
    proven: bool = False,
    **train: Any,
) -> Federation:
    """A federation without pydantic, downloads or an accountant."""
    settings = Settings().replace(
        data={"parties": parties, "partition": partition, "min_examples": 1},
        train={"rounds": 200, "rate": 0.05, "lr": 0.5, **train},
        clip={"rule": rule},
        privacy={"sigma": sigma},
        run={"seed": seed, "evaluate_every": 10_000, "precision": precision},
    )
    if isinstance(model, str):
        model = build_model(Model(name=model), dataset.shape, dataset.classes, seed)
    model = model.to(device)
    chosen = find_rule(rule)
    key = (id(dataset), parties, partition, seed)
    if key not in _parts:
        _parts[key] = (split(dataset, settings.data, seed), dataset)
    parts = _parts[key][0]
    source = randomness or make_randomness("seeded", seed)
    problem = TrainingProblem(
        dataset,
        parts,
        model,
        ParameterLayout.of(model),
        chosen,
        source,
        device=device,
        precision=precision,
        proven=proven,
    )
    plan = make_plan(settings, parts, count_units_per_party(dataset, parts, "example"), chosen)
    return Federation(settings, problem, plan, find_engine(engine, problem))


def wide_cnn(work: str, width: int) -> nn.Module:
    """The paper's CNN with `width` times as many filters."""
    name = f"{work}-cnn"
    model = build_model(Model(name=name), SHAPES[work], 10, 0)
    assert isinstance(model, nn.Sequential)
    layers: list[nn.Module] = []
    channels = SHAPES[work][0]
    last = next(m for m in reversed(list(model)) if isinstance(m, nn.Linear))
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            geometry: Any = (layer.kernel_size, layer.stride, layer.padding)
            wide = nn.Conv2d(channels, layer.out_channels * width, *geometry)
            channels = wide.out_channels
            layers.append(wide)
        elif isinstance(layer, nn.Linear):
            outputs = layer.out_features if layer is last else layer.out_features * width
            first = not any(isinstance(m, nn.Linear) for m in layers)
            layers.append(
                nn.Linear(layer.in_features * width if first or layer is last else layer.in_features, outputs)
            )
        else:
            layers.append(layer)
    return nn.Sequential(*layers)


def flops(program: StackedProgram, private: bool) -> int:
    """Operations that one example needs: forward, backward, norms as chosen, and its part of the sum."""
    total, first = 0, True
    for site in program.steps:
        if not isinstance(site, StackedSite):
            continue
        P, k, o = site.positions, site.inputs, site.outputs
        product = 2 * P * k * o
        total += product * (2 if first else 3)  # forward, sum, and the input's gradient except for the first layer
        first = False
        if private and P > 1:
            total += 2 * P * P * (k + o) if site.ghost else 2 * o * k
    return total


class Clock:
    """Seconds of work on a device, waiting for it to finish."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def time(self, work: Callable[[], Any], repeat: int = 5, warm: int = 1) -> float:
        """The median of `repeat` timings."""
        for _ in range(warm):
            work()
        found = []
        for _ in range(repeat):
            began = self.wait()
            work()
            found.append(self.wait() - began)
        return sorted(found)[len(found) // 2]

    def memory(self) -> float:
        """Gigabytes at the peak since the last call."""
        if self.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


def ceilings(device: torch.device, clock: Clock, side: int) -> dict[str, float]:
    """TFLOP/s of a large matrix product in each precision, and TB/s of a copy (read and written)."""
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    found: dict[str, float] = {}
    from fulcrum.gradients.precision import use_matmul_precision

    for name in ("float32", "tf32", "bf16"):
        x, y = (a.bfloat16(), b.bfloat16()) if name == "bf16" else (a, b)
        with use_matmul_precision(name, device):
            found[name] = 2 * side**3 / clock.time(functools.partial(torch.mm, x, y), 10, 3) / 1e12
    big = torch.randn(side * side * 4, device=device)
    other = torch.empty_like(big)
    found["copy"] = 2 * big.numel() * 4 / clock.time(lambda: other.copy_(big), 10, 3) / 1e12
    return found


__all__ = ["SIGMA", "Clock", "ceilings", "federation", "flops", "images", "wide_cnn"]
