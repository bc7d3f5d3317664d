"""Tensor programs as CUDA graphs, with memory that adapts; on a CPU they simply run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fulcrum.engines.stacked.core import StackedCore
from fulcrum.errors import RunError
from fulcrum.gradients.precision import use_matmul_precision

ProgramInputs = dict[str, Any]
"""Named tensors, and dictionaries of them."""


@dataclass
class _RecordedGraph:
    graph: Any
    inputs: list[Tensor]
    outputs: Any
    copied: list[tuple[Tensor, int]]
    """What each input was last copied from, and in which version: unchanged ones are not copied again."""


class GraphReplayer:
    """Runs programs: the first call of a shape records a CUDA graph, later calls replay it.

    `program(**inputs)` must be a function of its tensors alone. A program that cannot be recorded (a rule that
    asks for a number on the host) runs launch by launch; `notes` says so. When memory runs out, pieces are
    halved and the program starts again.
    """

    def __init__(self, core: StackedCore, graphs: bool = True) -> None:
        self.core = core
        self.device = core.problem.device
        self.graphs = graphs and self.device.type == "cuda"
        self.notes: list[str] = []
        self._recorded: dict[Hashable, _RecordedGraph] = {}
        self._pool: Any = None

    def run(
        self, key: Hashable, program: Callable[..., Any], inputs: ProgramInputs, undo: Callable[[], None] = lambda: None
    ) -> Any:
        """The program's outputs. They may be overwritten by the next call with the same key: copy what is kept.

        A program that changes tensors of its own in place gives `undo`, which puts them back: it is called after
        a trial run and when memory ran out.
        """
        with torch.no_grad(), use_matmul_precision(self.core.how.precision, self.device):
            while True:
                try:
                    return self._run((key, self.core.how, self.core.rows_limit), program, inputs, undo)
                except torch.OutOfMemoryError as error:
                    undo()
                    self._halve_rows_limit(error)

    def run_in_place(self, key: Hashable, program: Callable[[], None], changes: list[Tensor]) -> None:
        """Runs a program that changes tensors of its own in place; after a trial run they are put back."""
        held = [] if self.has_recorded_graph(key) else changes
        before = [value.clone() for value in held]

        def undo() -> None:
            for value, old in zip(held, before, strict=True):
                value.copy_(old)

        self.run(key, program, {}, undo)

    def has_recorded_graph(self, key: Hashable) -> bool:
        """Whether a graph of this key is recorded, so that a call changes nothing twice."""
        return (key, self.core.how, self.core.rows_limit) in self._recorded

    def _halve_rows_limit(self, error: torch.OutOfMemoryError) -> None:
        if self.core.rows_limit <= 1:
            raise RunError(f"the GPU's memory does not hold a single example of this model: {error}") from error
        self.core.rows_limit //= 2
        self.notes.append(f"memory ran out; examples now go through in pieces of {self.core.rows_limit}")
        self._recorded.clear()
        self._pool = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, key: Hashable, program: Callable[..., Any], inputs: ProgramInputs, undo: Callable[[], None]) -> Any:
        if not self.graphs:
            return program(**inputs)
        known = self._recorded.get(key)
        if known is None:
            known = self._record_graph(program, inputs, undo)
            if known is None:
                return program(**inputs)
            self._recorded[key] = known
        for i, given in enumerate(tree_leaves(inputs)):
            source, version = known.copied[i]
            if source is not given or version != given._version:
                known.inputs[i].copy_(given, non_blocking=True)
                known.copied[i] = (given, given._version)
        known.graph.replay()
        return known.outputs

    def _record_graph(
        self, program: Callable[..., Any], inputs: ProgramInputs, undo: Callable[[], None]
    ) -> _RecordedGraph | None:
        """A graph of the program, after one plain run on a side stream, as PyTorch asks."""
        static = tree_map(torch.clone, inputs)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            program(**static)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        undo()
        if self.core.rule.looped:
            self._disable_graphs(self.core.rule.looped)
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = program(**static)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._disable_graphs(str(error).strip().splitlines()[0])
            return None
        leaves = tree_leaves(static)
        return _RecordedGraph(graph, leaves, outputs, [(value, -1) for value in leaves])

    def _disable_graphs(self, why: str) -> None:
        self.graphs = False
        self.notes.append(f"no CUDA graph: {why}")
