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

/* Numbers of scratch that `fulcrum_conv_grads` needs. */
long fulcrum_conv_scratch(const Shape *s)
{
    long framed = (s->height + 2 * s->pad_y) * (s->width + 2 * s->pad_x) * s->channels;
    return framed + s->tall * s->wide * round_up(s->outputs) + 4 * LANES;
}

/* out [count][kh][kw * channels][outputs], squares [count]; scratch holds zeros, and borders stay zero. */
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
