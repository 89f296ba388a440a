// Dot products of a block of weight rows (or keys) with a tile of activation rows (or queries).
#pragma once

#include "simd.h"

namespace {

// Weight rows a block, and the most activation rows a tile: the sums of a tile fill the vector registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int BLOCK = 4, TILE = 6;
#else
constexpr int BLOCK = 2, TILE = 6;
#endif
// Bytes read ahead of the weights when they stream from memory.
constexpr long AHEAD = 1024;

INLINE long least(long a, long b) { return a < b ? a : b; }

// The sum over the lanes of each of B vectors.
template <int B>
INLINE void sums_of(const vf* v, float* sums) {
#if defined(__AVX512F__)
    static_assert(B == 4, "");
    // Four at once: interleave and add until every quarter of a vector holds a part of all four sums.
    const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
    for (int b = 0; b < B; b++) sums[b] = sum(v[b]);
#endif
}

template <class W, int B, int R>
INLINE void dots(const W* const* w, const float* x, long x_stride, long inputs, float sums[TILE][BLOCK]) {
    vf acc[R][B] = {};
    long k = 0;
    for (; k + VL <= inputs; k += VL) {
        vf weight[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) {
            if (R <= 2) __builtin_prefetch((const char*)(w[b] + k) + AHEAD);
            weight[b] = load(w[b] + k);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const vf value = load(x + r * x_stride + k);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) acc[r][b] += weight[b] * value;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums_of<B>(acc[r], sums[r]);
    for (; k < inputs; k++)
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) sums[r][b] += widen(w[b][k]) * x[r * x_stride + k];
}

template <class W, int B>
static void dots_of(int rows, const W* const* w, const float* x, long x_stride, long inputs,
                    float sums[TILE][BLOCK]) {
    switch (rows) {
        case 1: return dots<W, B, 1>(w, x, x_stride, inputs, sums);
        case 2: return dots<W, B, 2>(w, x, x_stride, inputs, sums);
        case 3: return dots<W, B, 3>(w, x, x_stride, inputs, sums);
        case 4: return dots<W, B, 4>(w, x, x_stride, inputs, sums);
        case 5: return dots<W, B, 5>(w, x, x_stride, inputs, sums);
        case 6: return dots<W, B, 6>(w, x, x_stride, inputs, sums);
    }
}

}  // namespace
