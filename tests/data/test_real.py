"""The public data sets themselves, where FULCRUM_DATA has them."""

import pytest
import torch

from fulcrum.data import load, verify_dataset
from support.datasets import need


@pytest.mark.parametrize(
    ("name", "per_class"),
    [
        ("mnist", [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
        ("fashion-mnist", [6000] * 10),
    ],
)
def test_mnist_and_fashion_mnist(name, per_class):
    need(name)
    data = load(name)
    assert data.x.shape == (60_000, 1, 28, 28)
    assert data.x_test.shape == (10_000, 1, 28, 28)
    assert data.y.bincount().tolist() == per_class
    assert (float(data.x.min()), float(data.x.max())) == (-1.0, 1.0)
    statuses = {status for _, status in verify_dataset(name)}
    assert statuses == {"public"}
    assert data.warnings == ()
    assert data.y[:5].tolist() == {"mnist": [5, 0, 4, 1, 9], "fashion-mnist": [9, 0, 0, 3, 0]}[name]


def test_cifar10():
    need("cifar10")
    data = load("cifar10")
    assert data.x.shape == (50_000, 3, 32, 32)
    assert data.x_test.shape == (10_000, 3, 32, 32)
    assert data.y.bincount().tolist() == [5000] * 10
    assert data.y_test.bincount().tolist() == [1000] * 10
    public = {status for _, status in verify_dataset("cifar10")} == {"public"}
    assert public == (data.warnings == ())
    # channels first, rows of pixels in order: neighbouring pixels are alike, those of other images are not
    sample = data.x[:200]
    near = (sample[:, :, :, 1:] - sample[:, :, :, :-1]).abs().mean()
    far = (sample - sample[torch.arange(199, -1, -1)]).abs().mean()
    assert near < far / 3
