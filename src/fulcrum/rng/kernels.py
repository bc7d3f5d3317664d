"""ChaCha20 as a triton kernel: all rounds of a block in registers, one block per thread."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotate(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = a + b
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def chacha20_kernel(table, out, blocks, programs, SIZE: tl.constexpr):
    """table int32 [streams, 11]: key and nonce. out int32 [streams, blocks, 16]: the keystream.

    `programs` for each stream: one dimension of the grid, since a GPU's second has 65,535 places only.
    """
    stream = (tl.program_id(0) // programs).to(tl.int64)
    block = (tl.program_id(0) % programs) * SIZE + tl.arange(0, SIZE)
    inside = block < blocks
    row = table + stream * 11
    zero = tl.zeros((SIZE,), dtype=tl.uint32)
    s0 = zero + 0x61707865
    s1 = zero + 0x3320646E
    s2 = zero + 0x79622D32
    s3 = zero + 0x6B206574
    s4 = zero + tl.load(row).to(tl.uint32, bitcast=True)
    s5 = zero + tl.load(row + 1).to(tl.uint32, bitcast=True)
    s6 = zero + tl.load(row + 2).to(tl.uint32, bitcast=True)
    s7 = zero + tl.load(row + 3).to(tl.uint32, bitcast=True)
    s8 = zero + tl.load(row + 4).to(tl.uint32, bitcast=True)
    s9 = zero + tl.load(row + 5).to(tl.uint32, bitcast=True)
    s10 = zero + tl.load(row + 6).to(tl.uint32, bitcast=True)
    s11 = zero + tl.load(row + 7).to(tl.uint32, bitcast=True)
    s12 = block.to(tl.uint32)
    s13 = zero + tl.load(row + 8).to(tl.uint32, bitcast=True)
    s14 = zero + tl.load(row + 9).to(tl.uint32, bitcast=True)
    s15 = zero + tl.load(row + 10).to(tl.uint32, bitcast=True)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in tl.static_range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    place = out + (stream * blocks + block.to(tl.int64)) * 16
    tl.store(place, (x0 + s0).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 1, (x1 + s1).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 2, (x2 + s2).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 3, (x3 + s3).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 4, (x4 + s4).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 5, (x5 + s5).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 6, (x6 + s6).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 7, (x7 + s7).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 8, (x8 + s8).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 9, (x9 + s9).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 10, (x10 + s10).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 11, (x11 + s11).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 12, (x12 + s12).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 13, (x13 + s13).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 14, (x14 + s14).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 15, (x15 + s15).to(tl.int32, bitcast=True), mask=inside)
