"""Opacus on the same work, and what other systems do not do.

Needs opacus (`make bench` puts version 1.6.0 into .venv-bench). The privacy engine's data loader is left out, so that
every method gets the same Poisson samples; what is timed is Opacus' own gradient samples, clipping, noise and step.
"""

from __future__ import annotations

import importlib.util
import warnings

import torch
from cpu_work import LR, C, Round, Work, loop
from torch import Tensor, nn

from fulcrum.models.build import build_model
from fulcrum.settings import schema as config
from fulcrum.training.problem import TrainingProblem

NOTES = {
    "flower": "Flower's simulation starts clients through Ray and clips whole updates: no per-example privacy.",
    "pfl": "pfl-research protects users, with central noise on whole updates: no per-example privacy.",
}
"""Systems that are not in the table, and why."""


def installed(name: str = "opacus") -> bool:
    return importlib.util.find_spec(name) is not None


def _model(work: Work) -> nn.Module:
    return build_model(config.Model(), work.shape, 10, seed=0)


def hooks(made: TrainingProblem, work: Work) -> Round:
    """Opacus' default: backward hooks that write every gradient out."""
    from opacus.grad_sample import GradSampleModule

    model = _model(work)
    return _samples(made, work, model, GradSampleModule(model))


def expanded_weights(made: TrainingProblem, work: Work) -> Round:
    """The same by PyTorch's ExpandedWeights."""
    from opacus.grad_sample import GradSampleModuleExpandedWeights

    model = _model(work)
    return _samples(made, work, model, GradSampleModuleExpandedWeights(model))


def _samples(made: TrainingProblem, work: Work, model: nn.Module, wrapped: nn.Module) -> Round:
    from opacus.optimizers import DPOptimizer

    optimiser = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=LR),
        noise_multiplier=work.sigma,
        max_grad_norm=C,
        expected_batch_size=work.batch,
    )
    criterion = nn.CrossEntropyLoss()

    def train(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        criterion(wrapped(x), y).backward()
        optimiser.step()

    return loop(made, work, model, train)


def ghost(made: TrainingProblem, work: Work) -> Round:
    """Opacus' ghost clipping: norms in a first backward pass, the clipped sum in a second."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = _model(work)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, use_ghost_clipping=True)
    optimiser = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=LR),
        noise_multiplier=work.sigma,
        max_grad_norm=C,
        expected_batch_size=work.batch,
    )
    criterion = DPLossFastGradientClipping(wrapped, optimiser, nn.CrossEntropyLoss())

    def train(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        criterion(wrapped(x), y).backward()
        optimiser.step()

    return loop(made, work, model, train)


def quiet() -> None:
    """Opacus warns about hooks and about its own generator; the table is no place for that."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing|Secure RNG turned off")
