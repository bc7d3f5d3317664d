"""On a CPU releases are made in blocks and threads: the integers are those of the definition all the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fulcrum.clipping import find_rule
from fulcrum.privacy import exact_noise, host_noise, mechanism
from fulcrum.privacy.exact_noise import choose_grid, compute_margin, release_in_place, release_on_grid
from fulcrum.rng import SeededRandomness, chacha
from fulcrum.rng.normals import words_to_normals
from fulcrum.types import Bounds


def sums(count: int, size: float = 3.0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)) * size


@pytest.mark.parametrize("count", [1, 2, 3, 1000, 1001, 5003])
@pytest.mark.parametrize("blocks", [7, 64, 2**14])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_and_threads_do_not_change_the_integers(
    count: int, blocks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, key, x = SeededRandomness(3), ("noise", 1, 2, 3), sums(count)
    whole = exact_noise._release_some_rows(x[None], [0.7], [(source, key)])[0]
    monkeypatch.setattr(host_noise, "PAIRS_AT_ONCE", blocks)
    monkeypatch.setattr(host_noise, "PAIRS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = release_on_grid(x, 0.7, source, key)
    assert found.units.dtype == torch.int32
    assert torch.equal(found.integers, whole.integers)
    assert torch.equal(found.floats, whole.values.float())
    assert not torch.equal(found.integers, release_on_grid(x, 0.7, source, ("noise", 1, 2, 4)).integers)


@pytest.mark.parametrize("size", [0.0, 1.0, 2.0**9, 2.0**12, 1e20])
def test_sums_of_any_size_have_the_same_integers(size: float) -> None:
    """Beyond LARGEST_SIZE the integers do not fit 32 bits."""
    source, key, x = SeededRandomness(4), ("noise", 0, 0, 0), sums(501, size)
    if size == 1e20:
        x, scale = sums(501, 1e5), 2.0**-20
    else:
        scale = 1.0
    found, whole = (
        release_on_grid(x, scale, source, key),
        exact_noise._release_some_rows(x[None], [scale], [(source, key)]),
    )
    assert torch.equal(found.integers, whole[0].integers)
    assert torch.equal(found.floats, found.values.float())


def test_every_doubtful_coordinate_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick test leaves out no coordinate within its margin of a boundary; a smaller NEAR would."""
    source, key, scale, count = SeededRandomness(5), ("noise", 0, 0, 0), 1.9, 400_000
    grid, x = choose_grid(scale), sums(count)
    place, half = source.locate_stream(key), count // 2
    draws = words_to_normals(source.words(key, count), count)
    exact = (draws.values * scale + x.double()) / grid
    twice = [torch.cat([value, value]) for value in (draws.radius, draws.uniform)]
    # Margins a thousand times too large, so that many coordinates are within them; usual pairs only.
    usual = twice[0].gt(host_noise.SMALLEST_RADIUS) & twice[0].lt(host_noise.LARGEST_RADIUS)
    away = (exact - exact.round()).abs()
    margin = compute_margin(x.double(), exact, scale, grid, *twice)
    assert float(margin[usual].max()) < host_noise.NEAR
    noted = host_noise.round_on_host(x, scale, grid, place, torch.empty(count, dtype=torch.int32), 1)
    found = set(noted.place.tolist())
    wanted = torch.nonzero((away >= 0.5 - host_noise.NEAR * 0.99) | ~usual).flatten().tolist()
    assert len(wanted) > 50
    assert set(wanted) <= found
    pairs = {j % half for j in torch.nonzero(~usual).flatten().tolist()}
    assert pairs  # unusual pairs are noted with both coordinates
    assert {j for pair in pairs for j in (pair, half + pair)} <= found
    monkeypatch.setattr(host_noise, "NEAR", host_noise.NEAR / 4)
    fewer = host_noise.round_on_host(x, scale, grid, place, torch.empty(count, dtype=torch.int32), 1)
    assert not set(wanted) <= set(fewer.place.tolist())


def test_what_is_noted_is_decided_in_arbitrary_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    source, key, x = SeededRandomness(6), ("noise", 0, 0, 0), sums(41)
    sure = release_on_grid(x, 0.3, source, key)
    monkeypatch.setattr(host_noise, "NEAR", 0.5)
    monkeypatch.setattr(exact_noise, "compute_margin", lambda x, *given: x * 0 + 1.0)
    decided: list[float] = []
    decide = exact_noise.decide_in_high_precision

    def count_decisions(x: float, *given: object) -> int:
        decided.append(x)
        return decide(x, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(exact_noise, "decide_in_high_precision", count_decisions)
    found = release_on_grid(x, 0.3, source, key)
    assert torch.equal(found.units, sure.units)
    assert sorted(decided) == sorted(x.tolist())
    monkeypatch.setattr(exact_noise, "decide_in_high_precision", lambda *given: decide(*given) + 1)
    assert torch.equal(release_on_grid(x, 0.3, source, key).units, sure.units + 1)  # the wrong case shows


@pytest.mark.parametrize("openssl", [True, False])
def test_a_stream_is_read_from_any_place(openssl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not openssl:
        monkeypatch.setattr(chacha, "_openssl", lambda: None)
    key, nonce = bytes(range(32)), (1, 2, 3)
    whole = chacha.draw_words(key, nonce, 200).numpy()
    for start in (0, 1, 7, 8, 9, 63, 100):
        read, got = chacha.open_stream(key, nonce, start), []
        for size in (1, 5, 0, 16, 33):
            words = torch.empty(size, dtype=torch.int64)
            read(words)
            got.append(words.numpy())
        assert np.array_equal(np.concatenate(got), whole[start : start + 55])
        assert not np.array_equal(np.concatenate(got), whole[start + 1 : start + 56])


@pytest.mark.parametrize("size", [0.0, 1.0, 1e5, float("nan"), float("inf")])
@pytest.mark.parametrize("near", [host_noise.NEAR, 0.5])
def test_a_release_over_the_sum_has_the_same_numbers(size: float, near: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of coordinates that are decided later: their sums are overwritten by then."""
    monkeypatch.setattr(host_noise, "NEAR", near)
    if near == 0.5:
        monkeypatch.setattr(exact_noise, "compute_margin", lambda x, *given: x * 0 + 1.0)
    source, key, scale = SeededRandomness(7), ("noise", 0, 0, 0), 2.0**-20 if size == 1e5 else 0.4
    x = sums(41 if near == 0.5 else 2_001 if size == 1e5 else 70_001, size if np.isfinite(size) else 1.0)
    x[3] = x[3] if np.isfinite(size) else size
    wanted = release_on_grid(x.clone(), scale, source, key).floats
    found = release_in_place(x, scale, source, key)
    assert torch.equal(found, wanted)
    assert (found.data_ptr() == x.data_ptr()) == (size in (0.0, 1.0))
    assert not torch.equal(found, release_on_grid(torch.zeros_like(x) + 1, scale, source, key).floats)


@pytest.mark.parametrize("rule", ["fixed", "quantile"])
@pytest.mark.parametrize("asked", [True, False])
def test_a_client_releases_the_same_over_its_sum(rule: str, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source, made = SeededRandomness(8), find_rule(rule)
    bounds = Bounds(torch.tensor([0.7]), 1.0)
    scale = mechanism.compute_charged_scale(made, bounds, 0.1, 1.3, 50.0, asked)
    x, extra = sums(301), sums(1 if rule == "quantile" else 0)
    wanted = mechanism.release_with_noise(x.clone(), extra, scale, source, (1, 2, 3))
    monkeypatch.setattr(mechanism, "LARGE_SUM", 1)
    kept = mechanism.release_with_noise(x, extra, scale, source, (1, 2, 3))
    assert torch.equal(x, sums(301))
    found = mechanism.release_with_noise(x, extra, scale, source, (1, 2, 3), True)
    for one in (kept, found):
        assert torch.equal(one[0], wanted[0])
        assert torch.equal(one[1], wanted[1])
    assert found[0].data_ptr() == x.data_ptr()
