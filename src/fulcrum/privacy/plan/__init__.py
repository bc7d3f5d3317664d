"""What a configuration will cost each party, and how noisy it will be, before anything is trained.

planning.py     settings, parties and a rule -> Plan; how many rounds fit into a budget
plan.py         the plan as a value: every party's terms and what they cost
party_group.py  parties with the same terms: what they release, what it costs, the noise they need
noise.py        how noisy a step is, of one party and of all together
text.py         warnings in sentences, and the rows of `fulcrum plan --json`

Client sampling (q_c) never lowers the cost of an example or a person: the server sees who takes part, so every party is
planned for its public cap on participations. Where rounds cost differently (a noise schedule, statistics released now
and then), the cap is planned for the costliest of them. Where the unit is the client the server is trusted, q_c is the
rate of one release a round, every party is charged for all rounds, and one noise serves all: the strictest budget sets
it. Where an ideal secure aggregation is assumed (privacy.aggregation) the parties share one dose of noise, and each is
charged what the sum costs.
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
    "make_plan",
]
