"""Networks that people import, from disk to private training to other software.

    pip install torchvision timm transformers onnx onnxscript onnxruntime
    python examples/imported_models.py              # all three, every export
    python examples/imported_models.py bert --out /tmp/bert

A torchvision ResNet-18, a timm ViT and a transformers BERT, all small and with random weights that are saved to disk
and taken for pre-trained. Each is converted, partly frozen, trained over three parties on made-up data, exported, and
read back in a process that has no Fulcrum. The table has the largest difference of outputs there.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fulcrum
from fulcrum.data import from_arrays
from fulcrum.runs import load_trained
from fulcrum.runs.export import export_model

RECORDS, CLASSES = 90, 4
DEFINE_MISSING_OPERATORS = """
import torch
_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""A build of torchvision for another PyTorch lacks two operators of detection, which no classifier here uses."""


@functools.cache
def import_vision() -> str:
    """Import torchvision; returns the lines that another process needs before it imports torchvision, mostly none."""
    try:
        importlib.import_module("torchvision")
        return ""
    except ModuleNotFoundError:  # transformers does without; the others say what is missing
        return ""
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        exec(DEFINE_MISSING_OPERATORS, globals())
        importlib.import_module("torchvision")
        return DEFINE_MISSING_OPERATORS


@dataclass(frozen=True)
class Network:
    """A network to import. make: saves it below a folder and returns its [model] settings. data: its records."""

    make: Callable[[Path], dict[str, Any]]
    data: Callable[[], fulcrum.Dataset]
    forms: tuple[str, ...]


def save_resnet(folder: Path) -> dict[str, Any]:
    """A ResNet-18 as a torch file; BatchNorm becomes GroupNorm, and the last block and the head train."""
    import_vision()
    models = importlib.import_module("torchvision.models")
    torch.save(models.resnet18(num_classes=1000).state_dict(), folder / "resnet18.pt")
    chosen = {"name": "torchvision:resnet18", "init": str(folder / "resnet18.pt"), "norm": "group"}
    return {**chosen, "train": "layer4.1.*, head"}


def save_vit(folder: Path) -> dict[str, Any]:
    """A small ViT with dropout and stochastic depth as a safetensors file; its last block and head train."""
    import_vision()
    shape = {"patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 2, "drop_path_rate": 0.1, "proj_drop_rate": 0.1}
    timm, save = importlib.import_module("timm"), importlib.import_module("safetensors.torch").save_file
    made = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=CLASSES, **shape)
    save(made.state_dict(), folder / "vit.safetensors")
    chosen = {"name": "timm:vit_tiny_patch16_224", "init": str(folder / "vit.safetensors"), "arguments": shape}
    return {**chosen, "train": "blocks.1, norm, head"}


def save_bert(folder: Path) -> dict[str, Any]:
    """A small BERT as a folder of transformers; adapters of rank 4 and the head train."""
    import_vision()  # which transformers imports too
    library = importlib.import_module("transformers")
    library.logging.disable_progress_bar()
    config = library.BertConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96, vocab_size=200,
        max_position_embeddings=32, num_labels=CLASSES,
    )  # fmt: skip
    library.BertForSequenceClassification(config).save_pretrained(folder / "bert")
    (folder / "bert" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", *(f"word{k}" for k in range(198))]))
    return {"name": f"transformers:{folder / 'bert'}", "lora": 4}


def make_images() -> fulcrum.Dataset:
    """Coloured noise whose brightest corner is the class."""
    torch.manual_seed(0)
    x, y = torch.rand(RECORDS, 3, 32, 32), torch.arange(RECORDS) % CLASSES
    for k in range(CLASSES):
        x[y == k, :, 16 * (k // 2) : 16 * (k // 2) + 16, 16 * (k % 2) : 16 * (k % 2) + 16] += 1.0
    return from_arrays(x, y, x[:20], y[:20], classes=CLASSES, public=True, name="corners")


def make_texts() -> fulcrum.Dataset:
    """Token ids with a mask; one word tells the class."""
    torch.manual_seed(0)
    ids, y = torch.randint(10, 200, (RECORDS, 12)), torch.arange(RECORDS) % CLASSES
    ids[:, 2] = 2 + y
    mask = (torch.arange(12) < torch.randint(6, 13, (RECORDS, 1))).long()
    x = {"input_ids": ids * mask, "attention_mask": mask}
    return from_arrays(
        x, y, {name: value[:20] for name, value in x.items()}, y[:20], classes=CLASSES, public=True, name="words"
    )


EVERYWHERE = ("torch", "safetensors", "torchscript", "program", "onnx")
NETWORKS = {
    "resnet": Network(save_resnet, make_images, EVERYWHERE),
    "vit": Network(save_vit, make_images, EVERYWHERE),
    "bert": Network(save_bert, make_texts, (*EVERYWHERE, "transformers")),
}
SUFFIXES = {"torch": ".pt", "safetensors": ".safetensors", "torchscript": ".ts", "program": ".pt2", "onnx": ".onnx"}


def show(name: str, folder: Path, forms: Sequence[str] = (), rounds: int = 3) -> list[tuple[str, ...]]:
    """Train one network and export it; a row for each format. Raises where an output differs."""
    network = NETWORKS[name]
    torch.manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    model, data = network.make(folder), network.data()
    done = fulcrum.train(
        data, model=model, parties=3, partition="iid", epsilon=8.0, rounds=rounds, rate=0.2, out=folder / "run"
    )
    trained = load_trained(folder / "run")
    x = data.x_test if isinstance(data.x_test, Tensor) else dict(data.x_test)
    wanted = trained.outputs(x)
    direct = done.model(x) if isinstance(x, Tensor) else done.model(**x).logits
    if not torch.equal(wanted, direct.detach()):
        raise SystemExit(f"{name}: fulcrum.load and result.model differ")
    given = {"x": x} if isinstance(x, Tensor) else x
    np.savez(folder / "inputs.npz", **{key: value.numpy() for key, value in given.items()})  # type: ignore[arg-type]
    rows: list[tuple[str, ...]] = []
    for form in forms or network.forms:
        file = folder / f"exported{SUFFIXES.get(form, '')}"
        code = "\n".join(export_model(trained, form, file).usage[1])
        found = run_elsewhere(code, form, folder)
        difference = float((found - wanted).abs().max() / wanted.abs().max())
        if not difference < 1e-4:
            raise SystemExit(f"{name} as {form}: outputs differ by {difference:.2g} where there is no Fulcrum")
        counts = trained.facts["parameters"]
        rows.append((name, f"{counts['all']:,}", f"{counts['trained']:,}", form, f"{difference:.1e}"))
    return rows


def run_elsewhere(code: str, form: str, folder: Path) -> Tensor:
    """Run an export's own loading code in a process without Fulcrum, on inputs.npz; returns the outputs."""
    shim = import_vision() if any(word in code for word in ("torchvision", "timm", "transformers")) else ""
    feed = "globals().update({k: torch.from_numpy(v) for k, v in numpy.load('inputs.npz').items()})"
    if form == "onnx":
        feed = "inputs = dict(numpy.load('inputs.npz'))"
    code = code.replace("AutoModel.", "AutoModelForSequenceClassification.")
    lines = ["import sys", "sys.modules['fulcrum'] = None", "import numpy", "import torch", shim, feed, code]
    lines += [
        "outputs = getattr(outputs, 'logits', outputs)",
        "numpy.save('outputs.npy', numpy.asarray(outputs.detach() if hasattr(outputs, 'detach') else outputs))",
    ]
    elsewhere = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines)],
        cwd=folder,
        env=elsewhere,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"reading {form} without Fulcrum failed:\n{done.stderr[-2000:]}")
    return torch.from_numpy(np.load(folder / "outputs.npy"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Import, convert, train privately, export, read back elsewhere.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NETWORKS)}; default: all")
    parser.add_argument("--out", type=Path, help="a folder to keep; default: a temporary one")
    parser.add_argument("--forms", default="", help="formats, separated by commas; default: all")
    words = parser.parse_args()
    warnings.simplefilter("ignore")
    forms = [form for form in words.forms.split(",") if form]
    with tempfile.TemporaryDirectory() as temporary:
        print(f"{'network':10} {'parameters':>12} {'trained':>12}  {'export':12} largest difference elsewhere")
        for name in words.names or list(NETWORKS):
            for row in show(name, (words.out or Path(temporary)) / name, forms):
                print(f"{row[0]:10} {row[1]:>12} {row[2]:>12}  {row[3]:12} {row[4]}")


if __name__ == "__main__":
    main()
