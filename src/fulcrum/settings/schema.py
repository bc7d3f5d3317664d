"""A run's settings: frozen dataclasses, and the checks that no type can express.

`reading.py` parses TOML and command-line values into these and needs pydantic; this file needs only the
standard library. `Privacy`, `Train`, `Clip` and `ClientLevel` determine the guarantee. `Run` only changes
speed, device and stored output, so tuning for speed cannot weaken the guarantee.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

FORBID_EXTRA_FIELDS: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True)
class Data:
    """The source of the examples and their split over the parties."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    source: str = "digits"
    """digits, mnist, fashion-mnist, cifar10; a path: an .npz file, a table (.csv, .tsv, .jsonl, .parquet, .feather), a
    folder of images, of .npy arrays or of a Hugging Face data set; a database's URL; or package.module:function."""
    dir: str = ""
    """Folder to search first, before FULCRUM_DATA (a path list) and the user's cache."""
    public: bool = False
    """Declares that everybody may see your own data: it is then simulated on like the named public data sets. False:
    your own data is private, and only noised releases may depend on it."""
    withdrawn: str = ""
    """A file with the ids of people who withdrew their consent, one per line: their records are left out. What was
    released with them before stays in the ledger."""
    parties: int = 5
    """Number of parties K. Ignored with partition = "given", where the data names each example's party."""
    units: tuple[int, ...] = ()
    """Numbers of units that the parties declare publicly: one per party, or one for all. `fulcrum serve` and `fulcrum
    terms` need them to rehearse before the parties join; elsewhere the data says it."""
    partition: str = "auto"
    """auto (given where the data names each record's party; else hashed for private data, dirichlet for public data
    with classes, iid for other public data), iid, dirichlet, shards, quantity, hashed (by a keyed hash of each person
    or record: people who stay keep their party), or given. Private data is not split by its labels, nor against its own
    parties."""
    alpha: float = 0.5
    """Dirichlet concentration: of labels for dirichlet, of sizes for quantity. Smaller is more skewed."""
    shards: int = 2
    """Label shards per party, for partition = "shards"."""
    min_examples: int = 10
    """Smallest number of examples per party."""
    validation: float = 0.0
    """Fraction of the training data that is held out and replaces the test data (for tuning). Of private data, each
    unit is held out by a keyed hash, and scores are noised releases, see privacy.evaluation_epsilon."""
    features: str = "none"
    """Fixed public feature map, applied to each record before training: none, or scattering (second-order wavelet
    scattering of images: 81 channels per colour, a quarter of the height and width)."""
    feature_groups: int = 27
    """Number of channel groups in which each record's features are normalised (GroupNorm); 0: no normalisation."""
    feature_mirror: bool = False
    """Whether to average the features of an image and of its mirror image, for classes that mirroring
    does not change. This lowers the effect of the noise."""
    feature_center: bool = False
    """Whether to subtract the mean features of fixed synthetic images (noise with the spectrum of photographs)."""
    feature_whiten: float = 0.0
    """Whitening power; 0: off. Above 0, features are centred by their mean over synthetic images (made from formulas,
    without data) and multiplied by their covariance over those images to the power of minus this value, so that a few
    directions do not dominate the clipped norm. 0.5: full whitening; 0.25: halfway. Not with feature_center."""


@dataclass(frozen=True)
class Table:
    """The columns of a table (CSV, TSV, JSON lines, Parquet, Feather, database, frame), declared from public knowledge:
    no range or category is read off private values. docs/tables.md has the kinds of columns."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    schema: str = ""
    """Schema file (TOML) with the settings below and [columns.NAME]; `fulcrum data describe` writes one. Empty: a file
    NAME.schema.toml beside the table, if there is one. What is set here goes before what it says."""
    test: str = ""
    """A second table with public records to evaluate on, scored in the clear; empty: none."""
    query: str = ""
    """For a database: the name of a table, or a SELECT statement."""
    target: str | tuple[str, ...] = ""
    """The column that is predicted, or a list of them; each must be among the columns."""
    person: str = "auto"
    """Column that says whose record it is: auto (person, patient_id, ..., if the table has one), none, or its name."""
    party: str = "auto"
    """Column that says who holds the record: auto (party, hospital, site, ..., if the table has one), none, or its
    name."""
    record: str = "none"
    """Column with a unique id per record; one that is there twice is an error. none: no such column."""
    ignore: tuple[str, ...] = ()
    """Columns that may be there and are not used; ["*"]: all others. A column that is nowhere named is an error."""
    delimiter: str = ""
    """What separates the cells of a text file; empty: by its ending (.csv: a comma, .tsv: a tab)."""
    encoding: str = "utf-8"
    """Encoding of a text file: utf-8, latin-1, cp1252, utf-16."""
    decimal: str = "."
    """Decimal separator of numbers: a point or a comma."""
    thousands: str = ""
    """Separator between groups of three digits; empty: none."""
    missing_values: tuple[str, ...] = ()
    """Texts that mean an empty cell, beside NA, N/A, NaN, null, None and ?."""
    unlabelled: str = "refuse"
    """What becomes of a record without a target: refuse (an error) or drop."""
    columns: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)
    """The columns to learn from, and the target, by name: {"age" = {kind = "number", low = 0, high = 110}}."""


@dataclass(frozen=True)
class Images:
    """Images in a folder, where data.source names one. Size and classes are declared, not read off private images."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    size: tuple[int, ...] = ()
    """Height and width to which every image is resized; empty: those of the first image, for public data only."""
    colours: str = "rgb"
    """rgb (three channels) or grey (one)."""
    folders: str = "class"
    """What the sub-folders name, level by level: class, party, person, or - for nothing; such as "party/class"."""
    class_names: tuple[str, ...] = ()
    """The classes, in order; empty: those of the sub-folders, for public data only."""
    labels: str = ""
    """A table with one row per image in place of the sub-folders: a column with the file, one with the label, and
    where wanted person and party. Targets other than classes are declared in [table]."""
    file: str = "file"
    """The column of that table that names the file, from the folder on."""
    label: str = "label"
    """The column of that table that names the class."""


@dataclass(frozen=True)
class TaskSettings:
    """The prediction task and its metrics. Ranges and classes are declared, not computed from the data."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    name: str = "auto"
    """auto (declared by the data, else classification), classification, binary, multilabel, regression, tokens,
    next-token, or package.module:task."""
    classes: int = 0
    """Number of classes, labels or vocabulary tokens; 0: declared by the data, else the largest public target + 1. For
    private data without public test targets it must be declared."""
    class_weights: tuple[float, ...] = ()
    """Weight of each class in the loss (multilabel: of each positive label), in order; empty: all 1."""
    loss: str = "squared"
    """Loss of a regression: squared, absolute or huber."""
    huber_width: float = 1.0
    """Error, in units of scale, above which the huber loss is linear."""
    scale: float = 0.0
    """Public scale of regression targets: the model learns (target - offset) / scale. 0: (high - low) / 2 if both are
    declared, else 1."""
    offset: float = 0.0
    """Public centre of regression targets; (low + high) / 2 if both are declared and scale is not."""
    low: float | None = None
    """Smallest target of a regression; smaller ones are raised to it."""
    high: float | None = None
    """Largest target of a regression; larger ones are lowered to it."""
    threshold: float = 0.5
    """Probability threshold of a positive prediction, for f1, sensitivity and specificity."""
    choose_threshold: str = "none"
    """binary: report the threshold at which this metric is largest on the scored records (public ones, or through
    their noised and paid histogram): accuracy, balanced_accuracy or f1; or none. The metrics stay those at
    threshold."""
    class_balance: tuple[float, ...] = ()
    """Share of each class (multilabel: of the positives of each label) as publicly known, for imbalance; never counted
    in private labels."""
    imbalance: str = "none"
    """What is done about declared class_balance: none; weights (each class counts in the loss in inverse proportion to
    its share); or logits (logit adjustment, Menon et al. 2021: the loss sees the logits plus the log shares, so that
    the model itself predicts as if classes were equally frequent)."""
    ignored: int = -100
    """Target value of sequence positions that are ignored."""
    metrics: tuple[str, ...] = ()
    """Metrics to report in addition to the task's own: names, or package.module:metric."""
    score: str = ""
    """The metric that searches and comparisons use; empty: the task's own choice."""


@dataclass(frozen=True)
class Model:
    """The model that is trained."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    name: str = "auto"
    """auto, linear, mlp, mnist-cnn, cifar-cnn, scatter-cnn (on scattering features), torchvision:NAME, timm:NAME,
    transformers:FOLDER (a local folder with config.json), or package.module:factory."""
    activation: str = "relu"
    """relu, tanh, or tempered (a tempered sigmoid; 2 sigmoid(2x) - 1 is tanh)."""
    temper_scale: float = 2.0
    temper_temperature: float = 2.0
    temper_offset: float = 1.0
    hidden: tuple[int, ...] = (64,)
    """Widths of the mlp's hidden layers."""
    init: str = "random"
    """Public initial weights: random; zeros (models of one layer only, where a random start is only noise); synthetic
    (CNNs only, pretrained on images made from formulas); an .npz, .safetensors or torch file; a folder with weights; or
    the folder of an earlier run, whose spend is then added up. Layers that are not in the file are random."""
    coordinates: str = "plain"
    """Coordinates in which the network is trained: plain; centred (the input of every layer minus its mean over
    synthetic images, so that the mean does not dominate the clipped norm); whitened (centred, and the inputs of inner
    layers whitened). The stored model is always plain. centred and whitened need an init with these statistics:
    synthetic, or a file made by `fulcrum prior`."""
    whiten: float = 0.5
    """Whitening power for whitened coordinates: inputs are multiplied by their covariance to the power of minus this
    value. 0.5: full whitening. Smaller values whiten less and add less noise in directions of small variance."""
    norm: str = "keep"
    """What becomes of BatchNorm, which mixes the examples of a batch: keep (then it is refused); group, layer or
    instance (a norm of each example alone, with the weights carried over); frozen (its running statistics and weights
    stay as they are)."""
    train: str = "auto"
    """Which parameters train; the others are frozen, and public. auto (those that the model has not frozen; with
    model.lora: adapters and head), all, head, bias, lora, or patterns of names such as "encoder.layer.3.*"; several
    separated by commas. Only what trains is clipped, noised, sent and counted."""
    lora: int = 0
    """Rank of low-rank adapters on linear layers (LoRA); 0: none. They are merged into the weights at the end."""
    lora_alpha: float = 0.0
    """Scale of the adapters times their rank; 0: the rank, a scale of 1."""
    lora_targets: tuple[str, ...] = ()
    """Patterns of the names of layers that get adapters; empty: every linear layer but the head."""
    arguments: dict[str, bool | int | float | str] = field(default_factory=dict, hash=False)
    """Further arguments of the model's factory, by name: {"depth" = 4}."""


@dataclass(frozen=True)
class Train:
    """The optimisation: rounds, local steps, learning rates, the server's side."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    rounds: int = 200
    """Number of rounds T."""
    participation: float = 1.0
    """Probability q_c that a party takes part in a round. Lowers the privacy cost only at unit client (secret)."""
    min_parties: int = 1
    """The run ends when fewer parties than this have budget left."""
    steps: int = 1
    """Number of local steps N per round. 0: use epochs."""
    epochs: float = 0.0
    """Number of local epochs E per round: N = round(E / rate), at least 1. 0: use steps."""
    rate: float = 0.05
    """Poisson sampling rate q of each local step."""
    lr: float = 1.0
    """Local learning rate eta."""
    schedule: str = "constant"
    """Learning rate over the rounds: constant, linear (to zero), cosine (to zero), or step."""
    warmup: int = 0
    """Rounds over which the learning rate rises linearly to lr."""
    decay_rounds: tuple[int, ...] = ()
    """For schedule = "step": after each of these rounds the rate is multiplied by decay."""
    decay: float = 0.1
    weight_decay: float = 0.0
    """Decoupled weight decay: added after clipping and noise."""
    weights: str = "examples"
    """How updates are averaged: examples (by n_k; at unit client min(n_k / weight_cap, 1)), sqrt (by its root: small
    parties count for more than their records, and their noise for less than with uniform) or uniform."""
    combine: str = "mean"
    """How updates become one: mean (by weights), trimmed-mean or median (of each coordinate; each party counts once),
    geometric-median (by weights), or package.module:name. All but the mean bear bad parties, cost some accuracy, and
    need each party's own update: they are refused where parties share noise, and for unit client."""
    trim: float = 0.2
    """Share of the parties whose values trimmed-mean leaves out at each end of a coordinate, rounded up."""
    server: str = "sgd"
    """Server optimiser: sgd, momentum, adam, adam-bc (adam with the known variance of the noise taken off its second
    moment) or d-adaptation (sgd with a step from a lower bound on the distance to a solution)."""
    server_lr: float = 1.0
    server_momentum: float = 0.9
    server_beta2: float = 0.99
    server_eps: float = 1e-3
    ema: float = 0.9
    """Decay of the moving average of released models, which is evaluated and stored; 0: off."""


@dataclass(frozen=True)
class Clip:
    """The clipping rule and its settings. Each rule uses only some of them."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    rule: str = "moo"
    """A built-in rule or package.module:rule."""
    C0: float = 1.0
    """The clipping norm: fixed, or the initial value of an adaptive rule."""
    groups: str = "flat"
    """flat, or layer (each layer clipped to its share of C)."""
    kappa: float = 0.0
    """Weight of C in the objective L_model + kappa C."""
    balance: float = 2.5
    """moo: target ratio of the run's accumulated noise to the norm of random initial weights; sets the first step
    length. Times 3 for one-layer models, times 0.5 in whitened coordinates."""
    reach: float = 0.8
    """moo: upper limit of the first step length per local step, in units of the norm of random initial weights. It
    applies where the noise is small and the curvature of the loss limits the step. Smaller for one step per round from
    pretrained weights, and for several steps in runs of fewer than 200 rounds; no limit for one-layer models."""
    growth: float = 1.5
    """moo: upper limit of the step length, as a multiple of its first value."""
    rehearse: bool = False
    """moo: whether the first step length, C0, the learning rate and its schedule are chosen beforehand on made-up data
    of the same shape (docs/moo.md). It sees declared facts only, so it costs no privacy."""
    rehearse_on: str = ""
    """A public data source to rehearse on in place of made-up records, as data.source names one. Naming it declares it
    public: its values decide the choice. It must not be the data of the run; same inputs and task."""
    step: float = 0.0
    """moo: first step length: how far a round of fully clipped gradients that all agree moves the weights. 0:
    rehearsed, or else from balance and reach."""
    search: bool = True
    """moo: whether C is searched for by released signals; false: C stays at C0."""
    eta_C: float = 0.03
    """Change per round of the quantity that a rule adapts (C, or moo's step length), in logarithms."""
    beta: float = 0.98
    """Decay of the running average of released directions."""
    phi: str = "sign"
    """Function that turns the alignment into a step: sign or identity."""
    C_min: float = 1e-3
    C_max: float = 1e3
    gamma: float = 0.5
    """quantile: target fraction of norms below C."""
    rho_c: float = 0.3
    """dynamic: C_t = C0 rho_c^(t/T); below 1, C falls."""
    shrink: float = 0.0
    """wav: soft threshold on the noised coefficients, in standard deviations of their noise; 0 is off."""
    stability: float = 0.01
    """Constant that prevents division by a zero norm in auto-s (its gamma) and psac (its r; 0.1 in its preset)."""
    reading: str = "loss"
    """moo-paper, moo-paper-batch: reading of dL_model/dC: loss, hypergradient, or derivative (literal)."""
    statistics_interval: float = 0.0
    """Epochs between two releases of a rule's statistics; 0: with every step. Other steps release only gradients."""
    statistics_rounds: int = 0
    """Rounds between two releases of a rule's statistics, in the first local step of such a round; 0: as
    statistics_interval says."""
    options: dict[str, bool | int | float | str] = field(default_factory=dict, hash=False)
    """A user's rule's own settings (docs/own-rule.md), by name: {"speed" = 0.5}."""


@dataclass(frozen=True)
class Privacy:
    """The budget and the terms of the guarantee. Give epsilon (sigma is calibrated) or sigma (epsilon is reported)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    epsilon: float | None = None
    sigma: float | None = None
    delta: float = 1e-5
    unit: str = "auto"
    """Protected unit: auto (person where the data has a person id per record, else example); example; person; or
    client (a whole party; the server is trusted and adds the noise)."""
    accountant: str = "rdp"
    """rdp or pld: which epsilon is enforced. Both are reported."""
    max_participations: int = 0
    """Public cap on the rounds a party takes part in; 0 means all rounds."""
    budget: float | None = None
    """Epsilon of a party over all runs of a kept ledger; None: the epsilon of the first run."""
    budget_delta: float | None = None
    """Delta of a party over all runs of a kept ledger, of which each run takes its delta (not for accountant rdp, where
    all runs share one); None: the delta of the first run."""
    budgets: dict[str, float] = field(default_factory=dict)
    """Epsilon of parties with a different budget, by name: {"party-0" = 2.0}."""
    randomness: str = "auto"
    """auto (secure for private data, seeded for public data), seeded (simulations: sampling and noise follow from a
    seed) or secure (real use: a key from the operating system, never written down)."""
    seed: int | None = None
    """Private seed of sampling and noise in a seeded run; None: run.seed. It must stay secret."""
    arithmetic: str = "auto"
    """How the bounds on contributions hold: proven (float64 from gradients to the release, each step with a written
    bound), fast (float32 sums with measured margins), or auto (proven with secure randomness, else fast)."""
    evaluation_epsilon: float | None = None
    """Epsilon of the units that data.validation holds out of private data, over all evaluations of the run: each is one
    noised release (by default one, after the last round; run.evaluate_every asks for more). They do not train, so it
    does not add to epsilon."""
    noise_schedule: str = "constant"
    """Noise over the rounds: constant, growth (of 1/sigma, see rho_mu), or phases. sigma is that of the first round."""
    rho_mu: float = 0.8
    """For noise_schedule = "growth": sigma_t = sigma rho_mu^(t/T); below 1, the noise decreases over the rounds."""
    aggregation: str = "plain"
    """plain: the server sees every update, and each party's own noise protects it. ideal-secagg: the server is ASSUMED
    to see only the weighted sum, and the parties share one noise vector; the secure aggregation is only simulated.
    pairwise: the parties' masks cancel in the sum, each adds its share of the noise, and `colluders` says against whom
    that is enough (docs/pairwise.md)."""
    colluders: float = 1.0
    """For aggregation = "pairwise": how many parties may join forces with the server, as a count or a fraction of all
    parties. 0 covers no participant: whoever reads the broadcast model and knows its own message is already 1."""
    phases: tuple[float, ...] = ()
    """For noise_schedule = "phases": relative budgets of equally long phases; [1, 3] gives the second half three times
    the precision 1/sigma^2 of the first."""


@dataclass(frozen=True)
class ClientLevel:
    """The trusted server's average of the parties' updates, for privacy.unit = "client" only."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    estimator: str = "fixed"
    """Divisor of the weighted sum: fixed (the expected weight q_c W) or clipped (the weight of the participants, at
    least q_c W_min; at least twice the noise)."""
    weight_cap: float = 0.0
    """Public cap w_cap: with weights = "examples" a party's weight is min(n_k / w_cap, 1). 0: the median size."""
    min_weight: float = 1.0
    """W_min as a fraction of the total weight W, for estimator = "clipped"."""


@dataclass(frozen=True)
class Run:
    """Speed, device and stored output. Nothing here changes the guarantee."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    seed: int = 0
    """Public seed: the split over the parties, the initial weights, who is invited. Where privacy.seed is not set, also
    the private seed of a seeded run."""
    engine: str = "auto"
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: str = "float32"
    """Precision of matrix products in the stacked engine: float32; tf32 or bf16 (simulations; faster, less exact). A
    CPU computes in float32 whatever is set."""
    workers: int = 0
    """Parties trained in parallel (parallel engine), one core per party; 0: PyTorch's threads. Same result."""
    evaluate_every: int = 0
    reference: bool = False
    """Whether to train the same model without privacy, too, and report its scores beside the private ones (public data
    only; several times as long)."""
    checkpoint_every: int = 10
    diagnostics: bool = False
    """Record non-private diagnostics (clip fraction, mean norm, losses). For simulations only."""
    ledger: str = ""
    """Path of a ledger for several runs; empty: a ledger of this run only."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run. Equal settings and seed give equal bits."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    method: str = "moo"
    """The preset that these settings are based on (see `fulcrum methods`)."""
    data: Data = field(default_factory=Data)
    table: Table = field(default_factory=Table)
    images: Images = field(default_factory=Images)
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
