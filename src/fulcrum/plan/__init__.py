"""What a configuration will cost each party, and how noisy it will be, before anything is trained."""

from __future__ import annotations

from fulcrum.plan.value import Noise, PartyPlan, Plan, affordable_rounds, make_plan, round_terms, rounds_for_budget

__all__ = ["Noise", "PartyPlan", "Plan", "affordable_rounds", "make_plan", "round_terms", "rounds_for_budget"]
