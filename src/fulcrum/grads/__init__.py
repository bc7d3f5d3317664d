"""Per-example gradients of a batch: norms, inner products and clipped sums without writing them all out.

    tape = record(model, layout, params, x, y)
    factors = (C / tape.norms()).clamp(max=1)
    clipped_sum = tape.weighted_sum(factors)

`record` follows layers that it knows by book-keeping (`book.py`) and everything else by vmap (`vmap.py`);
`paths` says which layer takes which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fulcrum.errors import ModelError
from fulcrum.grads.book import Book, Unsuitable, record_book
from fulcrum.grads.memory import keep_memory
from fulcrum.grads.program import Program, analyse
from fulcrum.grads.tape import Chunks, Empty, Loss, Tape, cross_entropy
from fulcrum.grads.vmap import record_vmap
from fulcrum.models import Layout
from fulcrum.rng import torch_stream

__all__ = ["Tape", "cross_entropy", "keep_memory", "paths", "record"]

WORK = {"cpu": 10 * 2**20, "cuda": 4 * 2**30}
"""Bytes of layer inputs and outputs that one pass may have: a larger batch goes through in pieces. On a CPU
that is also faster, for memory is used again before the system takes it back."""

PROBE = 3
"""Examples on which a model with a forward of its own is compared with vmap, once."""


@dataclass
class _Known:
    """What was found out about a model, for one layout."""

    layout: Layout
    verdict: str | None = None
    """Why book-keeping is wrong for it; "" if it is right."""
    elements: dict[torch.Size, int] = field(default_factory=dict)
    """Inputs and outputs of all sites for one example, by the example's shape."""


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def record(
    model: nn.Module,
    layout: Layout,
    params: Tensor,
    x: Tensor,
    y: Tensor,
    loss: Loss = cross_entropy,
    how: str = "auto",
) -> Tape:
    """Runs the batch x [B, ...], y [B] forward and backward with the parameters `params` [d], and keeps what its
    per-example gradients can be answered from.

    The model's own trainable parameters are neither read nor changed; frozen parameters and buffers are the
    model's. `loss` gives one loss an example. `how`: "auto"; "book" (raises ModelError where the model cannot
    be followed); "vmap" (gradients written out, B times the memory of the model: the plain oracle).

    A model that is not a plain `nn.Sequential` gets hooks for the duration of the call: do not share it between
    threads. With "auto" such a model is first compared with vmap on a few made-up examples, and vmap is used from
    then on if they differ, for instance because a parameter is used other than by calling its layer.
    """
    if how not in ("auto", "book", "vmap"):
        raise ModelError(f"how = {how!r} is not known; choose one of auto, book, vmap.")
    if len(x) == 0:
        return Empty(params.detach())
    if how == "vmap":
        return record_vmap(model, layout, params, x, y, loss)
    known = _known.get(model)
    if known is None or known.layout != layout:
        known = _known[model] = _Known(layout)
    program = analyse(model, layout)

    def run(x: Tensor, y: Tensor) -> Book:
        return record_book(model, program, layout, params, x, y, loss)

    try:
        if how == "auto" and not program.sequence:
            if known.verdict is None:
                known.verdict = _compare(model, program, layout, params, x, y, loss)
            if known.verdict:
                raise Unsuitable(known.verdict)
        return _in_pieces(known, run, x, y)
    except Unsuitable as problem:
        if how == "book":
            raise ModelError(f"book-keeping cannot follow this model ({problem}); use how = 'vmap'.") from None
        return record_vmap(model, layout, params, x, y, loss)


def _in_pieces(known: _Known, run: Callable[[Tensor, Tensor], Book], x: Tensor, y: Tensor) -> Tape:
    """Equal pieces that depend on the shapes alone, so that a resumed run rounds as the first one did."""
    if x.shape[1:] not in known.elements:
        known.elements[x.shape[1:]] = run(x[:1], y[:1]).elements
    limit = WORK.get(x.device.type, WORK["cuda"])
    size = known.elements[x.shape[1:]] * x.element_size() * len(x)
    pieces = min(len(x), max(1, math.ceil(size / limit)))
    if pieces == 1:
        return run(x, y)
    step = math.ceil(len(x) / pieces)
    tapes = [run(*piece) for piece in zip(x.split(step), y.split(step), strict=True)]
    return Chunks(tuple(tapes), tuple(len(tape.raw_losses) for tape in tapes))


def _compare(
    model: nn.Module, program: Program, layout: Layout, params: Tensor, x: Tensor, y: Tensor, loss: Loss
) -> str:
    """Why book-keeping must not be used, or "": found on made-up examples with the model's own parameters.

    Neither the data nor the progress of the training decides, so that a resumed run takes the same path.
    """
    index = torch.arange(PROBE, device=x.device) % len(x)
    probe, own = x[index], layout.flatten(model).to(params)
    if probe.is_floating_point():
        probe = torch.rand(probe.shape, generator=torch_stream(0, "probe"), dtype=probe.dtype).to(probe.device)
    truth = record_vmap(model, layout, own, probe, y[index], loss).matrix()
    if not bool(truth.any()):
        return "it has no finite gradients to compare"
    try:
        found = record_book(model, program, layout, own, probe, y[index], loss).matrix()
    except Unsuitable as problem:
        return str(problem)
    return "" if _close(found, truth, layout) else "its gradients differ from those of vmap"


def _close(found: Tensor, truth: Tensor, layout: Layout) -> bool:
    """Whether each tensor's gradients agree, up to rounding, for each example."""
    noise = 1e-6 * truth.norm(dim=1)
    pairs = zip(found.split(layout.sizes, dim=1), truth.split(layout.sizes, dim=1), strict=True)
    return all(bool(((f - t).norm(dim=1) <= 1e-3 * t.norm(dim=1) + noise).all()) for f, t in pairs)


def paths(model: nn.Module) -> list[tuple[str, str, str]]:
    """For each layer with trainable parameters: its name, "book" or "vmap", and why.

    >>> paths(nn.Sequential(nn.Linear(4, 2)))
    [('0', 'book', 'Linear')]
    """
    program = analyse(model, Layout.of(model))
    return [
        (site.name or "model", "book", type(site.module).__name__)
        if site.kind
        else (site.name or "model", "vmap", site.reason)
        for site in program.sites.values()
    ]
