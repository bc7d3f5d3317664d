"""The model card: what a trained network is, how to use it without Fulcrum, what it scored and what it cost."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from fulcrum.models.builtin import TemperedSigmoid
from fulcrum.privacy.statement.page import (
    escape_table_cell,
    format_epsilon_value,
    make_bullet_list,
    make_page_table,
    make_paragraph,
    make_section,
)

MAX_LAYERS_SHOWN = 60
"""A network of more lines than this is cut in the card."""


def make_model_card(
    model: nn.Module,
    facts: Mapping[str, Any],
    privacy: Mapping[str, Any],
    summary: Mapping[str, Any],
    file: str = "model.safetensors",
    form: str = "safetensors",
    config_folder: str = "transformers",
) -> str:
    """The card of a model as Markdown. facts: model.json; privacy: privacy.json; file, form: what it describes.

    config_folder: beside the file, where the network is one of transformers.
    """
    run, scores = privacy["run"], summary["metrics"]
    own = summary.get("epsilon")
    rows = [
        ("model", f"`{facts['class']}`"),
        ("SHA-256 of its weights", f"`{facts['sha256']}`"),
        ("parameters", f"{facts['parameters']['all']:,}, of which {facts['parameters']['trained']:,} were trained"),
        ("input", describe_input(facts["inputs"])),
        ("output", describe_output(facts["task"])),
        ("data", escape_table_cell(str(facts["data"]))),
        ("run", f"`{run['id']}`, {run['date']}, Fulcrum {run['version']}, method {run['method']}"),
    ]
    lines = [
        *make_paragraph("# Model card"),
        *make_page_table(("", ""), rows),
        *make_section("Privacy", [*make_paragraph(f"**{privacy['guarantee_text']}**")]),
        *make_page_table(
            ("", ""),
            [
                ("epsilon", format_epsilon_value(privacy["epsilon"])),
                *(
                    (("epsilon of this run alone", format_epsilon_value(own)),)
                    if own not in (None, privacy["epsilon"])
                    else ()
                ),
                ("delta", f"{privacy['delta']:g}"),
                ("protects one", str(privacy["unit"])),
                ("against", escape_table_cell(str(privacy["adversary"]))),
            ],
        ),
        *(make_paragraph(privacy["start"]["text"]) if "start" in privacy else ()),
        *make_paragraph("The whole statement is PRIVACY.md of the run. It holds for whatever is done with the model."),
        *make_section("Scores", _write_scores(scores, summary)),
        *make_section("How to use it", write_usage(model, facts, file, form, config_folder)),
        *make_section("The network", make_code(str(model).splitlines(), "")),
        *make_section("Limits", make_bullet_list([*privacy["not_covered"], *summary.get("warnings", ())])),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _write_scores(scores: Mapping[str, float], summary: Mapping[str, Any]) -> list[str]:
    if not scores:
        return make_paragraph("None: there were no test records.")
    table = make_page_table(("metric", "value"), [(name, f"{value:.5g}") for name, value in scores.items()])
    return [*make_paragraph(f"On {summary['evaluated_on']}:"), *table]


def describe_input(told: Mapping[str, Any]) -> str:
    """The shape and type of a model's inputs in words."""
    if "named" in told:
        return "; ".join(f"`{name}` {describe_input(each)}" for name, each in told["named"].items())
    return f"[examples, {', '.join(map(str, told['shape']))}] of {told['type']}".replace(", ]", "]")


def describe_output(task: Mapping[str, Any]) -> str:
    """What a model's outputs are, in words."""
    length = "length, " if task["sequence"] else ""
    return f"[examples, {length}{task['outputs']}], for the task {task['name']}"


def make_code(lines: list[str], language: str = "python") -> list[str]:
    """A block of code as lines of Markdown, cut where it is long."""
    shown = lines[:MAX_LAYERS_SHOWN]
    more = [f"... {len(lines) - len(shown)} more lines"] if len(lines) > len(shown) else []
    return [f"```{language}", *shown, *more, "```", ""]


# --- code at the other end ----------------------------------------------------------------------------


def write_usage(model: nn.Module, facts: Mapping[str, Any], file: str, form: str, config_folder: str) -> list[str]:
    """How to load an export where there is no Fulcrum, as lines of Markdown."""
    said, code = describe_usage(model, facts, file, form, config_folder)
    return [*make_paragraph(said), "```python", *code, "```", ""]


def describe_usage(
    model: nn.Module, facts: Mapping[str, Any], file: str, form: str, config_folder: str = "transformers"
) -> tuple[str, list[str]]:
    """A sentence on what is needed to load an export, and the code that does it."""
    named = facts["inputs"].get("named")
    call = f"net({', '.join(f'{name}={name}' for name in named)})" if named else "net(x)"
    whole = WHOLE_FORMATS.get(form)
    if whole is not None:
        said, code = whole
        return said, [line.format(file=file, call=call) for line in code]
    needed, code = write_network_code(model, facts, config_folder)
    loading = {
        "torch": f"net.load_state_dict(torch.load({file!r}, weights_only=True))",
        "safetensors": f"net.load_state_dict(load_file({file!r}))",
    }[form]
    reader = ["from safetensors.torch import load_file"] if form == "safetensors" else []
    return needed, [*reader, *code, loading, "net.eval()", f"outputs = {call}"]


WHOLE_FORMATS: dict[str, tuple[str, list[str]]] = {
    "torchscript": (
        "The file holds the network and its weights; PyTorch alone reads it, also from C++.",
        ["import torch", "", "net = torch.jit.load({file!r})", "outputs = {call}"],
    ),
    "program": (
        "The file holds the network and its weights; PyTorch alone reads it.",
        ["import torch", "", "net = torch.export.load({file!r}).module()", "outputs = {call}"],
    ),
    "onnx": (
        "The file holds the network and its weights; any ONNX runtime reads it.",
        [
            "import onnxruntime",
            "",
            "net = onnxruntime.InferenceSession({file!r})",
            "outputs = net.run(None, inputs)[0]  # inputs: NumPy arrays by name",
        ],
    ),
    "transformers": (
        "The folder holds the network with its config and, where there was one, its tokenizer.",
        [
            "import transformers",
            "",
            "net = transformers.AutoModel.from_pretrained({file!r})  # or the class of its task's head",
            "outputs = {call}",
        ],
    ),
}
"""Exports that hold the whole network: a sentence, and the code that loads them."""


def write_network_code(model: nn.Module, facts: Mapping[str, Any], config_folder: str) -> tuple[str, list[str]]:
    """A sentence on the code that a file of weights needs, and the lines that make the network `net`."""
    settings = facts["settings"]
    name, outputs = str(settings["name"]), facts["task"]["outputs"]
    if type(model) is nn.Sequential and all(_is_plain_layer(layer) for layer in model):
        tempered = any(isinstance(layer, TemperedSigmoid) for layer in model)
        own = ["", *write_tempered_sigmoid()] if tempered else []
        layers = [f"    {_write_layer(layer)}," for layer in model]
        return "The file holds the weights; PyTorch alone makes the network:", [
            *("import torch", "from torch import nn", *own, "", "net = nn.Sequential(", *layers, ")"),
        ]
    converted = write_norm_code(model, str(settings["norm"]))
    arguments = "".join(f", {key}={value!r}" for key, value in settings["arguments"].items())
    family, _, rest = name.partition(":")
    makers = {
        "torchvision": [
            f"net = torchvision.models.get_model({rest!r}, weights=None, num_classes={outputs}{arguments})"
        ],
        "timm": [f"net = timm.create_model({rest!r}, {_write_timm_arguments(facts, model)}{arguments})"],
    }
    if family in makers and not facts["given_as_object"]:
        return f"The file holds the weights; {family} makes the network:", [
            *("import torch", f"import {family}", "from torch import nn", "", *makers[family], *converted),
        ]
    if hasattr(model, "config"):
        kind = type(model).__name__
        return "The file holds the weights; transformers makes the network from config.json:", [
            *("import torch", "import transformers", ""),
            f"config = transformers.AutoConfig.from_pretrained({config_folder!r})  # the folder beside it",
            f"net = transformers.{kind}(config)",
            *converted,
        ]
    said = f"The file holds the weights; the network is made by its own code, {facts['class']}"
    said += "" if facts["given_as_object"] else f" ({name})"
    return f"{said}. An export as torchscript, program or onnx needs no code.", [
        *("import torch", "from torch import nn", "", "net = ...  # the network, with any weights", *converted),
    ]


def _is_plain_layer(layer: nn.Module) -> bool:
    known = type(layer).__module__.startswith("torch.nn.modules") and not list(layer.children())
    return known or isinstance(layer, TemperedSigmoid)


def _write_layer(layer: nn.Module) -> str:
    return repr(layer) if isinstance(layer, TemperedSigmoid) else f"nn.{layer!r}"


def write_tempered_sigmoid() -> list[str]:
    """The one layer of our built-in networks that PyTorch does not have, as code that stands alone."""
    source = inspect.getsource(TemperedSigmoid.__init__), inspect.getsource(TemperedSigmoid.forward)
    first, then = (part.replace("Tensor", "torch.Tensor").splitlines() for part in source)
    return ["", "class TemperedSigmoid(nn.Module):", *first, "", *then, ""]


def _write_timm_arguments(facts: Mapping[str, Any], model: Any) -> str:
    shape = facts["inputs"].get("shape", [])
    given = [f"num_classes={facts['task']['outputs']}"]
    if len(shape) == 3:
        given.append(f"in_chans={shape[0]}")
        if hasattr(getattr(model, "patch_embed", None), "img_size"):
            given.append(f"img_size=({shape[1]}, {shape[2]})")
    return ", ".join(given)


def write_norm_code(model: nn.Module, norm: str) -> list[str]:
    """Lines that put the group norms of a converted network into one with BatchNorm."""
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.GroupNorm)}
    if norm in ("keep", "frozen") or not found:
        return []
    return [
        "for name, groups, channels, eps in [",
        *(f"    ({name!r}, {layer.num_groups}, {layer.num_channels}, {layer.eps!r})," for name, layer in found.items()),
        "]:",
        '    parent, _, last = name.rpartition(".")',
        "    setattr(net.get_submodule(parent), last, nn.GroupNorm(groups, channels, eps))",
    ]
