"""Are private random numbers the same on this GPU as on a CPU, and how long do they take?

    PYTHONPATH=src python benchmarks/gpu_streams.py               # seconds on a GPU
    PYTHONPATH=src python benchmarks/gpu_streams.py --device cpu  # the same checks without a kernel

Checks the cipher against RFC 8439, its three implementations against each other, uniform and normal numbers of the CPU
against those of the device, and the numbers of a run alone against those of the same run in a stack of eight. Prints a
table; exits with 1 where a check failed. Needs torch and numpy alone (and triton, for the kernel).
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch
from gpu_work import Clock, federation, images
from torch import Tensor

from fulcrum.engines.batched import run_many
from fulcrum.engines.stacked.draws import NormalStream, RandomDraws, UniformStream
from fulcrum.rng import SeededRandomness, StreamKey, chacha
from fulcrum.rng.normals import count_normal_words, words_to_normals, words_to_uniforms

RFC_KEY = bytes(range(32))
RFC_NONCE = struct.unpack("<3I", bytes.fromhex("000000090000004a00000000"))
RFC_BLOCK = (
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
    "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
)
"""RFC 8439, 2.3.2: the block with counter 1, which is the second block of a stream."""

Check = tuple[str, bool, str]
"""What was checked, whether it holds, and what was found."""


def make_table(streams: int) -> Tensor:
    """Keys and nonces of some streams, the RFC's first; int32 [streams, 11] on the CPU."""
    rows = [[*struct.unpack("<8I", RFC_KEY), *RFC_NONCE]]
    for i in range(1, streams):
        key, nonce = SeededRandomness(i).locate_stream(("noise", 2**31 + i, i, 7))
        rows.append([*struct.unpack("<8I", key), *nonce])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def check_words(device: torch.device) -> list[Check]:
    """Kernel, plain torch and the host's cipher give the same words, and those of the RFC."""
    found: list[Check] = []
    expected = torch.frombuffer(bytearray(bytes.fromhex(RFC_BLOCK)), dtype=torch.int64)
    blocks = 1000  # no multiple of the kernel's block size
    table = make_table(37)
    plain = chacha._run_torch(table.to(device), blocks).cpu().view(torch.int64).view(37, -1)
    found.append(("plain torch gives RFC 8439's block", torch.equal(plain[0, 8:16], expected), ""))
    host = chacha.draw_words(RFC_KEY, RFC_NONCE, 8 * blocks)
    found.append(("the host's cipher gives the same words", torch.equal(host, plain[0]), "OpenSSL or torch"))
    made = chacha._run_kernel(table.to(device), blocks)
    if device.type == "cuda":
        same = made is not None and torch.equal(made.cpu().view(torch.int64).view(37, -1), plain)
        found.append(("the triton kernel gives the same words", same, "; ".join(chacha.kernel_failures)))
    odd = chacha.draw_keyed_words(table.to(device), 13).cpu()
    found.append(("a stream's first words do not depend on how many", torch.equal(odd, plain[:, :13]), ""))
    return found


def check_numbers(device: torch.device) -> list[Check]:
    """Uniform numbers are equal bit for bit, normal numbers to 1e-12."""
    words = chacha.draw_keyed_words(make_table(4), count_normal_words(250_001))
    extreme = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63), 2**62, -2, 5], dtype=torch.int64)
    words = torch.cat([words.flatten(), extreme])
    one, two = words_to_uniforms(words), words_to_uniforms(words.to(device)).cpu()
    found: list[Check] = [("uniform numbers are equal bit for bit", torch.equal(one, two), f"{len(words)} numbers")]
    normals = words_to_normals(words, len(words)).values
    others = words_to_normals(words.to(device), len(words)).values.cpu()
    apart = float((normals - others).abs().max())
    found.append(("normal numbers are equal to 1e-12", apart <= 1e-12, f"largest difference {apart:.1e}"))
    return found


class Watch:
    """Keeps what each run draws, by the names of its streams."""

    def __init__(self) -> None:
        self.drawn: dict[int, dict[tuple[str, StreamKey], Tensor]] = {}
        uniforms, normals, sums = RandomDraws.fill_uniforms, RandomDraws.fill_normals, RandomDraws.sum_normals

        def fill_uniforms(draws: RandomDraws, buffer: Tensor, streams: Any) -> Any:
            found = uniforms(draws, buffer, streams)
            for stream in streams:
                self.keep(stream, "uniform", stream.key, buffer.view(-1)[stream.start : stream.start + stream.size])
            return found

        def by_row(own: Callable[..., Any], kind: str) -> Callable[..., Any]:
            def fill(draws: RandomDraws, table: Tensor, streams: Any) -> Any:
                found = own(draws, table, streams)
                for stream in streams:
                    self.keep(stream, kind, stream.key[:2] if kind == "sum" else stream.key, table[stream.row])
                return found

            return fill

        RandomDraws.fill_uniforms = fill_uniforms  # type: ignore[method-assign, assignment]
        RandomDraws.fill_normals = by_row(normals, "normal")  # type: ignore[method-assign]
        RandomDraws.sum_normals = by_row(sums, "sum")  # type: ignore[method-assign]

    def keep(self, stream: UniformStream | NormalStream, kind: str, key: StreamKey, numbers: Tensor) -> None:
        assert isinstance(stream.source, SeededRandomness)
        self.drawn.setdefault(stream.source.seed, {})[kind, key] = numbers.cpu().clone()

    def play(self, feds: list[Any]) -> tuple[dict[int, dict[tuple[str, StreamKey], Tensor]], Tensor]:
        """What each run drew, by its seed, and the models [R, d]."""
        self.drawn = {}
        last = list(run_many(feds))[-1].averaged
        assert last is not None
        return self.drawn, last


def check_stacks(device: torch.device) -> list[Check]:
    """One run alone and in a stack of eight, with one local step and with two."""
    found: list[Check] = []
    data, watch = images("mnist", 600, 10), Watch()
    for steps in (1, 2):
        # Seeds tell the runs' sources apart.
        feds = [
            federation(data, "mnist-cnn", device, "quantile", seed, parties=4 + seed % 2, rounds=3, steps=steps)
            for seed in range(8)
        ]
        alone, model = watch.play([feds[2]])
        several, models = watch.play(feds)
        one, two = alone[2], several[2]
        same = one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
        apart = float((model[0] - models[2]).norm() / model[0].norm())
        found.append((f"one run alone and in a stack of 8, {steps} steps: draws", same, f"{len(one)} streams"))
        found.append((f"one run alone and in a stack of 8, {steps} steps: model", apart < 1e-3, f"{apart:.1e} apart"))
        key = next(iter(one))
        noticed = any(not torch.equal(one[key], own[key]) for seed, own in several.items() if seed != 2 and key in own)
        found.append((f"other runs have other numbers, {steps} steps", noticed, ""))
    return found


def time_numbers(device: torch.device) -> list[Check]:
    """Milliseconds for a million numbers, many streams in one call."""
    clock, table = Clock(device), make_table(64).to(device)
    count = 1_000_000 // 64 if device.type == "cpu" else 16_000_000 // 64
    millions = 64 * count / 1e6
    words = chacha.draw_keyed_words(table, count_normal_words(count))
    timed = {
        "words": lambda: chacha.draw_keyed_words(table, count_normal_words(count)),
        "uniform numbers": lambda: words_to_uniforms(chacha.draw_keyed_words(table, count)),
        "normal numbers": lambda: words_to_normals(chacha.draw_keyed_words(table, count_normal_words(count)), count),
        "normal numbers from words": lambda: words_to_normals(words, count),
    }
    found: list[Check] = []
    for name, work in timed.items():
        found.append((f"a million {name}", True, f"{1e3 * clock.time(work, 5, 2) / millions:.4f} ms"))
    source = SeededRandomness(0)
    buffer, draws = torch.zeros((8, 26_000), device=device), RandomDraws(device, [source])
    streams = [NormalStream(source, ("noise", 0, k, 0), r, 0.5) for r in range(8) for k in range(10)]
    seconds = clock.time(lambda: draws.sum_normals(buffer, streams), 5, 2)
    found.append(("a round's noise: 8 runs of 10 parties, d = 26,000", True, f"{1e3 * seconds:.3f} ms"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}", flush=True)
    failed = 0
    for part in (check_words, check_numbers, check_stacks, time_numbers):
        for what, holds, words in part(device):
            failed += not holds
            print(f"{'ok' if holds else 'FAILED':6}  {what:58}  {words}", flush=True)
    if failed:
        sys.exit(f"{failed} checks failed.")


if __name__ == "__main__":
    main()
