"""Optuna as the one who proposes: told of every trial, asked for the next. Needs the extra `tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fulcrum.errors import ConfigError
from fulcrum.study.tuning import Objective, Range, Space, Trial


def import_optuna() -> Any:
    """Optuna; ConfigError with what to install where it is missing."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("tune and pareto need Optuna: pip install 'fulcrum-fl[tune]'.") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Proposer:
    """Proposes values of settings. The same seed and the same trials give the same proposals.

    random: draw every proposal independently of what was seen, as private selection needs it; else a tree-structured
    Parzen estimator, which also handles two objectives.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, random: bool = False) -> None:
        self._optuna = import_optuna()
        self.objectives = objectives
        self.distributions = {name: self._make_distribution(each) for name, each in space.items()}
        samplers = self._optuna.samplers
        sampler = samplers.RandomSampler(seed) if random else samplers.TPESampler(seed=seed, n_startup_trials=8)
        directions = ["minimize" if each.lower_is_better else "maximize" for each in objectives]
        self._study = self._optuna.create_study(directions=directions, sampler=sampler)
        self._open: list[Any] = []

    def _make_distribution(self, each: Any) -> Any:
        kinds = self._optuna.distributions
        if not isinstance(each, Range):
            return kinds.CategoricalDistribution(each.values)
        if each.whole:
            return kinds.IntDistribution(round(each.low), round(each.high), log=each.log)
        return kinds.FloatDistribution(each.low, each.high, log=each.log)

    def tell(self, trial: Trial) -> None:
        """A trial that is finished, whether or not it was proposed here."""
        values = [trial.objectives[each.name] for each in self.objectives]
        known = {name: trial.values[name] for name in self.distributions if name in trial.values}
        inside = {name: value for name, value in known.items() if self._contains(name, value)}
        if set(inside) != set(self.distributions):
            return  # of another space, or a default outside of it: nothing that the sampler can use
        made = self._optuna.trial.create_trial(params=inside, distributions=self.distributions, values=values)
        self._study.add_trial(made)

    def _contains(self, name: str, value: Any) -> bool:
        each = self.distributions[name]
        return bool(each._contains(each.to_internal_repr(value)))

    def ask(self, count: int) -> list[Mapping[str, Any]]:
        """Values for the next trials, which are played at once."""
        asked = [self._study.ask(self.distributions) for _ in range(count)]
        proposals: list[Mapping[str, Any]] = [dict(each.params) for each in asked]
        for each in asked:  # their results come back through `tell`
            self._study.tell(each, state=self._optuna.trial.TrialState.FAIL)
        return proposals
