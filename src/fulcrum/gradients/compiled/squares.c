/* Squared norms of rows: floats over at most CHUNK numbers per lane, doubles beyond. */

#include "vectors.h"

#define CHUNK 32
#define WIDE 4

/* rows [count][entries] -> squares [count]. */
void fulcrum_squares(const float *rows, double *squares, long count, long entries)
{
    for (long n = 0; n < count; n++, rows += entries) {
        double total = 0;
        long i = 0;
        while (entries - i >= WIDE * LANES) {
            vec sums[WIDE] = {{0}};
            for (int k = 0; k < CHUNK && entries - i >= WIDE * LANES; k++, i += WIDE * LANES)
#pragma GCC unroll 4
                for (int v = 0; v < WIDE; v++) {
                    vec values = load(rows + i + v * LANES);
                    sums[v] += values * values;
                }
            total += add_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
        }
        for (; i < entries; i++)
            total += (double)rows[i] * rows[i];
        squares[n] = total;
    }
}
