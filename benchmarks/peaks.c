// What one core can do at best, to hold a profile against. Compiled by step_profile.py for the machine it runs on.
// Twelve independent chains: enough to hide the latency of a multiply-add on the processors of today.
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

enum { CHAINS = 12, FLOATS = 16, AHEAD = 2048 };
typedef float vec __attribute__((vector_size(4 * FLOATS)));

static float total(const vec* sums, int count) {
    float all = 0;
    for (int i = 0; i < count; i++)
        for (int j = 0; j < FLOATS; j++) all += sums[i][j];
    return all;
}

// A round is 2 * CHAINS * FLOATS operations.
float float32_rounds(long rounds, float factor) {
    vec sums[CHAINS];
    for (int i = 0; i < CHAINS; i++) sums[i] = factor * i - (vec){0};  // no two alike: those would be computed once
    const vec x = factor - (vec){0};
    for (long r = 0; r < rounds; r++)
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sums[i] = sums[i] * x + x;
    return total(sums, CHAINS);
}

// A round is 4 * CHAINS * FLOATS operations. -1 where the processor has no bfloat16 dot product.
float bfloat16_rounds(long rounds, float factor) {
#ifdef __AVX512BF16__
    __m512 sums[CHAINS];
    for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_set1_ps(factor * i);
    const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(factor), _mm512_set1_ps(factor));
    for (long r = 0; r < rounds; r++)
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], x, x);
    return total((const vec*)sums, CHAINS);
#else
    return -1;
#endif
}

// Reads all of `count` floats, a multiple of 4 * FLOATS, asking for them some KiB ahead.
float read_all(const float* from, long count) {
    vec sums[4] = {0};
    for (long at = 0; at < count; at += 4 * FLOATS)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __builtin_prefetch(from + at + i * FLOATS + AHEAD, 0, 2);
            sums[i] += *(const vec*)(from + at + i * FLOATS);
        }
    return total(sums, 4);
}
