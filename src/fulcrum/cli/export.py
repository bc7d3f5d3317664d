"""`fulcrum export`: a run's model for other software."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption

if TYPE_CHECKING:
    from fulcrum.runs.stored_model import TrainedModel

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model", metavar="MODULE:FACTORY", help="Makes the network, where the run was given an object in Python."
    ),
]


def export(
    folder: RunArgument,
    to: Annotated[
        str, typer.Option("--to", help="torch, safetensors, torchscript, program (torch.export), onnx or transformers.")
    ] = "torchscript",
    out: Annotated[Path | None, typer.Option("--out", help="File to write; a folder for transformers.")] = None,
    model: ModelOption = "",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a run's model for other software, with a model card; what was written is read back and compared."""
    from fulcrum.errors import ConfigError
    from fulcrum.runs.export import EXPORTERS, export_model

    if to not in EXPORTERS:
        raise ConfigError(f"--to {to} is not known; choose one of {', '.join(EXPORTERS)}.")
    if out is None:
        raise ConfigError("--out is missing; name the file to write, such as --out model.ts.")
    trained = load_run(folder, model)
    done = export_model(trained, to, out)
    if as_json:
        view.print_json(
            {
                "file": str(done.file),
                "card": str(done.card),
                "beside": [str(path) for path in done.beside],
                "sha256": trained.sha256,
                "code": "\n".join(done.usage[1]),
            }
        )
        return
    beside = "".join(f", {path}" for path in done.beside)
    typer.echo(f"wrote {done.file}{beside} and {done.card}; sha256 of the weights {trained.sha256}")
    view.print_message("\n".join(["", done.usage[0], "", *(f"    {line}" for line in done.usage[1])]), quiet)


def load_run(folder: Path, factory: str = "") -> TrainedModel:
    """The trained model of a run; factory: package.module:name that makes its network."""
    from fulcrum.models.build import find_factory
    from fulcrum.models.own import build_own_model
    from fulcrum.runs.stored_model import load_trained, read_facts_file

    if not factory:
        return load_trained(folder)
    facts = read_facts_file(folder)
    shape = facts.get("inputs", {}).get("shape")
    outputs = facts.get("task", {}).get("outputs")
    offers = {"input_shape": None if shape is None else tuple(shape), "outputs": outputs, "classes": outputs}
    return load_trained(folder, build_own_model(find_factory(factory), factory, offers, {}, 0))
