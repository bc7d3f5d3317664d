"""The methods of the benchmark on any model: one step each, on the same examples, from the same weights.

plain: eager PyTorch with SGD. fulcrum: the engine that a run would take on this device, one round with one local step:
clip, sum, noise, update. opacus-hooks, opacus-ghost: Opacus' two modes with its own optimiser; its data loader is left
out. Opacus is pure Python: a folder with `opacus` and `opt_einsum` on PYTHONPATH is enough (scipy and numpy are used).
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from model_works import CLASSES, VOCABULARY, ModelWork
from torch import Tensor, nn

from fulcrum.clipping import find_rule
from fulcrum.data import Partition, from_arrays
from fulcrum.engines import find_engine
from fulcrum.models.layout import ParameterLayout
from fulcrum.rng import SeededRandomness
from fulcrum.settings.schema import Clip
from fulcrum.training.problem import TrainingProblem
from fulcrum.training.server import average_replies
from fulcrum.types import Assignment, RoundRequest

LR = 1e-3
"""Small: the weights must stay where arithmetic is ordinary, however many steps are timed."""

CHECK_LR = 1e3
"""For comparisons: an update must not drown in the rounding of the weights that it is added to."""


@dataclass(frozen=True)
class Setup:
    """What a method gets: the work, where and how it computes, the clipping norm, the noise multiplier."""

    work: ModelWork
    device: torch.device
    precision: str
    clip: float = 1.0
    sigma: float = 1.0
    lr: float = LR

    def examples(self) -> tuple[Tensor, Tensor]:
        """The batch of all parties, on the CPU; party k has the k-th of equal parts."""
        return self.work.data(self.work.batch)

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """float32: full products. tf32: rounded inputs. Both for matrix products and for convolutions."""
        matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
        before = matmul.fp32_precision, conv.fp32_precision
        chosen = "tf32" if self.precision == "tf32" else "ieee"
        try:
            if self.device.type == "cuda":
                matmul.fp32_precision = conv.fp32_precision = chosen
            yield
        finally:
            matmul.fp32_precision, conv.fp32_precision = before

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


@dataclass
class Method:
    """step(t): one private or plain step of every party. update(): what the last step added to the weights, [d]."""

    step: Callable[[int], None]
    update: Callable[[], Tensor]
    notes: Callable[[], tuple[str, ...]] = tuple


# --- plain, and every method that is a loop over the parties -----------------------------------------


def _loop(setup: Setup, model: nn.Module, train: Callable[[Tensor, Tensor], None]) -> Method:
    """FedAvg by a loop over the parties; with one party and one step, plain training."""
    work = setup.work
    layout = ParameterLayout.of(model)
    x, y = (value.to(setup.device) for value in setup.examples())
    parts = list(zip(x.chunk(work.parties), y.chunk(work.parties), strict=True))
    kept = layout.flatten(model) if work.parties * work.steps > 1 else torch.empty(0)
    named = dict(model.named_parameters())
    ordered = [named[_find_name(name, named)] for name in ParameterLayout.of(work.model()).names]

    def read() -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in ordered])

    first = read() if setup.lr == CHECK_LR else torch.empty(0)  # no copy of the weights where memory is measured

    def step(t: int) -> None:
        if work.parties == work.steps == 1:
            train(*parts[0])
            return
        start, total = kept, torch.zeros_like(kept)
        for part in parts:
            layout.write(model, start)
            for _ in range(work.steps):
                train(*part)
            total += (layout.flatten(model) - start) / work.parties
        kept.add_(total)
        layout.write(model, kept)

    return Method(step, lambda: read() - first)


def make_plain(setup: Setup) -> Method:
    """No privacy: model, autograd, SGD."""
    work = setup.work
    model = work.model().to(setup.device).train()
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=setup.lr)

    def train(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad(set_to_none=True)
        with setup.autocast():
            outputs = model(x)
        (work.losses(outputs, y).sum() / len(y)).backward()
        optimiser.step()

    return _loop(setup, model, train)


# --- Fulcrum ----------------------------------------------------------------------------------------


def make_fulcrum(setup: Setup, engine: str = "auto") -> Method:
    """One round of all parties by an engine: every example sampled (rate 1), clipped, added up, noised; the update."""
    work = setup.work
    model = work.model().to(setup.device).train()
    x, y = setup.examples()
    task, classes = ("next-token", VOCABULARY) if work.next_token else ("classification", CLASSES)
    data = from_arrays(x, y, x[:1], y[:1], name=work.name, task=task, classes=classes)
    starts = torch.arange(work.parties + 1) * (work.batch // work.parties)
    problem = TrainingProblem(
        data,
        Partition(torch.arange(work.batch), starts),
        model,
        ParameterLayout.of(model),
        find_rule("fixed"),
        SeededRandomness(7),
        device=setup.device,
        precision=setup.precision,
    )
    trainer = find_engine(engine, problem)
    rule_state = problem.rule.init(Clip(C0=setup.clip), problem.shape)
    tasks = tuple(Assignment(k, 1.0, setup.sigma, work.steps, setup.lr) for k in range(work.parties))
    weights = torch.full((work.parties,), 1 / work.parties)
    state: dict[str, Tensor] = {"theta": problem.layout.flatten(model)}

    def step(t: int) -> None:
        request = RoundRequest(t, 100_000, state["theta"], tasks, (rule_state,) * work.parties)
        state["delta"] = average_replies(list(trainer.run(request)), weights)[0]
        state["theta"] = state["theta"] + state["delta"]

    return Method(step, lambda: state["delta"], lambda: tuple(getattr(trainer, "notes", ())))


# --- Opacus -----------------------------------------------------------------------------------------


def _opacus_model(setup: Setup) -> nn.Module:
    from opacus.layers import DPLSTM

    warnings.filterwarnings("ignore", message="Full backward hook is firing|Secure RNG turned off|.*backward hook")
    model = setup.work.model(lstm=DPLSTM)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in setup.work.model().named_parameters():
            named[_find_name(name, named)].copy_(values)
    return model.to(setup.device).train()


def _find_name(name: str, named: Mapping[str, nn.Parameter]) -> str:
    """The parameter's name in a model whose nn.LSTM may be Opacus' own: lstm.weight_ih_l0 is lstm.l0.ih.weight."""
    return name if name in named else re.sub(r"(weight|bias)_(ih|hh)_l(\d+)$", r"l\3.\2.\1", name)


def make_opacus_hooks(setup: Setup) -> Method:
    """Opacus' default: backward hooks that write every gradient out."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    work, model = setup.work, _opacus_model(setup)
    wrapped = GradSampleModule(model)
    optimiser = DPOptimizer(
        torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=setup.lr),
        noise_multiplier=setup.sigma,
        max_grad_norm=setup.clip,
        expected_batch_size=work.batch // work.parties,
    )

    def train(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad(set_to_none=True)
        with setup.autocast():
            outputs = wrapped(x)
        work.losses(outputs, y).mean().backward()
        optimiser.step()

    return _loop(setup, model, train)


def make_opacus_ghost(setup: Setup) -> Method:
    """Opacus' ghost clipping: norms in a first backward pass, the clipped sum in a second."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    work, model = setup.work, _opacus_model(setup)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=setup.clip, use_ghost_clipping=True)
    optimiser = DPOptimizerFastGradientClipping(
        torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=setup.lr),
        noise_multiplier=setup.sigma,
        max_grad_norm=setup.clip,
        expected_batch_size=work.batch // work.parties,
    )

    def train(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        with setup.autocast():
            outputs = wrapped(x)
        DPTensorFastGradientClipping(wrapped, optimiser, work.losses(outputs, y)).backward()
        optimiser.step()

    return _loop(setup, model, train)


METHODS: dict[str, Callable[[Setup], Method]] = {
    "plain": make_plain,
    "fulcrum": make_fulcrum,
    "opacus-hooks": make_opacus_hooks,
    "opacus-ghost": make_opacus_ghost,
}


# --- the truth ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """The update [d] of one step without noise, from float64 gradients; the clipping norm; what autograd is off by.

    error: of the same gradients by autograd at the method's own precision, example by example; relative, as the
    comparisons are. The larger one of both memory formats of images: a library multiplies in another order in each, and
    a method may take either. A method cannot be asked for less.
    """

    update: Tensor
    clip: float
    error: float


def compute_truth(setup: Setup) -> Truth:
    """Gradients of one example after the other, clipped to the median of their norms: half of them are clipped."""
    exact = _compute_gradients(setup, torch.float64)
    norms = torch.stack([row.norm() for row in exact])
    clip = float(norms.quantile(0.5))
    update = _add_clipped(setup, exact, clip)
    del exact
    formats = (torch.contiguous_format, *([] if setup.work.tokens else [torch.channels_last]))
    own = (_add_clipped(setup, _compute_gradients(setup, torch.float32, each), clip) for each in formats)
    return Truth(update, clip, max(float((found - update).norm() / update.norm()) for found in own))


def _compute_gradients(
    setup: Setup, dtype: torch.dtype, images: torch.memory_format = torch.contiguous_format
) -> list[Tensor]:
    """The gradient of each example, [d] in the order of the layout. images: memory format of inputs and kernels."""
    work = setup.work
    model = work.model().to(setup.device, dtype).to(memory_format=images).train()  # type: ignore[call-overload]
    layout = ParameterLayout.of(model)
    named = dict(model.named_parameters())
    x, y = (value.to(setup.device) for value in setup.examples())
    rows = []
    for i in range(len(y)):
        inputs = x[i : i + 1].to(dtype, memory_format=images) if x.is_floating_point() else x[i : i + 1]
        with setup.autocast() if dtype == torch.float32 else contextlib.nullcontext():
            outputs = model(inputs)
        wanted = [named[name] for name in layout.names]
        found = torch.autograd.grad(work.losses(outputs, y[i : i + 1]).sum(), wanted, materialize_grads=True)
        rows.append(torch.cat([part.reshape(-1) for part in found]))
    return rows


def _add_clipped(setup: Setup, rows: list[Tensor], clip: float) -> Tensor:
    total = torch.zeros_like(rows[0], dtype=torch.float64)
    for row in rows:
        wide = row.double()
        total += wide * min(1.0, clip / float(wide.norm()))
    return -setup.lr * total / len(rows)
