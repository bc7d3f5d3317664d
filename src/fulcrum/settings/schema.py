"""A run's settings: frozen dataclasses, and the checks that no type can express.

Reading TOML and command-line words into these is `settings_file.py`, which needs pydantic; this file
needs the standard library alone. What decides the guarantee is in `Privacy`, `Train` and `Clip`;
`Run` holds what only changes speed, place and what is kept, so that nobody can break a promise by
tuning for speed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

FORBID_EXTRA_FIELDS: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True)
class Data:
    """Where the examples come from and how they lie over the parties."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    source: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, a path to an .npz file, or package.module:function."""
    dir: str = ""
    """Folder to look in first; then FULCRUM_DATA (a path list), then the user's cache."""
    parties: int = 5
    """K. Ignored with partition = "given", where the data names each example's party."""
    partition: str = "auto"
    """auto (dirichlet where targets are classes, else iid), iid, dirichlet, shards, quantity, or given."""
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
class TaskSettings:
    """What is predicted, and how predictions are judged. Ranges and classes are declared, not read off the data."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    name: str = "auto"
    """auto (what the data says, else classification), classification, binary, multilabel, regression, tokens,
    next-token, or package.module:task."""
    classes: int = 0
    """Number of classes, labels or tokens of the vocabulary; 0: what the data declares, else the largest target + 1."""
    class_weights: tuple[float, ...] = ()
    """Weight of each class in the loss (multilabel: of each label's yes), in order; empty: 1 each."""
    loss: str = "squared"
    """Loss of a regression: squared, absolute or huber."""
    huber_width: float = 1.0
    """Error, in units of scale, from which the huber loss is linear."""
    scale: float = 0.0
    """Public size of a regression's targets: the model learns (target - offset) / scale. 0: half of high - low where
    those are declared, else 1."""
    offset: float = 0.0
    """Public centre of a regression's targets; the middle of low and high where those are declared and scale is not."""
    low: float | None = None
    """Smallest target of a regression; smaller ones are raised to it."""
    high: float | None = None
    """Largest target of a regression; larger ones are lowered to it."""
    threshold: float = 0.5
    """Probability from which an answer is a yes, for f1, sensitivity and specificity."""
    ignored: int = -100
    """Target of a position in a sequence that does not count."""
    metrics: tuple[str, ...] = ()
    """Metrics to report beyond the task's own: names, or package.module:metric."""
    score: str = ""
    """The metric that searches and comparisons use; empty: the task's own choice."""


@dataclass(frozen=True)
class Model:
    """What is trained."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

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

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

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

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

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
    statistics_interval: float = 0.0
    """Epochs between two releases of a paid rule's statistics; 0: with every step. In between only gradients go out."""
    options: dict[str, bool | int | float | str] = field(default_factory=dict, hash=False)
    """Settings of a rule that brings its own (docs/own-rule.md), by name: {"speed" = 0.5}."""


@dataclass(frozen=True)
class Privacy:
    """The budget and the guarantee's terms. Give epsilon (sigma is calibrated) or sigma (epsilon is reported)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

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
class ClientLevel:
    """The trusted server's average of the parties' updates, for privacy.unit = "client" only."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

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

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

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

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    method: str = "moo"
    """The preset these settings started from (see `fulcrum methods`)."""
    data: Data = field(default_factory=Data)
    task: TaskSettings = field(default_factory=TaskSettings)
    model: Model = field(default_factory=Model)
    train: Train = field(default_factory=Train)
    clip: Clip = field(default_factory=Clip)
    privacy: Privacy = field(default_factory=Privacy)
    client_level: ClientLevel = field(default_factory=ClientLevel)
    run: Run = field(default_factory=Run)

    def replace(self, **sections: dict[str, Any]) -> Settings:
        """A copy with single fields changed: `settings.replace(train={"rounds": 5})`."""
        parts = {name: dataclasses.replace(getattr(self, name), **changes) for name, changes in sections.items()}
        return dataclasses.replace(self, **parts)
