/* Kernels for CPUs: products of float32 rows with int8 (or float32) weights, norms, rotary embedding, activation, cache
 * writes and attention. kernels/cpu.py compiles this file with the headers beside it; kernels/reference.py says what each
 * function means.
 *
 * Row invariance: every output element is computed by one chain of operations whose order depends on the weight's shape
 * or the row's own span, never on the number of rows. Vector lanes hold different outputs, so products need no
 * horizontal sums; where lanes are summed (norms, scores) the order is fixed. Multiply-add is fused where it says so and
 * nowhere else (all is compiled with -ffp-contract=off): left to the compiler, one row count's kernel fuses what
 * another's does not.
 */
#define _GNU_SOURCE
#include "cpu_attention.h"
#include "cpu_packing.h"
#include "cpu_products.h"
#include "cpu_rows.h"

/* A recorded call: which function (its place in kernels/cpu.py's list of recorded functions) and its arguments, each in
 * eight bytes. Replaying a pass saves what some two hundred calls cost the interpreter. */
typedef union {
    int64_t n;
    float f;
    void *p;
} argument_t;

typedef struct {
    int64_t function;
    argument_t a[15];
} call_t;

enum { LINEARS, GATED_LINEAR, RMS_NORM, HEAD_NORM_ROPE, WRITE_CACHE, ATTENTION, GATED };

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
            outrider_rms_norm(a[0].p, a[1].p, a[2].p, a[3].p, a[4].n, a[5].n, a[6].f, a[7].f);
            break;
        case HEAD_NORM_ROPE:
            outrider_head_norm_rope(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].n, a[7].n, a[8].n, a[9].f);
            break;
        case WRITE_CACHE:
            outrider_write_cache(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].n, a[8].n, a[9].n, a[10].n);
            break;
        case ATTENTION:
            outrider_attention(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].n, a[9].n, a[10].n,
                               a[11].n, a[12].n, a[13].n, a[14].f);
            break;
        case GATED:
            outrider_gated(a[0].p, a[1].p, a[2].p, a[3].n, (int32_t)a[4].n);
            break;
        }
    }
}
