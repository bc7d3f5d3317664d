"""What a coordinator prepares before it contacts parties: settings, public data, the model, who takes part."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import torch
from cryptography.hazmat.primitives.asymmetric import ec

from fulcrum.clipping import find_rule
from fulcrum.data import Dataset, Partition, load
from fulcrum.errors import ConfigError, RunError
from fulcrum.flower.coordinator import FlowerEngine, WaitPolicy, list_refusals
from fulcrum.flower.keys import KeyRegister
from fulcrum.flower.known_ledgers import LedgerBook
from fulcrum.flower.messages import SimulatedStreams, compute_model_fingerprint, write_shape
from fulcrum.flower.proposals import make_proposal
from fulcrum.flower.registry import POLL_SECONDS, PartyInfo, PartyRegistry, PartyReportFn, Transport
from fulcrum.flower.signing import RequestSigner
from fulcrum.flower.task_terms import declare_task, task_fingerprint
from fulcrum.flower.units import read_registered_units
from fulcrum.privacy.pairwise.shares import count_colluders
from fulcrum.privacy.plan import make_plan
from fulcrum.rng import CipherRandomness
from fulcrum.runs.preparation import build_checked_model
from fulcrum.settings.checks import check_settings
from fulcrum.settings.derived import get_planned_unit
from fulcrum.settings.schema import Settings, Table, TaskSettings
from fulcrum.training.federation import Federation
from fulcrum.training.problem import TrainingProblem, get_private_seed


def load_public_data(
    source: str, folder: str = "", task: TaskSettings | None = None, table: Table | None = None
) -> Dataset:
    """What the coordinator evaluates on: any data source with test records; an .npz needs x_test and y_test alone, and
    of a table all rows are test records."""
    return load(source, folder, task=task, need=("test",), table=table)


def make_served_settings(settings: Settings, parties: int, simulation: bool) -> Settings:
    """The settings as a coordinator uses them: real randomness unless it simulates, a checkpoint every round."""
    if settings.run.diagnostics:
        raise ConfigError("run.diagnostics = true shows private values; parties never send them, so turn it off.")
    if settings.privacy.unit == "client":
        raise ConfigError(
            "privacy.unit = 'client' trusts the server with every update; parties across machines trust nobody: use "
            "example or person."
        )
    if settings.privacy.aggregation == "ideal-secagg":
        raise ConfigError(
            f"privacy.aggregation = {settings.privacy.aggregation!r} is a simulation: no secure aggregation is "
            "there, and the coordinator sees every update; use pairwise, or plain, where each party's own noise "
            "protects it."
        )
    if settings.data.features != "none":
        raise ConfigError(
            f"data.features = {settings.data.features!r} is not offered across machines; set it to none, and let every "
            "party prepare its data with fulcrum.data.compute_features."
        )
    if settings.data.validation:
        raise ConfigError(
            "data.validation holds out training data, which the coordinator does not have; set it to 0. Each party can "
            "keep units out of training with fulcrum party --hold-out, and score the model on them: fulcrum score."
        )
    if settings.run.reference:
        raise ConfigError("run.reference = true trains without privacy, and parties' records are private; turn it off.")
    privacy = dataclasses.replace(
        settings.privacy,
        randomness="seeded" if simulation else "secure",
        unit=get_planned_unit(settings.privacy),
    )
    if privacy.aggregation == "pairwise":  # a fraction is of all registered parties, however many of them join
        privacy = dataclasses.replace(privacy, colluders=float(count_colluders(privacy.colluders, parties)))
    run = dataclasses.replace(settings.run, checkpoint_every=1)
    data = dataclasses.replace(settings.data, parties=parties)
    return check_settings(dataclasses.replace(settings, privacy=privacy, run=run, data=data))


def make_public_problem(settings: Settings, public: Dataset, device: torch.device) -> TrainingProblem:
    """The coordinator's view of the problem: public data and the model, no party's records."""
    rule = find_rule(settings.clip.rule)
    if not (rule.sound and rule.private):
        raise ConfigError(
            f"clip.rule = {rule.name!r} is not sound and private: parties across machines refuse it; use moo or fixed."
        )
    model, public = build_checked_model(settings, public, None)
    nobody = Partition(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    return TrainingProblem.of(settings, public, nobody, model, device, rule=rule)


def make_party_registry(
    transport: Transport,
    public_keys: Mapping[str, ec.EllipticCurvePublicKey],
    run: str,
    settings: Settings,
    problem: TrainingProblem,
    report: PartyReportFn,
    signer: RequestSigner | None = None,
    ledgers: LedgerBook | None = None,
) -> PartyRegistry:
    """The registry of a run, with what every party's greeting must say. signer: the coordinator's key.

    ledgers: which ledger each party has paid from.
    """
    required = {
        "shape": write_shape(problem.dataset.shape),
        "model": compute_model_fingerprint(problem.model, problem.layout),
        "task": task_fingerprint(problem.dataset),
        "randomness": settings.privacy.randomness,
    }
    proposal = make_proposal(settings, problem.task.outputs, declare_task(problem.dataset))
    registered = read_registered_units(public_keys.folder) if isinstance(public_keys, KeyRegister) else {}
    return PartyRegistry(transport, public_keys, run, proposal, required, report, signer, ledgers, registered)


def wait_for_parties(registry: PartyRegistry, expected: int, wait_policy: WaitPolicy) -> tuple[PartyInfo, ...]:
    """Wait until all expected parties have joined or refused, or for `join_timeout` seconds."""
    end = time.monotonic() + wait_policy.join_timeout
    while len(registry.parties.keys() | registry.refusals.keys()) < expected and time.monotonic() < end:
        registry.poll()
        time.sleep(3 * POLL_SECONDS)
    if len(registry.parties) < max(wait_policy.min_parties, 1):
        when = "" if time.monotonic() < end else f" within {wait_policy.join_timeout:g} s"
        raise RunError(
            f"only {len(registry.parties)} of at least {wait_policy.min_parties} parties joined{when}"
            f"{list_refusals(registry)}; check that each runs fulcrum party with this server's address, CA and its own "
            "key."
        )
    return tuple(registry.parties[name] for name in sorted(registry.parties))


def add_party_names(problem: TrainingProblem, parties: Sequence[PartyInfo], settings: Settings) -> TrainingProblem:
    """The coordinator's problem with the names of its parties; it holds none of their records."""
    starts = torch.zeros(len(parties) + 1, dtype=torch.int64)
    partition = Partition(torch.zeros(0, dtype=torch.int64), starts, tuple(party.name for party in parties))
    return TrainingProblem.of(settings, problem.dataset, partition, problem.model, problem.device, rule=problem.rule)


def make_simulated_streams(settings: Settings, problem: TrainingProblem) -> SimulatedStreams:
    """The seed and the id of the random streams of a simulation: the same settings, model and public data repeat it.

    A coordinator has no party's records, so the id is that of what it does have (`identify_releases`).
    """
    randomness = problem.randomness
    assert isinstance(randomness, CipherRandomness)
    return SimulatedStreams(get_private_seed(settings), randomness.run)


def make_served_federation(settings: Settings, engine: FlowerEngine) -> Federation:
    """The federation that `runs.execute` runs, over the parties of an engine."""
    names, units = [party.name for party in engine.clients], [party.units for party in engine.clients]
    plan = make_plan(settings, names, units, engine.problem.rule, population="each party's own data")
    return Federation(settings, engine.problem, plan, engine)
