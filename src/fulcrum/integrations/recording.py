"""A model's own forward, recorded: in a loop that somebody else wrote, per-example gradients come from its backward.

`ModelRecorder.attach` replaces the model's `forward`. In training mode with gradients on, a call is followed
(`following.py`) with the parameters detached, so that nothing is ever added to a parameter's `.grad`; its outputs are
traced (`loss_trace.py`). Any other call, such as an evaluation, runs the model as it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fulcrum.errors import ModelError
from fulcrum.gradients.tape import EmptyTape, GradientTape
from fulcrum.gradients.uses import UsePlan
from fulcrum.integrations.following import (
    FollowedPass,
    OtherPath,
    PassInputs,
    RecordedPass,
    WholePass,
    find_plan,
    silence,
)
from fulcrum.integrations.loss_trace import LossHistory, LossTrace
from fulcrum.models.layout import ParameterLayout
from fulcrum.rng import torch_generator

AddTape = Callable[[GradientTape, int, str], None]
"""(tape of a pass, number of its examples, precision of its products) -> into the sum of this step."""


class RecordedForward:
    """In place of a model's forward. A copy of the model (averaged weights, say) gets its plain forward back."""

    def __init__(self, recorder: ModelRecorder, run: Callable[..., Any]) -> None:
        self._recorder, self._run = recorder, run
        functools.update_wrapper(self, run)  # with its signature, which some loops look at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.call(self._run, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self._recorder.model))
        return self if twin is None else types.MethodType(type(twin).forward, twin)

    def __reduce__(self) -> Any:
        return getattr, (self._recorder.model, "forward")  # when loaded, that of the class


class ModelRecorder:
    """Records the training passes of one model.

    layout: the parameters that the optimizer trains. expected: examples of an ordinary batch, a public number.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ParameterLayout,
        history: LossHistory,
        add_tape: AddTape,
        draw_keys: Callable[[int], Tensor],
        expected: int = 3,
    ) -> None:
        self._expected = max(3, expected)
        self.model, self.layout, self.history = model, layout, history
        self._add_tape, self._draw_keys = add_tape, draw_keys
        self._plans: dict[Any, UsePlan | None] = {}
        self._plain = False
        self._original: Any = None

    # --- on and off -----------------------------------------------------------------------------

    def attach(self) -> None:
        """From now on the model's training passes are recorded."""
        self._original = self.model.__dict__.get("forward")
        self.model.forward = RecordedForward(self, self.model.forward)

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model; run: its own forward."""
        if self._plain or not (self.model.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        return self._record(run, args, kwargs)

    def detach(self) -> None:
        """The model as it was: nothing is recorded any more."""
        self.model.__dict__.pop("forward", None)
        if self._original is not None:
            self.model.forward = self._original

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Calls of the model are not recorded."""
        before, self._plain = self._plain, True
        try:
            yield
        finally:
            self._plain = before

    # --- one pass -------------------------------------------------------------------------------

    def _record(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map(_detach, (args, kwargs))
        count = count_rows(args, kwargs)
        if count == 0:
            return self._run_without_examples(run, args, kwargs)
        form = describe_form(args, kwargs, count)
        if form not in self._plans:
            self._plans[form] = self._study(args, kwargs, count)
        device = next(iter(self.model.parameters())).device
        precision = check_autocast(device.type)
        given = PassInputs(self.model, self.layout, run, args, kwargs, self._draw_keys(count).to(device))
        plan = self._plans[form]
        followed: RecordedPass
        try:
            if plan is None:
                raise OtherPath
            followed, out = FollowedPass.run(given, plan)
        except OtherPath:
            self._plans[form] = None
            followed, out = WholePass.run(given)
        return self._trace(out, followed, precision)

    def _trace(self, out: Any, followed: RecordedPass, precision: str) -> Any:
        count = followed.count
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
        floats = [leaf for leaf in tree_leaves(out) if _is_traced(leaf, count) and leaf.is_floating_point()]
        if not any(leaf.requires_grad for leaf in floats):
            raise ModelError(
                "the model gives no tensor with one example per row that depends on what is trained, so no loss can be "
                "told apart by examples; let it return its outputs, and compute the loss in the loop."
            )
        allowed = False

        def refuse_other_gradients(g: Tensor) -> None:
            if not allowed:
                raise ModelError(
                    "a gradient reached the model by another way than loss.backward() of a loss of its outputs; "
                    "compute the loss from the outputs of one forward pass, by torch functions, outside of the model "
                    "(for transformers: without labels)."
                )

        for leaf in outputs:
            leaf.register_hook(refuse_other_gradients)

        def send_back(losses: Tensor, grads: list[Tensor]) -> None:
            nonlocal allowed
            allowed = True
            moved = [(leaf, g) for leaf, g in zip(floats, grads, strict=True) if leaf.requires_grad]
            with self._as_it_was():
                tape = followed.go_back([leaf for leaf, _ in moved], [g for _, g in moved], losses)
            self._add_tape(tape, count, precision)

        return LossTrace(count, self.history, send_back).hand_over(out)

    def _run_without_examples(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A Poisson sample may be empty. Not every model runs on no rows: it gets one of zeros, which is cut off."""

        def fill(value: Any) -> Any:
            return value.new_zeros((1, *value.shape[1:])) if isinstance(value, Tensor) and value.dim() else value

        with torch.no_grad():
            out = run(*tree_map(fill, args), **tree_map(fill, kwargs))
        leaves, shape = tree_flatten(out)
        cut = [leaf[:0].requires_grad_(leaf.is_floating_point()) if _is_traced(leaf, 1) else leaf for leaf in leaves]
        add = self._add_tape

        def send_back(losses: Tensor, grads: list[Tensor]) -> None:
            like = next(iter(self.model.parameters())).detach().new_zeros(1).expand(self.layout.dim)
            add(EmptyTape(like), 0, "float32")

        return LossTrace(0, self.history, send_back).hand_over(tree_unflatten(cut, shape))

    # --- before the first pass --------------------------------------------------------------------

    def _study(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> UsePlan | None:
        """Checks on made-up examples that the model does not mix them, and finds out how to follow its parameters.

        Made-up: what is found must not depend on the data. Integers are the data's, since only they are known to be
        valid indices; they are looked at for errors alone. Mixing is looked for among three examples and in a batch of
        the expected size, since a model may do something else with many (experts of limited capacity).
        """

        def make_up(value: Any, rows: int = 3) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != count:
                return value
            if not value.is_floating_point():
                return value[torch.arange(rows, device=value.device) % count]
            return torch.rand((rows, *value.shape[1:]), generator=stream, dtype=value.dtype).to(value.device)

        stream = torch_generator(0, "probe")
        given = tree_map(make_up, (args, kwargs))
        twin = self._copy()
        twin.train()
        quiet = copy.deepcopy(twin)
        silence(quiet)
        refuse_mixing(quiet, given[0], given[1], 3)
        if self._expected > 3:
            many = tree_map(functools.partial(make_up, rows=self._expected), (args, kwargs))
            refuse_mixing(quiet, many[0], many[1], self._expected)
        return find_plan(twin, self.layout, *bind_tensors(twin, *given))

    def _copy(self) -> nn.Module:
        """A copy of the model with its own forward."""
        try:
            return copy.deepcopy(self.model)
        except Exception as problem:
            words = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
            raise ModelError(f"the model cannot be copied with copy.deepcopy, to be tried out: {words}.") from problem


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _is_traced(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count


def count_rows(args: Any, kwargs: Any) -> int:
    """Number of examples B: the length of the first tensor among the arguments."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise ModelError(
        "the model was called without a tensor whose rows are examples; give it tensors [B, ...], also within dicts."
    )


def describe_form(args: Any, kwargs: Any, count: int) -> Any:
    """What a plan depends on: the shapes of one example's tensors, and all other arguments."""
    leaves, shape = tree_flatten((args, kwargs))
    return str(shape), tuple(
        (tuple(leaf.shape[1:]) if _is_traced(leaf, count) else tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Tensor)
        else repr(leaf)
        for leaf in leaves
    )


def bind_tensors(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """The arguments of a call by name: tensors with rows, and all others."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        raise ModelError("the model's forward must name its arguments, so that a pass can be repeated.") from None
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise ModelError("the model's forward takes *args; name its arguments, so that a pass can be repeated.")
        else:
            found[name] = value
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor) and value.dim()}
    return tensors, {name: value for name, value in found.items() if name not in tensors}


def refuse_mixing(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> None:
    """ModelError where changing one of `rows` made-up examples changes the outputs of another."""

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != rows:
            return value
        changed = value.clone()
        changed[0] = value[0] + 1.0 if value.is_floating_point() else value[1]
        return changed

    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        pairs = [
            [leaf for leaf in tree_leaves(model(*a, **k)) if _is_traced(leaf, rows)]
            for a, k in ((args, kwargs), tree_map(change, (args, kwargs)))
        ]
    for name, value in model.named_buffers():
        if name in buffers and not torch.equal(value, buffers[name]):
            raise ModelError(
                f"buffer {name!r} changes when the model runs: it would keep traces of the data without noise; use "
                "GroupNorm or LayerNorm in place of batch statistics."
            )
    for one, other in zip(*pairs, strict=True):
        if not torch.allclose(one[1:], other[1:], rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ModelError(
                "the model mixes the examples of a batch: changing one changes the outputs of another; use GroupNorm "
                "or LayerNorm in place of batch statistics."
            )


def check_autocast(device: str) -> str:
    """The precision of matrix products in this pass, by the name that margins have."""
    if not torch.is_autocast_enabled(device):
        return "float32"
    if torch.get_autocast_dtype(device) is not torch.bfloat16:
        raise ModelError(
            "autocast to float16 needs a scaler that looks at the batch's gradients; use torch.autocast(..., "
            "dtype=torch.bfloat16), which needs none."
        )
    return "bf16"
