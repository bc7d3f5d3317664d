"""Which way each layer of a run takes, and what it costs: the run's engine, rule and batch in `gradients.costs`."""

from __future__ import annotations

from dataclasses import replace

from fulcrum.data.records import move_inputs_to_device
from fulcrum.engines import choose_engine
from fulcrum.gradients.costs import CostTerms, LayerCost, measure_layer_costs
from fulcrum.gradients.stacked.layers import compile_model
from fulcrum.models.prepared import PreparedModel
from fulcrum.runs.forecast.made_up import make_up_records
from fulcrum.training.client_level import make_local_problem
from fulcrum.training.federation import Federation
from fulcrum.training.snapshot import make_first_snapshot

FEW_RECORDS = 4
"""Made-up records of which the model's layers are learned."""


def count_step_records(federation: Federation) -> float:
    """Expected records in a local step of the largest party."""
    plan = federation.plan
    k = int(plan.sizes.argmax())
    return plan.assignment(k, 0, 1.0).rate * int(federation.problem.partition.sizes[k])


def list_layers(federation: Federation) -> tuple[LayerCost, ...]:
    """The rows of the model's layers for one local step of the largest party."""
    problem, plan = make_local_problem(federation.problem), federation.plan
    k = int(plan.sizes.argmax())
    each = int(problem.partition.sizes[k]) / int(plan.sizes[k]) if problem.unit == "person" else 1.0
    engine = choose_engine(federation.settings.run.engine, problem)
    program = None
    if engine == "stacked" and problem.unit == "example":
        program, _ = compile_model(problem.model, problem.layout, problem.dataset.shape)
    terms = CostTerms(
        batch=count_step_records(federation),
        records_per_unit=each,
        written_out=_explain_written_out(federation, engine),
        item_bytes=2 if problem.precision == "bf16" else 4,
        norm_bytes=8 if problem.proven else 4,
        program=program,
    )
    few = make_up_records(problem.dataset.records, FEW_RECORDS, problem.model, problem.dataset.public)
    x, y = move_inputs_to_device(few.x, problem.device), few.y.to(problem.device)
    found = measure_layer_costs(problem.model, problem.task, x, y, terms)
    if not isinstance(problem.model, PreparedModel):
        return found
    return tuple(replace(row, layer=row.layer.removeprefix("model.")) for row in found)  # the network's own names


def _explain_written_out(federation: Federation, engine: str) -> str:
    """Why every gradient is written out; "" where it is not."""
    if engine == "reference":
        return "the reference engine writes every gradient out"
    problem = federation.problem
    if problem.unit == "client":
        return ""
    snapshot = make_first_snapshot(federation)
    if problem.rule.view(snapshot.rule, 0, federation.settings.train.rounds).needs_gradients:
        return f"{problem.rule.name} clips in other coordinates, so every gradient is written out"
    return ""
