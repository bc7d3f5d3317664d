"""Gradient inversion, from settings to a table: the server's view of first rounds, attacked, beside the originals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fulcrum.analysis.attacks.cells import name_epsilon
from fulcrum.analysis.attacks.first_layer import ANALYTIC, make_imprint_weights
from fulcrum.analysis.attacks.gradient_matching import MATCHING, MatchingOptions
from fulcrum.analysis.attacks.image_quality import compute_psnr, compute_ssim, match_images
from fulcrum.analysis.attacks.server_view import ServerView, draw_first_sample, look_at_release
from fulcrum.analysis.attacks.tokens import recover_tokens
from fulcrum.data import Dataset
from fulcrum.data.dataset import compute_dataset_fingerprint
from fulcrum.data.declared import refuse_without_ledger
from fulcrum.errors import ConfigError
from fulcrum.rng import numpy_generator
from fulcrum.runs import prepare_unrehearsed
from fulcrum.settings.registry import suggest_nearest_names
from fulcrum.settings.schema import Settings, TaskSettings
from fulcrum.study.calibrate import calibrate_noise
from fulcrum.study.run_job import DatasetCache
from fulcrum.study.stats import compute_mean_interval
from fulcrum.training.federation import Federation

INVERSIONS = (*MATCHING, *ANALYTIC)
"""Names of the attacks on images."""
ANALYTIC_ROWS = 64
"""Width of the mlp's hidden layer that the analytic attacks read."""
MOST_SEEDS = 100
"""Private seeds that are tried until a sample holds a record."""
SayFn = Callable[[str], None]


@dataclass(frozen=True)
class InversionSize:
    """How much is attacked. images: single records, one release each. parties: of whole Poisson batches, each with
    `batch` records on average. steps: of the attacks that search."""

    images: int = 4
    parties: int = 2
    batch: int = 8
    steps: int = 200

    def check(self) -> None:
        """ConfigError where there is nothing to do."""
        for name in ("images", "parties", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} is out of range; it must be at least 1.")


@dataclass(frozen=True, eq=False)
class InversionRow:
    """One attack at one epsilon. batch: "1", one record per release, or "poisson". psnr, ssim: of each image.

    baseline: PSNR and SSIM of the public test set's mean image, which needs no attack at all. originals, found
    [n, c, h, w] in [0, 1].
    """

    data: str
    epsilon: float | None
    sigma: float
    attack: str
    model: str
    batch: str
    psnr: Sequence[float]
    ssim: Sequence[float]
    baseline: tuple[float, float]
    originals: Tensor = field(repr=False)
    found: Tensor = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the images."""
        return {
            **{name: getattr(self, name) for name in ("data", "epsilon", "sigma", "attack", "model", "batch")},
            "images": len(self.psnr),
            "psnr": _summarise(self.psnr),
            "ssim": _summarise(self.ssim),
            "mean_image": {"psnr": round(self.baseline[0], 3), "ssim": round(self.baseline[1], 4)},
            "psnr_of_each": [round(value, 3) for value in self.psnr],
            "ssim_of_each": [round(value, 4) for value in self.ssim],
        }


@dataclass(frozen=True)
class TokensRow:
    """Tokens recovered at one epsilon: the share of each batch's different tokens."""

    data: str
    epsilon: float | None
    sigma: float
    batch: str
    found: Sequence[float]
    guessing: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        plain = {name: getattr(self, name) for name in ("data", "epsilon", "sigma", "batch")}
        return {
            **plain,
            "batches": len(self.found),
            "tokens_found": _summarise(self.found),
            "guessing": round(self.guessing, 4),
        }


def _summarise(values: Sequence[float]) -> dict[str, float | None]:
    found = compute_mean_interval(list(values))
    return {"mean": round(found.mean, 4), "half": round(found.half, 4) if found.n > 1 else None}


def attack_inversion(
    settings: Settings,
    epsilons: Sequence[float | None] = (None, 1.64, 3.61, 6.38),
    size: InversionSize | None = None,
    attacks: Sequence[str] = INVERSIONS,
    *,
    dataset: Dataset | None = None,
    say: SayFn = lambda words: None,
) -> list[InversionRow]:
    """Invert what the server sees of first rounds, at each epsilon (None: no privacy), for images of public data.

    settings: rate, rounds, C0 and the model of dlg and cosine are theirs; ratio and imprint read the first layer of an
    mlp. Each release is made by the client that any run has. dataset: None: that of the settings.

        from fulcrum import attacks
        rows = attacks.attack_inversion(settings, (None, 3.61), attacks.InversionSize(images=2), ["imprint"])
        print(rows[0].psnr)
    """
    size = size or InversionSize()
    size.check()
    dataset = DatasetCache().get(settings) if dataset is None else dataset
    refuse_without_ledger(dataset)
    unknown = [name for name in attacks if name not in INVERSIONS]
    if unknown:
        raise ConfigError(f"attack = {unknown[0]!r} is not known; {suggest_nearest_names(unknown[0], INVERSIONS)}")
    if not isinstance(dataset.x, Tensor) or dataset.x.dim() != 4 or not dataset.x.is_floating_point():
        raise ConfigError(f"{dataset.name} holds no images [n, channels, height, width]; inversion rebuilds images.")
    rows = []
    for epsilon in epsilons:
        own = settle_noise(settings, epsilon)
        for batch in ("1", "poisson"):
            views: dict[bool, tuple[Federation, str]] = {}
            for attack in attacks:
                analytic = attack in ANALYTIC
                if analytic not in views:
                    views[analytic] = _prepare(own, dataset, size, batch, analytic)
                say(f"epsilon {name_epsilon(epsilon)}, batch {batch}, {attack}")
                rows.append(_attack_cell(attack, views[analytic], epsilon, batch, size, dataset))
    return rows


def settle_noise(settings: Settings, epsilon: float | None) -> Settings:
    """The settings with the noise that epsilon asks for; None: without clipping and noise."""
    if epsilon is None:
        return settings.replace(clip={"rule": "none", "rehearse": False}, privacy={"epsilon": None, "sigma": None})
    settings = settings.replace(privacy={"epsilon": epsilon, "sigma": None}, clip={"rehearse": False})
    sigma, _ = calibrate_noise(settings)
    return settings.replace(privacy={"epsilon": None, "sigma": sigma})


def take_records(dataset: Dataset, count: int, seed: int, purpose: str) -> Dataset:
    """Some of the training records, at random."""
    have = len(dataset.records)
    if count > have:
        raise ConfigError(f"the attack needs {count:,} records, and {dataset.name} has {have:,}; take fewer.")
    rows = np.sort(numpy_generator(seed, "attack", purpose).permutation(have)[:count])
    part = dataclasses.replace(dataset, train=dataset.records.take(torch.from_numpy(rows)))
    return dataclasses.replace(part, fingerprint=compute_dataset_fingerprint(part))


def _prepare(
    settings: Settings, dataset: Dataset, size: InversionSize, batch: str, analytic: bool
) -> tuple[Federation, str]:
    """The federation whose parties release once: single records, or records of which a sample is taken."""
    if analytic:
        settings = settings.replace(model={"name": "mlp", "hidden": (ANALYTIC_ROWS,), "activation": "relu"})
    federation = prepare_first_round(settings, dataset, size, batch)
    return federation, f"{settings.model.name}, {settings.model.activation}"


def prepare_first_round(
    settings: Settings, dataset: Dataset, size: InversionSize, batch: str, model: nn.Module | None = None
) -> Federation:
    """A federation over records taken from a data set: one per party, or parties of batch / rate records."""
    parties = size.images if batch == "1" else size.parties
    each = 1 if batch == "1" else max(1, round(size.batch / settings.train.rate))
    records = take_records(dataset, parties * each, settings.run.seed, f"inversion-{batch}")
    ready = settings.replace(
        data={"parties": parties, "partition": "iid", "min_examples": 1, "validation": 0.0},
        run={"device": "cpu", "engine": "reference", "ledger": ""},
    )
    ready = dataclasses.replace(ready, task=TaskSettings())
    for private_seed in range(MOST_SEEDS):  # a sample may be empty, and then there is nothing to rebuild
        federation = prepare_unrehearsed(ready.replace(privacy={"seed": private_seed}), records, model)
        if batch == "1" or any(len(draw_first_sample(federation, k)) for k in range(parties)):
            return federation
    raise ConfigError(f"{MOST_SEEDS} samples in a row were empty; take a larger batch.")


def look_at_parties(federation: Federation, batch: str, theta: Tensor | None = None) -> list[ServerView]:
    """What the server sees of each party; parties whose sample is empty are left out."""
    parties = federation.problem.partition.parties
    views = [look_at_release(federation, k, theta, whole=batch == "1") for k in range(parties)]
    return [view for view in views if view.count]


def _attack_cell(
    attack: str,
    prepared: tuple[Federation, str],
    epsilon: float | None,
    batch: str,
    size: InversionSize,
    dataset: Dataset,
) -> InversionRow:
    federation, model = prepared
    problem = federation.problem
    public = dataset.x_test[:2000].float()
    low, high = float(public.min()), float(public.max())
    theta = make_imprint_weights(problem.model, problem.layout, public) if attack == "imprint" else None
    originals, found = [], []
    for view in look_at_parties(federation, batch, theta):
        if attack in MATCHING:
            candidates = MATCHING[attack](view, MatchingOptions(size.steps, low=low, high=high))
        else:
            candidates = ANALYTIC[attack](view).shrink(public)
        candidates = torch.nan_to_num(candidates).clamp(low, high)
        originals.append(view.x)
        found.append(candidates[match_images(view.x, candidates)])
    true, made = ((torch.cat(parts) - low) / (high - low) for parts in (originals, found))
    mean = ((public.mean(dim=0) - low) / (high - low)).expand_as(true)
    return InversionRow(
        data=dataset.name,
        epsilon=epsilon,
        sigma=float(federation.settings.privacy.sigma or 0.0),
        attack=attack,
        model=model,
        batch=batch,
        psnr=compute_psnr(true, made).tolist(),
        ssim=compute_ssim(true, made).tolist(),
        baseline=(float(compute_psnr(true, mean).mean()), float(compute_ssim(true, mean).mean())),
        originals=true,
        found=made,
    )


def attack_tokens(
    settings: Settings,
    epsilons: Sequence[float | None],
    size: InversionSize | None = None,
    *,
    dataset: Dataset,
    model: nn.Module | None = None,
    ignored: int = -1,
    say: SayFn = lambda words: None,
) -> list[TokensRow]:
    """Tokens that the server reads off the embedding's gradient in first rounds, at each epsilon (None: no privacy).

    dataset: public records of token ids [n, length]. model: with an nn.Embedding; None: that of the settings. ignored:
    the padding token.
    """
    size = size or InversionSize()
    size.check()
    refuse_without_ledger(dataset)
    if not dataset.has_integers:
        raise ConfigError(f"{dataset.name} holds no token ids; the attack reads tokens off an embedding's gradient.")
    rows = []
    for epsilon in epsilons:
        own = settle_noise(settings, epsilon)
        for batch in ("1", "poisson"):
            say(f"epsilon {name_epsilon(epsilon)}, batch {batch}, tokens")
            federation = prepare_first_round(own, dataset, size, batch, model)
            seen = [recover_tokens(view, ignored) for view in look_at_parties(federation, batch)]
            sigma = float(own.privacy.sigma or 0.0)
            guessing = float(np.mean([one.guessing for one in seen])) if seen else 0.0
            rows.append(TokensRow(dataset.name, epsilon, sigma, batch, [one.found for one in seen], guessing))
    return rows
