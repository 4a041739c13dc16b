/* Attention of rows over cached and fresh keys. */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "cpu_threads.h"
#include "cpu_vectors.h"

typedef struct {
    const float *queries, *cache_k, *cache_v, *fresh_k, *fresh_v;
    const int32_t *spans; /* [rows, 5]: seat, context start, context end, fresh start, fresh end */
    float *outputs;
    int64_t heads, groups, size, slots, heads_per_item;
    float scale;
} attention_job;

/* What a row sees is up to three runs of consecutive keys: the ring before its end, the ring after it, fresh rows. */
typedef struct {
    const float *keys[3], *values[3];
    int64_t counts[3];
} runs_t;

static int64_t find_runs(const attention_job *job, const int32_t *span, int64_t group, runs_t *runs) {
    const int64_t seat = span[0], end = span[2], slots = job->slots, row = job->groups * job->size;
    int64_t start = span[1] < 0 ? 0 : span[1];
    if (end - start > slots) start = end - slots;
    const int64_t context = end > start ? end - start : 0, fresh = span[4] > span[3] ? span[4] - span[3] : 0;
    const int64_t slot = context ? start % slots : 0, before = slots - slot < context ? slots - slot : context;
    const int64_t ring = seat * slots * row + group * job->size;
    runs->counts[0] = before;
    runs->counts[1] = context - before;
    runs->counts[2] = job->fresh_k ? fresh : 0;
    runs->keys[0] = job->cache_k + ring + slot * row;
    runs->values[0] = job->cache_v + ring + slot * row;
    runs->keys[1] = job->cache_k + ring;
    runs->values[1] = job->cache_v + ring;
    runs->keys[2] = job->fresh_k ? job->fresh_k + span[3] * row + group * job->size : NULL;
    runs->values[2] = job->fresh_v ? job->fresh_v + span[3] * row + group * job->size : NULL;
    return runs->counts[0] + runs->counts[1] + runs->counts[2];
}

/* HEADS query heads that share keys and values, side by side: each key is loaded once for all of them. A head's own sums
 * have the same order for every HEADS. */

#define MAX_HEADS 4

INLINE void score_key(const int HEADS, const float *queries, const float *key, int64_t size, float scale, float *scores,
                      int64_t stride) {
    f32v even[MAX_HEADS], odd[MAX_HEADS];
    for (int h = 0; h < HEADS; h++) even[h] = odd[h] = (f32v){0};
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES)
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) {
            even[h] = multiply_add(load(queries + h * size + i), load(key + i), even[h]);
            odd[h] = multiply_add(load(queries + h * size + i + LANES), load(key + i + LANES), odd[h]);
        }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) {
        float sum = sum_lanes(even[h] + odd[h]);
        for (int64_t rest = i; rest < size; rest++) sum += queries[h * size + rest] * key[rest];
        scores[h * stride] = sum * scale;
    }
}

/* Scores -> weights that sum to 1. */
static void softmax(float *scores, int64_t count) {
    float largest = scores[0];
    for (int64_t i = 1; i < count; i++) largest = scores[i] > largest ? scores[i] : largest;
    const int64_t whole = count / LANES * LANES;
    f32v sums = {0}, tail = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        const f32v weights = exp_lanes(load(scores + i) - splat(largest));
        sums += weights;
        store(scores + i, weights);
    }
    for (int64_t i = whole; i < count; i++) tail[i - whole] = scores[i] - largest;
    tail = exp_lanes(tail);
    float sum = sum_lanes(sums);
    for (int64_t i = whole; i < count; i++) {
        scores[i] = tail[i - whole];
        sum += scores[i];
    }
    const float inverse = 1.0f / sum;
    for (int64_t i = 0; i < count; i++) scores[i] *= inverse;
}

/* Some vectors of the outputs of HEADS heads, summed over all keys in registers. */
INLINE void sum_values(const int HEADS, const int VECTORS_AT_ONCE, const runs_t *runs, int64_t first, const float *weights,
                       int64_t stride, int64_t row, int64_t size, float *y) {
    f32v sums[MAX_HEADS][8];
#pragma GCC unroll 8
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS_AT_ONCE; v++) sums[h][v] = (f32v){0};
    for (int run = 0; run < 3; run++)
        for (int64_t i = 0; i < runs->counts[run]; i++, weights++) {
            const float *value = runs->values[run] + i * row + first;
#pragma GCC unroll 8
            for (int h = 0; h < HEADS; h++) {
                const f32v weight = splat(weights[h * stride]);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS_AT_ONCE; v++)
                    sums[h][v] = multiply_add(load(value + v * LANES), weight, sums[h][v]);
            }
        }
#pragma GCC unroll 8
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS_AT_ONCE; v++) store(y + h * size + first + v * LANES, sums[h][v]);
}

INLINE void attend_heads(const int HEADS, const attention_job *job, const runs_t *runs, int64_t count, const float *queries,
                         float *scores, float *y) {
    const int64_t size = job->size, row = job->groups * size;
    float *score = scores;
    for (int run = 0; run < 3; run++)
        for (int64_t i = 0; i < runs->counts[run]; i++)
            score_key(HEADS, queries, runs->keys[run] + i * row, size, job->scale, score++, count);
    for (int h = 0; h < HEADS; h++) softmax(scores + h * count, count);
    int64_t first = 0;
    for (; first + 8 / HEADS * LANES <= size; first += 8 / HEADS * LANES)
        sum_values(HEADS, 8 / HEADS, runs, first, scores, count, row, size, y);
    for (; first + LANES <= size; first += LANES) sum_values(HEADS, 1, runs, first, scores, count, row, size, y);
    for (; first < size; first++)
        for (int h = 0; h < HEADS; h++) {
            const float *weights = scores + h * count;
            float sum = 0.0f;
            for (int run = 0; run < 3; run++)
                for (int64_t i = 0; i < runs->counts[run]; i++) sum += runs->values[run][i * row + first] * *weights++;
            y[h * size + first] = sum;
        }
}

static void attend(const void *argument, int64_t item) {
    const attention_job *job = argument;
    const int64_t heads = job->heads_per_item, first = item * heads, head = first % job->heads;
    const int32_t *span = job->spans + first / job->heads * 5;
    const float *queries = job->queries + first * job->size;
    float *y = job->outputs + first * job->size;
    runs_t runs;
    const int64_t count = span[0] < 0 ? 0 : find_runs(job, span, head / (job->heads / job->groups), &runs);
    if (count == 0) {
        memset(y, 0, (size_t)(heads * job->size) * sizeof(float));
        return;
    }
    float *scores = malloc((size_t)(count * heads) * sizeof(float));
    if (heads == 4) attend_heads(4, job, &runs, count, queries, scores, y);
    else if (heads == 2) attend_heads(2, job, &runs, count, queries, scores, y);
    else attend_heads(1, job, &runs, count, queries, scores, y);
    free(scores);
}

/* queries, outputs [rows, heads, size]; caches [seats, slots, groups, size]; fresh [F, groups, size] or NULL */
EXPORT void outrider_attention(const float *queries, const float *cache_k, const float *cache_v, const float *fresh_k,
                               const float *fresh_v, const int32_t *spans, float *outputs, int64_t rows, int64_t heads,
                               int64_t groups, int64_t size, int64_t slots, float scale) {
    /* As many heads side by side as still leave every thread an item. */
    int64_t side_by_side = MAX_HEADS;
    while (side_by_side > 1 && (heads / groups % side_by_side || rows * heads / side_by_side < wanted_threads)) side_by_side /= 2;
    const attention_job job = {queries, cache_k, cache_v, fresh_k, fresh_v, spans, outputs,
                               heads, groups, size, slots, side_by_side, scale};
    parallel(attend, &job, rows * heads / side_by_side);
}
