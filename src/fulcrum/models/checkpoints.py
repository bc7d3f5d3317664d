"""Weights on disk: .npz, .safetensors, torch files, folders of transformers and of runs. Never a pickle's code.

read_checkpoint(Path("bert-small"))        # {"bert.embeddings.word_embeddings.weight": [V, H], ...}
read_origin(Path("runs/first"))            # the private run that made these weights, with what it spent; else None
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulcrum.errors import ModelError

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where a folder holds its weights, the first that exists; the names are those of transformers and of our runs."""
NESTED_NAMES = ("state_dict", "model_state_dict", "model")
"""Entries of a torch file that hold the weights among other things."""
ORIGIN_KEY = "fulcrum.origin"
"""The entry of an exported safetensors file's metadata that tells which run made it."""
FACTS_FILE = "model.json"
"""Tells the same in a run's folder: there equal runs have equal weight files, bit by bit."""


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a file or folder by name: numbers as float32, integers as they are. ModelError says what is wrong.

    Torch files are read with weights_only=True: code in them does not run.
    """
    file = find_weight_file(path) if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"model.init = {str(path)!r}: there is no such file.")
    reader = READERS.get(file.suffix)
    if reader is None:
        known = ", ".join(suffix for suffix in READERS if suffix != ".json")
        raise ModelError(f"model.init = {str(path)!r} is none of {known}, nor a folder with weights.")
    try:
        found = reader(file)
    except ModelError:
        raise
    except Exception as error:
        words = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelError(f"model.init = {str(path)!r} cannot be read as {file.suffix}: {words}.") from error
    return {name: value.float() if value.is_floating_point() else value for name, value in found.items()}


def find_weight_file(folder: Path) -> Path:
    """The file with the weights of a folder; ModelError where there is none."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    unfinished = " (the run is not finished)" if (folder / "run.json").is_file() else ""
    raise ModelError(f"model.init = {str(folder)!r}: the folder holds no {WEIGHT_FILES[0]}{unfinished}.")


def _read_npz(file: Path) -> dict[str, Tensor]:
    with np.load(file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(np.array(arrays[name])) for name in arrays.files}


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    load = importlib.import_module("safetensors.torch").load_file  # optional dependency
    return dict(load(file))


def _read_torch(file: Path) -> dict[str, Tensor]:
    found = torch.load(file, map_location="cpu", weights_only=True)
    while isinstance(found, Mapping) and not any(isinstance(value, Tensor) for value in found.values()):
        inner = next((found[name] for name in NESTED_NAMES if isinstance(found.get(name), Mapping)), None)
        if inner is None:
            break
        found = inner
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelError(
            f"model.init = {str(file)!r} holds no weights by name; save them with torch.save(model.state_dict(), FILE)."
        )
    return dict(found)


def _read_shards(file: Path) -> dict[str, Tensor]:
    shards = sorted(set(json.loads(file.read_text())["weight_map"].values()))
    return {name: value for shard in shards for name, value in READERS[Path(shard).suffix](file.parent / shard).items()}


READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".bin": _read_torch,
    ".ckpt": _read_torch,
    ".json": _read_shards,
}
"""Readers of files with weights, by suffix."""


# --- where weights come from ------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightOrigin:
    """The run that made weights, and what was spent on them: over all runs of its scope, and those it started from.

    run: its id. unit: what its epsilon protects. ledger: the identity of its ledger. public: whether everybody may see
    its data, and that of the runs before it: then nothing was spent on anybody. runs: each run that the spend covers,
    as `runs_covered` of privacy.json has it.
    """

    run: str
    epsilon: float
    delta: float
    unit: str
    ledger: str = ""
    public: bool = False
    runs: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> str:
        """As text, for a file's metadata."""
        values = {**vars(self), "epsilon": "inf" if math.isinf(self.epsilon) else self.epsilon}
        return json.dumps(values, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> WeightOrigin:
        """From the text of `to_json`; names that a later version added are left out."""
        values = json.loads(text)
        known = {field.name: values[field.name] for field in dataclasses.fields(WeightOrigin) if field.name in values}
        known |= {"epsilon": float(values["epsilon"]), "delta": float(values["delta"])}
        return WeightOrigin(**{**known, "runs": tuple(values.get("runs", ()))})


def can_be_path(text: str) -> bool:
    """Whether the operating system takes a text for a path at all: others may have written it."""
    try:
        Path(text).exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False
    return True


def read_origin(path: Path) -> WeightOrigin | None:
    """The run of ours that made a file, a folder of a run included; None where it is none of ours, as far as known."""
    try:
        file = find_weight_file(path) if path.is_dir() else path
    except ModelError:
        return None
    facts = file.parent / FACTS_FILE
    if file.name == WEIGHT_FILES[0] and (file.parent / "run.json").is_file() and facts.is_file():
        told = json.loads(facts.read_text()).get("origin")
        return None if told is None else WeightOrigin.from_json(json.dumps(told))
    if file.suffix == ".safetensors" and file.is_file():
        try:
            opened: Any = importlib.import_module("safetensors").safe_open(file, framework="pt")
            with opened as held:
                told = (held.metadata() or {}).get(ORIGIN_KEY)
            return None if told is None else WeightOrigin.from_json(told)
        except Exception as error:
            raise ModelError(f"model.init = {str(path)!r} cannot be read as {file.suffix}: {error}.") from error
    return None
