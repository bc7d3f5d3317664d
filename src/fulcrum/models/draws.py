"""Random layers (dropout and its relatives) by numbers of our own: a key per example, no global generator.

    with KeyedDraws(keys):       # keys [B], int64: one per example
        model(x)                 # F.dropout, stochastic depth, attention's dropout, ... draw by these keys

An example's numbers follow from its key, the number of the call within the pass and the place within the example alone.
They are the same in a batch of any size, in vmap, and on every device. Keys come from the run's private streams, so
that a seeded run repeats them and a resumed one goes on with them (`training.client`).

The hash is the finaliser of SplitMix64 on key + place; its 53 upper bits are compared with a probability. Masks decide
which part of the network learns, and protect nobody: noise and sampling never come from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _VF, Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from fulcrum.errors import ModelError

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64
BITS = 53


def scramble(words: Tensor) -> Tensor:
    """The finaliser of SplitMix64, word by word; int64 stands for 64 unsigned bits."""
    words = (words ^ _shift(words, 30)) * FIRST_FACTOR
    words = (words ^ _shift(words, 27)) * SECOND_FACTOR
    mixed: Tensor = words ^ _shift(words, 31)
    return mixed


def _shift(words: Tensor, places: int) -> Tensor:
    """A logical shift to the right; that of int64 repeats the sign."""
    shifted: Tensor = (words >> places) & (2 ** (64 - places) - 1)
    return shifted


def _wrap(number: int) -> int:
    """A number modulo 2^64, as int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


def make_example_keys(seed: int, rows: Tensor) -> Tensor:
    """A key for each example, [B] int64, from a step's secret seed (64 bits, signed) and the examples' rows [B]."""
    return scramble(scramble(rows.long() * GOLDEN + seed) + seed)


class KeyedDraws(TorchFunctionMode):
    """While it is active, functions of PyTorch that draw random numbers draw them by the keys [B] of the examples."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys, self.calls = keys, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RANDOM_FUNCTIONS.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(self, func, *args, **(kwargs or {}))

    def integers(self, shape: Sequence[int]) -> Tensor:
        """Whole numbers in [0, 2^53), int64; the shape begins with the examples, or a multiple of them."""
        count, size = len(self.keys), math.prod(shape)
        if not shape or shape[0] % count or not size:
            raise ModelError(
                f"A random layer draws numbers of shape {list(shape)} for {count} examples: they must be drawn for "
                "each example by itself, [examples, ...]."
            )
        self.calls += 1
        own = scramble(self.keys + _wrap(self.calls * GOLDEN))
        places = torch.arange(1, size // count + 1, device=own.device) * GOLDEN
        return _shift(scramble(own[:, None] + places), 64 - BITS).reshape(tuple(shape))

    def keep(self, shape: Sequence[int], p: float) -> Tensor:
        """Whether each entry is kept, bool: dropped with probability p."""
        kept: Tensor = self.integers(shape) >= math.ceil(float(p) * 2**BITS)
        return kept

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Numbers in (0, 1) of the type of `like`; never 0 or 1."""
        numbers = (self.integers(shape).to(torch.float64) + 0.5) / 2**BITS
        least, most = torch.finfo(like.dtype).tiny, 1 - torch.finfo(like.dtype).eps / 2
        held: Tensor = numbers.to(like.dtype).clamp(least, most)
        return held


def find_active_draws() -> KeyedDraws | None:
    """The draws in which a model is running; None outside of any."""
    modes = _get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, KeyedDraws)), None)


RANDOM_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Functions that draw random numbers -> rule(draws, function, *args, **kwargs)."""


def _draws_for(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(rule: Callable[..., Any]) -> Callable[..., Any]:
        RANDOM_FUNCTIONS.update(dict.fromkeys(functions, rule))
        return rule

    return add


# --- dropout --------------------------------------------------------------------------------------


@_draws_for(F.dropout, torch.dropout)
def _drop(
    draws: KeyedDraws, function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _apply_mask(draws, input, p, training, inplace, input.shape)


@_draws_for(torch.dropout_)
def _drop_in_place(draws: KeyedDraws, function: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return _apply_mask(draws, input, p, train, True, input.shape)


@_draws_for(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
def _drop_channels(
    draws: KeyedDraws, function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
    return _apply_mask(draws, input, p, training, inplace, shape)


def _apply_mask(
    draws: KeyedDraws, input: Tensor, p: float, training: bool, inplace: bool, shape: Sequence[int]
) -> Tensor:
    if not training or not p:
        return input
    if p >= 1:
        out = input * 0
    else:
        out = torch.where(draws.keep(shape, p), input, torch.zeros((), dtype=input.dtype, device=input.device))
        out = out / (1 - p)
    return input.copy_(out) if inplace else out


SELU_ALPHA = -1.7580993408473766


@_draws_for(F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout)
def _drop_alpha(
    draws: KeyedDraws, function: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    if not training or not p:
        return input
    by_channel = "feature" in function.__name__
    shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if by_channel else input.shape
    scale = ((1 - p) * (1 + p * SELU_ALPHA**2)) ** -0.5
    kept = draws.keep(shape, p)
    out = scale * torch.where(kept, input, torch.full((), SELU_ALPHA, dtype=input.dtype, device=input.device))
    out = out - scale * SELU_ALPHA * p
    return input.copy_(out) if inplace else out


# --- attention ------------------------------------------------------------------------------------


@_draws_for(F.scaled_dot_product_attention)
def _attend(
    draws: KeyedDraws,
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not dropout_p:
        given = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return function(query, key, value, **given)  # type: ignore[no-any-return]
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else query.shape[-1] ** -0.5)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(dim=-1)
    return _apply_mask(draws, weights, dropout_p, True, False, weights.shape) @ value


@_draws_for(F.multi_head_attention_forward)
def _attend_with_heads(draws: KeyedDraws, function: Any, *args: Any, **kwargs: Any) -> Any:
    """`nn.MultiheadAttention` with dropout, from linear layers; without dropout it runs as it is."""
    names = MULTI_HEAD_ARGUMENTS
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.get("dropout_p") or not given.get("training", True):
        return function(*args, **kwargs)
    if any(given.get(name) is not None for name in ("bias_k", "bias_v", "static_k", "static_v")) or given.get(
        "add_zero_attn"
    ):
        raise ModelError("nn.MultiheadAttention with added keys and dropout is not followed; set its dropout to 0.")
    query, key, value, heads = given["query"], given["key"], given["value"], given["num_heads"]
    (length, count, width), source = query.shape, key.shape[0]
    sides = [given[name].transpose(0, 1) for name in ("query", "key", "value")]
    if given.get("use_separate_proj_weight"):
        biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
        weights = (given["q_proj_weight"], given["k_proj_weight"], given["v_proj_weight"])
        q, k, v = (F.linear(*each) for each in zip(sides, weights, biases, strict=True))
    elif query is key and key is value:
        q, k, v = F.linear(sides[0], given["in_proj_weight"], given["in_proj_bias"]).chunk(3, dim=-1)
    else:
        whole = [F.linear(side, given["in_proj_weight"], given["in_proj_bias"]).chunk(3, dim=-1) for side in sides]
        q, k, v = whole[0][0], whole[1][1], whole[2][2]

    def split(values: Tensor, steps: int) -> Tensor:
        return values.reshape(count, steps, heads, -1).transpose(1, 2)

    scores = split(q, length) @ split(k, source).transpose(2, 3) / math.sqrt(width // heads)
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if mask is not None:
        mask = mask.view(count, heads, length, source) if mask.dim() == 3 else mask
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if padding is not None:
        padding = padding.view(count, 1, 1, source)
        scores = scores.masked_fill(padding, -math.inf) if padding.dtype == torch.bool else scores + padding
    attention = scores.softmax(dim=-1)
    attention = _apply_mask(draws, attention, given["dropout_p"], True, False, attention.shape)
    mixed = (attention @ split(v, source)).transpose(1, 2).reshape(count, length, width)
    out = F.linear(mixed, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1)
    if not given.get("need_weights", True):
        return out, None
    return out, attention.mean(dim=1) if given.get("average_attn_weights", True) else attention


MULTI_HEAD_ARGUMENTS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask"),
    *("need_weights", "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    *("static_k", "static_v", "average_attn_weights", "is_causal"),
)


# --- recurrent layers -------------------------------------------------------------------------------


@_draws_for(_VF.lstm, _VF.gru, _VF.rnn_tanh, _VF.rnn_relu)
def _recur(draws: KeyedDraws, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Recurrent layers with dropout between them: one call per layer."""
    if not isinstance(args[1], Tensor) and len(args) == 8 and not kwargs:
        hx, flat, has_biases, layers, dropout, train, both, batch_first = args
        packed = False
    else:  # the data of a packed sequence, its batch sizes, ...
        _, hx, flat, has_biases, layers, dropout, train, both = args
        packed, batch_first = True, False
    if not dropout or not train or layers == 1:
        return function(input, *args, **kwargs)
    if packed:
        raise ModelError("dropout between recurrent layers of a packed sequence is not followed; set it to 0.")
    ways = 2 if both else 1
    each = len(flat) // (layers * ways)
    states = hx if isinstance(hx, tuple | list) else (hx,)
    last: list[tuple[Tensor, ...]] = []
    x = input
    for layer in range(layers):
        part = slice(layer * ways, (layer + 1) * ways)
        own = tuple(state[part] for state in states)
        weights = list(flat[layer * ways * each : (layer + 1) * ways * each])
        begin = own if isinstance(hx, tuple | list) else own[0]
        x, *ends = function(x, begin, weights, has_biases, 1, 0.0, train, both, batch_first)
        last.append(tuple(ends))
        if layer + 1 < layers:
            rows = x if batch_first else x.transpose(0, 1)
            rows = _apply_mask(draws, rows, dropout, True, False, rows.shape)
            x = rows if batch_first else rows.transpose(0, 1)
    return (x, *(torch.cat(ends) for ends in zip(*last, strict=True)))


# --- any random numbers -----------------------------------------------------------------------------


@_draws_for(Tensor.bernoulli_)
def _fill_bernoulli(draws: KeyedDraws, function: Any, out: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    chance = draws.integers(out.shape).double() / 2**BITS if isinstance(p, Tensor) else None
    kept = ~draws.keep(out.shape, p) if chance is None else chance < p
    return out.copy_(kept.to(out.dtype))


@_draws_for(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(draws: KeyedDraws, function: Any, input: Tensor, p: Any = None, *, generator: Any = None) -> Tensor:
    chance = draws.integers(input.shape).double() / 2**BITS
    found: Tensor = (chance < (input if p is None else p)).to(input.dtype)
    return found


@_draws_for(torch.rand_like)
def _uniform_like(draws: KeyedDraws, function: Any, input: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
    return draws.uniform(input.shape, input if dtype is None else input.to(dtype))


@_draws_for(torch.randn_like)
def _normal_like(draws: KeyedDraws, function: Any, input: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
    like = input if dtype is None else input.to(dtype)
    return _to_normal(draws.uniform(input.shape, like.double())).to(like.dtype)


@_draws_for(Tensor.uniform_)
def _fill_uniform(
    draws: KeyedDraws, function: Any, out: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> Tensor:
    return out.copy_(low + (high - low) * draws.uniform(out.shape, out))


@_draws_for(Tensor.normal_)
def _fill_normal(
    draws: KeyedDraws, function: Any, out: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> Tensor:
    return out.copy_(mean + std * _to_normal(draws.uniform(out.shape, out.double())))


@_draws_for(Tensor.exponential_)
def _fill_exponential(
    draws: KeyedDraws, function: Any, out: Tensor, lambd: float = 1.0, *, generator: Any = None
) -> Tensor:
    return out.copy_(-draws.uniform(out.shape, out.double()).log() / lambd)


@_draws_for(torch.rand, torch.randn)
def _of_shape(draws: KeyedDraws, function: Any, *size: Any, **given: Any) -> Tensor:
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    kind = {name: value for name, value in given.items() if name in ("dtype", "device")}
    like = torch.empty((), **{"device": draws.keys.device, **kind})
    numbers = draws.uniform(shape, like if function is torch.rand else like.double())
    return numbers if function is torch.rand else _to_normal(numbers).to(like.dtype)


def _to_normal(uniform: Tensor) -> Tensor:
    return math.sqrt(2) * torch.erfinv(2 * uniform - 1)
