"""LSTM, GRU and RNN: their gates are two linear layers over all steps, and what is between them has no parameters.

z_t = W_ih x_t + b_ih + W_hh h_(t-1) + b_hh. The first half is one product for all steps. The scan over the steps is a
function of its own with a hand-written backward pass, which gives the gradient of every z_t: with x_t and h_(t-1) it
makes the gradients of both weights, and its sum over the steps those of both biases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import _VF, Tensor
from torch.nn import functional as F

from fulcrum.gradients.call_plan import Axis
from fulcrum.gradients.function_rules.linear import tap_linear
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


class RnnScan(torch.autograd.Function):
    """z [T, B, H] (without the recurrent part), h0 [B, H], W [H, H] -> h [T, B, H]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, h: Tensor, weight: Tensor, bent: bool, kept: dict[str, Tensor]) -> Any:
        """bent: tanh, else relu."""
        hidden = z.new_empty(len(z) + 1, *z.shape[1:])
        hidden[0], turned = h, weight.t()
        for t in range(len(z)):
            own = torch.addmm(z[t], hidden[t], turned, out=hidden[t + 1])
            own.tanh_() if bent else own.relu_()
        ctx.save_for_backward(hidden, weight)
        ctx.bent = bent
        kept["before"] = hidden[:-1]
        return hidden[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dh_out,) = grads
        hidden, weight = ctx.saved_tensors
        slopes = 1 - hidden[1:].square() if ctx.bent else (hidden[1:] > 0).to(hidden.dtype)
        dz = torch.empty_like(slopes)
        dh = torch.zeros_like(slopes[0])
        for t in range(len(dz) - 1, -1, -1):
            torch.mul(dh + dh_out[t], slopes[t], out=dz[t])
            dh = dz[t] @ weight
        return dz, dh, None, None, None


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


Scan = Callable[[Tensor, int, Sequence[Tensor], dict[str, Tensor]], tuple[Tensor, tuple[Tensor, ...]]]
"""scan(z [T, B, gates], number of layer and direction, its parameters, what is kept) -> h [T, B, H], last states."""


@dataclass(frozen=True)
class _Stack:
    """The arguments that LSTM, GRU and RNN share. params: of all layers and directions."""

    input: Any
    params: Any
    has_biases: Any
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    def run(self, recorder: UseRecorder, scan: Scan) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Layer after layer: the outputs, and the last states of each layer and direction."""
        x, parts = self._take_apart(recorder)
        ways = 2 if self.bidirectional else 1
        last: list[tuple[Tensor, ...]] = []
        with torch.autocast(x.device.type, enabled=False):
            x = x.float() if x.element_size() < 4 else x
            for layer in range(self.num_layers):
                sides = []
                for way in range(ways):
                    n = layer * ways + way
                    kept = {"reversed": x} if way else {}
                    z = _tap_gates(recorder, x, parts[n], kept)
                    found, states = scan((z.flip(1) if way else z).transpose(0, 1), n, parts[n], kept)
                    last.append(states)
                    found = found.transpose(0, 1)
                    sides.append(found.flip(1) if way else found)
                x = torch.cat(sides, dim=2) if ways > 1 else sides[0]
                if self.dropout and self.train and layer + 1 < self.num_layers:
                    x = F.dropout(x, self.dropout)
        return (x if self.batch_first else x.transpose(0, 1)), last

    def _take_apart(self, recorder: UseRecorder) -> tuple[Tensor, list[list[Tensor]]]:
        """The input as [B, T, I], and the parameters of each layer and direction."""
        used = recorder.find_parameters((self.params, self.has_biases), {})
        if not isinstance(self.params, list | tuple) or not isinstance(self.has_biases, bool) or self.input.dim() != 3:
            raise recorder.refuse("packed sequences, or no batch", *used)
        each = 4 if self.has_biases else 2
        if len(self.params) != each * self.num_layers * (2 if self.bidirectional else 1):
            raise recorder.refuse("a recurrent layer with a projection", *used)
        axis = recorder.find_axis(self.input)
        if not isinstance(axis, Axis) or axis.dim != (0 if self.batch_first else 1):
            raise recorder.refuse("a recurrent layer over the batch", *used)
        x = self.input if self.batch_first else self.input.transpose(0, 1)
        return x, [list(self.params[n : n + each]) for n in range(0, len(self.params), each)]


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


def _find_bias(own: Sequence[Tensor]) -> Tensor:
    """The bias of the recurrent part; zeros where there is none."""
    return own[3].detach() if len(own) == 4 else own[1].new_zeros(len(own[1]))


def _stack(states: list[tuple[Tensor, ...]], number: int) -> Tensor:
    return torch.stack([each[number] for each in states])


@register_function_rule(_VF.lstm)
def use_lstm(recorder: UseRecorder, function: Any, input: Any, hx: Any, params: Any, *options: Any) -> Any:
    """`nn.LSTM` of any depth, in one direction or both."""

    def scan(z: Tensor, n: int, own: Sequence[Tensor], kept: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        h, c = (state[n].to(z.dtype) for state in hx)
        found, cell = LstmScan.apply(z + _find_bias(own), h, c, own[1].detach(), kept)  # type: ignore[no-untyped-call]
        return found, (found[-1], cell)

    out, last = _Stack(input, params, *options).run(recorder, scan)
    return out, _stack(last, 0), _stack(last, 1)


@register_function_rule(_VF.gru)
def use_gru(recorder: UseRecorder, function: Any, input: Any, hx: Any, params: Any, *options: Any) -> Any:
    """`nn.GRU` of any depth, in one direction or both."""

    def scan(z: Tensor, n: int, own: Sequence[Tensor], kept: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        found = GruScan.apply(z, hx[n].to(z.dtype), own[1].detach(), _find_bias(own), kept)  # type: ignore[no-untyped-call]
        return found, (found[-1],)

    out, last = _Stack(input, params, *options).run(recorder, scan)
    return out, _stack(last, 0)


@register_function_rule(_VF.rnn_tanh, _VF.rnn_relu)
def use_rnn(recorder: UseRecorder, function: Any, input: Any, hx: Any, params: Any, *options: Any) -> Any:
    """`nn.RNN` of any depth, in one direction or both."""
    bent = function == _VF.rnn_tanh

    def scan(z: Tensor, n: int, own: Sequence[Tensor], kept: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        given = (z + _find_bias(own), hx[n].to(z.dtype), own[1].detach(), bent, kept)
        found = RnnScan.apply(*given)  # type: ignore[no-untyped-call]
        return found, (found[-1],)

    out, last = _Stack(input, params, *options).run(recorder, scan)
    return out, _stack(last, 0)


# --- one step at a time ---------------------------------------------------------------------------


def _tap_step(recorder: UseRecorder, input: Tensor, h: Tensor, own: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """W_ih x + b_ih and W_hh h + b_hh of a cell, [B, gates] each."""
    w_ih, w_hh, *biases = own
    recorder.require_rows(own, input, h)
    b_ih, b_hh = biases or (None, None)
    return tap_linear(recorder, input, w_ih, b_ih), tap_linear(recorder, h, w_hh, b_hh)


@register_function_rule(_VF.lstm_cell)
def use_lstm_cell(recorder: UseRecorder, function: Any, input: Tensor, hx: Any, *own: Any) -> Any:
    """`nn.LSTMCell`."""
    one, other = _tap_step(recorder, input, hx[0], own)
    i, f, g, o = (one + other).chunk(4, dim=1)
    cell = torch.sigmoid(f) * hx[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


@register_function_rule(_VF.gru_cell)
def use_gru_cell(recorder: UseRecorder, function: Any, input: Tensor, hx: Tensor, *own: Any) -> Any:
    """`nn.GRUCell`."""
    one, other = (value.chunk(3, dim=1) for value in _tap_step(recorder, input, hx, own))
    reset, update = torch.sigmoid(one[0] + other[0]), torch.sigmoid(one[1] + other[1])
    new = torch.tanh(one[2] + reset * other[2])
    return new + update * (hx - new)


@register_function_rule(_VF.rnn_tanh_cell, _VF.rnn_relu_cell)
def use_rnn_cell(recorder: UseRecorder, function: Any, input: Tensor, hx: Tensor, *own: Any) -> Any:
    """`nn.RNNCell`."""
    one, other = _tap_step(recorder, input, hx, own)
    return torch.tanh(one + other) if function == _VF.rnn_tanh_cell else torch.relu(one + other)
