"""Clipping rules over stacked tasks: one call for all clients and runs.

Rules are written for one task and look at no value with Python's `if`, so `torch.vmap` can stack them. A rule
that cannot be stacked (it asks for a number on the host) is called task by task, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fulcrum.clipping.rule import ClipRule
from fulcrum.privacy.bounds import apply_rule, sanitise_bounds
from fulcrum.types import NO_MARGIN, Axes, Released, RuleState, Stats, SumMargin, View

StackedState = dict[str, Tensor]
"""A rule's state for T tasks: each tensor [T, ...]."""
MoveFn = Callable[[Tensor, Any, Released, Tensor], tuple[Tensor, Any]]
"""A server optimiser of one task: (update [d], its state, the release, C [G]) -> (change [d], state)."""


def stack_states(states: Sequence[RuleState], device: torch.device) -> StackedState:
    """[T] states -> one, on the device."""
    return {name: torch.stack([s[name].to(device) for s in states]) for name in states[0]}


def unstack_state(state: Mapping[str, Tensor], task: int) -> StackedState:
    """One task's state, in tensors of its own."""
    return {name: value[task].clone() for name, value in state.items()}


class StackedRule:
    """A rule's functions over T tasks. `looped` says why it is called task by task; empty if it is not."""

    def __init__(self, rule: ClipRule) -> None:
        self.rule = rule
        self.looped = ""

    def view(self, state: StackedState, t: Any, rounds: int) -> tuple[View, Tensor | None]:
        """What the rule looks at, and its direction for each task [T, d] (None where it has none)."""
        view = self.get_first_view(state, t, rounds)
        return view, None if view.direction is None else self._stack_views(state, t, rounds, "direction")

    def get_first_view(self, state: StackedState, t: Any, rounds: int) -> View:
        """What the rule looks at, for the first task."""
        return self.rule.view({name: value[0] for name, value in state.items()}, t, rounds)

    def stack_axes(self, state: StackedState, t: Any, rounds: int) -> Axes | None:
        """The coordinates of each task, centre and scale [T, d]; None where the rule has none."""
        if self.get_first_view(state, t, rounds).axes is None:
            return None

        def axes(own: StackedState) -> tuple[Tensor, Tensor]:
            found = self.rule.view(own, t, rounds).axes
            assert found is not None
            return found.centre, found.scale

        return Axes(*self._map_over_tasks(axes, (state,), ()))

    def stack_probes(self, state: StackedState, t: Any, rounds: int) -> Tensor | None:
        """The probes of each task [T, P, d]; None where the rule has none."""
        if self.get_first_view(state, t, rounds).probes is None:
            return None
        return self._stack_views(state, t, rounds, "probes")

    def _stack_views(self, state: StackedState, t: Any, rounds: int, name: str) -> Tensor:
        """One tensor of each task's view, stacked."""

        def find(own: StackedState) -> Tensor:
            found = getattr(self.rule.view(own, t, rounds), name)
            assert isinstance(found, Tensor)
            return found

        return self._map_over_tasks(find, (state,), ())  # type: ignore[no-any-return]

    def clip(
        self,
        state: StackedState,
        norms: Tensor,
        mask: Tensor,
        dots: Tensor | None,
        losses: Tensor | None,
        sigma: Tensor,
        batch: Tensor,
        lr: Tensor,
        by_row: bool = False,
        norm_bounds: Tensor | None = None,
        lengths: Tensor | None = None,
        margin: SumMargin = NO_MARGIN,
        probes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, StackedState, Tensor, Tensor]:
        """The rule's output, with its bounds enforced.

        Factors [T, n, G]; factors of a second sum [T, n, G], or [T, n, 0] where there is none; extra rows
        [T, n, J]; the state; C [T, G]; the extra's bound [T]. norms [T, n, G], mask [T, n], dots and losses [T, n];
        sigma, batch and lr [T], or [T, n] with `by_row`, for rows of several clients that share one state.
        norm_bounds, lengths [T, n, G], margin and probes [T, n, P]: see `Stats`.
        """
        rule = self.rule
        given: dict[str, Tensor] = {"norms": norms, "mask": mask}
        given |= {name: v for name, v in (("dots", dots), ("losses", losses)) if v is not None}
        more = (("norm_bounds", norm_bounds), ("lengths", lengths), ("probes", probes))
        given |= {name: v for name, v in more if v is not None}

        def one(own: StackedState, rows: dict[str, Any], sigma: Any, batch: Any, lr: Any) -> tuple[Any, ...]:
            stats = Stats(sigma=sigma, batch=batch, lr=lr, margin=margin, **rows)
            decided = apply_rule(rule, stats, own)
            limit = _to_scalar_tensor(decided.bounds.extra, norms)
            return (
                decided.factors,
                decided.second_factors,
                decided.extra,
                dict(decided.state),
                decided.bounds.C,
                limit,
            )

        if not by_row:
            return self._map_over_tasks(one, (state, given), (sigma, batch, lr))  # type: ignore[no-any-return]

        def row(own: StackedState, rows: dict[str, Tensor], *numbers: Any) -> tuple[Tensor, ...]:
            found = one(own, {name: value[None] for name, value in rows.items()}, *numbers)
            return tuple(value[0] for value in found[:3])

        def rows(own: StackedState, given: dict[str, Tensor], *numbers: Any) -> tuple[Any, ...]:
            bounds = sanitise_bounds(rule, rule.bounds(own))
            found = vmap(row, in_dims=(None, 0, 0, 0, 0))(own, given, *numbers)
            return *found, own, bounds.C, _to_scalar_tensor(bounds.extra, norms)

        return vmap(rows)(state, given, sigma, batch, lr)

    def adapt(
        self,
        state: StackedState,
        aggregate: Tensor,
        extra: Tensor,
        lr: Tensor,
        steps: Tensor,
        t: Any,
        rounds: int,
        noise: Tensor | None = None,
        asked: Tensor | None = None,
        move: MoveFn | None = None,
        server: Any = (),
    ) -> tuple[Tensor, StackedState, Any]:
        """What the server does of each task's own release: the change [T, d], the rule's state, the server's state.

        aggregate [T, d], extra [T, J]; lr, steps, noise (None: 0) and asked (None: 1) [T], as in `Released`. move: the
        server optimiser of one task, (update, server, release, C) -> (change, server's state), with `server` stacked;
        None: the update is the change.
        """

        def one(
            own: StackedState,
            aggregate: Tensor,
            extra: Tensor,
            server: Any,
            lr: Any,
            steps: Any,
            noise: Any,
            asked: Any,
        ) -> Any:
            now = int(t) if self.looped else t
            released = Released(aggregate, extra, lr, steps, now, rounds, noise, asked)
            update = self.rule.apply(own, released)
            change, server = (update, server) if move is None else move(update, server, released, own["C"])
            return change, dict(self.rule.adapt(own, replace(released, moved=change))), server

        noise = torch.zeros_like(lr) if noise is None else noise
        asked = torch.ones_like(lr) if asked is None else asked
        return self._map_over_tasks(one, (state, aggregate, extra, server), (lr, steps, noise, asked))  # type: ignore[no-any-return]

    def can_be_stacked(self, state: StackedState, d: int, t: Any, rounds: int) -> bool:
        """Whether the whole rule can be stacked, including rows of several clients; tested on dummy numbers."""
        C = state["C"]
        view, direction = self.view(state, t, rounds)
        rows, ones = C.new_ones((len(C), 2)), C.new_ones(len(C))
        dots = None if direction is None else rows
        losses = rows if view.losses else None
        probes = None if view.probes is None else C.new_ones((len(C), 2, len(view.probes)))
        try:
            norms = C.new_ones((len(C), 2, C.shape[1]))
            _, again, extra, *_ = self.clip(
                state, norms, rows > 0, dots, losses, rows, rows, rows, by_row=True, probes=probes
            )
            second = C.new_ones((len(C), d if again.shape[2] else 0))
            statistics = torch.cat([extra.sum(dim=1), second], dim=1)
            self.adapt(state, C.new_ones((len(C), d)), statistics, ones, ones, t, rounds)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            self.looped = _explain_looping(self.rule, problem)
        return not self.looped and view.transform is None

    def _map_over_tasks(
        self, function: Callable[..., Any], stacked: tuple[Any, ...], numbers: tuple[Tensor, ...]
    ) -> Any:
        """The function over tasks. In a loop `numbers` [T] are Python's, as the reference passes them."""
        if not self.looped:
            try:
                return vmap(function)(*stacked, *numbers)
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:  # a rule that cannot be stacked still works task by task
                self.looped = _explain_looping(self.rule, problem)
        values = [own.tolist() for own in numbers]
        count = len(tree_leaves(stacked)[0])
        results = [
            function(*tree_map(lambda value, i=i: value[i], stacked), *(own[i] for own in values)) for i in range(count)
        ]
        return tree_map(lambda *found: torch.stack(found), *results)


def _to_scalar_tensor(value: Any, like: Tensor) -> Tensor:
    """A number as a float64 tensor, without a copy from the host: that could not be recorded in a graph."""
    return value.double() if isinstance(value, Tensor) else like.new_full((), float(value), dtype=torch.float64)


def _explain_looping(rule: ClipRule, problem: Exception) -> str:
    first = (str(problem).strip().splitlines() or [""])[0]
    return f"rule {rule.name} is called client by client ({type(problem).__name__}: {first})"
