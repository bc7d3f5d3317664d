"""Rows of a product have the same bits at any place, or proven arithmetic is refused."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from fulcrum.errors import ConfigError
from fulcrum.gradients import same_bits
from support.federations import toy_problem


def test_products_in_this_process_round_every_row_alike() -> None:
    assert same_bits.products_have_same_bits()


def multiply_by_address(rows: Tensor, weight: Tensor) -> Tensor:
    """A product whose last bit depends on where its operands begin, as MKL's did on AMD's processors."""
    return rows @ weight * (1 + 2.0**-22 * (rows.data_ptr() % 64 != 0))


def multiply_by_place(rows: Tensor, weight: Tensor) -> Tensor:
    """A product whose first row takes another loop than the others."""
    product = rows @ weight
    product[0] *= 1 + 2.0**-22
    return product


@pytest.mark.parametrize("multiply", [multiply_by_address, multiply_by_place])
def test_products_that_round_by_place_are_noticed(multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert not same_bits.rounds_rows_alike(multiply)


def test_proven_arithmetic_is_refused_where_rows_are_rounded_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = toy_problem("fixed")
    monkeypatch.setattr(same_bits, "products_have_same_bits", lambda: False)
    problem.make_recorder()  # fast arithmetic makes no such claim
    with pytest.raises(ConfigError, match="Import fulcrum before the first operation of PyTorch"):
        replace(problem, proven=True).make_recorder()
    elsewhere = copy.deepcopy(problem.model).to("meta")  # not on this processor, as on a GPU
    replace(problem, proven=True, model=elsewhere).make_recorder()


LATE = """
import torch
torch.randn(3, 3) @ torch.randn(3, 3)
from fulcrum.errors import ConfigError
from fulcrum.gradients import same_bits
try:
    same_bits.refuse_bits_that_depend_on_place()
    print("same bits" if same_bits.rounds_rows_alike(torch.matmul) else "let through")
except ConfigError:
    print("refused")
"""


@pytest.mark.parametrize(("first_use", "allowed"), [(True, ["same bits", "refused"]), (False, ["same bits"])])
def test_a_program_that_used_pytorch_first_is_right_or_refused(first_use: bool, allowed: list[str]) -> None:
    program = LATE if first_use else LATE.replace("torch.randn(3, 3) @ torch.randn(3, 3)\n", "import fulcrum\n")
    clean = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() in allowed
