"""Scattering features: kymatio's numbers, the properties they are known for, and a map of one record at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from fulcrum.api import prepare
from fulcrum.config import Data, Settings, check
from fulcrum.data import Dataset, featured, from_arrays
from fulcrum.data.features import made_up
from fulcrum.data.scattering import CHANNELS, scatter
from fulcrum.errors import ConfigError, DataError
from fulcrum.study.play import Datasets

CPU = torch.device("cpu")
ON = Data(features="scattering")


def image(channels: int, height: int, width: int) -> Tensor:
    """[1, C, H, W]: waves whose direction and length change over the image."""
    c, i, j = np.meshgrid(*map(np.arange, (channels, height, width)), indexing="ij")
    return torch.from_numpy(np.sin(0.9 * i + 0.1 * i * j / 3 + c) * np.cos(0.4 * j - c)).float()[None]


def texture(seed: int = 0, shape: tuple[int, ...] = (1, 32, 32)) -> Tensor:
    return torch.randn((1, *shape), generator=torch.Generator().manual_seed(seed))


# From kymatio 0.3.0, Scattering2D(J=2, shape, L=8) on `image`, channels of all colours in a row; its filters are
# normalised with 3.1415 for pi, three factors of 1.00003 at the most.
GOLDEN: dict[tuple[int, int, int], tuple[dict[tuple[int, int, int], float], float, float]] = {
    (1, 28, 28): (
        {
            (0, 0, 0): 0.458873, (3, 1, 1): 0.110451, (9, 1, 2): 0.017137, (16, 0, 1): 0.047007,
            (17, 1, 0): 0.007517, (40, 1, 1): 0.01863, (80, 1, 1): 0.001762, (51, 1, 1): 0.002076,
        },
        80.114138,
        3.143532,
    ),
    (3, 32, 32): (
        {
            (0, 0, 0): 0.458896, (3, 1, 1): 0.110458, (9, 1, 2): 0.017808, (17, 1, 0): 0.006204,
            (40, 1, 1): 0.018251, (80, 1, 1): 0.00209, (242, 0, 2): 0.001117, (213, 1, 1): 0.001447,
        },
        303.169644,
        6.031825,
    ),
    (1, 8, 12): (
        {
            (0, 0, 0): 0.458249, (3, 1, 1): 0.112705, (9, 1, 2): 0.028638, (16, 0, 1): 0.038765,
            (17, 1, 0): 0.005369, (40, 1, 1): 0.013575, (80, 0, 2): 0.004378, (51, 1, 1): 0.001744,
        },
        10.077976,
        1.157414,
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", GOLDEN)
def test_the_numbers_are_kymatios(shape: tuple[int, int, int]) -> None:
    values, total, norm = GOLDEN[shape]
    found = scatter(image(*shape))[0]
    assert found.shape == (81 * shape[0], shape[1] // 4, shape[2] // 4)
    for place, value in values.items():
        assert float(found[place]) == pytest.approx(value, rel=2e-4, abs=1e-6)
    assert float(found.double().sum()) == pytest.approx(total, rel=2e-4)
    assert float(found.double().norm()) == pytest.approx(norm, rel=2e-4)


def test_constants_pass_the_low_pass_alone() -> None:
    found = scatter(torch.full((1, 1, 28, 28), 0.7))[0]
    torch.testing.assert_close(found[0], torch.full((7, 7), 0.7), rtol=1e-4, atol=0)
    assert float(found[1:].abs().max()) < 1e-6
    ramp = torch.arange(28.0).expand(1, 1, 28, 28) / 28
    assert float(scatter(ramp)[0, 1:].abs().max()) > 1e-3


def test_first_order_moduli_scale_with_the_image_and_drop_its_mean() -> None:
    x = texture()
    torch.testing.assert_close(scatter(3 * x)[:, 1:], 3 * scatter(x)[:, 1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scatter(x + 5)[:, 1:], scatter(x)[:, 1:], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(scatter(x + 5)[:, :1], scatter(x)[:, :1], rtol=0.1)


def test_a_shift_by_one_pixel_moves_features_less_than_pixels() -> None:
    x = texture(shape=(1, 64, 64))
    shifted = torch.roll(x, 1, dims=3)

    def moved(a: Tensor, b: Tensor) -> float:
        return float((a - b).norm() / a.norm())

    inner = (..., slice(2, -2), slice(2, -2))  # away from where the roll wraps
    assert moved(scatter(x)[inner], scatter(shifted)[inner]) < 0.4 * moved(x, shifted)
    first = scatter(x)[:, 1:][inner]
    assert moved(first, scatter(shifted)[:, 1:][inner]) < 0.3 * moved(x, shifted)


def test_directions_are_told_apart_and_turn_with_the_image() -> None:
    waves = torch.sin(torch.arange(32.0) * 3 * np.pi / 8).expand(1, 1, 32, 32).contiguous()
    across, down = (scatter(x)[0, 9:17].mean(dim=(1, 2)) for x in (waves, waves.transpose(2, 3)))
    assert int(across.argmax()) != int(down.argmax())
    assert (int(across.argmax()) - int(down.argmax())) % 8 == 4  # a quarter turn is four of eight directions


@pytest.mark.parametrize("shape", [(2, 28, 28), (2, 1, 30, 28), (2, 1, 4, 28)])
def test_what_is_not_an_image_of_a_fitting_size_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="multiples of 4"):
        scatter(torch.zeros(shape))


# --- as a setting -----------------------------------------------------------------------------------


def toy_images(n: int = 40) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % 2
    waves = torch.sin(torch.arange(8.0) * 2)[None, None, None].expand(n, 1, 8, 8)
    x = torch.where(y[:, None, None, None] == 0, waves, waves.transpose(2, 3))
    x = x + 0.3 * torch.randn(x.shape, generator=generator)
    return from_arrays(x[10:], y[10:], x[:10], y[:10], name="toy", classes=2)


def test_a_record_becomes_the_same_whatever_lies_beside_it() -> None:
    data = toy_images()
    whole, alone = featured(data, ON, CPU), featured(dataclasses.replace(data, x=data.x[3:4]), ON, CPU)
    torch.testing.assert_close(whole.x[3:4], alone.x, rtol=1e-4, atol=1e-5)
    assert whole.x.shape == (30, CHANNELS, 2, 2)
    assert whole.x.dtype == torch.float32
    assert torch.equal(whole.y, data.y)
    groups = whole.x.reshape(30, 27, -1)
    assert float(groups.mean(dim=2).abs().max()) < 1e-4  # each record's own statistics, nobody else's
    raw = featured(data, dataclasses.replace(ON, feature_groups=0), CPU)
    assert float(raw.x.reshape(30, 27, -1).mean(dim=2).abs().max()) > 1e-2
    assert len({data.fingerprint, whole.fingerprint, raw.fingerprint}) == 3
    assert featured(data, Data(), CPU) is data


def test_groups_that_do_not_divide_the_channels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.feature_groups = 7"):
        featured(toy_images(), dataclasses.replace(ON, feature_groups=7), CPU)
    with pytest.raises(ConfigError, match=r"data\.features"):
        check(Settings().replace(data={"features": "wavelets"}, privacy={"sigma": 1.0}))


def test_mirror_images_become_the_same_and_made_up_images_the_origin() -> None:
    data = toy_images()
    mirrored = dataclasses.replace(data, x=data.x.flip(-1))
    both, one = (featured(d, dataclasses.replace(ON, feature_mirror=True), CPU).x for d in (data, mirrored))
    torch.testing.assert_close(both, one, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(featured(data, ON, CPU).x, featured(mirrored, ON, CPU).x, rtol=0.1)
    centred = dataclasses.replace(ON, feature_center=True)
    shift = featured(data, ON, CPU).x - featured(data, centred, CPU).x
    torch.testing.assert_close(shift, shift[:1].expand_as(shift), rtol=1e-4, atol=1e-5)  # one constant for all records
    other = dataclasses.replace(data, x=2 * data.x[:5], y=data.y[:5])
    again = featured(other, ON, CPU).x - featured(other, centred, CPU).x
    torch.testing.assert_close(again[:1], shift[:1], rtol=1e-4, atol=1e-5)  # and for all data sets of that shape
    assert float(shift[0].norm()) > 1.0
    pictures = made_up((3, 16, 16), 50)
    assert torch.equal(pictures, made_up((3, 16, 16), 50))
    near = ((pictures[..., 1:] - pictures[..., :-1]).square().mean() / pictures.var()).item()
    assert near < 1.0  # neighbouring pixels are alike; independent ones would have 2


def settings(**data: object) -> Settings:
    return Settings().replace(
        data={"source": "toy", "parties": 2, "partition": "iid", "min_examples": 2, "features": "scattering", **data},
        train={"rounds": 2, "rate": 0.5},
        privacy={"sigma": 1.0},
    )


def test_a_run_trains_on_features_and_studies_make_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = toy_images()
    made = prepare(settings(), data)
    assert made.problem.dataset.shape == (CHANNELS, 2, 2)
    assert made.problem.layout.dim == 2 * (CHANNELS * 4 + 1)

    kept, calls = Datasets(), []
    monkeypatch.setattr("fulcrum.study.play.load", lambda source, folder: data)
    monkeypatch.setattr("fulcrum.study.play.featured", lambda *a: calls.append(1) or featured(*a))
    first = kept.get(settings(), "cpu")
    assert kept.get(settings(), "cpu") is first
    torch.testing.assert_close(first.x, made.problem.dataset.x)
    held = kept.get(settings(validation=0.2), "cpu")
    assert len(calls) == 2
    assert held.x_test.shape == (6, CHANNELS, 2, 2)
    same = prepare(settings(validation=0.2), data).problem.dataset
    torch.testing.assert_close(held.x, same.x)
    assert held.fingerprint == same.fingerprint
