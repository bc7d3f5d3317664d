"""Random numbers of stacked training: each stream's own, however streams lie in a buffer and wherever they are made."""

from __future__ import annotations

import pytest
import torch

from fulcrum.engines.stacked import draws as module
from fulcrum.engines.stacked import sampling
from fulcrum.engines.stacked.draws import NormalStream, RandomDraws, UniformStream, make_stream_table
from fulcrum.rng import CipherRandomness, Randomness, SecureRandomness, SeededRandomness
from fulcrum.rng.chacha import draw_keyed_words
from support.randomness import Once

CPU = torch.device("cpu")
SOURCES: list[Randomness] = [SeededRandomness(3, "a"), SeededRandomness(3, "b"), SecureRandomness()]


@pytest.fixture(params=["host", "device", "device, little memory"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who makes the numbers: the host one by one, or the device many at once; as much as memory allows."""
    if request.param != "host":
        monkeypatch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)
    if request.param == "device, little memory":
        monkeypatch.setattr(module, "WORDS_AT_ONCE", 20)
    return str(request.param)


def list_uniforms(sources: list[Randomness]) -> list[UniformStream]:
    """Three parties of uneven size for each source, one of them empty, with gaps between them."""
    found, start = [], 2
    for source in sources:
        for k, size in enumerate((5, 0, 17)):
            found.append(UniformStream(source, ("sample", 4, k, 1), start, size))
            start += size + 1
    return found


@pytest.mark.usefixtures("place")
def test_uniforms_are_those_of_the_streams_and_one_elsewhere() -> None:
    streams = list_uniforms(SOURCES)
    buffer = torch.full((6, 14), -1.0, dtype=torch.float64)
    given = RandomDraws(CPU, SOURCES).fill_uniforms(buffer, streams)
    expected = torch.ones(84, dtype=torch.float64)
    for source, key, start, size in streams:
        expected[start : start + size] = source.uniform(key, size)
    assert torch.equal(buffer.view(-1), expected)
    assert given is None or torch.equal(given, buffer)
    assert not torch.equal(expected[2:7], expected[27:32])  # two runs with one seed share nothing


@pytest.mark.usefixtures("place")
def test_normals_are_those_of_the_streams_and_zero_elsewhere() -> None:
    streams = [
        NormalStream(source, ("noise", 4, k, 0, 2), 3 * i + k) for i, source in enumerate(SOURCES) for k in (0, 2)
    ]
    table = torch.full((9, 7), -1.0)
    RandomDraws(CPU, SOURCES).fill_normals(table, streams)
    expected = torch.zeros(9, 7)
    for source, key, row, _ in streams:
        expected[row] = source.normal(key, 7)
    torch.testing.assert_close(table, expected, rtol=1e-6, atol=1e-12)
    assert bool((table[1::3] == 0).all())


@pytest.mark.usefixtures("place")
def test_sums_of_a_row_are_added_in_order_whatever_other_rows_hold() -> None:
    def total(sources: list[Randomness], mine: int) -> torch.Tensor:
        streams = [
            NormalStream(source, ("noise", 4, k, 0), i, 0.1 + k)
            for i, source in enumerate(sources)
            for k in range(9 if i == mine else 3)
        ]
        table = torch.full((len(sources) + 1, 5), -1.0, dtype=torch.float64)
        return RandomDraws(CPU, sources).sum_normals(table, streams)

    alone = total([SOURCES[0]], 0)
    expected = sum((0.1 + k) * SOURCES[0].normal(("noise", 4, k, 0), 5) for k in range(9))
    torch.testing.assert_close(alone[0], expected, rtol=1e-12, atol=1e-12)
    assert bool((alone[1] == 0).all())
    for others in ([SOURCES[0], SOURCES[1]], [SOURCES[1], SOURCES[0], SOURCES[2]]):
        at = others.index(SOURCES[0])
        assert torch.equal(total(others, at)[at], alone[0])


def test_a_table_names_the_streams_as_their_sources_do() -> None:
    keys = [("sample", 4, 2, 1), ("noise", 4, 2, 1), ("noise", 4, 3, 1, 2), ("noise", "central", 7), ("cohort", 3)]
    streams = [NormalStream(source, key, 0) for key in keys for source in SOURCES]
    words = draw_keyed_words(torch.from_numpy(make_stream_table(streams)), 9)
    assert len({tuple(row) for row in words.tolist()}) == len(streams)
    for stream, row in zip(streams, words, strict=True):
        assert isinstance(stream.source, CipherRandomness)
        assert torch.equal(row, stream.source.words(stream.key, 9))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("source", SOURCES)
def test_a_round_that_is_repeated_gets_the_same_numbers(source: Randomness) -> None:
    draws = RandomDraws(CPU, [source])

    def drawn(t: int, step: int) -> torch.Tensor:
        draws.begin_round(t)
        uniforms, normals = torch.zeros(8, dtype=torch.float64), torch.zeros(1, 8)
        draws.fill_uniforms(uniforms, [UniformStream(source, ("sample", t, 0, step), 0, 8)])
        draws.fill_normals(normals, [NormalStream(source, ("noise", t, 0, step), 0)])
        return torch.cat([uniforms, normals[0].double()])

    first, step, later = drawn(1, 0), drawn(1, 1), drawn(2, 0)
    assert torch.equal(first, drawn(1, 0))  # secure numbers too: nothing is kept
    assert not torch.equal(first, step)
    assert not torch.equal(first, later)


def test_numbers_that_cannot_be_drawn_again_are_kept_for_a_round() -> None:
    sources = [Once(SeededRandomness(s), set()) for s in (0, 1)]
    draws = RandomDraws(CPU, sources)

    def drawn(t: int) -> torch.Tensor:
        draws.begin_round(t)
        uniforms, normals = torch.zeros(6, dtype=torch.float64), torch.zeros(2, 4)
        draws.fill_uniforms(uniforms, [UniformStream(s, ("sample", t, 0, 0), 3 * i, 3) for i, s in enumerate(sources)])
        draws.fill_normals(normals, [NormalStream(s, ("noise", t, 0, 0), i) for i, s in enumerate(sources)])
        return torch.cat([uniforms, normals.flatten().double()])

    first = drawn(1)
    assert torch.equal(first, drawn(1))
    assert not torch.equal(first, drawn(2))
    with pytest.raises(AssertionError):
        drawn(1)  # the round is over


@pytest.mark.parametrize("count", [1, 2, 5, 1000, 1001])
def test_a_program_draws_the_numbers_of_the_streams(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a device's program makes by itself, a few at a time; padding has sizes of its own."""
    monkeypatch.setattr(module, "NORMALS_AT_ONCE", 700)
    source = SeededRandomness(3, "a")
    streams = [NormalStream(source, ("noise", 1, client, 0), client) for client in range(3)]
    table = torch.from_numpy(module.make_padded_table([streams, streams[:1]], 4))
    assert table.shape == (2, 4, 11)
    found = module.draw_normal_rows(table[0], count)
    uniforms = module.draw_uniform_rows(table[0], torch.tensor([count, 1, 0, 0]), count)
    for client, stream in enumerate(streams):
        assert torch.equal(found[client], source.normal(stream.key, count).float())
        other = source.normal(("noise", 2, client, 0), count).float()
        assert not torch.equal(found[client], other)
    assert torch.equal(uniforms[0], source.uniform(streams[0].key, count))
    assert bool((uniforms[1, 1:] == 1).all())
    assert bool((uniforms[2:] == 1).all())
