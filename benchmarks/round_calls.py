"""How many functions of Fulcrum a round calls, and how deep the chain is to the first matrix product.

    PYTHONPATH=OLD/src python benchmarks/round_calls.py     # with the tree as it was
    PYTHONPATH=src python benchmarks/round_calls.py         # with the tree as it is

Two parties on digits, the reference engine, the second of three rounds. Uses names that both trees have.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

import fulcrum

PRODUCTS = ("linear", "addmm", "baddbmm", "matmul", "mm", "bmm")
FUNCTIONS: set[tuple[str, str]] = set()
CHAIN: list[str] = []


def watch(frame: FrameType, event: str, arg: Any) -> None:
    """Notes every function of the package, and the stack at the first matrix product."""
    code = frame.f_code
    if event == "call" and "/fulcrum/" in code.co_filename and not code.co_name.startswith("<"):
        FUNCTIONS.add((code.co_filename, code.co_name))
    if event == "c_call" and not CHAIN and getattr(arg, "__name__", "") in PRODUCTS:
        at: FrameType | None = frame
        while at is not None:
            if "/fulcrum/" in at.f_code.co_filename:
                CHAIN.insert(0, at.f_code.co_name)
            at = at.f_back


def on_round(result: fulcrum.RoundResult) -> None:
    """Watches the second round alone."""
    sys.setprofile(watch if result.round == 1 else None)


def main() -> None:
    """Train three rounds, print two figures."""
    torch.set_num_threads(1)
    settings = fulcrum.Settings().replace(
        data={"source": "digits", "parties": 2},
        train={"rounds": 3, "rate": 0.05},
        privacy={"epsilon": 4.0},
        run={"engine": "reference"},
    )
    fulcrum.execute(fulcrum.prepare(settings), None, on_round)
    sys.setprofile(None)
    print(f"functions called in a round: {len(FUNCTIONS)}")
    print(f"calls to the first matrix product: {len(CHAIN)}: {' > '.join(CHAIN)}")


if __name__ == "__main__":
    main()
