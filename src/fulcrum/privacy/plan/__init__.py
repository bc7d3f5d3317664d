"""What a configuration will cost each party, and how noisy it will be, before anything is trained.

parties.py    who the parties are: names, sizes, and who has a budget or a past of its own
grouping.py   parties with the same terms as groups, and sigma for each group
noise.py      how noisy a step is, of one party and of all together
warnings.py   sentences about what a plan does not promise, or will hardly learn
listing.py    what is shown of each party and group, and as JSON
value.py      the plan as a value: every party's terms and what they cost
making.py     settings, parties and a rule -> Plan
rounds.py     the other way round: how many rounds fit into a budget

Client sampling (q_c) never lowers the cost of an example or a person: the server sees who takes part, so every party is
planned for its public cap on participations. Where rounds cost differently (a noise schedule, statistics released now
and then), the cap is planned for the costliest of them. Where the unit is the client the server is trusted, q_c is the
rate of one release a round, every party is charged for all rounds, and one noise serves all: the strictest budget sets
it. Where an ideal secure aggregation is assumed (privacy.aggregation) the parties share one dose of noise, and each is
charged what the sum costs.
"""

from __future__ import annotations

from fulcrum.privacy.plan.grouping import round_terms
from fulcrum.privacy.plan.listing import PartyPlan
from fulcrum.privacy.plan.making import make_plan
from fulcrum.privacy.plan.noise import Noise
from fulcrum.privacy.plan.parties import Named
from fulcrum.privacy.plan.rounds import affordable_rounds, rounds_for_budget
from fulcrum.privacy.plan.value import Plan

__all__ = ["Named", "Noise", "PartyPlan", "Plan", "affordable_rounds", "make_plan", "round_terms", "rounds_for_budget"]
