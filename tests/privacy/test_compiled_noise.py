"""The compiled loop of the noise: its cipher, its functions' errors, and the same releases as without it."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
import torch

from fulcrum.gradients import compiled
from fulcrum.privacy import compiled_noise, exact_noise, host_noise
from fulcrum.privacy.exact_noise import choose_grid, release_in_place, release_on_grid
from fulcrum.rng import SeededRandomness, chacha
from fulcrum.rng.normals import words_to_normals

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(compiled.find_kernels() is None, reason="no C compiler: there is no compiled loop")
X86 = platform.machine() in ("x86_64", "AMD64")
Words = npt.NDArray[np.uint64]
Functions = Callable[[Words], tuple[npt.NDArray[np.float64], ...]]

ALLOWED = 2.0**-50
"""The error that noise.c states: of ln U relative to it, of cos and sin relative to 1."""


@cache
def source() -> str:
    return (resources.files(compiled) / "noise.c").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ctypes.CDLL]:
    """Compiles some text of noise.c with more options."""

    def run(text: str, *options: str) -> ctypes.CDLL:
        folder: Path = tmp_path_factory.mktemp("noise")
        (folder / "noise.c").write_text(text, encoding="utf-8")
        words = [str(COMPILER), *compiled.OPTIONS, "-Wall", "-Werror", *options, "-o", "noise.so", "noise.c", "-lm"]
        subprocess.run(words, cwd=folder, check=True, timeout=120)
        return ctypes.CDLL(str(folder / "noise.so"))

    return run


def point(values: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)


def functions_of(library: ctypes.CDLL) -> Functions:
    def run(words: Words) -> tuple[npt.NDArray[np.float64], ...]:
        padded = np.concatenate([words, np.ones(-len(words) % 8, dtype=np.uint64)])
        found = tuple(np.empty(len(padded)) for _ in range(3))
        library.fulcrum_noise_functions(point(padded), ctypes.c_int64(len(padded)), *map(point, found))
        return tuple(values[: len(words)] for values in found)

    return run


def draw(library: ctypes.CDLL, key: bytes, nonce: tuple[int, int, int], first: int, count: int) -> Words:
    found = np.zeros(count, dtype=np.uint64)
    place = np.array(nonce, dtype=np.uint32)
    library.fulcrum_draw_words(key, point(place), ctypes.c_int64(first), ctypes.c_int64(count), point(found))
    return found


def sums(count: int, size: float = 3.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=dtype) * size


# --- the cipher ---------------------------------------------------------------------------------


def test_the_keystream_is_that_of_rfc_8439() -> None:
    """Section 2.3.2: key 00 01 .. 1f, nonce 00000009 0000004a 00000000, block 1."""
    library = compiled.find_kernels()
    assert library is not None
    nonce = (0x09000000, 0x4A000000, 0)
    wanted = bytes.fromhex(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert draw(library, bytes(range(32)), nonce, 8, 8).tobytes() == wanted
    assert draw(library, bytes(range(32)), nonce, 0, 8).tobytes() != wanted


@pytest.mark.parametrize("first", [0, 1, 7, 8, 9, 1023, 1024, 5001, 2**32 + 3, 2**35 - 4000])
def test_words_are_those_of_the_stream_from_any_place(first: int) -> None:
    library, key, nonce = compiled.find_kernels(), bytes(range(7, 39)), (3, 2**32 - 1, 5)
    assert library is not None
    whole = torch.empty(4000, dtype=torch.int64)
    chacha.open_stream(key, nonce, first)(whole)
    for count in (1, 2, 8, 63, 128, 1023, 1024, 1025, 2049, 4000):
        assert np.array_equal(draw(library, key, nonce, first, count), whole.numpy().view(np.uint64)[:count])


# --- functions ----------------------------------------------------------------------------------


def hard_words() -> Words:
    """Near 0 and 2^64, near every eighth of a turn, and near powers of two and of sqrt 2 where the pieces meet."""
    near = [0, *(2**k for k in range(0, 64, 3)), *range(1, 6)]
    places = [k << 61 for k in range(9)]
    places += [int(mpmath.floor(mpmath.mpf(2) ** (k + mpmath.mpf(1) / 2))) for k in range(1, 64)]
    places += [2**k for k in range(64)]
    found = {(place + sign * step) % 2**64 for place in places for step in near for sign in (1, -1)}
    return np.array(sorted(found - {0}), dtype=np.uint64)


def measure_exactly(functions: Functions, words: Words) -> tuple[float, float, float]:
    """The largest errors, in units of what is allowed, against arbitrary precision. U is the rounded word."""
    worst = [mpmath.mpf(0)] * 3
    with mpmath.workdps(40):
        for word, *found in zip(words.tolist(), *(values.tolist() for values in functions(words)), strict=True):
            log = mpmath.log(mpmath.mpf(float(word)) / 2**64)
            turn = mpmath.mpf(word) / 2**63
            errors = [
                abs(found[0] - log) / abs(log) if log else abs(mpmath.mpf(found[0])),
                abs(found[1] - mpmath.cospi(turn)),
                abs(found[2] - mpmath.sinpi(turn)),
            ]
            worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    return tuple(float(value / ALLOWED) for value in worst)  # type: ignore[return-value]


def measure_widely(functions: Functions, words: Words) -> tuple[float, float, float]:
    """As `measure_exactly`, against the platform's numbers of 80 bits, for millions of words."""
    log, cosine, sine = functions(words)
    true = np.log(words.astype(np.float64).astype(np.longdouble) * np.longdouble(2.0) ** -64)
    eighth = np.uint64(1 << 61)
    quarter = ((words + eighth) >> np.uint64(62)).astype(np.int64)
    rest = (words - (quarter.astype(np.uint64) << np.uint64(62))).view(np.int64).astype(np.longdouble)
    angle = rest * (np.longdouble(np.pi) + np.longdouble(1.2246467991473532e-16)) * np.longdouble(2.0) ** -63
    c, s = np.cos(angle), np.sin(angle)
    waves = np.array([[c, s], [-s, c], [-c, -s], [s, -c]])[quarter % 4, :, np.arange(len(words))]
    errors = (np.abs(log - true) / np.abs(true), np.abs(cosine - waves[:, 0]), np.abs(sine - waves[:, 1]))
    return tuple(float(np.max(error)) / ALLOWED for error in errors)  # type: ignore[return-value]


def change_coefficient(name: str, index: int, by: float) -> str:
    """noise.c with one coefficient of a polynomial off by `by`."""
    table = re.search(rf"{name}\[\] = {{(.*?)}}", source(), flags=re.DOTALL)
    assert table is not None
    number = table.group(1).replace("\n", " ").split(",")[index].strip()
    changed = table.group(0).replace(number, (float.fromhex(number) + by).hex())
    assert changed != table.group(0)
    return source().replace(table.group(0), changed)


def test_functions_stay_within_their_error_at_hard_words(build: Callable[..., ctypes.CDLL]) -> None:
    library = compiled.find_kernels()
    assert library is not None
    words = hard_words()[::5]
    assert max(measure_exactly(functions_of(library), words)) < 1
    for position, (name, index) in enumerate([("LOG", 0), ("COS", 0), ("SIN", 1)]):
        wrong = functions_of(build(change_coefficient(name, index, 2.0**-42)))
        assert measure_exactly(wrong, words[::7])[position] > 1


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="long double is not wider than double here")
def test_functions_stay_within_their_error_for_a_million_words(build: Callable[..., ctypes.CDLL]) -> None:
    library = compiled.find_kernels()
    assert library is not None
    random = np.random.default_rng(5).integers(1, 2**64, 2**19, dtype=np.uint64)
    some = [random, random >> np.uint64(20), ~random >> np.uint64(9), ~(random >> np.uint64(14)), hard_words()]
    words = np.concatenate(some)
    words = words[words.astype(np.float64) < 2.0**64]  # those that round to U = 1 have R = 0, and are always noted
    assert max(measure_widely(functions_of(library), words)) < 1
    for position, (name, index) in enumerate([("LOG", 17), ("COS", 4), ("SIN", 5)]):  # the smallest part of each
        wrong = functions_of(build(change_coefficient(name, index, 2.0**-22)))
        assert measure_widely(wrong, random[: 2**16])[position] > 1


@pytest.mark.skipif(not X86, reason="options of x86")
@pytest.mark.parametrize("options", [("-mno-avx512f",), ("-march=x86-64",), ("-O1", "-ffp-contract=off")])
def test_other_instruction_sets_give_the_same_release(
    options: tuple[str, ...], build: Callable[..., ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(source(), *options)
    words = hard_words()[::41]
    assert max(measure_exactly(functions_of(library), words)) < 1
    rounder = compiled_noise.declare_rounder(library)
    assert compiled_noise._digest_example(rounder) == compiled_noise.EXAMPLE
    x, key = sums(5001), ("noise", 0, 0, 0)
    wanted = release_on_grid(x, 0.4, SeededRandomness(2), key).units
    monkeypatch.setattr(compiled_noise, "find_rounder", lambda: rounder)
    assert torch.equal(release_on_grid(x, 0.4, SeededRandomness(2), key).units, wanted)


def test_a_loop_that_does_not_reproduce_the_example_is_not_taken(
    build: Callable[..., ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled_noise.find_rounder() is not None
    find = compiled_noise.find_rounder.__wrapped__
    off_by_a_rotation = source().replace("rotate(v[b] ^ v[c], 7)", "rotate(v[b] ^ v[c], 8)")
    for wrong in (off_by_a_rotation, change_coefficient("LOG", 0, 2.0**-16)):
        assert wrong != source()
        library = build(wrong)
        monkeypatch.setattr(compiled_noise, "find_kernels", lambda found=library: found)
        assert find() is None
    monkeypatch.setattr(compiled_noise, "find_kernels", lambda: None)
    assert find() is None


# --- releases -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 127, 128, 129, 255, 2047, 2048, 2049, 4095, 4097, 40_001])
@pytest.mark.parametrize(("scale", "size"), [(0.7, 3.0), (2.0**-90, 2.0**-89), (2.0**80, 2.0**86), (1.0, 0.0)])
def test_the_loop_writes_what_is_written_without_it(
    count: int, scale: float, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, place = choose_grid(scale), SeededRandomness(3).locate_stream(("noise", 1, count, 3))
    monkeypatch.setattr(host_noise, "PAIRS_PER_THREAD", 100)
    for wide, real, threads in ((False, False, 1), (True, False, 3), (False, True, 2), (True, True, 1)):
        x = sums(count, size, torch.float64 if wide else torch.float32)
        found, wanted = (torch.empty(count, dtype=torch.float32 if real else torch.int32) for _ in range(2))
        noted = host_noise.round_on_host(x, scale, grid, place, found, threads)
        with monkeypatch.context() as without:
            without.setattr(compiled_noise, "find_rounder", lambda: None)
            other = host_noise.round_on_host(x, scale, grid, place, wanted, threads)
        sure = torch.ones(count, dtype=torch.bool)
        sure[noted.place] = False
        assert torch.equal(found[sure], wanted[sure])
        assert sorted(set(noted.place.tolist())) == sorted(set(other.place.tolist()))
        assert noted.x.tolist() == x[noted.place].tolist()
        again = SeededRandomness(3).locate_stream(("noise", 2, count, 3))
        host_noise.round_on_host(x, scale, grid, again, wanted, threads)
        assert not torch.equal(found, wanted)


@pytest.mark.parametrize("room", [128, 131, 512])
def test_a_full_list_is_emptied_and_the_loop_goes_on(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is near a boundary here; each coordinate is noted once, with its own numbers."""
    count, scale = 3001, 0.9
    source, key = SeededRandomness(4), ("noise", 0, 0, 0)
    draws = words_to_normals(source.words(key, count + 1), count)
    monkeypatch.setattr(compiled_noise, "ROOM", room)
    x = sums(count)
    into = x.clone()
    monkeypatch.setattr(host_noise, "NEAR", 0.5)
    noted = host_noise.round_on_host(into, scale, choose_grid(scale), source.locate_stream(key), into, 1)
    assert sorted(noted.place.tolist()) == list(range(count))
    assert noted.x.tolist() == x[noted.place].tolist()  # of before it was overwritten
    pair = torch.from_numpy(noted.place) % 1501
    torch.testing.assert_close(torch.from_numpy(noted.radius.copy()), draws.radius[pair], rtol=1e-9, atol=1e-9)
    t = (draws.words[pair].double() * 2.0**-64).numpy()
    np.testing.assert_allclose(noted.t, t, rtol=1e-15)
    exact = (x.double() + scale * draws.values)[noted.place].numpy() / choose_grid(scale)
    np.testing.assert_allclose(noted.rounded, np.rint(exact), atol=1)
    np.testing.assert_allclose(noted.away, np.abs(exact - np.rint(exact)), atol=2.0**-14)


@pytest.mark.parametrize("side", [0, 1])
def test_a_coordinate_on_a_boundary_is_noted_and_decided(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """x puts x + s N half a grid unit from an integer, up to the last bits: float64 cannot know the integer."""
    source, key, scale, count = SeededRandomness(9), ("noise", 0, 0, 0), 1.3, 1001
    grid, half = choose_grid(scale), 501
    draws = words_to_normals(source.words(key, count + 1), count)
    places = side * half + torch.tensor([0, 5, 63, 64, 400, 499])
    radius = draws.radius[places % half]
    assert bool(((radius > host_noise.SMALLEST_RADIUS) & (radius < host_noise.LARGEST_RADIUS)).all())
    x = sums(count, dtype=torch.float64)
    x[places] = (torch.round(x[places] / grid) + 0.5) * grid - scale * draws.values[places]
    noted = host_noise.round_on_host(
        x, scale, grid, source.locate_stream(key), torch.empty(count, dtype=torch.int32), 1
    )
    assert set(places.tolist()) <= set(noted.place.tolist())
    found = release_on_grid(x, scale, source, key)
    assert torch.equal(found.integers, exact_noise._release_some_rows(x[None], [scale], [(source, key)])[0].integers)
    # Without the list the wrong integer would be released for some of them, or their neighbours' margins be ignored.
    monkeypatch.setattr(host_noise, "NEAR", 0.0)
    fewer = host_noise.round_on_host(
        x, scale, grid, source.locate_stream(key), torch.empty(count, dtype=torch.int32), 1
    )
    assert not set(places.tolist()) <= set(fewer.place.tolist())


def test_pairs_near_the_ends_are_noted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    source, key, count = SeededRandomness(1), ("noise", 0, 0, 0), 200_000
    words = source.words(key, count)[: count // 2]
    x, into = torch.zeros(count), torch.empty(count, dtype=torch.int32)
    for limit in (2.0**-16, 2.0**-12):
        monkeypatch.setattr(host_noise, "SMALLEST_USUAL", limit)
        noted = host_noise.round_on_host(x, 1.0, choose_grid(1.0), source.locate_stream(key), into, 1)
        rare = torch.nonzero(words.double().abs() < limit * 2.0**64).flatten()
        assert len(rare) > 1
        assert set(rare.tolist()) | set((rare + count // 2).tolist()) <= set(noted.place.tolist())


@pytest.mark.parametrize("scale", [1e-320, 1e-310, 1e-290, 1e300])
def test_extreme_scales_are_released_exactly(scale: float) -> None:
    source, key, x = SeededRandomness(1), ("noise", 0, 0, 0), torch.zeros(7, dtype=torch.float64)
    if choose_grid(scale) == 0:
        return
    found = release_on_grid(x, scale, source, key)
    assert torch.equal(found.integers, exact_noise._release_some_rows(x[None], [scale], [(source, key)])[0].integers)
    assert 0 < int(found.integers.abs().max()) < 2**25


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_sums_that_the_loop_cannot_read_are_released_all_the_same(dtype: torch.dtype) -> None:
    source, key, x = SeededRandomness(5), ("noise", 0, 0, 0), sums(601).to(dtype)
    wanted = release_on_grid(x, 0.7, source, key).units
    spread = torch.stack([x, x], dim=1)[:, 0]
    assert not compiled_noise.accepts(spread, torch.empty(601, dtype=torch.int32))
    assert not compiled_noise.accepts(x.float(), torch.empty(600, dtype=torch.int32))
    assert torch.equal(release_on_grid(spread, 0.7, source, key).units, wanted)
    assert not torch.equal(release_in_place(x + 1, 0.7, source, key), wanted * choose_grid(0.7))
