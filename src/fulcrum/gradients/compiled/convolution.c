/* Each example's gradient of a convolution's weight, and its squared norm.

   The gradient of a tap (y, x) of the kernel, input channel c and output o is a sum over the output's pixels of
   image[pixel + tap][c] * slope[pixel][o]. With channels last, the taps of one row of the kernel and their channels lie
   side by side in the image: kw * c numbers. A block of MR of them times NV vectors of outputs is held in registers
   while all pixels pass. */

#include "vectors.h"

#define MOST_ROWS 16 /* of a block with one vector of outputs */
#define MOST_ROWS_OF_TWO 12

typedef struct {
    long count, channels, height, width;                 /* of the images */
    long a_example, a_channel, a_row, a_column;          /* their strides, in numbers */
    long outputs, tall, wide;                            /* of the slopes */
    long g_example, g_channel, g_row, g_column;
    long kernel_height, kernel_width, step_y, step_x, pad_y, pad_x;
} Shape;

typedef struct {
    const float *image, *slope; /* of one example, from the block's first row and output on */
    float *out;
    long tall, wide;                   /* pixels of the output */
    long image_row, image_column;      /* numbers from one pixel's patch to the next */
    long slope_pixel, out_row, outputs; /* numbers per pixel, numbers per row of the gradient, outputs to be written */
} Block;

/* One block: its gradients are written; returns the sum of their squares. */
static inline __attribute__((always_inline)) double multiply_block(const Block *b, const int MR, const int NV)
{
    vec sums[MOST_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++)
            sums[r][v] = (vec){0};
    const float *slope = b->slope;
    for (long y = 0; y < b->tall; y++) {
        const float *image = b->image + y * b->image_row;
        for (long x = 0; x < b->wide; x++) {
            vec g[2];
#pragma GCC unroll 2
            for (int v = 0; v < NV; v++)
                g[v] = load(slope + v * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
                for (int v = 0; v < NV; v++)
                    sums[r][v] += image[r] * g[v];
            image += b->image_column;
            slope += b->slope_pixel;
        }
    }
    vec squares = (vec){0};
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++) {
            squares += sums[r][v] * sums[r][v];
            float *out = b->out + r * b->out_row + v * LANES;
            long left = b->outputs - v * LANES;
            if (left >= LANES)
                store(out, sums[r][v]);
            else /* the last outputs: the slopes behind them are zero */
                for (long o = 0; o < left; o++)
                    out[o] = sums[r][v][o];
        }
    return add_lanes(squares);
}

#define CASE(rows, vectors) \
    case rows:              \
        return multiply_block(b, rows, vectors);

static double multiply_wide(const Block *b, long rows)
{
    switch (rows) {
        CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2)
        CASE(7, 2) CASE(8, 2) CASE(9, 2) CASE(10, 2) CASE(11, 2)
    default:
        return multiply_block(b, 12, 2);
    }
}

static double multiply_narrow(const Block *b, long rows)
{
    switch (rows) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1) CASE(7, 1) CASE(8, 1)
        CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1) CASE(13, 1) CASE(14, 1) CASE(15, 1)
    default:
        return multiply_block(b, 16, 1);
    }
}

/* Images with channels last: to [height][width][wanted], of which the first `channels` are copied. */
static void put_channels_last(const float *from, float *to, long height, long width, long channels, long row,
                              long column, long channel, long to_row, long wanted)
{
    for (long y = 0; y < height; y++) {
        const float *source = from + y * row;
        float *target = to + y * to_row;
        if (channel == 1 && column == channels && wanted == channels)
            memcpy(target, source, sizeof(float) * width * channels);
        else if (channel == 1)
            for (long x = 0; x < width; x++)
                memcpy(target + x * wanted, source + x * column, sizeof(float) * channels);
        else
            for (long start = 0; start < width; start += LANES) { /* few lines of the target at a time */
                long stop = start + LANES < width ? start + LANES : width;
                for (long c = 0; c < channels; c++)
                    for (long x = start; x < stop; x++)
                        target[x * wanted + c] = source[c * channel + x * column];
            }
    }
}

static long round_up(long n)
{
    return (n + LANES - 1) / LANES * LANES;
}

/* out [count][kh][kw * channels][outputs], squares [count]; scratch: zeros for a framed image, then for
   the slopes of one; what is around them stays zero. */
void fulcrum_conv_grads(const float *a, const float *g, float *out, double *squares, float *scratch, const Shape *s)
{
    long padded = round_up(s->outputs), framed_width = s->width + 2 * s->pad_x;
    long framed = (s->height + 2 * s->pad_y) * framed_width * s->channels;
    int image_ready = !s->pad_x && !s->pad_y && s->a_channel == 1 && s->a_column == s->channels;
    int slope_ready = s->g_channel == 1 && s->g_column == s->outputs && padded == s->outputs
                      && s->g_row == s->wide * s->outputs;
    float *frame = scratch, *slopes = scratch + framed;
    long rows = s->kernel_width * s->channels, entries = s->kernel_height * rows * s->outputs;
    for (long n = 0; n < s->count; n++) {
        const float *image = a + n * s->a_example, *slope = g + n * s->g_example;
        Block b = {.tall = s->tall, .wide = s->wide, .slope_pixel = padded, .out_row = s->outputs};
        long line = image_ready ? s->a_row : framed_width * s->channels;
        if (!image_ready) {
            put_channels_last(image, frame + s->pad_y * line + s->pad_x * s->channels, s->height, s->width,
                              s->channels, s->a_row, s->a_column, s->a_channel, line, s->channels);
            image = frame;
        }
        if (!slope_ready) {
            put_channels_last(slope, slopes, s->tall, s->wide, s->outputs, s->g_row, s->g_column, s->g_channel,
                              s->wide * padded, padded);
            slope = slopes;
        }
        b.image_row = s->step_y * line;
        b.image_column = s->step_x * s->channels;
        double sum = 0;
        for (long o = 0; o < padded; o += 2 * LANES) {
            int two = padded - o > LANES;
            long most = two ? MOST_ROWS_OF_TWO : MOST_ROWS;
            b.slope = slope + o;
            b.outputs = s->outputs - o;
            for (long ky = 0; ky < s->kernel_height; ky++)
                for (long r = 0; r < rows; r += most) {
                    long taken = rows - r < most ? rows - r : most;
                    b.image = image + ky * line + r;
                    b.out = out + n * entries + (ky * rows + r) * s->outputs + o;
                    sum += two ? multiply_wide(&b, taken) : multiply_narrow(&b, taken);
                }
        }
        squares[n] = sum;
    }
}

/* --- forward, and the gradient of the input --------------------------------------------------------------------- */

#define PIXELS 8 /* of a block of outputs */
#define BACK_PIXELS 4
#define BACK_VECTORS 4

/* The outputs of P pixels and NV vectors of channels. at: where each pixel's patch begins. */
static inline __attribute__((always_inline)) void convolve_block(
    const float *const *at, const float *weight, const float *bias, float *out, const Shape *s, long line, long padded,
    long outputs, const int P, const int NV)
{
    vec sums[PIXELS][2];
    long rows = s->kernel_width * s->channels;
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++)
            sums[p][v] = load(bias + v * LANES);
    for (long ky = 0; ky < s->kernel_height; ky++)
        for (long r = 0; r < rows; r++) {
            vec w[2];
#pragma GCC unroll 2
            for (int v = 0; v < NV; v++)
                w[v] = load(weight + v * LANES);
            weight += padded;
#pragma GCC unroll 8
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int v = 0; v < NV; v++)
                    sums[p][v] += at[p][ky * line + r] * w[v];
        }
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++) {
            float *to = out + p * s->outputs + v * LANES;
            long left = outputs - v * LANES;
            if (left >= LANES)
                store(to, sums[p][v]);
            else
                for (long o = 0; o < left; o++)
                    to[o] = sums[p][v][o];
        }
}

/* out [count][tall * wide][outputs]. weight [kh][kw * channels][padded] and bias [padded], with zeros behind the
   outputs. scratch holds zeros. */
void fulcrum_conv_forward(const float *a, const float *weight, const float *bias, float *out, float *scratch,
                          const Shape *s, long padded)
{
    long framed_width = s->width + 2 * s->pad_x, pixels = s->tall * s->wide;
    int ready = !s->pad_x && !s->pad_y && s->a_channel == 1 && s->a_column == s->channels;
    long line = ready ? s->a_row : framed_width * s->channels;
    for (long n = 0; n < s->count; n++, out += pixels * s->outputs) {
        const float *image = a + n * s->a_example;
        if (!ready) {
            put_channels_last(image, scratch + s->pad_y * line + s->pad_x * s->channels, s->height, s->width,
                              s->channels, s->a_row, s->a_column, s->a_channel, line, s->channels);
            image = scratch;
        }
        for (long p = 0; p < pixels; p += PIXELS) {
            const float *at[PIXELS];
            int taken = pixels - p < PIXELS ? pixels - p : PIXELS;
            for (int i = 0; i < PIXELS; i++) {
                long pixel = p + (i < taken ? i : 0);
                at[i] = image + pixel / s->wide * s->step_y * line + pixel % s->wide * s->step_x * s->channels;
            }
            for (long o = 0; o < padded; o += 2 * LANES) {
                float *to = out + p * s->outputs + o;
                long left = s->outputs - o;
                int two = padded - o > LANES;
                if (taken == PIXELS && two)
                    convolve_block(at, weight + o, bias + o, to, s, line, padded, left, PIXELS, 2);
                else if (taken == PIXELS)
                    convolve_block(at, weight + o, bias + o, to, s, line, padded, left, PIXELS, 1);
                else
                    for (int i = 0; i < taken; i++) {
                        if (two)
                            convolve_block(at + i, weight + o, bias + o, to + i * s->outputs, s, line, padded, left, 1, 2);
                        else
                            convolve_block(at + i, weight + o, bias + o, to + i * s->outputs, s, line, padded, left, 1, 1);
                    }
            }
        }
    }
}

/* Adds to the frame what P pixels' slopes give NV vectors of it. */
static inline __attribute__((always_inline)) void spread_block(
    float *const *at, const float *const *slope, long g_channel, const float *weight, long outputs, long padded,
    const int P, const int NV)
{
    vec sums[BACK_PIXELS][BACK_VECTORS];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            sums[p][v] = (vec){0};
    for (long o = 0; o < outputs; o++, weight += padded) {
        vec w[BACK_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            w[v] = load(weight + v * LANES);
#pragma GCC unroll 4
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++)
                sums[p][v] += slope[p][o * g_channel] * w[v];
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) /* patches overlap: one after the other */
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            store(at[p] + v * LANES, load(at[p] + v * LANES) + sums[p][v]);
}

/* out [count][height * width][channels]. weight [kh][outputs][padded], with zeros behind kw * channels. scratch: a
   frame, and what its last patch reaches beyond it by these zeros. */
void fulcrum_conv_back(const float *g, const float *weight, float *out, float *scratch, const Shape *s, long padded)
{
    long line = (s->width + 2 * s->pad_x) * s->channels, pixels = s->tall * s->wide;
    long framed = (s->height + 2 * s->pad_y) * line, size = s->height * s->width * s->channels;
    for (long n = 0; n < s->count; n++, out += size) {
        const float *slopes = g + n * s->g_example;
        memset(scratch, 0, sizeof(float) * framed);
        for (long p = 0; p < pixels; p += BACK_PIXELS) {
            int taken = pixels - p < BACK_PIXELS ? pixels - p : BACK_PIXELS;
            float *at[BACK_PIXELS];
            const float *slope[BACK_PIXELS];
            for (long ky = 0; ky < s->kernel_height; ky++) {
                const float *rows = weight + ky * s->outputs * padded;
                for (long r = 0; r < padded;) {
                    int many = padded - r >= BACK_VECTORS * LANES;
                    for (int i = 0; i < taken; i++) {
                        long y = (p + i) / s->wide, x = (p + i) % s->wide;
                        at[i] = scratch + (y * s->step_y + ky) * line + x * s->step_x * s->channels + r;
                        slope[i] = slopes + y * s->g_row + x * s->g_column;
                    }
                    if (taken == BACK_PIXELS && many)
                        spread_block(at, slope, s->g_channel, rows + r, s->outputs, padded, BACK_PIXELS, BACK_VECTORS);
                    else if (taken == BACK_PIXELS)
                        spread_block(at, slope, s->g_channel, rows + r, s->outputs, padded, BACK_PIXELS, 1);
                    else
                        for (int i = 0; i < taken; i++) {
                            if (many)
                                spread_block(at + i, slope + i, s->g_channel, rows + r, s->outputs, padded, 1,
                                             BACK_VECTORS);
                            else
                                spread_block(at + i, slope + i, s->g_channel, rows + r, s->outputs, padded, 1, 1);
                        }
                    r += many ? BACK_VECTORS * LANES : LANES;
                }
            }
        }
        for (long y = 0; y < s->height; y++)
            memcpy(out + y * s->width * s->channels, scratch + (y + s->pad_y) * line + s->pad_x * s->channels,
                   sizeof(float) * s->width * s->channels);
    }
}
