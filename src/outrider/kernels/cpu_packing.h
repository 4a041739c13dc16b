/* Packing weights into tiles, and reading rows back out of them. */
#pragma once
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include "cpu_products.h"

EXPORT int outrider_has_half(void) { return HAS_HALF; }

EXPORT int64_t outrider_tile_bytes(int64_t in, int64_t group, int32_t flags) {
    if (flags & FLAG_DENSE) return in * TILE * 4;
    return in / group * (group * TILE + scale_bytes(flags));
}

typedef struct {
    const weight_t *weight;
    const void *values, *scales;
    const float *offsets;
} pack_job;

static void pack_tile(const void *argument, int64_t tile_index) {
    const pack_job *job = argument;
    const weight_t *weight = job->weight;
    const int64_t in = weight->in_features, group = weight->group_size, num_groups = in / group;
    const int64_t first = tile_index * TILE, width = min_count(weight->out_features - first, TILE);
    uint8_t *tile = (uint8_t *)weight->tiles + tile_index * weight->tile_bytes;
    memset(tile, 0, (size_t)weight->tile_bytes);
    if (weight->flags & FLAG_DENSE) {
        for (int64_t o = 0; o < width; o++)
            for (int64_t k = 0; k < in; k++) ((float *)tile)[k * TILE + o] = ((const float *)job->values)[(first + o) * in + k];
        return;
    }
    const int64_t scale_size = weight->flags & FLAG_HALF_SCALES ? 2 : 4;
    for (int64_t g = 0; g < num_groups; g++) {
        uint8_t *after = tile + group * TILE;
        for (int64_t o = 0; o < width; o++) {
            const int8_t *values = (const int8_t *)job->values + (first + o) * in + g * group;
            const int64_t at = (first + o) * num_groups + g;
            for (int64_t k = 0; k < group; k++) tile[k * TILE + o] = (uint8_t)values[k];
            memcpy(after + o * scale_size, (const uint8_t *)job->scales + at * scale_size, (size_t)scale_size);
            if (job->offsets) memcpy(after + TILE * scale_size + o * 4, job->offsets + at, 4);
        }
        tile = after + scale_bytes(weight->flags);
    }
}

/* Ask for huge pages where weights will be: a hint, so unchecked. Fewer TLB misses; 12 % of the layers' time at one row. */
EXPORT void outrider_advise(void *memory, int64_t num_bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 2 << 20, begin = ((uintptr_t)memory + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t)memory + (uintptr_t)num_bytes) & ~(page - 1);
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)num_bytes;
#endif
}

/* Fill weight->tiles from values [out, in], scales and offsets [out, in / group]. */
EXPORT void outrider_pack(const weight_t *weight, const void *values, const void *scales, const float *offsets) {
    const pack_job job = {weight, values, scales, offsets};
    parallel(pack_tile, &job, count_tiles(weight));
}

/* Rows ids [rows] of the weight -> y [rows, in] */
EXPORT void outrider_embed(const int64_t *ids, int64_t rows, const weight_t *weight, float *y) {
    const int64_t in = weight->in_features, group = weight->group_size;
    for (int64_t r = 0; r < rows; r++, y += in) {
        const uint8_t *tile = weight->tiles + ids[r] / TILE * weight->tile_bytes;
        const int64_t lane = ids[r] % TILE, vector = lane / WIDTH * WIDTH;
        if (weight->flags & FLAG_DENSE) {
            for (int64_t k = 0; k < in; k++) y[k] = ((const float *)tile)[k * TILE + lane];
            continue;
        }
        for (int64_t first = 0; first < in; first += group) {
            const uint8_t *after = tile + group * TILE;
            const int half_scales = weight->flags & FLAG_HALF_SCALES;
            const float *offsets = (const float *)(after + TILE * (half_scales ? 2 : 4));
            float scale[WIDTH];
            store_wide(scale, half_scales ? load_half((const uint16_t *)after + vector) : load_wide((const float *)after + vector));
            const float offset = weight->flags & FLAG_OFFSETS ? offsets[lane] : 0.0f;
            for (int64_t k = 0; k < group; k++)
                y[first + k] = (float)(int8_t)tile[k * TILE + lane] * scale[lane - vector] + offset;
            tile = after + scale_bytes(weight->flags);
        }
    }
}
