"""Gradients of parameters that reach a function only through what is made of them: `weight.t()`, `weight / norm`, ...

What parameters alone make is the same for all examples. Its per-example gradients G are recorded as if it were a
parameter, and J^T G is the parameter's, with the one Jacobian J of what was made. Sums are J^T of a sum. Where only a
view was taken, entries move and norms stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fulcrum.gradients.call_log import list_leaves
from fulcrum.gradients.param_grads import (
    DOUBLE_SCRATCH,
    ParamGrad,
    scratch_ranges,
    sum_rows_in_float64,
)
from fulcrum.gradients.rounding import SquaredNorms, fast_squared_norms, squared_norms

View = Callable[[Tensor], Tensor]
Piece = slice


def _names(*names: str) -> frozenset[Any]:
    found = {getattr(owner, name) for name in names for owner in (torch, Tensor) if hasattr(owner, name)}
    return frozenset(found)


VIEWS = _names(
    *("t", "transpose", "permute", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "narrow"),
    *("select", "chunk", "split", "unbind", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "view_as"),
) | {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
"""Functions that give a view of their first argument."""

COPIES = _names("contiguous", "clone")
"""Functions that give their first argument again."""


def find_view(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> View | None:
    """The view that a function's `number`-th result is of its first argument; None where it is none."""
    if function in COPIES:
        return lambda values: values
    index = args[1] if function is Tensor.__getitem__ and len(args) == 2 else None
    parts = index if isinstance(index, tuple) else (index,)
    sliced = index is not None and all(part is None or isinstance(part, int | slice | type(...)) for part in parts)
    if not sliced and function not in VIEWS:
        return None
    return lambda values: tree_leaves(function(values, *args[1:], **kwargs))[number]


@dataclass(frozen=True, eq=False)
class Derivation:
    """How a tensor was made of parameters.

    shadow: the tensor with autograd's history. leaves: the parameters that it was made of, by their place in the
    layout, as they stand in that history. views: from the one parameter that it is a view of; None if it is none.
    """

    shadow: Tensor
    leaves: dict[int, Tensor]
    views: tuple[View, ...] | None

    def look(self, values: Tensor) -> Tensor:
        """The same view of other values in the parameter's shape."""
        for view in self.views or ():
            values = view(values)
        return values

    @property
    def keeps_norms(self) -> bool:
        """Whether each entry is an entry of a parameter, and no two are the same."""
        if self.views is None or len(self.leaves) != 1 or self.shadow.is_complex():
            return False
        (leaf,) = self.leaves.values()
        empty = torch.empty_like(leaf, device="meta")
        seen = self.look(empty)
        return seen is empty or seen._base is empty


@dataclass(frozen=True)
class DerivedGrad:
    """The gradients of a parameter from those of a tensor that was made of it."""

    part: ParamGrad
    """Of the tensor."""
    origin: Derivation
    place: int
    """Of the parameter, in the layout."""
    moved: bool
    """Whether the tensor is a view of the parameter: its gradients move to other entries, and keep their norms."""
    count: int
    """Number of examples B."""

    @property
    def positions(self) -> int:
        return self.part.positions if self.moved else 1

    def squared_norms(self, fast: bool = False) -> SquaredNorms:
        if self.moved:
            return self.part.squared_norms(fast)
        found = [(fast_squared_norms if fast else squared_norms)(rows) for _, rows in self._pieces()]
        return SquaredNorms(*(torch.cat(each) for each in zip(*found, strict=True)))

    def dots(self, direction: Tensor) -> Tensor:
        if self.moved:
            return self.part.dots(self.origin.look(direction.view(self._leaf.shape)).reshape(-1))
        return torch.cat([rows @ direction for _, rows in self._pieces()])

    def weighted_sum(self, factors: Tensor, proven: bool = False) -> Tensor:
        if proven and not self.moved:
            sums = [sum_rows_in_float64(factors[piece], rows) for piece, rows in self._pieces()]
            return torch.stack(sums).sum(dim=0)
        total = self.part.weighted_sum(factors, proven)
        if self.moved:
            filled = total.new_zeros(self._leaf.shape)
            view = self.origin.look(filled)
            view.copy_(total.view(view.shape))
            return filled.reshape(-1)
        return self._pull(total.unsqueeze(0))[0]

    def rows(self) -> Tensor:
        return torch.cat([rows for _, rows in self._pieces()])

    def only(self, good: Tensor) -> DerivedGrad:
        return dataclasses.replace(self, part=self.part.only(good))

    def slice(self, start: int, stop: int) -> DerivedGrad:
        return dataclasses.replace(self, part=self.part.slice(start, stop), count=stop - start)

    @property
    def _leaf(self) -> Tensor:
        return self.origin.leaves[self.place]

    def _pieces(self) -> list[tuple[Piece, Tensor]]:
        """Rows [b, n] of a few examples at a time, as the scratch memory allows."""
        shadow = self.origin.shadow
        each = shadow.element_size() * (shadow.numel() + self._leaf.numel())
        ranges = scratch_ranges(self.count, each, shadow.device, DOUBLE_SCRATCH)
        return [(slice(a, b), self._pull(self.part.slice(a, b).rows())) for a, b in ranges]

    def _pull(self, rows: Tensor) -> Tensor:
        """J^T of each row [b, n']: [b, n]."""
        shadow, leaf = self.origin.shadow, self._leaf
        if shadow.is_complex():
            slopes = torch.view_as_complex(rows.view(len(rows), *shadow.shape, 2).contiguous())
        else:
            slopes = rows.view(len(rows), *shadow.shape).to(shadow.dtype)
        with torch.enable_grad():
            try:
                (found,) = torch.autograd.grad(shadow, leaf, slopes, retain_graph=True, is_grads_batched=True)
            except RuntimeError:  # an operation without a batching rule
                each = [torch.autograd.grad(shadow, leaf, one, retain_graph=True)[0] for one in slopes]
                found = torch.stack(each)
        return found.detach().reshape(len(rows), -1)


Target = int | Derivation
"""What a gradient is of: a parameter's index in the layout, or what parameters made."""

CHANGED = object()
"""In place of a result: the function changed one of its arguments in place."""


class FollowedTensors:
    """The parameters of a layout, and what they alone make in a pass."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.targets: dict[int, Target] = {id(tensor): place for place, tensor in enumerate(tensors)}
        self.hidden: dict[int, str] = {}
        """Parameters that a module follows by itself while it runs, by place: the module's name."""
        self._behind: dict[int, tuple[int, ...]] = {id(tensor): (place,) for place, tensor in enumerate(tensors)}
        self._kept: list[Tensor] = list(tensors)  # their ids are keys
        self._leaves: dict[int, Tensor] = {}

    def find_places(self, value: Any) -> tuple[int, ...]:
        """The parameters behind a value that are followed here."""
        places = self._behind.get(id(value), ())
        return tuple(place for place in places if place not in self.hidden) if self.hidden else places

    def find_target(self, tensor: Tensor) -> tuple[Target, tuple[int, ...]]:
        """What a followed tensor's gradient is of, and the parameters behind it that are followed here."""
        return self.targets[id(tensor)], self.find_places(tensor)

    def find_all_places(self, leaves: list[Any]) -> set[int]:
        """The parameters behind the arguments of a call."""
        return {place for leaf in leaves if id(leaf) in self._behind for place in self.find_places(leaf)}

    def are_among(self, args: Any, kwargs: Any) -> bool:
        """Whether a followed tensor is among the arguments."""
        known = self._behind
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                if id(value) in known and (not self.hidden or self.find_places(value)):
                    return True
            elif isinstance(value, list | tuple | dict) and any(map(self.find_places, list_leaves(value))):
                return True
        return False

    def derive(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Makes a tensor of parameters alone: once as it is, and once with autograd's history."""
        versions = [(leaf, leaf._version) for leaf in list_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        out = function(*args, **kwargs)
        given, results = list_leaves((args, kwargs)), tree_leaves(out)
        sources = [self.targets[id(leaf)] for leaf in given if id(leaf) in self.targets]
        if out is None or any(version != leaf._version for leaf, version in versions):
            return CHANGED
        shadow_args, shadow_kwargs = tree_map(self._find_shadow, (args, kwargs))
        shadows = tree_leaves(function(*shadow_args, **shadow_kwargs))
        leaves: dict[int, Tensor] = {}
        for source in sources:
            leaves |= {source: self._leaves[source]} if isinstance(source, int) else source.leaves
        before: tuple[View, ...] | None = None
        if len(sources) == 1 and id(args[0]) in self.targets:
            before = () if isinstance(sources[0], int) else sources[0].views
        for number, (result, shadow) in enumerate(zip(results, shadows, strict=True)):
            if not isinstance(result, Tensor) or not shadow.requires_grad or id(result) in self.targets:
                continue
            view = find_view(function, args, kwargs, number)
            views = None if before is None or view is None else (*before, view)
            self.targets[id(result)], self._behind[id(result)] = Derivation(shadow, leaves, views), tuple(leaves)
            self._kept.append(result)
        return out

    def _find_shadow(self, value: Any) -> Any:
        target = self.targets.get(id(value)) if isinstance(value, Tensor) else None
        if target is None:
            return value
        if isinstance(target, Derivation):
            return target.shadow
        if target not in self._leaves:
            self._leaves[target] = value.detach().requires_grad_()
        return self._leaves[target]
