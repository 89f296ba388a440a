// One vector of floats at the width of the instruction set this file is compiled for, and the few operations on it.
//
// Every kernel source is compiled once a level (LEVEL is avx512, avx2 or portable; see build.py) with the same text.
// All is static: a function shared between the levels by the linker could be one the processor lacks. For the same
// reason no C++ library header is included.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define REPRISE_JOIN2(name, level) name##_##level
#define REPRISE_JOIN(name, level) REPRISE_JOIN2(name, level)
// The exported name of a kernel: reprise_linear_avx512 …
#define REPRISE_EXPORT(name) extern "C" __attribute__((visibility("default"))) void REPRISE_JOIN(name, LEVEL)
#define INLINE static inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));

// bfloat16 is the upper half of a float32.
struct bf16 {
    uint16_t bits;
};

INLINE vf splat(float value) { return value - vf{}; }

INLINE vf load(const float* from) {
    vf out;
    memcpy(&out, from, sizeof out);
    return out;
}

INLINE vf load(const bf16* from) {
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return (vf)_mm512_slli_epi32(wide, 16);
#elif defined(__AVX2__)
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
    return (vf)_mm256_slli_epi32(wide, 16);
#else
    typedef uint16_t half __attribute__((vector_size(VL * 2)));
    typedef uint32_t whole __attribute__((vector_size(VL * 4)));
    half bits;
    memcpy(&bits, from, sizeof bits);
    return (vf)(__builtin_convertvector(bits, whole) << 16);
#endif
}

INLINE float widen(float value) { return value; }

INLINE float widen(bf16 value) {
    const uint32_t bits = (uint32_t)value.bits << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

INLINE void store(float* to, vf value) { memcpy(to, &value, sizeof value); }

INLINE void narrow(float value, float* to) { *to = value; }

// To nearest, ties to even, as torch rounds; a NaN stays one.
INLINE void narrow(float value, bf16* to) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    to->bits = value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Exchanges rows and columns of a square of vectors, by halves of halves (Eklundh 1972).
template <int STEP>
INLINE void transpose_from(vf* rows) {
    vi low, high;
    for (int i = 0; i < VL; i++) {
        low[i] = i & STEP ? i - STEP + VL : i;
        high[i] = i & STEP ? i + VL : i + STEP;
    }
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) {
        if (i & STEP) continue;
        const vf a = rows[i], b = rows[i + STEP];
        rows[i] = __builtin_shuffle(a, b, low);
        rows[i + STEP] = __builtin_shuffle(a, b, high);
    }
    if constexpr (STEP > 1) transpose_from<STEP / 2>(rows);
}

INLINE void transpose(vf* rows) { transpose_from<VL / 2>(rows); }

INLINE vf maximum(vf a, vf b) { return a > b ? a : b; }

INLINE float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int width = VL / 2; width; width /= 2) {
        vf shifted = {};
        for (int i = 0; i < width; i++) shifted[i] = v[i + width];
        v += shifted;
    }
    total = v[0];
    return total;
#endif
}

INLINE float largest(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < VL; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// e to the x with a relative error below 2e-7 (Cephes' expf: range reduction by ln 2, a polynomial of degree 5 on the
// rest). Below -87 the result is 0, above 88 it is that of 88.
INLINE vf exponential(vf x) {
    const vi underflow = x < splat(-87.0f);
    x = x > splat(88.0f) ? splat(88.0f) : x;
    x = underflow ? splat(-87.0f) : x;
    const vf magic = splat(12582912.0f);  // adding it rounds to an integer
    const vf n = (x * splat(1.44269504f) + magic) - magic;
    vf r = x - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    p = p * (vf)exponent;
    return underflow ? vf{} : p;
}
