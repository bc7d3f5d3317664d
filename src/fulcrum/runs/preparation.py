"""From settings to a federation: data, split, model, device and privacy plan, with all their checks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fulcrum.clipping import RULES, find_rule
from fulcrum.clipping.testing import refuse_broken_rule
from fulcrum.data import Dataset, compute_features, count_units_per_party, load, split
from fulcrum.data.arrays import recheck_dataset
from fulcrum.data.dataset import declare_public, refuse_inferred_task
from fulcrum.data.declared import resolve_data_settings
from fulcrum.data.fingerprints import add_record_digests, compute_unit_digests
from fulcrum.data.held_out import hold_out_units
from fulcrum.data.records import select_rows
from fulcrum.data.withdrawn import leave_out_withdrawn
from fulcrum.engines import find_engine
from fulcrum.errors import BudgetError, ConfigError, FulcrumError, ModelError
from fulcrum.models.adapted import adapt_model
from fulcrum.models.build import apply_initial_weights, build_model, is_built_in
from fulcrum.models.checkpoints import WeightOrigin, can_be_path, read_origin
from fulcrum.models.checks import run_dry, validate_by_type
from fulcrum.models.learnable import check_learnable, refuse_large_features
from fulcrum.models.own import (
    check_outputs,
    make_trial_inputs,
    refuse_nonfinite_outputs,
    suggest_integer_inputs,
    validate_prepared,
)
from fulcrum.models.prepared import prepare_model, refuse_odd_module
from fulcrum.models.pretrain import SYNTHETIC_INIT_NAME, ZERO_INIT_NAME
from fulcrum.privacy.ledger import Ledger, RunPlan
from fulcrum.privacy.plan import compute_affordable_rounds, make_plan
from fulcrum.rng import make_randomness
from fulcrum.runs.choices import check_choices
from fulcrum.runs.reference import check_reference
from fulcrum.settings.checks import check_settings
from fulcrum.settings.derived import DERIVABLE_SETTINGS
from fulcrum.settings.schema import Settings, TaskSettings
from fulcrum.training.client_level import check_server_rule, make_local_problem
from fulcrum.training.federation import Federation
from fulcrum.training.held_out import check_private_evaluation, plan_evaluation
from fulcrum.training.problem import TrainingProblem, get_private_seed, identify_releases


def prepare(settings: Settings, dataset: Dataset | None = None, model: nn.Module | None = None) -> Federation:
    """Load the data, split it, build the model, plan the privacy. Raises every error that is known before training.

    dataset and model replace those in the settings, for data and models made in Python. The federation's settings name
    the partition, unit and randomness that "auto" chose, and what a rehearsal chose (clip.rehearse).
    """
    from fulcrum.runs.rehearsal import apply_rehearsal  # it prepares small runs of its own

    return apply_rehearsal(prepare_unrehearsed(settings, dataset, model), model)


def prepare_unrehearsed(
    settings: Settings, dataset: Dataset | None = None, model: nn.Module | None = None
) -> Federation:
    """`prepare` without a rehearsal: the settings stay as they are."""
    check_choices(check_settings(settings))
    rule = find_rule(settings.clip.rule)
    device = find_device(settings.run.device)
    dataset = load_training_data(settings, dataset, device)
    settings, dataset = resolve_data_settings(settings, dataset)
    check_reference(settings, dataset)
    check_settings(settings)  # again: what "auto" chose must go with the other settings
    if not dataset.public and settings.clip.rule not in RULES:
        refuse_broken_rule(rule, settings.clip)
    evaluation = plan_evaluation(settings, dataset)
    dataset = dataset if evaluation is None else _add_dataset_warning(dataset, evaluation.note)
    partition = split(dataset, settings.data, settings.run.seed)
    origin, given = find_weight_origin(settings), model is not None
    model, dataset = build_checked_model(settings, dataset, model)
    problem = TrainingProblem.of(settings, dataset, partition, model, device, rule=rule)
    check_server_rule(rule, settings, problem)
    plan = make_plan(settings, partition, count_units_per_party(dataset, partition, settings.privacy.unit), rule)
    engine = find_engine(settings.run.engine, make_local_problem(problem))
    return Federation(settings, problem, plan, engine, evaluation, given, origin)


NAMED_INITS = ("random", SYNTHETIC_INIT_NAME, ZERO_INIT_NAME)
"""Values of model.init that are no path."""
UNITS_FROM_SMALLEST = ("example", "person", "client")
"""What an epsilon protects: a guarantee for a larger unit holds for a smaller one too."""


def find_weight_origin(settings: Settings) -> WeightOrigin | None:
    """The run whose model the initial weights are; None where no run of ours made them, as far as is known.

    Raises ConfigError where its spend cannot be added to this run's.
    """
    paths = [settings.model.init, settings.model.name.removeprefix("transformers:")]
    known = [
        read_origin(Path(path))
        for path in paths
        if path not in NAMED_INITS and can_be_path(path) and Path(path).exists()
    ]
    found = [each for each in known if each is not None]
    origin = next((each for each in found if not each.public), None)
    if origin is None:
        return found[0] if found else None
    where = f"model.init = {settings.model.init!r} is the model of run {origin.run}"
    unit = settings.privacy.unit
    if UNITS_FROM_SMALLEST.index(origin.unit) < UNITS_FROM_SMALLEST.index(unit):
        raise ConfigError(
            f"{where}, whose epsilon protects one {origin.unit}, and privacy.unit = {unit!r}: they do not add up; use "
            f"the unit {origin.unit}, or other weights."
        )
    kept = settings.run.ledger
    if kept and Path(kept).is_file():
        with Ledger.open(kept) as ledger:
            identity, knows = ledger.identity, origin.run in ledger.runs()
        if identity == origin.ledger and knows:
            return origin
    if kept:
        raise ConfigError(
            f"{where}, which was paid in another ledger than run.ledger = {kept!r}, so that no account would know of "
            "it; use the ledger of that run, or none: the statement then adds both up."
        )
    return origin


def derive_federation(base: Federation, settings: Settings) -> Federation:
    """The federation with other values of `DERIVABLE_SETTINGS`: its own releases; data, split, model and plan shared.

    settings: only those fields are read. Equal to `prepare` with all of them, and much faster.
    """
    settings = base.settings.replace(
        **{
            section: {name: getattr(getattr(settings, section), name) for name in free}
            for section, free in DERIVABLE_SETTINGS.items()
        }
    )
    check_settings(settings)
    own = base.problem
    identity = identify_releases(settings, own.dataset, own.partition, own.model, own.layout)
    randomness = make_randomness(settings.privacy.randomness, get_private_seed(settings), identity)
    problem = dataclasses.replace(own, randomness=randomness)
    engine = find_engine(settings.run.engine, make_local_problem(problem))
    plan = dataclasses.replace(base.plan, C0=settings.clip.C0)
    return dataclasses.replace(base, settings=settings, problem=problem, engine=engine, plan=plan)


PLANNED_SETTINGS: dict[str, tuple[str, ...]] = {
    "privacy": ("epsilon", "sigma", "delta", "accountant", "aggregation", "colluders")
}
"""Settings that change the plan, and neither data, split nor model."""


def derive_planned_federation(base: Federation, settings: Settings) -> Federation:
    """`derive_federation` with other values of `PLANNED_SETTINGS` too: its own plan; data, split and model shared."""
    planned = base.settings.replace(
        **{
            section: {name: getattr(getattr(settings, section), name) for name in names}
            for section, names in PLANNED_SETTINGS.items()
        }
    )
    problem = base.problem
    units = count_units_per_party(problem.dataset, problem.partition, planned.privacy.unit)
    plan = make_plan(planned, problem.partition, units, problem.rule)
    return derive_federation(dataclasses.replace(base, settings=planned, plan=plan), settings)


def load_training_data(settings: Settings, given: Dataset | None, device: torch.device) -> Dataset:
    """The training records by the settings: with their task, without held-out records, as features."""
    if given is None:
        dataset = load(
            settings.data.source,
            settings.data.dir,
            task=settings.task,
            public=settings.data.public,
            table=settings.table,
            images=settings.images,
        )
    else:
        given = declare_public(given) if settings.data.public else given
        dataset = given if settings.task == TaskSettings() else recheck_dataset(given, given.name, settings.task)
    refuse_inferred_task(dataset)
    dataset = leave_out_withdrawn(dataset, settings.data.withdrawn)
    if not dataset.public:
        dataset = add_record_digests(dataset)
    if settings.data.validation > 0:
        if not dataset.public:
            check_private_evaluation(settings, dataset)
        dataset = hold_out_units(dataset, settings.data.validation, settings.run.seed)
    dataset = compute_features(dataset, settings.data, device)
    if settings.privacy.unit == "person" and dataset.person is None:
        raise ConfigError(
            f"privacy.unit = 'person' needs an id for each record, and {dataset.name} has none; "
            "name the column with table.person, give an array called person, or use unit example."
        )
    if dataset.test is None and dataset.held_out is None:
        return _add_dataset_warning(
            dataset,
            f"{dataset.name} has no test set ({'x_test, y_test' if dataset.schema is None else 'table.test'}), so the "
            "model is trained and not evaluated; data.validation = 0.2 with privacy.evaluation_epsilon = 1 holds "
            "records out and pays for their score.",
        )
    return dataset


def list_unit_digests(federation: Federation) -> dict[str, bytes]:
    """Keyed digests of each party's units, 16 bytes each, by which its ledger knows them again; {} for public data.

    Held-out units are listed under the name of their own account.
    """
    dataset = federation.problem.dataset
    return _list_digests(federation, "person" if dataset.person is not None else "example")


RECORDS_SUFFIX = "/records"
"""After a party's name in a ledger: its records, where its units are persons."""


def list_person_record_digests(federation: Federation) -> dict[str, bytes]:
    """Keyed digests of the records themselves, as PARTY/records, where units are known by persons' ids; else {}.

    By them the same records are known again without the ids, or under other ids.
    """
    if federation.problem.dataset.person is None:
        return {}
    return {f"{name}{RECORDS_SUFFIX}": found for name, found in _list_digests(federation, "example").items()}


def _list_digests(federation: Federation, unit: str) -> dict[str, bytes]:
    problem = federation.problem
    dataset, partition = problem.dataset, problem.partition
    if dataset.public:
        return {}
    found = {
        partition.name(k): compute_unit_digests(dataset, partition.indices(k), unit) for k in range(partition.parties)
    }
    if federation.evaluation is not None and dataset.held_out is not None:
        held = dataclasses.replace(dataset, train=dataset.held_out)
        for account in federation.evaluation.accounts:
            found[account.name] = compute_unit_digests(held, account.rows, unit)
    return found


def build_checked_model(settings: Settings, dataset: Dataset, given: nn.Module | None) -> tuple[nn.Module, Dataset]:
    """The network to train, checked not to mix examples, and the records in the form of its inputs."""
    if given is not None and settings.model.coordinates != "plain":
        raise ConfigError(
            "model.coordinates is for models that the settings name; set it to plain, and hand over "
            "fulcrum.models.whitening.centre_model(model, facts)."
        )
    notes: list[str] = []
    if given is None:
        if is_built_in(settings.model):
            _refuse_token_ids(settings, dataset)
            dataset = dataset.with_float_inputs()
        task, sample = dataset.task, select_rows(dataset.sample.x, slice(0, 8))
        given = build_model(
            settings.model, dataset.shape, task.outputs, settings.run.seed, sample, task=task, notes=notes
        )
    else:
        given = adapt_given_model(settings, given, notes)
    pair = select_rows(dataset.sample.x, slice(0, 2))
    try:
        refuse_large_features("x", dataset.sample)  # before they make the model fail
        validate_by_type(given)
        given = prepare_model(given, pair)
        with contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):  # it may refuse made-up records
            refuse_nonfinite_outputs(run_dry(given, make_trial_inputs(dataset.shape, pair))[1])
        validate_prepared(given, pair)
        check_outputs(given, pair, dataset.task)
    except FulcrumError:
        raise
    except Exception as problem:  # a user's model may raise any error
        if isinstance(problem, IndexError):  # before the sentence of PyTorch: a token id that the model does not know
            check_learnable(given, dataset)
        words = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise ModelError(f"The model failed on two examples: {words}{suggest_integer_inputs(pair)}.") from problem
    for note in [*notes, *check_learnable(given, dataset)]:
        dataset = _add_dataset_warning(dataset, note)
    return given, dataset


def _refuse_token_ids(settings: Settings, dataset: Dataset) -> None:
    """ModelError where a table's text would be learned as if its token numbers were measurements."""
    if dataset.schema is not None and dataset.schema.texts:
        raise ModelError(
            f"model.name = {settings.model.name!r} takes numbers, and column {dataset.schema.texts[0].name!r} is token "
            'ids; name a model with an embedding (package.module:factory), or declare form = "bag" for the column.'
        )


def adapt_given_model(settings: Settings, given: nn.Module, notes: list[str]) -> nn.Module:
    """A module that was handed over, with the weights and changes that the settings name; the module itself stays."""
    if not isinstance(given, nn.Module):
        what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise ModelError(f"model is {what}; hand over a torch.nn.Module, or name a factory package.module:factory.")
    refuse_odd_module(given)
    from_file = settings.model.init not in NAMED_INITS  # those are for models that we make
    if from_file or hasattr(given, "config"):
        given = copy.deepcopy(given)
    if from_file:
        given = apply_initial_weights(given, settings.model, type(given).__name__, notes)
    return adapt_model(given, settings.model, settings.run.seed)


def _add_dataset_warning(dataset: Dataset, words: str) -> Dataset:
    return dataclasses.replace(dataset, warnings=(*dataset.warnings, words))


def find_device(name: str) -> torch.device:
    """The device a setting names; `auto` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"run.device = {name!r} is not known; use auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"run.device = {name!r}, but this machine has no GPU that PyTorch can use; use cpu.")
    return device


@dataclass(frozen=True)
class PartyBalance:
    """A party in a kept ledger: epsilon spent over all runs, its budget (None: no limit), rounds it can pay for."""

    spent: float
    budget: float | None
    rounds: int


def list_ledger_balances(federation: Federation) -> dict[str, PartyBalance]:
    """What the parties of this run have left in the kept ledger, by name; without those that are new there."""
    path, plan = federation.settings.run.ledger, federation.plan
    if not path or not Path(path).is_file():
        return {}
    with Ledger.open(path) as ledger:
        accounts, spent = ledger.accounts(), ledger.epsilons()
        short = compute_affordable_rounds(plan, ledger)
    names = [plan.name(k) for k in range(plan.parties)]
    return {
        name: PartyBalance(spent[name], accounts[name].budget, short.get(name, plan.participations(k)))
        for k, name in enumerate(names)
        if name in accounts
    }


def collect_ledger_warnings(federation: Federation) -> list[str]:
    """Warnings about parties whose budget in a kept ledger will run out before the end of this run.

    Raises BudgetError if no party can pay for one round.
    """
    path = federation.settings.run.ledger
    if not path or not Path(path).is_file():
        return []
    with Ledger.open(path) as ledger:
        short = compute_affordable_rounds(federation.plan, ledger)
        unscored = [*_warn_about_changed_units(federation, ledger), *_warn_about_held_out(federation, ledger)]
    if not short:
        return unscored
    fewest, most_ = min(short.values()), max(short.values())
    names = ", ".join(list(short)[:3]) + (", ..." if len(short) > 3 else "")
    says = f"{len(short)} of {federation.plan.parties} parties ({names}) have budget in {path} for "
    says += f"{fewest} of {federation.plan.rounds} rounds" if fewest == most_ else f"{fewest} to {most_} rounds"
    if most_ == 0 and len(short) == federation.plan.parties:
        raise BudgetError(f"{says}; lower --epsilon, or raise their budget: fulcrum ledger {path} --budget EPSILON")
    return [f"{says}; they sit out when it is spent.", *unscored]


def _warn_about_changed_units(federation: Federation, ledger: Ledger) -> list[str]:
    """Who stays, is new or is gone since the runs on record, per party; for the user's eyes, and never stored."""
    found = []
    for party, digests in list_unit_digests(federation).items():
        known = ledger.find_known_units(party, digests)
        if not known.staying and known.gone:
            found.append(
                f"nobody of party {party!r} was in its earlier runs in {ledger.path}, so its budget starts anew; if "
                "these are the same people in another form, bring back the records as they were."
            )
        elif known.staying and (known.new or known.gone):
            found.append(
                f"party {party!r}: {known.staying} units stay and keep what was spent on them, {known.new} are new, "
                f"{known.gone} are gone."
            )
    return found if len(found) <= 3 else [*found[:3], f"{len(found) - 3} more parties have other units than before."]


def _warn_about_held_out(federation: Federation, ledger: Ledger) -> list[str]:
    """A warning where held-out units have no budget left for all evaluations of this run."""
    plan = federation.evaluation
    if plan is None:
        return []
    whole = RunPlan((plan.planned,), plan.delta)
    poor = [account.name for account in plan.accounts if not ledger.fits(account.name, "", whole)]
    if not poor:
        return []
    return [
        f"The held-out units of {', '.join(poor[:3])}{', ...' if len(poor) > 3 else ''} have too little budget in "
        f"{ledger.path} for the evaluations of this run, so they are not scored; raise it: fulcrum ledger "
        f"{ledger.path} --party {poor[0]} --budget EPSILON"
    ]
