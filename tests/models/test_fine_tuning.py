"""What trains, by word and by pattern; adapters; weights from files and folders."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fulcrum
from fulcrum.data import from_arrays
from fulcrum.errors import ModelError
from fulcrum.models.adapted import adapt_model
from fulcrum.models.checkpoints import read_checkpoint
from fulcrum.models.layout import ParameterLayout
from fulcrum.models.lora import LoraLayer, merge_adapters
from fulcrum.models.pretrain import assign_weights
from fulcrum.models.trained import choose_trained, find_head
from fulcrum.settings import schema as config


def make_network() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    return nn.Sequential(body, nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("head", {"1.weight", "1.bias"}),
        ("bias", {"0.0.bias", "0.2.bias", "1.bias"}),
        ("0.2", {"0.2.weight", "0.2.bias"}),
        ("head, *.0.weight", {"1.weight", "1.bias", "0.0.weight"}),
        ("all", {f"{layer}.{what}" for layer in ("0.0", "0.2", "1") for what in ("weight", "bias")}),
    ],
)
def test_what_trains(words: str, names: set[str]) -> None:
    model = adapt_model(make_network(), config.Model(train=words), 0)
    assert set(ParameterLayout.of(model).names) == names


def test_a_pattern_that_fits_nothing_is_explained() -> None:
    with pytest.raises(
        ModelError, match=r"model\.train = 'heads': no parameter's name fits 'heads'; did you mean 'head'"
    ):
        choose_trained(make_network(), "heads")
    with pytest.raises(ModelError, match="'lora'"):
        choose_trained(make_network(), "lora")
    with pytest.raises(ModelError, match=r"model\.lora_targets: no layer's name fits 'query'"):
        adapt_model(make_network(), config.Model(lora=2, lora_targets=("query",)), 0)


def test_the_head_is_what_the_network_says_or_its_last_layer() -> None:
    class Named(nn.Module):
        base_model_prefix = "body"

        def __init__(self) -> None:
            super().__init__()
            self.classifier, self.body = nn.Linear(4, 2), nn.Linear(4, 4)

    assert find_head(Named()) == ["classifier.weight", "classifier.bias"]
    assert find_head(make_network()) == ["1.weight", "1.bias"]


def test_adapters_start_as_nothing_and_merge_to_the_same_function() -> None:
    model, x = make_network(), torch.randn(4, 6)
    adapted = adapt_model(model, config.Model(lora=2, lora_alpha=4.0), 0)
    assert torch.equal(adapted(x), model(x))
    assert ParameterLayout.of(adapted).dim == 2 * (6 + 8) + 2 * (8 + 8) + 8 * 3 + 3
    assert isinstance(adapted.get_submodule("0.2"), LoraLayer)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.normal_()
    merged = merge_adapters(adapted)
    assert {type(layer) for layer in merged.modules()} == {nn.Sequential, nn.Linear, nn.ReLU}
    torch.testing.assert_close(merged(x), adapted(x), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged(x), model(x), atol=0.1)


def make_data() -> fulcrum.Dataset:
    torch.manual_seed(2)
    x = torch.randn(60, 6)
    return from_arrays(x, (x[:, 0] > 0).long(), x[:20], (x[:20, 0] > 0).long(), classes=3, public=True)


@pytest.mark.parametrize("model", [{"train": "head"}, {"train": "bias"}, {"lora": 1}])
def test_only_what_trains_is_noised_sent_and_counted_and_the_rest_is_kept(
    model: dict[str, Any], tmp_path: Path
) -> None:
    start = make_network()
    kept = copy.deepcopy(start.state_dict())
    settings = {"parties": 3, "epsilon": 8.0, "rounds": 2, "rate": 0.3, "partition": "iid"}
    from fulcrum.runs import execute, prepare
    from fulcrum.settings.files import settings_from_keywords

    federation = prepare(settings_from_keywords({**settings, "model": model}), make_data(), start)
    done = execute(federation, tmp_path / "run")
    layout = federation.problem.layout
    assert done.summary["parameters"] == layout.dim < sum(p.numel() for p in start.parameters())
    assert federation.problem.shape.dim == layout.dim, "what moo counts"
    after = done.model.state_dict()
    assert set(after) == set(kept), "complete"
    frozen = {"head": ["0.0.weight", "0.2.bias"], "bias": ["0.0.weight", "1.weight"]}.get(model.get("train", ""), [])
    for name in frozen or ["0.0.bias"]:
        assert torch.equal(after[name], kept[name])
    assert any(not torch.equal(after[name], kept[name]) for name in kept)
    assert all(torch.equal(value, kept[name]) for name, value in start.state_dict().items()), "the caller's stays"
    again = fulcrum.load(tmp_path / "run", model=make_network())
    assert all(torch.equal(value, after[name]) for name, value in again.state_dict().items())
    with pytest.raises(fulcrum.FulcrumError, match=r"handed over as an object of torch\.nn"):
        fulcrum.load(tmp_path / "run")


def test_weights_from_every_kind_of_file(tmp_path: Path) -> None:
    weights = make_network().state_dict()
    save_file(weights, tmp_path / "w.safetensors")
    torch.save(weights, tmp_path / "w.pt")
    torch.save({"epoch": 3, "state_dict": {f"module.{n}": v for n, v in weights.items()}}, tmp_path / "nested.pth")
    (tmp_path / "folder").mkdir()
    save_file(weights, tmp_path / "folder" / "model.safetensors")
    for name in ("w.safetensors", "w.pt", "nested.pth", "folder"):
        torch.manual_seed(5)
        other = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3))
        assign_weights(other, read_checkpoint(tmp_path / name), name)
        assert all(torch.equal(value, weights[key]) for key, value in other.state_dict().items()), name


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def test_wrong_files_are_refused_and_no_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ModelError, match=r"evil\.pt' cannot be read as \.pt"):
        read_checkpoint(tmp_path / "evil.pt")
    assert "code ran" not in capsys.readouterr().out
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ModelError, match="holds no weights by name"):
        read_checkpoint(tmp_path / "list.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"holds no model\.safetensors"):
        read_checkpoint(tmp_path / "empty")
    with pytest.raises(ModelError, match="has 'odd', which the model has not"):
        assign_weights(make_network(), {"odd": torch.zeros(2)}, "w.pt")
    wrong = dict(make_network().state_dict())
    wrong["0.0.weight"] = torch.zeros(8, 7)
    with pytest.raises(ModelError, match=r"0\.0\.weight is 8x7, but the model's is 8x6"):
        assign_weights(make_network(), wrong, "w.pt")


def test_a_head_for_another_number_of_classes_starts_at_random_and_says_so() -> None:
    weights = {**make_network().state_dict(), "1.weight": torch.zeros(10, 8), "1.bias": torch.zeros(10)}
    model = make_network()
    head = model.get_parameter("1.weight").detach().clone()
    with torch.no_grad():
        model.get_parameter("0.0.weight").zero_()
    (note,) = assign_weights(model, weights, "w.pt")
    assert "1.bias, 1.weight" in note
    assert torch.equal(model.get_parameter("1.weight"), head)
    assert torch.equal(model.get_parameter("0.0.weight"), weights["0.0.weight"])
