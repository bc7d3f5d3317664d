"""Seeds and mutations of the fuzzing: bytes in general, text, JSON, TOML, zip and safetensors with their structure."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

Mutate = Callable[[bytes, random.Random, Sequence[bytes]], bytes]

NUMBERS: tuple[bytes, ...] = (
    b"0",
    b"-1",
    b"1e999",
    b"-1e999",
    b"nan",
    b"inf",
    b"1" * 400,
    b"9223372036854775808",
    b"1e-320",
    b"0x10",
)
NUMBERS += (b"1" * 5000, b"true", b'"7"', b"[]", b"{}", b"[[[[[[[[[]]]]]]]]]", b"1979-05-27", b"-0.0", b"1_000", b"2.5")
WORDS: tuple[bytes, ...] = (
    b'""',
    b'"\\u0000"',
    b'"\\ud800"',
    b'"../../etc/passwd"',
    b'"fuzz_canary:make"',
    b'"a' + b"x" * 3000 + b'"',
)
WORDS += ('"\u202e\u0130\U0001f600"'.encode(), b'"\\u001b[2J"', b'"nan"', b"'''", b'"/dev/zero"', b'"none"')
EDGES: tuple[bytes, ...] = (
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x80\x00\x00\x00",
    struct.pack("<q", 1 << 40),
)
EDGES += (struct.pack("<q", -1), struct.pack("<d", float("nan")), struct.pack("<f", float("inf")))


def mutate_bytes(seed: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """One to six changes of bytes: flipped, replaced, cut, doubled, inserted, spliced with another seed."""
    content = bytearray(seed)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(content) + 1)
        kind = draw.randrange(8)
        if kind == 0 and content:
            content[at % len(content)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            edge = draw.choice(EDGES)
            content[at : at + len(edge)] = edge
        elif kind == 2:
            del content[at:]
        elif kind == 3:
            del content[at : at + draw.randint(1, 40)]
        elif kind == 4:
            content[at:at] = content[at : at + draw.randint(1, 200)] * draw.choice((1, 2, 50))
        elif kind == 5:
            content[at:at] = draw.randbytes(draw.randint(1, 30))
        elif kind == 6 and others:
            other = draw.choice(others)
            content[at:] = other[draw.randrange(len(other) + 1) :]
        elif content:
            content[at % len(content)] = draw.randrange(256)
    return bytes(content[: 1 << 20])


def mutate_text(seed: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """Changes that keep most of a text's form: values, words, lines; sometimes of bytes."""
    if draw.random() < 0.25:
        return mutate_bytes(seed, draw, others)
    lines = seed.split(b"\n")
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(lines))
        line, kind = lines[at], draw.randrange(7)
        if kind <= 2 and b"=" in line:
            lines[at] = line.partition(b"=")[0] + b"= " + draw.choice(NUMBERS + WORDS)
        elif kind == 3:
            lines[at] = b""
        elif kind == 4:
            lines.insert(at, draw.choice([line, *others[0].split(b"\n")]) if others else line)
        elif kind == 5:
            lines[at] = line.replace(draw.choice((b" ", b",", b"=", b'"', b"[", b".")), draw.choice(NUMBERS + WORDS), 1)
        else:
            lines[at] = line[: draw.randrange(len(line) + 1)] + draw.choice(
                (b"[", b"]", b"{", b'"', b"\x00", b",", b"\t")
            )
    return b"\n".join(lines)


def mutate_json(seed: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """A value somewhere in the tree becomes another, or a key does; sometimes the text is changed instead."""
    if draw.random() < 0.2:
        return mutate_bytes(seed, draw, others)
    tree: Any = json.loads(seed)
    for _ in range(draw.randint(1, 3)):
        tree = _change_tree(tree, draw)
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def _change_tree(tree: Any, draw: random.Random) -> Any:
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        1e308,
        10**30,
        1 << 63,
        "",
        "x" * 300,
        "\x1b[2J",
        "\ud800",
        [],
        {},
        [[]],
        {"a": {}},
    ]
    odd += [
        0.1,
        "fuzz_canary:make",
        "fuzz_canary:make",
        "fuzz_canary:make",
        ["fuzz_canary:make"],
        [1] * 300,
        float("nan"),
        float("inf"),
        -0.0,
        "1",
        "../..",
        [["gaussian", 0, 0, 1]],
    ]
    if isinstance(tree, dict) and tree and draw.random() < 0.85:
        name = draw.choice(list(tree))
        kind = draw.random()
        if kind < 0.1:
            return {key: value for key, value in tree.items() if key != name}
        if kind < 0.2:
            return {**tree, draw.choice(["extra", "__class__", "v", ""]): draw.choice(odd)}
        return {**tree, name: _change_tree(tree[name], draw)}
    if isinstance(tree, list) and tree and draw.random() < 0.8:
        at = draw.randrange(len(tree))
        return [*tree[:at], _change_tree(tree[at], draw), *tree[at + 1 :]]
    return draw.choice(odd)


def mutate_safetensors(seed: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """The header's JSON is changed and its length kept right, so that what lies behind the first check is reached."""
    if draw.random() < 0.4:
        return mutate_bytes(seed, draw, others)
    (length,) = struct.unpack("<Q", seed[:8])
    header = mutate_json(seed[8 : 8 + length], draw, ())
    return struct.pack("<Q", len(header)) + header + seed[8 + length :]


def mutate_zip(seed: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """One member of an archive is changed and the archive made anew, so that checksums fit."""
    if draw.random() < 0.3:
        return mutate_bytes(seed, draw, others)
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(seed)) as archive, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:
        names = archive.namelist()
        struck = draw.choice(names)
        for name in names:
            content = archive.read(name)
            if name == struck:
                content = mutate_npy(content, draw, others)
            made.writestr(name, content)
        if draw.random() < 0.1:
            made.writestr(draw.choice(["../evil.npy", "x.npy", "/etc/x.npy", "y"]), b"\x93NUMPY\x01\x00")
    return target.getvalue()


def mutate_npy(seed: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """The header of an array says another shape, type or order; the padding is kept right."""
    if not seed.startswith(b"\x93NUMPY") or draw.random() < 0.3:
        return mutate_bytes(seed, draw, others)
    (length,) = struct.unpack("<H", seed[8:10])
    header = seed[10 : 10 + length]
    shapes = (b"(1099511627776,)", b"(-1, 5)", b"()", b"(0,)", b"(3, 100000000, 10000000)", b"(True,)", b"(1.5,)", b"7")
    types = (
        b"'|O'",
        b"'<f8'",
        b"'<U5'",
        b"'|V8'",
        b"[('a', '<f4')]",
        b"'<M8[s]'",
        b"'<c16'",
        b"'|S1'",
        b"'>i4'",
        b"'zz'",
    )
    kind = draw.randrange(4)
    if kind <= 1:
        start = header.find(b"(", header.find(b"shape"))
        end = header.find(b")", start) + 1
        header = header[:start] + draw.choice(shapes) + header[end:]
    elif kind == 2:
        start = header.find(b"'", header.find(b"descr") + 7)
        header = header[:start] + draw.choice(types) + header[header.find(b"'", start + 1) + 1 :]
    else:
        header = header.replace(b"False", draw.choice((b"True", b"1", b"exec('1')", b"None")))
    header = header.rstrip() + b" " * (-(len(header.rstrip()) + 11) % 64) + b"\n"
    return seed[:8] + struct.pack("<H", len(header)) + header + seed[10 + length :]
