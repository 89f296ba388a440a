// Root-mean-square norm, and the norm and rotation of queries and keys.
#include "simd.h"

namespace {

// Elements below which a second thread costs more than it saves.
constexpr long SERIAL = 16384;

INLINE void normed(const float* x, const float* weight, float eps, long size, float* out) {
    vf squares = {};
    long i = 0;
    for (; i + VL <= size; i += VL) {
        const vf value = load(x + i);
        squares += value * value;
    }
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    const float scale = 1.0f / __builtin_sqrtf(total / (float)size + eps);
    for (i = 0; i + VL <= size; i += VL) store(out + i, load(weight + i) * (load(x + i) * scale));
    for (; i < size; i++) out[i] = weight[i] * (x[i] * scale);
}

// The first `size` elements of a head, in two halves: each pair (i, i + size / 2) turned by its angle.
INLINE void rotated(float* x, const float* cosine, const float* sine, long size) {
    const long half = size / 2;
    long i = 0;
    for (; i + VL <= half; i += VL) {
        const vf a = load(x + i), b = load(x + half + i);
        store(x + i, a * load(cosine + i) - b * load(sine + i));
        store(x + half + i, b * load(cosine + half + i) + a * load(sine + half + i));
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[half + i] + a * sine[half + i];
    }
}

}  // namespace

// out (rows, size) = weight * x / sqrt(mean of squares + eps), row by row. Rows of both are dense.
REPRISE_EXPORT(reprise_rms_norm)
(const float* x, const float* weight, float eps, long rows, long size, float* out, int threads) {
    if (rows * size < SERIAL) {
        for (long r = 0; r < rows; r++) normed(x + r * size, weight, eps, size, out + r * size);
        return;
    }
#pragma omp parallel for num_threads(threads)
    for (long r = 0; r < rows; r++) normed(x + r * size, weight, eps, size, out + r * size);
}

// In place on rows that begin with `query_heads` and then `key_heads` heads of `head_size`: each head is normed, where
// the weights are given, and its first `rotary_size` elements are rotated by the row's cosines and sines.
REPRISE_EXPORT(reprise_rotary)
(float* x, long rows, long stride, long query_heads, long key_heads, long head_size, const float* query_norm,
 const float* key_norm, float eps, const float* cosine, const float* sine, long rotary_size, int threads) {
    const bool serial = rows * stride < SERIAL;
#pragma omp parallel for num_threads(threads) if (!serial)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < query_heads + key_heads; h++) {
            float* head = x + r * stride + h * head_size;
            const float* norm = h < query_heads ? query_norm : key_norm;
            if (norm) normed(head, norm, eps, head_size, head);
            rotated(head, cosine + r * rotary_size, sine + r * rotary_size, rotary_size);
        }
}
