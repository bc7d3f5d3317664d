"""What is trained: the paper's CNNs, an MLP, a linear model, or your own; and how its parameters lie in a vector.

Initialisation follows PyTorch's defaults, from a named stream of the run's seed: no global generator is read
or moved. A model of your own is built with the global generator seeded and put back afterwards.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fulcrum import config, coordinates, priors
from fulcrum.errors import ModelError
from fulcrum.rng import stream_seed, torch_stream

Shape = tuple[int, ...]


# --- the parameters as one vector -------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where each trainable parameter lies in the flat vector [d]. A shared parameter appears once.

    names, shapes: of the parameter tensors, in order. layers: for each tensor the number of its layer; tensors
    of the same module have the same number, counted from 0 in order of appearance.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    layers: tuple[int, ...]

    @staticmethod
    def of(model: nn.Module) -> Layout:
        """The layout of a model's parameters that require a gradient; ModelError if there are none."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        lazy = [name for name, p in named if nn.parameter.is_lazy(p)]
        if lazy:
            raise ModelError(f"Parameter {lazy[0]!r} has no shape yet; run the model once before handing it over.")
        if not named:
            raise ModelError("The model has no trainable parameters; at least one must require a gradient.")
        owners: dict[str, int] = {}
        layers = tuple(owners.setdefault(name.rpartition(".")[0], len(owners)) for name, _ in named)
        return Layout(tuple(name for name, _ in named), tuple(p.shape for _, p in named), layers)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each tensor."""
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts in the vector."""
        return tuple(sum(self.sizes[:i]) for i in range(len(self.sizes)))

    @cached_property
    def dim(self) -> int:
        """d, the number of trainable parameters."""
        return sum(self.sizes)

    @cached_property
    def depth(self) -> int:
        """How many tensors have more than one dimension: about the number of layers."""
        return sum(len(shape) > 1 for shape in self.shapes)

    @cached_property
    def usual_norm(self) -> float:
        """About the norm of all weights together when each layer is drawn as PyTorch does by default.

        A layer's weights are uniform within 1 / sqrt(fan in), so their squares add up to a third of its outputs;
        biases are left out. It depends on the shapes alone. 1 for a model of vectors and scalars only.
        """
        outputs = sum(shape[0] for shape in self.shapes if len(shape) > 1)
        return math.sqrt(outputs / 3) or 1.0

    def flatten(self, model: nn.Module) -> Tensor:
        """A copy of the model's parameters as one vector, [d]."""
        named = dict(model.named_parameters())
        return torch.cat([named[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, params: Tensor) -> dict[str, Tensor]:
        """Views into `params` [d] by parameter name."""
        pieces = params.split(self.sizes)
        return {n: p.view(s) for n, p, s in zip(self.names, pieces, self.shapes, strict=True)}

    def write(self, model: nn.Module, params: Tensor) -> None:
        """Copies `params` [d] into the model."""
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, values in self.unflatten(params).items():
                named[name].copy_(values)


def call(model: nn.Module, tensors: Mapping[str, Tensor], *inputs: Tensor) -> Any:
    """The model's output with `tensors` (by parameter name, as `Layout.unflatten` gives them) in place of its own.

    As `torch.func.functional_call`, which loses the parameters of a module that appears twice in the model.
    The model is as before afterwards, but must not be shared between threads during the call.
    """
    given = {id(parameter): tensors[name] for name, parameter in model.named_parameters() if name in tensors}
    slots: dict[str, Tensor] = {}
    for place, module in model.named_modules():  # each module once
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in given:
                slots[f"{place}.{name}" if place else name] = given[id(parameter)]
    return functional_call(model, slots, inputs, tie_weights=False)


# --- the built-in models --------------------------------------------------------------------------


class Tempered(nn.Module):
    """The tempered sigmoid: scale * sigmoid(temperature * x) - offset. With 2, 2, 1 it is tanh."""

    def __init__(self, scale: float, temperature: float, offset: float) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, temperature={self.temperature:g}, offset={self.offset:g}"


ACTIVATIONS: dict[str, Callable[[config.Model], nn.Module]] = {
    "relu": lambda settings: nn.ReLU(),
    "tanh": lambda settings: nn.Tanh(),
    "tempered": lambda settings: Tempered(settings.temper_scale, settings.temper_temperature, settings.temper_offset),
}

Act = Callable[[], nn.Module]


def _images(name: str, shape: Shape, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        seen = "x".join(map(str, shape))
        raise ModelError(
            f"model.name = {name!r} needs images (channels, height, width) of at least {smallest}x{smallest} pixels, "
            f"but an example is {seen}; use linear, mlp or your own package.module:factory."
        )
    return shape[0], shape[1], shape[2]


def mnist_cnn(settings: config.Model, shape: Shape, classes: int, act: Act) -> nn.Module:
    """The paper's CNN for MNIST and Fashion-MNIST: 26,010 parameters on 1x28x28 and 10 classes."""
    channels, *sides = _images("mnist-cnn", shape, 14)
    height, width = (((side + 6 - 8) // 2 + 1 - 1 - 4) // 2 + 1 - 1 for side in sides)
    layers = [nn.Conv2d(channels, 16, 8, stride=2, padding=3), act(), nn.MaxPool2d(2, stride=1)]
    layers += [nn.Conv2d(16, 32, 4, stride=2), act(), nn.MaxPool2d(2, stride=1), nn.Flatten()]
    layers += [nn.Linear(32 * height * width, 32), act(), nn.Linear(32, classes)]
    return nn.Sequential(*layers)


def cifar_cnn(settings: config.Model, shape: Shape, classes: int, act: Act) -> nn.Module:
    """The paper's CNN for CIFAR-10: four 3x3 convolutions, average pooling, one linear layer."""
    channels, _, _ = _images("cifar-cnn", shape, 8)
    layers: list[nn.Module] = []
    for filters in (32, 64, 64):
        layers += [nn.Conv2d(channels, filters, 3, padding=1), act(), nn.AvgPool2d(2)]
        channels = filters
    layers += [nn.Conv2d(channels, 128, 3, padding=1), act(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, classes))


def scatter_cnn(settings: config.Model, shape: Shape, classes: int, act: Act) -> nn.Module:
    """Two 3x3 convolutions of 64 filters and one linear layer, for scattering features (after Tramer and Boneh 2021).

    187,210 parameters on CIFAR-10's 243x8x8 features and 10 classes, 89,418 on MNIST's 81x7x7.
    """
    channels, height, width = _images("scatter-cnn", shape, 2)
    layers = [nn.Conv2d(channels, 64, 3, padding=1), act(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), act()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (height // 2) * (width // 2), classes))


def mlp(settings: config.Model, shape: Shape, classes: int, act: Act) -> nn.Module:
    """Fully connected layers of the widths in `hidden`."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for hidden in settings.hidden:
        layers += [nn.Linear(width, hidden), act()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, classes))


def linear(settings: config.Model, shape: Shape, classes: int, act: Act) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


BUILTIN: dict[str, Callable[[config.Model, Shape, int, Act], nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "mnist-cnn": mnist_cnn,
    "cifar-cnn": cifar_cnn,
    "scatter-cnn": scatter_cnn,
}

AUTO: Mapping[Shape, str] = {(1, 28, 28): "mnist-cnn", (3, 32, 32): "cifar-cnn"}
"""What "auto" means for these shapes of an example; "linear" for any other."""


def build(settings: config.Model, input_shape: Shape, classes: int, seed: int) -> nn.Module:
    """The model that the settings name, for examples of `input_shape` (without the batch) and `classes` labels.

    The same seed gives the same parameters, whatever the global generators hold. `name` may be
    "package.module:factory": the factory is called with those of input_shape, classes, settings and activation
    (a function that makes one activation layer) that it has as parameters, with the global CPU generator seeded
    for the call and restored after it, and must return an nn.Module that maps [B, *input_shape] to [B, classes].
    Raises ModelError where the model cannot be built, or cannot be trained with a bound per example.
    """
    shape = tuple(int(side) for side in input_shape)
    if settings.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(f"model.activation = {settings.activation!r} is not known; choose one of {known}.")

    def act() -> nn.Module:
        return ACTIVATIONS[settings.activation](settings)

    name = AUTO.get(shape, "linear") if settings.name == "auto" else settings.name
    if name in BUILTIN:
        with torch.device("meta"):  # no memory, and no random numbers drawn
            model = BUILTIN[name](settings, shape, classes, act)
        model = model.to_empty(device="cpu")
        initialise(model, torch_stream(seed, "init"))
        return _started(model, settings, name)
    if ":" not in name:
        known = ", ".join(("auto", *BUILTIN))
        raise ModelError(f"model.name = {name!r} is not known; choose one of {known}, or package.module:factory.")
    model = _own(name, {"input_shape": shape, "classes": classes, "settings": settings, "activation": act}, seed)
    _check(model, name, shape, classes)
    return _started(model, settings, name)


def _started(model: nn.Module, settings: config.Model, name: str) -> nn.Module:
    """The model with the weights that the settings name in place of random ones."""
    found = {} if settings.init == "random" else priors.read(settings.init, name, settings.activation)
    weights, facts = priors.parted(model, found)
    if settings.init != "random":
        priors.put(model, weights, settings.init)
    if settings.coordinates == "plain":
        return model
    facts = coordinates.wanted(facts, settings.coordinates)
    if not facts:
        raise ModelError(
            f"model.coordinates = {settings.coordinates!r} needs what is known of the layers' inputs, which model.init "
            f"= {settings.init!r} does not hold; use painted, or a file that `fulcrum prior` made."
        )
    *_, head = (parameter for parameter, _ in model.named_parameters())
    return coordinates.centred(model, coordinates.partly(model, facts, settings.whiten), head=head in weights)


def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Draws all Linear and Conv parameters as PyTorch does by default: uniform within 1 / sqrt(fan in)."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        bound = 1.0 / math.sqrt(math.prod(weight.shape[1:]))
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.uniform_(-bound, bound, generator=generator)


# --- models of your own ---------------------------------------------------------------------------


def _own(name: str, offers: Mapping[str, object], seed: int) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ModelError(f"model.name = {name!r} cannot be imported: {problem}.") from problem
    if not callable(factory):
        raise ModelError(f"model.name = {name!r} is not a function but {type(factory).__name__}; name a factory.")
    accepted = inspect.signature(factory).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    arguments = {key: value for key, value in offers.items() if anything or key in accepted}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_seed(seed, ("init",)))
        try:
            model = factory(**arguments)
        except Exception as problem:
            raise ModelError(f"model.name = {name!r}: the factory failed with {_words(problem)}.") from problem
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ModelError(f"model.name = {name!r}: the factory must return a torch.nn.Module, not {kind}.")
    return model


def _words(problem: Exception) -> str:
    first = (str(problem).strip().splitlines() or ["no message"])[0].rstrip(".")
    return f"{type(problem).__name__}: {first}"


def _check(model: nn.Module, name: str, shape: Shape, classes: int) -> None:
    """A dry forward pass: trainable parameters, logits of the right shape, and nothing that mixes examples."""
    Layout.of(model)
    _refuse_by_type(model)
    sample = torch.rand(3, *shape, generator=torch_stream(0, "dry"))
    try:
        _, outputs, _ = _dry(model, sample)
    except Exception as problem:
        seen = "x".join(map(str, shape))
        raise ModelError(
            f"model.name = {name!r}: the model failed on a batch of {seen} examples with {_words(problem)}."
        ) from problem
    if not isinstance(outputs, Tensor) or tuple(outputs.shape) != (3, classes):
        seen = str(list(outputs.shape)) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ModelError(f"model.name = {name!r}: 3 examples must give logits of shape [3, {classes}], not {seen}.")
    refuse_mixing(model, sample)


# --- what cannot be trained with a bound per example ------------------------------------------------

Finding = Callable[[Any], str]


def _batch_norm(layer: Any) -> str:
    return "mixes the examples of a batch; use GroupNorm or LayerNorm instead"


def _instance_norm(layer: Any) -> str:
    return "keeps running statistics of the data; set track_running_stats=False" if layer.track_running_stats else ""


def _random(layer: Any) -> str:
    chance = float(getattr(layer, "p", 0.0) or getattr(layer, "dropout", 0.0))
    return "draws random numbers from the global generator; set its probability to 0 or leave it out" if chance else ""


def _renormalising(layer: Any) -> str:
    return "rewrites the weights of the tokens it sees; set max_norm=None" if layer.max_norm is not None else ""


def _always_random(layer: Any) -> str:
    return "draws random numbers from the global generator; use LeakyReLU or PReLU instead"


REFUSED: tuple[tuple[tuple[type[nn.Module], ...], Finding], ...] = (
    ((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _instance_norm),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _batch_norm),
    ((nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d), _batch_norm),
    ((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout), _random),
    ((nn.RNNBase, nn.MultiheadAttention), _random),
    ((nn.RReLU,), _always_random),
    ((nn.Embedding, nn.EmbeddingBag), _renormalising),
)


def refuse_mixing(model: nn.Module, sample: Tensor | None = None) -> None:
    """Raises ModelError, naming the layer and what to use instead, if the model cannot give per-example gradients.

    Refused are layers that mix the examples of a batch (BatchNorm), keep statistics of the data, rewrite their
    weights while running, or draw random numbers (Dropout with p > 0: they would come from the global generator).
    With `sample`, a batch [B, ...] of at least two examples, the model is also run on a copy of itself: changing
    one example must leave the outputs of the others, and the model's buffers, as they were.
    """
    _refuse_by_type(model)
    if sample is not None:
        _refuse_by_behaviour(model, sample)


def _refuse_by_type(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        for types, finding in REFUSED:
            problem = finding(layer) if isinstance(layer, types) else ""
            if problem:
                raise ModelError(f"Layer {name or 'model'!r} ({type(layer).__name__}) {problem}.")


def _refuse_by_behaviour(model: nn.Module, sample: Tensor) -> None:
    trace, _, moved = _dry(model, sample)
    if moved:
        raise ModelError(f"Buffer {moved!r} changes when the model runs: it would leave the data's traces unprotected.")
    again, _, _ = _dry(model, sample, seed=1)
    changed = sample.clone()
    changed[0] = sample[0] + 1.0
    other, _, _ = _dry(model, changed)
    for before, repeated, after in zip(trace, again, other, strict=False):
        name, kind, rows = before
        if not _same(rows, repeated[2]):
            raise ModelError(f"Layer {name!r} ({kind}) is random: the same batch gives another output the second time.")
        if rows.dim() and len(rows) == len(sample) and not _same(rows[1:], after[2][1:]):
            raise ModelError(
                f"Layer {name!r} ({kind}) mixes the examples of a batch: changing one example changes the "
                "output of the others; use GroupNorm or LayerNorm in place of batch statistics."
            )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


Trace = list[tuple[str, str, Tensor]]


def _dry(model: nn.Module, sample: Tensor, seed: int = 0) -> tuple[Trace, Any, str]:
    """Runs the model: the outputs of its modules in order, its own output, and the first buffer that changed.

    The model is left as it was: buffers are put back, and so is the global generator.
    """
    trace: Trace = []

    def hook(name: str, module: nn.Module) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, out: Any) -> None:
            trace.extend((name, type(module).__name__, leaf.detach().clone()) for leaf in _tensors(out))

        return note

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    handles = [m.register_forward_hook(hook(n or "model", m)) for n, m in model.named_modules()]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            outputs = model(sample.clone())
        moved = [n for n, b in model.named_buffers() if n not in before or not torch.equal(b, before[n])]
    finally:
        for handle in handles:
            handle.remove()
        for name, buffer in model.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.data.copy_(before[name])
    return trace, outputs, moved[0] if moved else ""


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, tuple | list):
        for item in out:
            yield from _tensors(item)
