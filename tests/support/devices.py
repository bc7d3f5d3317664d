"""Where kernel tests run (a GPU, or the CPU with TRITON_INTERPRET=1), and what a CUDA graph refuses, without a GPU."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
KERNELS_RUN = HAS_TRITON and (INTERPRETED or DEVICE.type == "cuda")


class NoHost(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: numbers from or for the host, and shapes that values decide."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "unique_dim"}, name
        return func(*args, **(kwargs or {}))
