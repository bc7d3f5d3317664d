"""Originals beside what attacks made of them: one SVG file with the images inside, without a plotting library."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape

import numpy as np
from torch import Tensor

from fulcrum.analysis.attacks.cells import name_epsilon
from fulcrum.analysis.attacks.inversion import InversionRow
from fulcrum.study.figures import FONT_ATTRIBUTES

SIDE, GAP, LEFT, TOP = 44, 4, 74, 52


def encode_png(image: Tensor) -> bytes:
    """A PNG file of an image [c, h, w] in [0, 1], grey or RGB."""
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
    height, width, channels = pixels.shape
    if channels not in (1, 3):
        pixels, channels = pixels[:, :, :1], 1
    lines = np.concatenate([np.zeros((height, 1), dtype=np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def draw_reconstructions(rows: Sequence[InversionRow], batch: str, title: str, note: str = "", most: int = 4) -> str:
    """A grid: a line per attack; the originals, then a block per epsilon with the mean PSNR below.

    rows: of one data set and model. most: images per block.
    """
    rows = [row for row in rows if row.batch == batch]
    attacks, epsilons = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("attack", "epsilon"))
    count = min(most, *(len(row.psnr) for row in rows))
    block = count * (SIDE + GAP) + 14
    width, height = LEFT + block * (1 + len(epsilons)), TOP + len(attacks) * (SIDE + 22) + 6
    parts = [
        f'<text x="8" y="18" font-weight="bold">{escape(title)}</text>',
        *(
            f'<text x="{LEFT + block * i}" y="{TOP - 10}">{escape(words)}</text>'
            for i, words in enumerate(["original", *(_name(epsilon) for epsilon in epsilons)])
        ),
    ]
    for j, attack in enumerate(attacks):
        top = TOP + j * (SIDE + 22)
        parts.append(f'<text x="8" y="{top + SIDE / 2 + 4:g}">{escape(attack)}</text>')
        for i, epsilon in enumerate(epsilons):
            row = next((r for r in rows if r.attack == attack and r.epsilon == epsilon), None)
            if row is None:
                continue
            if i == 0:
                parts += _place_images(row.originals[:count], LEFT, top)
            parts += _place_images(row.found[:count], LEFT + block * (i + 1), top)
            mean = sum(row.psnr) / len(row.psnr)
            words = f"{mean:.1f} dB (mean image {row.baseline[0]:.1f})"
            parts.append(f'<text x="{LEFT + block * (i + 1)}" y="{top + SIDE + 13}">{words}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'{FONT_ATTRIBUTES}><!-- {escape(note).replace("--", "- -")} --><rect width="100%" height="100%" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _name(epsilon: float | None) -> str:
    return "no privacy" if epsilon is None else f"epsilon {name_epsilon(epsilon)}"


def _place_images(images: Tensor, left: float, top: float) -> list[str]:
    found = []
    for i, image in enumerate(images):
        data = base64.b64encode(encode_png(image)).decode()
        found.append(
            f'<image x="{left + i * (SIDE + GAP):g}" y="{top:g}" width="{SIDE}" height="{SIDE}" '
            f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'
        )
    return found
