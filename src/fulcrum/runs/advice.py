"""Advice: a whole settings file for a budget, from rehearsals on made-up data alone.

    advice = fulcrum.runs.advise(settings)        # settings: data, model, epsilon, and the most rounds
    advice.settings                               # ready to train
    print("\\n".join(advice.reasons))

A recipe is a way to spend the budget: sampling rate, rounds, local steps, server optimiser, initial weights. Each has
its own noise, by the accountant. First rate and rounds, then the others around the best: every recipe is played in
small runs on the same made-up tasks, from several step lengths, and counts by its best. Of recipes within half a point
of the best the one with the fewest rounds wins, then the one with the fewest passes over the data. Last, step, C and
schedule of the winner are rehearsed.

Nothing of the records is read but their number and shape, as in any rehearsal: it costs no privacy.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fulcrum.clipping.moo import MOO
from fulcrum.data import Dataset
from fulcrum.data.sampling import count_units_per_party
from fulcrum.errors import ConfigError
from fulcrum.models.build import is_built_in
from fulcrum.models.pretrain import ZERO_INIT_NAME
from fulcrum.privacy.plan import make_plan
from fulcrum.runs.preparation import prepare_unrehearsed
from fulcrum.runs.rehearsal import find_refusal, read_rehearsal_facts
from fulcrum.runs.rehearsal.choice import Rehearsed, list_tasks, rehearse_on_stage
from fulcrum.runs.rehearsal.effort import EFFORTS, PASS_OVERHEAD, WORK, Load, estimate_work
from fulcrum.runs.rehearsal.facts import RehearsalFacts, choose_batch
from fulcrum.runs.rehearsal.memory import recall
from fulcrum.runs.rehearsal.public_set import fit_facts, load_public_set
from fulcrum.runs.rehearsal.stage import Candidate, Stage
from fulcrum.settings.derived import compute_local_steps
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation

RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ROUND_PARTS = (1.0, 0.5, 0.25)
"""Rounds that are tried, as parts of train.rounds, the most that the user has time for."""
LOCAL_STEPS = 4
"""Local steps that are tried beside one, in a quarter and in half of the rounds."""
SERVERS = ("sgd", "momentum")
MOST_PASSES = 4.0
"""Passes over the data that a recipe may make, as a multiple of those of the settings."""
STEP_SCALES = (0.5, 2.0, 8.0)
"""Step lengths of a recipe, as multiples of the one that moo would take without a rehearsal."""
LEVEL = 0.5
"""Points within which recipes count as equally good."""
EXAMPLES, MOST_PARTIES = 1500, 4
"""Records and parties of the small runs."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """A way to spend a budget. rounds T, local steps N per round, sampling rate q of a step."""

    rate: float
    rounds: int
    steps: int
    server: str
    init: str

    @property
    def passes(self) -> float:
        """Passes over the data: q T N."""
        return self.rate * self.rounds * self.steps

    def describe(self) -> str:
        """In words, for people."""
        steps = "one local step" if self.steps == 1 else f"{self.steps} local steps"
        start = "" if self.init == "random" else f", weights start at {self.init}"
        return f"{self.rounds} rounds of {steps} at rate {self.rate:g}, server {self.server}{start}"

    def apply(self, settings: Settings) -> Settings:
        """The settings with this recipe."""
        train = {"rate": self.rate, "rounds": self.rounds, "steps": self.steps, "epochs": 0.0, "server": self.server}
        return settings.replace(train=train, model={"init": self.init})


@dataclass(frozen=True)
class PlayedRecipe:
    """A recipe with its score on made-up data in points (higher is better) and its noise along any one direction."""

    recipe: Recipe
    score: float
    noise: float


@dataclass(frozen=True)
class Advice:
    """settings: ready to train. played: every recipe that was tried, the best first. rehearsed: None where the run will
    rehearse by itself. reasons: sentences for people. seconds: how long it took."""

    settings: Settings
    recipe: Recipe
    played: tuple[PlayedRecipe, ...]
    rehearsed: Rehearsed | None
    reasons: tuple[str, ...]
    seconds: float


def advise(
    settings: Settings,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    say: Say | None = None,
) -> Advice:
    """Recommend rate, rounds, local steps, server optimiser, initial weights, step, C and schedule for a budget.

    settings: data, model, epsilon and delta; train.rounds is the most rounds. dataset, model: where no settings name
    them. say: called with lines on the progress. About two minutes of two cores at most.
    """
    began, tell = time.monotonic(), say or (lambda line: None)
    if settings.privacy.epsilon is None:
        raise ConfigError("privacy.epsilon is missing, and advice is for a budget; give --epsilon.")
    plain = settings.replace(clip={"rule": MOO.name, "rehearse": False, "step": 0.0})
    base = prepare_unrehearsed(plain, dataset, model)
    refusal = find_refusal(base, patient=True)  # a heavy model gets less, and rehearses when it runs
    if refusal:
        raise ConfigError(f"no advice can be given, for nothing can be rehearsed here: {refusal}.")
    table = RecipeTable(base, model, load_public_set(base), tell)
    own = table.own
    tell(f"your own: {own.describe()}")
    first = table.play([recipe for recipe in table.list_budgets() if recipe != own] + [own])
    best = choose(first)
    others = [recipe for recipe in table.list_variations(best.recipe) if recipe not in table.known]
    played = [*first, *table.play(others)]
    best = choose(played)
    chosen = best.recipe.apply(plain).replace(clip={"rehearse": True})
    tell(f"chosen: {best.recipe.describe()}")
    answer = table.rehearse(best.recipe)
    if answer is not None:
        chosen = answer.candidate.apply(chosen, best.recipe.steps)
    ranked = sorted(played, key=lambda one: -one.score)
    reasons = explain(best, table.get(own, played), ranked, answer, table.is_public)
    return Advice(chosen, best.recipe, tuple(ranked), answer, reasons, round(time.monotonic() - began, 1))


def choose(played: Sequence[PlayedRecipe]) -> PlayedRecipe:
    """Of those within `LEVEL` of the best: the fewest rounds, then the fewest passes over the data."""
    top = max(one.score for one in played)
    level = [one for one in played if one.score >= top - LEVEL]
    return min(level, key=lambda one: (one.recipe.rounds, one.recipe.passes, one.recipe.server != "sgd", -one.score))


class RecipeTable:
    """Plays recipes for one federation. known: those that were played."""

    def __init__(self, base: Federation, model: nn.Module | None, public: Dataset | None, say: Say) -> None:
        self.base, self.model, self.public, self.say = base, model, public, say
        train, own = base.settings.train, base.settings.model.init
        self.own = Recipe(train.rate, train.rounds, compute_local_steps(train), train.server, own)
        self.known: dict[Recipe, PlayedRecipe] = {}
        self.effort = choose_recipe_effort(read_rehearsal_facts(base))

    @property
    def is_public(self) -> bool:
        """Whether the user's public records are played on."""
        return self.public is not None

    def list_budgets(self) -> list[Recipe]:
        """Rates and rounds, with one local step, within the passes over the data that the user can afford."""
        own, effort = self.own, self.effort
        most = MOST_PASSES * max(own.passes, 1.0)
        rounds = [max(1, round(own.rounds * part)) for part in ROUND_PARTS[: effort.round_parts]]
        rates = [rate for rate in RATES if rate >= effort.least_rate] + [own.rate]
        found = [
            Recipe(rate, count, 1, "sgd", own.init)
            for count in dict.fromkeys(rounds)
            for rate in sorted(set(rates))
            if rate * count <= most
        ]
        return list(dict.fromkeys(found))

    def list_variations(self, best: Recipe) -> list[Recipe]:
        """Other local steps, servers and initial weights around the best."""
        found = [dataclasses.replace(best, server=server) for server in SERVERS]
        for rounds in (best.rounds // 2, best.rounds // 4):
            found.append(dataclasses.replace(best, steps=LOCAL_STEPS, rounds=max(1, rounds)))
        if best.init == "random" and self.base.problem.layout.depth == 1:
            found.append(dataclasses.replace(best, init=ZERO_INIT_NAME))
        most = MOST_PASSES * max(self.own.passes, 1.0)
        return [recipe for recipe in dict.fromkeys(found) if recipe.passes <= max(most, best.passes)]

    def play(self, recipes: Iterable[Recipe]) -> list[PlayedRecipe]:
        """Each recipe's score: of its best step length, in small runs on the same made-up tasks."""
        found = []
        for recipe in recipes:
            if recipe not in self.known:
                facts = self._read_facts(recipe)
                # Momentum adds a step up over many rounds: each one is shorter by as much.
                first = facts.default_step * (1 - self._get_momentum(recipe))
                candidates = [Candidate("plain", 1.0, first * scale) for scale in STEP_SCALES]
                stage = Stage(facts, self.model, self.public)
                rounds = min(facts.rounds, max(LEAST_ROUNDS, self.effort.rounds // facts.steps))
                scores = stage.play(candidates, rounds, list_tasks(self.effort.tasks, 0))
                score = max(sum(own.values()) / len(own) for own in scores.values())
                self.known[recipe] = PlayedRecipe(recipe, round(score, 2), facts.noise)
                self.say(f"{score:6.1f}  {recipe.describe()}")
            found.append(self.known[recipe])
        return found

    def _get_momentum(self, recipe: Recipe) -> float:
        return self.base.settings.train.server_momentum if recipe.server == "momentum" else 0.0

    def get(self, recipe: Recipe, played: Sequence[PlayedRecipe]) -> PlayedRecipe | None:
        """A recipe among those played."""
        return next((one for one in played if one.recipe == recipe), None)

    def rehearse(self, recipe: Recipe) -> Rehearsed | None:
        """Step, C and schedule of a recipe: the known answer, or a short rehearsal; None where that would take long."""
        facts = fit_facts(read_rehearsal_facts(self._apply(recipe)), self.public)
        known = recall(facts.digest())
        if known is not None:
            return known
        own = not is_built_in(facts.settings.model)
        load = Load(facts.work, facts.rounds, facts.steps, facts.parties, own)
        short = [effort for effort in EFFORTS if estimate_work(load, effort) <= PART * WORK]
        if not short:
            return None
        return rehearse_on_stage(Stage(dataclasses.replace(facts, effort=short[0]), self.model, self.public))

    def _apply(self, recipe: Recipe) -> Federation:
        """The federation with a recipe: its own plan, the same data and model."""
        base, problem = self.base, self.base.problem
        settings = recipe.apply(base.settings)
        units = count_units_per_party(problem.dataset, problem.partition, settings.privacy.unit)
        plan = make_plan(settings, problem.partition, units, problem.rule)
        return dataclasses.replace(base, settings=settings, plan=plan)

    def _read_facts(self, recipe: Recipe) -> RehearsalFacts:
        """The facts of a recipe's small runs: as many records for every recipe, so that their tasks are the same."""
        federation = self._apply(recipe)
        facts, plan = read_rehearsal_facts(federation), federation.plan
        facts = dataclasses.replace(facts, parties=min(facts.parties, MOST_PARTIES))
        declared = float((plan.rates * plan.sizes).sum()) * plan.participation
        batch = choose_batch(self.effort.batch, declared, facts.parties)
        total = int(torch.as_tensor(plan.sizes).sum())
        examples = max(min(total, EXAMPLES), batch, facts.parties * 10)
        return fit_facts(dataclasses.replace(facts, batch=batch, examples=examples), self.public)


@dataclass(frozen=True)
class RecipeEffort:
    """How much is played of each recipe, and how many recipes: a heavy model gets fewer of both."""

    tasks: int
    batch: int
    rounds: int
    round_parts: int
    least_rate: float


RECIPE_EFFORTS = (
    RecipeEffort(tasks=2, batch=64, rounds=50, round_parts=3, least_rate=0.02),
    RecipeEffort(tasks=1, batch=64, rounds=50, round_parts=3, least_rate=0.05),
    RecipeEffort(tasks=1, batch=32, rounds=40, round_parts=2, least_rate=0.05),
    RecipeEffort(tasks=1, batch=32, rounds=30, round_parts=2, least_rate=0.1),
)
"""From light models to heavy ones."""
LEAST_ROUNDS = 10
TYPICAL_RECIPES = (20, 16, 12, 10)
"""Recipes that each effort tries, about; those of several local steps count as several."""
PART = 1 / 3
"""Parts of two minutes of two cores: for the recipes, and again for the last rehearsal."""


def choose_recipe_effort(facts: RehearsalFacts) -> RecipeEffort:
    """The largest effort that takes `PART` of two minutes of two cores; the smallest where none does."""
    own = not is_built_in(facts.settings.model)
    for effort, recipes in zip(RECIPE_EFFORTS, TYPICAL_RECIPES, strict=True):
        of_round = 4 * facts.work * effort.batch + PASS_OVERHEAD[own]
        runs = recipes * effort.tasks * len(STEP_SCALES)
        if of_round * min(facts.rounds, effort.rounds) * runs <= PART * WORK:
            return effort
    return RECIPE_EFFORTS[-1]


def explain(
    best: PlayedRecipe,
    own: PlayedRecipe | None,
    ranked: Sequence[PlayedRecipe],
    answer: Rehearsed | None,
    public: bool,
) -> tuple[str, ...]:
    """Why this recipe, in sentences."""
    what = "your public records" if public else "made-up records of the same shape"
    found = [f"{best.recipe.describe()}: {best.score:.1f} points on {what}, of {len(ranked)} ways to spend the budget."]
    top = ranked[0]
    if top.recipe != best.recipe:
        found.append(
            f"{top.recipe.describe()} has {top.score:.1f} points, {top.score - best.score:.1f} more; that is within "
            f"{LEVEL:g}, and costs more rounds or passes."
        )
    if own is not None and own.recipe != best.recipe:
        found.append(
            f"Your own settings, {own.recipe.describe()}, have {own.score:.1f} points; their noise along one direction "
            f"is {own.noise:.2g} C per step, here it is {best.noise:.2g} C."
        )
    if answer is None:
        found.append("Step, C and schedule are rehearsed when the run starts: here that would take long.")
    else:
        found.append(f"Step, C and schedule were rehearsed: {answer.candidate.describe()}.")
    found.append(
        "Nothing but declared numbers, shapes and settings was used of the private records, so this costs no privacy."
    )
    return tuple(found)


__all__ = ["Advice", "PlayedRecipe", "Recipe", "advise"]
