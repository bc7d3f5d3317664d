"""A run's model for other software: its weights (torch, safetensors), or the network (torchscript, program, onnx).

    export_model(load_trained("runs/first"), "torchscript", Path("model.ts"))

Every export is read back and compared with the network on made-up examples, in batches of two sizes. A file that does
not give the same outputs is removed, and the export refused.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import keyword
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.data.records import ModelInputs
from fulcrum.errors import ConfigError, RunError
from fulcrum.models.checkpoints import read_origin
from fulcrum.models.imported import quiet_library
from fulcrum.models.plain import list_complete_weights
from fulcrum.models.prepared import take_outputs
from fulcrum.runs import folder as record
from fulcrum.runs.model_card import describe_usage, make_model_card
from fulcrum.runs.stored_model import TOKENIZER_FILES, TRANSFORMERS_FOLDER, TrainedModel, serialise_weights

TOLERANCE = 1e-4
"""An export's outputs may differ by this fraction of the largest output."""
CHECKED_BATCHES = (3, 1)
"""Numbers of made-up examples on which an export is compared with the network; traced with another number."""
TRACED_BATCH = 2

SCHEMA_FILES = ("schema.toml",)
"""Files of a run's folder that an export takes along."""

Runner = Callable[[ModelInputs], Tensor]
Writer = Callable[[TrainedModel, nn.Module, Path], Runner]
"""(model, its network with one tensor as output, file) -> what runs the written file."""


class OneOutput(nn.Module):
    """A network whose result is one tensor: those of transformers return an object."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def run(self, *args: Tensor, **named: Tensor) -> Any:
        """The network's predictions."""
        return take_outputs(self.network(*args, **named))


def make_one_output(network: nn.Module, names: Sequence[str]) -> nn.Module:
    """The network with one tensor as its result, and a forward with the inputs' names: exporters read its signature."""
    odd = [name for name in names if not name.isidentifier() or keyword.iskeyword(name)]
    if odd:
        raise RunError(f"the input {odd[0]!r} cannot be an argument's name; use --to torch or safetensors.")
    given = ", ".join(f"{name}={name}" for name in names) or "x"
    made: dict[str, Any] = {}
    exec(f"def forward(self, {', '.join(names) or 'x'}):\n    return self.run({given})", made)
    return type("Network", (OneOutput,), {"forward": made["forward"]})(network).eval()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Exported:
    """A written export. file: the model; card: its model card; usage: a sentence and the code that loads it.

    beside: what belongs to it: a table's schema, a tokenizer.
    """

    file: Path
    card: Path
    usage: tuple[str, list[str]]
    beside: tuple[Path, ...] = ()


def export_model(trained: TrainedModel, form: str, out: Path) -> Exported:
    """Write the model in a format of `EXPORTERS`, checked, with a card beside it; refuses a file that exists."""
    if form not in EXPORTERS:
        raise ConfigError(f"--to {form} is not known; choose one of {', '.join(EXPORTERS)}.")
    card = out.with_name(f"{out.name}.card.md")
    for path in (out, card):
        if path.exists():
            raise RunError(f"{path} exists; choose another --out, or remove it.")
    out.parent.mkdir(parents=True, exist_ok=True)
    network = make_one_output(trained.model, trained.list_inputs())
    try:
        with _without_warnings(trained.model), torch.no_grad():
            run = EXPORTERS[form](trained, network, out)
            _compare(trained, form, run)
    except BaseException:
        _remove(out)
        raise
    beside = _copy_beside(trained, form, out)
    privacy, summary = (record.load_run_json(trained.folder, name) for name in ("privacy.json", "summary.json"))
    told = (out.name, form, f"{out.name}.{TRANSFORMERS_FOLDER}")
    record.write_file_atomically(card, make_model_card(trained.model, trained.facts, privacy, summary, *told).encode())
    return Exported(out, card, describe_usage(trained.model, trained.facts, *told), beside)


def _copy_beside(trained: TrainedModel, form: str, out: Path) -> tuple[Path, ...]:
    """What belongs to the model: the table's schema; the config and tokenizer of a transformers network."""
    found: list[Path] = []
    for name in SCHEMA_FILES:
        if (trained.folder / name).is_file():
            found.append(out.with_name(f"{out.name}.{name}"))
            shutil.copyfile(trained.folder / name, found[-1])
    source = trained.folder / TRANSFORMERS_FOLDER
    if source.is_dir() and form != "transformers":
        found.append(out.with_name(f"{out.name}.{TRANSFORMERS_FOLDER}"))
        shutil.copytree(source, found[-1], dirs_exist_ok=True)
    return tuple(found)


def _compare(trained: TrainedModel, form: str, run: Runner) -> None:
    for count in CHECKED_BATCHES:
        x = trained.make_example(count, seed=count)
        wanted, found = trained.outputs(x), run(x)
        room = TOLERANCE * float(wanted.abs().max().clamp_min(1e-3))
        if found.shape != wanted.shape or not float((found - wanted).abs().max()) <= room:
            raise RunError(
                f"--to {form}: the written network gives other outputs than this one for {count} examples, since its "
                "forward depends on the values or the number of its examples; use torch or safetensors."
            )


@contextlib.contextmanager
def _without_warnings(model: nn.Module) -> Iterator[None]:
    """Exporters of PyTorch warn of their own future; what matters is compared afterwards."""
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        if hasattr(model, "save_pretrained"):
            stack.enter_context(quiet_library(importlib.import_module("transformers")))
        yield


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)


def _explain(form: str, error: Exception) -> RunError:
    words = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return RunError(f"--to {form} cannot follow this network ({words}); use torch or safetensors.")


def _list_tensors(x: ModelInputs) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x.values())


# --- formats ------------------------------------------------------------------------------------------


def _reload_weights(trained: TrainedModel, weights: Mapping[str, Tensor]) -> Runner:
    """Runs the network with weights that were read back."""
    network = copy.deepcopy(trained.model)
    network.load_state_dict(dict(weights))
    again = TrainedModel(trained.folder, network, trained.facts, trained.settings, trained.task)
    return again.outputs


def write_torch(trained: TrainedModel, network: nn.Module, out: Path) -> Runner:
    """A state_dict that torch.load(FILE, weights_only=True) reads."""
    torch.save(list_complete_weights(trained.model), out)
    return _reload_weights(trained, torch.load(out, weights_only=True))


def write_safetensors(trained: TrainedModel, network: nn.Module, out: Path) -> Runner:
    """All weights and buffers by name, with the run that made them in the metadata."""
    from safetensors.torch import load_file

    origin = read_origin(trained.folder)
    record.write_file_atomically(out, serialise_weights(list_complete_weights(trained.model), origin))
    return _reload_weights(trained, load_file(out))


def write_torchscript(trained: TrainedModel, network: nn.Module, out: Path) -> Runner:
    """The whole network as TorchScript, by its code where that can be compiled, else by tracing it."""
    names, inputs = trained.list_inputs(), trained.make_example(TRACED_BATCH)
    made: Any
    try:
        if names:
            raise NotImplementedError  # the networks of transformers return objects, which TorchScript does not know
        made = torch.jit.script(trained.model)
    except Exception:
        try:
            made = torch.jit.trace(network, _list_tensors(inputs), check_trace=False)
        except Exception as error:
            raise _explain("torchscript", error) from error
    made.save(str(out))
    again = torch.jit.load(str(out))
    return lambda x: take_outputs(again(x) if isinstance(x, Tensor) else again(**x))


def write_program(trained: TrainedModel, network: nn.Module, out: Path) -> Runner:
    """The whole network as a program of torch.export, for any number of examples."""
    if out.suffix != ".pt2":
        raise ConfigError(f"--out {out}: the file of a program must end in .pt2, or PyTorch does not read it.")
    inputs = trained.make_example(TRACED_BATCH)
    examples = torch.export.Dim("examples", min=1, max=2**16)
    try:
        if isinstance(inputs, Tensor):
            made = torch.export.export(network, (inputs,), dynamic_shapes=({0: examples},))
        else:
            shapes = {name: {0: examples} for name in inputs}
            made = torch.export.export(network, (), kwargs=dict(inputs), dynamic_shapes=shapes)
        torch.export.save(made, str(out))
    except Exception as error:
        raise _explain("program", error) from error
    again: Any = torch.export.load(str(out)).module()
    return lambda x: take_outputs(again(x) if isinstance(x, Tensor) else again(**x))


def write_onnx(trained: TrainedModel, network: nn.Module, out: Path) -> Runner:
    """The whole network as ONNX, for any number of examples; compared where onnxruntime is installed."""
    try:
        importlib.import_module("onnx")
        importlib.import_module("onnxscript")
    except ImportError as error:
        raise RunError("--to onnx needs onnx and onnxscript: pip install 'fulcrum-fl[onnx]'.") from error
    names = trained.list_inputs() or ["x"]
    inputs = trained.make_example(TRACED_BATCH)
    examples = torch.export.Dim("examples", min=1, max=2**16)
    try:
        torch.onnx.export(
            network,
            _list_tensors(inputs),
            str(out),
            input_names=names,
            output_names=["outputs"],
            dynamic_shapes=tuple({0: examples} for _ in names),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    except Exception as error:
        raise _explain("onnx", error) from error
    try:
        session: Any = importlib.import_module("onnxruntime").InferenceSession(str(out))
    except ImportError:
        importlib.import_module("onnx").checker.check_model(str(out))
        return trained.outputs

    def run(x: ModelInputs) -> Tensor:
        given = dict(zip(names, (value.numpy() for value in _list_tensors(x)), strict=True))
        return torch.from_numpy(session.run(None, given)[0])

    return run


def write_transformers(trained: TrainedModel, network: nn.Module, out: Path) -> Runner:
    """A folder that transformers reads: config, weights and the tokenizer of the folder that training began with."""
    model: Any = trained.model
    if not callable(getattr(model, "save_pretrained", None)):
        raise RunError("--to transformers is for networks of transformers; use torch, safetensors or torchscript.")
    library = importlib.import_module("transformers")
    with quiet_library(library):
        model.save_pretrained(str(out))
    for name in TOKENIZER_FILES:
        if (trained.folder / TRANSFORMERS_FOLDER / name).is_file():
            shutil.copyfile(trained.folder / TRANSFORMERS_FOLDER / name, out / name)
    (out / "fulcrum.json").write_text(json.dumps({"sha256": trained.sha256}))
    with quiet_library(library):
        again = type(model).from_pretrained(out, local_files_only=True, attn_implementation="eager").eval()
    return TrainedModel(trained.folder, again, trained.facts, trained.settings, trained.task).outputs


EXPORTERS: dict[str, Writer] = {
    "torch": write_torch,
    "safetensors": write_safetensors,
    "torchscript": write_torchscript,
    "program": write_program,
    "onnx": write_onnx,
    "transformers": write_transformers,
}
"""Formats of `fulcrum export --to`."""
