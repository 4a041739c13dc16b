/* How weights are packed, and the product of one packed tile with a few rows. */
#pragma once
#include <stdint.h>
#include "cpu_vectors.h"

/* A packed weight is a sequence of tiles of 64 outputs; a tile is a sequence of blocks, one per group of inputs:
 * values[group][64], then scales[64] (float16 where that is exact, else float32), then offsets[64] float32 if any.
 * So a tile is read as one stream, a vector holds neighbouring outputs, and an input is broadcast to all of them. */

#define TILE 64
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__aarch64__)
#define WIDTH 4
#else
#define WIDTH 8
#endif
#define VECTORS (TILE / WIDTH)
#define PREFETCH_BYTES 4352 /* two blocks ahead: without it the misses of a block come all at once, in its first pass */

typedef float wide __attribute__((vector_size(4 * WIDTH), aligned(4)));

enum { FLAG_DENSE = 1, FLAG_OFFSETS = 2, FLAG_HALF_SCALES = 4 };

typedef struct {
    const uint8_t *tiles;
    int64_t out_features, in_features, group_size, tile_bytes;
    int32_t flags;
} weight_t;

INLINE wide load_wide(const float *p) { return *(const wide *)p; }
INLINE void store_wide(float *p, wide v) { *(wide *)p = v; }

/* a * b + c */
INLINE wide multiply_add_wide(wide a, wide b, wide c) {
#if defined(__AVX512F__)
    return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (wide)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (wide)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE wide splat_wide(float x) {
#if WIDTH == 16
    return (wide){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif WIDTH == 8
    return (wide){x, x, x, x, x, x, x, x};
#else
    return (wide){x, x, x, x};
#endif
}

INLINE wide load_int8(const int8_t *p) {
#if defined(__AVX512F__)
    return (wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (wide)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    typedef int8_t narrow __attribute__((vector_size(WIDTH), aligned(1)));
    typedef int32_t middle __attribute__((vector_size(4 * WIDTH)));
    return __builtin_convertvector(__builtin_convertvector(*(const narrow *)p, middle), wide);
#endif
}

#if defined(__AVX512F__) || defined(__F16C__) || defined(__aarch64__)
#define HAS_HALF 1
#else
#define HAS_HALF 0
#endif

INLINE wide load_half(const uint16_t *p) {
#if defined(__AVX512F__)
    return (wide)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (wide)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    return (wide)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    return load_wide((const float *)p);
#endif
}

INLINE wide load_weights(const uint8_t *values, int index, const int DENSE) {
    return DENSE ? load_wide((const float *)values + index) : load_int8((const int8_t *)values + index);
}

INLINE int64_t scale_bytes(int32_t flags) {
    return flags & FLAG_DENSE ? 0 : TILE * (flags & FLAG_HALF_SCALES ? 2 : 4) + (flags & FLAG_OFFSETS ? TILE * 4 : 0);
}

/* SPAN vectors of one block of a tile for ROWS rows, both constants after inlining: ROWS * SPAN independent chains hide
 * the latency of multiply-add and still fit the registers. `after` is where the block's scales begin. */
INLINE void block_product(const int ROWS, const int SPAN, const int DENSE, const weight_t *weight, const uint8_t *block,
                          int64_t count, int first, const float *x, const float *group_sums, int64_t num_groups,
                          float *totals) {
    const int64_t in = weight->in_features;
    const int has_offsets = weight->flags & FLAG_OFFSETS, half_scales = weight->flags & FLAG_HALF_SCALES;
    const uint8_t *after = block + count * TILE * (DENSE ? 4 : 1);
    const int64_t block_bytes = after - block + scale_bytes(weight->flags);
    const uint8_t *values = block + first * WIDTH * (DENSE ? 4 : 1);
    const uint8_t *ahead = block + PREFETCH_BYTES + block_bytes * first / VECTORS;
    const uint8_t *ahead_end = block + PREFETCH_BYTES + block_bytes * (first + SPAN) / VECTORS;
    wide sums[6][8];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < SPAN; v++) sums[r][v] = (wide){0};
    for (; ahead < ahead_end; ahead += 64) __builtin_prefetch(ahead);
#pragma GCC unroll 2
    for (int64_t k = 0; k < count; k++) {
        const uint8_t *at = values + k * TILE * (DENSE ? 4 : 1);
        wide held[8]; /* the fewer of weights and inputs stay in registers, the others come one by one */
        if (ROWS > SPAN) {
#pragma GCC unroll 8
            for (int v = 0; v < SPAN; v++) held[v] = load_weights(at, v * WIDTH, DENSE);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const wide input = splat_wide(x[r * in + k]);
#pragma GCC unroll 8
                for (int v = 0; v < SPAN; v++) sums[r][v] = multiply_add_wide(held[v], input, sums[r][v]);
            }
        } else {
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) held[r] = splat_wide(x[r * in + k]);
#pragma GCC unroll 8
            for (int v = 0; v < SPAN; v++) {
                const wide w = load_weights(at, v * WIDTH, DENSE);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) sums[r][v] = multiply_add_wide(w, held[r], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < SPAN; v++) {
        const int at = (first + v) * WIDTH;
        wide scale = {0}, offset = {0};
        if (!DENSE) scale = half_scales ? load_half((const uint16_t *)after + at) : load_wide((const float *)after + at);
        if (has_offsets) offset = load_wide((const float *)(after + TILE * (half_scales ? 2 : 4)) + at);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            float *total = totals + r * TILE + at;
            wide sum = load_wide(total);
            if (DENSE) sum += sums[r][v];
            else sum = multiply_add_wide(scale, sums[r][v], sum);
            if (has_offsets) sum = multiply_add_wide(offset, splat_wide(group_sums[r * num_groups]), sum);
            store_wide(total, sum);
        }
    }
}

/* One tile for ROWS rows, SPAN vectors at a time and what is left over at the end. */
INLINE void tile_product(const int ROWS, const int SPAN, const int DENSE, const weight_t *weight, const uint8_t *tile,
                         const float *x, const float *group_sums, float *totals) {
    const int64_t in = weight->in_features, group = weight->group_size, num_groups = (in + group - 1) / group;
    for (int i = 0; i < ROWS * TILE; i += WIDTH) store_wide(totals + i, (wide){0});
    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t count = DENSE && in - g * group < group ? in - g * group : group;
        int first = 0;
        for (; first + SPAN <= VECTORS; first += SPAN)
            block_product(ROWS, SPAN, DENSE, weight, tile, count, first, x, group_sums, num_groups, totals);
        if (VECTORS % SPAN)
            block_product(ROWS, VECTORS % SPAN, DENSE, weight, tile, count, first, x, group_sums, num_groups, totals);
        tile += count * TILE * (DENSE ? 4 : 1) + scale_bytes(weight->flags);
        if (group_sums) group_sums++;
        x += count;
    }
}

#if WIDTH == 16
#define SPAN_1 4
#define SPAN_2 4
#define SPAN_3 4
#define SPAN_4 4
#define SPAN_5 4
#define SPAN_6 4
#elif WIDTH == 4
#define SPAN_1 8
#define SPAN_2 8
#define SPAN_3 4
#define SPAN_4 4
#define SPAN_5 4
#define SPAN_6 4
#else
#define SPAN_1 4
#define SPAN_2 4
#define SPAN_3 4
#define SPAN_4 3
#define SPAN_5 2
#define SPAN_6 2
#endif
#define MAX_CHUNK 6 /* rows whose sums fit the registers */

#define FOR_ROWS(R)                                                                                                   \
    static __attribute__((noinline)) void tile_int8_##R(const weight_t *w, const uint8_t *t, const float *x,         \
                                                        const float *s, float *y) {                                   \
        tile_product(R, SPAN_##R, 0, w, t, x, s, y);                                                                  \
    }                                                                                                                 \
    static __attribute__((noinline)) void tile_dense_##R(const weight_t *w, const uint8_t *t, const float *x,        \
                                                         const float *s, float *y) {                                  \
        tile_product(R, SPAN_##R, 1, w, t, x, s, y);                                                                  \
    }
FOR_ROWS(1) FOR_ROWS(2) FOR_ROWS(3) FOR_ROWS(4) FOR_ROWS(5) FOR_ROWS(6)

typedef void (*tile_fn)(const weight_t *, const uint8_t *, const float *, const float *, float *);
static const tile_fn INT8_TILES[] = {tile_int8_1, tile_int8_2, tile_int8_3, tile_int8_4, tile_int8_5, tile_int8_6};
static const tile_fn DENSE_TILES[] = {tile_dense_1, tile_dense_2, tile_dense_3, tile_dense_4, tile_dense_5, tile_dense_6};
