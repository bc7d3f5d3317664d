"""Tensor programs as CUDA graphs, with memory that adapts; on a CPU they simply run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fulcrum.engine.stacked.core import Core
from fulcrum.errors import RunError

Inputs = dict[str, Any]
"""Named tensors, and dictionaries of them."""


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Matrix products in float32 or, for tf32, with inputs rounded to 10 bits; deterministic library calls."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    chosen = name == "tf32"
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = chosen, chosen, True, False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


@dataclass
class _Graph:
    graph: Any
    inputs: Inputs
    outputs: Any


class Replayer:
    """Runs programs: the first call of a shape records a CUDA graph, later calls replay it.

    `program(**inputs)` must be a function of its tensors alone. A program that cannot be recorded (a rule that
    asks for a number on the host) runs launch by launch; `notes` says so. When memory runs out, pieces are
    halved and the program starts again.
    """

    def __init__(self, core: Core, graphs: bool = True) -> None:
        self.core = core
        self.device = core.problem.device
        self.graphs = graphs and self.device.type == "cuda"
        self.notes: list[str] = []
        self._recorded: dict[Hashable, _Graph] = {}
        self._pool: Any = None

    def run(self, key: Hashable, program: Callable[..., Any], inputs: Inputs) -> Any:
        """The program's outputs. They may be overwritten by the next call with the same key: copy what is kept."""
        with torch.no_grad(), precision(self.core.how.precision):
            while True:
                try:
                    return self._run((key, self.core.how, self.core.rows_limit), program, inputs)
                except torch.OutOfMemoryError as error:
                    self._shrink(error)

    def _shrink(self, error: torch.OutOfMemoryError) -> None:
        if self.core.rows_limit <= 1:
            raise RunError(f"the GPU's memory does not hold a single example of this model: {error}") from error
        self.core.rows_limit //= 2
        self.notes.append(f"memory ran out; examples now go through in pieces of {self.core.rows_limit}")
        self._recorded.clear()
        self._pool = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, key: Hashable, program: Callable[..., Any], inputs: Inputs) -> Any:
        if not self.graphs:
            return program(**inputs)
        known = self._recorded.get(key)
        if known is None:
            known = self._record(program, inputs)
            if known is None:
                return program(**inputs)
            self._recorded[key] = known
        for held, given in zip(tree_leaves(known.inputs), tree_leaves(inputs), strict=True):
            if isinstance(held, Tensor) and held is not given:
                held.copy_(given, non_blocking=True)
        known.graph.replay()
        return known.outputs

    def _record(self, program: Callable[..., Any], inputs: Inputs) -> _Graph | None:
        """A graph of the program, after one plain run on a side stream, as PyTorch asks."""
        static = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, inputs)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            program(**static)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self.core.rule.looped:
            self._plain(self.core.rule.looped)
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
            self._plain(str(error).strip().splitlines()[0])
            return None
        return _Graph(graph, static, outputs)

    def _plain(self, why: str) -> None:
        self.graphs = False
        self.notes.append(f"no CUDA graph: {why}")
