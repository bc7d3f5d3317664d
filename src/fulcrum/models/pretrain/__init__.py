"""Initial weights: either the shipped ones, pretrained on synthetic images (`synthetic_images`, `learn`;
`fulcrum prior` recreates them), or your own file. They must be public: they must not depend on any record that a
run protects.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fulcrum.errors import ModelError
from fulcrum.models.whitening import MEAN_SUFFIX, MIX_SUFFIX

WEIGHTS_FOLDER = Path(__file__).parent
SYNTHETIC_INIT_NAME = "synthetic"
ZERO_INIT_NAME = "zeros"


def find_shipped_weights(model: str, activation: str) -> Path:
    """The file of a built-in model's pretrained weights; it need not exist."""
    return WEIGHTS_FOLDER / f"{model}-{activation}.npz"


def load_weights(init: str, model: str, activation: str) -> dict[str, Tensor]:
    """The weights that model.init names, by parameter name, as float32.

    init: "synthetic", or a path to an .npz file of arrays or a .safetensors file (such as a run's model.safetensors).
    """
    file = find_shipped_weights(model, activation) if init == SYNTHETIC_INIT_NAME else Path(init)
    if init == SYNTHETIC_INIT_NAME and not file.is_file():
        known = ", ".join(sorted(path.stem for path in WEIGHTS_FOLDER.glob("*.npz")))
        raise ModelError(
            f"model.init = 'synthetic' has no weights for {model} with activation {activation}; there are {known}. "
            "Use random, or a file that `fulcrum prior` made."
        )
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if file.suffix not in readers:
        raise ModelError(
            f"model.init = {init!r} is not known; use random, zeros, painted, or an .npz or .safetensors file."
        )
    if not file.is_file():
        raise ModelError(f"model.init = {init!r}: there is no such file.")
    try:
        return readers[file.suffix](file)
    except Exception as error:
        raise ModelError(f"model.init = {init!r} cannot be read as {file.suffix}: {error}.") from error


def set_to_zero(model: nn.Module) -> None:
    """Sets all parameters of a model of one layer to 0; ModelError for a deeper one, which would not learn."""
    layers = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
    if len(layers) > 1:
        raise ModelError(
            f"model.init = 'zeros' is for models of one layer, and this one has {len(layers)} ({', '.join(layers[:3])}"
            f"{', ...' if len(layers) > 3 else ''}), which would never learn from zeros; use random."
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def _read_npz(file: Path) -> dict[str, Tensor]:
    with np.load(file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in arrays.files}


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    load = importlib.import_module("safetensors.torch").load_file  # optional dependency
    return {name: value.float() for name, value in load(file).items()}


def save_weights(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Saves weights in half precision, which is finer than any noise added to them later."""
    arrays: dict[str, Any] = {name: value.detach().cpu().half().numpy() for name, value in weights.items()}
    np.savez_compressed(file, **arrays)


def split_input_statistics(
    model: torch.nn.Module, found: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Splits a file into (weights, statistics of layer inputs): "3.mean", "3.mix" for the layer of 3.weight."""
    own = dict(model.named_parameters())
    layers = {name.removesuffix(".weight") for name in own if name.endswith(".weight")}
    facts = {layer + what for layer in layers for what in (MEAN_SUFFIX, MIX_SUFFIX)} - set(own)
    return {k: v for k, v in found.items() if k not in facts}, {k: v for k, v in found.items() if k in facts}


def assign_weights(model: torch.nn.Module, weights: Mapping[str, Tensor], name: str) -> None:
    """Writes weights into a model, in place. Layers without given weights keep their own.

    Raises ModelError for an unknown name, a different shape, or if nothing fits. A last layer for another number
    of classes must be left out of the file; it is not skipped here: a wrong file must not pass silently.
    """
    own = dict(model.named_parameters())
    unknown = sorted(set(weights) - set(own))
    if unknown or not weights:
        what = f"has {unknown[0]!r}, which the model has not" if unknown else "holds no weights"
        raise ModelError(f"model.init = {name!r} {what}; its parameters are {', '.join(own)}.")
    for key, value in weights.items():
        if value.shape != own[key].shape:
            seen, wanted = ("x".join(map(str, shape)) for shape in (value.shape, own[key].shape))
            raise ModelError(f"model.init = {name!r}: {key} is {seen}, but the model's is {wanted}.")
        if not torch.isfinite(value).all():
            raise ModelError(f"model.init = {name!r}: {key} holds values that are not finite.")
    with torch.no_grad():
        for key, value in weights.items():
            own[key].copy_(value)
