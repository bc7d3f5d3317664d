"""Neighbour replay, the noise of a whole run: of every party, in every round, as it left.

No record of the run has the last features, so the weights of the first layer at these features move by noise alone,
whatever the other weights are. Where parties share one noise, what is looked at is their sum, which is all that leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from fulcrum.analysis.detectors import exact
from fulcrum.analysis.detectors.executed import Executed, Sent
from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.analysis.detectors.noise import Place, describe_ratio, read_noise, read_repeated_numbers
from fulcrum.analysis.detectors.probe import FEATURES, HIDDEN, UNITS, read_reply
from fulcrum.clipping.rule import gradient_multiplier
from fulcrum.privacy.bounds import sanitise_bounds
from fulcrum.privacy.pairwise.integers import read_sum, sum_messages

Floats = npt.NDArray[np.float64]
NAME = "neighbour replay"
FREE = np.arange(FEATURES * HIDDEN).reshape(HIDDEN, FEATURES)[:, UNITS:].ravel()
"""Places of the weights that no record moves."""


def read_run_noise(run: Executed) -> Iterator[Reading]:
    """Readings of the noise in a run's releases."""
    plan, settings = run.federation.plan, run.federation.settings
    if plan.central or not plan.private:
        return
    if settings.train.weight_decay and settings.train.steps > 1:  # it acts between the steps
        return
    if settings.train.steps > 1 and run.federation.problem.rule.when == "step":  # its C moves between the steps
        return
    last = {(each.round, each.task.client): each for each in run.sent}
    # A repeated round that is not the same bytes is another release, with noise of its own.
    sent = list({(each.round, each.task.client, each.digest): each for each in run.sent}.values())
    names = [plan.name(k) for k in range(plan.parties)]
    if plan.is_pairwise:
        rounds = sorted({t for t, _ in last})
        rows = [read_masked_sum(run, [each for (t, _), each in last.items() if t == r]) for r in rounds]
        places: list[Place] = [(0, t, 0) for t in rounds]
        names = ["all, as a sum"]
    else:
        rows = [read_free_part(run, each) for each in sent]
        places = [(0, each.round, each.task.client) for each in sent]
    table = np.stack([row for row in rows if row is not None]) if any(row is not None for row in rows) else None
    if table is None:
        return
    places = [place for place, row in zip(places, rows, strict=True) if row is not None]
    if _mixes_coordinates(run):  # records move these places too: the noise is at least as large as declared
        total = float(np.square(table).sum())
        yield Reading(
            NAME,
            "noise of the run",
            exact.judge_variance_too_small(total, table.size),
            f"the noise of a run's releases is {describe_ratio(total, table.size)} what is declared",
        )
        return
    yield from read_noise(table, places, names, "the run's releases")
    yield from read_repeated_numbers(table, places, names, "the run's releases")
    if plan.shares_noise:
        yield from _read_shared_noise(run, list(last.values()))


def read_streams(run: Executed) -> Iterator[Reading]:
    """Whether two purposes, rounds, parties or steps have one and the same random stream."""
    shared = sorted(sorted(names, key=str) for names in run.streams.values() if len(names) > 1)
    told = " and ".join(" ".join(map(str, name)) for name in (shared[0][:2] if shared else ()))
    yield contradict(NAME, "streams used twice", bool(shared), f"these have one random stream: {told}")


def _mixes_coordinates(run: Executed) -> bool:
    """Whether the rule clips in another basis."""
    rule, settings = run.federation.problem.rule, run.federation.settings
    return rule.view(run.sent[0].state, 0, settings.train.rounds).transform is not None


def read_free_part(run: Executed, sent: Sent) -> Floats | None:
    """The noise [r] of a reply over its declared deviation, where no record moves it; None without noise."""
    values, _, terms = read_reply(run.federation, sent.round, sent.task, sent.reply, sent.params, sent.state)
    if terms.deviations[0] <= 0:
        return None
    chosen: Floats = values[FREE] / terms.deviations[FREE]
    return chosen


def _find_shares(run: Executed, round: Sequence[Sent]) -> tuple[list[float], list[float]]:
    """Per party of a round: the deviation of its share of the noise, and of all the noise that its charge asks for."""
    federation = run.federation
    rule = federation.problem.rule
    own, wanted = [], []
    for each in round:
        batch = each.task.rate * federation.problem.party(each.task.client).units
        reach = float(torch.linalg.vector_norm(sanitise_bounds(rule, rule.bounds(each.state)).C.double()))
        weight = each.task.message.weight if each.task.message else federation.plan.units(each.task.client) / batch
        whole = weight * reach * gradient_multiplier(rule.share, each.task.sigma, batch)
        own.append(whole / math.sqrt(each.task.noise_parties))
        wanted.append(whole)
    return own, wanted


def read_masked_sum(run: Executed, round: Sequence[Sent]) -> Floats | None:
    """The noise [r] of a round's sum over its declared deviation: the masks of all participants cancel."""
    total = read_sum(sum_messages(each.reply.delta for each in round), round[0].reply.grid, round[0].reply.bits)
    own, _ = _find_shares(run, round)
    chosen: Floats = total.double().numpy()[FREE] / math.hypot(*own)
    return chosen


def _read_shared_noise(run: Executed, sent: Sequence[Sent]) -> Iterator[Reading]:
    """Whether the shares of the noise add up to what is charged, without those of the parties that may collude."""
    colluders = run.federation.plan.colluders
    for t in sorted({each.round for each in sent}):
        own, wanted = _find_shares(run, [each for each in sent if each.round == t])
        honest = math.hypot(*sorted(own)[: max(0, len(own) - colluders)])
        yield contradict(
            NAME,
            "shares of the noise",
            honest < max(wanted) * (1 - 1e-6),
            f"the shares of round {t + 1} add up to {honest / max(wanted):.3g} times the noise that is charged, "
            f"without {colluders} parties that may collude",
        )
