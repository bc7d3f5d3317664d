/* Largest numbers of windows, of images with channels last, and the way back.

   Of equal numbers the first in the window counts, and NaN counts as the largest, as in PyTorch. */

#include <stdint.h>
#include "vectors.h"

typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));

static inline ivec load_bits(const float *from)
{
    ivec found;
    memcpy(&found, from, sizeof found);
    return found;
}

typedef struct {
    long count, channels, height, width, tall, wide, kernel_height, kernel_width, step_y, step_x;
} Pool;

/* x [count][height][width][channels] -> out, where [count][tall][wide][channels]; where: the place in the window. */
void fulcrum_max_pool(const float *x, float *out, uint8_t *where, const Pool *s)
{
    long channels = s->channels, line = s->width * channels, whole = channels / LANES * LANES;
    for (long n = 0; n < s->count; n++, x += s->height * line)
        for (long i = 0; i < s->tall; i++)
            for (long j = 0; j < s->wide; j++, out += channels, where += channels) {
                const float *corner = x + i * s->step_y * line + j * s->step_x * channels;
                for (long c = 0; c < whole; c += LANES) {
                    ivec best = load_bits(corner + c), place = {0};
                    int k = 0;
                    for (long y = 0; y < s->kernel_height; y++)
                        for (long z = 0; z < s->kernel_width; z++, k++) {
                            vec tap = load(corner + y * line + z * channels + c), known = (vec)best;
                            ivec better = (tap > known) | (tap != tap);
                            best = (better & (ivec)tap) | (~better & best);
                            place = (better & k) | (~better & place);
                        }
                    store(out + c, (vec)best);
                    bytes small = __builtin_convertvector(place, bytes);
                    memcpy(where + c, &small, sizeof small);
                }
                for (long c = whole; c < channels; c++) {
                    out[c] = corner[c];
                    where[c] = 0;
                    for (long k = 0; k < s->kernel_height * s->kernel_width; k++) {
                        float tap = corner[k / s->kernel_width * line + k % s->kernel_width * channels + c];
                        if (tap > out[c] || tap != tap) {
                            out[c] = tap;
                            where[c] = (uint8_t)k;
                        }
                    }
                }
            }
}

/* g like out; slope like x, which is overwritten. */
void fulcrum_max_pool_back(const float *g, const uint8_t *where, float *slope, const Pool *s)
{
    long channels = s->channels, line = s->width * channels, whole = channels / LANES * LANES;
    memset(slope, 0, sizeof(float) * s->count * s->height * line);
    for (long n = 0; n < s->count; n++, slope += s->height * line)
        for (long i = 0; i < s->tall; i++)
            for (long j = 0; j < s->wide; j++, g += channels, where += channels) {
                float *corner = slope + i * s->step_y * line + j * s->step_x * channels;
                for (long c = 0; c < whole; c += LANES) {
                    bytes small;
                    memcpy(&small, where + c, sizeof small);
                    ivec place = __builtin_convertvector(small, ivec), own = load_bits(g + c);
                    int k = 0;
                    for (long y = 0; y < s->kernel_height; y++)
                        for (long z = 0; z < s->kernel_width; z++, k++) {
                            float *tap = corner + y * line + z * channels + c;
                            store(tap, load(tap) + (vec)((place == k) & own));
                        }
                }
                for (long c = whole; c < channels; c++)
                    corner[where[c] / s->kernel_width * line + where[c] % s->kernel_width * channels + c] += g[c];
            }
}
