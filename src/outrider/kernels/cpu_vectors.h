/* Vectors of eight floats and the exponential. */
#pragma once
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

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
