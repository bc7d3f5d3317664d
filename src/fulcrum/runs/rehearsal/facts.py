"""The public facts that decide a rehearsal, and the small run that stands for the real one.

A rehearsal needs the real run's noise in units of C: the mean of a batch has noise sigma sqrt(K) / batch along every
direction, whatever the batch is made of. So the small run may have fewer examples, and a noise multiplier that gives
the same noise. What must not shrink: the number of rounds (longer steps meet the curvature of the loss), the batch much
below a hundred (sampling moves the mean along the few directions in which the loss bends, where isotropic noise is
small), and the skew between parties where they make several steps. Where batch or rounds had to shrink all the same,
what wins has to win once more in a check that is closer to the real run (`enlarge`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.clipping.moo import MOO
from fulcrum.data import Dataset
from fulcrum.data.made_up import DataFacts, read_data_facts
from fulcrum.data.records import map_inputs
from fulcrum.models.build import is_built_in
from fulcrum.runs.rehearsal.effort import (
    CHECK_ROUNDS,
    HEAVY_FINAL,
    Effort,
    Load,
    choose_effort,
    estimate_check,
    estimate_work,
)
from fulcrum.settings.derived import compute_local_steps
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation, make_model_facts
from fulcrum.training.problem import compute_architecture_digest

VERSION = 8
"""Increased when the same facts may give another answer."""
MOST_PARTIES = 10
"""Parties of the small run where parties make several local steps; otherwise one stands for all."""
LEAST_EXAMPLES, MOST_EXAMPLES = 1500, 4000
"""Records of the small run, where so many are declared: about as many as give the real run's number of epochs."""
TEST_EXAMPLES = 1000
CHECK_TIMES = 4
"""How many times larger the batch of the check is, up to the real run's: half of the sampling noise."""
LEAST_PARTY_BATCH = 8
"""Expected examples of a party's local step."""
SKEWED_TASKS = ("classification", "binary")
"""Tasks whose labels a split may go by."""
NOISE_STEPS = 2
"""Noise is rounded to so many steps per factor of 2, so that similar runs share an answer."""


@dataclass(frozen=True)
class RehearsalFacts:
    """All that a rehearsal depends on. All of it is public.

    noise: standard deviation of one step's mean gradient along any direction, in units of C, over all parties. batch,
    examples, parties: of the small run, and effort: how much is played. model_key: digest of the architecture. dim:
    parameters. default_step: first step length that moo would take without a rehearsal. work: multiplications of one
    example's forward pass. rule: moo, or fixed, for which C and the learning rate alone are chosen. public: fingerprint
    of the user's public records that take the place of made-up ones (clip.rehearse_on). check_batch, check_examples: of
    the check, where the batch of the small run had to shrink; where it did not, they are those of the small run.
    """

    data: DataFacts
    settings: Settings
    model_key: str
    dim: int
    rounds: int
    steps: int
    parties: int
    noise: float
    batch: int
    examples: int
    default_step: float
    work: float
    effort: Effort
    rule: str = "moo"
    public: str = ""
    check_batch: int = 0
    check_examples: int = 0

    def digest(self) -> str:
        """16 hexadecimal digits: equal for runs that share an answer."""
        plain = {
            "version": VERSION,
            "data": dataclasses.asdict(self.data),
            "model": {**dataclasses.asdict(self.settings.model), "key": self.model_key},
            "train": {name: getattr(self.settings.train, name) for name in TRAIN_FACTS},
            "rule": self.rule,
            "numbers": [self.dim, self.rounds, self.steps, self.parties, self.noise, self.batch, self.examples],
            "split": _get_split(self.settings) if self.parties > 1 else {},
            **({"public": self.public} if self.public else {}),
            **({"check": [self.check_batch, self.check_examples]} if self.has_check else {}),
        }
        text = json.dumps(plain, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def has_check(self) -> bool:
        """Whether a check would be closer to the real run than the small run is: in its batch or in its rounds."""
        return self.check_batch > self.batch or self.unmerges

    @property
    def unmerges(self) -> bool:
        """Whether a check merges fewer rounds than the small run does."""
        return min(self.rounds, CHECK_ROUNDS) > min(self.rounds, self.effort.rounds)

    @property
    def shrinks_in_check(self) -> bool:
        """Whether even the check has a smaller batch than the real run."""
        return self.check_batch >= CHECK_TIMES * self.batch

    @property
    def merges_in_check(self) -> bool:
        """Whether even the check merges rounds."""
        return self.rounds > CHECK_ROUNDS

    @property
    def final_tasks(self) -> int:
        """Tasks of the last stage: none for a heavy model that is checked."""
        return 0 if self.has_check and self.effort.final <= HEAVY_FINAL else self.effort.final

    def enlarge(self) -> RehearsalFacts:
        """The facts of the check: a larger batch with the same noise in units of C, and more records alike."""
        return dataclasses.replace(self, batch=self.check_batch, examples=self.check_examples)

    def estimate_work(self) -> float:
        """Multiplications of a rehearsal, about."""
        own = not is_built_in(self.settings.model)
        load = Load(self.work, self.rounds, self.steps, self.parties, own)
        return estimate_work(load, self.effort) + (estimate_check(load, self.check_batch) if self.has_check else 0.0)


TRAIN_FACTS = (
    *("server", "server_lr", "server_momentum", "server_beta2", "server_eps", "ema", "weight_decay"),
    *("schedule", "warmup", "decay_rounds", "decay"),
)
"""Settings of [train] that a rehearsal takes as they are."""


def read_rehearsal_facts(federation: Federation, balance: tuple[float, ...] = ()) -> RehearsalFacts:
    """The facts of a run: from its settings, its model, its declared sizes and the shapes of its records."""
    problem, plan, train = federation.problem, federation.plan, federation.settings.train
    steps, dim = compute_local_steps(train), problem.layout.dim
    noise = round_noise(plan.compute_noise_to_signal(dim).direction)
    declared = float((plan.rates * plan.sizes).sum()) * plan.participation
    parties = 1 if steps == 1 else max(1, min(MOST_PARTIES, round(plan.parties * plan.participation)))
    work = count_multiplications(problem.model, problem.dataset)
    own = not is_built_in(federation.settings.model)
    effort = choose_effort(Load(work, train.rounds, steps, parties, own))
    batch = choose_batch(effort.batch, declared, parties)
    total, rate = int(plan.sizes.sum()), declared / max(float(plan.sizes.sum()) * plan.participation, 1.0)
    larger = choose_batch(CHECK_TIMES * batch, declared, parties)
    examples, more = (
        round_size(max(min(total, int(min(max(own / max(rate, 1e-9), LEAST_EXAMPLES), most))), own, parties * 10))
        for own, most in ((batch, MOST_EXAMPLES), (larger, CHECK_TIMES * MOST_EXAMPLES))
    )
    return RehearsalFacts(
        data=read_data_facts(problem.dataset, problem.model, balance),
        settings=federation.settings,
        model_key=digest_model(problem.model),
        dim=dim,
        rounds=train.rounds,
        steps=steps,
        parties=parties,
        noise=noise,
        batch=batch,
        examples=examples,
        default_step=find_default_step(federation, noise),
        work=work,
        effort=effort,
        rule=problem.rule.name,
        check_batch=larger,
        check_examples=more,
    )


def find_default_step(federation: Federation, noise: float) -> float:
    """moo's own first step length for these facts."""
    known = make_model_facts(federation)
    clip = dataclasses.replace(federation.settings.clip, step=0.0, C0=1.0, search=True)
    state = MOO.init(clip, dataclasses.replace(known, noise=noise / math.sqrt(known.steps), lr=1.0))
    return float(state["step"])


def count_multiplications(model: nn.Module, data: Dataset) -> float:
    """Multiplications of one example's forward pass, from a dry run on zeros of the records' shape."""
    found = [0.0]

    def count(layer: nn.Module, inputs: object, outputs: object) -> None:
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() >= 2 and isinstance(outputs, Tensor):
            found[0] += outputs.numel() * math.prod(weight.shape[1:])

    hooks = [layer.register_forward_hook(count) for layer in model.modules()]
    try:
        records = data.train if data.train is not None else data.test_records
        device = next(model.parameters()).device
        with torch.no_grad():
            blank = map_inputs(lambda value: torch.zeros_like(value[:1]).to(device), records.x)
            model(**blank) if isinstance(blank, dict) else model(blank)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] + sum(value.numel() for value in model.parameters())


def round_noise(noise: float) -> float:
    """The noise on a grid of `NOISE_STEPS` per factor of 2."""
    return math.pow(2.0, round(math.log2(noise) * NOISE_STEPS) / NOISE_STEPS)


def round_size(count: int) -> int:
    """The number of examples with two digits: declared sizes need not be exact."""
    digits: int = 10 ** max(0, len(str(count)) - 2)
    return round(count / digits) * digits


def choose_batch(affordable: int, declared: float, parties: int) -> int:
    """Expected examples of one step of the small run: the real run's where that is affordable."""
    return max(int(min(affordable, max(declared, 1.0))), LEAST_PARTY_BATCH * parties if parties > 1 else 4)


def _get_split(settings: Settings) -> dict[str, Any]:
    """How records are split between parties: as the settings say; parties that are given are taken to be skewed."""
    data = settings.data
    if data.partition in ("given", "auto"):
        return {"partition": "dirichlet", "alpha": 0.5}
    return {"partition": data.partition, "alpha": data.alpha, "shards": data.shards}


def digest_model(model: nn.Module) -> str:
    """The architecture and the shapes of its parameters; not the initial weights: a rehearsal draws its own."""
    shapes = [(name, tuple(value.shape)) for name, value in model.named_parameters()]
    return hashlib.blake2b(compute_architecture_digest(model) + repr(shapes).encode(), digest_size=8).hexdigest()


def make_small_settings(facts: RehearsalFacts, rounds: int, seed: int) -> Settings:
    """The settings of the small run with so many rounds. Fewer rounds than the real run's mean longer steps.

    A round of the small run stands for m = T / rounds rounds: noise of m steps of which each moves the weights by s is
    that of one step of m s with noise / sqrt(m). Memories (momentum, moving average) shorten alike.
    """
    train, merged = facts.settings.train, facts.rounds / rounds
    clip = facts.settings.clip
    sigma = facts.noise / math.sqrt(merged) * facts.batch / math.sqrt(facts.parties)
    skewed = facts.parties > 1 and facts.data.task.name in SKEWED_TASKS
    split = _get_split(facts.settings) if skewed else {"partition": "iid"}
    return Settings(
        method=facts.settings.method,
        task=facts.data.task,
        model=facts.settings.model,
    ).replace(
        data={"parties": facts.parties, "min_examples": 1, **split},
        train={
            **{name: getattr(train, name) for name in TRAIN_FACTS},
            "rounds": rounds,
            "steps": facts.steps,
            "rate": min(1.0, facts.batch / facts.examples),
            "ema": train.ema**merged,
            "server_momentum": train.server_momentum**merged,
            "server_beta2": train.server_beta2**merged,
            "decay_rounds": tuple(round(t / merged) for t in train.decay_rounds),
            "warmup": round(train.warmup / merged),
        },
        clip={"rule": "moo", "eta_C": min(clip.eta_C * merged, 0.3), "beta": clip.beta**merged},
        privacy={"sigma": sigma, "randomness": "seeded", "unit": "example", "arithmetic": "fast"},
        run={"seed": seed, "evaluate_every": rounds, "device": facts.settings.run.device},
    )


def scale_step(facts: RehearsalFacts, rounds: int) -> float:
    """By what a step length of the real run is multiplied in a small run of so many rounds."""
    merged, train = facts.rounds / rounds, facts.settings.train
    if train.server != "momentum":
        return merged
    keep = train.server_momentum
    return merged * (1 - math.pow(keep, merged)) / (1 - keep)
