"""Loops in C on a CPU: against PyTorch in float64, and what happens where they cannot be compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fulcrum.errors import ModelError
from fulcrum.gradients import GradientRecorder, compiled, host_convolution, host_ops, layer_ops, rounding
from fulcrum.gradients.outer_products import ConvGrad, materialise_grads
from fulcrum.models.layout import ParameterLayout
from support.gradients import CLASSIFY


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache folder of this test's own, and nothing remembered before or after. Compiled fast, not for speed."""
    monkeypatch.setattr(compiled, "OPTIONS", ("-O0", *compiled.OPTIONS[1:]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FULCRUM_COMPILE", raising=False)
    compiled.find_kernels.cache_clear()
    compiled.compile_failures.clear()
    yield tmp_path / "cache" / "fulcrum" / "kernels"
    compiled.find_kernels.cache_clear()
    compiled.compile_failures.clear()


needs_compiler = pytest.mark.skipif(
    compiled.find_kernels() is None, reason=f"there is no compiled code here: {compiled.compile_failures}"
)


def draw(*shape: int, seed: int = 0, last: bool = False) -> Tensor:
    found = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return found.contiguous(memory_format=torch.channels_last) if last else found


# --- is there a library? ------------------------------------------------------------------------


def test_the_switch_turns_compiled_code_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_COMPILE", "0")
    assert compiled.find_kernels() is None
    assert compiled.explain_missing_kernels() == "FULCRUM_COMPILE is 0"
    assert not fresh.exists()


def test_without_a_compiler_there_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert compiled.find_kernels() is None
    assert "no C compiler" in compiled.compile_failures[-1]


def test_a_compiler_that_fails_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such option' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(broken))
    assert compiled.find_kernels() is None
    assert compiled.compile_failures[-1].endswith("failed: no such option")
    assert not list(fresh.iterdir())


@needs_compiler
def test_the_library_is_kept_for_its_owner_alone(fresh: Path) -> None:
    assert compiled.find_kernels() is not None
    assert compiled.explain_missing_kernels() == ""
    (kept,) = fresh.glob("*.so")
    assert fresh.stat().st_mode & 0o077 == 0
    made = kept.stat().st_mtime_ns
    compiled.find_kernels.cache_clear()
    assert compiled.find_kernels() is not None
    assert kept.stat().st_mtime_ns == made  # taken as it is


@needs_compiler
def test_a_folder_that_others_may_write_to_is_not_used(fresh: Path) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    assert compiled.find_kernels() is not None
    assert not list(fresh.iterdir())


@needs_compiler
@pytest.mark.parametrize("left", [0, 100, 4096])
def test_a_library_that_was_cut_off_is_compiled_again(fresh: Path, left: int) -> None:
    """Code from such a file would end the process with a bus error."""
    assert compiled.find_kernels() is not None
    (kept,) = fresh.glob("*.so")
    whole = kept.read_bytes()
    kept.unlink()  # not in place: this process has the first one mapped
    kept.write_bytes(whole[:left])
    compiled.find_kernels.cache_clear()
    assert compiled.find_kernels() is not None
    assert len(kept.read_bytes()) == len(whole)


def test_a_library_that_computes_something_else_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        @staticmethod
        def fulcrum_example(*_: object) -> None:
            """Writes nothing."""

    monkeypatch.setattr(compiled, "_load", Wrong)
    assert compiled.find_kernels() is None
    assert "did not reproduce" in compiled.compile_failures[-1]


def test_sources_are_part_of_the_package() -> None:
    names = {each.name for each in Path(compiled.__file__).parent.iterdir()}
    assert {"convolution.c", "group_norm.c", "pooling.c", "squares.c", "noise.c", "vectors.h"} <= names
    told = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert "gradients/compiled/*.c" in told
    assert "gradients/compiled/*.h" in told


# --- convolutions -------------------------------------------------------------------------------

SHAPES = [
    # examples, channels, outputs, height, width, kernel, stride, padding
    (3, 16, 16, 8, 8, (3, 3), (1, 1), (1, 1)),
    (2, 1, 16, 28, 28, (8, 8), (2, 2), (3, 3)),
    (2, 16, 32, 13, 13, (4, 4), (2, 2), (0, 0)),
    (3, 3, 10, 9, 7, (3, 5), (1, 2), (0, 2)),
    (2, 7, 33, 6, 5, (2, 2), (1, 1), (1, 0)),
    (1, 20, 48, 4, 4, (3, 3), (1, 1), (1, 1)),
    (2, 5, 64, 1, 9, (1, 3), (1, 1), (0, 1)),
]


def size_output(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1


def make_part(shape: tuple, last: bool) -> ConvGrad:  # type: ignore[type-arg]
    count, channels, outputs, height, width, kernel, stride, padding = shape
    out = [size_output(*each) for each in zip((height, width), kernel, stride, padding, strict=True)]
    a, g = draw(count, channels, height, width, last=last), draw(count, outputs, *out, seed=1, last=last)
    return ConvGrad(a, g, torch.zeros(outputs, channels, *kernel), stride, (1, 1), 1, padding)


def exact_grads(part: ConvGrad) -> Tensor:
    """[B, n] in float64, one example after the other."""
    rows = []
    for a, g in zip(part.a.double(), part.g.double(), strict=True):
        weight = part.weight.double().requires_grad_()
        out = torch.conv2d(a[None], weight, None, part.stride, part.padding)
        rows.append(torch.autograd.grad(out, weight, g[None])[0].reshape(-1))
    return torch.stack(rows)


@needs_compiler
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_convolutions_and_their_norms(shape: tuple, last: bool) -> None:  # type: ignore[type-arg]
    part = make_part(shape, last)
    assert host_convolution.fits_compiled_convolution(part)
    found, truth = materialise_grads(part), exact_grads(part)
    torch.testing.assert_close(found.rows().double(), truth, rtol=1e-4, atol=1e-5)
    squares = found.fast_squares()
    assert squares is not None
    torch.testing.assert_close(squares, truth.square().sum(dim=1), rtol=1e-5, atol=0)
    factors = torch.linspace(1, 2, len(truth))
    torch.testing.assert_close(found.weighted_sum(factors).double(), factors.double() @ truth, rtol=1e-4, atol=1e-4)
    if min(shape[-1]):  # the same numbers with other padding are something else
        moved = exact_grads(ConvGrad(part.a.flip(2), part.g, part.weight, part.stride, (1, 1), 1, part.padding))
        assert not torch.allclose(found.rows().double(), moved, rtol=1e-2, atol=1e-2)


@needs_compiler
def test_one_bad_example_does_not_reach_the_others() -> None:
    part = make_part(SHAPES[0], True)
    part.a[1, 0, 0, 0], part.g[1, 2, 3, 3] = float("nan"), float("inf")
    found = materialise_grads(part).rows()
    assert found[[0, 2]].isfinite().all()
    assert not found[1].isfinite().all()


@needs_compiler
def test_a_slice_keeps_its_norms_and_zeroed_rows_get_new_ones() -> None:
    found = materialise_grads(make_part(SHAPES[0], False))
    whole, some = found.fast_squares(), found.slice(1, 3).fast_squares()
    assert whole is not None
    assert some is not None
    assert torch.equal(some, whole[1:3])
    only = found.only(torch.tensor([True, False, True]))
    kept = only.fast_squares()  # type: ignore[attr-defined]
    torch.testing.assert_close(kept, whole * torch.tensor([1.0, 0, 1]), rtol=1e-5, atol=0)


@needs_compiler
@pytest.mark.parametrize("kind", ["groups", "dilation", "double"])
def test_other_convolutions_are_left_to_pytorch(kind: str) -> None:
    a, g, weight = draw(2, 4, 8, 8), draw(2, 4, 6, 6), torch.zeros(4, 4, 3, 3)
    parts = {
        "groups": ConvGrad(a, g, torch.zeros(4, 2, 3, 3), (1, 1), (1, 1), 2),
        "dilation": ConvGrad(a, g[:, :, :4, :4], weight, (1, 1), (2, 2), 1),
        "double": ConvGrad(a.double(), g.double(), weight.double(), (1, 1), (1, 1), 1),
    }
    assert not host_convolution.fits_compiled_convolution(parts[kind])


@needs_compiler
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_and_its_way_back(shape: tuple, last: bool, bias: bool) -> None:  # type: ignore[type-arg]
    count, channels, outputs, height, width, kernel, stride, padding = shape
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding, bias=bias).requires_grad_(False)
    x = draw(count, channels, height, width, last=last)
    params = dict(layer.named_parameters())
    out, memo = host_ops.run_convolution(layer, x, params, False)
    wide = x.double().requires_grad_()
    truth = nn.Conv2d(channels, outputs, kernel, stride, padding, bias=bias).double()
    truth.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    wanted = truth(wide)
    torch.testing.assert_close(out.double(), wanted.detach(), rtol=1e-4, atol=1e-5)
    g = draw(*wanted.shape, seed=2, last=last)
    (slope,) = torch.autograd.grad(wanted, wide, g.double())
    found = host_ops.run_convolution_back(layer, memo, params, g)
    torch.testing.assert_close(found.double(), slope, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found.double(), slope.flip(3), rtol=1e-2, atol=1e-2)


@needs_compiler
def test_what_does_not_belong_together_is_left_to_pytorch_to_refuse() -> None:
    layer = nn.Conv2d(3, 4, 3, 2)
    assert host_ops.strided_convolution_fits(layer, draw(2, 3, 8, 8))
    for wrong in (draw(2, 5, 8, 8), draw(2, 1, 8, 8), draw(2, 3, 2, 8)):
        assert not host_ops.strided_convolution_fits(layer, wrong)
    assert not host_ops.strided_convolution_fits(nn.Conv2d(3, 4, 3, 2).double(), draw(2, 3, 8, 8))
    assert not host_ops.max_pool_fits(nn.MaxPool2d(4, 2), draw(2, 3, 3, 3))
    part = make_part(SHAPES[0], False)
    for a, g in ((part.a[:, 1:], part.g), (part.a, part.g[:, 1:])):
        wrong_part = ConvGrad(a, g, part.weight, part.stride, (1, 1), 1, part.padding)
        assert not host_convolution.fits_compiled_convolution(wrong_part)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    layout = ParameterLayout.of(model)
    recorder = GradientRecorder(model, layout, CLASSIFY)
    for channels in (5, 1):
        with pytest.raises((RuntimeError, ModelError, ValueError)):
            recorder(layout.flatten(model), draw(2, channels, 8, 8), torch.zeros(2, dtype=torch.int64)).norms()


@needs_compiler
def test_parts_of_a_batch_have_weights_of_their_own() -> None:
    one, two = (nn.Conv2d(3, 16, 3, 2, 1).requires_grad_(False) for _ in range(2))
    x = draw(5, 3, 9, 9)
    parts = (slice(0, 2), slice(2, 5))
    params = [dict(layer.named_parameters()) for layer in (one, two)]
    out, _ = host_ops.run_convolution_parts(one, x, params, parts)
    torch.testing.assert_close(out, torch.cat([one(x[:2]), two(x[2:])]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(out, one(x), rtol=1e-2)


# --- squared norms ------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("entries", [257, 1000, 4096, 70001])
def test_squared_norms_of_rows(entries: int) -> None:
    rows = draw(5, entries) * torch.tensor([1.0, 1e-3, 1e3, 0, 1])[:, None]
    rows[4, :100] = 3e4
    found, truth = rounding.add_fast_squares(rows), rows.double().square().sum(dim=1)
    assert rounding._add_compiled_squares(rows) is not None
    assert ((found - truth).abs() <= rounding.FAST_GRAM_ERROR * truth).all()
    assert not torch.allclose(found, rows[:, 1:].double().square().sum(dim=1), rtol=1e-7)
    assert rounding._add_compiled_squares(rows[:, ::2]) is None
    blocks = rounding.add_fast_squares(rows.expand(2, -1, -1).contiguous(), 2)
    assert torch.equal(blocks, found.expand(2, -1))


# --- pooling ------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("channels", [1, 16, 19, 33])
@pytest.mark.parametrize(("kernel", "stride"), [(2, 1), (2, 2), (3, 2), ((2, 3), (3, 1))])
def test_pooling_and_its_way_back(channels: int, kernel: int, stride: int) -> None:
    layer = nn.MaxPool2d(kernel, stride)
    x = draw(3, channels, 8, 7).mul(2).round()  # many equal numbers: the first one counts
    x[0, 0, 3, 3] = float("nan")
    assert host_ops.max_pool_fits(layer, x)
    out, memo = host_ops.run_max_pool(layer, x, {}, False)
    wanted, other = layer_ops._max_pool_forward(layer, x, {}, False)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
    assert out.isnan().any()
    g = draw(*out.shape, seed=1)
    found = host_ops.run_max_pool_back(layer, memo, {}, g)
    right = layer_ops._max_pool_backward(layer, other, {}, g)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, right.flip(2))


@needs_compiler
def test_other_pooling_is_left_to_pytorch() -> None:
    x = draw(2, 4, 8, 8)
    for layer in (nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, dilation=2), nn.MaxPool2d(3, ceil_mode=True)):
        assert not host_ops.max_pool_fits(layer, x)
    assert not host_ops.max_pool_fits(nn.MaxPool2d(2), x.double())
    assert host_ops.max_pool_fits(nn.MaxPool2d(2), x)


def test_structures_are_those_of_the_sources() -> None:
    """A field that C has and Python has not would shift all that follow."""
    folder = Path(compiled.__file__).parent
    for name, structure in (("Shape", host_convolution.ConvolutionShape), ("Pool", host_ops._Pool)):
        file = "convolution.c" if name == "Shape" else "pooling.c"
        body = (folder / file).read_text().split(f"}} {name};")[0].rsplit("typedef struct {", 1)[1]
        lines = [line.split("/*")[0] for line in body.splitlines()]
        words = " ".join(lines).replace("long", " ").replace(";", " ").replace(",", " ").split()
        assert words == [field[0] for field in structure._fields_]
        assert ctypes.sizeof(structure) == ctypes.sizeof(ctypes.c_long) * len(words)
