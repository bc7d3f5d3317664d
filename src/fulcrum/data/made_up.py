"""Made-up records of the same shape as a data set, from declared facts alone: for rehearsals, at no privacy cost.

    facts = read_data_facts(dataset, model)                     # shapes, types, task: never a value of a record
    make_up_dataset(facts, VARIATIONS[0], 800, 400, seed=0)     # a Dataset that `prepare` takes

What is made up, by the shape and type of an input: pictures (painted kinds, `synthetic_images`), vectors (a table of
numbers and indicators), sequences of numbers (waves), sequences of word numbers (Zipf words, a tenth of them tilted by
class). Targets follow from the kind of the record, or for tables from a random two-layer teacher, for every built-in
task. A `Variation` says how hard it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulcrum.data.arrays import from_arrays
from fulcrum.data.dataset import Dataset
from fulcrum.data.records import ModelInputs, map_inputs
from fulcrum.data.synthetic_images import render_images, sample_recipes
from fulcrum.data.tasks import Task
from fulcrum.data.tasks.builtin import shift_tokens
from fulcrum.settings.schema import TaskSettings

NUM_KINDS = 16
"""Kinds of records where the task has no classes."""
TEACHER_WIDTH = 16
TILTED_WORDS = 10
"""One of so many words is tilted by the kind of the sentence (more of a small vocabulary)."""


@dataclass(frozen=True)
class InputFacts:
    """What is declared of one input: its shape without the batch, and how many words there are (0: real numbers)."""

    shape: tuple[int, ...]
    words: int = 0


@dataclass(frozen=True)
class DataFacts:
    """What is declared of a data set. inputs: by name, "" for a single input. balance: fractions of the classes, where
    declared. outputs: numbers per prediction. indicators: how many of the columns of a table are 0 or 1."""

    inputs: Mapping[str, InputFacts]
    task: TaskSettings
    outputs: int
    sequence: bool = False
    balance: tuple[float, ...] = ()
    indicators: int = -1


@dataclass(frozen=True)
class Variation:
    """How hard a made-up task is. jitter: variation within a kind. noise: fraction of random labels. tilt: how much
    more frequent a tilted word is, in logarithms."""

    name: str
    jitter: float
    noise: float
    tilt: float


VARIATIONS = (
    Variation("easy", jitter=0.7, noise=0.02, tilt=1.5),
    Variation("hard", jitter=1.5, noise=0.1, tilt=0.8),
    Variation("middle", jitter=1.0, noise=0.05, tilt=1.2),
)
"""The tasks of a rehearsal. Hard tasks like shorter steps; with a quarter of random labels among them the choice was
too short for the real data of the no-tuning suite's development half (results/no-tuning/development.md)."""


def read_data_facts(data: Dataset, model: nn.Module, balance: tuple[float, ...] = ()) -> DataFacts:
    """What everybody may know of a data set: shapes, types, task. Vocabularies are those of the model's embeddings."""
    records = data.train if data.train is not None else data.test_records
    sizes = [layer.num_embeddings for layer in model.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    task: Task = data.task
    words = max([*sizes, task.outputs if task.sequence else 0, 2])
    named = records.x if isinstance(records.x, Mapping) else {"": records.x}
    inputs = {
        name: InputFacts(tuple(value.shape[1:]), 0 if value.is_floating_point() else words)
        for name, value in named.items()
    }
    settings = data.task_settings or TaskSettings(task.name)
    name = "classification" if settings.name == "auto" else settings.name
    declared = TaskSettings(
        name,
        classes=task.outputs if name != "regression" else 0,
        **{key: getattr(settings, key) for key in ("loss", "huber_width", "scale", "offset", "low", "high", "ignored")},
    )
    return DataFacts(inputs, declared, task.outputs, task.sequence, balance)


def make_up_dataset(
    facts: DataFacts, how: Variation, count: int, test: int, seed: int, device: torch.device | str = "cpu"
) -> Dataset:
    """`count` training and `test` test records. The same facts, variation and seed give the same records."""
    generator = torch.Generator(device).manual_seed(seed)
    total = count + test
    single = facts.inputs.get("") if len(facts.inputs) == 1 else None
    x: ModelInputs
    if facts.sequence:
        x, y = _make_token_sequences(facts, how, total, generator)
    elif single is not None and not single.words and len(single.shape) == 1:
        x, y = _make_table(facts, single, how, total, generator)
    else:
        kinds = _draw_kinds(facts, total, generator)
        parts = {name: _make_inputs(own, kinds, how, generator) for name, own in facts.inputs.items()}
        x, y = (parts if single is None else parts[""]), _make_targets(facts, kinds, how, generator)
    return from_arrays(
        map_inputs(lambda value: value[:count].cpu(), x),
        y[:count].cpu(),
        map_inputs(lambda value: value[count:].cpu(), x),
        y[count:].cpu(),
        name=f"made-up-{how.name}",
        task=facts.task,
        public=True,
    )


# --- kinds and targets ----------------------------------------------------------------------------


def _count_kinds(facts: DataFacts) -> int:
    return facts.outputs if facts.task.name == "classification" else NUM_KINDS


def _draw_kinds(facts: DataFacts, count: int, generator: torch.Generator) -> Tensor:
    """The kind of each record [n]: a class by the declared balance, or one of `NUM_KINDS`."""
    kinds = _count_kinds(facts)
    balanced = facts.task.name == "classification" and len(facts.balance) == kinds
    shares = torch.tensor(facts.balance if balanced else (1.0,) * kinds, device=generator.device)
    return torch.multinomial(shares, count, replacement=True, generator=generator)


def _make_targets(facts: DataFacts, kinds: Tensor, how: Variation, generator: torch.Generator) -> Tensor:
    """Targets of records of these kinds, some of them random."""
    table = torch.randn(_count_kinds(facts), facts.outputs, generator=generator, device=generator.device)
    scores = (
        table[kinds] if facts.task.name != "classification" else nn.functional.one_hot(kinds, facts.outputs).float()
    )
    return TARGETS[facts.task.name](facts, scores, how, generator)


def _to_classes(facts: DataFacts, scores: Tensor, how: Variation, generator: torch.Generator) -> Tensor:
    labels = scores.argmax(dim=1)
    wrong = torch.rand(len(labels), generator=generator, device=labels.device) < how.noise
    other = torch.randint(facts.outputs, labels.shape, generator=generator, device=labels.device)
    return torch.where(wrong, other, labels)


def _to_bits(facts: DataFacts, scores: Tensor, how: Variation, generator: torch.Generator) -> Tensor:
    share = facts.balance[-1] if len(facts.balance) == 2 and facts.task.name == "binary" else 0.5
    cut = torch.quantile(scores[:100_000], 1 - share, dim=0)
    bits = scores > cut
    wrong = torch.rand(bits.shape, generator=generator, device=bits.device) < how.noise / 2
    found = (bits ^ wrong).long()
    return found[:, 0] if facts.task.name == "binary" else found


def _to_numbers(facts: DataFacts, scores: Tensor, how: Variation, generator: torch.Generator) -> Tensor:
    """Numbers of about a third of the declared range around its middle, or of the declared scale."""
    task = facts.task
    if task.low is not None and task.high is not None:
        middle, scale = (task.low + task.high) / 2, (task.high - task.low) / 6
    else:
        middle, scale = task.offset, task.scale or 1.0
    spread = torch.randn(scores.shape, generator=generator, device=scores.device)
    part = min(0.9, 2 * how.noise)
    found: Tensor = middle + scale * (math.sqrt(1 - part) * scores + math.sqrt(part) * spread)
    return found[:, 0] if facts.outputs == 1 else found


TARGETS: Mapping[str, Callable[[DataFacts, Tensor, Variation, torch.Generator], Tensor]] = {
    "classification": _to_classes,
    "binary": _to_bits,
    "multilabel": _to_bits,
    "regression": _to_numbers,
}
"""Targets from scores [n, O], by task; sequences of tokens make their own."""


def can_make_up(facts: DataFacts) -> bool:
    """Whether there is made-up data for this task; a user's own task has none."""
    return facts.sequence or facts.task.name in TARGETS


# --- inputs ---------------------------------------------------------------------------------------


def _make_inputs(own: InputFacts, kinds: Tensor, how: Variation, generator: torch.Generator) -> Tensor:
    """Inputs of records of these kinds, by shape and type."""
    if own.words:
        return _make_sentences(own, kinds, how, generator)
    if len(own.shape) == 3:
        return _paint(own.shape, kinds, how, generator)
    if len(own.shape) == 2:
        return _make_waves(own.shape, kinds, how, generator)
    centres = torch.randn(int(kinds.max()) + 1, *own.shape, generator=generator, device=kinds.device)
    spread = torch.randn(len(kinds), *own.shape, generator=generator, device=kinds.device)
    return 0.6 * centres[kinds] / how.jitter + 0.8 * spread


def _paint(shape: tuple[int, ...], kinds: Tensor, how: Variation, generator: torch.Generator) -> Tensor:
    """Painted pictures in [-1, 1]; sizes that are not square are cut, further channels repeat."""
    channels, height, width = shape
    colours = 1 if channels < 3 else 3
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    count = max(2, int(kinds.max()) + 1)
    recipes = sample_recipes(count, colours, torch.Generator().manual_seed(seed)).to(kinds.device)
    side = max(height, width, 4)
    parts = [render_images(recipes, some, side, generator, how.jitter) for some in kinds.split(2048)]
    pictures = torch.cat(parts)[:, :, :height, :width]
    repeats = -(-channels // colours)
    return pictures.repeat(1, repeats, 1, 1)[:, :channels].mul(2).sub(1)


def _make_waves(shape: tuple[int, ...], kinds: Tensor, how: Variation, generator: torch.Generator) -> Tensor:
    """Series [n, L, c]: each kind has its own frequency and phase per channel, under correlated noise."""
    length, channels = shape
    count, device = int(kinds.max()) + 1, kinds.device

    def uniform(*sides: int) -> Tensor:
        return torch.rand(*sides, generator=generator, device=device)

    time = torch.arange(length, device=device)[None, :, None] / max(length, 2)
    turns, phase = 1 + 6 * uniform(count, 1, channels), 2 * math.pi * uniform(count, 1, channels)
    shift = how.jitter * uniform(len(kinds), 1, 1)
    waves = torch.sin(2 * math.pi * turns[kinds] * time + phase[kinds] + shift)
    noise = torch.randn(len(kinds), length, channels, generator=generator, device=device)
    return waves + 0.4 * how.jitter * (noise + noise.roll(1, dims=1)) / 2**0.5


def _make_sentences(own: InputFacts, kinds: Tensor, how: Variation, generator: torch.Generator) -> Tensor:
    """Word numbers from 1 (0 may be padding), by Zipf's law; a tenth of the words is tilted by the kind."""
    words, device = own.words, kinds.device
    log_share = -torch.log(torch.arange(1, words, device=device).float() + 1)
    gap = max(1, min(TILTED_WORDS, words // 16))
    shift = int(torch.randint(gap, (1,), generator=generator, device=device))
    tilted = torch.arange(words - 1, device=device) % gap == shift  # frequent ones among them
    tilt = torch.randn(int(kinds.max()) + 1, words - 1, generator=generator, device=device) * tilted * how.tilt
    shares = torch.softmax(log_share + tilt, dim=1)
    length = math.prod(own.shape)
    found = torch.cat(
        [torch.multinomial(shares[some], length, replacement=True, generator=generator) for some in kinds.split(2048)]
    )
    return (1 + found).view(len(kinds), *own.shape)


def _make_table(
    facts: DataFacts, own: InputFacts, how: Variation, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Numbers and indicators, and the targets of a random two-layer teacher, shifted to the declared balance."""
    columns, device = own.shape[0], generator.device

    def normal(*sides: int) -> Tensor:
        return torch.randn(*sides, generator=generator, device=device)

    x = normal(count, columns)
    indicators = facts.indicators if facts.indicators >= 0 else columns // 2
    if indicators:
        share = 0.05 + 0.45 * torch.rand(indicators, generator=generator, device=device)
        x[:, columns - indicators :] = (
            torch.rand(count, indicators, generator=generator, device=device) < share
        ).float()
    # A linear part beside the hidden layer: most tables are told by it.
    hidden = torch.tanh(x @ normal(columns, TEACHER_WIDTH) * (how.jitter / columns**0.5))
    scores = hidden @ normal(TEACHER_WIDTH, facts.outputs) / TEACHER_WIDTH**0.5
    scores = scores + x @ normal(columns, facts.outputs) / columns**0.5
    scores = (scores - scores.mean(dim=0)) / scores.std(dim=0).clamp_min(1e-6)
    if facts.task.name == "classification" and len(facts.balance) == facts.outputs:
        scores = _shift_to_balance(scores, facts.balance)
    return x, TARGETS[facts.task.name](facts, scores, how, generator)


def _shift_to_balance(scores: Tensor, balance: tuple[float, ...]) -> Tensor:
    """Scores whose largest entry has the declared frequencies: each class is shifted until its share fits."""
    wanted = torch.tensor(balance, device=scores.device) / sum(balance)
    shift = torch.zeros_like(wanted)
    for _ in range(60):
        share = torch.bincount((scores + shift).argmax(dim=1), minlength=len(balance)) / len(scores)
        shift = shift + 0.3 * (wanted.clamp_min(1e-4).log() - share.clamp_min(1e-4).log()).clamp(-1, 1)
    return scores + shift


def _make_token_sequences(
    facts: DataFacts, how: Variation, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sequences of a Markov chain over the words; targets are the next word, or a word by the present one."""
    own = next(iter(facts.inputs.values()))
    words, length, device = min(own.words or facts.outputs, facts.outputs), own.shape[0], generator.device
    log_share = -torch.log(torch.arange(1, words + 1, device=device).float())
    # A few hundred states are enough for a chain; a larger vocabulary shares its rows.
    rows = min(words, 256)
    moves = torch.randn(rows, words, generator=generator, device=device) * 2 * how.tilt
    shares = torch.softmax(log_share + moves, dim=1)
    x = torch.empty(count, length, dtype=torch.int64, device=device)
    x[:, 0] = torch.multinomial(log_share.softmax(0), count, replacement=True, generator=generator)
    for place in range(1, length):
        x[:, place] = torch.multinomial(shares[x[:, place - 1] % rows], 1, generator=generator)[:, 0]
    if facts.task.name == "next-token":
        return x, shift_tokens(x, facts.task.ignored)
    known = torch.randperm(words, generator=generator, device=device)
    wrong = torch.rand(x.shape, generator=generator, device=device) < how.noise
    other = torch.randint(words, x.shape, generator=generator, device=device)
    return x, torch.where(wrong, other, known[x])
