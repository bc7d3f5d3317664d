"""Forward and backward of a plain sequence of layers. The model is not changed, so that threads may share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fulcrum.data.records import ModelInputs, list_input_tensors
from fulcrum.gradients.layer_ops import LayerOp, LayerParams, find_layer_op
from fulcrum.gradients.outer_products import ConvPatches
from fulcrum.gradients.program import GradProgram, SequenceNode, UnsupportedModel


class RecordedStep(NamedTuple):
    """One layer's forward pass, and what its backward pass needs."""

    node: SequenceNode
    move: LayerOp
    params: LayerParams | tuple[LayerParams, ...]
    """Of the layer; one of each part where the batch has several (`Parts`) and they train the layer."""
    memo: Any
    x: Tensor
    out: torch.Size
    """Shape of the output."""

    @property
    def seen(self) -> Tensor | ConvPatches:
        """What the layer's parameter gradients are computed from: its input, or the patches of its input."""
        return self.memo if isinstance(self.memo, ConvPatches) else self.x

    @property
    def elements(self) -> int:
        """Number of elements kept for the layer: its input, its output, and its patches if any."""
        patches = self.memo.values.numel() if isinstance(self.memo, ConvPatches) else 0
        return self.x.numel() + self.out.numel() + patches


Parts = tuple[slice, ...]
"""Parts of a batch that have weights of their own: the clients that go side by side. Empty: one set of weights."""


def prepare_weights(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """The parameters in the memory layout of a sequence: on a CPU, kernels with channels last."""
    return tuple(_to_channels_last(t) if t.dim() == 4 and device.type == "cpu" else t for t in tensors)


def _to_channels_last(weight: Tensor) -> Tensor:
    if weight.shape[1] > 1:
        return weight.contiguous(memory_format=torch.channels_last)
    # With one channel both layouts have the same bytes; the stride decides the layout of the output.
    _, _, height, width = weight.shape
    return weight.contiguous().as_strided(weight.shape, (height * width, 1, width, 1))


def require_single_input(x: ModelInputs) -> Tensor:
    """The single input tensor of a sequence. Raises UnsupportedModel where there are several."""
    first, *others = list_input_tensors(x)
    if others:
        raise UnsupportedModel("a sequence takes one input")
    return first


@torch.no_grad()
def forward_sequence(
    program: GradProgram, tensors: tuple[Tensor, ...], x: Tensor, keep: bool = True
) -> tuple[Tensor, list[RecordedStep]]:
    """The outputs for a batch x, and (if `keep`) the steps for the backward pass. Raises UnsupportedModel where a
    layer does not treat the first dimension as the batch."""
    return forward_parts(program, (tensors,), (), x, keep)


@torch.no_grad()
def forward_parts(
    program: GradProgram, tensors: Sequence[tuple[Tensor, ...]], parts: Parts, x: Tensor, keep: bool = True
) -> tuple[Tensor, list[RecordedStep]]:
    """As `forward_sequence`, where each part of the batch has weights of its own, `tensors` in the parts' order."""
    h, mine, steps = x.detach(), False, []
    for node in program.sequence:
        layer = node.layer
        if node.kind is not None and not node.kind.fits(layer, h):
            raise UnsupportedModel(f"{type(layer).__name__} does not see one example per row")
        move = find_layer_op(layer, h)
        params: LayerParams | tuple[LayerParams, ...] = node.frozen
        if node.site is not None:
            own = node.site.own.items()
            each = tuple({**node.frozen, **{name: given[place] for name, place in own}} for given in tensors)
            params = each if parts else each[0]
        if move.output is not None and not keep and not isinstance(params, tuple):
            h = move.output(layer, h, params)
        else:
            x = h
            if isinstance(params, tuple):
                h, memo = _run_parts(move, layer, h, params, parts, mine)
            else:
                h, memo = move.run(layer, h, params, mine)
            if keep:
                steps.append(RecordedStep(node, move, params, memo, x, h.shape))
        mine = move.spare
    return h, steps


def _run_parts(
    move: LayerOp, layer: nn.Module, x: Tensor, params: tuple[LayerParams, ...], parts: Parts, mine: bool
) -> tuple[Tensor, Any]:
    if move.run_parts is not None:
        return move.run_parts(layer, x, params, parts)
    found = [move.run(layer, x[part], own, mine) for part, own in zip(parts, params, strict=True)]
    return torch.cat([out for out, _ in found]), [memo for _, memo in found]


def _pass_back(step: RecordedStep, parts: Parts, g: Tensor) -> Tensor:
    """The gradient of a step's input."""
    back, layer, memo, params = step.move.back, step.node.layer, step.memo, step.params
    if not isinstance(params, tuple):
        return back(layer, memo, params, g)
    memos = memo if isinstance(memo, list) else [memo] * len(parts)
    each = zip(memos, params, parts, strict=True)
    return torch.cat([back(layer, kept, own, g[part]) for kept, own, part in each])


@torch.no_grad()
def backward_sequence(
    steps: list[RecordedStep], g: Tensor, collect: Callable[[RecordedStep, Tensor], None], parts: Parts = ()
) -> None:
    """Passes the gradient of every site's output to `collect`, last layer first, and frees the memos."""
    first = next((n for n, step in enumerate(steps) if step.node.site is not None), len(steps))
    while len(steps) > first:
        step = steps.pop()
        if step.node.site is not None:
            collect(step, g)
        if len(steps) > first:
            g = _pass_back(step, parts, g)
