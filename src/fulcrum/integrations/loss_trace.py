"""The loss of each example, from a loop that computes one loss for the whole batch.

A model's outputs are handed to the loop as `TracedTensor`s: every call on them is noted. When the loop calls
`loss.backward()`, the noted calls are played again for each example alone: its rows of the outputs and of the targets,
nothing of anybody else's. The gradients of these losses, and no others, go back through the model. So an example's
gradient cannot depend on the batch that it is in, whatever the loop's loss does: it need not be undone, divided or
trusted. A loss that is not a mean or a sum over examples is noticed, since it is not that of theirs, and refused.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from fulcrum.errors import ModelError, RunError

TOLERANCE = 0.02
"""Relative difference between the batch's loss and the mean (or sum) of the examples' losses; bf16 needs this much."""

NO_SUM = (
    "the loss is neither the mean nor the sum of what it is for each example alone, so it mixes the examples of a "
    "batch; use a mean or a sum of the examples' own losses."
)

SendBack = Callable[[Tensor, list[Tensor]], None]
"""(losses [B], gradient of each output) -> back through the model."""


# --- functions of which more is known -------------------------------------------------------------


def compute_own_means(function: Any, examples: int, bound: dict[str, Any]) -> Tensor:
    """A loss over targets, for each example the mean over its own targets, [examples]; class weights count.

    `F.cross_entropy` itself divides by the number of targets, or the sum of class weights, of the whole batch.
    """
    target: Tensor = bound["target"]
    ignored = bound.get("ignore_index", -100)
    each: Tensor = function(**{**bound, "reduction": "none"}).reshape(examples, -1)
    if target.is_floating_point():
        return each.mean(dim=1)
    counts = (target != ignored).reshape(examples, -1).sum(dim=1).clamp_min(1)
    own: Tensor = each.sum(dim=1) / counts
    return own


OWN_MEANS = (F.cross_entropy, F.nll_loss)
"""Functions whose mean divides by a number that depends on the whole batch (class weights, ignored targets)."""

SHARED_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.cross_entropy: ("weight",),
    F.nll_loss: ("weight",),
    F.binary_cross_entropy_with_logits: ("pos_weight",),
}
"""Arguments that have one entry per class, so they are no rows of examples even where the lengths are equal."""

RESCALING = frozenset(
    {torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide}
    | {getattr(Tensor, name) for name in ("mul", "mul_", "multiply", "div", "div_", "divide", "true_divide")}
    | {Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__imul__, Tensor.__itruediv__}
)
RESHAPING = frozenset({Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand, Tensor.unflatten})


# --- what is noted --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ref:
    """A traced value: an output of the model, or the result of a noted call."""

    place: int


@dataclass(frozen=True)
class Constant:
    """An argument that does not come from the model: a target, a number."""

    value: Any
    name: str = ""
    """As an argument, where the function is in `SHARED_ARGUMENTS`."""


@dataclass(frozen=True)
class NotedCall:
    """function(*args, **kwargs), with arguments as leaves of a tree, and the places of its results."""

    function: Any
    leaves: tuple[Ref | Constant, ...]
    shape: Any
    results: tuple[int | None, ...]


@dataclass
class LossHistory:
    """Numbers in the losses so far, by their place in the loop's code: those that rescale a loss must not change.

    public_numbers: whether the user says that they follow from public things alone, such as a schedule. reduction:
    "mean" or "sum" as the loop's own losses turned out; "" until a batch of several examples has shown it.
    """

    accumulate: int = 1
    public_numbers: bool = False
    reduction: str = ""
    numbers: dict[Any, float] = field(default_factory=dict)
    sizes: dict[Any, bool] = field(default_factory=dict)
    passes: int = 0

    def is_check_due(self) -> bool:
        """Whether this pass compares the loss with the examples' own: the first ten do, then every tenth."""
        self.passes += 1
        return self.passes <= 10 or self.passes % 10 == 0


class LossTrace:
    """The calls on the outputs of one forward pass of B examples."""

    def __init__(self, count: int, history: LossHistory, send_back: SendBack) -> None:
        self.count, self.history, self._send_back = count, history, send_back
        self._outputs: list[Tensor] = []
        self._calls: list[NotedCall] = []
        self._lengths: dict[int, int] = {}
        self._number = 0
        self._objection = ""
        self._done = False

    def hand_over(self, outputs: Any) -> Any:
        """The model's outputs for the loop: tensors with one example per row are traced."""
        leaves, shape = tree_flatten(outputs)
        return tree_unflatten([self._trace_output(leaf) for leaf in leaves], shape)

    def _trace_output(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != self.count:
            return leaf
        self._outputs.append(leaf)
        return self._wrap(leaf)

    def _wrap(self, value: Tensor) -> TracedTensor:
        traced = value if isinstance(value, TracedTensor) else value.as_subclass(TracedTensor)
        traced.noted_by, traced.place = self, self._number
        self._lengths[self._number] = len(value) if value.dim() else 0
        self._number += 1
        return traced

    def note(self, function: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """Notes a call with its result; returns the result, traced."""
        if function is Tensor.__setitem__:
            self._objection = "an output of the model is written to in place"
        if self._done or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
            return out
        named = function in SHARED_ARGUMENTS
        if named:
            bound = inspect.signature(function).bind(*args, **kwargs)
            args, kwargs = (), dict(bound.arguments)
        paths, shape = tree_flatten_with_path((args, kwargs))
        leaves = tuple(
            Ref(leaf.place)
            if isinstance(leaf, TracedTensor)
            else Constant(leaf, str(getattr(path[1], "key", "")) if named and len(path) > 1 else "")
            for path, leaf in paths
        )
        found, out_shape = tree_flatten(out)
        wrapped = [self._wrap(leaf) if isinstance(leaf, Tensor) else leaf for leaf in found]
        places = tuple(leaf.place if isinstance(leaf, TracedTensor) else None for leaf in wrapped)
        self._calls.append(NotedCall(function, leaves, shape, places))
        return tree_unflatten(wrapped, out_shape)

    # --- backward -----------------------------------------------------------------------------------

    def backward(self, loss: TracedTensor, place: int) -> None:
        """Called in place of `loss.backward()`."""
        if self._done:
            raise RunError("backward() was called twice for one forward pass; call the model once for each backward().")
        if loss.numel() != 1:
            raise ModelError("backward() needs one number for the batch: the mean or the sum of the examples' losses.")
        if self._objection:
            raise ModelError(f"{self._objection}, so the loss of a single example cannot be computed; leave it out.")
        outputs, needed = self._outputs, self._select_calls(place)
        self._done, self._outputs, self._calls = True, [], []
        if not self.count:
            self._send_back(torch.zeros(0), [])
            return
        program = LossProgram.of(needed, place, len(outputs), self.count, self._lengths, self.history)
        leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in outputs]
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about batches of one, which nobody but this file makes
            losses = program.compute_losses(leaves)
            moved = [leaf for leaf in leaves if leaf.requires_grad]
            found = torch.autograd.grad(losses.sum(), moved, allow_unused=True, materialize_grads=True)
        losses = losses.detach()
        if self.history.is_check_due():
            program.check_sum(losses, found, outputs, self.history)
        self._send_back(losses, list(found))

    def _select_calls(self, place: int) -> list[NotedCall]:
        """The calls that a value depends on, in their order."""
        wanted, needed = {place}, []
        for call in reversed(self._calls):
            if wanted.intersection(p for p in call.results if p is not None):
                needed.append(call)
                wanted |= {leaf.place for leaf in call.leaves if isinstance(leaf, Ref)}
        return needed[::-1]


class TracedTensor(Tensor):
    """A tensor that came from a model's outputs. It behaves as any other; its trace notes what is done with it."""

    noted_by: LossTrace
    place: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traces = {
            id(leaf.noted_by): leaf.noted_by for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TracedTensor)
        }
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.backward:
                return args[0].noted_by.backward(args[0], args[0].place)
            if func is Tensor.__format__:
                return args[0].as_subclass(Tensor).__format__(*args[1:])
            out = func(*args, **kwargs)
            if len(traces) == 1:
                return next(iter(traces.values())).note(func, args, kwargs, out)
            # Values of two passes, such as a running sum of losses: nothing that may go back through the model.
            return out.as_subclass(Tensor) if isinstance(out, TracedTensor) else out


# --- the loss of one example ----------------------------------------------------------------------


@dataclass(frozen=True)
class LossProgram:
    """The noted calls, ready to be played for one example.

    rows: constants with rows of examples, [B, rows of one example, ...]. fixed: all other ones, as they are for one
    example. whole: all, as they are for the batch. Each by (call, leaf).
    """

    calls: list[NotedCall]
    place: int
    outputs: int
    count: int
    rows: dict[tuple[int, int], Tensor]
    fixed: dict[tuple[int, int], Any]
    whole: dict[tuple[int, int], Any]

    @staticmethod
    def of(
        calls: list[NotedCall], place: int, outputs: int, count: int, lengths: dict[int, int], history: LossHistory
    ) -> LossProgram:
        """Decides of each constant whether it has rows of examples; refuses numbers that rescale and change."""
        rows: dict[tuple[int, int], Tensor] = {}
        fixed: dict[tuple[int, int], Any] = {}
        whole: dict[tuple[int, int], Any] = {}
        for i, call in enumerate(calls):
            key = (getattr(call.function, "__name__", str(call.function)), len(calls) - i)  # counted from the loss
            partners = {lengths[leaf.place] for leaf in call.leaves if isinstance(leaf, Ref)}
            for j, leaf in enumerate(call.leaves):
                if isinstance(leaf, Ref):
                    continue
                value = leaf.value
                if isinstance(value, Tensor) and value.requires_grad:
                    raise ModelError(
                        "the loss adds something that needs a gradient and does not come from the model's outputs; "
                        "give a penalty on the weights as penalty= (or the optimizer's weight_decay), and let "
                        "everything that sees data pass through the model."
                    )
                each = count_rows_of_example(value, count, partners, shared=leaf.name in _shared(call.function))
                whole[i, j] = value
                if each:
                    rows[i, j] = value.detach().reshape(count, each, *value.shape[1:])
                else:
                    fixed[i, j], whole[i, j] = _settle_number(value, call, j, (*key, j), count, history)
        return LossProgram(calls, place, outputs, count, rows, fixed, whole)

    def compute_losses(self, outputs: list[Tensor]) -> Tensor:
        """The loss of each example, [B]."""
        if len(self.calls) == 1 and self.calls[0].function in OWN_MEANS and self._has_rows_only(outputs):
            leaves = [
                outputs[leaf.place] if isinstance(leaf, Ref) else self.whole[0, j]
                for j, leaf in enumerate(self.calls[0].leaves)
            ]
            _, bound = tree_unflatten(leaves, self.calls[0].shape)
            if bound.get("reduction", "mean") == "mean":  # the usual loss: its rows are known to be apart
                return compute_own_means(self.calls[0].function, self.count, bound).float()
        keys = list(self.rows)

        def one(outs: list[Tensor], rows: list[Tensor]) -> Tensor:
            return self._play([out.unsqueeze(0) for out in outs], {**self.fixed, **dict(zip(keys, rows, strict=True))})

        given = (outputs, [self.rows[key] for key in keys])
        try:
            losses: Tensor = torch.func.vmap(one, randomness="different")(*given)
            return losses
        except Exception:
            pass  # a function that vmap does not know: one example after the other
        try:
            every = [one([out[i] for out in outputs], [row[i] for row in given[1]]) for i in range(self.count)]
        except Exception as problem:
            words = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
            raise ModelError(
                f"the loss cannot be computed for one example alone ({words}), so it mixes the examples of a batch or "
                "depends on their number; use a mean or a sum of the examples' own losses."
            ) from None
        return torch.stack(every)

    def _has_rows_only(self, outputs: list[Tensor]) -> bool:
        """Whether the one call's input is an output of the model itself, and its targets have rows of examples."""
        return all(leaf.place < len(outputs) for leaf in self.calls[0].leaves if isinstance(leaf, Ref)) and bool(
            self.rows
        )

    def _play(self, outputs: list[Tensor], constants: Mapping[tuple[int, int], Any], examples: int = 1) -> Tensor:
        """The loss of so many examples, from their outputs and constants."""
        values: dict[int, Tensor] = dict(enumerate(outputs))
        for i, call in enumerate(self.calls):
            leaves = [
                values[leaf.place] if isinstance(leaf, Ref) else constants[i, j] for j, leaf in enumerate(call.leaves)
            ]
            args, kwargs = tree_unflatten(leaves, call.shape)
            if call.function in OWN_MEANS and kwargs.get("reduction", "mean") == "mean":
                out = compute_own_means(call.function, examples, kwargs).mean()
            else:
                out = call.function(*args, **kwargs)
            for found, place in zip(tree_leaves(out), call.results, strict=True):
                if place is not None:
                    values[place] = found
        return values[self.place].reshape(()).float()

    def check_sum(self, losses: Tensor, grads: Sequence[Tensor], outputs: list[Tensor], history: LossHistory) -> None:
        """ModelError where the loss of the batch is neither the mean nor the sum of the examples' losses.

        Compared are its value and its gradient in the outputs. Nobody's privacy depends on this: the examples' own
        losses are what is trained on. But a loop that means something else should know.
        """
        if self.count < 2:
            return
        leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in outputs]
        with torch.enable_grad():
            try:
                loss = self._play(leaves, self.whole, self.count)
            except RuntimeError:
                raise ModelError(NO_SUM) from None
            moved = [leaf for leaf in leaves if leaf.requires_grad]
            found = torch.autograd.grad(loss, moved, allow_unused=True, materialize_grads=True)
        value = float(loss.detach())
        if not math.isfinite(value):
            return
        near = []
        for name, share in (("mean", 1.0 / self.count), ("sum", 1.0)):
            pairs = [(torch.stack([loss.detach().double()]), share * losses.double().sum().reshape(1))]
            pairs += [(g.double(), share * own.double()) for g, own in zip(found, grads, strict=True)]
            if all(_is_near(one, other) for one, other in pairs):
                near.append(name)
        if not near or (history.reduction and history.reduction not in near):
            raise ModelError(NO_SUM)
        if len(near) == 1:
            history.reduction = near[0]


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree but for rounding."""
    room = TOLERANCE * torch.maximum(one.norm(), other.norm()) + 1e-6
    return bool((one - other).norm() <= room)


def _shared(function: Any) -> tuple[str, ...]:
    return SHARED_ARGUMENTS.get(function, ())


def count_rows_of_example(value: Any, count: int, partners: set[int], shared: bool = False) -> int:
    """How many rows of a constant belong to each example; 0 where it has none of them.

    [B, ...] has one each; [B * T, ...] beside a traced value of as many rows has T each.
    """
    if not isinstance(value, Tensor) or value.dim() == 0 or shared:
        return 0
    if len(value) == count:
        return 1
    return len(value) // count if len(value) in partners and len(value) % count == 0 else 0


def summarise(value: Tensor) -> float:
    """A number by which a tensor is known to have changed."""
    flat = value.detach().reshape(-1).double()
    places = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
    return float((flat * torch.cos(places)).sum()) if flat.numel() else 0.0


def _settle_number(
    value: Any, call: NotedCall, leaf: int, key: Any, count: int, history: LossHistory
) -> tuple[Any, Any]:
    """A number as it is for one example, where the batch size is 1, and for the batch.

    One that rescales the loss must never change, unless it is the batch size. The number of accumulated batches is
    left out: a step divides by its whole expected batch anyway.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if call.function in RESHAPING and number:
        # The first size that is the batch size; view(-1, V) and view(B, -1) both work.
        first = next((j for j, each in enumerate(call.leaves) if isinstance(each, Constant)), -1)
        return (1 if leaf == first and value == count else value), value
    if call.function in RESCALING and (number or (isinstance(value, Tensor) and value.numel() == 1)):
        now = float(value)
        # "The batch size" is what equals it in every batch; a number that equals it by chance once is a number.
        is_size = history.sizes.get(key, True) and now in (float(count), float(count * history.accumulate))
        history.sizes[key] = is_size
        if is_size:
            return 1, count
        if history.accumulate > 1 and now in (float(history.accumulate), 1.0 / history.accumulate):
            return 1, 1
    elif isinstance(value, Tensor):
        now = summarise(value)
    elif isinstance(value, float):
        now = value
    else:
        return value, value
    if history.numbers.setdefault(key, now) != now and not history.public_numbers:
        raise ModelError(
            "the loss uses a number, or a tensor without rows of examples, that changes from batch to batch, so it may "
            "depend on other examples (a count of tokens, a scaler, a mean of the batch); let each example's loss use "
            "its own numbers, or say public_numbers=True if it follows from a schedule alone."
        )
    return value, value
