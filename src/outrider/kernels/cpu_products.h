/* Products of rows with packed weights, and what is done with their results on the spot. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "cpu_threads.h"
#include "cpu_tiles.h"
#include "cpu_vectors.h"

/* One call's share of a product: up to MAX_PARTS weights that read the same inputs, tiles of all of them in one queue. */
#define MAX_PARTS 3

typedef struct {
    const float *x, *residual;
    int64_t rows, tiles_per_item;
    const weight_t *weights[MAX_PARTS];
    const float *group_sums[MAX_PARTS];
    float *y[MAX_PARTS];
    int64_t first_item[MAX_PARTS + 1];
    int32_t is_gelu;
    struct best *best;
} linear_job;

INLINE int64_t count_tiles(const weight_t *weight) { return (weight->out_features + TILE - 1) / TILE; }

INLINE int64_t min_count(int64_t a, int64_t b) { return a < b ? a : b; }

/* Rows row .. row + rows of one tile: totals [rows][TILE]. */
static void tile_totals(const linear_job *job, int part, int64_t tile_index, int64_t row, int64_t rows, float *totals) {
    const weight_t *weight = job->weights[part];
    const tile_fn *kernels = weight->flags & FLAG_DENSE ? DENSE_TILES : INT8_TILES;
    const float *sums = job->group_sums[part];
    if (sums) sums += row * (weight->in_features / weight->group_size);
    kernels[rows - 1](weight, weight->tiles + tile_index * weight->tile_bytes, job->x + row * weight->in_features, sums, totals);
}

static void linear_tile(const linear_job *job, int part, int64_t tile_index) {
    const int64_t out = job->weights[part]->out_features, first = tile_index * TILE, width = min_count(out - first, TILE);
    const int64_t num_chunks = (job->rows + MAX_CHUNK - 1) / MAX_CHUNK;
    _Alignas(64) float totals[MAX_CHUNK * TILE];
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        const int64_t row = job->rows * chunk / num_chunks, rows = job->rows * (chunk + 1) / num_chunks - row;
        tile_totals(job, part, tile_index, row, rows, totals);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t at = (row + r) * out + first;
            float *total = totals + r * TILE;
            if (job->residual)
                for (int64_t i = 0; i < width; i++) total[i] += job->residual[at + i];
            memcpy(job->y[part] + at, total, (size_t)width * sizeof(float));
        }
    }
}

static void linear_item(const void *argument, int64_t item) {
    const linear_job *job = argument;
    int part = 0;
    while (item >= job->first_item[part + 1]) part++;
    const int64_t first = (item - job->first_item[part]) * job->tiles_per_item;
    const int64_t last = min_count(first + job->tiles_per_item, count_tiles(job->weights[part]));
    for (int64_t tile = first; tile < last; tile++) linear_tile(job, part, tile);
}

/* Sum of the inputs of each group, which an offset multiplies; NULL where the weight has no offsets. */
static float *group_sums(const float *x, int64_t rows, const weight_t *weight) {
    if (!(weight->flags & FLAG_OFFSETS)) return NULL;
    const int64_t group = weight->group_size, count = rows * (weight->in_features / group);
    float *sums = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++, x += group) {
        f32v sum = load(x);
        for (int64_t k = LANES; k < group; k += LANES) sum += load(x + k);
        sums[i] = sum_lanes(sum);
    }
    return sums;
}

/* Neighbouring tiles stay on one thread as far as the work still spreads evenly: they are one stream. */
static int64_t tiles_an_item(int64_t num_tiles) {
    const int64_t even = num_tiles / (8 * wanted_threads);
    return even < 1 ? 1 : min_count(even, 16);
}

/* x [rows, in] -> y_i = x weight_i^T (+ residual), [rows, out_i], for up to three weights; NULL ends the list. */
EXPORT void outrider_linears(const float *x, int64_t rows, const float *residual, const weight_t *weight_0, float *y_0,
                             const weight_t *weight_1, float *y_1, const weight_t *weight_2, float *y_2) {
    linear_job job = {.x = x, .residual = residual, .rows = rows, .weights = {weight_0, weight_1, weight_2}, .y = {y_0, y_1, y_2}};
    int parts = 0;
    int64_t num_tiles = 0;
    if (rows == 0) return;
    for (; parts < MAX_PARTS && job.weights[parts]; parts++) num_tiles += count_tiles(job.weights[parts]);
    job.tiles_per_item = tiles_an_item(num_tiles);
    for (int i = 0; i < parts; i++) {
        const int64_t items = (count_tiles(job.weights[i]) + job.tiles_per_item - 1) / job.tiles_per_item;
        job.first_item[i + 1] = job.first_item[i] + items;
        job.group_sums[i] = group_sums(x, rows, job.weights[i]);
    }
    parallel(linear_item, &job, job.first_item[parts]);
    for (int i = 0; i < parts; i++) free((void *)job.group_sums[i]);
}

/* silu(x) = x / (1 + e^-x); gelu_tanh(x) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) */
INLINE f32v gated_lanes(f32v gate, f32v up, int is_gelu) {
    const f32v cubic = gate * (splat(1.0f) + splat(0.044715f) * gate * gate);
    const f32v exponent = is_gelu ? splat(-1.59576912f) * cubic : -gate;
    return gate / (splat(1.0f) + exp_lanes(exponent)) * up;
}

static void gated_tile(const void *argument, int64_t tile_index) {
    const linear_job *job = argument;
    const int64_t out = job->weights[0]->out_features, first = tile_index * TILE, width = min_count(out - first, TILE);
    const int64_t num_chunks = (job->rows + MAX_CHUNK - 1) / MAX_CHUNK;
    _Alignas(64) float gate[MAX_CHUNK * TILE], up[MAX_CHUNK * TILE];
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        const int64_t row = job->rows * chunk / num_chunks, rows = job->rows * (chunk + 1) / num_chunks - row;
        tile_totals(job, 0, tile_index, row, rows, gate);
        tile_totals(job, 1, tile_index, row, rows, up);
        for (int64_t i = 0; i < rows * TILE; i += LANES) store(gate + i, gated_lanes(load(gate + i), load(up + i), job->is_gelu));
        for (int64_t r = 0; r < rows; r++)
            memcpy(job->y[0] + (row + r) * out + first, gate + r * TILE, (size_t)width * sizeof(float));
    }
}

/* y = activation(x gate^T) * (x up^T): x [rows, in] -> y [rows, out] */
EXPORT void outrider_gated_linear(const float *x, int64_t rows, const weight_t *gate, const weight_t *up, float *y,
                                  int32_t is_gelu) {
    linear_job job = {.x = x, .rows = rows, .weights = {gate, up}, .y = {y}, .is_gelu = is_gelu};
    if (rows == 0) return;
    for (int i = 0; i < 2; i++) job.group_sums[i] = group_sums(x, rows, job.weights[i]);
    parallel(gated_tile, &job, count_tiles(gate));
    for (int i = 0; i < 2; i++) free((void *)job.group_sums[i]);
}

/* y = activation(x) * factors, n numbers each. What fills no vector goes through one all the same: every number takes
 * the same way wherever it stands. */
EXPORT void outrider_gated(const float *x, const float *factors, float *y, int64_t n, int32_t is_gelu) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, gated_lanes(load(x + i), load(factors + i), is_gelu));
    _Alignas(64) float rest[2][LANES] = {{0}};
    const size_t rest_bytes = (size_t)(n - i) * sizeof(float);
    memcpy(rest[0], x + i, rest_bytes);
    memcpy(rest[1], factors + i, rest_bytes);
    store(rest[0], gated_lanes(load(rest[0]), load(rest[1]), is_gelu));
    memcpy(y + i, rest[0], rest_bytes);
}

/* The largest output of one row among the tiles of one item. */
struct best {
    float value;
    int64_t index;
};

/* NaN wins and ties go to the lower index, as in torch.max. */
static void keep_best(struct best *best, const float *values, int64_t first, int64_t width) {
    f32v largest = splat(-INFINITY);
    i32v has_nan = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const f32v v = load(values + i);
        has_nan |= v != v;
        largest = select_lanes(v > largest, v, largest);
    }
    int is_better = i < width || best->index < 0;
    for (int lane = 0; lane < LANES; lane++) is_better |= has_nan[lane] || largest[lane] > best->value;
    if (!is_better || isnan(best->value)) return;
    for (i = 0; i < width; i++)
        if (values[i] > best->value || best->index < 0 || isnan(values[i])) {
            *best = (struct best){values[i], first + i};
            if (isnan(values[i])) return;
        }
}

static void best_item(const void *argument, int64_t item) {
    const linear_job *job = argument;
    const weight_t *weight = job->weights[0];
    const int64_t begin = item * job->tiles_per_item, end = min_count(begin + job->tiles_per_item, count_tiles(weight));
    const int64_t num_chunks = (job->rows + MAX_CHUNK - 1) / MAX_CHUNK;
    struct best *best = job->best + item * job->rows;
    _Alignas(64) float totals[MAX_CHUNK * TILE];
    for (int64_t r = 0; r < job->rows; r++) best[r] = (struct best){-INFINITY, -1};
    for (int64_t tile = begin; tile < end; tile++)
        for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
            const int64_t row = job->rows * chunk / num_chunks, rows = job->rows * (chunk + 1) / num_chunks - row;
            tile_totals(job, 0, tile, row, rows, totals);
            for (int64_t r = 0; r < rows; r++)
                keep_best(best + row + r, totals + r * TILE, tile * TILE, min_count(weight->out_features - tile * TILE, TILE));
        }
}

/* Largest output of each row of x weight^T and its index, [rows] each, without the outputs themselves. */
EXPORT void outrider_best(const float *x, int64_t rows, const weight_t *weight, float *values, int64_t *indices) {
    const int64_t tiles_per_item = tiles_an_item(count_tiles(weight));
    const int64_t num_items = (count_tiles(weight) + tiles_per_item - 1) / tiles_per_item;
    if (rows == 0) return;
    linear_job job = {.x = x, .rows = rows, .tiles_per_item = tiles_per_item, .weights = {weight}};
    job.group_sums[0] = group_sums(x, rows, weight);
    job.best = malloc((size_t)(num_items * rows) * sizeof(struct best));
    parallel(best_item, &job, num_items);
    for (int64_t r = 0; r < rows; r++) {
        struct best best = job.best[r];
        for (int64_t item = 1; item < num_items; item++) {
            const struct best other = job.best[item * rows + r];
            if (!isnan(best.value) && (isnan(other.value) || other.value > best.value)) best = other;
        }
        values[r] = best.value;
        indices[r] = best.index;
    }
    free(job.best);
    free((void *)job.group_sums[0]);
}
