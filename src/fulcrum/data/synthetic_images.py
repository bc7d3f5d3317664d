"""Synthetic images from formulas: figures with outlines, strokes and textures, in any number of classes.

A class ("kind") is a fixed recipe (an outline, some strokes, a texture, a palette) drawn once from a seed. An image
of it is a random variation of the recipe: position, size, slant, outline, stroke ends, brightness. No
photograph, data set or record is used, so weights pretrained on these images are public: they are the same for
every pair of neighbouring data sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

OUTLINE_TERMS = 6
"""Number of Fourier terms of an outline."""
STROKES_PER_KIND = 4
"""Maximum number of curved strokes per class."""
SEGMENTS_PER_STROKE = 6
"""Number of straight segments per stroke."""


@dataclass(frozen=True)
class ImageRecipes:
    """Recipes of n image classes; the first dimension of every tensor is n.

    outline [n, 2, WAVES]: cosine and sine terms of the radius over the angle. mirror [n]: 1 where the figure
    is symmetric. body [n]: brightness of the filled outline, 0 for classes with strokes only. ends
    [n, STROKES, 3, 2]: start, bend and end of each stroke. width [n, STROKES], 0: no stroke. ink [n, STROKES, c]:
    colour of strokes. grating [n, 3]: angle, frequency and strength of stripes on the body. grain [n, 3]: slope of
    the spectrum, stretch and strength of a random body texture. palette [n, 2, c]: colours of body and background.
    ground [n, 2]: slope and strength of the background's texture. hole [n]: radius of a cut-out, 0 for none.
    """

    outline: Tensor
    mirror: Tensor
    body: Tensor
    ends: Tensor
    width: Tensor
    ink: Tensor
    grating: Tensor
    grain: Tensor
    palette: Tensor
    ground: Tensor
    hole: Tensor
    aspect: Tensor

    def to(self, device: torch.device) -> ImageRecipes:
        """The recipes on a device."""
        return ImageRecipes(**{name: value.to(device) for name, value in vars(self).items()})


def sample_recipes(kinds: int, channels: int, generator: torch.Generator) -> ImageRecipes:
    """Recipes of `kinds` image classes with `channels` colours, drawn from a CPU generator.

    With one channel the background is black, as in scans of single objects; with three it is coloured and textured.
    """

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(kinds, *shape, generator=generator)

    def chance(part: float, *shape: int) -> Tensor:
        return (uniform(*shape) < part).float()

    falling = 0.45 / torch.arange(1, OUTLINE_TERMS + 1) ** 0.9
    grey = channels == 1
    solid = chance(0.55 if grey else 0.95)
    strokes = chance(0.75, STROKES_PER_KIND) * torch.where(
        solid[:, None] > 0, chance(0.4, STROKES_PER_KIND), torch.ones(1)
    )
    strokes[:, 0] = torch.where(solid > 0, strokes[:, 0], torch.ones(kinds))
    palette = torch.zeros(kinds, 2, channels)
    if grey:
        palette[:, 0] = uniform(1, low=0.25)
    else:  # a brightness with a tint around it: photographs have muted colours
        tint = torch.randn(kinds, 2, channels, generator=generator)
        palette = uniform(2, 1, low=0.1, high=0.9) + 0.15 * tint
    return ImageRecipes(
        outline=torch.randn(kinds, 2, OUTLINE_TERMS, generator=generator) * falling,
        mirror=chance(0.6),
        body=solid,
        ends=uniform(STROKES_PER_KIND, 3, 2, low=-0.75, high=0.75),
        width=strokes * uniform(STROKES_PER_KIND, low=0.05, high=0.13),
        ink=uniform(STROKES_PER_KIND, 1, low=0.7 if grey else 0.0)
        + (0.0 if grey else 0.15) * uniform(STROKES_PER_KIND, channels, low=-1.0),
        grating=torch.stack(
            [uniform(high=math.pi), uniform(low=2.0, high=16.0), chance(0.5) * uniform(low=0.1, high=0.5)], 1
        ),
        grain=torch.stack([uniform(low=0.3, high=2.0), uniform(low=-1.5, high=1.5), uniform(high=0.35)], 1),
        palette=palette,
        ground=torch.stack([uniform(low=0.6, high=2.2), torch.zeros(kinds) if grey else uniform(high=0.35)], 1),
        hole=chance(0.15) * uniform(low=0.1, high=0.3),
        aspect=uniform(low=-0.6, high=0.6),
    )


def render_images(
    recipes: ImageRecipes, kinds: Tensor, side: int, generator: torch.Generator, jitter: float = 1.0, scene: float = 0.0
) -> Tensor:
    """Images [B, c, side, side] with values in 0..1 of the given classes [B], each with random variation.

    generator: on the recipes' device. jitter scales the variation within a class. scene: the fraction of images
    with an image of another class as background.
    """
    own = ImageRecipes(**{name: value[kinds] for name, value in vars(recipes).items()})
    count, device = len(kinds), kinds.device

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(count, *shape, generator=generator, device=device) - 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator, device=device)

    x, y = _compute_pixel_coordinates(side, own, uniform, jitter)
    radius, angle = torch.hypot(x, y), torch.atan2(y, x)
    angle = torch.where(own.mirror.view(-1, 1, 1) > 0, torch.atan2(x.abs(), y) - math.pi / 2, angle)
    outline = own.outline + 0.05 * jitter * normal(2, OUTLINE_TERMS)
    edge = torch.full_like(radius, 0.62)
    for wave in range(OUTLINE_TERMS):
        cos, sin = outline[:, 0, wave].view(-1, 1, 1), outline[:, 1, wave].view(-1, 1, 1)
        edge = edge + 0.5 * (cos * torch.cos((wave + 1) * angle) + sin * torch.sin((wave + 1) * angle))
    soft = 0.5 * side
    inside = torch.sigmoid(soft * (edge.clamp_min(0.15) - radius) * 2)
    inside = inside * torch.sigmoid(soft * 2 * (radius - own.hole.view(-1, 1, 1)).where(own.hole.view(-1, 1, 1) > 0, 1))
    inside = inside * own.body.view(-1, 1, 1)
    stripes = torch.sin(
        own.grating[:, 1].view(-1, 1, 1)
        * (x * torch.cos(own.grating[:, 0]).view(-1, 1, 1) + y * torch.sin(own.grating[:, 0]).view(-1, 1, 1))
        + 3 * uniform(1, 1)
    ) * own.grating[:, 2].view(-1, 1, 1)
    channels = own.palette.shape[2]
    texture = sample_textures(own.grain[:, 0], own.grain[:, 1], channels, side, generator) * own.grain[:, 2].view(
        -1, 1, 1, 1
    )
    body = (own.palette[:, 0] + 0.12 * jitter * normal(channels)).view(count, channels, 1, 1)
    body = (body + stripes[:, None] + texture) * (1 + 0.3 * uniform(1, 1, 1) * x[:, None])
    ground = (own.palette[:, 1] + (0.2 * jitter * normal(channels) if channels > 1 else 0)).view(count, channels, 1, 1)
    if channels > 1:
        flat = torch.zeros_like(own.ground[:, 0])
        behind = sample_textures(own.ground[:, 0], flat, channels, side, generator) * own.ground[:, 1].view(-1, 1, 1, 1)
        ground = ground + behind
    picture, bare = ground + (body - ground) * inside[:, None], 1 - inside
    ends = own.ends + 0.08 * jitter * uniform(STROKES_PER_KIND, 3, 2)
    for s in range(STROKES_PER_KIND):
        wide = own.width[:, s] * (1 + 0.35 * jitter * uniform(1)[:, 0])
        near = _compute_curve_distance(x, y, ends[:, s])
        line = torch.sigmoid(soft * 2 * (wide.view(-1, 1, 1) - near)) * (own.width[:, s] > 0).view(-1, 1, 1)
        picture, bare = (
            picture + (own.ink[:, s].view(count, channels, 1, 1) - picture) * line[:, None],
            bare * (1 - line),
        )
    if scene > 0:
        moved = bare[:, None] * (torch.rand(count, 1, 1, 1, generator=generator, device=device) < scene)
        picture = picture + (picture.roll(1, dims=0) - picture) * moved
    light = 1 + 0.25 * uniform(1, 1, 1)
    picture = picture * light + (0.1 * uniform(1, 1, 1) if channels > 1 else 0) + 0.02 * normal(channels, side, side)
    return picture.clamp(0, 1)


def _compute_pixel_coordinates(
    side: int, own: ImageRecipes, draw: Callable[..., Tensor], jitter: float
) -> tuple[Tensor, Tensor]:
    """Coordinates of each pixel in the figure's plane: shifted, rotated, slanted and scaled per image."""
    line = torch.linspace(-1, 1, side, device=own.outline.device)
    down, across = torch.meshgrid(line, line, indexing="ij")
    turn = 0.35 * jitter * draw(1)[:, 0]
    size = torch.exp(0.25 * jitter * draw(2))
    stretch = torch.exp(0.5 * own.aspect)
    slant = 0.35 * jitter * draw(1)[:, 0]
    shift = 0.15 * jitter * draw(2)
    cos, sin = torch.cos(turn).view(-1, 1, 1), torch.sin(turn).view(-1, 1, 1)
    x, y = across - shift[:, 0].view(-1, 1, 1), down - shift[:, 1].view(-1, 1, 1)
    x, y = cos * x + sin * y, cos * y - sin * x
    x = x + slant.view(-1, 1, 1) * y
    return x * (size[:, 0] * stretch).view(-1, 1, 1), y * (size[:, 1] / stretch).view(-1, 1, 1)


def _compute_curve_distance(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Distance of each pixel [B, H, W] to a curve through start, bend and end [B, 3, 2]."""
    steps = torch.linspace(0, 1, SEGMENTS_PER_STROKE + 1, device=x.device).view(-1, 1, 1)
    a, b, c = ends.unbind(dim=1)
    curve = (1 - steps) ** 2 * a + 2 * steps * (1 - steps) * b + steps**2 * c  # [PIECES + 1, B, 2]
    nearest = torch.full_like(x, torch.inf)
    for start, end in pairwise(curve):
        along = end - start
        px, py = x - start[:, 0].view(-1, 1, 1), y - start[:, 1].view(-1, 1, 1)
        dx, dy = along[:, 0].view(-1, 1, 1), along[:, 1].view(-1, 1, 1)
        part = ((px * dx + py * dy) / (dx * dx + dy * dy).clamp_min(1e-6)).clamp(0, 1)
        nearest = torch.minimum(nearest, (px - part * dx).square() + (py - part * dy).square())
    return nearest.sqrt()


def sample_textures(slope: Tensor, stretch: Tensor, channels: int, side: int, generator: torch.Generator) -> Tensor:
    """Random textures [B, c, side, side] of about unit variance whose spectrum falls as frequency^-slope."""
    count, device = len(slope), slope.device
    fy = torch.fft.fftfreq(side, device=device)[:, None] * side
    fx = torch.fft.rfftfreq(side, device=device)[None] * side
    ratio = torch.exp(stretch).view(-1, 1, 1)
    frequency = (fx**2 * ratio + fy**2 / ratio).clamp_min(0.5).sqrt()
    gain = frequency ** -slope.view(-1, 1, 1)
    gain[:, 0, 0] = 0
    noise = torch.randn(count, channels, side, side, generator=generator, device=device)
    picture = torch.fft.irfft2(torch.fft.rfft2(noise) * gain[:, None], s=(side, side))
    # The colour channels of a texture are correlated.
    picture = 0.8 * picture.mean(dim=1, keepdim=True) * channels**0.5 + 0.2 * picture
    size: Tensor = picture.square().mean(dim=(1, 2, 3), keepdim=True).sqrt().clamp_min(1e-6)
    return torch.div(picture, size)
