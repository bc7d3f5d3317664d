"""Searches for a record that moves a step's sum further than is charged: moved / claimed above 1.

    python benchmarks/adversarial_search.py --tries 2000 --device cpu --seed 0 --out results/guarantee

Every try replays one step with a target and without it (`fulcrum.engines.neighbours`): a model, a batch, a rule and its
settings, weights and a target record, in one cell (engine, precision, arithmetic, unit). Half of the tries mutate the
worst case of their cell so far. Every eighth climbs by autograd first: to a record and weights whose products cancel as
much as possible in the gradient of a convolution (|G| small beside A = sum_t |a_t| |g_t|), which is where rounding is
worst. Exits with 1 if a cell of `proven` is above 1, or one of `fast` above 1 + its stated margin.

Needs torch and numpy only; on a GPU too.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from fulcrum.clipping import RULES  # noqa: E402
from fulcrum.engines.neighbours import FAST_MARGIN, build_replay_problem, replay_neighbours  # noqa: E402
from fulcrum.gradients import ghost  # noqa: E402
from fulcrum.models.layout import ParameterLayout  # noqa: E402
from fulcrum.settings.schema import Clip  # noqa: E402

SOUND = tuple(name for name, rule in RULES.items() if rule.sound and rule.private)
CLASSES, SIDE = 3, 7
BATCHES = (1, 2, 5, 16, 64, 300, 1000)
RECORDS = (
    "normal",
    "constant",
    "almost constant",
    "one coordinate",
    "zero",
    "sparse",
    "opposite halves",
    "mixed scales",
)
OTHERS = ("normal", "the target", "minus the target", "scaled targets", "zero")
WEIGHTS = ("usual", "tiny", "large", "cancelling", "zero")


# --- cells and cases ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Where the search looks: an engine in a precision and arithmetic, and what a unit is."""

    engine: str
    precision: str
    arithmetic: str
    unit: str = "example"

    @property
    def limit(self) -> float:
        """The largest moved / claimed that is stated for it."""
        return 1.0 if self.arithmetic == "proven" else 1.0 + FAST_MARGIN[self.precision]

    @property
    def name(self) -> str:
        return f"{self.engine} {self.precision} {self.arithmetic} {self.unit}"


CELLS = tuple(
    Cell(engine, precision, arithmetic, unit)
    for arithmetic in ("proven", "fast")
    for engine, precisions, units in (
        ("reference", ("float32",), ("example", "person")),
        ("parallel", ("float32",), ("example", "person")),
        ("stacked", ("float32", "tf32", "bf16"), ("example",)),
    )
    for precision in precisions
    for unit in units
)


@dataclass(frozen=True)
class Case:
    """One try. Scales are powers of ten; `seed` makes all numbers that are not named."""

    model: str
    rule: str
    layers: bool
    C0: float
    stability: float
    batch: int
    record: str
    scale: float
    spread: float
    others: str
    others_scale: float
    weights: str
    label: int
    ghost: bool
    climb: int
    seed: int


MODELS = ("linear", "mlp", "convolution", "network")


def draw_case(generator: torch.Generator) -> Case:
    """A case drawn at random."""

    def pick(values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    usual = bool(torch.rand((), generator=generator) < 0.5)
    return Case(
        model=pick(MODELS),
        rule=pick(SOUND),
        layers=pick((False, True)),
        C0=between(-3, 1) if usual else between(-12, 12),
        stability=between(-9, 6),
        batch=pick(BATCHES),
        record=pick(RECORDS),
        scale=between(-2, 6) if usual else between(-30, 30),
        spread=between(-7, 0),
        others=pick(OTHERS),
        others_scale=0.0 if usual else between(-6, 6),
        weights=pick(WEIGHTS),
        label=pick(range(CLASSES)),
        ghost=pick((True, True, False)),
        climb=0,
        seed=int(torch.randint(2**31, (), generator=generator)),
    )


def mutate_case(case: Case, generator: torch.Generator) -> Case:
    """A case next to another: one or two fields drawn again, scales moved a little."""
    fresh = draw_case(generator)
    names = [field.name for field in dataclasses.fields(Case)]
    chosen = {names[int(i)] for i in torch.randint(len(names), (2,), generator=generator)}
    changed = {name: getattr(fresh, name) for name in chosen if name != "climb"}
    nudged = {
        name: getattr(case, name) + 0.3 * float(torch.randn((), generator=generator))
        for name in ("scale", "spread", "C0")
    }
    found = dataclasses.replace(case, **(nudged | changed))
    return dataclasses.replace(found, C0=min(12.0, max(-12.0, found.C0)))


def build_network(kind: str) -> nn.Module:
    """Models whose gradients take every path: one position, few positions (ghost), many positions (materialised)."""
    if kind == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(2 * SIDE**2, CLASSES))
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(2 * SIDE**2, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    if kind == "convolution":
        return nn.Sequential(nn.Conv2d(2, 24, 3, stride=2), nn.Flatten(), nn.Linear(24 * 9, CLASSES))
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 20, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(80, CLASSES),
    )


def make_record(case: Case, generator: torch.Generator) -> Tensor:
    """The target [2, SIDE, SIDE], float32."""
    noise = torch.randn(2, SIDE, SIDE, generator=generator).double()
    size, spread = 10.0**case.scale, 10.0**case.spread
    half = torch.ones(2, SIDE, SIDE).double()
    half[:, :, SIDE // 2 :] = -1
    made = {
        "normal": noise,
        "constant": torch.ones_like(noise),
        "almost constant": 1 + spread * noise,
        "one coordinate": (torch.arange(noise.numel()) == case.seed % noise.numel()).double().view(noise.shape),
        "zero": torch.zeros_like(noise),
        "sparse": noise * (noise > 1.5),
        "opposite halves": half * (1 + spread * noise),
        "mixed scales": noise * 10.0 ** (6 * torch.rand(noise.shape, generator=generator).double() - 3),
    }[case.record]
    return (made * size).clamp(-3e38, 3e38).float()


def make_batch(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Records [B, 2, SIDE, SIDE], the target first, and labels [B]."""
    target = make_record(case, generator)
    noise = torch.randn(case.batch, 2, SIDE, SIDE, generator=generator)
    scales = 1 + 1e-3 * torch.rand(case.batch, 1, 1, 1, generator=generator)
    x = {
        "normal": noise,
        "the target": target.expand_as(noise).clone(),
        "minus the target": -target.expand_as(noise),
        "scaled targets": target * scales,
        "zero": torch.zeros_like(noise),
    }[case.others] * 10.0**case.others_scale
    x = x.clamp(-3e38, 3e38)
    x[0] = target
    y = torch.full((case.batch,), case.label)
    if case.others == "normal":
        y = torch.randint(CLASSES, (case.batch,), generator=generator)
        y[0] = case.label
    return x, y


def make_weights(case: Case, layout: ParameterLayout, generator: torch.Generator) -> Tensor:
    """Weights [d]; "cancelling": filters of zeros, and a last layer whose slopes cancel over positions."""
    theta = 0.3 * torch.randn(layout.dim, generator=generator)
    if case.weights == "cancelling" and case.model == "convolution":
        blocks = [torch.zeros(size) for size in layout.sizes]
        last = torch.randn(CLASSES, 24, 9, generator=generator)
        blocks[2] = (last - last.mean(dim=2, keepdim=True)).flatten()
        return torch.cat(blocks)
    return theta * {"usual": 1.0, "tiny": 1e-10, "large": 30.0, "cancelling": 1e-3, "zero": 0.0}[case.weights]


def climb_to_cancellation(case: Case, x: Tensor, y: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient ascent on log A - log |G| of the convolution, in the target and in the weights, in float64."""
    model = build_network("convolution")
    layout = ParameterLayout.of(model)
    record = x[0].double().clone().requires_grad_()
    weights = theta.double().clone().requires_grad_()
    if not bool(torch.isfinite(record).all()) or not bool(record.any()):
        return x, theta
    optimiser = torch.optim.Adam([record, weights], lr=0.02 * float(record.detach().abs().max().clamp(1e-3, 1e3)))
    for _ in range(case.climb):
        filters, bias, last, shift = layout.unflatten(weights).values()
        out = F.conv2d(record[None], filters, bias, stride=2)
        loss = F.cross_entropy(out.flatten(1) @ last.t() + shift, y[:1])
        (slopes,) = torch.autograd.grad(loss, out, create_graph=True)
        a, g = F.unfold(record[None], 3, stride=2)[0], slopes.flatten(2)[0]  # [k, P], [o, P]
        lengths = (torch.linalg.vector_norm(a, dim=0) * torch.linalg.vector_norm(g, dim=0)).sum()
        goal = torch.log(torch.linalg.matrix_norm(g @ a.t()) + 1e-200) - torch.log(lengths + 1e-200)
        optimiser.zero_grad()
        goal.backward()
        if not all(bool(torch.isfinite(v.grad).all()) for v in (record, weights) if v.grad is not None):
            break
        optimiser.step()
    x = x.clone()
    x[0] = record.detach().float()
    return x, weights.detach().float()


def try_case(case: Case, cell: Cell, device: torch.device) -> float:
    """moved / claimed of one case in one cell."""
    generator = torch.Generator().manual_seed(case.seed)
    x, y = make_batch(case, generator)
    model = build_network(case.model)
    theta = make_weights(case, ParameterLayout.of(model), generator)
    if case.climb:
        x, theta = climb_to_cancellation(case, x, y, theta)
    given: dict[str, Any] = {}
    slots = None
    if cell.unit == "person":
        slots = torch.arange(case.batch) % max(1, case.batch // 3)
        given = {"unit": "person", "person": slots}
    y = torch.cat([y, torch.tensor([CLASSES - 1])])  # so that all classes are there; the step leaves this record out
    x = torch.cat([x, x[:1]])
    if slots is not None:
        given["person"] = torch.cat([slots, slots[:1]])
    problem = build_replay_problem(
        x,
        y,
        model,
        case.rule,
        layers=case.layers,
        proven=cell.arithmetic == "proven",
        precision=cell.precision,
        device=device,
        **given,
    )
    settings = Clip(C0=10.0**case.C0, C_min=1e-12, C_max=1e12, stability=10.0**case.stability)
    state = {name: value.to(device) for name, value in problem.rule.init(settings, problem.shape).items()}
    kept, ghost.MAX_MATERIALISED_RATIO = ghost.MAX_MATERIALISED_RATIO, 0.0 if case.ghost else 1.5
    try:
        rows = torch.arange(case.batch)
        return replay_neighbours(problem, cell.engine, state, rows, 0, slots=slots, theta=theta.to(device)).ratio
    finally:
        ghost.MAX_MATERIALISED_RATIO = kept


# --- the search -----------------------------------------------------------------------------------


@dataclass
class Worst:
    """The worst case of a cell, and how many cases were tried in it."""

    ratio: float = 0.0
    case: Case | None = None
    tries: int = 0


def search(tries: int, device: torch.device, seed: int, cells: tuple[Cell, ...] = CELLS) -> dict[str, Worst]:
    """Tries cases in turn in every cell; the worst of each."""
    generator = torch.Generator().manual_seed(seed)
    found = {cell.name: Worst() for cell in cells}
    for number in range(tries):
        cell = cells[number % len(cells)]
        worst = found[cell.name]
        turn = number // len(cells)
        case = draw_case(generator)
        if worst.case is not None and turn % 2:
            case = mutate_case(worst.case, generator)
        if turn % 8 == 3:
            case = dataclasses.replace(case, model="convolution", climb=40, scale=min(max(case.scale, -3.0), 6.0))
        elif case.model != "convolution":
            case = dataclasses.replace(case, climb=0)
        ratio = try_case(case, cell, device)
        worst.tries += 1
        if ratio > worst.ratio or math.isnan(ratio) or worst.case is None:
            worst.ratio, worst.case = (math.inf if math.isnan(ratio) else ratio), case
    return found


def describe_machine(device: torch.device) -> str:
    """The processor, or the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def find_commit() -> str:
    """The commit of this tree, or what FULCRUM_COMMIT says where there is no git."""
    if "FULCRUM_COMMIT" in os.environ:
        return os.environ["FULCRUM_COMMIT"]
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Search, print a table, write it, and say by the exit code whether anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=1400)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for adversarial-search-DEVICE.json")
    asked = parser.parse_args()
    device, start = torch.device(asked.device), time.perf_counter()
    found = search(asked.tries, device, asked.seed)
    seconds = time.perf_counter() - start
    rows = []
    for cell in CELLS:
        worst = found[cell.name]
        rows.append(
            {
                **dataclasses.asdict(cell),
                "tries": worst.tries,
                "worst": worst.ratio,
                "stated": cell.limit,
                "held": worst.ratio <= cell.limit,
                "case": None if worst.case is None else dataclasses.asdict(worst.case),
            }
        )
        print(f"{cell.name:36} tries {worst.tries:6}  worst {worst.ratio:.9f}  stated {cell.limit:g}")
    broken = [row for row in rows if not row["held"]]
    print(f"{asked.tries} tries in {seconds:.0f} s on {describe_machine(device)}: {len(broken)} cells broken")
    if asked.out is not None:
        facts = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": find_commit(),
            "command": " ".join(sys.argv),
            "hardware": describe_machine(device),
            "torch": torch.__version__,
            "tries": asked.tries,
            "seconds": round(seconds, 1),
            "cells": rows,
        }
        asked.out.mkdir(parents=True, exist_ok=True)
        path = asked.out / f"adversarial-search-{asked.device}.json"
        path.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
