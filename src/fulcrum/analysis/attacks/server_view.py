"""What the server sees of a party's first round: the weights that it sent, and one sum that a real client released."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fulcrum.data import poisson_sample_units
from fulcrum.data.tasks import Task
from fulcrum.errors import ConfigError
from fulcrum.models.layout import ParameterLayout
from fulcrum.rng import name_stream
from fulcrum.settings.derived import compute_learning_rate
from fulcrum.training.client import train_client
from fulcrum.training.federation import Federation, make_model_facts
from fulcrum.types import RoundRequest


@dataclass(frozen=True, eq=False)
class ServerView:
    """A party's release in the first round, and what an attack is told beside it.

    theta [d]: the weights that the server sent. total [d]: the sum of the sampled records' clipped gradients, with its
    noise, as the release gives it away. C: the clipping norm, inf where nothing is clipped. sigma: the noise
    multiplier. x, y: the sampled records: what is to be found, and their labels. Labels and number of records are told
    to the attacker, which only helps it.
    """

    model: nn.Module
    layout: ParameterLayout
    task: Task
    theta: Tensor
    total: Tensor
    C: float
    sigma: float
    x: Tensor
    y: Tensor

    @property
    def count(self) -> int:
        """Records in the sample."""
        return len(self.y)


def look_at_release(federation: Federation, party: int, theta: Tensor | None = None, whole: bool = False) -> ServerView:
    """Party number `party` trains its first round as in any run, and the server looks at the reply.

    theta [d]: weights that the server sends in place of the agreed ones. whole: the sample is all of the party's
    records, as if every coin had come up; the noise stays that of the plan.
    """
    problem, settings = federation.problem, federation.settings
    task = federation.plan.assignment(party, 0, compute_learning_rate(settings.train, 0))
    if task.steps != 1:
        raise ConfigError(f"train.steps makes {task.steps} local steps per round; gradients are inverted from one.")
    task = replace(task, rate=1.0) if whole else task
    sent = problem.layout.flatten(problem.model) if theta is None else theta
    state = problem.rule.init(settings.clip, make_model_facts(federation))
    request = RoundRequest(0, settings.train.rounds, sent, (task,), (state,))
    reply = train_client(problem, request, task, state)
    rows = draw_first_sample(federation, party, task.rate)
    x, y = problem.dataset.x[rows], problem.dataset.y[rows]
    C = float(torch.linalg.vector_norm(state["C"]))
    total = -reply.delta * (task.rate * problem.party(party).units / task.lr)
    return ServerView(problem.model, problem.layout, problem.task, sent, total, C, task.sigma, x, y)


def draw_first_sample(federation: Federation, party: int, rate: float | None = None) -> Tensor:
    """Rows of the records in a party's first sample, from the run's own streams. rate: None: the party's."""
    problem = federation.problem
    rate = federation.plan.assignment(party, 0, 1.0).rate if rate is None else rate
    key = name_stream("sample", 0, party, 0)
    return poisson_sample_units(problem.randomness, key, problem.party(party), rate)[0]
