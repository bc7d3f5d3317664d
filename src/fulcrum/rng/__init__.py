"""Randomness as an argument: one named stream per (purpose, round, client, step), no global generator.

Private randomness (sampling and noise) comes from ChaCha20, keyed by a secret, the run's id and the stream's name: the
same words on every device. `SeededRandomness` is for simulations: its secret is a seed, so a run can be repeated and
resumed bit for bit. `SecureRandomness` is for real use: its secret is drawn from the operating system, kept in memory
and never written down. `RecordedRandomness` replays given numbers, so that two engines can be compared.

Public randomness (initial weights, the split over parties, who is invited) comes from `numpy_generator` and
`torch_generator`. Their seed is another setting and says nothing about the private one.

chacha.py   the cipher: key, nonce -> words
normals.py  words -> uniform and normal numbers
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from fulcrum.errors import RunError
from fulcrum.rng.chacha import KEY_BYTES, Nonce, draw_words
from fulcrum.rng.normals import count_normal_words, words_to_normals, words_to_uniforms

StreamKey = tuple[str | int, ...]
"""Names a stream, purpose first: ("sample", round, client, step), and the attempt at the round where it is not 0."""


class Randomness(Protocol):
    """Source of all private randomness: Poisson sampling and noise."""

    @property
    def mode(self) -> str:
        """`seeded`, `secure` or `recorded`; written into the privacy statement."""
        ...

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        """`count` numbers in [0, 1), float64, on the CPU."""
        ...

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        """`count` standard normal numbers, float64, on the CPU."""
        ...


# --- public randomness --------------------------------------------------------------------------


def derive_stream_seed(seed: int, key: StreamKey) -> int:
    """A 63-bit seed for one public stream; different keys give unrelated streams."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def torch_generator(seed: int, *key: str | int) -> torch.Generator:
    """A CPU generator for a public purpose such as initialisation. Never for private randomness: it has 32 bits."""
    return torch.Generator().manual_seed(derive_stream_seed(seed, key))


def numpy_generator(seed: int, *key: str | int) -> np.random.Generator:
    """A NumPy generator for a public purpose such as splitting data over parties."""
    return np.random.default_rng(derive_stream_seed(seed, key))


# --- private randomness -------------------------------------------------------------------------


@dataclass(frozen=True)
class CipherRandomness:
    """ChaCha20 streams under one secret of 32 bytes. run: the id of the run; runs with different ids share nothing.

    The same key gives the same numbers each time, so that an engine can repeat a step within a round.
    """

    secret: bytes = field(repr=False)
    run: str = ""
    mode: str = "seeded"

    def locate_stream(self, key: StreamKey) -> tuple[bytes, Nonce]:
        """The cipher's key and nonce of a stream. Key: secret, run, and the first two parts; nonce: up to three more.

        Rounds have keys of their own, clients and steps have nonces, so that a device can make them itself.
        """
        shared, rest = key[:2], key[2:]
        if len(rest) > 3 or not all(isinstance(part, int) and 0 <= part < 2**32 for part in rest):
            raise ValueError(f"{key!r} does not name a stream: after the round come client, step and attempt")
        nonce = tuple(int(part) for part in (*rest, 0, 0, 0))[:3]
        return self.derive_key(*shared, len(rest)), (nonce[0], nonce[1], nonce[2])

    def derive_key(self, *names: str | int) -> bytes:
        """A key of 32 bytes, by keyed BLAKE2b of the run's id and these names; every name has its length before it."""
        mac = hashlib.blake2b(key=self.secret, digest_size=KEY_BYTES, person=b"fulcrum-stream")
        for name in (self.run, *names):
            text = f"{type(name).__name__}:{name}".encode()
            mac.update(len(text).to_bytes(8, "little") + text)
        return mac.digest()

    def words(self, key: StreamKey, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """`count` random 64-bit words of a stream, int64, on the device."""
        return draw_words(*self.locate_stream(key), count, device)

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        """`count` numbers in [0, 1), float64, on the CPU."""
        return words_to_uniforms(self.words(key, count))

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        """`count` standard normal numbers, float64, on the CPU."""
        return words_to_normals(self.words(key, count_normal_words(count)), count).values


@dataclass(frozen=True, init=False)
class SeededRandomness(CipherRandomness):
    """Reproducible, for simulations. Whoever knows the private seed (and the settings) can subtract the noise."""

    seed: int = 0

    def __init__(self, seed: int, run: str = "") -> None:
        secret = hashlib.blake2b(f"{seed}".encode(), digest_size=KEY_BYTES, person=b"fulcrum-seed").digest()
        for name, value in (("secret", secret), ("run", run), ("mode", "seeded"), ("seed", seed)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, init=False, eq=False)
class SecureRandomness(CipherRandomness):
    """For real use: the secret is 32 bytes of the operating system's entropy. It is never written down.

    It serves one run in one process: a copy in another process, or in another run, would repeat the noise.
    """

    _process: int = field(default=0, repr=False)
    _runs: list[str] = field(default_factory=list, repr=False)

    def __init__(self, run: str = "") -> None:
        given = {"secret": os.urandom(KEY_BYTES), "run": run, "mode": "secure", "_process": os.getpid(), "_runs": []}
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def claim(self, run: str) -> None:
        """Reserve this source for the run of this id in ledgers; RunError if another run has used it."""
        if run not in self._runs and self._runs:
            raise RunError(
                f"this federation's randomness was used by run {self._runs[0]} before, and run {run} would repeat its "
                "noise; prepare the federation again for each run."
            )
        self._runs[:] = [run]

    def words(self, key: StreamKey, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """`count` random 64-bit words of a stream, int64, on the device; RunError in a forked process."""
        self.check_process()
        return super().words(key, count, device)

    def locate_stream(self, key: StreamKey) -> tuple[bytes, Nonce]:
        """The cipher's key and nonce of a stream; RunError in a forked process."""
        self.check_process()
        return super().locate_stream(key)

    def check_process(self) -> None:
        """Raise RunError in any process but the one that drew the secret."""
        if os.getpid() != self._process:
            raise RunError(
                "secure randomness was drawn in another process, and both would release the same noise; prepare the "
                "run in the process that trains it."
            )

    def __reduce__(self) -> str:
        raise RunError("secure randomness cannot be stored or sent: its secret never leaves the process.")


@dataclass(frozen=True)
class RecordedRandomness:
    """Replays recorded numbers by key; a key that was not recorded is an error."""

    uniforms: Mapping[StreamKey, torch.Tensor]
    normals: Mapping[StreamKey, torch.Tensor]
    mode: str = "recorded"

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        return self.uniforms[key][:count]

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        return self.normals[key][:count]


RANDOMNESS: dict[str, Callable[[int, str], CipherRandomness]] = {
    "seeded": SeededRandomness,
    "secure": lambda seed, run: SecureRandomness(run),
}
"""The choices of privacy.randomness: private seed, run's id -> source of randomness."""


def make_randomness(mode: str, seed: int, run: str = "") -> CipherRandomness:
    """The randomness of a run: mode `seeded` (for simulations) or `secure`. seed: the private one."""
    return RANDOMNESS[mode](seed, run)


def name_stream(purpose: str, *place: str | int, attempt: int = 0) -> StreamKey:
    """The name of a stream; a repeated attempt at a release that was paid again has streams of its own."""
    return (purpose, *place, attempt) if attempt else (purpose, *place)
