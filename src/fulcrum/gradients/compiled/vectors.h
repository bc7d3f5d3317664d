/* Vectors of floats as wide as the processor's registers; GCC and Clang translate their arithmetic themselves. */

#ifndef FULCRUM_VECTORS
#define FULCRUM_VECTORS

#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef double dvec __attribute__((vector_size(8 * LANES)));

static inline vec load(const float *from)
{
    vec found;
    memcpy(&found, from, sizeof found);
    return found;
}

static inline void store(float *to, vec values)
{
    memcpy(to, &values, sizeof values);
}

static inline vec spread(float value)
{
    return value - (vec){0};
}

/* The sum over lanes: halves are added until one number is left. */
static inline float add_lanes(vec values)
{
    float parts[LANES];
    memcpy(parts, &values, sizeof parts);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            parts[i] += parts[i + half];
    return parts[0];
}

#endif
