"""Whether a row of a matrix product has the same bits wherever it lies: what proven arithmetic takes for granted.

Without MKL_CBWR, MKL chooses its loops by the operands' addresses on processors that are not Intel's, and a row of a
product is then rounded by its place. `import fulcrum` sets the variable, but MKL reads it once, at its first product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from fulcrum.errors import ConfigError

ROWS = 32
WIDTHS = ((6, 4), (16, 3), (48, 8), (64, 10), (784, 32))
"""(inputs, outputs) of the compared products: narrow ones, where loops by address were seen, and a wide one."""
OFFSETS = (0, 1, 3, 4, 8)
"""Where an operand begins, in numbers after an address that is a multiple of 64 bytes."""


def refuse_bits_that_depend_on_place() -> None:
    """Raise ConfigError where products on this processor round a row by its place or its address."""
    if not products_have_same_bits():
        cause = (
            "Import fulcrum before the first operation of PyTorch, or set MKL_CBWR=AUTO in the environment"
            if torch.backends.mkl.is_available()
            else "PyTorch's library for products, which is not MKL, cannot be told to"
        )
        raise ConfigError(
            "privacy.arithmetic = proven needs matrix products that round every row alike, and in this process they do "
            f"not. {cause}; or choose privacy.arithmetic = fast, whose bounds are measured and not proven."
        )


@lru_cache(maxsize=1)
def products_have_same_bits() -> bool:
    """Whether PyTorch's products on this processor give a row the same bits at any place; measured once, in 0.1 s."""
    return rounds_rows_alike(torch.matmul)


def rounds_rows_alike(multiply: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether rows that trade places, and operands at other addresses, give the same bits of multiply(rows, weight)."""
    generator = torch.Generator("cpu").manual_seed(0)
    for inputs, outputs in WIDTHS:
        rows, weight = (
            torch.randn(count, inputs, generator=generator, dtype=torch.float32, device="cpu")
            for count in (ROWS, outputs)
        )
        expected = multiply(rows, weight.T)
        for offset in OFFSETS:
            moved = multiply(_copy_to_offset(rows.roll(1, 0), offset), _copy_to_offset(weight, offset).T)
            if not torch.equal(moved, expected.roll(1, 0)):
                return False
    return True


def _copy_to_offset(value: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` numbers after a multiple of 64 bytes."""
    memory = value.new_empty(value.numel() + 32)
    start = -(memory.data_ptr() // memory.element_size()) % 16 + offset
    return memory[start : start + value.numel()].view(value.shape).copy_(value)
