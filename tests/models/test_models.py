"""Models: the paper's CNNs, seeded initialisation, your own factories, and what is refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulcrum import models
from fulcrum.errors import ModelError
from fulcrum.models.build import MODELS, build_model, is_built_in, register_model
from fulcrum.models.checks import validate_model
from fulcrum.models.layout import ParameterLayout
from fulcrum.settings import schema as config

IMAGES = {
    "mnist-cnn": (1, 28, 28),
    "cifar-cnn": (3, 32, 32),
    "scatter-cnn": (81, 7, 7),
    "mlp": (1, 8, 8),
    "linear": (1, 8, 8),
}


def make(name: str, shape: tuple[int, ...] | None = None, classes: int = 10, seed: int = 0, **more: Any) -> Any:
    """The model, of whatever class; the built-in ones are nn.Sequential."""
    return build_model(config.Model(name=name, **more), shape or IMAGES[name], classes, seed)


# --- the built-in models --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mnist-cnn", 26_010),
        ("cifar-cnn", 131_466),
        ("scatter-cnn", 89_418),
        ("mlp", 64 * 64 + 64 + 650),
        ("linear", 650),
    ],
)
def test_number_of_parameters(name: str, count: int) -> None:
    assert ParameterLayout.of(make(name)).dim == count
    assert make(name)(torch.zeros(2, *IMAGES[name])).shape == (2, 10)


def test_the_papers_mnist_cnn_layer_by_layer() -> None:
    model = make("mnist-cnn")
    kinds = [
        nn.Conv2d,
        nn.ReLU,
        nn.MaxPool2d,
        nn.Conv2d,
        nn.ReLU,
        nn.MaxPool2d,
        nn.Flatten,
        nn.Linear,
        nn.ReLU,
        nn.Linear,
    ]
    assert [type(layer) for layer in model] == kinds
    first, second = model[0], model[3]
    assert (first.out_channels, first.kernel_size, first.stride, first.padding) == (16, (8, 8), (2, 2), (3, 3))
    assert (second.out_channels, second.kernel_size, second.stride, second.padding) == (32, (4, 4), (2, 2), (0, 0))
    assert all((pool.kernel_size, pool.stride) == (2, 1) for pool in (model[2], model[5]))
    assert (model[7].in_features, model[7].out_features, model[9].out_features) == (512, 32, 10)


def test_the_papers_cifar_cnn_layer_by_layer() -> None:
    model = make("cifar-cnn")
    convs = [layer for layer in model if isinstance(layer, nn.Conv2d)]
    assert [conv.out_channels for conv in convs] == [32, 64, 64, 128]
    assert all((conv.kernel_size, conv.padding, conv.stride) == ((3, 3), (1, 1), (1, 1)) for conv in convs)
    pools = [layer for layer in model if isinstance(layer, nn.AvgPool2d)]
    assert [pool.kernel_size for pool in pools] == [2, 2, 2]
    assert sum(isinstance(layer, nn.ReLU) for layer in model) == 4
    assert isinstance(model[-3], nn.AdaptiveAvgPool2d)
    assert (model[-1].in_features, model[-1].out_features) == (128, 10)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((1, 28, 28), "mnist-cnn"), ((3, 32, 32), "cifar-cnn"), ((1, 8, 8), "linear"), ((20,), "linear")],
)
def test_auto_looks_at_the_shape(shape: tuple[int, ...], kind: str) -> None:
    assert ParameterLayout.of(make("auto", shape)) == ParameterLayout.of(make(kind, shape))


def test_activations() -> None:
    x = torch.linspace(-3, 3, 20).view(2, 10)
    assert isinstance(make("mlp", activation="tanh")[2], nn.Tanh)
    tempered = make("mlp", activation="tempered")[2]
    torch.testing.assert_close(tempered(x), torch.tanh(x))
    other = make("mlp", activation="tempered", temper_scale=1.5, temper_temperature=3.0, temper_offset=0.5)[2]
    torch.testing.assert_close(other(x), 1.5 / (1 + torch.exp(-3.0 * x)) - 0.5)
    assert not torch.allclose(other(x), torch.tanh(x))


def test_hidden_widths_of_the_mlp() -> None:
    widths = [layer.out_features for layer in make("mlp", hidden=(7, 5)) if isinstance(layer, nn.Linear)]
    assert widths == [7, 5, 10]


# --- initialisation -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGES)
def test_the_seed_alone_decides(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = make(name, seed=5)
    assert torch.equal(torch.get_rng_state(), before)  # the global generator did not move
    torch.manual_seed(2)
    layout = ParameterLayout.of(one)
    assert torch.equal(layout.flatten(one), layout.flatten(make(name, seed=5)))
    assert not torch.equal(layout.flatten(one), layout.flatten(make(name, seed=6)))


def test_initialisation_is_pytorchs_default() -> None:
    model = make("cifar-cnn")
    for layer in (model[6], model[9]):
        assert isinstance(layer, nn.Conv2d)
        bound = 1 / math.sqrt(layer.in_channels * 9)
        for other in (layer, nn.Conv2d(layer.in_channels, layer.out_channels, 3)):
            assert other.bias is not None
            weight, bias = other.weight.detach(), other.bias.detach()
            assert float(weight.abs().max()) <= bound
            assert float(bias.abs().max()) <= bound
            assert float(bias.std()) > bound / 4
            assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)


# --- the layout -------------------------------------------------------------------------------------


def test_layout_flattens_and_writes_back() -> None:
    model = make("mnist-cnn")
    layout = ParameterLayout.of(model)
    assert layout.layers == (0, 0, 1, 1, 2, 2, 3, 3)
    assert layout.sizes == (1024, 16, 8192, 32, 16384, 32, 320, 10)
    assert layout.offsets == (0, 1024, 1040, 9232, 9264, 25648, 25680, 26000)
    params = layout.flatten(model)
    tensors = layout.unflatten(params)
    assert all(torch.equal(tensors[name], p) for name, p in model.named_parameters())
    tensors["0.bias"].fill_(7.0)  # a view
    assert bool((params[1024:1040] == 7.0).all())
    assert not bool((model.get_parameter("0.bias") == 7.0).any())
    layout.write(model, params)
    assert torch.equal(layout.flatten(model), params)


def test_layout_counts_shared_parameters_once_and_leaves_out_frozen_ones() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Linear(4, 4), second)
    model[1].weight.requires_grad_(False)
    layout = ParameterLayout.of(model)
    assert layout.names == ("0.weight", "0.bias", "1.bias", "2.bias")
    assert layout.layers == (0, 0, 1, 2)
    assert layout.dim == 16 + 4 + 4 + 4
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ModelError, match="no trainable parameters"):
        ParameterLayout.of(model)
    with pytest.raises(ModelError, match=r"'0.weight' has no shape yet"):
        ParameterLayout.of(nn.Sequential(nn.LazyLinear(3)))


def test_call_uses_the_given_parameters_and_puts_the_own_ones_back() -> None:
    layer = nn.Linear(3, 3)
    twin = nn.Linear(3, 3)
    twin.weight = layer.weight
    model = nn.Sequential(layer, layer, twin)
    own = list(model.parameters())
    tensors = {name: torch.full_like(p, 0.5) for name, p in model.named_parameters()}
    out = models.call_with_parameters(model, tensors, torch.ones(1, 3))
    expected = torch.ones(1, 3)
    for _ in range(3):
        expected = expected @ torch.full((3, 3), 0.5) + 0.5
    torch.testing.assert_close(out, expected)
    assert all(a is b for a, b in zip(model.parameters(), own, strict=True))
    assert twin.weight is layer.weight


# --- models of your own ---------------------------------------------------------------------------

FACTORIES = """
import torch
from torch import nn


def plain(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], classes))


def offered(classes, activation, settings):
    assert settings.hidden == (9,)
    return nn.Sequential(nn.Linear(6, 9), activation(), nn.Linear(9, classes))


def everything(**offers):
    assert sorted(offers) == ["activation", "classes", "input_shape", "outputs", "settings", "task"]
    return nn.Linear(6, 3)


def wrong_shape():
    return nn.Linear(6, 4)


def fails():
    raise ValueError("no luck\\nat all")


def fails_later():
    return nn.Linear(7, 3)


def not_a_module():
    return 3


def frozen():
    return nn.Linear(6, 3).requires_grad_(False)


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0)


def centred():
    return nn.Sequential(nn.Linear(6, 4), nn.Sequential(Centre()), nn.Linear(4, 3))


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randperm(len(x))[:, None]


def noisy():
    return nn.Sequential(nn.Linear(6, 3), Noisy())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.copy_(x.mean(dim=0))
        return x


def counting():
    return nn.Sequential(Counting(), nn.Linear(6, 3))


NUMBER = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a fresh module with the factories above."""
    name = f"own_models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("factory", ["plain", "offered", "everything"])
def test_a_factory_gets_what_it_asks_for(own: str, factory: str) -> None:
    model = make(f"{own}:{factory}", (6,), 3, hidden=(9,))
    assert model(torch.zeros(2, 6)).shape == (2, 3)


def test_a_factory_is_seeded_and_the_global_generator_put_back(own: str) -> None:
    before = torch.get_rng_state()
    one, two, three = (make(f"{own}:plain", (6,), 3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    layout = ParameterLayout.of(one)
    assert torch.equal(layout.flatten(one), layout.flatten(two))
    assert not torch.equal(layout.flatten(one), layout.flatten(three))


def test_a_registered_model_and_one_in_the_current_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_folder_model.py").write_text(
        "from torch import nn\n"
        "def net(input_shape, outputs, task):\n"
        "    assert task is None\n"
        "    return nn.Linear(input_shape[0], outputs)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    assert make("my_folder_model:net", (6,), 3)(torch.ones(2, 6)).shape == (2, 3)
    monkeypatch.setattr(MODELS, "_values", dict(MODELS._values))
    register_model("my-net")(lambda input_shape, classes: nn.Linear(input_shape[0], classes))
    assert make("my-net", (6,), 3)(torch.ones(2, 6)).shape == (2, 3)
    assert not is_built_in(config.Model(name="my-net"))
    with pytest.raises(ModelError, match="did you mean 'my-net'"):
        make("my-nett", (6,), 3)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("wrong_shape", r"logits of shape \[3, 3\], not \[3, 4\]"),
        ("fails", "factory failed with ValueError: no luck"),
        ("fails_later", "failed on a batch of 6 examples with RuntimeError"),
        ("not_a_module", "must return a torch.nn.Module, not int"),
        ("frozen", "no trainable parameters"),
        ("missing", "cannot be imported: .*missing"),
        ("NUMBER", "is not a function"),
        ("with_batch_norm", r"Layer '1' \(BatchNorm1d\) mixes the examples.*GroupNorm"),
        ("centred", r"Layer '1.0' \(Centre\) mixes the examples.*GroupNorm"),
        ("noisy", r"Layer '1' \(Noisy\) is random"),
        ("counting", "Buffer '0.mean' changes when the model runs"),
    ],
)
def test_a_factory_that_cannot_be_used_is_explained(own: str, factory: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        make(f"{own}:{factory}", (6,), 3)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (
            "resnet",
            (1, 28, 28),
            "choose one of auto, linear, mlp, mnist-cnn, cifar-cnn, scatter-cnn, or package.module:factory",
        ),
        ("mnist-cnn", (1, 8, 8), "at least 14x14 pixels, but an example is 1x8x8"),
        ("cifar-cnn", (64,), "needs images"),
        ("no.such.module:factory", (1, 8, 8), "cannot be imported"),
        (":factory", (1, 8, 8), "not of the form package.module:name"),
        ("mlpp", (1, 8, 8), "did you mean 'mlp'"),
    ],
)
def test_a_name_that_cannot_be_built_is_explained(name: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make(name, shape)


def test_an_unknown_activation_is_explained() -> None:
    with pytest.raises(ModelError, match="relu, tanh, tempered"):
        make("mlp", activation="swish")


@pytest.mark.parametrize("side", range(10, 20))
def test_the_smallest_image_of_the_mnist_cnn_is_stated_truly(side: int) -> None:
    if side >= 14:
        assert make("mnist-cnn", (1, side, side))(torch.zeros(2, 1, side, side)).shape == (2, 10)
    else:
        with pytest.raises(ModelError, match="at least 14x14"):
            make("mnist-cnn", (1, side, side))


# --- what is refused --------------------------------------------------------------------------------

REFUSED = {
    "BatchNorm1d": nn.BatchNorm1d(4),
    "BatchNorm2d": nn.BatchNorm2d(4),
    "BatchNorm3d": nn.BatchNorm3d(4, track_running_stats=False),
    "SyncBatchNorm": nn.SyncBatchNorm(4),
    "LazyBatchNorm2d": nn.LazyBatchNorm2d(),
    "InstanceNorm2d": nn.InstanceNorm2d(4, track_running_stats=True),
    "RReLU": nn.RReLU(),
    "Embedding": nn.Embedding(4, 4, max_norm=1.0),
}

ALLOWED = [
    nn.GroupNorm(2, 4),
    nn.LayerNorm(4),
    nn.InstanceNorm2d(4, affine=True),
    nn.Dropout(0.1),  # draws by the examples' keys, see test_dropout.py
    nn.LSTM(4, 4, num_layers=2, dropout=0.5),
    nn.MultiheadAttention(4, 2, dropout=0.1),
    nn.BatchNorm2d(4).eval(),
    nn.Embedding(4, 4),
]


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_layers_are_named(kind: str) -> None:
    with pytest.raises(ModelError, match=rf"Layer 'deep.1' \({kind}\)"):
        validate_model(nn.ModuleDict({"deep": nn.Sequential(nn.Identity(), REFUSED[kind])}))


def test_what_keeps_examples_apart_is_allowed() -> None:
    for layer in ALLOWED:
        validate_model(nn.Sequential(layer))


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("activation", ["relu", "tempered"])
def test_the_built_in_models_keep_examples_apart(name: str, activation: str) -> None:
    validate_model(make(name, activation=activation), torch.randn(4, *IMAGES[name]))


class Wrong(nn.Module):
    """Mixes in the model's own forward; no layer is to blame."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).cumsum(dim=0)


def test_mixing_in_the_models_own_forward_is_found() -> None:
    with pytest.raises(ModelError, match=r"'model' \(Wrong\) mixes"):
        validate_model(Wrong(), torch.randn(4, 4))
    validate_model(Wrong())  # which no list of layer types could tell


def test_a_refused_model_is_left_as_it_was() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # with other weights the power iteration may have converged, and the buffer stays
        model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(ModelError, match="Buffer"):
        validate_model(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
