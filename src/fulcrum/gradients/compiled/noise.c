/* Gaussian noise and certified rounding on a CPU: the loop of privacy/host_noise.py, from the cipher's key to integers.

   A pair of coordinates takes two 64-bit words u, v of a ChaCha20 stream (RFC 8439): U = u / 2^64, angle 2 pi v / 2^64,
   R = sqrt(-2 ln U); the first coordinate gets (s / g) R cos, the second (s / g) R sin, both are added to x / g and
   rounded. The released integers are defined by the stream, since whoever calls decides what lies near a boundary in
   arbitrary precision. So only the size of the errors below matters, not which rounding made them.

   Errors (docs/privacy/gaussian-release.md needs 2^-48 of |ln U|, 2^-48 of cos and sin; tests/privacy/
   test_compiled_noise.py measures them and the polynomials). A rounding is at most 2^-53 of its result, fl is rounded.

   ln U. a = fl(u), so a 2^-64 = U (1 + d), |d| <= 2^-53: a rounding of U, which the page accounts for. a = 2^k m with
   m in [sqrt(1/2), sqrt 2), f = m - 1 is exact (Sterbenz), ln(a 2^-64) = (k - 64) ln 2 + f + f^2 Q(f). Q has 18
   coefficients and errs by 2^-51.5 of ln(1 + f). |f| < 0.415 and |Q| < 0.64: computing Q errs by less than 2^-52, the
   square and its product by 2 roundings of less than 0.11, the sum by one of |ln(1 + f)| <= 0.35.
     k = 64: |ln(1 + f)| >= |f| as f <= 0, and all of it is below 2^-50 of |ln U|.
     k < 64: |ln U| >= 0.34; the product with ln 2 and the last sum add 3 roundings: below 2^-50 of |ln U|.

   cos, sin. q = the nearest multiple of a quarter turn, r = v - q 2^62 exactly, |r| <= 2^61. The angle fl(fl(r) c) with
   c = fl(2 pi / 2^64) has three roundings of at most pi / 4: below 2^-51.4. The polynomials err by 2^-53.5 (cos) and
   2^-59.1 (sin), computing them by less than 2^-52.5. Together below 2^-50, relative to 1.

   No function of libm is called; square roots are the processor's. Words are wiped from the stack before return. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES (BYTES / 4) /* blocks of the cipher side by side */
#define W (BYTES / 8)     /* pairs side by side */
#define GROUP 64          /* pairs after which it is looked whether one must be noted */
#define CHUNK 1024        /* pairs whose words are made at once */

typedef uint32_t u32s __attribute__((vector_size(BYTES)));
typedef uint64_t u64s __attribute__((vector_size(BYTES)));
typedef int64_t i64s __attribute__((vector_size(BYTES)));
typedef double doubles __attribute__((vector_size(BYTES)));
typedef float floats __attribute__((vector_size(BYTES / 2)));
typedef int32_t i32s __attribute__((vector_size(BYTES / 2)));

#define INLINE static inline __attribute__((always_inline))

/* --- the cipher --------------------------------------------------------------------------------------------------- */

#if LANES == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define COUNTING 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif LANES == 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define COUNTING 0, 1, 2, 3, 4, 5, 6, 7
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#define COUNTING 0, 1, 2, 3
#endif

#if defined(__clang__)
#define INTERLEAVE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define INTERLEAVE(a, b, ...) __builtin_shuffle(a, b, (u32s){__VA_ARGS__})
#endif

INLINE u32s rotate(u32s x, int bits) { return (x << bits) | (x >> (32 - bits)); }

#define QUARTER(a, b, c, d)                                                                                            \
    do {                                                                                                               \
        v[a] += v[b], v[d] = rotate(v[d] ^ v[a], 16);                                                                  \
        v[c] += v[d], v[b] = rotate(v[b] ^ v[c], 12);                                                                  \
        v[a] += v[b], v[d] = rotate(v[d] ^ v[a], 8);                                                                   \
        v[c] += v[d], v[b] = rotate(v[b] ^ v[c], 7);                                                                   \
    } while (0)

/* Rows [LANES] of LANES numbers become columns. */
INLINE void transpose(u32s *rows)
{
    u32s other[LANES];
    for (int size = 1; size < LANES; size *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            other[2 * i] = INTERLEAVE(rows[i], rows[i + LANES / 2], LOW);
            other[2 * i + 1] = INTERLEAVE(rows[i], rows[i + LANES / 2], HIGH);
        }
        memcpy(rows, other, sizeof other);
    }
}

/* LANES blocks of the keystream, from number `block` on. state: constants, key, (counter), nonce. */
INLINE void make_blocks(const uint32_t *state, uint32_t block, char *out)
{
    u32s v[16];
    const u32s counter = block + (u32s){COUNTING};
    for (int i = 0; i < 16; i++)
        v[i] = state[i] + (u32s){0};
    v[12] = counter;
#pragma GCC unroll 1
    for (int i = 0; i < 10; i++) {
        QUARTER(0, 4, 8, 12); QUARTER(1, 5, 9, 13); QUARTER(2, 6, 10, 14); QUARTER(3, 7, 11, 15);
        QUARTER(0, 5, 10, 15); QUARTER(1, 6, 11, 12); QUARTER(2, 7, 8, 13); QUARTER(3, 4, 9, 14);
    }
    for (int i = 0; i < 16; i++)
        v[i] += i == 12 ? counter : state[i] + (u32s){0};
    for (int part = 0; part < 16; part += LANES) {
        transpose(v + part);
        for (int lane = 0; lane < LANES; lane++)
            memcpy(out + 64 * lane + 4 * part, v + part + lane, BYTES);
    }
}

static void set_up(uint32_t *state, const uint32_t *key, const uint32_t *nonce)
{
    static const uint32_t constants[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
    memcpy(state, constants, 16);
    memcpy(state + 4, key, 32);
    state[12] = 0;
    memcpy(state + 13, nonce, 12);
}

static void wipe(void *memory, size_t size)
{
    memset(memory, 0, size);
    __asm__ __volatile__("" : : "r"(memory) : "memory"); /* or the compiler would leave it out */
}

#define BLOCK_WORDS 8
#define SPARE (BLOCK_WORDS * LANES) /* words that are made at once */

/* A stream that is read in order. words: those from `skipped` on are next. */
typedef struct {
    uint32_t block;
    int skipped;
    uint64_t words[BLOCK_WORDS + CHUNK + SPARE] __attribute__((aligned(64)));
} reader;

static void begin_reading(reader *reader, uint64_t first)
{
    reader->block = (uint32_t)(first / BLOCK_WORDS);
    reader->skipped = (int)(first % BLOCK_WORDS);
}

/* The next n <= CHUNK words. Of a call before, the words of a block that was begun are kept: n was CHUNK. */
static const uint64_t *read_words(reader *reader, const uint32_t *state, int n, int again)
{
    int have = 0, wanted = reader->skipped + n;
    if (again && reader->skipped) {
        memmove(reader->words, reader->words + CHUNK, BLOCK_WORDS * sizeof(uint64_t));
        have = BLOCK_WORDS;
    }
    for (; have < wanted; have += SPARE, reader->block += LANES)
        make_blocks(state, reader->block, (char *)(reader->words + have));
    if (have > wanted) /* whole blocks that are not needed now are made again */
        reader->block -= (uint32_t)((have - wanted) / BLOCK_WORDS);
    return reader->words + reader->skipped;
}

/* Words first .. first + count - 1 of a stream. key: 8 words, nonce: 3. */
void fulcrum_draw_words(const uint32_t *key, const uint32_t *nonce, int64_t first, int64_t count, uint64_t *out)
{
    uint32_t state[16];
    reader from;
    set_up(state, key, nonce);
    begin_reading(&from, (uint64_t)first);
    for (int64_t done = 0; done < count; done += CHUNK) {
        const int n = count - done < CHUNK ? (int)(count - done) : CHUNK;
        memcpy(out + done, read_words(&from, state, n, done > 0), 8 * (size_t)n);
    }
    wipe(state, sizeof state);
    wipe(&from, sizeof from);
}

/* --- functions ---------------------------------------------------------------------------------------------------- */

#define LN_2 0x1.62e42fefa39efp-1
#define TURN 0x1.921fb54442d18p-62 /* 2 pi / 2^64 */
#define MAGIC 0x1.8p52             /* a number plus this has its nearest integer in its last bits */

static const double LOG[] = {
    -0x1.ffffffffffee7p-2, 0x1.55555555553f9p-2,  -0x1.0000000022075p-2, 0x1.9999999a0364cp-3,  -0x1.5555552f11a39p-3,
    0x1.249248d84ec62p-3,  -0x1.000009940fbbbp-3, 0x1.c71ca15d23089p-4,  -0x1.99971c5656045p-4, 0x1.74557e7b4bb20p-4,
    -0x1.5581d4100b352p-4, 0x1.3bbe1fcbc3863p-4,  -0x1.23105e1e2a946p-4, 0x1.08e1cfd8d7b11p-4,  -0x1.02806a4e52162p-4,
    0x1.229586754f801p-4,  -0x1.1226fe16dc6c6p-4, 0x1.f6d2b69891697p-6,
};
static const double SIN[] = {
    -0x1.555555555553dp-3, 0x1.111111110eb1ep-7,  -0x1.a01a019ab49e2p-13,
    0x1.71de347559bb3p-19, -0x1.ae5db4717a164p-26, 0x1.5d64c7796b3d4p-33,
};
static const double COS[] = {
    0x1.5555555553113p-5, -0x1.6c16c1676bab1p-10, 0x1.a019faaa65b12p-16, -0x1.27e02a8bb64cep-22, 0x1.1bc7c5561e835p-29,
};

INLINE doubles evaluate(const double *coefficients, int count, doubles x)
{
    doubles sum = coefficients[count - 1] + (doubles){0};
#pragma GCC unroll 32
    for (int i = count - 2; i >= 0; i--)
        sum = sum * x + coefficients[i];
    return sum;
}
#define EVALUATE(coefficients, x) evaluate(coefficients, sizeof coefficients / sizeof *coefficients, x)

INLINE doubles to_doubles(u64s words) /* correctly rounded */
{
#if defined(__AVX512DQ__)
    return __builtin_convertvector(words, doubles);
#else
    const doubles low = (doubles)((words & 0xffffffff) | 0x4330000000000000); /* 2^52 + them */
    const doubles high = (doubles)((words >> 32) | 0x4530000000000000);       /* 2^84 + 2^32 times them */
    return (high - 0x1.00000001p84) + low;
#endif
}

INLINE doubles to_signed_doubles(u64s words) /* correctly rounded */
{
#if defined(__AVX512DQ__)
    return __builtin_convertvector((i64s)words, doubles);
#else
    const doubles low = (doubles)((words & 0xffffffff) | 0x4330000000000000);
    const doubles high = (doubles)(((words >> 32) ^ 0x80000000) | 0x4530000000000000); /* 2^63 more */
    return (high - 0x1.00000801p84) + low;
#endif
}

/* ln U of U = words / 2^64. A word of 0 gives some number. */
INLINE doubles compute_log(u64s words)
{
    const i64s bits = (i64s)to_doubles(words);
    const i64s k = (bits - 0x3fe6a09e667f3bcd) >> 52; /* the bits of sqrt(1/2) */
    const doubles f = (doubles)(bits - (k << 52)) - 1.0;
    const doubles exponent = (doubles)(k + (0x4338000000000000 - 64)) - MAGIC;
    return exponent * LN_2 + (f + f * f * EVALUATE(LOG, f));
}

/* cos and sin of the angle 2 pi words / 2^64. */
INLINE void compute_wave(u64s words, doubles *cosine, doubles *sine)
{
    const u64s turned = words + 0x2000000000000000; /* the first two bits: the quarter */
    const u64s rest = (turned & 0x3fffffffffffffff) - 0x2000000000000000;
    const doubles angle = to_signed_doubles(rest) * TURN, square = angle * angle;
    const u64s s = (u64s)(angle + angle * square * EVALUATE(SIN, square));
    const u64s c = (u64s)(1.0 - (0.5 * square - square * square * EVALUATE(COS, square)));
    const u64s odd = (u64s)((i64s)(turned << 1) >> 63), sign = 0x8000000000000000 + (u64s){0};
    *cosine = (doubles)((c ^ ((c ^ s) & odd)) ^ ((turned ^ (turned << 1)) & sign));
    *sine = (doubles)((s ^ ((c ^ s) & odd)) ^ (turned & sign));
}

/* For tests: the functions of n words each, n a multiple of 8. */
void fulcrum_noise_functions(const uint64_t *words, int64_t n, double *logs, double *cosines, double *sines)
{
    for (int64_t i = 0; i < n; i += W) {
        u64s given;
        memcpy(&given, words + i, BYTES);
        doubles cosine, sine;
        const doubles log = compute_log(given);
        compute_wave(given, &cosine, &sine);
        memcpy(logs + i, &log, BYTES);
        memcpy(cosines + i, &cosine, BYTES);
        memcpy(sines + i, &sine, BYTES);
    }
}

/* --- releases ----------------------------------------------------------------------------------------------------- */

/* A coordinate that may be near a boundary, in the order of `Noted` in privacy/host_noise.py. */
typedef struct {
    double place, x, rounded, away, t, radius;
} noted;

typedef struct {
    double ratio, grid, near; /* s / g; g; distance from a boundary at which a coordinate is noted */
    uint64_t rare;            /* pairs with u below this, or above 2^64 less this, are noted whole */
    int64_t count, half;      /* numbers; pairs */
    noted *list;
    int64_t listed;
} job;

/* What a group of pairs leaves for a second look. [0]: cosines, [1]: sines. */
typedef struct {
    double x[2][GROUP], exact[2][GROUP], size[GROUP];
} group;

/* One side of some pairs: x and the noise, in units of g, rounded and written. Bits are set where one is near a half. */
INLINE i64s round_side(const char *x, int wide, char *into, int real, int i, doubles noise, const job *job, group *seen,
                       int side)
{
    doubles sum;
    if (wide) {
        memcpy(&sum, x + 8 * i, BYTES);
    } else {
        floats narrow;
        memcpy(&narrow, x + 4 * i, BYTES / 2);
        sum = __builtin_convertvector(narrow, doubles);
    }
    sum *= 1.0 / job->grid;
    const doubles exact = sum + noise, shifted = exact + MAGIC, rounded = shifted - MAGIC, off = exact - rounded;
    memcpy(seen->x[side] + i, &sum, BYTES);
    memcpy(seen->exact[side] + i, &exact, BYTES);
    if (real) {
        const floats found = __builtin_convertvector(rounded * job->grid, floats);
        memcpy(into + 4 * i, &found, BYTES / 2);
    } else {
        const i32s found = __builtin_convertvector((i64s)shifted, i32s); /* the last 32 bits */
        memcpy(into + 4 * i, &found, BYTES / 2);
    }
    const double far = 0.5 - job->near;
    return ~((off < far) & (off > -far));
}

/* GROUP pairs. x, into: where their cosines' and sines' numbers begin. Nonzero if one must be noted. */
INLINE int64_t round_group(const uint64_t *first, const uint64_t *second, const char *const *x, int wide,
                           char *const *into, int real, const job *job, group *seen)
{
    i64s near = {0};
    for (int i = 0; i < GROUP; i += W) {
        u64s u, v;
        memcpy(&u, first + i, BYTES);
        memcpy(&v, second + i, BYTES);
        const doubles square = compute_log(u) * (-2.0 * job->ratio * job->ratio);
        doubles size, cosine, sine;
        for (int lane = 0; lane < W; lane++)
            size[lane] = __builtin_sqrt(square[lane]);
        compute_wave(v, &cosine, &sine);
        memcpy(seen->size + i, &size, BYTES);
        near |= round_side(x[0], wide, into[0], real, i, size * cosine, job, seen, 0);
        near |= round_side(x[1], wide, into[1], real, i, size * sine, job, seen, 1);
        near |= (i64s)(u + job->rare < 2 * job->rare);
    }
    int64_t any = 0;
    for (int lane = 0; lane < W; lane++)
        any |= near[lane];
    return any;
}

/* Lists what must be noted of n pairs, from number `start` on. */
static void note(const uint64_t *first, int64_t start, int n, job *job, const group *seen)
{
    for (int i = 0; i < n; i++)
        for (int side = 0; side < 2; side++) {
            const int64_t place = start + i + side * job->half;
            const double exact = seen->exact[side][i], rounded = (exact + MAGIC) - MAGIC;
            const double away = exact < rounded ? rounded - exact : exact - rounded;
            const int rare = first[i] + job->rare < 2 * job->rare;
            if (place >= job->count || (away < 0.5 - job->near && !rare))
                continue;
            const double radius = first[i] ? seen->size[i] / job->ratio : INFINITY;
            job->list[job->listed++] = (noted){
                (double)place, seen->x[side][i] * job->grid, rounded, away, (double)(int64_t)first[i] * 0x1p-64, radius,
            };
        }
}

/* The pairs from `pair` to `stop`; returns the first that is not done, where the list may not hold another group. */
INLINE int64_t round_pairs(const uint32_t *state, const char *x, int wide, char *into, int real, int64_t pair,
                           int64_t stop, job *job, int64_t room)
{
    reader readers[2];
    group seen;
    double sums[2][GROUP];
    int32_t found[2][GROUP];
    const int size = wide ? 8 : 4;
    int again = 0;
    begin_reading(readers, (uint64_t)pair);
    begin_reading(readers + 1, (uint64_t)(job->half + pair));
    while (pair < stop && job->listed + 2 * GROUP <= room) {
        const int n = stop - pair < CHUNK ? (int)(stop - pair) : CHUNK;
        const uint64_t *first = read_words(readers, state, n, again), *second = read_words(readers + 1, state, n, again);
        again = 1;
        for (int done = 0; done < n; done += GROUP) {
            if (job->listed + 2 * GROUP > room)
                break;
            int64_t have[2] = {n - done < GROUP ? n - done : GROUP, job->count - job->half - pair};
            have[1] = have[1] < have[0] ? have[1] : have[0]; /* an odd number has no sine at its end */
            const int64_t at[2] = {pair, job->half + pair};
            const char *from[2] = {x + size * at[0], x + size * at[1]};
            char *to[2] = {into + 4 * at[0], into + 4 * at[1]};
            const int whole = have[1] == GROUP;
            if (!whole) {
                memset(sums, 0, sizeof sums);
                for (int side = 0; side < 2; side++) {
                    memcpy(sums[side], from[side], (size_t)(size * have[side]));
                    from[side] = (const char *)sums[side];
                    to[side] = (char *)found[side];
                }
            }
            if (round_group(first + done, second + done, from, wide, to, real, job, &seen))
                note(first + done, pair, (int)have[0], job, &seen);
            for (int side = 0; side < 2 && !whole; side++)
                memcpy(into + 4 * at[side], found[side], (size_t)(4 * have[side]));
            pair += have[0];
        }
    }
    wipe(readers, sizeof readers);
    wipe(&seen, sizeof seen);
    return pair;
}

/* Writes round((x + s N) / g) of the coordinates of pairs pair .. stop - 1: see `round_on_host`.
   wide: x is float64, else float32. real: into is float32 and gets the integers times g, else int32.
   room: places in the list, at least 2 GROUP; listed: how many were used. */
int64_t fulcrum_round(const uint32_t *key, const uint32_t *nonce, const char *x, int wide, char *into, int real,
                      int64_t count, int64_t pair, int64_t stop, double ratio, double grid, double near, uint64_t rare,
                      noted *list, int64_t room, int64_t *listed)
{
    uint32_t state[16];
    job job = {ratio, grid, near, rare, count, count - count / 2, list, 0};
    set_up(state, key, nonce);
    if (wide)
        pair = real ? round_pairs(state, x, 1, into, 1, pair, stop, &job, room)
                    : round_pairs(state, x, 1, into, 0, pair, stop, &job, room);
    else
        pair = real ? round_pairs(state, x, 0, into, 1, pair, stop, &job, room)
                    : round_pairs(state, x, 0, into, 0, pair, stop, &job, room);
    wipe(state, sizeof state);
    *listed = job.listed;
    return pair;
}
