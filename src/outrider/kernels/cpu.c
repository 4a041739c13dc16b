/* Kernels for CPUs: products of float32 rows with int8 (or float32) weights, norms, rotary embedding, activation, cache
 * writes and attention. kernels/cpu.py compiles and calls this file; kernels/reference.py says what each function means.
 *
 * Row invariance: every output element is computed by one chain of operations whose order depends on the weight's shape
 * or the row's own span, never on the number of rows. Vector lanes hold different outputs, so products need no
 * horizontal sums; where lanes are summed (norms, scores) the order is fixed. Multiply-add is fused where it says so and
 * nowhere else (the file is compiled with -ffp-contract=off): left to the compiler, one row count's kernel fuses what
 * another's does not.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* ---------------------------------------------------------------------------------------------- vectors */

#define LANES 8
typedef float f32v __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES), aligned(4)));

INLINE f32v load(const float *p) { return *(const f32v *)p; }
INLINE void store(float *p, f32v v) { *(f32v *)p = v; }
INLINE f32v splat(float x) { return (f32v){x, x, x, x, x, x, x, x}; }
INLINE f32v select_lanes(i32v mask, f32v yes, f32v no) { return (f32v)((mask & (i32v)yes) | (~mask & (i32v)no)); }

/* a * b + c */
INLINE f32v multiply_add(f32v a, f32v b, f32v c) {
#if defined(__AVX2__) && defined(__FMA__)
    return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE float sum_lanes(f32v v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

/* e^x to about 2 ulp; arguments are clamped to where the result is a normal number. NaN stays NaN. */
INLINE f32v exp_lanes(f32v x) {
    const f32v low = splat(-87.3f), high = splat(88.3f), magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds */
    x = select_lanes(x < low, low, x);
    x = select_lanes(x > high, high, x);
    f32v shifted = multiply_add(x, splat(1.44269504f), magic);
    f32v n = shifted - magic;
    f32v r = multiply_add(n, splat(-0.693359375f), x);
    r = multiply_add(n, splat(2.12194440e-4f), r);
    f32v poly = splat(1.9875691500e-4f);
    poly = multiply_add(poly, r, splat(1.3981999507e-3f));
    poly = multiply_add(poly, r, splat(8.3334519073e-3f));
    poly = multiply_add(poly, r, splat(4.1665795894e-2f));
    poly = multiply_add(poly, r, splat(1.6666665459e-1f));
    poly = multiply_add(poly, r, splat(5.0000001201e-1f));
    poly = multiply_add(poly, r * r, r) + splat(1.0f);
    i32v exponent = ((i32v)shifted - (i32v)magic + 127) << 23;
    return poly * (f32v)exponent;
}

/* ------------------------------------------------------------------------------------------ thread pool */

/* One parallel call at a time. `remaining` counts unclaimed items down; whoever takes it from v > 0 owns item
 * count - v. The job cannot change while an owned item is unfinished, so a late worker never reads a stale job. */

#define MAX_THREADS 256
#define SPIN_NS 100000 /* how long an idle worker looks for the next call before it sleeps */

typedef void (*item_fn)(const void *job, int64_t item);

static pthread_mutex_t call_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t sleep_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleep_condition = PTHREAD_COND_INITIALIZER;
static int wanted_threads = 1, started_workers = 0, fork_handler_set = 0;

static item_fn job_fn;
static const void *job_argument;
static int64_t job_count;
static _Alignas(64) atomic_llong remaining;
static _Alignas(64) atomic_llong finished;
static _Alignas(64) atomic_int sleepers;

INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void run_items(void) {
    while (atomic_load_explicit(&remaining, memory_order_relaxed) > 0) {
        int64_t left = atomic_fetch_sub_explicit(&remaining, 1, memory_order_acq_rel);
        if (left <= 0) return;
        job_fn(job_argument, job_count - left);
        atomic_fetch_add_explicit(&finished, 1, memory_order_release);
    }
}

static void wait_for_items(void) {
    int64_t start = clock_ns();
    for (;;) {
        for (int i = 0; i < 200; i++) {
            if (atomic_load_explicit(&remaining, memory_order_relaxed) > 0) return;
            relax();
        }
        if (clock_ns() - start > SPIN_NS) break;
    }
    pthread_mutex_lock(&sleep_mutex);
    atomic_fetch_add(&sleepers, 1);
    while (atomic_load(&remaining) <= 0) pthread_cond_wait(&sleep_condition, &sleep_mutex);
    atomic_fetch_sub(&sleepers, 1);
    pthread_mutex_unlock(&sleep_mutex);
}

static void *worker(void *unused) {
    (void)unused;
    for (;;) {
        wait_for_items();
        run_items();
    }
    return NULL;
}

/* Threads do not survive a fork: the child starts its own at its first parallel call. */
static void forget_workers(void) {
    started_workers = 0;
    atomic_store(&sleepers, 0);
    atomic_store(&remaining, 0);
    pthread_mutex_init(&call_mutex, NULL);
    pthread_mutex_init(&sleep_mutex, NULL);
    pthread_cond_init(&sleep_condition, NULL);
}

static void start_workers(void) {
    if (!fork_handler_set) {
        pthread_atfork(NULL, NULL, forget_workers);
        fork_handler_set = 1;
    }
    while (started_workers < wanted_threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL) != 0) {
            wanted_threads = started_workers + 1;
            return;
        }
        pthread_detach(thread);
        started_workers++;
    }
}

static void parallel(item_fn fn, const void *argument, int64_t count) {
    if (wanted_threads == 1 || count == 1) {
        for (int64_t item = 0; item < count; item++) fn(argument, item);
        return;
    }
    pthread_mutex_lock(&call_mutex);
    start_workers();
    job_fn = fn;
    job_argument = argument;
    job_count = count;
    atomic_store_explicit(&finished, 0, memory_order_relaxed);
    atomic_store(&remaining, count);
    if (atomic_load(&sleepers) > 0) {
        pthread_mutex_lock(&sleep_mutex);
        pthread_cond_broadcast(&sleep_condition);
        pthread_mutex_unlock(&sleep_mutex);
    }
    run_items();
    for (int spins = 0; atomic_load_explicit(&finished, memory_order_acquire) < count; spins++) {
        if (spins < 20000) relax();
        else sched_yield(); /* more threads than free cores: let the worker that holds the last item run */
    }
    pthread_mutex_unlock(&call_mutex);
}

EXPORT void outrider_set_threads(int num_threads) {
    wanted_threads = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
}

/* --------------------------------------------------------------------------------------------- products */

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

/* One tile for ROWS rows, ROWS and SPAN (vectors in flight a row) being constants after inlining: ROWS * SPAN
 * independent chains hide the latency of multiply-add and still fit the registers. */
INLINE void tile_product(const int ROWS, const int SPAN, const int DENSE, const weight_t *weight, const uint8_t *tile,
                         const float *x, const float *group_sums, float *totals) {
    const int64_t in = weight->in_features, group = weight->group_size;
    const int64_t num_groups = (in + group - 1) / group;
    const int has_offsets = weight->flags & FLAG_OFFSETS, half_scales = weight->flags & FLAG_HALF_SCALES;
    for (int i = 0; i < ROWS * TILE; i += WIDTH) store_wide(totals + i, (wide){0});
    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t count = DENSE && in - g * group < group ? in - g * group : group;
        const uint8_t *after = tile + count * TILE * (DENSE ? 4 : 1);
        const int64_t share = (after - tile + scale_bytes(weight->flags)) / (VECTORS / SPAN);
        for (int first = 0; first < VECTORS; first += SPAN) {
            wide sums[6][8];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                for (int v = 0; v < SPAN; v++) sums[r][v] = (wide){0};
            const uint8_t *values = tile + first * WIDTH * (DENSE ? 4 : 1);
            const uint8_t *ahead = tile + PREFETCH_BYTES + share * (first / SPAN);
            for (int64_t line = 0; line < share; line += 64) __builtin_prefetch(ahead + line);
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
                    if (has_offsets) sum = multiply_add_wide(offset, splat_wide(group_sums[r * num_groups + g]), sum);
                    store_wide(total, sum);
                }
            }
        }
        tile = after + scale_bytes(weight->flags);
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
#define SPAN_4 2
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

/* ---------------------------------------------------------------------------------------- packing, embedding */

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

/* ------------------------------------------------------------------------------------------ rows, one by one */

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

/* y = (residual +) x / rms(x) * weight, all [rows, n]; residual may be NULL */
EXPORT void outrider_rms_norm(const float *x, const float *weight, const float *residual, float *y, int64_t rows, int64_t n,
                              float eps) {
    for (int64_t r = 0; r < rows; r++, x += n, y += n) {
        const float inverse = inverse_rms(x, n, eps);
        if (residual)
            for (int64_t i = 0; i < n; i++) y[i] = residual[r * n + i] + x[i] * inverse * weight[i];
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

/* caches [seats, slots, size]; keys, values [rows, size] */
EXPORT void outrider_write_cache(float *cache_k, float *cache_v, const float *keys, const float *values, const int64_t *seats,
                                 const int64_t *positions, int64_t rows, int64_t slots, int64_t size) {
    for (int64_t r = 0; r < rows; r++) {
        if (seats[r] < 0) continue;
        const int64_t at = (seats[r] * slots + positions[r] % slots) * size;
        memcpy(cache_k + at, keys + r * size, (size_t)size * sizeof(float));
        memcpy(cache_v + at, values + r * size, (size_t)size * sizeof(float));
    }
}

/* -------------------------------------------------------------------------------------------- attention */

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

/* ----------------------------------------------------------------------------------------------- replay */

/* A recorded call: which function (its place in kernels/cpu.py's list of recorded functions) and its arguments, each in
 * eight bytes. Replaying a pass saves what some hundred calls cost the interpreter. */
typedef union {
    int64_t n;
    float f;
    void *p;
} argument_t;

typedef struct {
    int64_t function;
    argument_t a[13];
} call_t;

enum { LINEARS, GATED_LINEAR, RMS_NORM, HEAD_NORM_ROPE, WRITE_CACHE, ATTENTION };

EXPORT void outrider_replay(const call_t *calls, int64_t count) {
    for (const call_t *call = calls; call < calls + count; call++) {
        const argument_t *a = call->a;
        switch (call->function) {
        case LINEARS:
            outrider_linears(a[0].p, a[1].n, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].p);
            break;
        case GATED_LINEAR:
            outrider_gated_linear(a[0].p, a[1].n, a[2].p, a[3].p, a[4].p, (int32_t)a[5].n);
            break;
        case RMS_NORM:
            outrider_rms_norm(a[0].p, a[1].p, a[2].p, a[3].p, a[4].n, a[5].n, a[6].f);
            break;
        case HEAD_NORM_ROPE:
            outrider_head_norm_rope(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].n, a[7].n, a[8].n, a[9].f);
            break;
        case WRITE_CACHE:
            outrider_write_cache(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].n, a[7].n, a[8].n);
            break;
        case ATTENTION:
            outrider_attention(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].n, a[8].n, a[9].n, a[10].n,
                               a[11].n, a[12].f);
            break;
        }
    }
}
