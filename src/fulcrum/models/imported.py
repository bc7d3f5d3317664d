"""Networks of other libraries by name: torchvision:NAME, timm:NAME, and folders of transformers.

    model.name = "torchvision:resnet18"       # torchvision.models.resnet18(num_classes=outputs)
    model.name = "timm:vit_tiny_patch16_224"  # timm.create_model(..., num_classes=outputs, in_chans=channels)
    model.name = "transformers:./bert-small"  # a folder with config.json; its weights where it holds any

`model.arguments` are passed on. Nothing is downloaded: weights come from `model.init`, or from the folder.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fulcrum.data.tasks import Task
from fulcrum.errors import ModelError
from fulcrum.models.builtin import InputShape
from fulcrum.models.checkpoints import WEIGHT_FILES

Arguments = Mapping[str, bool | int | float | str]
FamilyFn = Callable[[str, InputShape | Mapping[str, InputShape], int, Task | None, Arguments, list[str]], nn.Module]
"""(name within the library, shape of an example, outputs, task, arguments, notes to add to) -> network."""


def find_family(name: str) -> tuple[FamilyFn, str] | None:
    """The library of a model's name and the name within it; None where the name is of another kind."""
    family, colon, rest = name.partition(":")
    if colon and family in MODEL_FAMILIES and rest:
        return MODEL_FAMILIES[family], rest
    if colon and family.startswith("torchvision.models"):
        return build_torchvision, rest
    if not colon and (os.sep in name or name.startswith(".")) and (Path(name) / "config.json").is_file():
        return build_transformers, name
    return None


def import_library(module: str, name: str) -> Any:
    """A library that a model's name asks for; ModelError says how to install it, or why it does not load."""
    package = module.partition(".")[0]  # also the name of the extra that brings it
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise ModelError(f"model.name = {name!r}: {module} cannot be imported ({error}).") from error
        raise ModelError(f"model.name = {name!r} needs {package}: pip install 'fulcrum-fl[{package}]'.") from error
    except Exception as error:
        words = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelError(f"model.name = {name!r}: {module} cannot be imported ({words}).") from error


def build_torchvision(
    name: str,
    shape: InputShape | Mapping[str, InputShape],
    outputs: int,
    task: Task | None,
    arguments: Arguments,
    notes: list[str],
) -> nn.Module:
    """A classification network of torchvision."""
    library = import_library("torchvision.models", f"torchvision:{name}")
    if name not in library.list_models():
        raise _refuse_unknown_network("torchvision", name, library.list_models(), "torchvision.models.list_models()")
    made: nn.Module = library.get_model(name, **{"weights": None, "num_classes": outputs, **arguments})
    return made


def _refuse_unknown_network(library: str, name: str, known: Sequence[str], listing: str) -> ModelError:
    """The error for a name that a library does not have, with the nearest one."""
    from fulcrum.settings.registry import suggest_nearest_names

    near = suggest_nearest_names(name, known)
    hint = near if near.startswith("did") else f"{listing} lists them."
    return ModelError(f"model.name = '{library}:{name}' is not a network of {library}; {hint}")


def build_timm(
    name: str,
    shape: InputShape | Mapping[str, InputShape],
    outputs: int,
    task: Task | None,
    arguments: Arguments,
    notes: list[str],
) -> nn.Module:
    """A network of timm, for as many channels as the images have; img_size is given where the network has one."""
    library = import_library("timm", f"timm:{name}")
    if not library.is_model(name.partition(".")[0]):
        raise _refuse_unknown_network("timm", name, library.list_models(), "timm.list_models()")
    given: dict[str, Any] = {"pretrained": False, "num_classes": outputs}
    if isinstance(shape, tuple) and len(shape) == 3:
        given["in_chans"] = shape[0]
        try:
            made: nn.Module = library.create_model(name, **{**given, "img_size": tuple(shape[1:]), **arguments})
            return made
        except TypeError:  # most convolutional networks take images of any size
            pass
    made = library.create_model(name, **{**given, **arguments})
    return made


def build_transformers(
    name: str,
    shape: InputShape | Mapping[str, InputShape],
    outputs: int,
    task: Task | None,
    arguments: Arguments,
    notes: list[str],
) -> nn.Module:
    """The network of a local folder, with a head for the task: its config.json, and its weights where it holds any.

    Attention is the plain one ("eager"): the fused one chooses by looking at all masks of a batch.
    """
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.name = {name!r}: there is no {folder / 'config.json'}; give the folder of a saved model "
            "(model.save_pretrained(FOLDER))."
        )
    library = import_library("transformers", f"transformers:{name}")
    config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
    for key, value in arguments.items():
        setattr(config, key, value)
    kind = choose_head(config, shape, task)
    if kind != "AutoModelForCausalLM":
        config.num_labels = outputs
    auto = getattr(library, kind)
    has_weights = any((folder / file).is_file() for file in WEIGHT_FILES)
    try:
        if has_weights:
            made: nn.Module
            given = {"config": config, "local_files_only": True, "ignore_mismatched_sizes": True}
            with quiet_library(library):
                made, told = auto.from_pretrained(
                    folder, attn_implementation="eager", output_loading_info=True, **given
                )
            new = sorted({*told["missing_keys"], *(each[0] for each in told["mismatched_keys"])})
            if new:
                notes.append(
                    f"model.name = {name!r}: {', '.join(new[:6])} are not in the folder, or for another number "
                    "of outputs, and start at random."
                )
        else:
            made = auto.from_config(config, attn_implementation="eager")
    except ValueError as error:
        words = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelError(f"model.name = {name!r}: transformers has no {kind} for it ({words}).") from error
    return made.float().train()


@contextlib.contextmanager
def quiet_library(library: Any) -> Iterator[None]:
    """Without the library's progress bar and load report; a note says what matters of it."""
    level = library.logging.get_verbosity()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    try:
        yield
    finally:
        library.logging.set_verbosity(level)
        library.logging.enable_progress_bar()


def choose_head(config: Any, shape: InputShape | Mapping[str, InputShape], task: Task | None) -> str:
    """The class of transformers that has a head for the task."""
    images = isinstance(shape, tuple) and len(shape) == 3
    images = images or (isinstance(shape, Mapping) and "pixel_values" in shape)
    if task is not None and task.sequence:
        return "AutoModelForCausalLM" if task.name == "next-token" else "AutoModelForTokenClassification"
    return "AutoModelForImageClassification" if images else "AutoModelForSequenceClassification"


MODEL_FAMILIES: dict[str, FamilyFn] = {
    "torchvision": build_torchvision,
    "timm": build_timm,
    "transformers": build_transformers,
}
"""Libraries whose networks a model's name can name, before a colon."""
