"""The trained model in a run's folder, and back: an ordinary network, complete, without the private data.

model.safetensors  all weights and buffers of the plain network
model.json         what is needed to build the network again: settings, shapes and types of inputs, the task; and the
                   run that made it, with what it spent
MODEL.md           the model card
transformers/      config and tokenizer, where the network is one of transformers
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fulcrum.data import Dataset
from fulcrum.data.records import ModelInputs, map_inputs, select_rows
from fulcrum.data.tasks import Task, make_task
from fulcrum.errors import FulcrumError, RunError
from fulcrum.models.build import build_network
from fulcrum.models.checkpoints import FACTS_FILE, ORIGIN_KEY, WeightOrigin
from fulcrum.models.imported import quiet_library
from fulcrum.models.norms import convert_norms
from fulcrum.models.plain import compute_model_hash, list_complete_weights, make_plain_model
from fulcrum.models.prepared import take_outputs
from fulcrum.runs import folder as record
from fulcrum.settings.schema import Model, Settings, TaskSettings

MODEL_FORMAT = 1
"""The format of model.json."""
WEIGHTS_FILE, CARD_FILE, TRANSFORMERS_FOLDER = "model.safetensors", "MODEL.md", "transformers"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
    *("vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "chat_template.jinja"),
    "preprocessor_config.json",
)
"""Files of a tokenizer that are kept with the model."""


# --- writing ----------------------------------------------------------------------------------------


def describe_model(
    model: nn.Module, weights: Mapping[str, Tensor], settings: Settings, dataset: Dataset, trained: int, given: bool
) -> dict[str, Any]:
    """The content of model.json. model: the plain network; weights: its own. given: it was handed over as an object."""
    task = dataset.task
    declared = dataset.task_settings
    numbers = [value for value in weights.values() if value.is_floating_point()]
    return {
        "format": MODEL_FORMAT,
        "sha256": compute_model_hash(weights),
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "given_as_object": given,
        "settings": dataclasses.asdict(settings.model),
        "inputs": describe_inputs(dataset.sample.x),
        "task": {
            "name": task.name,
            "outputs": task.outputs,
            "sequence": task.sequence,
            "target_shape": list(dataset.sample.y.shape[1:]),
            "settings": None if declared is None else dataclasses.asdict(_declare_classes(declared, task)),
        },
        "features": {
            name: value for name, value in dataclasses.asdict(settings.data).items() if name.startswith("feature")
        },
        "data": dataset.name,
        "parameters": {"all": sum(value.numel() for value in numbers), "trained": trained},
        "torch": str(torch.__version__),
    }


def _declare_classes(settings: TaskSettings, task: Task) -> TaskSettings:
    """Task settings that need no targets to count classes."""
    count = task.classes or task.outputs
    counted = settings.name in ("auto", "classification", "tokens", "next-token", "multilabel")
    return dataclasses.replace(settings, classes=settings.classes or count) if counted else settings


def describe_inputs(x: ModelInputs) -> dict[str, Any]:
    """Shape and type of one example's input, or of each by name."""

    def one(value: Tensor) -> dict[str, Any]:
        return {"shape": list(value.shape[1:]), "type": str(value.dtype).removeprefix("torch.")}

    return one(x) if isinstance(x, Tensor) else {"named": {name: one(value) for name, value in x.items()}}


def serialise_weights(weights: Mapping[str, Tensor], origin: WeightOrigin | None) -> bytes:
    """Weights as a safetensors file; with `origin`, it names the run which made them."""
    about = None if origin is None else {"format": "pt", ORIGIN_KEY: origin.to_json()}
    return save({name: value.contiguous() for name, value in weights.items()}, about)


def write_stored_model(
    folder: Path, model: nn.Module, facts: Mapping[str, Any], origin: WeightOrigin, settings: Settings
) -> None:
    """Write model.safetensors, model.json and, where it is one of transformers, its config and tokenizer."""
    weights = list_complete_weights(model)
    # Without its origin, so that equal runs end with equal files; model.json has it.
    record.write_file_atomically(folder / WEIGHTS_FILE, serialise_weights(weights, None))
    told = {**facts, "origin": json.loads(origin.to_json())}
    record.write_file_atomically(folder / FACTS_FILE, record.to_json_text(told).encode())
    write_transformers_files(folder / TRANSFORMERS_FOLDER, model, settings.model)


def write_transformers_files(folder: Path, model: Any, settings: Model) -> None:
    """The config of a transformers network, and the tokenizer files of the folder that it was loaded from."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.to_json_string())
    source = Path(settings.name.removeprefix("transformers:"))
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


# --- reading ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedModel:
    """A run's trained model. model: the plain network in eval mode, on the CPU. facts: model.json. folder: of the run.

    settings: of the run. task: what it predicts; None where the data brought a task of its own.
    """

    folder: Path
    model: nn.Module
    facts: Mapping[str, Any]
    settings: Settings
    task: Task | None

    @property
    def inputs(self) -> Any:
        """Shape of one example's input: a tuple, or one per name."""
        told = self.facts["inputs"]
        named = told.get("named")
        return {n: tuple(v["shape"]) for n, v in named.items()} if named is not None else tuple(told["shape"])

    def make_example(self, count: int, seed: int = 0) -> ModelInputs:
        """Made-up inputs of `count` examples: numbers between 0 and 1, and zeros where the model takes integers."""
        return make_example(self.facts["inputs"], count, seed)

    def list_inputs(self) -> list[str]:
        """Names of the inputs where there are several; [] for one."""
        return list(self.facts["inputs"].get("named", {}))

    @torch.no_grad()
    def outputs(self, x: ModelInputs, batch: int = 250) -> Tensor:
        """The network's outputs [n, ...] for inputs x, `batch` at a time."""
        found = []
        count = len(x) if isinstance(x, Tensor) else len(next(iter(x.values())))
        for start in range(0, count, batch):
            part = map_inputs(self._to_own_type, select_rows(x, slice(start, start + batch)))
            found.append(take_outputs(self.model(part) if isinstance(part, Tensor) else self.model(**part)))
        return torch.cat(found)

    def _to_own_type(self, value: Tensor) -> Tensor:
        """Numbers as the network's parameters are; a network for numbers gets integers as numbers."""
        told = self.facts["inputs"]
        takes_numbers = "named" not in told and told["type"].startswith("float")
        return value.float() if takes_numbers and not value.is_floating_point() else value

    @property
    def sha256(self) -> str:
        """The model's hash: of the weights of the plain network."""
        return str(self.facts["sha256"])


def make_example(told: Mapping[str, Any], count: int, seed: int = 0) -> ModelInputs:
    """Made-up inputs of the shapes and types that model.json tells: numbers between 0 and 1, integers 0."""
    generator = torch.Generator().manual_seed(seed)

    def one(entry: Mapping[str, Any]) -> Tensor:
        shape, kind = (count, *entry["shape"]), getattr(torch, entry["type"])
        if kind.is_floating_point:
            return torch.rand(shape, generator=generator).to(kind)
        return torch.zeros(shape, dtype=kind)

    named = told.get("named")
    return one(told) if named is None else {name: one(entry) for name, entry in named.items()}


def load(run: Path | str, model: nn.Module | None = None) -> nn.Module:
    """The trained network of a finished run: an ordinary nn.Module in eval mode, on the CPU.

        model = fulcrum.load("runs/first")
        model(x)

    It is in plain coordinates, complete with frozen weights and buffers, and its adapters are merged. The private data
    is not needed. model: the network's architecture, where `train` was given an object whose code Fulcrum cannot name;
    it is copied, not changed.
    """
    return load_trained(run, model).model


def load_trained(run: Path | str, model: nn.Module | None = None) -> TrainedModel:
    """The trained network of a finished run with its task, the shapes of its inputs and its settings."""
    from fulcrum.settings import files as settings_file

    folder = Path(run)
    record.load_run_json(folder, "run.json")
    if not (folder / FACTS_FILE).is_file():
        if (folder / WEIGHTS_FILE).is_file():
            raise RunError(
                f"{folder} has no {FACTS_FILE}: version 0.1 wrote it. Load {WEIGHTS_FILE} into your own network with "
                "safetensors, or train again with its settings.toml."
            )
        raise RunError(f"{folder} has no {FACTS_FILE}: its run is not finished; continue it with fulcrum resume.")
    facts = record.load_run_json(folder, FACTS_FILE)
    settings = settings_file.read_settings(folder / "settings.toml")
    try:
        weights = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(f"{folder / WEIGHTS_FILE} cannot be read: {error}; restore it.") from error
    if compute_model_hash(weights) != facts.get("sha256"):
        raise RunError(
            f"{folder / WEIGHTS_FILE} was edited or damaged: its hash is not that of {FACTS_FILE}; restore it."
        )
    try:
        task = rebuild_task(facts["task"])
        network = _rebuild_network(folder, facts, settings, task, model)
    except FulcrumError:
        raise
    except Exception as error:  # whatever a wrong entry brings about: it is the file that is wrong
        raise RunError(
            f"the model of {folder} cannot be built from {FACTS_FILE} ({type(error).__name__}: {str(error)[:200]}): "
            "the file was edited or damaged, or the model's own code has changed; bring it back."
        ) from error
    load_complete_weights(network, weights, folder)
    return TrainedModel(folder, network.cpu().eval(), facts, settings, task)


def rebuild_task(told: Mapping[str, Any]) -> Task | None:
    """The task that model.json describes; None where the data brought its own."""
    if told["settings"] is None:
        return None
    chosen = read_task_settings(told["settings"])
    return make_task(chosen, [np.zeros((1, *told["target_shape"]), dtype=np.int64)])


def read_task_settings(told: Mapping[str, Any]) -> TaskSettings:
    """Task settings as model.json has them; names that a later version added are left out."""
    fields = {field.name for field in dataclasses.fields(TaskSettings)}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items() if k in fields}
    return TaskSettings(**values)


def _rebuild_network(
    folder: Path, facts: Mapping[str, Any], settings: Settings, task: Task | None, given: nn.Module | None
) -> nn.Module:
    """The plain network of a run, with any weights."""
    if given is not None:
        return convert_norms(make_plain_model(given), settings.model.norm)
    if (folder / TRANSFORMERS_FOLDER / "config.json").is_file():
        return convert_norms(_rebuild_transformers(folder, facts), settings.model.norm)
    if facts["given_as_object"]:
        raise RunError(
            f"the model of {folder} was handed over as an object of {facts['class']}, which only its own code can "
            f"make: fulcrum.load({str(folder)!r}, model=...) takes one with any weights (on the command line: "
            "--model package.module:factory)."
        )
    shape = TrainedModel(folder, nn.Identity(), facts, settings, task).inputs
    plain = dataclasses.replace(settings.model, init="random")
    told = facts["task"]
    try:
        network = build_network(plain, shape, told["outputs"], settings.run.seed, told["sequence"], task)
    except FulcrumError as error:
        raise RunError(f"the model of {folder} cannot be built here: {error}") from error
    return convert_norms(network, settings.model.norm)


def _rebuild_transformers(folder: Path, facts: Mapping[str, Any]) -> nn.Module:
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise RunError(f"the model of {folder} needs transformers: pip install 'fulcrum-fl[transformers]'.") from error
    kind = str(facts["class"]).rpartition(".")[2]
    if not hasattr(library, kind):
        raise RunError(f"the model of {folder} is a {facts['class']}, which transformers {library.__version__} lacks.")
    config = library.AutoConfig.from_pretrained(folder / TRANSFORMERS_FOLDER, local_files_only=True)
    with quiet_library(library):
        made: nn.Module = getattr(library, kind)._from_config(config, attn_implementation="eager")
    return made


def load_complete_weights(model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Writes all weights and buffers into a network; RunError where the names or shapes are others."""
    try:
        model.load_state_dict(dict(weights), strict=True)
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise RunError(
            f"the network does not have the weights of {folder / WEIGHTS_FILE} ({words[:300]}); its code has changed."
        ) from error


def read_facts_file(folder: Path) -> dict[str, Any]:
    """model.json of a run, as it is; {} where there is none."""
    file = folder / FACTS_FILE
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
