"""Pretrains a network to classify synthetic images, for use as initial weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulcrum.data.synthetic_images import ImageRecipes, render_images, sample_recipes
from fulcrum.models import whitening as coordinates

GRAPH_WARMUP_STEPS = 20
"""Number of steps before a step is recorded as a CUDA graph."""
NUM_EVALUATION_IMAGES = 8000
"""Number of new images after pretraining, to measure right answers and the statistics of layer inputs."""


@dataclass(frozen=True)
class PretrainSettings:
    """Settings of pretraining.

    kinds: number of image classes. pool: number of images rendered in advance, each used several times; 0: every batch
    is rendered anew, which is slower and never repeats an image. steps: number of steps of `batch` images each, shifted
    and mirrored, with AdamW at a learning rate that rises to lr and falls to zero. jitter: variation within a class.
    scene: fraction of images with an image of another class as background. colours: strength of the random change of
    brightness and colours per use. scale: factor on every weight tensor at the end (`rescale_weights`).
    """

    kinds: int = 1000
    pool: int = 0
    steps: int = 8000
    batch: int = 512
    lr: float = 2e-3
    weight_decay: float = 0.05
    smoothing: float = 0.1
    jitter: float = 1.0
    scale: float = 1.0
    scene: float = 0.0
    colours: float = 0.0
    seed: int = 0


def pretrain_model(
    model: nn.Sequential,
    shape: tuple[int, ...],
    lesson: PretrainSettings,
    device: torch.device,
    say: Callable[[str], None],
) -> float:
    """Trains all layers but the last of a model for images of `shape` (channels, side, side), in place.

    A head for the synthetic classes replaces the last layer meanwhile. Images are scaled to -1..1, like the built-in
    data sets. Returns the final fraction of right answers on new images.
    """
    last = model[-1]
    assert isinstance(last, nn.Linear)
    head = _build_head(last.in_features, lesson)
    pupil = nn.Sequential(*list(model)[:-1], head).to(device)
    pupil.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as `seen` lays pictures out
    recipes = sample_recipes(lesson.kinds, shape[0], torch.Generator().manual_seed(lesson.seed)).to(device)
    generator = torch.Generator(device).manual_seed(lesson.seed + 1)
    if lesson.pool:
        pictures, kinds = _render_batch(recipes, shape[1], lesson, generator, lesson.pool)
        say(f"painted {len(kinds)} pictures of {lesson.kinds} kinds")
    decayed = [p for p in pupil.parameters() if p.dim() > 1]
    plain = [p for p in pupil.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": lesson.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    rate = torch.tensor(lesson.lr, device=device)
    on_gpu = device.type == "cuda"
    optimiser = torch.optim.AdamW(groups, lr=rate, capturable=on_gpu, fused=on_gpu)
    loss = torch.zeros((), device=device)

    def study() -> None:
        if lesson.pool:
            batch = torch.randint(lesson.pool, (lesson.batch,), generator=generator, device=device)
            x, y = pictures[batch], kinds[batch]
        else:
            x, y = _render_batch(recipes, shape[1], lesson, generator, lesson.batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
            logits = pupil(augment_images(x, generator, lesson.colours))
        found = nn.functional.cross_entropy(logits.float(), y, label_smoothing=lesson.smoothing)
        optimiser.zero_grad(set_to_none=True)
        found.backward()
        optimiser.step()
        loss.copy_(found.detach())

    go = study
    for step in range(lesson.steps):
        rate.fill_(_compute_learning_rate(step, lesson))
        if step == GRAPH_WARMUP_STEPS and device.type == "cuda" and lesson.pool:
            go = _record_cuda_graph(study, generator)
        go()
        if (step + 1) % max(1, lesson.steps // 10) == 0:
            say(f"step {step + 1}/{lesson.steps}: loss {float(loss):.2f}")
    fresh, labels = _render_batch(recipes, shape[1], lesson, generator, NUM_EVALUATION_IMAGES)
    with torch.no_grad():
        right = float((pupil(_scale_pixels(fresh)).argmax(dim=1) == labels).float().mean())
    rescale_weights(model, lesson.scale)
    return right


def _build_head(width: int, lesson: PretrainSettings) -> nn.Linear:
    # The default initialisation would advance the global generator.
    head: nn.Linear = nn.utils.skip_init(nn.Linear, width, lesson.kinds)
    generator = torch.Generator().manual_seed(lesson.seed + 2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.uniform_(-(width**-0.5), width**-0.5, generator=generator)
    return head


def _render_batch(
    recipes: ImageRecipes, side: int, lesson: PretrainSettings, generator: torch.Generator, count: int
) -> tuple[Tensor, Tensor]:
    """Images as bytes [count, c, side, side] and their classes [count]."""
    kinds = torch.randint(lesson.kinds, (count,), generator=generator, device=generator.device)
    parts = [render_images(recipes, part, side, generator, lesson.jitter, lesson.scene) for part in kinds.split(2048)]
    return torch.cat([(255 * part).round().to(torch.uint8) for part in parts]), kinds


def _compute_learning_rate(step: int, lesson: PretrainSettings) -> float:
    """Learning rate of a step: rises over the first 200 steps, then a cosine decay to zero."""
    return lesson.lr * min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * step / lesson.steps))


def _scale_pixels(pictures: Tensor) -> Tensor:
    return pictures.float() / 127.5 - 1


def augment_images(pictures: Tensor, generator: torch.Generator, colours: float = 0.0) -> Tensor:
    """Bytes [B, c, side, side] as network inputs in -1..1: each image is shifted by up to two pixels and randomly
    mirrored; with `colours` above 0 its brightness and colours are changed, too."""
    count, channels, side, _ = pictures.shape
    device = pictures.device

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(count, *shape, generator=generator, device=device) - 1

    moved = nn.functional.pad(_scale_pixels(pictures), (2, 2, 2, 2), mode="replicate")
    line = torch.arange(side, device=device)
    down, across = (torch.randint(5, (count, 1), generator=generator, device=device) + line for _ in range(2))
    across = torch.where(uniform(1) > 0, across, across.flip(1))
    each = torch.arange(count, device=device)
    moved = moved[each[:, None, None], :, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)
    if colours > 0:
        middle = moved.mean(dim=(1, 2, 3), keepdim=True)
        grey = moved.mean(dim=1, keepdim=True)
        moved = grey + (moved - grey) * (1 + colours * uniform(1, 1, 1))
        moved = middle + (moved - middle) * (1 + 0.5 * colours * uniform(1, 1, 1))
        moved = (moved + 0.3 * colours * uniform(1, 1, 1) + 0.15 * colours * uniform(channels, 1, 1)).clamp(-1, 1)
    return moved


def _record_cuda_graph(study: Callable[[], None], generator: torch.Generator) -> Callable[[], None]:
    """The same step as a CUDA graph: otherwise Python overhead dominates for a small network."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        study()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        study()
    return graph.replay


@torch.no_grad()
def rescale_weights(model: nn.Sequential, scale: float) -> None:
    """Multiplies every weight tensor but the last layer's by `scale`, in place, and biases to match.

    With an activation for which f(a x) = a f(x), the network computes the same features at another scale. This
    matters because every gradient is clipped and noised alike: larger features make the last layer learn faster than
    the others, and the same noise disturbs larger weights less. With other activations only 1 is correct.
    """
    total = 1.0
    for layer in list(model)[:-1]:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            total *= scale
            layer.weight *= scale
            if layer.bias is not None:
                layer.bias *= total


def get_trunk_weights(model: nn.Sequential) -> dict[str, Tensor]:
    """The weights to save: all parameters but those of the last layer."""
    last = f"{len(model) - 1}."
    return {name: value.detach().cpu() for name, value in model.named_parameters() if not name.startswith(last)}


def compute_input_statistics(
    model: nn.Sequential, shape: tuple[int, ...], lesson: PretrainSettings, device: torch.device
) -> dict[str, Tensor]:
    """The statistics for model.coordinates: mean ("3.mean") and whitening matrix ("3.mix") of layer inputs, over new
    synthetic images.

    Call it after `pretrain_model`, on the weights to save. The shipped files have statistics from this function on a
    CPU, with the images of their own pretraining. The model's layers are moved to the device.
    """
    recipes = sample_recipes(lesson.kinds, shape[0], torch.Generator().manual_seed(lesson.seed)).to(device)
    generator = torch.Generator(device).manual_seed(lesson.seed + 3)
    pictures, _ = _render_batch(recipes, shape[1], lesson, generator, NUM_EVALUATION_IMAGES)
    model, x = model.to(device), _scale_pixels(pictures)
    found = {**coordinates.compute_input_means(model, x), **coordinates.compute_whitening_matrices(model, x)}
    return {name: value.cpu() for name, value in found.items()}
