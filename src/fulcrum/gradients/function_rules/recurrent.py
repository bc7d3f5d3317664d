"""LSTM and GRU: their gates are two linear layers over all steps, and what is between them has no parameters.

z_t = W_ih x_t + b_ih + W_hh h_(t-1) + b_hh. The first half is one product for all steps. The scan over the steps is a
function of its own with a hand-written backward pass, which gives the gradient of every z_t: with x_t and h_(t-1) it
makes the gradients of both weights, and its sum over the steps those of both biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import _VF, Tensor
from torch.nn import functional as F

from fulcrum.gradients.call_plan import Axis
from fulcrum.gradients.outer_products import LinearGrad, WeightGradCost
from fulcrum.gradients.param_grads import MaterialisedGrad
from fulcrum.gradients.uses import ParameterUse, UseRecorder, register_function_rule


class LstmScan(torch.autograd.Function):
    """z [T, B, 4H] (without the recurrent part), h0, c0 [B, H], W [4H, H] -> h [T, B, H] and the last c [B, H]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, h: Tensor, c: Tensor, weight: Tensor, kept: dict[str, Tensor]) -> Any:
        steps, count, wide = z.shape
        size = wide // 4
        gates, cells = torch.empty_like(z), z.new_empty(steps + 1, count, size)
        hidden = z.new_empty(steps + 1, count, size)
        hidden[0], cells[0] = h, c
        turned = weight.t()
        for t in range(steps):
            own = torch.addmm(z[t], hidden[t], turned, out=gates[t])
            own[:, : 2 * size].sigmoid_()
            own[:, 2 * size : 3 * size].tanh_()
            own[:, 3 * size :].sigmoid_()
            i, f, g, o = own.split(size, dim=1)
            torch.mul(f, cells[t], out=cells[t + 1]).addcmul_(i, g)
            torch.tanh(cells[t + 1], out=hidden[t + 1]).mul_(o)
        ctx.save_for_backward(gates, cells, weight)
        kept["before"] = hidden[:-1]
        return hidden[1:], cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dh_out, dc_last = grads
        gates, cells, weight = ctx.saved_tensors
        size = gates.shape[2] // 4
        i, f, g, o = gates.split(size, dim=2)
        bent = torch.tanh(cells[1:])
        by_cell = torch.cat([i * (1 - i) * g, f * (1 - f) * cells[:-1], (1 - g * g) * i], dim=2)
        by_hidden, through = o * (1 - o) * bent, o * (1 - bent * bent)
        dz = torch.empty_like(gates)
        dc = dc_last.clone()
        dh = torch.zeros_like(dc)
        for t in range(len(gates) - 1, -1, -1):
            dh = dh + dh_out[t]
            dc.addcmul_(dh, through[t])
            torch.mul(dc.repeat(1, 3), by_cell[t], out=dz[t, :, : 3 * size])
            torch.mul(dh, by_hidden[t], out=dz[t, :, 3 * size :])
            dc.mul_(f[t])
            dh = dz[t] @ weight
        return dz, dh, dc, None, None


class GruScan(torch.autograd.Function):
    """z [T, B, 3H] (without the recurrent part), h0 [B, H], W [3H, H], b [3H] -> h [T, B, H]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, h: Tensor, weight: Tensor, bias: Tensor, kept: dict[str, Tensor]) -> Any:
        steps, count, wide = z.shape
        size = wide // 3
        hidden, gates, inner = z.new_empty(steps + 1, count, size), torch.empty_like(z), z.new_empty(steps, count, size)
        hidden[0] = h
        turned = weight.t()
        for t in range(steps):
            again = torch.addmm(bias, hidden[t], turned)
            both = (z[t, :, : 2 * size] + again[:, : 2 * size]).sigmoid_()
            inner[t] = again[:, 2 * size :]
            new = torch.tanh(z[t, :, 2 * size :] + both[:, :size] * inner[t])
            gates[t, :, : 2 * size], gates[t, :, 2 * size :] = both, new
            hidden[t + 1] = new + both[:, size:] * (hidden[t] - new)
        ctx.save_for_backward(gates, inner, hidden, weight)
        ctx.kept = kept
        kept["before"] = hidden[:-1]
        return hidden[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dh_out,) = grads
        gates, inner, hidden, weight = ctx.saved_tensors
        size = gates.shape[2] // 3
        r, u, n = gates.split(size, dim=2)
        to_new, to_update = (1 - u) * (1 - n * n), (hidden[:-1] - n) * u * (1 - u)
        to_reset = inner * r * (1 - r)
        dz, again = torch.empty_like(gates), torch.empty_like(gates)
        dh = torch.zeros_like(dh_out[0])
        for t in range(len(gates) - 1, -1, -1):
            dh = dh + dh_out[t]
            new = dh * to_new[t]
            dz[t] = torch.cat([new * to_reset[t], dh * to_update[t], new], dim=1)
            again[t] = dz[t]
            again[t, :, 2 * size :] *= r[t]
            dh = torch.addmm(dh * u[t], again[t], weight)
        ctx.kept["again"] = again
        return dz, dh, None, None, None


def _take_apart(
    recorder: UseRecorder,
    input: Any,
    hx: Any,
    params: Any,
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, list[list[Tensor]]]:
    """The input as [B, T, I], and the parameters of each layer and direction."""
    used = recorder.find_parameters((params,), {}) if isinstance(params, list | tuple) else []
    if not isinstance(params, list | tuple) or not isinstance(has_biases, bool) or input.dim() != 3:
        raise recorder.refuse("packed sequences, or no batch", *(used or recorder.tensors))
    each = 4 if has_biases else 2
    if len(params) != each * layers * (2 if bidirectional else 1):
        raise recorder.refuse("a recurrent layer with a projection", *used)
    x = input if batch_first else input.transpose(0, 1)
    axis = recorder.find_axis(input)
    if not isinstance(axis, Axis) or axis.dim != (0 if batch_first else 1):
        raise recorder.refuse("a recurrent layer over the batch", *used)
    return x, [list(params[n : n + each]) for n in range(0, len(params), each)]


def _tap_gates(recorder: UseRecorder, x: Tensor, own: Sequence[Tensor], kept: dict[str, Tensor]) -> Tensor:
    """z = x W_ih^T + b_ih [B, T, gates], tapped for all parameters of a layer and direction."""
    w_ih, w_hh, *biases = own
    seen = x.detach()
    out = F.linear(x, w_ih, biases[0] if biases else None)

    def again(g: Tensor) -> Tensor:
        """The gradient of the recurrent part: g itself, or for a GRU what its scan left."""
        return kept["again"].transpose(0, 1) if "again" in kept else g

    def recurrent(g: Tensor) -> LinearGrad:
        return LinearGrad(_turn(kept["before"].transpose(0, 1), kept), _turn(again(g), kept, "again" in kept))

    def cost(weight: Tensor) -> WeightGradCost:
        return WeightGradCost.of(x, 1, x.shape[1], weight.shape[1], weight.shape[0])

    uses = [
        ParameterUse(w_ih, lambda g: LinearGrad(seen, g), cost(w_ih)),
        ParameterUse(w_hh, recurrent, cost(w_hh)),
    ]
    if biases:
        uses.append(ParameterUse(biases[0], lambda g: MaterialisedGrad(g.sum(dim=1))))
        uses.append(ParameterUse(biases[1], lambda g: MaterialisedGrad(again(g).sum(dim=1))))
    return recorder.tap(out, uses, (x,))


def _turn(values: Tensor, kept: dict[str, Tensor], wanted: bool = True) -> Tensor:
    """Steps [B, T, ...] in the order of the input: a backward scan has them the other way round."""
    return values.flip(1) if wanted and "reversed" in kept else values


def _begin(recorder: UseRecorder, state: Any, n: int, like: Tensor) -> Tensor:
    return state[n].to(like.dtype)  # type: ignore[no-any-return]


@register_function_rule(_VF.lstm)
def use_lstm(
    recorder: UseRecorder,
    function: Any,
    input: Any,
    hx: Any,
    params: Any,
    has_biases: Any,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Any:
    """`nn.LSTM` of any depth, in one direction or both."""
    x, parts = _take_apart(recorder, input, hx, params, has_biases, num_layers, bidirectional, batch_first)
    last_h, last_c = [], []
    with torch.autocast(x.device.type, enabled=False):
        x = x.float() if x.element_size() < 4 else x
        for layer in range(num_layers):
            sides = []
            for way in range(2 if bidirectional else 1):
                n = layer * (2 if bidirectional else 1) + way
                own, kept = parts[n], ({"reversed": x} if way else {})
                z = _tap_gates(recorder, x, own, kept)
                bias = 0 if len(own) == 2 else own[3].detach()
                z = (z.flip(1) if way else z).transpose(0, 1) + bias
                h, c = (_begin(recorder, state, n, x) for state in hx)
                found, cell = LstmScan.apply(z, h, c, own[1].detach(), kept)  # type: ignore[no-untyped-call]
                last_h.append(found[-1])
                last_c.append(cell)
                found = found.transpose(0, 1)
                sides.append(found.flip(1) if way else found)
            x = torch.cat(sides, dim=2) if len(sides) > 1 else sides[0]
            if dropout and train and layer + 1 < num_layers:
                x = F.dropout(x, dropout)
    return (x if batch_first else x.transpose(0, 1)), torch.stack(last_h), torch.stack(last_c)


@register_function_rule(_VF.gru)
def use_gru(
    recorder: UseRecorder,
    function: Any,
    input: Any,
    hx: Any,
    params: Any,
    has_biases: Any,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Any:
    """`nn.GRU` of any depth, in one direction or both."""
    x, parts = _take_apart(recorder, input, hx, params, has_biases, num_layers, bidirectional, batch_first)
    last = []
    with torch.autocast(x.device.type, enabled=False):
        x = x.float() if x.element_size() < 4 else x
        for layer in range(num_layers):
            sides = []
            for way in range(2 if bidirectional else 1):
                n = layer * (2 if bidirectional else 1) + way
                own, kept = parts[n], ({"reversed": x} if way else {})
                z = _tap_gates(recorder, x, own, kept)
                bias = own[1].new_zeros(len(own[1])) if len(own) == 2 else own[3].detach()
                z = (z.flip(1) if way else z).transpose(0, 1)
                found = GruScan.apply(z, _begin(recorder, hx, n, x), own[1].detach(), bias, kept)  # type: ignore[no-untyped-call]
                last.append(found[-1])
                found = found.transpose(0, 1)
                sides.append(found.flip(1) if way else found)
            x = torch.cat(sides, dim=2) if len(sides) > 1 else sides[0]
            if dropout and train and layer + 1 < num_layers:
                x = F.dropout(x, dropout)
    return (x if batch_first else x.transpose(0, 1)), torch.stack(last)
