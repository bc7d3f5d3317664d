"""Scattering features: kymatio's numbers, the properties they are known for, and a map of one record at a time."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fulcrum.data import Dataset, compute_features, from_arrays
from fulcrum.data.features import (
    FEATURE_VARIANCE_FLOOR,
    feature_signature,
    fit_feature_whitening,
    make_noise_images,
    make_synthetic_images,
)
from fulcrum.data.features.scattering import SCATTERING_CHANNELS, compute_scattering
from fulcrum.errors import ConfigError, DataError
from fulcrum.runs import prepare
from fulcrum.runs.choices import check_choices
from fulcrum.settings.checks import check_settings
from fulcrum.settings.schema import Data, Settings
from fulcrum.study.job import job_from_json
from fulcrum.study.run_job import DatasetCache

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
    found = compute_scattering(image(*shape))[0]
    assert found.shape == (81 * shape[0], shape[1] // 4, shape[2] // 4)
    for place, value in values.items():
        assert float(found[place]) == pytest.approx(value, rel=2e-4, abs=1e-6)
    assert float(found.double().sum()) == pytest.approx(total, rel=2e-4)
    assert float(found.double().norm()) == pytest.approx(norm, rel=2e-4)


def test_constants_pass_the_low_pass_alone() -> None:
    found = compute_scattering(torch.full((1, 1, 28, 28), 0.7))[0]
    torch.testing.assert_close(found[0], torch.full((7, 7), 0.7), rtol=1e-4, atol=0)
    assert float(found[1:].abs().max()) < 1e-6
    ramp = torch.arange(28.0).expand(1, 1, 28, 28) / 28
    assert float(compute_scattering(ramp)[0, 1:].abs().max()) > 1e-3


def test_first_order_moduli_scale_with_the_image_and_drop_its_mean() -> None:
    x = texture()
    torch.testing.assert_close(compute_scattering(3 * x)[:, 1:], 3 * compute_scattering(x)[:, 1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compute_scattering(x + 5)[:, 1:], compute_scattering(x)[:, 1:], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(compute_scattering(x + 5)[:, :1], compute_scattering(x)[:, :1], rtol=0.1)


def test_a_shift_by_one_pixel_moves_features_less_than_pixels() -> None:
    x = texture(shape=(1, 64, 64))
    shifted = torch.roll(x, 1, dims=3)

    def moved(a: Tensor, b: Tensor) -> float:
        return float((a - b).norm() / a.norm())

    inner = (..., slice(2, -2), slice(2, -2))  # away from where the roll wraps
    assert moved(compute_scattering(x)[inner], compute_scattering(shifted)[inner]) < 0.4 * moved(x, shifted)
    first = compute_scattering(x)[:, 1:][inner]
    assert moved(first, compute_scattering(shifted)[:, 1:][inner]) < 0.3 * moved(x, shifted)


def test_directions_are_told_apart_and_turn_with_the_image() -> None:
    waves = torch.sin(torch.arange(32.0) * 3 * np.pi / 8).expand(1, 1, 32, 32).contiguous()
    across, down = (compute_scattering(x)[0, 9:17].mean(dim=(1, 2)) for x in (waves, waves.transpose(2, 3)))
    assert int(across.argmax()) != int(down.argmax())
    assert (int(across.argmax()) - int(down.argmax())) % 8 == 4  # a quarter turn is four of eight directions


@pytest.mark.parametrize("shape", [(2, 28, 28), (2, 1, 30, 28), (2, 1, 4, 28)])
def test_what_is_not_an_image_of_a_fitting_size_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="multiples of 4"):
        compute_scattering(torch.zeros(shape))


# --- as a setting -----------------------------------------------------------------------------------


def toy_images(n: int = 40) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % 2
    waves = torch.sin(torch.arange(8.0) * 2)[None, None, None].expand(n, 1, 8, 8)
    x = torch.where(y[:, None, None, None] == 0, waves, waves.transpose(2, 3))
    x = x + 0.3 * torch.randn(x.shape, generator=generator)
    return from_arrays(x[10:], y[10:], x[:10], y[:10], name="toy", classes=2, public=True)


def test_a_record_becomes_the_same_whatever_lies_beside_it() -> None:
    data = toy_images()
    whole, alone = compute_features(data, ON, CPU), compute_features(data.with_changes(x=data.x[3:4]), ON, CPU)
    torch.testing.assert_close(whole.x[3:4], alone.x, rtol=1e-4, atol=1e-5)
    assert whole.x.shape == (30, SCATTERING_CHANNELS, 2, 2)
    assert whole.x.dtype == torch.float32
    assert torch.equal(whole.y, data.y)
    groups = whole.x.reshape(30, 27, -1)
    assert float(groups.mean(dim=2).abs().max()) < 1e-4  # each record's own statistics, nobody else's
    raw = compute_features(data, dataclasses.replace(ON, feature_groups=0), CPU)
    assert float(raw.x.reshape(30, 27, -1).mean(dim=2).abs().max()) > 1e-2
    assert len({data.fingerprint, whole.fingerprint, raw.fingerprint}) == 3
    assert compute_features(data, Data(), CPU) is data


def test_groups_that_do_not_divide_the_channels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.feature_groups = 7"):
        compute_features(toy_images(), dataclasses.replace(ON, feature_groups=7), CPU)
    with pytest.raises(ConfigError, match=r"data\.features"):
        check_choices(Settings().replace(data={"features": "wavelets"}, privacy={"sigma": 1.0}))


def test_mirror_images_become_the_same_and_made_up_images_the_origin() -> None:
    data = toy_images()
    mirrored = data.with_changes(x=data.x.flip(-1))
    both, one = (compute_features(d, dataclasses.replace(ON, feature_mirror=True), CPU).x for d in (data, mirrored))
    torch.testing.assert_close(both, one, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(compute_features(data, ON, CPU).x, compute_features(mirrored, ON, CPU).x, rtol=0.1)
    centred = dataclasses.replace(ON, feature_center=True)
    shift = compute_features(data, ON, CPU).x - compute_features(data, centred, CPU).x
    torch.testing.assert_close(shift, shift[:1].expand_as(shift), rtol=1e-4, atol=1e-5)  # one constant for all records
    other = data.with_changes(x=2 * data.x[:5], y=data.y[:5])
    again = compute_features(other, ON, CPU).x - compute_features(other, centred, CPU).x
    torch.testing.assert_close(again[:1], shift[:1], rtol=1e-4, atol=1e-5)  # and for all data sets of that shape
    assert float(shift[0].norm()) > 1.0
    pictures = make_noise_images((3, 16, 16), 50)
    assert torch.equal(pictures, make_noise_images((3, 16, 16), 50))
    near = ((pictures[..., 1:] - pictures[..., :-1]).square().mean() / pictures.var()).item()
    assert near < 1.0  # neighbouring pixels are alike; independent ones would have 2


# --- whitened ---------------------------------------------------------------------------------------


def covariance(x: Tensor) -> Tensor:
    """[C, C] over pictures and positions of [n, C, H, W], about the channels' means."""
    flat = x.double().transpose(0, 1).flatten(1)
    return torch.cov(flat, correction=0)


def left(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Variances of directions above the floor before, largest last, and in the same directions after."""
    variances, directions = torch.linalg.eigh(covariance(before))
    kept = variances > FEATURE_VARIANCE_FLOOR * variances[-1]
    across = directions.T @ covariance(after) @ directions
    assert float((across - across.diag().diag())[kept][:, kept].abs().max()) < 1e-3 * float(across.diag().max())
    return variances[kept], across.diag()[kept]


@pytest.mark.slow
@pytest.mark.parametrize("power", [pytest.param(0.25, marks=pytest.mark.slow), 0.5])
def test_painted_pictures_come_out_with_their_covariance_to_the_power_that_is_left(power: float) -> None:
    pictures = make_synthetic_images((1, 8, 8))
    few = torch.zeros(2, dtype=torch.long)
    data = from_arrays(pictures, torch.arange(len(pictures)) % 2, pictures[:2], few, name="painted", classes=2)
    plain = compute_features(data, ON, CPU).x
    found = compute_features(data, dataclasses.replace(ON, feature_whiten=power), CPU).x
    mean, mix = fit_feature_whitening(plain, power)
    torch.testing.assert_close(found, torch.einsum("ij,njhw->nihw", mix, plain - mean), rtol=1e-3, atol=1e-4)
    assert float(found.mean(dim=0).abs().max()) < 1e-3  # centred at every position

    mixed = torch.einsum("ij,njhw->nihw", mix.double(), plain.double())
    before, after = left(plain, mixed)
    assert 10 < len(before) <= SCATTERING_CHANNELS
    wanted = before ** (1 - 2 * power)
    scale = after.mean() / wanted.mean()
    torch.testing.assert_close(after, scale * wanted, rtol=1e-3, atol=0)
    same = left(plain, plain)[1]  # power 0 does not pass for it
    assert not torch.allclose(same, same.mean() / wanted.mean() * wanted, rtol=0.5)
    torch.testing.assert_close(covariance(mixed).trace(), covariance(plain).trace(), rtol=1e-4, atol=0)


def test_directions_that_pictures_hardly_have_are_not_blown_up() -> None:
    x = torch.randn(2000, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x * torch.tensor([1.0, 0.1, 1e-6], dtype=torch.float64).view(3, 1, 1)
    gains = torch.linalg.svdvals(fit_feature_whitening(x, 0.5)[1].double())
    assert float(gains[0] / gains[2]) == pytest.approx(
        FEATURE_VARIANCE_FLOOR**-0.5, rel=1e-3
    )  # without a floor a million
    assert float(gains[1] / gains[2]) == pytest.approx(10, rel=0.05)


@pytest.fixture
def few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whitening from 300 painted pictures instead of thousands, where their number does not matter."""
    few = functools.partial(make_synthetic_images, count=300)
    monkeypatch.setattr("fulcrum.data.features.make_synthetic_images", few)


@pytest.mark.usefixtures("few_pictures")
def test_a_whitened_record_depends_on_no_other() -> None:
    data, whitened = toy_images(), dataclasses.replace(ON, feature_whiten=0.25)
    x = data.x.clone()
    x[3] = -2 * x[4]
    one, two = compute_features(data, whitened, CPU), compute_features(data.with_changes(x=x), whitened, CPU)
    others = torch.arange(len(x)) != 3
    assert torch.equal(one.x[others], two.x[others])
    assert torch.equal(one.x_test, two.x_test)
    assert not torch.allclose(one.x[3], two.x[3], rtol=0.1)
    alone = compute_features(data.with_changes(x=data.x[3:4], y=data.y[3:4]), whitened, CPU)
    torch.testing.assert_close(alone.x, one.x[3:4], rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("few_pictures")
def test_without_whitening_features_fingerprints_and_ids_are_as_they_were() -> None:
    data = dataclasses.replace(toy_images(), fingerprint="toy")
    off = compute_features(data, dataclasses.replace(ON, feature_whiten=0.0), CPU)
    assert torch.equal(off.x, torch.nn.functional.group_norm(compute_scattering(data.x), 27))
    assert off.fingerprint == "1744382ab2e64ea6"
    half, full = (dataclasses.replace(ON, feature_whiten=power) for power in (0.25, 0.5))
    assert len({off.fingerprint, *(compute_features(data, s, CPU).fingerprint for s in (half, full))}) == 3
    assert len({feature_signature(ON), feature_signature(half), feature_signature(full)}) == 3
    assert feature_signature(Data(feature_whiten=0.5)) == feature_signature(Data())  # of no features
    kept = Path(__file__).parents[2] / "results" / "robustness" / "robustness.jsonl.gz"  # some older than the setting
    for line in gzip.decompress(kept.read_bytes()).decode().splitlines()[::200]:
        job = job_from_json(json.loads(line))
        assert job.id == json.loads(line)["id"]
        changed = job.settings.replace(data={"feature_whiten": 0.25})
        assert dataclasses.replace(job, settings=changed).id != job.id


@pytest.mark.parametrize("value", [-0.1, 0.51, float("nan")])
def test_powers_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"data\.feature_whiten .* at least 0 and at most 0\.5"):
        check_settings(settings(feature_whiten=value))
    check_settings(settings(feature_whiten=0.5))


def test_what_whitening_cannot_go_with_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.feature_center = true and data\.feature_whiten = 0\.25"):
        check_settings(settings(feature_whiten=0.25, feature_center=True))
    y = torch.arange(6) % 2
    flat = from_arrays(torch.rand(6, 8), y, torch.rand(6, 8), y, name="flat", classes=2)
    with pytest.raises(DataError, match=r"data\.feature_whiten needs images"):
        compute_features(flat, dataclasses.replace(ON, feature_whiten=0.25), CPU)


@pytest.mark.parametrize("shape", [(1, 8, 12), (2, 16, 8), (3, 8, 8)])
def test_pictures_are_painted_in_any_shape_and_always_the_same(shape: tuple[int, int, int]) -> None:
    pictures = make_synthetic_images(shape, 20)
    assert pictures.shape == (20, *shape)
    assert torch.equal(pictures, make_synthetic_images(shape, 20))
    assert float(pictures.min()) >= -1
    assert float(pictures.max()) <= 1
    assert float(pictures.flatten(1).std(dim=1).median()) > 0.1
    assert not torch.equal(pictures[0], pictures[1])


# --- in runs and studies ----------------------------------------------------------------------------


def settings(**data: object) -> Settings:
    return Settings().replace(
        data={"source": "toy", "parties": 2, "partition": "iid", "min_examples": 2, "features": "scattering", **data},
        train={"rounds": 2, "rate": 0.5},
        privacy={"sigma": 1.0},
    )


def test_a_run_trains_on_features_and_studies_make_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = toy_images()
    made = prepare(settings(), data)
    assert made.problem.dataset.shape == (SCATTERING_CHANNELS, 2, 2)
    assert made.problem.layout.dim == 2 * (SCATTERING_CHANNELS * 4 + 1)

    kept, calls = DatasetCache(), []

    def counted(*given: Any) -> Any:
        calls.append(1)
        return compute_features(*given)

    monkeypatch.setattr("fulcrum.study.run_job.load", lambda source, folder, **options: data)
    monkeypatch.setattr("fulcrum.study.run_job.compute_features", counted)
    first = kept.get(settings(), "cpu")
    assert kept.get(settings(), "cpu") is first
    torch.testing.assert_close(first.x, made.problem.dataset.x)
    held = kept.get(settings(validation=0.2), "cpu")
    assert len(calls) == 2
    assert held.x_test.shape == (6, SCATTERING_CHANNELS, 2, 2)
    same = prepare(settings(validation=0.2), data).problem.dataset
    torch.testing.assert_close(held.x, same.x)
    assert held.fingerprint == same.fingerprint
