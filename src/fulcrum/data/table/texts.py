"""Columns of text: token ids by a tokenizer file, or a bag of words.

kind = "text"
tokenizer = "tokenizer.json"     # made on public text; needs tokenizers (`pip install 'fulcrum-fl[text]'`)
length = 128                     # ids per record: longer texts are cut, shorter ones filled up
form = "ids"                     # or "bag": how often each token is there, as a direction of length 1

kind = "text"
buckets = 1024                   # a bag of words without a tokenizer: each word in one of so many by a public hash
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fulcrum.data.table.cells import Cells
from fulcrum.data.table.kinds import MAX_CATEGORIES, ColumnKind, Encoded
from fulcrum.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fulcrum.data.table.schema import Column

PADDING_TOKENS = ("[PAD]", "<pad>", "<|endoftext|>")
WORD = re.compile(r"\w+")
FORMS = ("ids", "bag")
MAX_LENGTH = 1_000_000


def _check_text(column: Column) -> None:
    if bool(column.tokenizer) == bool(column.buckets):
        raise ConfigError(
            f"column {column.name!r} is text: name a tokenizer file, made on public text, with the length in tokens; "
            "or say buckets = 1024 for a bag of words."
        )
    if column.buckets:
        if not 2 <= column.buckets <= 10 * MAX_CATEGORIES:
            raise ConfigError(f"column {column.name!r}: buckets must lie between 2 and {10 * MAX_CATEGORIES:,}.")
        return
    if column.form not in FORMS:
        raise ConfigError(f"column {column.name!r}: form = {column.form!r} must be one of {', '.join(FORMS)}.")
    if column.form == "ids" and not 1 <= column.length <= MAX_LENGTH:
        raise ConfigError(f"column {column.name!r}: length must be the number of tokens per record, such as 128.")


def count_tokens(column: Column) -> int:
    """The size of a column's vocabulary: as declared, else the tokenizer's largest id plus one."""
    size: int = _load_tokenizer(column)[1]
    if column.vocabulary and column.vocabulary < size:
        raise DataError(
            f"column {column.name!r}: the tokenizer {column.tokenizer} has ids up to {size - 1}, and vocabulary = "
            f"{column.vocabulary} is declared; bring back the tokenizer that belongs to it."
        )
    return column.vocabulary or size


def _load_tokenizer(column: Column) -> tuple[Any, int]:
    path = Path(column.tokenizer).expanduser()
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError as error:
        raise DataError(
            f"column {column.name!r}: the tokenizer {path} cannot be read: {error.strerror or error}."
        ) from None
    return _read_tokenizer(str(path), changed)


@lru_cache(maxsize=8)
def _read_tokenizer(path: str, changed: int) -> tuple[Any, int]:
    """The tokenizer in a file, and its largest id plus one."""
    try:
        import tokenizers
    except ImportError:
        raise DataError(f"the tokenizer {path} needs tokenizers; run `pip install 'fulcrum-fl[text]'`.") from None
    try:
        found = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain exceptions
        raise DataError(f"{path} is no tokenizer file (tokenizer.json): {error}.") from None
    return found, 1 + max(found.get_vocab(with_added_tokens=True).values(), default=0)


def _encode_ids(column: Column, texts: Sequence[str], size: int) -> npt.NDArray[np.int64]:
    """Token ids [n, length]: cut or filled up with the tokenizer's padding (else id 0)."""
    tokenizer, _ = _load_tokenizer(column)
    declared = tokenizer.padding or {}
    named = (tokenizer.token_to_id(token) for token in PADDING_TOKENS)
    filler = declared.get("pad_id", next((each for each in named if each is not None), 0))
    found = np.full((len(texts), column.length), filler, dtype=np.int64)
    for row, ids in enumerate(_tokenize(tokenizer, texts)):
        kept = ids[: column.length]
        found[row, : len(kept)] = kept
    if len(found) and int(found.max()) >= size:
        raise DataError(f"column {column.name!r}: the tokenizer made ids beyond its vocabulary of {size} tokens.")
    return found


def _tokenize(tokenizer: Any, texts: Sequence[str]) -> Iterable[list[int]]:
    # The file's own padding and truncation are replaced by the declared length.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return (each.ids for each in tokenizer.encode_batch(list(texts)))


def _encode_bag(column: Column, texts: Sequence[str], width: int) -> npt.NDArray[np.float32]:
    """How often each token or word is there [n, width], divided by the length of that vector."""
    found = np.zeros((len(texts), width), dtype=np.float32)
    many: Iterable[Iterable[int]] = (
        _tokenize(_load_tokenizer(column)[0], texts)
        if column.tokenizer
        else ([_hash_word(word.lower(), width) for word in WORD.findall(text)] for text in texts)
    )
    for row, ids in enumerate(many):
        for place, count in Counter(ids).items():
            found[row, place] = count
    length = np.linalg.norm(found, axis=1, keepdims=True)
    return np.asarray(found / np.maximum(length, 1.0), dtype=np.float32)


@lru_cache(maxsize=100_000)
def _hash_word(word: str, buckets: int) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big") % buckets


def _encode_text(column: Column, cells: Cells) -> Encoded:
    texts = cells.texts()
    if column.is_text:
        return Encoded(_encode_ids(column, texts, count_tokens(column)))
    return Encoded(_encode_bag(column, texts, column.buckets or count_tokens(column)))


def _name_text(column: Column) -> list[str]:
    if column.is_text:
        return []
    return [f"{column.name}#{place}" for place in range(column.buckets or count_tokens(column))]


TEXT_KIND = ColumnKind(
    ("tokenizer", "length", "vocabulary", "form", "buckets"), _check_text, _name_text, _encode_text, "text"
)
