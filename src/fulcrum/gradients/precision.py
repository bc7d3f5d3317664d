"""The precision of a GPU's matrix products, and results that repeat bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_matmul_precision(name: str, device: torch.device) -> Iterator[None]:
    """On a GPU: products in full float32 or, for tf32, of inputs rounded to 10 bits; deterministic library calls."""
    if device.type != "cuda":
        yield
        return
    matmul, conv, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn  # type: ignore[attr-defined]
    before = matmul.fp32_precision, conv.fp32_precision, cudnn.deterministic, cudnn.benchmark
    chosen = "tf32" if name == "tf32" else "ieee"
    matmul.fp32_precision, conv.fp32_precision, cudnn.deterministic, cudnn.benchmark = chosen, chosen, True, False
    try:
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision, cudnn.deterministic, cudnn.benchmark = before
