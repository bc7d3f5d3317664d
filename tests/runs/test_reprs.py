"""Values show themselves in a line or two, and never the records in them."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

import fulcrum
from fulcrum.data import from_arrays
from fulcrum.types import LONGEST_REPR, make_short_repr


def test_public_values_are_short_and_hold_no_record():
    generator = np.random.default_rng(0)
    x, y = generator.random((60, 5), dtype=np.float32), generator.integers(0, 3, 60)
    dataset = from_arrays(x, y, x, y, classes=3, name="mine", public=True)
    settings = fulcrum.Settings().replace(
        data={"parties": 3, "min_examples": 1}, train={"rounds": 2}, privacy={"epsilon": 3.0}, clip={"rehearse": False}
    )
    federation = fulcrum.prepare(settings, dataset=dataset)
    result = fulcrum.execute(federation)
    shown = [result, federation, federation.plan, federation.problem, dataset, dataset.train, federation.problem.rule]
    shown += [federation.problem.partition, dataset.task, federation.plan.groups[0]]
    shown += [fulcrum.plan(data=dataset, epsilon=3.0, rounds=2, timing=False)]
    for value in shown:
        text = repr(value)
        assert text.startswith(f"{type(value).__name__}("), text
        assert len(text) <= LONGEST_REPR
        assert "tensor(" not in text
        assert " at 0x" not in text  # no address of a function
    assert f"epsilon={result.epsilon!r}" in repr(result)
    assert repr(dataset.train) == "Records(x=<60x5>, y=<60>)"


def test_long_parts_are_cut_and_defaults_left_out():
    @dataclasses.dataclass(frozen=True)
    class Value:
        name: str
        tensor: torch.Tensor
        many: tuple[int, ...]
        usual: int = 3
        other: int = 3

        __repr__ = make_short_repr

    text = repr(Value("n" * 200, torch.full((2, 3), 12345.0), tuple(range(500)), other=4))
    assert "12345" not in text
    assert "tensor=<2x3>, many=<500 values>, other=4)" in text
    assert "usual" not in text
    assert len(text) < 150
