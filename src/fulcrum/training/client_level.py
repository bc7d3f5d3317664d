"""Client-level privacy: a trusted server averages the parties' updates and adds the noise itself.

A unit is a whole party. Its "gradient" is -D_k, its update with the opposite sign, so every rule that
clips gradients can clip updates as "one step at learning rate 1". In round t

    1. each party joins with probability q_c, in secret;
    2. each party that joined trains without clipping and noise and sends D_k to the server;
    3. the server clips each D_k by the rule, sums them with weights w_k <= 1, divides, adds noise of
       z times the sensitivity, and releases the result. An empty round gets noise too.

The sensitivity depends on the divisor; docs/decisions/0004-client-level.md derives it. Every party is
charged every round, whether it joined or not, because participation is secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fulcrum.clipping import ClipRule
from fulcrum.clipping.fixed import NONE
from fulcrum.errors import ConfigError
from fulcrum.privacy.client_level import SERVER_CLIENT_ID, ClientLevelTerms
from fulcrum.privacy.mechanism import compute_charged_scale, release_with_noise
from fulcrum.rng import Randomness, name_stream
from fulcrum.settings.schema import Settings
from fulcrum.training.clipped_sum import compute_contribution
from fulcrum.training.problem import TrainingProblem, assign_coordinate_groups
from fulcrum.types import Bounds, ClientReply, Released, RuleState


def make_local_problem(problem: TrainingProblem) -> TrainingProblem:
    """The problem that parties train on at client level: no clipping, no noise. Any other unit: unchanged."""
    if problem.unit != "client":
        return problem
    return replace(problem, rule=NONE, unit="example", groups=(), diagnostics=False, proven=False)


def check_server_rule(rule: ClipRule, settings: Settings, problem: TrainingProblem) -> None:
    """Refuse a rule that cannot clip updates at the server."""
    if problem.unit != "client":
        return
    if rule.where != "server":
        raise ConfigError(
            f"clip.rule = {rule.name!r} keeps a C at each party, but with privacy.unit = 'client' the server clips; "
            "use a rule with one C for the federation, such as fixed or quantile."
        )
    if rule.view(rule.init(settings.clip, problem.shape), 0, settings.train.rounds).losses:
        raise ConfigError(
            f"clip.rule = {rule.name!r} looks at losses, which the server of privacy.unit = 'client' never sees; "
            "use a rule that looks at norms, such as fixed or quantile."
        )


# --- a round ------------------------------------------------------------------------------------


def draw_cohort(randomness: Randomness, t: int, terms: ClientLevelTerms, attempt: int = 0) -> list[int]:
    """Draw who joins round t: each of the K parties with probability q_c. Secret, since it amplifies privacy."""
    joins = randomness.uniform(name_stream("cohort", t, attempt=attempt), terms.clients) < terms.rate
    chosen: list[int] = torch.nonzero(joins).flatten().tolist()
    return chosen


def make_server_release(reply: ClientReply, terms: ClientLevelTerms, sigma: float, t: int, rounds: int) -> Released:
    """The server's release in the form that a rule's `adapt` takes: one step at learning rate 1."""
    return Released(reply.delta, reply.extra, 1.0, 1.0, t, rounds, noise=sigma * terms.sensitivity)


def average_client_updates(
    problem: TrainingProblem,
    terms: ClientLevelTerms,
    state: RuleState,
    replies: Sequence[ClientReply],
    t: int,
    rounds: int,
    sigma: float,
    attempt: int = 0,
) -> ClientReply:
    """Clip the updates of round t, average them, add noise of multiplier sigma. Returns the server's reply.

    The extra statistics of a rule (quantile's count) are summed without weights and divided by the
    expected number of participants q_c K, never by the actual number.
    """
    rule, device = problem.rule, problem.device
    updates = torch.stack([reply.delta for reply in replies]) if replies else torch.zeros((0, problem.layout.dim))
    updates = updates.to(device)
    weights = terms.weights[[reply.client for reply in replies]]
    groups = assign_coordinate_groups(problem.layout, problem.groups).to(device)
    view = rule.view(state, t, rounds)
    given = compute_contribution(
        rule,
        view,
        state,
        -updates,
        updates.new_zeros(len(updates)),
        groups,
        sigma,
        terms.cohort,
        weights=weights.to(updates),
        proven=problem.proven,
    )
    # The divisor is part of the estimator whose sensitivity is `terms.sensitivity`: the noise is added
    # after dividing, in the scale of the mean.
    mean = given.sum / terms.divisor(float(weights.double().sum()))
    reach = Bounds(given.bounds.C * terms.sensitivity, given.bounds.extra / terms.cohort)
    scale = compute_charged_scale(rule, reach, terms.rate, sigma, terms.cohort)
    noisy, extra = release_with_noise(
        mean, given.extra / terms.cohort, scale, problem.randomness, ("central", t, *([attempt] if attempt else []))
    )
    step = view.restore_gradient(noisy, 1.0)
    seen = {}
    if problem.diagnostics:
        norms = torch.linalg.vector_norm(given.stats.norms, dim=1)
        seen = {
            "participants": float(len(updates)),
            "clipped": float((given.factors < 1).any(dim=1).float().mean()) if len(updates) else 0.0,
            "mean_norm": float(norms.mean()) if len(updates) else 0.0,
        }
    return ClientReply(SERVER_CLIENT_ID, -step, extra, (scale.event,), given.state, seen)
