"""The probe where the unit is a whole client: the releases are the server's, the units are its clients."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch

from fulcrum.analysis.detectors.probe import (
    NOTHING,
    OTHER_C,
    QUIET_SIGMA,
    Probe,
    Row,
    Terms,
    gather,
    make_dataset,
    make_model,
    make_records,
)
from fulcrum.clipping.rule import gradient_multiplier
from fulcrum.privacy.bounds import sanitise_bounds
from fulcrum.privacy.events import Gaussian
from fulcrum.runs import prepare
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation
from fulcrum.training.round import plan_round_events, run_client_level_round
from fulcrum.training.snapshot import Snapshot, make_first_snapshot
from fulcrum.types import ClientReply

Floats = npt.NDArray[np.float64]
CLIENTS = 12
TRIES = 60
"""Rounds in which a client that is drawn with the declared chance is waited for."""


def prepare_server_probe(settings: Settings, rounds: int, seed: int = 0) -> Federation:
    """The federation of these settings with twelve clients of one record each."""
    model = make_model()
    records = {name: values[:CLIENTS] for name, values in make_records(model, 1, False).items()}
    changed = settings.replace(
        data={"source": "probe", "parties": CLIENTS, "partition": "auto", "min_examples": 1, "validation": 0.0},
        train={"rounds": rounds, "steps": 1, "epochs": 0.0, "rate": 1.0, "weights": "uniform", "lr": 1.0},
        privacy={"evaluation_epsilon": None, "seed": seed, "max_participations": 0},
        run={"seed": seed, "ledger": "", "diagnostics": False},
    )
    return prepare(changed, make_dataset(records, torch.arange(CLIENTS), False), model)


def measure_server(settings: Settings, loud: int = 24, quiet: int = 40, seed: int = 0) -> Probe:
    """Play the probe's rounds with a trusted server."""
    federation = prepare_server_probe(settings, max(loud, quiet, TRIES), seed)
    first = make_first_snapshot(federation)
    states = (first, dataclasses.replace(first, rule={**first.rule, "C": first.rule["C"] * OTHER_C}))
    everybody = list(range(CLIENTS))
    rows_loud = [_play(federation, states[t % 2], everybody, t, None, t % 2) for t in range(loud)]
    rows_quiet = [_play(federation, first, everybody, t, QUIET_SIGMA, 0) for t in range(quiet)]
    units = tuple((np.stack([_measure_alone(federation, state, k) for k in everybody]),) for state in states)
    layout = federation.problem.layout
    return Probe(
        federation,
        ("server",),
        layout.dim,
        units,
        gather(rows_loud),
        gather(rows_quiet),
        NOTHING,
        NOTHING,
        tuple(layout.sizes),
        federation.plan.get_server_terms.cohort,
    )


def _play(
    federation: Federation, snapshot: Snapshot, clients: list[int], t: int, sigma: float | None, state: int
) -> Row:
    """One round of the server: its release in units of the charge."""
    events = plan_round_events(federation.plan, clients, t)
    if sigma is not None:
        events = {
            k: tuple(dataclasses.replace(each, sigma=sigma) for each in own if isinstance(each, Gaussian))
            for k, own in events.items()
        }
    _, replies, _ = run_client_level_round(federation, snapshot, clients, t, events)
    used = max(each.sigma for own in events.values() for each in own if isinstance(each, Gaussian))
    return (*_read(federation, snapshot, replies[0], t, used), 0, state)


def _read(
    federation: Federation, snapshot: Snapshot, reply: ClientReply, t: int, sigma: float
) -> tuple[Floats, tuple[int, int], Terms]:
    terms, rule = federation.plan.get_server_terms, federation.problem.rule
    bounds = sanitise_bounds(rule, rule.bounds(snapshot.rule))
    view = rule.view(snapshot.rule, t, federation.settings.train.rounds)
    gradient = -reply.delta.double()
    if view.axes is not None:
        gradient = (gradient - view.axes.centre.double()) / view.axes.scale.double()
    reach = float(torch.linalg.vector_norm(bounds.C.double())) * terms.sensitivity
    limit = float(bounds.extra) / terms.cohort
    extra = reply.extra.double().numpy() / limit if limit > 0 else np.zeros(0)
    total = gradient.numpy() / reach
    share = rule.share(sigma, terms.cohort)
    on_sum = gradient_multiplier(rule.share, sigma, terms.cohort)
    on_extra = sigma / math.sqrt(share) if share > 0 else 0.0
    deviations = np.concatenate([np.full(len(total), on_sum), np.full(len(extra), on_extra)])
    declared = Terms(terms.rate, sigma, terms.cohort, True, deviations)
    return np.concatenate([total, extra]), (t, 0), declared


def _measure_alone(federation: Federation, snapshot: Snapshot, client: int) -> Floats:
    """What one client adds to the mean: the first release that it alone is in; others may not take part."""
    value = np.zeros(0)
    for t in range(TRIES):
        value = _play(federation, snapshot, [client], t, QUIET_SIGMA, 0)[0]
        if float(np.linalg.norm(value[: federation.problem.layout.dim])) > 0.2:
            break
    return value
