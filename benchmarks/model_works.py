"""The models of the benchmark on any model, in plain PyTorch, and the works: a model, its inputs, a batch, parties.

Every model is written as people write it: own forward, residual sums, `F.scaled_dot_product_attention`. Positions are
an `nn.Embedding` where a library must see every parameter inside a known layer; `-direct` has them as parameters of the
model itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 8192
CLASSES = 10

# --- residual networks with GroupNorm ---------------------------------------------------------------


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(16, channels // 2), channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: ResNet-18."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1 = _group_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = _group_norm(width)
        self.outputs = width
        self.short = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.short(x))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 and a shortcut: ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = _group_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = _group_norm(width)
        self.conv3 = nn.Conv2d(width, self.outputs, 1, bias=False)
        self.norm3 = _group_norm(self.outputs)
        self.short = _shortcut(inputs, self.outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h)))
        return F.relu(self.norm3(self.conv3(h)) + self.short(x))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _group_norm(outputs))


class ResNet(nn.Module):
    """Stem 3x3 without pooling (images of 32x32), four stages, global mean, one linear layer."""

    def __init__(self, block: type[BasicBlock | Bottleneck], depths: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = _group_norm(width)
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                made = block(channels, width * 2**stage, 2 if i == 0 and stage else 1)
                blocks.append(made)
                channels = made.outputs
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            h = block(h)
        found: Tensor = self.head(h.mean(dim=(2, 3)))
        return found


# --- transformers -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention from two linear layers and SDPA."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, width = x.shape
        q, k, v = self.qkv(x).view(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(count, tokens, width))
        return found


class LibraryAttention(nn.Module):
    """The same as `nn.MultiheadAttention`, which uses its projections without calling a layer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return found


class TransformerBlock(nn.Module):
    """Norm first: attention and a GELU network of four times the width, each with a residual sum."""

    def __init__(self, width: int, heads: int, causal: bool, attention: Callable[..., nn.Module] = Attention) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        found: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return found


class Positions(nn.Module):
    """Learned positions from an embedding that sees one row of indices per example."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.table(torch.arange(x.shape[1], device=x.device).repeat(len(x), 1))
        return found


class DirectPositions(nn.Module):
    """A class token and learned positions as parameters used directly."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position


class VisionTransformer(nn.Module):
    """32x32 images in 64 patches of 4x4; mean over the tokens; a linear head."""

    def __init__(self, depth: int, width: int, heads: int = 3, direct: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.place = (DirectPositions if direct else Positions)(64, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.place(self.patches(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            h = block(h)
        found: Tensor = self.head(self.norm(h).mean(dim=1))
        return found


class TextTransformer(nn.Module):
    """An encoder with a class from the mean token, or (`causal`) a decoder with a next token at every position."""

    def __init__(
        self,
        depth: int,
        width: int,
        heads: int,
        tokens: int,
        causal: bool = False,
        tied: bool = False,
        attention: Callable[..., nn.Module] = Attention,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.place = Positions(tokens, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, causal, attention) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY if causal else CLASSES, bias=not causal)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.place(self.embed(x))
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        found: Tensor = self.head(h if self.causal else h.mean(dim=1))
        return found


class LowRank(nn.Module):
    """A frozen linear layer beside a trained one of rank `rank` (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)  # not zero: a gradient of `down` must not vanish
        nn.init.normal_(self.up.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


class TextRecurrent(nn.Module):
    """Embedding, one LSTM layer, a class from its mean output."""

    def __init__(self, width: int, hidden: int, lstm: Callable[..., nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.lstm = lstm(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.embed(x))[0].mean(dim=1))
        return found


# --- works ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelWork:
    """One work: the model, the shape of an example, the batch over all parties, and the local steps.

    tokens: length of a text; 0 for images of `side`. build takes lstm= (nn.LSTM or Opacus' own).
    """

    name: str
    build: Callable[..., nn.Module] = field(compare=False)
    batch: int
    side: int = 32
    tokens: int = 0
    next_token: bool = False
    parties: int = 1
    steps: int = 1

    def scaled(self, scale: float) -> ModelWork:
        """The same with a part of the batch, at least two examples per party."""
        each = max(2, math.floor(self.batch * scale / self.parties + 0.5))
        return dataclasses.replace(self, batch=each * self.parties)

    def model(self, **options: Any) -> nn.Module:
        """The model with its initial weights, the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build(**options)

    def data(self, count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Random inputs and targets: for time and memory, pixels are pixels."""
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(0, CLASSES, (count,), generator=generator)
        if not self.tokens:
            return torch.rand(count, 3, self.side, self.side, generator=generator), y
        x = torch.randint(0, VOCABULARY, (count, self.tokens), generator=generator)
        if self.next_token:
            y = torch.cat([x[:, 1:], torch.full_like(x[:, :1], -100)], dim=1)
        return x, y

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One loss per example [B]: cross-entropy, for texts the mean over the tokens that have a next one."""
        outputs = outputs.float() if outputs.dtype != torch.float64 else outputs
        if not self.next_token:
            return F.cross_entropy(outputs, y, reduction="none")
        each = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none", ignore_index=-100)
        return each.view(len(y), -1).sum(dim=1) / (self.tokens - 1)


def _resnet18(width: int) -> Callable[..., nn.Module]:
    return lambda **options: ResNet(BasicBlock, (2, 2, 2, 2), width)


def _text(depth: int, width: int, tokens: int = 128, **options: Any) -> Callable[..., nn.Module]:
    return lambda **unused: TextTransformer(depth, width, max(1, width // 64), tokens, **options)


def _gpt(**options: Any) -> nn.Module:
    return TextTransformer(12, 768, 12, 512, causal=True, **options)


def _gpt_lora(**unused: Any) -> nn.Module:
    model = _gpt().requires_grad_(False)
    assert isinstance(model, TextTransformer)
    for block in model.blocks:
        assert isinstance(block, TransformerBlock)
        assert isinstance(block.attention, Attention)
        block.attention.qkv = LowRank(block.attention.qkv)  # type: ignore[assignment]
        block.attention.out = LowRank(block.attention.out)  # type: ignore[assignment]
    return model


def _probe(**unused: Any) -> nn.Module:
    model = ResNet(BasicBlock, (2, 2, 2, 2), 64).requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def _lstm(lstm: Callable[..., nn.Module] = nn.LSTM, **unused: Any) -> nn.Module:
    return TextRecurrent(128, 256, lstm)


def _by_name(*works: ModelWork) -> dict[str, ModelWork]:
    return {work.name: work for work in works}


MAIN = _by_name(
    ModelWork("resnet18-gn-64", _resnet18(64), 512),
    ModelWork("resnet18-gn-16", _resnet18(16), 1024),
    ModelWork("vit-6x192", lambda **options: VisionTransformer(6, 192), 1024),
    ModelWork("transformer-4x256", _text(4, 256), 256, tokens=128),
)
"""The works with a promise: at most 1.3 of plain."""

REPORTED = _by_name(
    ModelWork("gpt-12x768", lambda **options: _gpt(), 32, tokens=512, next_token=True),
    ModelWork("gpt-12x768-tied", lambda **options: _gpt(tied=True), 32, tokens=512, next_token=True),
    ModelWork("gpt-12x768-lora", _gpt_lora, 32, tokens=512, next_token=True),
    ModelWork("resnet50-gn-64px", lambda **options: ResNet(Bottleneck, (3, 4, 6, 3), 64), 128, side=64),
    ModelWork("lstm-text", _lstm, 256, tokens=128),
    ModelWork("linear-probe", _probe, 512),
    ModelWork("vit-6x192-direct", lambda **options: VisionTransformer(6, 192, direct=True), 1024),
    ModelWork("transformer-4x256-mha", _text(4, 256, attention=LibraryAttention), 256, tokens=128),
    *(
        dataclasses.replace(MAIN[name], name=f"{name}-10-parties", parties=10, batch=MAIN[name].batch // 10 * 10)
        for name in MAIN
    ),
    dataclasses.replace(
        MAIN["resnet18-gn-16"], name="resnet18-gn-16-10-parties-2-steps", parties=10, batch=1020, steps=2
    ),
)
"""Reported beside them, with the same aims."""


WORKS = MAIN | REPORTED
