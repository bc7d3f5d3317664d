"""Random numbers of stacked training: a repeated round gets the same ones, and nothing is drawn twice."""

from __future__ import annotations

import pytest
import torch

from fulcrum.engines.stacked import sampling
from fulcrum.engines.stacked.draws import RandomDraws
from fulcrum.rng import Randomness, SecureRandomness, SeededRandomness, StreamKey

CPU = torch.device("cpu")


def drawn(draws: RandomDraws, key: StreamKey, source: Randomness, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    uniforms, normals = torch.full((8,), -1.0, dtype=torch.float64), torch.full((8,), -1.0)
    draws.begin_round(t)
    names: StreamKey = (t, *key)
    draws.fill([uniforms, normals], key, lambda: [source.uniform(("u", *names), 8), source.normal(("n", *names), 8)])
    return uniforms, normals


@pytest.mark.parametrize("source", [SeededRandomness(3), SecureRandomness()])
def test_a_round_that_is_repeated_gets_the_same_numbers(source: Randomness) -> None:
    draws = RandomDraws(CPU, [source])
    first, step = drawn(draws, ("noise", 0), source, 1), drawn(draws, ("noise", 1), source, 1)
    again = drawn(draws, ("noise", 0), source, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], step[0])
    later = drawn(draws, ("noise", 0), source, 2)
    assert not torch.equal(first[0], later[0])
    back = drawn(draws, ("noise", 0), source, 1)  # a round that is over: only seeded numbers come back
    assert torch.equal(first[0], back[0]) == isinstance(source, SeededRandomness)


def test_values_of_the_host_fill_the_first_places_only() -> None:
    buffer = torch.full((4,), -1.0)
    found = RandomDraws(CPU, [SeededRandomness(0)]).fill([buffer], ("noise",), lambda: [torch.ones(2)])
    assert buffer.tolist() == [1.0, 1.0, -1.0, -1.0]
    assert found is not None
    assert found[0].tolist() == [1.0, 1.0]


def test_the_device_draws_by_round_key_and_all_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)

    def on_device(seeds: list[int], key: StreamKey, t: int) -> torch.Tensor:
        uniforms, normals = torch.zeros(2000, dtype=torch.float64), torch.zeros(2000)
        draws = RandomDraws(CPU, [SeededRandomness(seed) for seed in seeds])
        draws.begin_round(t)
        assert draws.fill([uniforms, normals], key, lambda: pytest.fail("the device draws")) is None
        assert 0 <= float(uniforms.min()) < 0.1 < 0.9 < float(uniforms.max()) < 1
        assert float(normals.mean()) == pytest.approx(0, abs=0.1)
        assert float(normals.std()) == pytest.approx(1, abs=0.1)
        return torch.cat([uniforms, normals])

    one = on_device([0, 1], ("noise", 0), 1)
    assert torch.equal(one, on_device([0, 1], ("noise", 0), 1))
    for other in (([0, 2], ("noise", 0), 1), ([0, 1], ("noise", 1), 1), ([0, 1], ("noise", 0), 2)):
        assert not torch.equal(one, on_device(*other))
