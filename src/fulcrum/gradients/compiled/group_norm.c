/* Group norm of images, and its backward pass with each example's gradients of the parameters.

   Images [count][channels][pixels] (channels first) or [count][pixels][channels] (channels last; channels are then a
   multiple of LANES). Sums are taken in floats over at most CHUNK numbers per lane, and in doubles beyond. */

#include <math.h>
#include "vectors.h"

#define CHUNK 64
#define WIDE 4 /* vectors of channels that are worked on together */

typedef struct {
    long count, channels, pixels, groups, last; /* last: whether channels are last */
} Images;

/* Sum over n numbers of x - centre, or of its squares. */
static double add_run(const float *x, long n, float centre, int squared)
{
    double total = 0;
    long i = 0;
    vec middle = spread(centre);
    while (n - i >= 4 * LANES) {
        vec sums[4] = {{0}};
        for (int k = 0; k < CHUNK && n - i >= 4 * LANES; k++, i += 4 * LANES)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) {
                vec d = load(x + i + v * LANES) - middle;
                sums[v] += squared ? d * d : d;
            }
        total += add_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    for (; n - i >= LANES; i += LANES) {
        vec d = load(x + i) - middle;
        total += add_lanes(squared ? d * d : d);
    }
    for (; i < n; i++) {
        float d = x[i] - centre;
        total += squared ? (double)d * d : d;
    }
    return total;
}

/* Sums over n numbers of g, and of g (x - centre). */
static void add_products(const float *g, const float *x, long n, float centre, double *plain, double *along)
{
    double one = 0, other = 0;
    long i = 0;
    vec middle = spread(centre);
    while (n - i >= 2 * LANES) {
        vec sums[2] = {{0}}, products[2] = {{0}};
        for (int k = 0; k < CHUNK && n - i >= 2 * LANES; k++, i += 2 * LANES)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                vec slope = load(g + i + v * LANES);
                sums[v] += slope;
                products[v] += slope * (load(x + i + v * LANES) - middle);
            }
        one += add_lanes(sums[0] + sums[1]);
        other += add_lanes(products[0] + products[1]);
    }
    for (; n - i >= LANES; i += LANES) {
        vec slope = load(g + i);
        one += add_lanes(slope);
        other += add_lanes(slope * (load(x + i) - middle));
    }
    for (; i < n; i++) {
        one += g[i];
        other += (double)g[i] * (x[i] - centre);
    }
    *plain = one;
    *along = other;
}

/* The same for every channel of an image with channels last: sums [channels] of x, or of (x - centre) squared. */
static inline __attribute__((always_inline)) void add_columns_of(
    const float *x, long pixels, long channels, const float *centre, double *sums, const int N, const int squared)
{
    dvec totals[WIDE] = {{0}};
    vec middle[WIDE];
#pragma GCC unroll 4
    for (int v = 0; v < N; v++)
        middle[v] = squared ? load(centre + v * LANES) : (vec){0};
    for (long start = 0; start < pixels; start += CHUNK) {
        long stop = start + CHUNK < pixels ? start + CHUNK : pixels;
        vec part[WIDE] = {{0}};
        for (long p = start; p < stop; p++)
#pragma GCC unroll 4
            for (int v = 0; v < N; v++) {
                vec d = load(x + p * channels + v * LANES) - middle[v];
                part[v] += squared ? d * d : d;
            }
#pragma GCC unroll 4
        for (int v = 0; v < N; v++)
            totals[v] += __builtin_convertvector(part[v], dvec);
    }
#pragma GCC unroll 4
    for (int v = 0; v < N; v++)
        memcpy(sums + v * LANES, &totals[v], sizeof(dvec));
}

static inline __attribute__((always_inline)) void add_product_columns_of(
    const float *g, const float *x, long pixels, long channels, const float *centre, double *plain, double *along,
    const int N)
{
    dvec ones[WIDE] = {{0}}, others[WIDE] = {{0}};
    vec middle[WIDE];
#pragma GCC unroll 4
    for (int v = 0; v < N; v++)
        middle[v] = load(centre + v * LANES);
    for (long start = 0; start < pixels; start += CHUNK) {
        long stop = start + CHUNK < pixels ? start + CHUNK : pixels;
        vec part[WIDE] = {{0}}, products[WIDE] = {{0}};
        for (long p = start; p < stop; p++)
#pragma GCC unroll 4
            for (int v = 0; v < N; v++) {
                vec slope = load(g + p * channels + v * LANES);
                part[v] += slope;
                products[v] += slope * (load(x + p * channels + v * LANES) - middle[v]);
            }
#pragma GCC unroll 4
        for (int v = 0; v < N; v++) {
            ones[v] += __builtin_convertvector(part[v], dvec);
            others[v] += __builtin_convertvector(products[v], dvec);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < N; v++) {
        memcpy(plain + v * LANES, &ones[v], sizeof(dvec));
        memcpy(along + v * LANES, &others[v], sizeof(dvec));
    }
}

#define BY_WIDTH(left, call)                                   \
    if ((left) >= 4 * LANES) {                                 \
        enum { N = 4 };                                        \
        call;                                                  \
        c += 4 * LANES;                                        \
    } else if ((left) >= 2 * LANES) {                          \
        enum { N = 2 };                                        \
        call;                                                  \
        c += 2 * LANES;                                        \
    } else {                                                   \
        enum { N = 1 };                                        \
        call;                                                  \
        c += LANES;                                            \
    }

static void add_columns(const float *x, const Images *s, const float *centre, double *sums, int squared)
{
    for (long c = 0; c < s->channels;) {
        const float *from = x + c;
        if (squared) {
            BY_WIDTH(s->channels - c, add_columns_of(from, s->pixels, s->channels, centre + c, sums + c, N, 1))
        } else {
            BY_WIDTH(s->channels - c, add_columns_of(from, s->pixels, s->channels, centre, sums + c, N, 0))
        }
    }
}

/* out = level + x steep (+ g factor), with numbers per channel. */
static void combine(const Images *s, const float *x, const float *g, const float *level, const float *steep,
                    const float *factor, float *out)
{
    long channels = s->channels, pixels = s->pixels;
    if (s->last) {
        for (long p = 0; p < pixels; p++)
            for (long c = 0; c < channels; c += LANES) {
                vec found = load(level + c) + load(x + p * channels + c) * load(steep + c);
                if (g)
                    found += load(g + p * channels + c) * load(factor + c);
                store(out + p * channels + c, found);
            }
        return;
    }
    for (long c = 0; c < channels; c++) {
        const float *from = x + c * pixels;
        float *to = out + c * pixels, start = level[c], slope = steep[c];
        if (g) {
            const float *own = g + c * pixels;
            float times = factor[c];
            for (long p = 0; p < pixels; p++)
                to[p] = start + from[p] * slope + own[p] * times;
        } else
            for (long p = 0; p < pixels; p++)
                to[p] = start + from[p] * slope;
    }
}

/* weight, bias [channels]; out like x; centre, rise [count][channels]: the mean of each channel's group, and one over
   its standard deviation. scratch: 4 channels of doubles. */
void fulcrum_group_norm(const float *x, const float *weight, const float *bias, float *out, float *centre, float *rise,
                        double *scratch, const Images *s, double eps)
{
    long channels = s->channels, each = channels / s->groups, size = channels * s->pixels;
    double numbers = (double)each * s->pixels;
    float *level = (float *)(scratch + channels), *steep = level + channels;
    for (long n = 0; n < s->count; n++, x += size, out += size, centre += channels, rise += channels) {
        for (int squared = 0; squared < 2; squared++) {
            if (s->last)
                add_columns(x, s, centre, scratch, squared);
            for (long k = 0; k < s->groups; k++) {
                long first = k * each;
                double total = 0;
                if (s->last)
                    for (long c = first; c < first + each; c++)
                        total += scratch[c];
                else
                    total = add_run(x + first * s->pixels, each * s->pixels, squared ? centre[first] : 0, squared);
                total /= numbers;
                for (long c = first; c < first + each; c++)
                    if (squared)
                        rise[c] = (float)(1 / sqrt(total + eps));
                    else
                        centre[c] = (float)total;
            }
        }
        for (long c = 0; c < channels; c++) {
            steep[c] = rise[c] * weight[c];
            level[c] = bias[c] - centre[c] * steep[c];
        }
        combine(s, x, 0, level, steep, 0, out);
    }
}

/* g, slope like x; weight_grads, bias_grads [count][channels]. scratch: 4 channels of doubles. */
void fulcrum_group_norm_back(const float *g, const float *x, const float *weight, const float *centre,
                             const float *rise, float *slope, float *weight_grads, float *bias_grads, double *scratch,
                             const Images *s)
{
    long channels = s->channels, each = channels / s->groups, size = channels * s->pixels;
    double numbers = (double)each * s->pixels, *plain = scratch, *along = scratch + channels;
    float *level = (float *)(along + channels), *steep = level + channels, *factor = steep + channels;
    for (long n = 0; n < s->count; n++, g += size, x += size, slope += size) {
        if (s->last)
            for (long c = 0; c < channels;) {
                BY_WIDTH(channels - c, add_product_columns_of(g + c, x + c, s->pixels, channels, centre + c, plain + c,
                                                              along + c, N))
            }
        else
            for (long c = 0; c < channels; c++)
                add_products(g + c * s->pixels, x + c * s->pixels, s->pixels, centre[c], plain + c, along + c);
        for (long k = 0; k < s->groups; k++) {
            double pulled = 0, raised = 0;
            for (long c = k * each; c < (k + 1) * each; c++) {
                bias_grads[c] = (float)plain[c];
                weight_grads[c] = (float)(along[c] * rise[c]);
                pulled += along[c] * rise[c] * weight[c];
                raised += plain[c] * weight[c];
            }
            for (long c = k * each; c < (k + 1) * each; c++) {
                double tilt = -pulled * rise[c] * rise[c] / numbers;
                steep[c] = (float)tilt;
                level[c] = (float)(-raised * rise[c] / numbers - tilt * centre[c]);
                factor[c] = rise[c] * weight[c];
            }
        }
        combine(s, x, g, level, steep, factor, slope);
        centre += channels;
        rise += channels;
        weight_grads += channels;
        bias_grads += channels;
    }
}
