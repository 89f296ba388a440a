// Dot products of a block of weight rows (or keys) with a tile of activation rows (or queries).
//
// bfloat16 is widened in pairs: 2·VL of them are one load, of which a shift gives those at even places and a mask those
// at odd ones. The activations they meet are put in that order beforehand (`ordered`).
#pragma once

#include "simd.h"

namespace {

// Weight rows a block, and the most activation rows a tile: the sums of a tile fill the vector registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int BLOCK = 4, TILE = 6;
#else
constexpr int BLOCK = 2, TILE = 6;
#endif

INLINE long least(long a, long b) { return a < b ? a : b; }

// The first `count` of a vector, the rest zeros.
template <class W>
INLINE vf load_first(const W* from, long count) {
    if (count >= VL) return load(from);
    W part[VL] = {};
    memcpy((void*)part, from, (size_t)count * sizeof(W));
    return load(part);
}

INLINE void load_pair(const float* from, vf* pair) {
    pair[0] = load(from);
    pair[1] = load(from + VL);
}

INLINE void load_pair(const bf16* from, vf* pair) {
    vi bits;
    memcpy(&bits, from, sizeof bits);
    pair[0] = (vf)(bits << 16);
    pair[1] = (vf)(bits & (int32_t)0xffff0000);
}

INLINE void order_pair(const float*, const float* x, float* out) {
    store(out, load(x));
    store(out + VL, load(x + VL));
}

INLINE void order_pair(const bf16*, const float* x, float* out) {
    vi even, odd;
    for (int i = 0; i < VL; i++) {
        even[i] = 2 * i;
        odd[i] = 2 * i + 1;
    }
    const vf a = load(x), b = load(x + VL);
    store(out, __builtin_shuffle(a, b, even));
    store(out + VL, __builtin_shuffle(a, b, odd));
}

// `count` activations times `factor` in the order in which `dots` meets weights of type W, and zeros to a whole vector.
template <class W>
INLINE void ordered(const float* x, long count, float factor, float* out) {
    long k = 0;
    for (; k + 2 * VL <= count; k += 2 * VL) {
        order_pair((const W*)nullptr, x + k, out + k);
        if (factor != 1.0f) {
            store(out + k, load(out + k) * factor);
            store(out + k + VL, load(out + k + VL) * factor);
        }
    }
    for (; k < count; k++) out[k] = x[k] * factor;
    for (; k % VL; k++) out[k] = 0.0f;
}

// The sum over the lanes of each of N vectors, whichever their places, in the same order.
template <int N>
INLINE void sums_of(const vf* v, float* sums) {
#if defined(__AVX512F__)
#pragma GCC unroll 8
    for (int i = 0; i < N; i += 4) {
        // Four at once: interleave and add until every quarter of a vector holds a part of all four sums.
        const __m512 a = (__m512)v[i], b = i + 1 < N ? (__m512)v[i + 1] : a;
        const __m512 c = i + 2 < N ? (__m512)v[i + 2] : a, d = i + 3 < N ? (__m512)v[i + 3] : a;
        const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
        float four[4];
        _mm_storeu_ps(four, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
        for (int j = 0; j < 4 && i + j < N; j++) sums[i + j] = four[j];
    }
#else
    for (int i = 0; i < N; i++) sums[i] = sum(v[i]);
#endif
}

// sums (R, B) of R rows of x, `ordered` and x_stride apart, with B rows of weights. `ahead` bytes beyond the weights
// are asked for where they stream from memory; 0 asks for nothing.
template <class W, int R, int B>
INLINE void dots(const W* const* w, const float* x, long x_stride, long inputs, long ahead, float* sums) {
    vf acc[R * B] = {};
    long k = 0;
    for (; k + 2 * VL <= inputs; k += 2 * VL) {
        vf pair[B][2];
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) {
            // Into the second-level cache: it waits for more lines at once than the first one can.
            if (R <= 2 * TILE && ahead)
                for (long line = 0; line < (long)(2 * VL * sizeof(W)); line += 64)
                    __builtin_prefetch((const char*)(w[b] + k) + ahead + line, 0, 2);
            load_pair(w[b] + k, pair[b]);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const vf value = load(x + r * x_stride + k + half * VL);
#pragma GCC unroll 8
                for (int b = 0; b < B; b++) acc[r * B + b] += pair[b][half] * value;
            }
    }
    for (; k < inputs; k += VL)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) {
            const vf weight = load_first(w[b] + k, inputs - k);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) acc[r * B + b] += weight * load(x + r * x_stride + k);
        }
    sums_of<R * B>(acc, sums);
}

// `dots` for a number of rows, up to TILE, that is known at run time.
template <class W, int B>
static void dots_of(int rows, const W* const* w, const float* x, long x_stride, long inputs, long ahead, float* sums) {
    switch (rows) {
        case 1: return dots<W, 1, B>(w, x, x_stride, inputs, ahead, sums);
        case 2: return dots<W, 2, B>(w, x, x_stride, inputs, ahead, sums);
        case 3: return dots<W, 3, B>(w, x, x_stride, inputs, ahead, sums);
        case 4: return dots<W, 4, B>(w, x, x_stride, inputs, ahead, sums);
        case 5: return dots<W, 5, B>(w, x, x_stride, inputs, ahead, sums);
        case 6: return dots<W, 6, B>(w, x, x_stride, inputs, ahead, sums);
    }
}

}  // namespace
