"""Networks of torchvision, timm and transformers: from disk to private training to a process without Fulcrum."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fulcrum.errors import ModelError
from fulcrum.models.build import build_model
from fulcrum.models.norms import convert_norms
from fulcrum.settings import schema as config

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"resnet": "torchvision", "vit": "timm", "bert": "transformers"}


def load_example() -> object:
    spec = importlib.util.spec_from_file_location("imported_models", EXAMPLES / "imported_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["imported_models"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NEEDS)
def test_an_imported_network_gives_the_same_outputs_elsewhere(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    forms = ["torch", "safetensors", "torchscript"]
    rows = load_example().show(name, tmp_path, forms, rounds=1)  # type: ignore[attr-defined]
    assert [row[3] for row in rows] == forms
    whole, trained = (int(text.replace(",", "")) for text in rows[0][1:3])
    assert 0 < trained < whole


@pytest.mark.parametrize("library", ["torchvision", "timm", "transformers"])
def test_a_library_that_is_missing_is_named(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.models", None)
    (tmp_path / "config.json").write_text("{}")
    name = {"transformers": str(tmp_path)}.get(library, "resnet18")
    with pytest.raises(ModelError, match=rf"{library}.*(needs|cannot be imported)"):
        build_model(config.Model(name=f"{library}:{name}"), (3, 32, 32), 4, 0)


class Block(nn.Module):
    """A residual block as torchvision writes it, activations in place."""

    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, wider, 3, 2, 1, bias=False), nn.BatchNorm2d(wider)
        self.conv2, self.bn2 = nn.Conv2d(wider, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(width, wider, 1, 2, bias=False), nn.BatchNorm2d(wider))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        return self.relu(out)  # type: ignore[no-any-return]


def make_residual(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A network of the structure of a ResNet, for machines without torchvision."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        Block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes),
    )  # fmt: skip


@pytest.mark.parametrize("norm", ["group", "frozen"])
def test_a_residual_network_trains_and_is_complete_afterwards(norm: str, tmp_path: Path) -> None:
    import fulcrum
    from fulcrum.data import from_arrays

    torch.manual_seed(0)
    start = make_residual((3, 16, 16), 3)
    start(torch.rand(8, 3, 16, 16))  # its running statistics move
    torch.save(start.state_dict(), tmp_path / "start.pt")
    x, y = torch.rand(40, 3, 16, 16), torch.arange(40) % 3
    data = from_arrays(x, y, x[:6], y[:6], classes=3, public=True)
    model = {
        "name": f"{__name__}:make_residual",
        "init": str(tmp_path / "start.pt"),
        "norm": norm,
        "train": "3.conv2, head",
    }
    words = {"parties": 2, "epsilon": 8.0, "rounds": 1, "rate": 0.3, "partition": "iid"}
    done = fulcrum.train(data, model=model, out=tmp_path / "run", **words)  # type: ignore[arg-type]
    assert done.summary["parameters"] == 16 * 16 * 9 + 16 * 3 + 3
    again = fulcrum.load(tmp_path / "run")
    assert torch.equal(again(x[:6]), done.model(x[:6]))
    wanted = convert_norms(start, norm).state_dict()
    changed = {name for name, value in again.state_dict().items() if not torch.equal(value, wanted[name])}
    assert changed == {"3.conv2.weight", "6.weight", "6.bias"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_peft_train_and_are_merged(tmp_path: Path) -> None:
    for library in ("transformers", "peft"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    example = load_example()
    example.import_vision()  # type: ignore[attr-defined]
    import peft  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    import fulcrum

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(**sizes, vocab_size=200, max_position_embeddings=16, num_labels=4)
    chosen = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"], lora_dropout=0.1)
    model = peft.get_peft_model(transformers.BertForSequenceClassification(config), chosen)
    data = example.make_texts()  # type: ignore[attr-defined]
    words = {"parties": 3, "epsilon": 8.0, "rounds": 1, "rate": 0.2, "partition": "iid"}
    done = fulcrum.train(data, model, out=tmp_path / "run", **words)  # type: ignore[arg-type]
    assert type(done.model).__name__ == "BertForSequenceClassification"
    assert done.summary["parameters"] == 2 * 2 * (16 + 16) + 16 * 4 + 4
    x = {name: value[:3] for name, value in data.x.items()}
    assert torch.equal(fulcrum.load(tmp_path / "run")(**x).logits, done.model(**x).logits)
