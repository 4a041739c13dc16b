/* Attention of rows over cached and fresh keys. */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "cpu_threads.h"
#include "cpu_vectors.h"

typedef struct {
    const float *queries, *cache_k, *cache_v, *fresh_k, *fresh_v;
    const int32_t *table; /* [seats, width]: the page of each logical page, or -1 */
    const int32_t *spans; /* [rows, 5]: seat, context start, context end, fresh start, fresh end */
    float *outputs;
    int64_t heads, groups, size, page_size, width, heads_per_item;
    float scale;
} attention_job;

/* Consecutive keys: what a row sees is some runs of them, in the order of positions and then fresh rows. Where pages lie
 * decides how long runs are, never the order of sums. */
typedef struct {
    const float *keys, *values;
    int64_t count;
} run_t;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Most runs of a span: a page each, and the fresh rows. */
static int64_t num_runs_at_most(const attention_job *job, const int32_t *span) {
    const int64_t context = smaller(span[2] - span[1], job->width * job->page_size);
    return (context > 0 ? context : 0) / job->page_size + 3;
}

/* Finds the runs of a span; returns how many, and in *keys how many keys they have together. */
static int64_t find_runs(const attention_job *job, const int32_t *span, int64_t group, run_t *runs, int64_t *keys) {
    const int64_t row = job->groups * job->size, page_size = job->page_size, slots = job->width * page_size, end = span[2];
    const int32_t *table = job->table + span[0] * job->width;
    int64_t position = span[1] < 0 ? 0 : span[1], count = 0;
    if (end - position > slots) position = end - slots;
    *keys = 0;
    while (position < end) {
        const int64_t slot = position % page_size, length = smaller(page_size - slot, end - position);
        const int64_t page = table[position / page_size % job->width];
        position += length;
        if (page < 0) continue;
        const int64_t at = (page * page_size + slot) * row + group * job->size;
        *keys += length;
        if (count && job->cache_k + at == runs[count - 1].keys + runs[count - 1].count * row) runs[count - 1].count += length;
        else runs[count++] = (run_t){job->cache_k + at, job->cache_v + at, length};
    }
    if (job->fresh_k && span[4] > span[3]) {
        const int64_t at = span[3] * row + group * job->size;
        runs[count++] = (run_t){job->fresh_k + at, job->fresh_v + at, span[4] - span[3]};
        *keys += span[4] - span[3];
    }
    return count;
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
INLINE void sum_values(const int HEADS, const int VECTORS_AT_ONCE, const run_t *runs, int64_t num_runs, int64_t first,
                       const float *weights, int64_t stride, int64_t row, int64_t size, float *y) {
    f32v sums[MAX_HEADS][8];
#pragma GCC unroll 8
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS_AT_ONCE; v++) sums[h][v] = (f32v){0};
    for (const run_t *run = runs; run < runs + num_runs; run++)
        for (int64_t i = 0; i < run->count; i++, weights++) {
            const float *value = run->values + i * row + first;
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

INLINE void attend_heads(const int HEADS, const attention_job *job, const run_t *runs, int64_t num_runs, int64_t count,
                         const float *queries, float *scores, float *y) {
    const int64_t size = job->size, row = job->groups * size;
    float *score = scores;
    for (const run_t *run = runs; run < runs + num_runs; run++)
        for (int64_t i = 0; i < run->count; i++)
            score_key(HEADS, queries, run->keys + i * row, size, job->scale, score++, count);
    for (int h = 0; h < HEADS; h++) softmax(scores + h * count, count);
    int64_t first = 0;
    for (; first + 8 / HEADS * LANES <= size; first += 8 / HEADS * LANES)
        sum_values(HEADS, 8 / HEADS, runs, num_runs, first, scores, count, row, size, y);
    for (; first + LANES <= size; first += LANES) sum_values(HEADS, 1, runs, num_runs, first, scores, count, row, size, y);
    for (; first < size; first++)
        for (int h = 0; h < HEADS; h++) {
            const float *weights = scores + h * count;
            float sum = 0.0f;
            for (const run_t *run = runs; run < runs + num_runs; run++)
                for (int64_t i = 0; i < run->count; i++) sum += run->values[i * row + first] * *weights++;
            y[h * size + first] = sum;
        }
}

static void attend(const void *argument, int64_t item) {
    const attention_job *job = argument;
    const int64_t heads = job->heads_per_item, first = item * heads, head = first % job->heads;
    const int32_t *span = job->spans + first / job->heads * 5;
    const float *queries = job->queries + first * job->size;
    float *y = job->outputs + first * job->size;
    int64_t count = 0, num_runs = 0;
    run_t *runs = NULL;
    if (span[0] >= 0) {
        runs = malloc((size_t)num_runs_at_most(job, span) * sizeof(run_t));
        num_runs = find_runs(job, span, head / (job->heads / job->groups), runs, &count);
    }
    if (count == 0) {
        memset(y, 0, (size_t)(heads * job->size) * sizeof(float));
    } else {
        float *scores = malloc((size_t)(count * heads) * sizeof(float));
        if (heads == 4) attend_heads(4, job, runs, num_runs, count, queries, scores, y);
        else if (heads == 2) attend_heads(2, job, runs, num_runs, count, queries, scores, y);
        else attend_heads(1, job, runs, num_runs, count, queries, scores, y);
        free(scores);
    }
    free(runs);
}

/* queries, outputs [rows, heads, size]; caches [pages, page_size, groups, size]; table [seats, width]; fresh
 * [F, groups, size] or NULL */
EXPORT void outrider_attention(const float *queries, const float *cache_k, const float *cache_v, const int32_t *table,
                               const float *fresh_k, const float *fresh_v, const int32_t *spans, float *outputs, int64_t rows,
                               int64_t heads, int64_t groups, int64_t size, int64_t page_size, int64_t width, float scale) {
    /* As many heads side by side as still leave every thread an item. */
    int64_t side_by_side = MAX_HEADS;
    while (side_by_side > 1 && (heads / groups % side_by_side || rows * heads / side_by_side < wanted_threads)) side_by_side /= 2;
    const attention_job job = {queries, cache_k, cache_v, fresh_k, fresh_v, table, spans, outputs,
                               heads, groups, size, page_size, width, side_by_side, scale};
    parallel(attend, &job, rows * heads / side_by_side);
}
