"""Gradient inversion: plain releases give images and tokens away, noised ones do not; measures beside known values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from fulcrum.analysis.attacks import InversionSize, attack_inversion, attack_tokens
from fulcrum.analysis.attacks.first_layer import find_first_linear
from fulcrum.analysis.attacks.gradient_matching import sum_clipped_gradients
from fulcrum.analysis.attacks.image_quality import PSNR_LIMIT, compute_psnr, compute_ssim, match_images
from fulcrum.analysis.attacks.inversion import prepare_first_round, settle_noise
from fulcrum.analysis.attacks.pages import INVERSION_COLUMNS, inversion_to_json, make_inversion_rows, make_token_rows
from fulcrum.analysis.attacks.pictures import draw_reconstructions, encode_png
from fulcrum.analysis.attacks.server_view import look_at_release
from fulcrum.data import from_arrays
from fulcrum.errors import ConfigError, DataError, ModelError
from fulcrum.settings.schema import Settings

SETTINGS = Settings(method="dp-sgd").replace(
    model={"name": "mlp", "hidden": (16,), "activation": "tanh"},
    train={"rounds": 20, "rate": 0.2, "lr": 0.5},
    clip={"rule": "fixed", "C0": 1.0, "rehearse": False},
    run={"device": "cpu"},
)


@pytest.fixture(scope="module")
def images():
    """Bright squares at random places on 10 x 10 pixels, of three classes by their brightness."""
    rng = np.random.default_rng(0)
    x = 0.1 * rng.random((120, 1, 10, 10), dtype=np.float32)
    y = rng.integers(0, 3, 120)
    for i, (top, left) in enumerate(rng.integers(0, 7, (120, 2))):
        x[i, 0, top : top + 4, left : left + 4] += 0.3 + 0.25 * y[i]
    parts = [torch.from_numpy(x), torch.from_numpy(y)]
    return from_arrays(*parts, *(part[:60] for part in parts), name="squares", classes=3, public=True)


@pytest.fixture(scope="module")
def rows(images):
    size = InversionSize(images=2, parties=1, batch=3, steps=30)
    return attack_inversion(SETTINGS, (None, 3.0), size, dataset=images)


def find(rows, epsilon, attack, batch):
    return next(row for row in rows if (row.epsilon, row.attack, row.batch) == (epsilon, attack, batch))


def test_plain_releases_of_single_records_are_the_records(rows):
    for attack in ("ratio", "imprint", "dlg"):
        assert min(find(rows, None, attack, "1").psnr) > 40, attack
    assert np.mean(find(rows, None, "cosine", "1").psnr) > np.mean(find(rows, None, "cosine", "1").baseline[0])


def test_engineered_weights_separate_a_batch(rows):
    mixed, apart = (find(rows, None, attack, "poisson") for attack in ("ratio", "imprint"))
    assert np.median(apart.psnr) > 40
    assert len(apart.psnr) == 1 or np.median(mixed.psnr) < np.median(apart.psnr)


def test_noise_hides_the_records(rows):
    for row in rows:
        if row.epsilon is not None:
            assert row.sigma > 0
            assert np.mean(row.psnr) < row.baseline[0] + 4, (row.attack, row.batch)
            assert np.mean(row.ssim) < 0.5


def test_tables_and_pictures_show_every_row(rows):
    assert len(rows) == 2 * 2 * 4
    table = make_inversion_rows(rows)
    assert all(len(line) == len(INVERSION_COLUMNS) for line in table)
    plain = inversion_to_json(rows)
    assert plain["commit"]
    assert len(plain["images"]) == 16
    picture = draw_reconstructions(rows, "1", "squares")
    assert picture.count("<image") == 4 * (1 + 2) * 2
    assert "no privacy" in picture


def test_the_server_sees_the_sum_of_the_clipped_gradients(images):
    for epsilon in (None, 3.0):
        settled = settle_noise(SETTINGS, epsilon)
        quiet = settled if epsilon is None else settled.replace(privacy={"sigma": 1e-6})
        federation = prepare_first_round(quiet, images, InversionSize(2, 1, 4, 1), "poisson")
        view = look_at_release(federation, 0)
        assert view.count > 0
        torch.testing.assert_close(view.total, sum_clipped_gradients(view, view.x), rtol=1e-3, atol=1e-4)
        assert torch.linalg.vector_norm(view.total) <= view.C * view.count * 1.001


def test_rounds_of_several_steps_are_refused(images):
    several = settle_noise(SETTINGS.replace(train={"steps": 2}), None)
    with pytest.raises(ConfigError, match=r"train\.steps"):
        look_at_release(prepare_first_round(several, images, InversionSize(1, 1, 1, 1), "1"), 0)


def test_wrong_inputs_are_refused_in_a_sentence(images):
    with pytest.raises(ConfigError, match="not known"):
        attack_inversion(SETTINGS, (None,), attacks=["dgl"], dataset=images)
    with pytest.raises((ConfigError, DataError)):
        attack_inversion(SETTINGS, (None,), dataset=dataclasses.replace(images, public=False))
    with pytest.raises(ConfigError, match="records"):
        attack_inversion(SETTINGS, (None,), InversionSize(images=500), dataset=images)
    with pytest.raises(ConfigError, match="images = 0"):
        attack_inversion(SETTINGS, (None,), InversionSize(images=0), dataset=images)
    with pytest.raises(ModelError, match="Conv2d"):
        find_first_linear(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)))


# --- tokens ---------------------------------------------------------------------------------------


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(300, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.words(x).mean(dim=1))


def test_tokens_are_read_off_plain_releases_and_not_off_noised_ones():
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.integers(0, 300, (200, 6))), torch.from_numpy(rng.integers(0, 2, 200))
    texts = from_arrays(x, y, x[:50], y[:50], name="words", classes=2, public=True)
    size = InversionSize(images=6, parties=3, batch=4)
    found = attack_tokens(SETTINGS.replace(model={"name": "auto"}), (None, 3.0), size, dataset=texts, model=Bag())
    plain, noised = ([row for row in found if row.epsilon == epsilon] for epsilon in (None, 3.0))
    assert all(min(row.found) == 1.0 for row in plain)
    assert all(np.mean(row.found) < row.guessing + 0.35 for row in noised)
    assert len(make_token_rows(found)) == 4


# --- measures -------------------------------------------------------------------------------------


def test_psnr_is_that_of_a_known_error():
    one = torch.zeros((2, 1, 12, 12))
    other = one.clone()
    other[1] += 0.1
    assert compute_psnr(one, other).tolist() == pytest.approx([PSNR_LIMIT, 20.0])


def test_ssim_is_one_for_equal_images_and_falls_with_noise_and_contrast():
    torch.manual_seed(0)
    image = torch.rand((1, 3, 20, 20))
    near, far = image + 0.02 * torch.randn_like(image), torch.rand_like(image)
    same, close, other, flat = (
        float(compute_ssim(image, candidate)) for candidate in (image, near, far, torch.full_like(image, 0.5))
    )
    assert same == pytest.approx(1.0, abs=1e-5)
    assert same > close > 0.9 > 0.3 > other
    assert flat < 0.1


def test_ssim_of_two_constants_is_the_formulas():
    one, other = torch.full((1, 1, 11, 11), 0.4), torch.full((1, 1, 11, 11), 0.6)
    expected = (2 * 0.4 * 0.6 + 1e-4) / (0.4**2 + 0.6**2 + 1e-4)
    assert float(compute_ssim(one, other)) == pytest.approx(expected, rel=1e-3)


def test_each_original_gets_the_nearest_reconstruction_that_is_left():
    originals, found = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.9], [0.1], [5.0]])
    assert match_images(originals, found).tolist() == [1, 0]
    assert match_images(originals, found[:1]).tolist() == [0, 0]


def test_png_is_what_a_decoder_expects():
    image_module = pytest.importorskip("PIL.Image", reason="Pillow reads the file back")
    import io

    image = torch.rand((3, 5, 7))
    read = np.asarray(image_module.open(io.BytesIO(encode_png(image))))
    np.testing.assert_array_equal(read, (image * 255).round().byte().permute(1, 2, 0).numpy())
