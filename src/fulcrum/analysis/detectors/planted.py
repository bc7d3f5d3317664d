"""Bugs that are planted into the real code for a moment, to see that the suite finds them.

    with PLANTED["half noise"].planted():
        report = run_suite(PLANTED["half noise"].settings)
    assert report.alarms

Each replaces one function of the library at the place where it is used. Nothing here is used by the library itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from fulcrum.analysis.detectors import mistakes
from fulcrum.analysis.detectors.mistakes import Plant, plant_all, replace_at
from fulcrum.clipping import RULES
from fulcrum.clipping.fixed import FIXED
from fulcrum.gradients import outer_products
from fulcrum.gradients.stacked import passes
from fulcrum.privacy import accounting, bounds, mechanism
from fulcrum.privacy.ledger import Ledger, composition
from fulcrum.privacy.plan import party_group
from fulcrum.privacy.statement import facts as statement_facts
from fulcrum.rng import CipherRandomness
from fulcrum.runs import active_run
from fulcrum.runs import preparation as run_preparation
from fulcrum.settings.schema import Settings
from fulcrum.training import client, clipped_sum, evaluate, loop, pairwise, problem
from fulcrum.training import round as training_round

BASE = Settings().replace(
    data={"source": "probe"},
    train={"rate": 0.25, "rounds": 4, "lr": 0.5},
    clip={"rule": "fixed", "C0": 1.0},
    privacy={"sigma": 1.3, "unit": "example", "randomness": "seeded"},
    run={"engine": "reference"},
)
"""Settings of cases that need no others."""


@dataclass(frozen=True)
class PlantedBug:
    """A bug, the settings under which it shows, and how it is planted."""

    what: str
    plant: Plant
    changes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        """The case."""
        return BASE.replace(**{name: dict(values) for name, values in self.changes.items()})

    def planted(self) -> AbstractContextManager[Any]:
        """The bug is in the code while this is open."""
        return self.plant()


HELD_OUT: dict[str, dict[str, Any]] = {
    "data": {"validation": 0.25},
    "privacy": {"evaluation_epsilon": 4.0, "randomness": "secure"},
    "run": {"evaluate_every": 1},
}
STATISTICS: dict[str, dict[str, Any]] = {"clip": {"rule": "quantile"}}

PLANTED: dict[str, PlantedBug] = {
    # --- those that the project names
    "half noise": PlantedBug(
        "the noise has half of its declared strength", replace_at(mechanism, "scale_noise", mistakes.scaled(0.5))
    ),
    "noise of another C": PlantedBug(
        "the noise is scaled to the C of the first round, not to that of the clipping",
        lambda: mock.patch.object(mechanism, "scale_noise", mistakes.first_C_only(mechanism.scale_noise)),
    ),
    "one layer unclipped": PlantedBug(
        "the weights of one layer are added up without their factors",
        replace_at(clipped_sum, "sum_clipped_rows", mistakes.leave_layer),
    ),
    "same noise in every round": PlantedBug(
        "the stream of the noise does not depend on the round",
        replace_at(
            CipherRandomness,
            "locate_stream",
            mistakes.other_streams(mistakes.for_purpose("noise", lambda k: (k[0], 0, *k[2:]))),
        ),
    ),
    "twice the sampling rate": PlantedBug(
        "units are sampled twice as often", replace_at(client, "poisson_sample_units", mistakes.twice_the_rate)
    ),
    "shuffling": PlantedBug(
        "batches of a fixed size from shuffled records in place of Poisson sampling",
        replace_at(client, "poisson_sample_units", mistakes.shuffle),
    ),
    "actual batch as divisor": PlantedBug(
        "the sum is divided by the number of units that were sampled", mistakes.divide_by_actual_batch
    ),
    "ghost norms without rounding bound": PlantedBug(
        "norms from float32 Gram matrices, without a bound for their rounding",
        plant_all(
            replace_at(passes, "ghost_squared_norms", lambda _: mistakes.compute_careless_norms),
            replace_at(outer_products, "ghost_squared_norms", lambda _: mistakes.compute_careless_norms),
        ),
        {"run": {"engine": "parallel"}},
    ),
    "reused pair stream": PlantedBug(
        "the mask of a pair is the same in every round",
        replace_at(
            pairwise, "name_stream", lambda original: lambda what, round, *pair, attempt=0: original(what, 0, *pair)
        ),
        {"privacy": {"aggregation": "pairwise"}},
    ),
    "forgotten round": PlantedBug("the ledger forgets the second round", mistakes.forgotten(lambda round: round == 1)),
    "moo-paper sold as sound": PlantedBug(
        "C follows from raw losses of the batch (moo-paper)",
        lambda: mock.patch.dict(RULES._values, {"moo-paper": dataclasses.replace(RULES["moo-paper"], sound=True)}),
        {"clip": {"rule": "moo-paper"}},
    ),
    "validation in the clear": PlantedBug(
        "counts of private held-out records are released without noise",
        replace_at(evaluate, "release_sums", mistakes.exact_sums),
        HELD_OUT,
    ),
    "negative factors": PlantedBug(
        "a rule returns negative factors, and nobody limits them",
        plant_all(
            lambda: mock.patch.dict(RULES._values, {"fixed": dataclasses.replace(FIXED, clip=mistakes.negative)}),
            replace_at(bounds, "keep_nonnegative", lambda _: torch.nan_to_num),
            replace_at(bounds, "limit_factors", lambda _: mistakes.limit_above_only),
        ),
    ),
    "seed reused over runs": PlantedBug(
        "runs with other settings draw the same noise from the same seed",
        plant_all(
            replace_at(problem, "identify_releases", mistakes.same_run),
            replace_at(loop, "identify_releases", mistakes.same_run),
            replace_at(run_preparation, "identify_releases", mistakes.same_run),
        ),
    ),
    # --- and others
    "Laplace noise": PlantedBug(
        "the noise is Laplace's of the same deviation",
        lambda: mock.patch.object(mechanism, "release_rows_on_grid", mistakes.released_by(mistakes.add_laplace)(None)),
    ),
    "noise on half of the coordinates": PlantedBug(
        "only the first half of the coordinates has noise",
        lambda: mock.patch.object(
            mechanism, "release_rows_on_grid", mistakes.released_by(mistakes.add_to_first_half)(None)
        ),
    ),
    "coarse noise": PlantedBug(
        "the noise has few different values",
        lambda: mock.patch.object(mechanism, "release_rows_on_grid", mistakes.released_by(mistakes.add_coarse)(None)),
    ),
    "correlated coordinates": PlantedBug(
        "a third of the noise's variance is the same number in all coordinates",
        lambda: mock.patch.object(
            mechanism, "release_rows_on_grid", mistakes.released_by(mistakes.add_correlated)(None)
        ),
    ),
    "same noise at all parties": PlantedBug(
        "the stream of the noise does not depend on the party",
        replace_at(
            CipherRandomness,
            "locate_stream",
            mistakes.other_streams(mistakes.for_purpose("noise", lambda k: (*k[:2], 0, *k[3:]))),
        ),
    ),
    "same noise in every step": PlantedBug(
        "the stream of the noise does not depend on the local step",
        replace_at(
            CipherRandomness,
            "locate_stream",
            mistakes.other_streams(mistakes.for_purpose("noise", lambda k: (*k[:3], 0, *k[4:]))),
        ),
        {"train": {"steps": 2}},
    ),
    "sigma rounded down": PlantedBug(
        "the calibrated sigma is cut after one digit",
        replace_at(party_group, "calibrate_sigma", mistakes.round_down),
        {"privacy": {"sigma": None, "epsilon": 2.0}},
    ),
    "one secret for all runs": PlantedBug(
        "secure randomness is seeded with a constant",
        plant_all(replace_at(problem, "make_randomness", mistakes.unseeded)),
        {"privacy": {"randomness": "secure"}},
    ),
    "clipping by the largest entry": PlantedBug(
        "gradients are clipped by their largest entry, not by their Euclidean norm",
        replace_at(clipped_sum, "measure_group_norms", mistakes.use_largest_entry),
    ),
    "clipped batch": PlantedBug(
        "the gradient of the whole batch is clipped, not that of each unit",
        replace_at(client, "compute_contribution", mistakes.clip_the_batch),
    ),
    "units counted twice": PlantedBug(
        "each person counts once per record",
        replace_at(clipped_sum, "sum_clipped_rows", mistakes.add_up_twice),
        {"privacy": {"unit": "person"}},
    ),
    "one sample for all rounds": PlantedBug(
        "the sample is drawn once and used in every round",
        replace_at(client, "poisson_sample_units", mistakes.one_sample_for_all),
    ),
    "preferred units": PlantedBug(
        "some units are sampled more often than others",
        replace_at(client, "poisson_sample_units", mistakes.prefer_some),
    ),
    "statistics without noise": PlantedBug(
        "the statistics of a rule have a hundredth of their noise",
        replace_at(mechanism, "scale_noise", mistakes.scaled(1.0, 0.01)),
        STATISTICS,
    ),
    "statistics at a wrong sigma": PlantedBug(
        "steps with statistics are charged at a larger sigma than they have",
        replace_at(mechanism, "make_step_event", mistakes.cheaper_event),
        STATISTICS,
    ),
    "unpaid evaluation": PlantedBug(
        "held-out private records are scored without an entry in a ledger",
        plant_all(
            replace_at(evaluate, "reserve_evaluation", mistakes.unpaid),
            replace_at(Ledger, "settle", mistakes.settle_known),
        ),
        HELD_OUT,
    ),
    "resumed run does not pay": PlantedBug(
        "rounds after a resume are not written to the ledger", mistakes.forgotten(lambda round: round >= 2)
    ),
    "epsilon of another party": PlantedBug(
        "the statement shows one party's epsilon for another",
        replace_at(statement_facts, "_list_costs", mistakes.rotate_costs),
        {"privacy": {"sigma": None, "epsilon": 2.0, "budgets": {"p0": 1.0}}},
    ),
    "delta halved in the statement": PlantedBug(
        "the statement has another delta than the run",
        replace_at(active_run, "make_statement", mistakes.change_statement(delta=lambda delta: delta / 2)),
    ),
    "epsilon of one round": PlantedBug(
        "the statement has the epsilon of one round in place of that of all",
        replace_at(active_run, "make_statement", mistakes.change_statement(epsilon=lambda epsilon: epsilon / 2)),
    ),
    "cheap accountant": PlantedBug(
        "the accountant counts half of each step's cost",
        plant_all(
            replace_at(accounting, "compute_step_rdp", mistakes.halve_rdp),
            replace_at(composition, "compute_step_rdp", mistakes.halve_rdp),
        ),
        {"privacy": {"sigma": 1.3725}},
    ),
    "half noise of the server": PlantedBug(
        "a trusted server adds half of its noise",
        replace_at(mechanism, "scale_noise", mistakes.scaled(0.5)),
        {"privacy": {"unit": "client"}, "train": {"participation": 0.5}},
    ),
    "clients that always join": PlantedBug(
        "every client takes part in every round, and secret sampling is accounted",
        replace_at(
            training_round,
            "draw_cohort",
            lambda original: lambda randomness, t, terms, attempt=0: list(range(terms.clients)),
        ),
        {"privacy": {"unit": "client"}, "train": {"participation": 0.5}},
    ),
}
"""Planted bugs by name."""
