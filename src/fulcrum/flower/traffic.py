"""The bytes of a round's messages between a coordinator and its parties, from messages packed as in a real round.

Counted are header, arrays and signature of each request and reply. Flower's own framing, TLS, and the few kilobytes of
greetings at the start and the end come on top.
"""

from __future__ import annotations

import torch

from fulcrum.errors import ConfigError
from fulcrum.flower.coordinator import name_model_and_task, pack_round_request
from fulcrum.flower.messages import events_to_rows, pack_envelope
from fulcrum.flower.prepare import make_served_settings
from fulcrum.privacy.mechanism import compute_planned_events
from fulcrum.rng import torch_generator
from fulcrum.settings.derived import compute_learning_rate
from fulcrum.training.federation import Federation
from fulcrum.training.snapshot import make_first_snapshot
from fulcrum.training.traffic import RoundTraffic, measure_statistics_width
from fulcrum.types import RoundRequest

SIGNATURE_BYTES = 103
"""Bytes of a signature (P-384, DER): mostly 102 to 104, by chance."""
SEALED_BYTES = 228
"""Bytes of the coordinator's signature with its key (P-384): mostly 227 to 229, by chance."""
ID_BYTES = 32
"""Hexadecimal digits of a run's id and of a nonce."""


def measure_message_traffic(federation: Federation, k: int = 0) -> RoundTraffic:
    """Bytes of the first round's request to party k and of its reply; other rounds differ by a few digits.

    Raises ConfigError where these settings are not served to parties elsewhere; the text says why.
    """
    problem, plan = federation.problem, federation.plan
    settings = make_served_settings(federation.settings, plan.parties, simulation=False)
    if not (problem.rule.sound and problem.rule.private):
        raise ConfigError(f"clip.rule = {problem.rule.name!r} is not sound and private: parties elsewhere refuse it.")
    snapshot = make_first_snapshot(federation)
    task = plan.assignment(k, 0, compute_learning_rate(settings.train, 0))
    request = RoundRequest(
        0, settings.train.rounds, snapshot.params, (task,), (snapshot.rule,), settings.train.weight_decay
    )
    ids = {"run": "0" * ID_BYTES, "nonce": "0" * ID_BYTES, "party": plan.name(k)}
    header = {**ids, **name_model_and_task(problem), "attempt": 0, "simulation": {}}
    asked = pack_round_request(header, settings, problem, request, task, snapshot.rule)
    own = problem.rule.where == "client"
    width = measure_statistics_width(problem, snapshot.rule)
    # Noised updates are compressed like random numbers.
    arrays = {
        "delta": torch.randn(problem.layout.dim, generator=torch_generator(0, "traffic")),
        "extra": torch.zeros(width),
    }
    events = compute_planned_events(task, problem.rule, task.rate * plan.units(k), 0)
    answer = pack_envelope(
        {"kind": "update", **ids, "request": asked.digest, "round": 0, "events": events_to_rows(events)},
        {**arrays, "C": snapshot.rule["C"]} if own else arrays,
    )
    return RoundTraffic(asked.size + SEALED_BYTES, answer.size + SIGNATURE_BYTES)
