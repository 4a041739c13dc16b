/* What is done to rows one by one: norms, rotary embedding, cache writes. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "cpu_vectors.h"

static float inverse_rms(const float *x, int64_t n, float eps) {
    f32v sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            f32v v = load(x + i + part * LANES);
            sums[part] = multiply_add(v, v, sums[part]);
        }
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)n + eps);
}

/* y = x / rms(x) * weight, or (residual + that) * scale, all [rows, n]; residual may be NULL */
EXPORT void outrider_rms_norm(const float *x, const float *weight, const float *residual, float *y, int64_t rows, int64_t n,
                              float eps, float scale) {
    for (int64_t r = 0; r < rows; r++, x += n, y += n) {
        const float inverse = inverse_rms(x, n, eps);
        if (residual)
            for (int64_t i = 0; i < n; i++) y[i] = (residual[r * n + i] + x[i] * inverse * weight[i]) * scale;
        else
            for (int64_t i = 0; i < n; i++) y[i] = x[i] * inverse * weight[i];
    }
}

/* x, y [rows, heads, size]; cos, sin [positions, size / 2]; weight [size] or NULL */
EXPORT void outrider_head_norm_rope(const float *x, const float *weight, const float *cos, const float *sin,
                                    const int64_t *positions, float *y, int64_t rows, int64_t heads, int64_t size, float eps) {
    const int64_t half = size / 2;
    for (int64_t r = 0; r < rows; r++) {
        const float *c = cos + positions[r] * half, *s = sin + positions[r] * half;
        for (int64_t h = 0; h < heads; h++, x += size, y += size) {
            const float inverse = weight ? inverse_rms(x, size, eps) : 1.0f;
            for (int64_t i = 0; i < half; i++) {
                const float first = weight ? x[i] * inverse * weight[i] : x[i];
                const float second = weight ? x[i + half] * inverse * weight[i + half] : x[i + half];
                y[i] = first * c[i] - second * s[i];
                y[i + half] = second * c[i] + first * s[i];
            }
        }
    }
}

/* caches [pages, page_size, size], table [seats, width]; keys, values [rows, size] */
EXPORT void outrider_write_cache(float *cache_k, float *cache_v, const int32_t *table, const float *keys, const float *values,
                                 const int64_t *seats, const int64_t *positions, int64_t rows, int64_t page_size,
                                 int64_t width, int64_t size) {
    for (int64_t r = 0; r < rows; r++) {
        if (seats[r] < 0) continue;
        const int64_t page = table[seats[r] * width + positions[r] / page_size % width];
        if (page < 0) continue;
        const int64_t at = (page * page_size + positions[r] % page_size) * size;
        memcpy(cache_k + at, keys + r * size, (size_t)size * sizeof(float));
        memcpy(cache_v + at, values + r * size, (size_t)size * sizeof(float));
    }
}
