"""The checks of settings that no type can express: ranges, and fields that must agree.

Names (of rules, engines, ...) are checked by `fulcrum.runs.choices`, which sees what implements them.
"""

from __future__ import annotations

import math
from typing import Any

from fulcrum.errors import ConfigError
from fulcrum.settings.derived import compute_local_steps
from fulcrum.settings.schema import Settings

# --- checks -----------------------------------------------------------------------------------

# field: (lower limit, whether it is allowed, upper limit, whether it is allowed). Numbers that decide how a gradient is
# scaled keep to what float32 bears: C / (norm + stability), C^2, C sigma and their inverses stay far from its limits.
# Counts are limited to what can be listed, or held in 64 bits.
SETTING_RANGES: dict[str, tuple[float, bool, float, bool]] = {
    "data.parties": (1, True, 1e9, True),
    "data.alpha": (0, False, math.inf, False),
    "data.shards": (1, True, 1e9, True),
    "data.min_examples": (1, True, 1e12, True),
    "data.validation": (0, True, 1, False),
    "data.feature_groups": (0, True, 1e6, True),
    "data.feature_whiten": (0, True, 0.5, True),
    "task.classes": (0, True, 1e9, True),
    "task.huber_width": (0, False, math.inf, False),
    "task.scale": (0, True, math.inf, False),
    "task.threshold": (0, True, 1, True),
    "model.temper_temperature": (0, False, math.inf, False),
    "model.whiten": (0, False, 0.5, True),
    "model.lora": (0, True, 1e6, True),
    "model.lora_alpha": (0, True, math.inf, False),
    "train.rounds": (1, True, 1e7, True),
    "train.participation": (0, False, 1, True),
    "train.min_parties": (1, True, 1e9, True),
    "train.steps": (0, True, 1e7, True),
    "train.epochs": (0, True, 1e7, True),
    "train.rate": (0, False, 1, True),
    "train.lr": (0, False, math.inf, False),
    "train.warmup": (0, True, 1e7, True),
    "train.decay": (0, False, 1, True),
    "train.weight_decay": (0, True, math.inf, False),
    "train.trim": (0, True, 0.5, False),
    "train.server_lr": (0, False, math.inf, False),
    "train.server_momentum": (0, True, 1, False),
    "train.server_beta2": (0, True, 1, False),
    "train.server_eps": (0, False, math.inf, False),
    "train.ema": (0, True, 1, False),
    "clip.C0": (1e-12, True, 1e12, True),
    "clip.kappa": (0, True, 1e12, True),
    "clip.balance": (0, False, 1e12, True),
    "clip.reach": (0, False, math.inf, True),
    "clip.growth": (1, True, math.inf, True),
    "clip.step": (0, True, 1e12, True),
    "clip.eta_C": (0, True, 100, True),
    "clip.beta": (0, True, 1, False),
    "clip.C_min": (1e-12, True, 1e12, True),
    "clip.C_max": (1e-12, True, 1e12, True),
    "clip.gamma": (0, True, 1, True),
    "clip.rho_c": (1e-6, True, 1e6, True),
    "clip.shrink": (0, True, 1e6, True),
    "clip.stability": (1e-9, True, 1e6, True),
    "clip.statistics_interval": (0, True, 1e9, True),
    "clip.statistics_rounds": (0, True, 1e9, True),
    "privacy.epsilon": (0, False, math.inf, False),
    "privacy.sigma": (1e-6, True, 1e9, True),
    "privacy.delta": (0, False, 1, False),
    "privacy.budget": (0, False, math.inf, False),
    "privacy.evaluation_epsilon": (0, False, math.inf, False),
    "privacy.budget_delta": (0, False, 1, False),
    "privacy.max_participations": (0, True, 1e9, True),
    "privacy.colluders": (0, True, 1e9, True),
    "privacy.rho_mu": (1e-6, True, 1e6, True),
    "client_level.weight_cap": (0, True, math.inf, False),
    "client_level.min_weight": (0, False, 1, True),
    "privacy.seed": (0, True, 2**63, False),
    "run.seed": (0, True, 2**63, False),
    "run.workers": (0, True, 1024, True),
    "run.evaluate_every": (0, True, 1e9, True),
    "run.checkpoint_every": (1, True, 1e9, True),
}


def get_setting(settings: Settings, path: str) -> Any:
    """The value at a dotted path such as "train.rate"."""
    value: Any = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def check_settings(settings: Settings) -> Settings:
    """Return the settings, or raise ConfigError naming the first wrong field and what would be right."""
    for path, bounds in SETTING_RANGES.items():
        _check_range(path, get_setting(settings, path), bounds)
    _check_combinations(settings)
    return settings


def _check_range(path: str, value: float | None, bounds: tuple[float, bool, float, bool]) -> None:
    low, low_in, high, high_in = bounds
    if value is None:
        return
    above = value >= low if low_in else value > low
    below = value <= high if high_in else value < high
    if above and below:  # both are False for NaN
        return
    wanted = f"{'at least' if low_in else 'greater than'} {low:g}"
    if high < math.inf:
        wanted += f" and {'at most' if high_in else 'less than'} {high:g}"
    raise ConfigError(f"{path} = {value!r} is out of range; it must be a finite number {wanted}.")


def _check_combinations(settings: Settings) -> None:
    train, clip, privacy = settings.train, settings.clip, settings.privacy
    if (train.steps > 0) == (train.epochs > 0):
        raise ConfigError(
            f"train.steps = {train.steps} and train.epochs = {train.epochs:g}: set exactly one of them above 0."
        )
    if not clip.C_min <= clip.C0 <= clip.C_max:
        raise ConfigError(
            f"clip.C0 = {clip.C0:g} must lie between clip.C_min = {clip.C_min:g} and clip.C_max = {clip.C_max:g}."
        )
    if settings.data.feature_center and settings.data.feature_whiten:
        raise ConfigError(
            f"data.feature_center = true and data.feature_whiten = {settings.data.feature_whiten:g}: whitening takes "
            "off a mean of its own; set feature_center to false."
        )
    if privacy.epsilon is not None and privacy.sigma is not None:
        raise ConfigError("privacy.epsilon and privacy.sigma are both set; give one, the other follows from it.")
    if privacy.randomness == "secure" and settings.run.precision != "float32":
        raise ConfigError(
            f"run.precision = {settings.run.precision!r} with privacy.randomness = 'secure': only float32 keeps every "
            "contribution within its bound; use float32 for real data."
        )
    for units in settings.data.units:
        _check_range("data.units", units, (1, True, math.inf, False))
    for party, budget in privacy.budgets.items():
        _check_range(f"privacy.budgets.{party}", budget, (0, False, math.inf, False))
    for phase in privacy.phases:
        _check_range("privacy.phases", phase, (0, False, math.inf, False))
    if privacy.noise_schedule == "phases" and not 0 < len(privacy.phases) <= train.rounds:
        raise ConfigError(
            f"privacy.phases has {len(privacy.phases)} phases for {train.rounds} rounds; noise_schedule = 'phases' "
            "needs at least one phase, and a round for each."
        )
    if privacy.budgets and privacy.epsilon is None:
        raise ConfigError("privacy.budgets is set without privacy.epsilon; give the epsilon of the other parties too.")
    if privacy.evaluation_epsilon is not None and not settings.data.validation:
        raise ConfigError(
            f"privacy.evaluation_epsilon = {privacy.evaluation_epsilon!r} pays for scores of held-out records, and "
            "data.validation = 0 holds none out; set it, or leave evaluation_epsilon out."
        )
    if privacy.unit == "client" and privacy.max_participations:
        raise ConfigError(
            f"privacy.max_participations = {privacy.max_participations} has no use with privacy.unit = 'client': "
            "who takes part is secret, so every party is charged for every round; leave it at 0."
        )
    _check_combine(settings)
    if privacy.aggregation == "ideal-secagg":
        _check_secure_sum_settings(settings)
    if privacy.aggregation == "pairwise":
        _check_pairwise_settings(settings)


def _check_pairwise_settings(settings: Settings) -> None:
    """Refuse settings that masked sums do not cover: what is proved is one step per round, and units within parties."""
    train, privacy = settings.train, settings.privacy
    steps = compute_local_steps(train)
    wrong = {
        "privacy.unit": (
            privacy.unit,
            "example or person: a trusted server would need no masks",
            privacy.unit == "client",
        ),
        "train.steps": (
            steps,
            "1: later steps would start from weights with too little noise, and nobody has a proof for them",
            steps != 1,
        ),
        "privacy.colluders": (
            privacy.colluders,
            "a whole number of parties, or a fraction below 1",
            privacy.colluders > 1 and not float(privacy.colluders).is_integer(),
        ),
    }
    for path, (value, right, bad) in wrong.items():
        if bad:
            raise ConfigError(
                f"{path} = {value!r} does not go with privacy.aggregation = 'pairwise'; it must be {right}."
            )


def _check_combine(settings: Settings) -> None:
    """Refuse every combination of updates but the mean where only a sum is released, or its sensitivity is a mean's."""
    combine, privacy = settings.train.combine, settings.privacy
    if combine == "mean":
        return
    if privacy.aggregation != "plain":
        raise ConfigError(
            f"train.combine = {combine!r} needs each party's own update, and with privacy.aggregation = "
            f"{privacy.aggregation!r} parties share their noise and only a sum is seen; use mean."
        )
    if privacy.unit == "client":
        raise ConfigError(
            f"train.combine = {combine!r} with privacy.unit = 'client': the server's noise covers a mean of clipped "
            "updates and nothing else; use mean, where clipping bounds what one party can do."
        )


def _check_secure_sum_settings(settings: Settings) -> None:
    """Refuse settings that one shared noise vector does not cover: it needs one step per round by all parties."""
    train, privacy = settings.train, settings.privacy
    wrong = {
        "privacy.unit": (privacy.unit, "example", privacy.unit not in ("example", "auto")),
        "train.steps": (compute_local_steps(train), 1, compute_local_steps(train) != 1),
        "train.weights": (train.weights, "examples", train.weights != "examples"),
        "train.participation": (train.participation, 1, train.participation < 1),
        "privacy.max_participations": (
            privacy.max_participations,
            "0 (all rounds)",
            0 < privacy.max_participations < train.rounds,
        ),
        "privacy.budgets": (privacy.budgets, "empty: one noise serves all", bool(privacy.budgets)),
        "privacy.randomness": (
            privacy.randomness,
            "seeded: no secure aggregation is implemented, so nobody's data is safe with it",
            privacy.randomness == "secure",
        ),
    }
    for path, (value, right, bad) in wrong.items():
        if bad:
            raise ConfigError(
                f"{path} = {value!r} does not go with privacy.aggregation = 'ideal-secagg', which shares one noise "
                f"over one step's sum of all parties; it must be {right}."
            )
