"""Advice: a whole settings file for a budget, from rehearsals on made-up data alone.

    advice = fulcrum.runs.advise(settings)        # settings: data, model, epsilon, and the most rounds
    advice.settings                               # ready to train
    print("\\n".join(advice.reasons))

A recipe is a way to spend the budget: sampling rate, rounds, local steps, server optimiser, initial weights. Each has
its own noise, by the accountant.

1. The rate needs no trial: with the same rounds a larger one has less noise of both kinds, so it is the smallest one
   whose noise is within a few percent of the least that the allowed passes over the data give. Your own settings with
   that rate are the recipe to beat.
2. Others (fewer rounds, momentum, several local steps, zero weights for one layer) are played in small runs on the same
   made-up tasks, without merging rounds up to 200: a merged run cannot show what more rounds are worth.
3. One of them is chosen if it is better by more than the margin of a check, and better again by as much with a
   larger batch on other tasks. Made-up tasks are often too easy to tell 95 from 97 points: in doubt your own rounds
   stay.
4. Step, C and schedule of the winner are rehearsed.

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
from fulcrum.data.made_up import Variation
from fulcrum.data.sampling import count_units_per_party
from fulcrum.errors import ConfigError
from fulcrum.models.build import is_built_in
from fulcrum.models.pretrain import ZERO_INIT_NAME
from fulcrum.privacy.plan import make_plan
from fulcrum.runs.preparation import prepare_unrehearsed
from fulcrum.runs.rehearsal import find_refusal, read_rehearsal_facts
from fulcrum.runs.rehearsal.choice import Rehearsed, compute_margin, list_tasks, rehearse_on_stage
from fulcrum.runs.rehearsal.effort import EFFORTS, PASS_OVERHEAD, WORK, Load, estimate_work
from fulcrum.runs.rehearsal.facts import CHECK_TIMES, RehearsalFacts, choose_batch
from fulcrum.runs.rehearsal.memory import recall
from fulcrum.runs.rehearsal.public_set import fit_facts, load_public_set
from fulcrum.runs.rehearsal.stage import Candidate, Stage
from fulcrum.settings.derived import compute_local_steps
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation

RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
NOISE_LEVEL = 0.05
"""Rates whose noise is within this part of the least count as equally good; the smallest one costs the least time."""
ROUND_PARTS = (1.0, 0.5, 0.25)
"""Rounds that are tried, as parts of train.rounds, the most that the user has time for."""
LOCAL_STEPS = 4
"""Local steps that are tried beside one, in a quarter and in half of the rounds."""
SERVERS = ("sgd", "momentum")
MOST_PASSES = 4.0
"""Passes over the data that a recipe may make, as a multiple of those of the settings."""
STEP_SCALES = (1.0, 4.0)
"""Step lengths of a recipe beside moo from its own, as multiples of that: several local steps want longer ones."""
STEP_C = 0.1
"""C of these: below the norms, where only directions count, and a recipe's score depends on its step alone."""
EXAMPLES, MOST_PARTIES = 1500, 4
"""Records and parties of the small runs."""
HARD_FIRST = 1
"""Tasks start with the hard one: easy ones tell recipes apart the least."""
CHECK_TASKS = 2
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
    """A recipe with its score on made-up data in points (higher is better), its noise along any one direction, how many
    of its rounds one of the small run stands for, and what scored best."""

    recipe: Recipe
    score: float
    noise: float
    merged: float = 1.0
    candidate: Candidate | None = None


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
    reference = table.choose_rate(own)
    tell(f"your own: {own.describe()}; with the best rate: {reference.describe()}")
    first = table.play([reference, *table.list_rounds(reference)])
    best = max(first, key=lambda one: one.score)
    played = [*first, *table.play(table.list_variations(best.recipe))]
    best, doubt = choose(played, reference), ""
    if best.recipe != reference:
        tell(f"check of {best.recipe.describe()} with a larger batch")
        checked = table.check([best, first[0]])
        margin = compute_margin(max(each.merged for each in checked))
        if checked[0].score < checked[1].score + margin:
            doubt = (
                f"{best.recipe.describe()} was ahead by {best.score - first[0].score:.1f} points in small runs, and by "
                f"{checked[0].score - checked[1].score:.1f} with a larger batch: not enough to leave your rounds for."
            )
            best = first[0]
    chosen = best.recipe.apply(plain).replace(clip={"rehearse": True})
    tell(f"chosen: {best.recipe.describe()}")
    answer = table.rehearse(best.recipe)
    if answer is not None:
        chosen = answer.candidate.apply(chosen, best.recipe.steps)
    ranked = sorted(played, key=lambda one: -one.score)
    reasons = explain(best, table, ranked, answer, doubt)
    return Advice(chosen, best.recipe, tuple(ranked), answer, reasons, round(time.monotonic() - began, 1))


def choose(played: Sequence[PlayedRecipe], reference: Recipe) -> PlayedRecipe:
    """The best, if it is ahead of the reference by more than the margin; else the reference."""
    stays = next(one for one in played if one.recipe == reference)
    best = max(played, key=lambda one: one.score)
    margin = compute_margin(max(best.merged, stays.merged))
    return best if best.score > stays.score + margin else stays


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

    @property
    def most_passes(self) -> float:
        """Passes over the data that the user can afford."""
        return MOST_PASSES * max(self.own.passes, 1.0)

    def choose_rate(self, recipe: Recipe) -> Recipe:
        """The recipe with the smallest rate whose noise is about the least, within the passes that can be afforded."""
        rates = {recipe.rate, *(rate for rate in RATES if rate * recipe.rounds * recipe.steps <= self.most_passes)}
        noises = {rate: self.measure_noise(dataclasses.replace(recipe, rate=rate)) for rate in sorted(rates)}
        least = min(noises.values())
        return dataclasses.replace(
            recipe, rate=next(rate for rate, noise in noises.items() if noise <= (1 + NOISE_LEVEL) * least)
        )

    def measure_noise(self, recipe: Recipe) -> float:
        """Noise of a step along one direction in units of C, by the accountant."""
        return self._apply(recipe).plan.compute_noise_to_signal(self.base.problem.layout.dim).direction

    def list_rounds(self, reference: Recipe) -> list[Recipe]:
        """Fewer rounds, and one plain step per round where the reference has others, each with its best rate."""
        counts = [max(1, round(reference.rounds * part)) for part in ROUND_PARTS[: self.effort.round_parts]]
        plain = dataclasses.replace(reference, steps=1, server="sgd")
        found = [self.choose_rate(dataclasses.replace(plain, rounds=count, rate=self.own.rate)) for count in counts]
        return [recipe for recipe in dict.fromkeys(found) if recipe != reference]

    def list_variations(self, best: Recipe) -> list[Recipe]:
        """Other servers, local steps and initial weights around the best, each with its best rate."""
        found = [dataclasses.replace(best, server=server) for server in SERVERS]
        for rounds in (best.rounds // 2, best.rounds // 4):
            found.append(dataclasses.replace(best, steps=LOCAL_STEPS, rounds=max(1, rounds), rate=self.own.rate))
        if best.init == "random" and self.base.problem.layout.depth == 1:
            found.append(dataclasses.replace(best, init=ZERO_INIT_NAME))
        chosen = [each if each.steps == best.steps else self.choose_rate(each) for each in found]
        return [recipe for recipe in dict.fromkeys(chosen) if recipe not in self.known]

    def play(self, recipes: Iterable[Recipe]) -> list[PlayedRecipe]:
        """Each recipe's score: of its best step length, in small runs on the same made-up tasks."""
        found = []
        for recipe in recipes:
            if recipe not in self.known:
                facts = self._read_facts(recipe)
                # Momentum adds a step up over many rounds: each one is shorter by as much.
                first = facts.default_step * (1 - self._get_momentum(recipe))
                candidates = [Candidate("moo", 1.0, first)]
                candidates += [Candidate("plain", STEP_C, first * scale) for scale in STEP_SCALES]
                self.known[recipe] = self._play_one(recipe, facts, candidates, list_hard_tasks(self.effort.tasks, 0))
                self.say(f"{self.known[recipe].score:6.1f}  {recipe.describe()}")
            found.append(self.known[recipe])
        return found

    def check(self, played: Sequence[PlayedRecipe]) -> list[PlayedRecipe]:
        """Recipes once more with a larger batch on other tasks: moo from its own step, and what was best."""
        found = []
        for one in played:
            facts = self._read_facts(one.recipe, CHECK_TIMES)
            first = facts.default_step * (1 - self._get_momentum(one.recipe))
            candidates = [Candidate("moo", 1.0, first)]
            candidates += [one.candidate] if one.candidate not in (None, candidates[0]) else []
            found.append(self._play_one(one.recipe, facts, candidates, list_hard_tasks(CHECK_TASKS, 30)))
            self.say(f"{found[-1].score:6.1f}  {one.recipe.describe()}")
        return found

    def _play_one(
        self, recipe: Recipe, facts: RehearsalFacts, candidates: Sequence[Candidate], tasks: list[tuple[Variation, int]]
    ) -> PlayedRecipe:
        rounds = min(facts.rounds, max(LEAST_ROUNDS, self.effort.rounds // facts.steps))
        scores = Stage(facts, self.model, self.public).play(candidates, rounds, tasks)
        means = {candidate: sum(own.values()) / len(own) for candidate, own in scores.items()}
        best = max(means, key=lambda candidate: means[candidate])
        return PlayedRecipe(recipe, round(means[best], 2), facts.noise, facts.rounds / rounds, best)

    def _get_momentum(self, recipe: Recipe) -> float:
        return self.base.settings.train.server_momentum if recipe.server == "momentum" else 0.0

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

    def _read_facts(self, recipe: Recipe, times: int = 1) -> RehearsalFacts:
        """The facts of a recipe's small runs: as many records for every recipe, so that their tasks are the same.

        times: how many times larger batch and records are."""
        federation = self._apply(recipe)
        facts, plan = read_rehearsal_facts(federation), federation.plan
        facts = dataclasses.replace(facts, parties=min(facts.parties, MOST_PARTIES))
        declared = float((plan.rates * plan.sizes).sum()) * plan.participation
        batch = choose_batch(times * self.effort.batch, declared, facts.parties)
        total = int(torch.as_tensor(plan.sizes).sum())
        examples = max(min(total, times * EXAMPLES), batch, facts.parties * 10)
        return fit_facts(dataclasses.replace(facts, batch=batch, examples=examples), self.public)


@dataclass(frozen=True)
class RecipeEffort:
    """How much is played of each recipe, and how many recipes: a heavy model gets fewer of both."""

    tasks: int
    batch: int
    rounds: int
    round_parts: int


RECIPE_EFFORTS = (
    RecipeEffort(tasks=3, batch=128, rounds=200, round_parts=3),
    RecipeEffort(tasks=2, batch=64, rounds=200, round_parts=3),
    RecipeEffort(tasks=1, batch=64, rounds=200, round_parts=3),
    RecipeEffort(tasks=1, batch=64, rounds=100, round_parts=2),
    RecipeEffort(tasks=1, batch=32, rounds=100, round_parts=2),
)
"""From light models to heavy ones."""
LEAST_ROUNDS = 10
TYPICAL_ROUNDS = 6.0
"""Rounds of all recipes together, as a multiple of the most."""
RECIPES_PART, PART = 1 / 2, 1 / 3
"""Parts of two minutes of two cores: for the recipes, and for the last rehearsal."""


def list_hard_tasks(count: int, first: int) -> list[tuple[Variation, int]]:
    """`count` tasks from the hard one on, each with a seed of its own."""
    return list_tasks(count + HARD_FIRST, first)[HARD_FIRST:]


def choose_recipe_effort(facts: RehearsalFacts) -> RecipeEffort:
    """The largest effort that takes its part of two minutes of two cores; the smallest where none does."""
    own = not is_built_in(facts.settings.model)
    for effort in RECIPE_EFFORTS:
        of_round = 4 * facts.work * effort.batch + PASS_OVERHEAD[own]
        runs = TYPICAL_ROUNDS * effort.tasks * (1 + len(STEP_SCALES))
        if of_round * min(facts.rounds, effort.rounds) * runs <= RECIPES_PART * WORK:
            return effort
    return RECIPE_EFFORTS[-1]


def explain(
    best: PlayedRecipe, table: RecipeTable, ranked: Sequence[PlayedRecipe], answer: Rehearsed | None, doubt: str
) -> tuple[str, ...]:
    """Why this recipe, in sentences."""
    what = "your public records" if table.is_public else "made-up records of the same shape"
    found = [f"{best.recipe.describe()}: {best.score:.1f} points on {what}, of {len(ranked)} ways to spend the budget."]
    top = ranked[0]
    if doubt:
        found.append(doubt)
    elif top.recipe != best.recipe:
        found.append(
            f"{top.recipe.describe()} has {top.score:.1f} points, {top.score - best.score:.1f} more: made-up records "
            "do not tell so little apart from luck."
        )
    own = table.own
    if own != best.recipe:
        found.append(
            f"The noise along one direction is {best.noise:.2g} C per step; with your own settings, {own.describe()}, "
            f"it would be {table.measure_noise(own):.2g} C. Passes over the data: {best.recipe.passes:g} in place of "
            f"{own.passes:g}."
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
