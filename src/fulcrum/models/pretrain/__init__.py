"""Initial weights: either the shipped ones, pretrained on synthetic images (`synthetic_images`, `learn`;
`fulcrum prior` recreates them), or your own file. They must be public: they must not depend on any record that a
run protects.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fulcrum.errors import ModelError
from fulcrum.models.checkpoints import READERS, can_be_path, read_checkpoint
from fulcrum.models.trained import find_head
from fulcrum.models.whitening import MEAN_SUFFIX, MIX_SUFFIX

WEIGHTS_FOLDER = Path(__file__).parent
SYNTHETIC_INIT_NAME = "synthetic"
ZERO_INIT_NAME = "zeros"


def find_shipped_weights(model: str, activation: str) -> Path:
    """The file of a built-in model's pretrained weights; it need not exist."""
    return WEIGHTS_FOLDER / f"{model}-{activation}.npz"


def load_weights(init: str, model: str, activation: str) -> dict[str, Tensor]:
    """The weights that model.init names, by parameter name; numbers as float32.

    init: "synthetic", or a path: an .npz, .safetensors or torch file, a folder of transformers, or the folder of a run.
    """
    if init == SYNTHETIC_INIT_NAME:
        file = find_shipped_weights(model, activation)
        if not file.is_file():
            known = ", ".join(sorted(path.stem for path in WEIGHTS_FOLDER.glob("*.npz")))
            raise ModelError(
                f"model.init = 'synthetic' has no weights for {model} with activation {activation}; there are {known}. "
                "Use random, or a file that `fulcrum prior` made."
            )
        return read_checkpoint(file)
    if not can_be_path(init) or (not Path(init).is_dir() and Path(init).suffix not in READERS):
        raise ModelError(
            f"model.init = {init[:80]!r} is not known; use random, zeros, synthetic, an .npz, .safetensors or torch "
            "file, or a folder with weights."
        )
    return read_checkpoint(Path(init))


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


def assign_weights(model: torch.nn.Module, weights: Mapping[str, Tensor], name: str) -> list[str]:
    """Writes weights into a model, in place. Layers without given weights keep their own. Returns notes for the user.

    A head (`find_head`) for another number of outputs is left out, which a note says. ModelError for an unknown name, a
    different shape, values that are not finite, or if nothing fits: a wrong file must not pass silently.
    """
    trained = dict(model.named_parameters(remove_duplicate=False))
    own = {**trained, **dict(model.named_buffers())}
    kept = model.state_dict()
    weights = _match_prefix(model, weights, own)
    unknown = sorted(set(weights) - set(own))
    if unknown or not weights:
        what = f"has {unknown[0]!r}, which the model has not" if unknown else "holds no weights"
        raise ModelError(f"model.init = {name!r} {what}; its parameters are {_name_some(list(trained))}.")
    left_out, notes = _find_other_head(model, weights, own), []
    if left_out:
        notes.append(
            f"model.init = {name!r}: its head has another number of outputs than this model's, which starts at random "
            f"({', '.join(sorted(left_out))})."
        )
    for key, value in weights.items():
        if key in left_out:
            continue
        if value.shape != own[key].shape:
            seen, wanted = ("x".join(map(str, shape)) for shape in (value.shape, own[key].shape))
            raise ModelError(f"model.init = {name!r}: {key} is {seen}, but the model's is {wanted}.")
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ModelError(f"model.init = {name!r}: {key} holds values that are not finite.")
    with torch.no_grad():
        for key, value in weights.items():
            if key not in left_out:
                own[key].copy_(value)
    missing = [key for key in trained if key not in weights and key in kept]
    if missing and weights.keys() & trained.keys() and len(missing) < len(trained):
        shared = {id(trained[key]) for key in weights.keys() & trained.keys()}
        new = [key for key in missing if id(trained[key]) not in shared]
        if new:
            notes.append(f"model.init = {name!r} does not hold {_name_some(new)}, which start as the model makes them.")
    return notes


def _match_prefix(
    model: torch.nn.Module, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights under the model's names, where theirs have one prefix more or less: of a wrapper, or a base model."""
    base = getattr(model, "base_model_prefix", "")
    changes = [("", ""), ("module.", ""), ("model.", ""), ("", f"{base}."), (f"{base}.", "")]
    for old, new in changes if base else changes[:3]:
        found = {new + key.removeprefix(old): value for key, value in weights.items()}
        if all(key.startswith(old) for key in weights) and set(found) <= set(own):
            return found
    return dict(weights)


def _find_other_head(
    model: torch.nn.Module, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> frozenset[str]:
    """Parameters of the head that the file has for another number of outputs."""
    head = [key for key in find_head(model) if key in weights]
    other = [key for key in head if weights[key].shape != own[key].shape]
    fits = all(weights[key].shape[1:] == own[key].shape[1:] for key in other)
    return frozenset(other) if fits and len(head) < len(weights) else frozenset()


def _name_some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f", ... ({len(names)} in all)" if len(names) > 6 else "")
