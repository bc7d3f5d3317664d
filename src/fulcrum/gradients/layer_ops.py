"""One layer forward and back: what a plain sequence is made of, without autograd.

A move runs a layer and returns its output with a memo; from the memo and the gradient of the output it
finds the gradient of the input. The layers that small models are made of are written out here; any
other goes through autograd by itself. On a CPU images have their channels last in memory, where
pooling is many times faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum.gradients.outer_products import Patches, unfold
from fulcrum.models.builtin import Tempered
from fulcrum.models.whitening import Centre

Params = Mapping[str, Tensor]
"""A layer's own parameters by local name: weight, bias."""

SMALL = 100_000
"""Numbers in a batch of images up to which PyTorch's own max-pooling costs less than the calls made here."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Move:
    """How a layer goes forward and back.

    run(layer, x, params, mine) -> (output, memo); `mine`: nobody else needs x, it may be overwritten.
    back(layer, memo, params, g) -> gradient of x, from the gradient g of the output, which it may overwrite.
    suits(layer, x): whether the move can take this very layer and input.
    spare: whether its way back can do without its output, so that what follows may overwrite that.
    output(layer, x, params): the output alone, where nobody goes back and that is cheaper.
    """

    run: Callable[[Any, Tensor, Params, bool], tuple[Tensor, Any]]
    back: Callable[[Any, Any, Params, Tensor], Tensor]
    suits: Callable[[Any, Tensor], bool] = lambda layer, x: True
    spare: bool = False
    output: Callable[[Any, Tensor, Params], Tensor] | None = None


# --- any layer, by autograd ---------------------------------------------------------------------


def by_autograd(call: Callable[[Any, Tensor, Params], Tensor], spare: bool = False) -> Move:
    """A move that differentiates `call(layer, x, params)` with respect to x alone."""

    def run(layer: Any, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, Any]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(x.is_floating_point())
            out = call(layer, leaf, params)
        return out.detach(), (leaf, out)

    def back(layer: Any, memo: tuple[Tensor, Tensor], params: Params, g: Tensor) -> Tensor:
        leaf, out = memo
        (grad,) = torch.autograd.grad(out, leaf, g, materialize_grads=True)
        return grad

    return Move(run, back, spare=spare)


def _itself(layer: nn.Module, x: Tensor, params: Params) -> Tensor:
    out: Tensor = layer(x.clone() if getattr(layer, "inplace", False) else x)
    return out


# --- linear and convolutions --------------------------------------------------------------------


def _linear_run(layer: nn.Linear, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, None]:
    return F.linear(x, params["weight"], params.get("bias")), None


def _linear_back(layer: nn.Linear, memo: None, params: Params, g: Tensor) -> Tensor:
    return g @ params["weight"]


def _convolve(layer: nn.Conv1d | nn.Conv2d, x: Tensor, params: Params) -> Tensor:
    # PyTorch's own, which pads by padding_mode first; only the parameters are ours.
    out: Tensor = layer._conv_forward(x, params["weight"], params.get("bias"))
    return out


def _conv_run(layer: nn.Conv2d, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, Tensor]:
    return _convolve(layer, x, params), x


def _conv_back(layer: nn.Conv2d, memo: Tensor, params: Params, g: Tensor) -> Tensor:
    numbers = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)
    grad: Tensor = aten.convolution_backward(g, memo, params["weight"], None, *numbers, (True, False, False))[0]
    return grad


def _conv_suits(layer: nn.Conv2d, x: Tensor) -> bool:
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _patches_run(layer: nn.Conv2d, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, Patches]:
    patches = unfold(x, layer.kernel_size, layer.stride, layer.padding)  # type: ignore[arg-type]
    rows, weight, bias = patches.values.flatten(0, 1), patches.matrix(params["weight"]), params.get("bias")
    out = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
    return out.view(len(x), *patches.size, len(weight)).permute(0, 3, 1, 2), patches


def _patches_back(layer: nn.Conv2d, memo: Patches, params: Params, g: Tensor) -> Tensor:
    return _conv_back(layer, memo.source, params, g)


def _patches_suit(layer: nn.Conv2d, x: Tensor) -> bool:
    """Where the stride skips positions, one product over patches beats the CPU's convolution by a third,
    and the patches serve the gradients too."""
    strided = max(layer.stride) > 1 and max(layer.dilation) == 1 and layer.groups == 1
    return strided and x.device.type == "cpu" and _conv_suits(layer, x)


# --- activations and shapes -----------------------------------------------------------------------


def _relu_run(layer: nn.ReLU, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, Tensor]:
    out = torch.relu_(x) if mine else torch.relu(x)
    return out, out


def _relu_back(layer: nn.ReLU, memo: Tensor, params: Params, g: Tensor) -> Tensor:
    dense = g.is_contiguous() or g.is_contiguous(memory_format=torch.channels_last)
    into = g if dense else torch.empty_like(memo)
    grad: Tensor = aten.threshold_backward.grad_input(g, memo, 0, grad_input=into)
    return grad


def _tanh_run(layer: nn.Tanh, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, Tensor]:
    out = torch.tanh_(x) if mine else torch.tanh(x)
    return out, out


def _tanh_back(layer: nn.Tanh, memo: Tensor, params: Params, g: Tensor) -> Tensor:
    grad: Tensor = aten.tanh_backward(g, memo)
    return grad


def _tempered_run(layer: Tempered, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, Tensor]:
    rise = (x * layer.temperature).sigmoid_()
    return rise * layer.scale - layer.offset, rise


def _tempered_back(layer: Tempered, memo: Tensor, params: Params, g: Tensor) -> Tensor:
    grad: Tensor = aten.sigmoid_backward(g, memo)
    return grad.mul_(layer.scale * layer.temperature)


def _flatten_run(layer: nn.Flatten, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, torch.Size]:
    return x.flatten(layer.start_dim, layer.end_dim), x.shape


def _flatten_back(layer: nn.Flatten, memo: torch.Size, params: Params, g: Tensor) -> Tensor:
    return g.reshape(memo)


def _centre_run(layer: Centre, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, torch.Size]:
    if any(layer.padding):
        return layer.mixed(F.pad(x, layer.sides).sub_(layer.mean)), x.shape
    into = x if mine else torch.empty_like(x)  # laid out as x is, whatever the mean is
    return layer.mixed(torch.sub(x, layer.mean, out=into)), x.shape


def _centre_back(layer: Centre, memo: torch.Size, params: Params, g: Tensor) -> Tensor:
    if not any(layer.padding):
        return layer.mixed(g)
    down, across = layer.padding
    return layer.mixed(g[:, :, down : down + memo[2], across : across + memo[3]])


# --- pooling ------------------------------------------------------------------------------------


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _halves(size: int, stride: int) -> tuple[slice, slice]:
    """First and second places of all windows of two."""
    reach = stride * ((size - 2) // stride) + 1
    return slice(0, reach, stride), slice(1, reach + 1, stride)


def _pairs_run(layer: nn.MaxPool2d, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, tuple[Any, ...]]:
    """Windows of 2 x 2: along the rows, then across them. The differences remember which one was larger."""
    down, right = _pair(layer.stride)
    image = x.permute(0, 2, 3, 1)
    one, two = _halves(image.shape[2], right)
    left, other = image[:, :, one], image[:, :, two]
    wide, rows = other - left, torch.maximum(left, other)
    one, two = _halves(rows.shape[1], down)
    top, other = rows[:, one], rows[:, two]
    tall, out = other - top, torch.maximum(top, other)
    return out.permute(0, 3, 1, 2), (image.shape, wide, tall)


def _pairs_output(layer: nn.MaxPool2d, x: Tensor, params: Params) -> Tensor:
    down, right = _pair(layer.stride)
    image = x.permute(0, 2, 3, 1)
    one, two = _halves(image.shape[2], right)
    rows = torch.maximum(image[:, :, one], image[:, :, two])
    one, two = _halves(rows.shape[1], down)
    return torch.maximum(rows[:, one], rows[:, two]).permute(0, 3, 1, 2)


def _pairs_back(layer: nn.MaxPool2d, memo: tuple[Any, ...], params: Params, g: Tensor) -> Tensor:
    (_, height, width, _), wide, tall = memo
    down, right = _pair(layer.stride)
    rows = _spread(g.permute(0, 2, 3, 1).contiguous(), tall, height, 1, down)
    return _spread(rows, wide, width, 2, right).permute(0, 3, 1, 2)


def _spread(g: Tensor, difference: Tensor, size: int, dim: int, stride: int) -> Tensor:
    """Each gradient to the larger of its window of two along `dim`; to the first if they are equal, as PyTorch does."""
    second = aten.threshold_backward(g, difference, 0)
    grad = g.new_empty([*g.shape[:dim], size, *g.shape[dim + 1 :]])
    # The first places of all windows are written below; what lies outside of them starts at zero.
    (grad if stride > 1 else grad.narrow(dim, g.shape[dim], size - g.shape[dim])).zero_()
    one, two = ((slice(None),) * dim + (half,) for half in _halves(size, stride))
    torch.sub(g, second, out=grad[one])
    grad[two] += second
    return grad


def _pairs_suit(layer: nn.MaxPool2d, x: Tensor) -> bool:
    plain = _pair(layer.padding) == (0, 0) and _pair(layer.dilation) == (1, 1) and not layer.ceil_mode
    return plain and _pair(layer.kernel_size) == (2, 2) and x.numel() > SMALL and x.device.type == "cpu"


def _max_numbers(layer: nn.MaxPool2d) -> tuple[Any, ...]:
    numbers = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return *map(_pair, numbers), layer.ceil_mode


def _max_run(layer: nn.MaxPool2d, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    out, where = aten.max_pool2d_with_indices(x, *_max_numbers(layer))
    return out, (x, where)


def _max_back(layer: nn.MaxPool2d, memo: tuple[Tensor, Tensor], params: Params, g: Tensor) -> Tensor:
    x, where = memo
    grad: Tensor = aten.max_pool2d_with_indices_backward(g, x, *_max_numbers(layer), where)
    return grad


def _average_run(layer: nn.AvgPool2d, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, Tensor]:
    return layer(x), x


def _average_back(layer: nn.AvgPool2d, memo: Tensor, params: Params, g: Tensor) -> Tensor:
    window, stride, padding = _pair(layer.kernel_size), _pair(layer.stride), _pair(layer.padding)
    numbers = (window, stride, padding, layer.ceil_mode, layer.count_include_pad, layer.divisor_override)
    grad: Tensor = aten.avg_pool2d_backward(g, memo, *numbers)
    return grad


def _mean_run(layer: nn.AdaptiveAvgPool2d, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, Tensor]:
    return x.mean(dim=(2, 3), keepdim=True), x


def _mean_back(layer: nn.AdaptiveAvgPool2d, memo: Tensor, params: Params, g: Tensor) -> Tensor:
    share = g / (memo.shape[2] * memo.shape[3])
    return torch.empty_like(memo).copy_(share)  # laid out as the images are


def _mean_suits(layer: nn.AdaptiveAvgPool2d, x: Tensor) -> bool:
    return x.dim() == 4 and layer.output_size in (1, (1, 1))


# --- the table ----------------------------------------------------------------------------------

ANY = by_autograd(_itself)
"""For a layer without parameters that has no move of its own."""

MOVES: dict[type[nn.Module], tuple[Move, ...]] = {
    nn.Linear: (Move(_linear_run, _linear_back, spare=True),),
    nn.Conv1d: (by_autograd(_convolve, spare=True),),
    nn.Conv2d: (
        Move(_patches_run, _patches_back, _patches_suit, spare=True, output=_convolve),
        Move(_conv_run, _conv_back, _conv_suits, spare=True),
        by_autograd(_convolve, spare=True),
    ),
    nn.GroupNorm: (
        by_autograd(lambda layer, x, p: F.group_norm(x, layer.num_groups, p.get("weight"), p.get("bias"), layer.eps)),
    ),
    nn.LayerNorm: (
        by_autograd(
            lambda layer, x, p: F.layer_norm(x, layer.normalized_shape, p.get("weight"), p.get("bias"), layer.eps)
        ),
    ),
    nn.Embedding: (by_autograd(lambda layer, x, p: F.embedding(x, p["weight"], layer.padding_idx)),),
    nn.ReLU: (Move(_relu_run, _relu_back),),
    nn.Tanh: (Move(_tanh_run, _tanh_back),),
    Tempered: (Move(_tempered_run, _tempered_back),),
    Centre: (Move(_centre_run, _centre_back, spare=True),),
    nn.Flatten: (Move(_flatten_run, _flatten_back),),
    nn.MaxPool2d: (Move(_pairs_run, _pairs_back, _pairs_suit, output=_pairs_output), Move(_max_run, _max_back)),
    nn.AvgPool2d: (Move(_average_run, _average_back),),
    nn.AdaptiveAvgPool2d: (Move(_mean_run, _mean_back, _mean_suits), ANY),
}
"""For each class of layers its moves; the first that suits is taken."""


def find_move(layer: nn.Module, x: Tensor) -> Move:
    """How `layer` goes forward and back on inputs like x."""
    return next(move for move in MOVES.get(type(layer), (ANY,)) if move.suits(layer, x))
