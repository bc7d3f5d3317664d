"""Does a refactored tree give the same numbers? A sample of short runs, kept as a file and compared with it.

    PYTHONPATH=old/src python benchmarks/equality.py --save baseline.json       # with the tree as it was
    PYTHONPATH=src python benchmarks/equality.py --against baseline.json        # with the tree as it is
    PYTHONPATH=src python benchmarks/equality.py --against baseline.json --cases 'engine/*' --json rows.json

Prints, for each case, whether weights, C and epsilon are equal bit for bit, and otherwise how far the final weights are
apart. Exits with 1 where a case failed or differs by more than rounding, unless EXPECTED has the reason. Both runs
belong on the same machine with the same
PyTorch: other processors add in another order. One thread, no downloads, under a minute.

Uses `fulcrum.train`, `fulcrum.prepare`, `fulcrum.Settings`, `fulcrum.data.from_arrays` and `run_many` alone. Settings
are written as the old tree called them; what was renamed since belongs in NEW_WORDS.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import datetime
import fnmatch
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import fulcrum

NEW_WORDS: dict[str, str] = {
    "clip.refresh": "clip.statistics_interval",
    "central.estimator": "client_level.estimator",
    "central.weight_cap": "client_level.weight_cap",
    "central.min_weight": "client_level.min_weight",
    "model.init=painted": "model.init=synthetic",
}
"""What settings are called now, for trees that do not know the old word: "train.server": "server.name" for a setting,
"train.server=adam": "train.server=fedadam" for one of its values (what follows = is read as JSON, else as text)."""

RUN_MANY = ("fulcrum.engines.batched", "fulcrum.many")
"""Modules that may hold `run_many`, newest first."""

TOLERANCE = 1e-6
"""Of weights, C and epsilon: the norm of the difference relative to the norm. Sums in another order give about 1e-7."""
EVALUATED = 1e-4
"""The same for accuracy and loss, which a change of the weights by 1e-6 moves further; one test example is too many."""
EXPECTED: dict[str, str] = {
    "*tokens": "an embedding's vocabulary no longer counts as outputs in moo's first step (Layout of the parameters)",
}
"""Cases that are meant to differ since 243f1c8, by pattern, with the reason."""
KEPT = 200_000
"""Weights of a case are kept up to this number; beyond it there is only their digest."""

Words = dict[str, Any]
"""Settings by dotted path, such as {"train.rounds": 6}. None takes a setting back."""
Array = npt.NDArray[Any]


# --- the cases ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One run, or with `runs` a stack of runs that differ in those settings.

    data and model: keys of DATA and MODELS; without them the settings name them.
    """

    name: str
    words: Words
    data: str = ""
    model: str = ""
    runs: tuple[Words, ...] = ()


BASE: Words = {
    "data.source": "digits",
    "data.parties": 4,
    "train.rounds": 6,
    "privacy.epsilon": 4.0,
    "run.engine": "reference",
    "run.device": "cpu",
    "run.seed": 0,
}
METHODS = (
    *("moo", "moo-c", "dp-sgd", "dp-fedavg", "median", "none", "dynamic", "wav", "tempered", "quantile", "auto-s"),
    *("psac", "units-of-c", "oso", "dc-sgd", "moo-client", "moo-scalar", "moo-paper", "moo-paper-batch"),
)
CLIENT_LEVEL = ("dp-fedavg", "median")
FAST = ("moo", "dp-sgd", "quantile", "wav", "oso", "dc-sgd", "moo-client", "moo-paper-batch")
"""Methods that the fast engines are tried with: flat and in another basis, free and paid, of server and clients."""
NOISY: Words = {"clip.C0": 0.7, "train.rounds": 8, "privacy.epsilon": 1.0}
"""A start and a noise that tell methods apart that otherwise do the same for some rounds."""
MLP: Words = {"model.name": "mlp", "model.hidden": [12]}
PERSONS: Words = {"data.parties": 3, "privacy.unit": "person", "train.rate": 0.2}
CLIENTS: Words = {"data.parties": 30, "privacy.unit": "client", "train.participation": 0.3, "clip.rule": "fixed"}
EPOCHS: Words = {"train.steps": 0, "train.epochs": 1.0, "train.rate": 0.25}
UNEQUAL: Words = {"data.partition": "quantity", "data.alpha": 0.7}

TRAINING: dict[str, Words] = {
    "seed-7": {"run.seed": 7},
    "sigma": {"privacy.epsilon": None, "privacy.sigma": 1.3},
    "layer-groups": {"clip.groups": "layer", **MLP},
    "layer-groups-quantile": {"method": "quantile", "clip.groups": "layer", **MLP},
    "steps-1": {"train.steps": 1, "train.rate": 0.1, "train.lr": 0.5, **MLP},
    "steps-3": {"train.steps": 3, **MLP},
    "epochs": EPOCHS,
    "participation": {"train.participation": 0.5},
    "max-participations": {"train.participation": 0.7, "privacy.max_participations": 3},
    "uniform-weights": {"train.weights": "uniform", **UNEQUAL},
    "server-sgd": {"train.server": "sgd", "train.server_lr": 0.8},
    "server-momentum": {"train.server": "momentum", "train.server_momentum": 0.7, "train.server_lr": 0.5},
    "server-adam": {"train.server": "adam", "train.server_lr": 0.05, "train.server_beta2": 0.95},
    "ema-off": {"train.ema": 0.0},
    "ema": {"train.ema": 0.3},
    "schedule-linear": {"train.schedule": "linear", "train.warmup": 3},
    "schedule-cosine": {"train.schedule": "cosine", "method": "dp-sgd"},
    "schedule-step": {"train.schedule": "step", "train.decay_rounds": [2, 4], "train.decay": 0.3, "method": "dp-sgd"},
    "warmup": {"train.warmup": 4, "method": "dp-sgd"},
    "weight-decay": {"train.weight_decay": 0.05, "train.steps": 2},
    "evaluate-every": {"run.evaluate_every": 4},
    "validation": {"data.validation": 0.2},
    "kappa": {"method": "moo-c", "clip.kappa": 0.1, "clip.phi": "identity"},
    "refresh": {"method": "quantile", "clip.refresh": 0.1, **UNEQUAL},
    "refresh-steps": {"method": "quantile", "clip.refresh": 0.3, "train.steps": 3, **UNEQUAL},
    "wav-shrink": {"method": "wav", "clip.shrink": 0.5, **MLP},
    "reading-hypergradient": {"method": "moo-paper", "clip.reading": "hypergradient"},
    "reading-derivative": {"method": "moo-paper-batch", "clip.reading": "derivative"},
}
PRIVACY: dict[str, Words] = {
    "growth": {"privacy.noise_schedule": "growth", "privacy.rho_mu": 0.5},
    "phases": {"privacy.noise_schedule": "phases", "privacy.phases": [1.0, 3.0]},
    "phases-sigma": {
        "privacy.noise_schedule": "phases",
        "privacy.phases": [1.0, 2.0, 4.0],
        "privacy.epsilon": None,
        "privacy.sigma": 1.5,
    },
    "ideal-secagg": {"privacy.aggregation": "ideal-secagg"},
    "ideal-secagg-unequal": {"privacy.aggregation": "ideal-secagg", "method": "dp-sgd", **UNEQUAL},
    "budgets": {"privacy.budgets": {"party-0": 2.0, "party-2": 1.0}},
    "pld": {"privacy.accountant": "pld"},
}
PARTITIONS: dict[str, Words] = {
    "iid": {},
    "dirichlet": {"data.alpha": 0.2},
    "shards": {"data.shards": 3},
    "quantity": {"data.alpha": 0.5},
}
CLIENT: dict[str, Words] = {
    "fixed": EPOCHS,
    "moo": {"clip.rule": "moo-c", "train.steps": 2},
    "quantile": {"clip.rule": "quantile", "train.steps": 2},
    "clipped": {"central.estimator": "clipped", "central.min_weight": 0.5, **EPOCHS},
    "layers": {"clip.groups": "layer", "train.steps": 2, **MLP},
}
IMAGES: Words = {"data.parties": 3, "data.partition": "iid", "train.rounds": 4, "train.rate": 0.2}
PAINTED: Words = {"model.name": "mnist-cnn", "model.init": "painted"}
NETWORKS: tuple[Case, ...] = (
    Case("linear", {"model.name": "linear"}),
    Case("mlp", {"model.name": "mlp", "model.hidden": [16, 8], "model.activation": "tanh"}),
    Case("mnist-cnn", {**IMAGES, "model.name": "mnist-cnn"}, "grey"),
    Case("mnist-cnn-steps", {**IMAGES, "model.name": "mnist-cnn", "train.steps": 2, "method": "quantile"}, "grey"),
    Case("cifar-cnn", {**IMAGES, "model.name": "cifar-cnn"}, "colour"),
    Case("painted", {**IMAGES, **PAINTED}, "grey"),
    Case("centred", {**IMAGES, **PAINTED, "model.coordinates": "centred"}, "grey"),
    Case("whitened", {**IMAGES, **PAINTED, "model.coordinates": "whitened"}, "grey"),
    Case("whitened-partly", {**IMAGES, **PAINTED, "model.coordinates": "whitened", "model.whiten": 0.25}, "grey"),
    Case("scattering", {**IMAGES, "model.name": "linear", "data.features": "scattering"}, "grey"),
    Case("scatter-cnn", {**IMAGES, "model.name": "scatter-cnn", "data.features": "scattering"}, "grey"),
    Case("residual", IMAGES, "small", "residual"),
    Case("residual-layers", {**IMAGES, "clip.groups": "layer", "train.steps": 2}, "small", "residual"),
    Case("tokens", IMAGES, "tokens", "tokens"),
)
STACK: tuple[Words, ...] = (
    {"run.seed": 0},
    {"run.seed": 1, "clip.C0": 0.3},
    {"run.seed": 7, "train.lr": 0.5, "train.server_lr": 0.7},
)
STACKS: tuple[Case, ...] = (
    *(Case(f"pooled-{rule}", {"clip.rule": rule, **MLP}) for rule in ("moo", "fixed", "quantile", "dc-sgd")),
    Case("pooled-adam", {"train.server": "adam", "train.schedule": "cosine", "train.participation": 0.5}),
    Case("pooled-phases", {"privacy.noise_schedule": "phases", "privacy.phases": [1.0, 3.0]}),
    Case("pooled-secagg", {"privacy.aggregation": "ideal-secagg"}),
    Case("pooled-cnn", {**IMAGES, "model.name": "mnist-cnn"}, "grey"),
    Case("pooled-whitened", {**IMAGES, **PAINTED, "model.coordinates": "whitened"}, "grey"),
    *(Case(f"locals-{rule}", {"clip.rule": rule, "train.steps": 3, **MLP}) for rule in ("moo", "fixed", "quantile")),
    Case("locals-wav", {"clip.rule": "wav", **MLP}),
    Case("locals-layers", {"clip.groups": "layer", "train.steps": 3, "train.weight_decay": 0.1, **MLP}),
    Case("cohorts", {**CLIENTS, **EPOCHS}),
    Case("cohorts-quantile", {**CLIENTS, "clip.rule": "quantile", "train.steps": 3, **MLP}),
    Case("apart", {"clip.rule": "moo-paper-batch", "clip.kappa": 0.3, "clip.eta_C": 0.1, **MLP}),
    Case("apart-steps", {"clip.rule": "moo-paper", "clip.kappa": 0.3, "clip.eta_C": 0.1, "train.steps": 2}),
    Case("apart-clients", {"clip.rule": "moo-client", "train.steps": 2, **MLP}),
    Case("alone-person", {**PERSONS, "clip.rule": "fixed"}, "persons"),
)


def cases() -> Iterator[Case]:
    """All of them, in the order of the table."""
    for method in METHODS:
        parties = 30 if method in CLIENT_LEVEL else 4
        yield Case(f"method/{method}", {"method": method, "data.parties": parties, **NOISY, **MLP})
    for engine in ("parallel", "stacked"):
        fast = {"run.engine": engine, "run.workers": 2 if engine == "parallel" else 0}
        for method in FAST:
            yield Case(f"engine/{engine}/{method}", {"method": method, "train.steps": 2, **MLP, **fast})
        yield Case(f"engine/{engine}/client", {**CLIENTS, **EPOCHS, **fast})
        yield Case(f"engine/{engine}/person", {**PERSONS, "train.steps": 2, **fast}, "persons")
        yield Case(f"engine/{engine}/layers", {"clip.groups": "layer", **MLP, **fast})
        for own in NETWORKS:
            if own.name in ("mnist-cnn", "cifar-cnn", "whitened", "residual", "tokens"):
                yield dataclasses.replace(own, name=f"engine/{engine}/{own.name}", words={**own.words, **fast})
    for name, words in TRAINING.items():
        yield Case(f"train/{name}", words)
    for name, words in PRIVACY.items():
        yield Case(f"privacy/{name}", words)
    for name, words in PARTITIONS.items():
        yield Case(f"partition/{name}", {"data.partition": name, **words})
    yield Case("partition/given", {"data.partition": "given", "train.rate": 0.2}, "parties")
    yield Case("unit/person", PERSONS, "persons")
    yield Case("unit/person-steps", {**PERSONS, "train.steps": 3, "method": "quantile"}, "persons")
    for name, words in CLIENT.items():
        yield Case(f"unit/client-{name}", {**CLIENTS, **words})
    for own in NETWORKS:
        yield dataclasses.replace(own, name=f"model/{own.name}")
    for own in STACKS:
        yield dataclasses.replace(own, name=f"many/{own.name}", runs=STACK)
    rules = ("moo", "fixed", "quantile", "moo-paper")
    yield Case("many/rules", {}, runs=tuple({"clip.rule": rule, "run.seed": i} for i, rule in enumerate(rules)))


# --- made-up data and models ----------------------------------------------------------------------


# Older versions know no private data; what is made up here is public.
PUBLIC: dict[str, Any] = {"public": True} if "public" in inspect.signature(fulcrum.data.from_arrays).parameters else {}


def made_up(n: int, *shape: int, classes: int = 5, **columns: Any) -> fulcrum.Dataset:
    """Noise around a pattern for each class, and 60 test records of the same kind."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(classes, *shape, generator=generator)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, classes, (count,), generator=generator)
        return (0.5 * patterns[y] + 0.5 * torch.randn(count, *shape, generator=generator)).clamp(-1, 1), y

    return fulcrum.data.from_arrays(*draw(n), *draw(60), classes=classes, **(PUBLIC | columns))


VOCABULARY = 11


def tokens(n: int = 150, length: int = 6) -> fulcrum.Dataset:
    """Sequences of tokens, as whole numbers in float32; the label is what the first two have in common."""
    x = torch.randint(0, VOCABULARY, (n + 60, length), generator=torch.Generator().manual_seed(2))
    y = (x[:, 0] + x[:, 1]) % 3
    return fulcrum.data.from_arrays(x[:n].float(), y[:n], x[n:].float(), y[n:], classes=3, **PUBLIC)


DATA: dict[str, Callable[[], fulcrum.Dataset]] = {
    "persons": lambda: made_up(240, 8, person=[i // 3 for i in range(240)]),
    "parties": lambda: made_up(150, 8, party=[f"clinic {math.isqrt(i) % 3}" for i in range(150)]),
    "grey": lambda: made_up(150, 1, 28, 28),
    "colour": lambda: made_up(60, 3, 32, 32),
    "small": lambda: made_up(150, 2, 8, 8),
    "tokens": tokens,
}


class Residual(nn.Module):
    """Convolutions with GroupNorm and a connection past them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4 * 4 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.second(torch.relu(self.norm(h)))
        return self.head(nn.functional.avg_pool2d(torch.relu(h), 2).flatten(1))  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """The mean of the tokens' vectors, normalised, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = x.long().clamp(0, VOCABULARY - 1)
        return self.head(self.norm(self.embedding(index).mean(dim=1)))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {"residual": Residual, "tokens": Tokens}


@functools.cache
def data_of(name: str) -> fulcrum.Dataset | None:
    """The made-up data of that name; none where the settings name it."""
    return DATA[name]() if name else None


def model_of(name: str) -> nn.Module | None:
    """A new model of that name, always with the same weights; none where the settings name it."""
    if not name:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MODELS[name]()


# --- the words of the tree at hand ----------------------------------------------------------------


def known(path: str) -> bool:
    """Whether the importable tree has this setting."""
    value: Any = fulcrum.Settings()
    for name in path.split("."):
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def renamed(words: Words, values: bool) -> Words:
    """In the words of the importable tree. values: whether values, too, are to be replaced."""
    found: Words = {}
    for path, value in words.items():
        new = NEW_WORDS.get(f"{path}={value}", "") if values else ""
        if new:
            path, _, text = new.partition("=")
            value = text
            with contextlib.suppress(json.JSONDecodeError):
                value = json.loads(text)
        elif not known(path):
            path = NEW_WORDS.get(path, path)
        found[path] = value
    return found


def keywords(words: Words) -> dict[str, Any]:
    """As `fulcrum.train` takes them: sections, but for data and model, whose names are those of two arguments."""
    found: dict[str, Any] = {}
    short = {"data.source": "data", "model.name": "model"}
    for path, value in words.items():
        section, _, name = path.rpartition(".")
        if section in ("", "data", "model"):
            found[short.get(path, name)] = value
        else:
            found.setdefault(section, {})[name] = value
    return found


def settings(words: Words) -> fulcrum.Settings:
    """The defaults with these changes. No preset is laid under them."""
    made, sections = fulcrum.Settings(), {path.partition(".")[0] for path in words}
    for section in sections:
        own = {path.partition(".")[2]: value for path, value in words.items() if path.startswith(f"{section}.")}
        frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
        made = dataclasses.replace(made, **{section: dataclasses.replace(getattr(made, section), **frozen)})
    return made


# --- playing them ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a case ended with: the averaged weights [R, d], and lists of numbers that must agree."""

    weights: Array
    numbers: Mapping[str, Sequence[float]]

    @property
    def digests(self) -> list[str]:
        """A fingerprint of each run's weights."""
        return [hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest() for row in self.weights]


def play(case: Case) -> Found:
    """The case with the importable tree, in the old words or, where those are refused, the new ones."""
    torch.manual_seed(0)  # nothing should draw from it
    changes = case.runs or ({},)
    words = [{path: v for path, v in {**BASE, **case.words, **own}.items() if v is not None} for own in changes]
    action = play_stack if case.runs else play_one
    first, second = ([renamed(own, values) for own in words] for values in (False, True))
    try:
        return action(case, first)
    except (fulcrum.InputError, TypeError):
        if first == second:
            raise
        return action(case, second)


def play_one(case: Case, words: Sequence[Words]) -> Found:
    """One run through `fulcrum.train`."""
    names = keywords(words[0])
    for name, given in (("data", data_of(case.data)), ("model", model_of(case.model))):
        if given is not None:
            names[name] = given
    result = fulcrum.train(**names)
    trained = [p.detach().reshape(-1) for p in result.model.parameters() if p.requires_grad]
    numbers = {
        "accuracy": [result.accuracy],
        "loss": [result.loss],
        "C": flat(result.C),
        "epsilon": [result.epsilon],
        "epsilons": flat(result.epsilons),
    }
    return Found(torch.cat(trained).float().numpy()[None], numbers)


def play_stack(case: Case, words: Sequence[Words]) -> Found:
    """Several runs at once, through `run_many`. Numbers are listed round by round, in each run by run."""
    data = data_of(case.data)
    federations = [fulcrum.prepare(settings(own), data, model_of(case.model)) for own in words]
    rounds = list(find_run_many()(federations))
    numbers = {name: flat([getattr(r, name).tolist() for r in rounds]) for name in ("accuracy", "loss", "C")}
    return Found(rounds[-1].averaged.detach().cpu().float().numpy(), {**numbers, "epsilon": [], "epsilons": []})


def flat(value: Any) -> list[float]:
    """The numbers in nested lists; infinity may be written as text."""
    return [x for item in value for x in flat(item)] if isinstance(value, list | tuple) else [float(value)]


def find_run_many() -> Callable[..., Any]:
    """`run_many`, wherever the importable tree has it."""
    for name in RUN_MANY:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name).run_many  # type: ignore[no-any-return]
    raise ModuleNotFoundError(f"run_many is in none of {', '.join(RUN_MANY)}; add its module to RUN_MANY.")


# --- keeping and comparing ------------------------------------------------------------------------


def pack(found: Found) -> dict[str, Any]:
    """For the file: weights as base64 of little-endian float32, row by row."""
    keep = found.weights.size <= KEPT
    return {
        "digests": found.digests,
        "weights": base64.b64encode(found.weights.astype("<f4").tobytes()).decode() if keep else None,
        "shape": list(found.weights.shape),
        **found.numbers,
    }


def compare(before: Mapping[str, Any], found: Found) -> dict[str, Any]:
    """One row: what was kept against what was found now. `differs` names what is further apart than rounding."""
    differs = []
    same = before["digests"] == found.digests
    rel, most = (0.0, 0.0) if same else (math.inf, math.inf)
    if not same and before["weights"] is not None and before["shape"] == list(found.weights.shape):
        old = np.frombuffer(base64.b64decode(before["weights"]), "<f4").reshape(before["shape"])
        rel, most = difference(old, found.weights)
    if not rel <= TOLERANCE:
        differs.append("weights")
    for name, values in found.numbers.items():
        old = np.array([float(x) for x in before[name]])
        own, _ = difference(old[None], np.array(values)[None])
        if name not in ("accuracy", "loss"):  # evaluation adds up in another order and type since tasks are values
            same = same and own == 0
        if not own <= (EVALUATED if name in ("accuracy", "loss") else TOLERANCE):
            differs.append(name)
    row: dict[str, Any] = {"equal_bits": same, "max_abs_diff": most, "rel_diff": rel, "differs": differs}
    for name in ("accuracy", "epsilon"):
        row[f"{name}_before"] = float(before[name][-1]) if before[name] else None
        row[f"{name}_after"] = found.numbers[name][-1] if found.numbers[name] else None
    return row


def difference(old: Array, new: Array) -> tuple[float, float]:
    """The norm of the difference relative to the norm, of the run where it is largest; and the largest difference."""
    if old.shape != new.shape:
        return math.inf, math.inf
    if not old.size:
        return 0.0, 0.0
    old, new = old.astype(np.float64), new.astype(np.float64)
    same = (old == new) | (np.isnan(old) & np.isnan(new))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(new - old))
    size = np.linalg.norm(np.where(np.isfinite(old), old, 0.0), axis=1)
    if not np.isfinite(apart).all():
        return math.inf, math.inf
    return float((np.linalg.norm(apart, axis=1) / np.maximum(size, 1e-30)).max()), float(apart.max())


# --- the command ----------------------------------------------------------------------------------


def main() -> int:
    """Play the cases; keep what they give, or compare it."""
    asked = arguments()
    torch.set_num_threads(1)
    chosen = [case for case in cases() if fnmatch.fnmatch(case.name, asked.cases)]
    if not chosen:
        print(f"No case is called {asked.cases}; for example: method/moo, engine/*.", file=sys.stderr)
        return 2
    print(f"fulcrum is {Path(fulcrum.__file__).parent}", file=sys.stderr)
    kept = json.loads(Path(asked.against).read_text()) if asked.against else {}
    began = time.perf_counter()
    packed: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for case in chosen:
        try:
            found = play(case)
        except Exception as error:
            row: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
        else:
            packed[case.name] = pack(found)
            row = {}
            if asked.against:
                before = kept["cases"].get(case.name)
                row = compare(before, found) if before else {"error": f"{asked.against} does not have this case"}
        reason = next((why for pattern, why in EXPECTED.items() if fnmatch.fnmatch(case.name, pattern)), "")
        rows.append({"case": case.name, **row, **({"expected": reason} if reason and row.get("differs") else {})})
        print(line(rows[-1]) if asked.against or "error" in row else case.name, flush=True)
    about = {**here(), "seconds": round(time.perf_counter() - began, 1)}
    bad = [row for row in rows if row.get("error") or (row.get("differs") and not row.get("expected"))]
    if asked.save:
        write(asked.save, {**about, "cases": packed})
    if asked.json:
        before_it = {name: value for name, value in kept.items() if name != "cases"}
        write(asked.json, {**about, "tolerance": TOLERANCE, "before": before_it, "rows": rows})
    equal = sum(row.get("equal_bits", False) for row in rows)
    meant = sum("expected" in row for row in rows)
    told = (
        f", {equal} bit for bit equal, {meant} differ as expected, {len(bad)} wrong"
        if asked.against
        else f", {len(bad)} failed"
    )
    print(f"{len(rows)} cases in {about['seconds']:.0f} s{told}")
    return 1 if bad else 0


def arguments() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--save", metavar="FILE", help="keep what the importable tree gives")
    what.add_argument("--against", metavar="FILE", help="compare the importable tree with what was kept")
    parser.add_argument("--cases", metavar="PATTERN", default="*", help="only these, such as 'engine/*'")
    parser.add_argument("--json", metavar="OUT", help="write the rows of the table, too")
    return parser.parse_args()


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    if "error" in row:
        return f"{row['case']:<34} FAILED: {row['error']}"
    verdict = "bit for bit" if row["equal_bits"] else f"relative difference {row['rel_diff']:.1e}"
    shown = [f"{row['case']:<34} {verdict:<30}"]
    for name, form in (("accuracy", ".4f"), ("epsilon", ".6g")):
        before, after = row[f"{name}_before"], row[f"{name}_after"]
        if before is not None and after is not None:
            moved = "" if before == after else f" -> {after:{form}}"
            shown.append(f"{name} {before:{form}}{moved}")
    if row["differs"]:
        reason = f" (expected: {row['expected']})" if "expected" in row else ""
        shown.append(f"DIFFERS: {', '.join(row['differs'])}{reason}")
    return "  ".join(shown)


def write(path: str, content: Mapping[str, Any]) -> None:
    """As JSON."""
    Path(path).write_text(json.dumps(plain(content), indent=1, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """The same with text for numbers that are not finite, which JSON cannot hold; `float` reads it back."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def here() -> dict[str, Any]:
    """Date, commit of the importable tree, command and hardware."""
    words = ["git", "-C", str(Path(fulcrum.__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": done.stdout.strip() or "unknown",
        "command": f"python {shlex.join(sys.argv)}",
        "hardware": f"{processor()}, {os.cpu_count()} cores, 1 thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def processor() -> str:
    """The processor's name, where the system tells it."""
    with contextlib.suppress(OSError):
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
