"""The privacy cost of a configuration for each party, and its noise, before training.

planning.py     settings, parties and a rule -> Plan; how many rounds fit into a budget
plan.py         the plan as a value: every party's terms and what they cost
party_group.py  parties with the same terms: what they release, what it costs, the noise they need
noise.py        the noise of a step, of one party and of the aggregate
text.py         warnings in sentences, and the rows of `fulcrum plan --json`

Client sampling (q_c) never lowers the cost of an example or a person: the server sees who takes part, so every party is
planned for its public cap on participations. Where rounds differ in cost (a noise schedule, statistics in some steps
only), the plan assumes the costliest rounds. At unit client the server is trusted, q_c is the sampling rate of one
release per round, every party is charged for all rounds, and all parties share one noise: the strictest budget sets
it. Where an ideal secure aggregation is assumed (privacy.aggregation) the parties share one noise vector, and each is
charged the cost of the sum.
"""

from __future__ import annotations

from fulcrum.privacy.plan.noise import PlannedNoise
from fulcrum.privacy.plan.party_group import compute_round_terms
from fulcrum.privacy.plan.plan import Plan
from fulcrum.privacy.plan.planning import (
    NamedParties,
    check_privacy_names,
    compute_affordable_rounds,
    compute_rounds_for_budget,
    find_affordable_rounds,
    make_plan,
)
from fulcrum.privacy.plan.text import PartyPlan

__all__ = [
    "NamedParties",
    "PartyPlan",
    "Plan",
    "PlannedNoise",
    "check_privacy_names",
    "compute_affordable_rounds",
    "compute_round_terms",
    "compute_rounds_for_budget",
    "find_affordable_rounds",
    "make_plan",
]
