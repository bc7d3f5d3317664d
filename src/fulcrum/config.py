"""A run's settings: frozen dataclasses, and the checks that no type can express.

Reading TOML and command-line words into these is `settings_file.py`, which needs pydantic; this file
needs the standard library alone. What decides the guarantee is in `Privacy`, `Train` and `Clip`;
`Run` holds what only changes speed, place and what is kept, so that nobody can break a promise by
tuning for speed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fulcrum.errors import ConfigError

FORBID: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True)
class Data:
    """Where the examples come from and how they lie over the parties."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    source: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, a path to an .npz file, or package.module:function."""
    dir: str = ""
    """Folder to look in first; then FULCRUM_DATA (a path list), then the user's cache."""
    parties: int = 5
    """K. Ignored with partition = "given", where the data names each example's party."""
    partition: str = "dirichlet"
    """iid, dirichlet, shards, quantity, or given."""
    alpha: float = 0.5
    """Dirichlet concentration: of labels for dirichlet, of sizes for quantity. Smaller is more skewed."""
    shards: int = 2
    """Label shards a party gets, for partition = "shards"."""
    min_examples: int = 10
    """No party holds fewer examples than this."""
    validation: float = 0.0
    """Fraction of the training data held out and evaluated on in place of the test data (for tuning)."""
    features: str = "none"
    """What each record is turned into before training, by a fixed public map of that record alone: none, or scattering
    (second-order wavelet scattering of images: 81 channels for each colour, a quarter as high and as wide)."""
    feature_groups: int = 27
    """Groups of channels in which each record's features are brought to mean 0 and variance 1 (GroupNorm); 0: none."""
    feature_mirror: bool = False
    """Whether features are the mean of those of an image and of its mirror image, for classes that do not tell them
    apart: less for the noise to hide."""
    feature_center: bool = False
    """Whether the mean features of fixed, made-up images (noise with the spectrum of photographs) are subtracted."""
    feature_whiten: float = 0.0
    """0: off. Above: the mean features of painted pictures (made of formulas; no data is involved) are subtracted, and
    channels are mixed by their covariance over those pictures to minus this power, so that no few directions fill the
    norm that is clipped: 0.5 makes all directions vary alike, 0.25 goes halfway. Not with feature_center."""


@dataclass(frozen=True)
class Model:
    """What is trained."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    name: str = "auto"
    """auto, linear, mlp, mnist-cnn, cifar-cnn, scatter-cnn (on scattering features), or package.module:factory."""
    activation: str = "relu"
    """relu, tanh, or tempered (a tempered sigmoid; 2 sigmoid(2x) - 1 is tanh)."""
    temper_scale: float = 2.0
    temper_temperature: float = 2.0
    temper_offset: float = 1.0
    hidden: tuple[int, ...] = (64,)
    """Widths of the mlp's hidden layers."""
    init: str = "random"
    """Weights to start from, which must be public: random; painted (the CNNs, taught on pictures made of formulas: no
    data is involved); or an .npz or .safetensors file. Layers that a file leaves out are random."""
    coordinates: str = "plain"
    """In which the same network is trained: plain; centred (every layer sees its inputs less their mean over painted
    pictures, so that the mean does not fill the norm that is clipped); whitened (all directions of the inputs to inner
    layers vary alike there, too). The model that is kept is a plain one. All but plain need an init that has those
    facts: painted, or a file that `fulcrum prior` made."""
    whiten: float = 0.5
    """How far whitened coordinates go: inputs are mixed by their covariance to minus this power. 0.5: all directions
    vary alike. Less leaves some of the differences, and less of the noise in directions that hardly vary."""


@dataclass(frozen=True)
class Train:
    """The optimisation: rounds, local steps, learning rates, the server's side."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    rounds: int = 200
    """T."""
    participation: float = 1.0
    """q_c, the chance that a party takes part in a round. Lowers the cost only where it is secret: unit client."""
    min_parties: int = 1
    """The run ends when fewer parties than this have budget left."""
    steps: int = 1
    """N local steps a round. 0: use epochs."""
    epochs: float = 0.0
    """E local epochs a round: N = round(E / rate), at least 1. 0: use steps."""
    rate: float = 0.05
    """q, the Poisson sampling rate of each local step."""
    lr: float = 1.0
    """eta, the local learning rate."""
    schedule: str = "constant"
    """Learning rate over the rounds: constant, linear (to zero), cosine (to zero), or step."""
    warmup: int = 0
    """Rounds over which the learning rate rises linearly to lr."""
    decay_rounds: tuple[int, ...] = ()
    """For schedule = "step": after each of these rounds the rate is multiplied by decay."""
    decay: float = 0.1
    weight_decay: float = 0.0
    """Pulls the weights towards zero outside the clipped gradient."""
    weights: str = "examples"
    """How updates are averaged: examples (by n_k; at unit client min(n_k / weight_cap, 1)) or uniform."""
    server: str = "sgd"
    """Server optimiser: sgd, momentum or adam."""
    server_lr: float = 1.0
    server_momentum: float = 0.9
    server_beta2: float = 0.99
    server_eps: float = 1e-3
    ema: float = 0.9
    """Decay of the moving average of released models that is evaluated and kept; 0 is off."""


@dataclass(frozen=True)
class Clip:
    """The clipping rule and its own settings. A rule reads those it knows."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    rule: str = "moo"
    """A built-in rule or package.module:rule."""
    C0: float = 1.0
    """The clipping norm: fixed, or where an adaptive rule starts."""
    groups: str = "flat"
    """flat, or layer (each layer clipped to its share of C)."""
    kappa: float = 0.0
    """The price of C in the objective L_model + kappa C."""
    balance: float = 2.5
    """moo: how far the noise of all rounds would move the weights at its first step length, in units of the norm that
    random weights have; three times that for a model of one layer, half of it in whitened coordinates."""
    reach: float = 0.8
    """moo: the most that its first step length may be for a local step, in units of the norm that random weights have:
    where the noise is small, not it but the shape of the loss limits the step. Less for one step a round from weights
    that were learned, and for several steps in runs of fewer than 200 rounds; not for a single layer."""
    growth: float = 1.5
    """moo: the step length never exceeds its first value by more than this factor."""
    eta_C: float = 0.03
    """How far a round moves what a rule learns (C, or moo's step length), in logarithms."""
    beta: float = 0.98
    """Memory of the released direction."""
    phi: str = "sign"
    """sign or identity: how the alignment becomes a step."""
    C_min: float = 1e-3
    C_max: float = 1e3
    gamma: float = 0.5
    """quantile: the fraction of norms that C is to lie above."""
    rho_c: float = 0.3
    """dynamic: C_t = C0 rho_c^(t/T); below 1, C falls."""
    shrink: float = 0.0
    """wav: soft threshold on the noised coefficients, in standard deviations of their noise; 0 is off."""
    stability: float = 0.01
    """What keeps auto-s (gamma there) and psac (r there, 0.1 in its preset) from dividing by a zero norm."""
    reading: str = "loss"
    """moo-paper, moo-paper-batch: what dL_model/dC is taken for: loss, hypergradient, or derivative (to the letter)."""
    refresh: float = 0.0
    """Epochs between two releases of a paid rule's statistics; 0: with every step. In between only gradients go out."""


@dataclass(frozen=True)
class Privacy:
    """The budget and the guarantee's terms. Give epsilon (sigma is calibrated) or sigma (epsilon is reported)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    epsilon: float | None = None
    sigma: float | None = None
    delta: float = 1e-5
    unit: str = "example"
    """What is protected: example; person (the data has an id for each record); or client, a whole party, where
    the server is trusted and adds the noise."""
    accountant: str = "rdp"
    """rdp or pld: which epsilon is enforced. Both are reported."""
    max_participations: int = 0
    """Public cap on the rounds a party takes part in; 0 means all rounds."""
    budget: float | None = None
    """Epsilon of a party over all runs of a kept ledger; None: that of the first run."""
    budgets: dict[str, float] = field(default_factory=dict)
    """Epsilon of single parties, by name, where it differs: {"party-0" = 2.0}."""
    randomness: str = "seeded"
    """seeded (science) or secure (real use: the operating system's entropy)."""
    noise_schedule: str = "constant"
    """Noise over the rounds: constant, growth (of 1/sigma, see rho_mu), or phases. sigma is that of the first round."""
    rho_mu: float = 0.8
    """For noise_schedule = "growth": sigma_t = sigma rho_mu^(t/T); below 1, the noise falls as training goes on."""
    aggregation: str = "plain"
    """plain: the server sees every update, and each party's own noise protects it. ideal-secagg: it is ASSUMED to see
    their weighted sum alone, and the parties share one dose of noise; the secure aggregation is only simulated."""
    phases: tuple[float, ...] = ()
    """For noise_schedule = "phases": the budgets of equally long phases, relative to each other; [1, 3] gives the
    second half three times the precision 1/sigma^2 of the first."""


@dataclass(frozen=True)
class Central:
    """The trusted server's average of the parties' updates, for privacy.unit = "client" only."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    estimator: str = "fixed"
    """What divides the weighted sum: fixed (the expected weight q_c W) or clipped (the weight that took part, at
    least q_c W_min; twice the noise or more)."""
    weight_cap: float = 0.0
    """w_cap, public: with weights = "examples" a party weighs min(n_k / w_cap, 1). 0: the median of the sizes."""
    min_weight: float = 1.0
    """W_min as a part of the total weight W, for estimator = "clipped"."""


@dataclass(frozen=True)
class Run:
    """Speed, place and what is kept. Nothing here touches the guarantee."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    seed: int = 0
    engine: str = "auto"
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: str = "float32"
    """Of matrix products in the stacked engine: float32, or for simulations tf32 or bf16, faster and less exact."""
    workers: int = 0
    """Parties that the parallel engine trains at a time, a core each; 0: PyTorch's number of threads. Same bits."""
    evaluate_every: int = 1
    checkpoint_every: int = 10
    diagnostics: bool = False
    """Record non-private diagnostics (clip fraction, mean norm, losses). For simulations only."""
    ledger: str = ""
    """Ledger kept over runs; empty: the run's own."""


@dataclass(frozen=True)
class Settings:
    """Everything that makes a run. Equal settings and seed give equal bits."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    method: str = "moo"
    """The preset these settings started from (see `fulcrum methods`)."""
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    train: Train = field(default_factory=Train)
    clip: Clip = field(default_factory=Clip)
    privacy: Privacy = field(default_factory=Privacy)
    central: Central = field(default_factory=Central)
    run: Run = field(default_factory=Run)

    def replace(self, **sections: dict[str, Any]) -> Settings:
        """A copy with single fields changed: `settings.replace(train={"rounds": 5})`."""
        parts = {name: dataclasses.replace(getattr(self, name), **changes) for name, changes in sections.items()}
        return dataclasses.replace(self, **parts)


# --- checks -----------------------------------------------------------------------------------

CHOICES: dict[str, tuple[str, ...]] = {
    "data.partition": ("iid", "dirichlet", "shards", "quantity", "given"),
    "data.features": ("none", "scattering"),
    "model.activation": ("relu", "tanh", "tempered"),
    "model.coordinates": ("plain", "centred", "whitened"),
    "train.schedule": ("constant", "linear", "cosine", "step"),
    "train.weights": ("examples", "uniform"),
    "train.server": ("sgd", "momentum", "adam"),
    "clip.groups": ("flat", "layer"),
    "clip.phi": ("sign", "identity"),
    "clip.reading": ("loss", "hypergradient", "derivative"),
    "privacy.unit": ("example", "person", "client"),
    "privacy.accountant": ("rdp", "pld"),
    "privacy.randomness": ("seeded", "secure"),
    "privacy.aggregation": ("plain", "ideal-secagg"),
    "privacy.noise_schedule": ("constant", "growth", "phases"),
    "central.estimator": ("fixed", "clipped"),
    "run.engine": ("auto", "reference", "stacked", "parallel"),
    "run.precision": ("float32", "tf32", "bf16"),
}

# field: (smallest, whether it itself is allowed, largest, whether it itself is allowed)
RANGES: dict[str, tuple[float, bool, float, bool]] = {
    "data.parties": (1, True, math.inf, False),
    "data.alpha": (0, False, math.inf, False),
    "data.shards": (1, True, math.inf, False),
    "data.min_examples": (1, True, math.inf, False),
    "data.validation": (0, True, 1, False),
    "data.feature_groups": (0, True, math.inf, False),
    "data.feature_whiten": (0, True, 0.5, True),
    "model.temper_temperature": (0, False, math.inf, False),
    "model.whiten": (0, False, 0.5, True),
    "train.rounds": (1, True, math.inf, False),
    "train.participation": (0, False, 1, True),
    "train.min_parties": (1, True, math.inf, False),
    "train.steps": (0, True, math.inf, False),
    "train.epochs": (0, True, math.inf, False),
    "train.rate": (0, False, 1, True),
    "train.lr": (0, False, math.inf, False),
    "train.warmup": (0, True, math.inf, False),
    "train.decay": (0, False, 1, True),
    "train.weight_decay": (0, True, math.inf, False),
    "train.server_lr": (0, False, math.inf, False),
    "train.server_momentum": (0, True, 1, False),
    "train.server_beta2": (0, True, 1, False),
    "train.server_eps": (0, False, math.inf, False),
    "train.ema": (0, True, 1, False),
    "clip.C0": (0, False, math.inf, False),
    "clip.kappa": (0, True, math.inf, False),
    "clip.balance": (0, False, math.inf, False),
    "clip.reach": (0, False, math.inf, True),
    "clip.growth": (1, True, math.inf, True),
    "clip.eta_C": (0, True, math.inf, False),
    "clip.beta": (0, True, 1, False),
    "clip.C_min": (0, False, math.inf, False),
    "clip.C_max": (0, False, math.inf, False),
    "clip.gamma": (0, True, 1, True),
    "clip.rho_c": (0, False, math.inf, False),
    "clip.shrink": (0, True, math.inf, False),
    "clip.stability": (0, False, math.inf, False),
    "clip.refresh": (0, True, math.inf, False),
    "privacy.epsilon": (0, False, math.inf, False),
    "privacy.sigma": (0, False, math.inf, False),
    "privacy.delta": (0, False, 1, False),
    "privacy.budget": (0, False, math.inf, False),
    "privacy.max_participations": (0, True, math.inf, False),
    "privacy.rho_mu": (0, False, math.inf, False),
    "central.weight_cap": (0, True, math.inf, False),
    "central.min_weight": (0, False, 1, True),
    "run.seed": (0, True, 2**63, False),
    "run.workers": (0, True, 1024, True),
    "run.evaluate_every": (1, True, math.inf, False),
    "run.checkpoint_every": (1, True, math.inf, False),
}


def lookup(settings: Settings, path: str) -> Any:
    """The value at a dotted path such as "train.rate"."""
    value: Any = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def check(settings: Settings) -> Settings:
    """Return the settings, or raise ConfigError naming the first wrong field and what would be right."""
    for path, choices in CHOICES.items():
        value = lookup(settings, path)
        if value not in choices:
            raise ConfigError(f"{path} = {value!r} is not known; choose one of {', '.join(choices)}.")
    for path, bounds in RANGES.items():
        _check_range(path, lookup(settings, path), bounds)
    _check_together(settings)
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


def _check_together(settings: Settings) -> None:
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
    if privacy.unit == "client" and privacy.max_participations:
        raise ConfigError(
            f"privacy.max_participations = {privacy.max_participations} has no use with privacy.unit = 'client': "
            "who takes part is secret, so every party is charged for every round; leave it at 0."
        )
    if privacy.aggregation == "ideal-secagg":
        _check_shared(settings)


def _check_shared(settings: Settings) -> None:
    """One dose of noise over all parties is right for one sum of one step, in which everybody takes part."""
    train, privacy = settings.train, settings.privacy
    wrong = {
        "privacy.unit": (privacy.unit, "example", privacy.unit != "example"),
        "train.steps": (local_steps(train), 1, local_steps(train) != 1),
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


def local_steps(train: Train) -> int:
    """N, the local steps of a round: as given, or from epochs and the sampling rate."""
    return train.steps if train.steps > 0 else max(1, round(train.epochs / train.rate))


def learning_rate(train: Train, t: int) -> float:
    """eta_t for round t (from 0)."""
    warm = min(1.0, (t + 1) / train.warmup) if train.warmup else 1.0
    progress = t / train.rounds
    shapes = {
        "constant": lambda: 1.0,
        "linear": lambda: 1.0 - progress,
        "cosine": lambda: 0.5 * (1.0 + math.cos(math.pi * progress)),
        "step": lambda: train.decay ** sum(t >= r for r in train.decay_rounds),
    }
    return train.lr * warm * shapes[train.schedule]()
