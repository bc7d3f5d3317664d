"""Triton kernels of the stacked engine. Import this only where triton is installed, as `fused` does.

Every kernel writes each output element once, from a gather: no atomics, so results are deterministic. A program
handles BLOCK adjacent elements of one image. A layer's geometry is a compile-time constant, and block
sizes are fixed, so that a launch can be recorded in a CUDA graph. Images are channels last, [image, H, W, C].
"""

import triton
import triton.language as tl


@triton.jit
def extract_patches_kernel(
    h, out, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
):  # fmt: skip
    """h [image, H, W, C] -> out [image, OH * OW, KH * KW * C], zeros where a window extends beyond the image."""
    size: tl.constexpr = OH * OW * KH * KW * C
    pid = tl.program_id(0)
    image = (pid // BLOCKS).to(tl.int64)
    at = (pid % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    c = at % C
    j = (at // C) % KW
    i = (at // (C * KW)) % KH
    ox = (at // (C * KW * KH)) % OW
    oy = at // (C * KW * KH * OW)
    y = oy * SH - PH + i * DH
    x = ox * SW - PW + j * DW
    seen = inside
    if PH > 0 or PW > 0:
        seen = inside & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    value = tl.load(h + image * (H * W * C) + (y * W + x) * C + c, mask=seen, other=0.0)
    tl.store(out + image * size + at, value, mask=inside)


@triton.jit
def fold_patches_kernel(
    g, out, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    """g [image, OH * OW, KH * KW * C] -> out [image, H, W, C], the sum over the windows that contain a pixel."""
    size: tl.constexpr = H * W * C
    pid = tl.program_id(0)
    image = (pid // BLOCKS).to(tl.int64)
    at = (pid % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    c = at % C
    x = (at // C) % W + PW
    y = at // (C * W) + PH
    start = g + image * (OH * OW * KH * KW * C)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for a in tl.static_range((KH + SH - 1) // SH):
        i = y % SH + a * SH
        oy = y // SH - a
        for b in tl.static_range((KW + SW - 1) // SW):
            j = x % SW + b * SW
            ox = x // SW - b
            seen = inside & (i < KH) & (oy >= 0) & (oy < OH) & (j < KW) & (ox >= 0) & (ox < OW)
            total += tl.load(start + (((oy * OW + ox) * KH + i) * KW + j) * C + c, mask=seen, other=0.0).to(tl.float32)
    tl.store(out + image * size + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def pool_kernel(
    h, bias, out, note, per_set, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
    SW: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """h [image, H, W, C] -> out, note [image, OH, OW, C]: bias [image // per_set, C] added, relu, max or mean.

    note: for max, the index of the largest (on ties the first in reading order), 255 where relu stops the gradient;
    for the mean with relu, one bit per window element, set where the element is positive.
    """
    size: tl.constexpr = OH * OW * C
    pid = tl.program_id(0)
    number = pid // BLOCKS
    image = number.to(tl.int64)
    at = (pid % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    c = at % C
    ox = (at // C) % OW
    oy = at // (C * OW)
    start = h + image * (H * W * C) + (oy * SH * W + ox * SW) * C + c
    shift = tl.zeros([BLOCK], dtype=tl.float32)
    if BIAS:
        shift = tl.load(bias + (number // per_set) * C + c, mask=inside, other=0.0).to(tl.float32)
    best = tl.zeros([BLOCK], dtype=tl.float32)
    found = tl.zeros([BLOCK], dtype=tl.int32)
    for tap in tl.static_range(KH * KW):
        value = tl.load(start + ((tap // KW) * W + tap % KW) * C, mask=inside, other=0.0).to(tl.float32) + shift
        if MEAN:
            if RELU:
                stopped = value <= 0  # NaN passes
                value = tl.where(stopped, 0.0, value)
                found = tl.where(stopped, found, found | (1 << tap))
            best += value
        elif tap == 0:
            best = value
        else:
            larger = (value > best) | ((value != value) & (best == best))
            best = tl.where(larger, value, best)
            found = tl.where(larger, tap, found)
    if MEAN:
        best = best / (KH * KW)
    elif RELU:
        stopped = best <= 0
        best = tl.where(stopped, 0.0, best)
        found = tl.where(stopped, 255, found)
    tl.store(out + image * size + at, best.to(out.dtype.element_ty), mask=inside)
    if RELU or not MEAN:
        tl.store(note + image * size + at, found.to(note.dtype.element_ty), mask=inside)


@triton.jit
def pool_backward_kernel(
    g, note, out, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    RELU: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """The gradient of `pool_kernel`: g, note [image, OH, OW, C] -> out [image, H, W, C]."""
    size: tl.constexpr = H * W * C
    pid = tl.program_id(0)
    image = (pid // BLOCKS).to(tl.int64)
    at = (pid % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    c = at % C
    x = (at // C) % W
    y = at // (C * W)
    before = image * (OH * OW * C)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for a in tl.static_range((KH + SH - 1) // SH):
        i = y % SH + a * SH
        oy = y // SH - a
        for b in tl.static_range((KW + SW - 1) // SW):
            j = x % SW + b * SW
            ox = x // SW - b
            seen = inside & (i < KH) & (oy >= 0) & (oy < OH) & (j < KW) & (ox >= 0) & (ox < OW)
            place = before + (oy * OW + ox) * C + c
            value = tl.load(g + place, mask=seen, other=0.0).to(tl.float32)
            tap = i * KW + j
            if MEAN:
                value = value / (KH * KW)
                if RELU:
                    kept = tl.load(note + place, mask=seen, other=0).to(tl.int32)
                    value = tl.where(((kept >> tap) & 1) != 0, value, 0.0)
            else:
                kept = tl.load(note + place, mask=seen, other=255).to(tl.int32)
                value = tl.where(kept == tap, value, 0.0)
            total += value
    tl.store(out + image * size + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gram_matrix(rows, P: tl.constexpr, K: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """All inner products of rows [P, K], padded to [TALL, TALL] with zeros, in float64.

    WIDE products add up in float32, from three tf32 products each; beyond that, in float64: a norm must not be
    underestimated, and `fused.GRAM_ERROR` says by how much each entry may be off.
    """
    p = tl.arange(0, TALL)
    total = tl.zeros([TALL, TALL], dtype=tl.float64)
    for first in range(0, K, WIDE):
        k = first + tl.arange(0, WIDE)
        part = tl.load(rows + p[:, None] * K + k[None, :], mask=(p[:, None] < P) & (k[None, :] < K), other=0.0)
        total += tl.dot(part, tl.trans(part), input_precision="tf32x3").to(tl.float64)
    return total


@triton.jit
def ghost_norm_kernel(
    a, g, out, P: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """For each example a [example, P, K], g [example, P, OUT] -> out [example, 2], float64: the squared norm of g^T a,
    and sum_p |a_p| |g_p|."""
    example = tl.program_id(0).to(tl.int64)
    inputs = _gram_matrix(a + example * (P * K), P, K, TALL, WIDE)
    slopes = _gram_matrix(g + example * (P * OUT), P, OUT, TALL, NARROW)
    both = inputs * slopes
    tl.store(out + example * 2, tl.sum(both))
    p = tl.arange(0, TALL)
    lengths = tl.sum(tl.where(p[:, None] == p[None, :], both, 0.0), axis=1)
    tl.store(out + example * 2 + 1, tl.sum(tl.sqrt(lengths)))


@triton.jit
def haar_levels_kernel(
    x, energies, rest, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """The DEPTH finest Haar levels of zero-padded rows x [row, D] with stride STRIDE (in elements), in one read.

    energies [row, BLOCKS, DEPTH]: energy of each level's details per block of BLOCK elements, from fine to coarse.
    rest [row, BLOCKS * BLOCK / 2^DEPTH]: input of the coarser levels. WIDE >= D elements of a row may be read,
    so that loads are vectorised.
    """
    pid = tl.program_id(0).to(tl.int64)
    at = (pid % BLOCKS).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + (pid // BLOCKS) * STRIDE + at, mask=at < WIDE, other=0.0)
    values = tl.where(at < D, values, 0.0)  # memory beyond the row is arbitrary
    for level in tl.static_range(DEPTH):
        even, odd = tl.split(tl.reshape(values, (BLOCK >> (level + 1), 2)))
        detail = even - odd  # squared directly: differences of energies would cancel
        tl.store(energies + pid * DEPTH + level, 0.5 * tl.sum(detail * detail))
        values = (even + odd) * 0.7071067811865476
    tl.store(rest + pid * (BLOCK >> DEPTH) + tl.arange(0, BLOCK >> DEPTH), values)


@triton.jit
def _sum_groups(values, EACH: tl.constexpr, WIDE: tl.constexpr):
    """The sum over each channel's group: values [WIDE] -> [WIDE]."""
    c = tl.arange(0, WIDE)
    same = (c[:, None] // EACH) == (c[None, :] // EACH)
    return tl.sum(tl.where(same, values[None, :], 0.0), axis=1)


@triton.jit
def group_norm_kernel(
    x, weight, bias, out, moments, eps, C: tl.constexpr, EACH: tl.constexpr, P: tl.constexpr, BY_CHANNEL: tl.constexpr,
    BY_PIXEL: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """x, out [image, C, P] with the given strides; moments [image, C, 2]: mean and 1 / deviation of the group.

    A program handles BLOCK channels, whole groups of EACH, of one image. Squares are of differences from the mean of
    the pixels so far (Chan, Golub, LeVeque): a large mean does not cancel.
    """
    pid = tl.program_id(0)
    image = (pid // BLOCKS).to(tl.int64)
    own = tl.arange(0, WIDE)
    c = (pid % BLOCKS) * BLOCK + own
    real = (own < BLOCK) & (c < C)
    start = image * (C * P)
    p = tl.arange(0, TALL)
    mean = tl.zeros([WIDE], dtype=tl.float32)
    spread = tl.zeros([WIDE], dtype=tl.float32)
    for first in range(0, P, TALL):
        inside = ((first + p) < P)[:, None] & real[None, :]
        value = tl.load(
            x + start + (first + p)[:, None] * BY_PIXEL + c[None, :] * BY_CHANNEL, mask=inside, other=0.0
        ).to(tl.float32)
        count = tl.minimum(TALL, P - first).to(tl.float32)
        here = tl.sum(value, axis=0) / count
        off = tl.where(inside, value - here[None, :], 0.0)
        apart = here - mean
        total = first + count
        spread += tl.sum(off * off, axis=0) + apart * apart * (first * count / total)
        mean += apart * (count / total)
    mean = tl.where(real, mean, 0.0)
    middle = _sum_groups(mean, EACH, WIDE) / EACH
    apart = tl.where(real, mean - middle, 0.0)
    scale = 1.0 / tl.sqrt(_sum_groups(tl.where(real, spread, 0.0) + P * apart * apart, EACH, WIDE) / (EACH * P) + eps)
    place = moments + (image * C + c) * 2
    tl.store(place, middle, mask=real)
    tl.store(place + 1, scale, mask=real)
    gain = tl.load(weight + c, mask=real, other=0.0)
    shift = tl.load(bias + c, mask=real, other=0.0)
    for first in range(0, P, TALL):
        inside = ((first + p) < P)[:, None] & real[None, :]
        at = start + (first + p)[:, None] * BY_PIXEL + c[None, :] * BY_CHANNEL
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, (value - middle[None, :]) * scale[None, :] * gain[None, :] + shift[None, :], mask=inside)


@triton.jit
def group_norm_backward_kernel(
    x, g, weight, moments, slope, of_weight, of_bias, C: tl.constexpr, EACH: tl.constexpr, P: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BY_PIXEL: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr,
    TALL: tl.constexpr,
):  # fmt: skip
    """g [image, C, P], the output's gradient -> slope, the input's; of_weight, of_bias [image, C], each image's."""
    pid = tl.program_id(0)
    image = (pid // BLOCKS).to(tl.int64)
    own = tl.arange(0, WIDE)
    c = (pid % BLOCKS) * BLOCK + own
    real = (own < BLOCK) & (c < C)
    start = image * (C * P)
    p = tl.arange(0, TALL)
    place = moments + (image * C + c) * 2
    middle = tl.load(place, mask=real, other=0.0)
    scale = tl.load(place + 1, mask=real, other=0.0)
    along = tl.zeros([WIDE], dtype=tl.float32)
    plain = tl.zeros([WIDE], dtype=tl.float32)
    for first in range(0, P, TALL):
        inside = ((first + p) < P)[:, None] & real[None, :]
        at = start + (first + p)[:, None] * BY_PIXEL + c[None, :] * BY_CHANNEL
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        along += tl.sum(tl.where(inside, grad * (value - middle[None, :]), 0.0), axis=0)
        plain += tl.sum(grad, axis=0)
    along = along * scale
    tl.store(of_weight + image * C + c, along, mask=real)
    tl.store(of_bias + image * C + c, plain, mask=real)
    gain = tl.load(weight + c, mask=real, other=0.0)
    of_spread = _sum_groups(tl.where(real, gain * along, 0.0), EACH, WIDE) / (EACH * P)
    of_middle = _sum_groups(tl.where(real, gain * plain, 0.0), EACH, WIDE) / (EACH * P)
    for first in range(0, P, TALL):
        inside = ((first + p) < P)[:, None] & real[None, :]
        at = start + (first + p)[:, None] * BY_PIXEL + c[None, :] * BY_CHANNEL
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        normal = (value - middle[None, :]) * scale[None, :]
        found = (grad * gain[None, :] - of_middle[None, :] - normal * of_spread[None, :]) * scale[None, :]
        tl.store(slope + at, found.to(slope.dtype.element_ty), mask=inside)
