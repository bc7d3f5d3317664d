"""Second-order scattering of images: fixed, public features that a linear model can learn from (Bruna and Mallat 2013).

Every image passes through Morlet wavelets of J = 2 scales and L = 8 directions, a modulus, and a Gaussian low-pass
sampled at every fourth pixel; the moduli of the finer scale also pass through the coarser one. That is
1 + 16 + 64 = 81 channels for each colour channel. Nothing is learned and each record is processed on its own, so
the map costs no privacy. Filters and borders equal those of kymatio's Scattering2D(J=2, L=8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fulcrum.errors import DataError

J, L = 2, 8
LOW_PASS_STRIDE = 2**J
"""Pixels between two samples of the low-pass; also the width of the reflected border on every side."""
SCATTERING_CHANNELS = 1 + J * L + L * L
MIN_IMAGE_SIDE = 8
MORLET_SIGMA, MORLET_FREQUENCY, MORLET_SLANT = 0.8, 3 * math.pi / 4, 4 / L
"""Finest wavelet: width of its envelope, frequency, and the envelope's narrowing along the wave."""


def compute_scattering(images: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, 81 C, H/4, W/4], on the device of the images.

    Channels of one colour are adjacent: the low-pass, then 8 directions at each of 2 scales, then for each of 8
    directions of the finer scale 8 of the coarser one. H and W are multiples of 4, at least 8.
    """
    if images.dim() != 4 or any(side % LOW_PASS_STRIDE or side < MIN_IMAGE_SIDE for side in images.shape[2:]):
        raise DataError(
            "scattering needs images [n, channels, height, width] whose sides are multiples of "
            f"{LOW_PASS_STRIDE} and at least "
            f"{MIN_IMAGE_SIDE}, not {list(images.shape)}; leave data.features at none."
        )
    batch, colours, height, width = images.shape
    bank = _get_filter_bank(height, width, images.device)
    x = torch.nn.functional.pad(images, (LOW_PASS_STRIDE,) * 4, mode="reflect").flatten(0, 1)  # [B C, M, N]
    spectrum = torch.fft.fft2(x)[:, None]
    fine = torch.fft.ifft2(spectrum * bank.fine).abs()  # [B C, L, M, N]
    coarse = torch.fft.ifft2(_downsample_spectrum(spectrum * bank.coarse)).abs()  # [B C, L, M/2, N/2]
    again = torch.fft.fft2(fine)
    twice = [
        torch.fft.ifft2(_downsample_spectrum(again * wavelet)).abs() for wavelet in bank.coarse
    ]  # a list saves memory
    parts = [bank.apply_low_pass(x[:, None]), bank.apply_low_pass(fine), bank.apply_half_low_pass(coarse)]
    second = torch.stack([bank.apply_half_low_pass(u) for u in twice], dim=2).flatten(1, 2)  # [B C, L L, H/4, W/4]
    return torch.cat([*parts, second], dim=1).reshape(
        batch, colours * SCATTERING_CHANNELS, height // LOW_PASS_STRIDE, width // LOW_PASS_STRIDE
    )


@dataclass(frozen=True)
class _FilterBank:
    """Filters for one size of image, on one device. fine, coarse: [L, M, N], wavelets in the Fourier plane.

    down and across: the low-pass sampled at every fourth pixel inside the border, as matrices [H/4, M] and [W/4, N];
    down_half and across_half: the same from every second pixel.
    """

    fine: Tensor
    coarse: Tensor
    down: Tensor
    across: Tensor
    down_half: Tensor
    across_half: Tensor

    def apply_low_pass(self, u: Tensor) -> Tensor:
        """[..., M, N] -> [..., H/4, W/4]"""
        return self.down @ u @ self.across.T

    def apply_half_low_pass(self, u: Tensor) -> Tensor:
        """[..., M/2, N/2] -> [..., H/4, W/4]"""
        return self.down_half @ u @ self.across_half.T


_filter_banks: dict[tuple[int, int, str], _FilterBank] = {}


def _get_filter_bank(height: int, width: int, device: torch.device) -> _FilterBank:
    key = (height, width, str(device))
    if key not in _filter_banks:
        M, N = height + 2 * LOW_PASS_STRIDE, width + 2 * LOW_PASS_STRIDE
        angles = [(L // 2 - 1 - n) * math.pi / L for n in range(L)]
        wavelets = [np.stack([_make_morlet_wavelet(M, N, angle, scale) for angle in angles]) for scale in range(J)]
        lows = [_make_low_pass_matrix(side, half) for half in (False, True) for side in (M, N)]
        tensors = [torch.from_numpy(part.astype(np.float32)).to(device) for part in (*wavelets, *lows)]
        _filter_banks[key] = _FilterBank(*tensors)
    return _filter_banks[key]


def _make_morlet_wavelet(M: int, N: int, angle: float, scale: int) -> npt.NDArray[np.float64]:
    """A Morlet wavelet in the Fourier plane [M, N]: real, and zero at frequency zero."""
    # Sum over neighbouring periods: the image repeats, so the filter does.
    y, x = np.meshgrid(np.arange(-2 * M, 3 * M), np.arange(-2 * N, 3 * N), indexing="ij")
    along, beside = y * math.cos(angle) + x * math.sin(angle), x * math.cos(angle) - y * math.sin(angle)
    width = MORLET_SIGMA * 2**scale
    envelope = (
        np.exp(-(along**2 + (MORLET_SLANT * beside) ** 2) / (2 * width**2)) * MORLET_SLANT / (2 * math.pi * width**2)
    )
    wave = envelope * np.exp(1j * MORLET_FREQUENCY / 2**scale * along)
    envelope, wave = (part.reshape(5, M, 5, N).sum(axis=(0, 2)) for part in (envelope, wave))
    wave = wave - wave.sum() / envelope.sum() * envelope
    return np.asarray(np.fft.fft2(wave).real)


def _make_low_pass_matrix(side: int, half: bool) -> npt.NDArray[np.float64]:
    """The Gaussian of the coarsest scale as a matrix [side/4 - 2, side], or [side/4 - 2, side/2] on halved grids."""
    width = MORLET_SIGMA * 2 ** (J - 1)
    place = np.arange(-2 * side, 3 * side)
    bell = np.exp(-(place**2) / (2 * width**2)) / (math.sqrt(2 * math.pi) * width)
    bell = bell.reshape(5, side).sum(axis=0)
    if half:  # keep the low frequencies, which have nearly all of its energy
        bell = np.fft.ifft(np.fft.ifftshift(np.fft.fftshift(np.fft.fft(bell))[side // 4 : -(side // 4)])).real
    step = LOW_PASS_STRIDE // 2 if half else LOW_PASS_STRIDE
    # The first and the last sample are in the border.
    readings = step * np.arange(1, side // LOW_PASS_STRIDE - 1)
    return np.asarray(bell[(readings[:, None] - np.arange(len(bell))) % len(bell)])


def _downsample_spectrum(spectrum: Tensor) -> Tensor:
    """Every second pixel of [..., M, N], in the Fourier plane: [..., M/2, N/2]."""
    M, N = spectrum.shape[-2:]
    folded = spectrum.reshape(*spectrum.shape[:-2], 2, M // 2, 2, N // 2)
    return folded.mean(dim=(-4, -2))
