// Linear layers over weights in their natural (out, in) layout, bfloat16 or float32, with float32 activations and sums.
//
// One kernel for every number of rows: a block of weight rows against a tile of activation rows, each pair summed in
// one vector along the input axis. So the sum of an output is the same, bit for bit, whichever rows share the batch.
// With few rows the weights stream from memory once, through one tile that takes all rows; with many, a block of
// activations stays in the second-level cache while the weights of a block stay in the first, and the tile is large
// enough to hide both behind the arithmetic.
#include <stdlib.h>

#include <type_traits>

#include "dots.h"

namespace {

// Bytes of activations a thread works on at once (half of a common second-level cache).
constexpr long ROWS_BYTES = 384 * 1024;
// Outputs a piece of work: large enough that the hand-out costs nothing, small enough that threads end together.
constexpr long CHUNK = 64;
struct Part {
    const void* weight;
    const float* bias;
    long outputs;
};

enum Epilogue { STORE = 0, ADD = 1, SWIGLU = 2 };

struct Task {
    const float* x;
    long rows, x_stride, inputs;
    const Part* parts;
    int num_parts;
    Epilogue epilogue;
    float* out;
    long out_stride;
};

// Some rows of the activations in the order of the weights, in this thread's own memory.
struct Rows {
    float* x;
    long stride, first, count;
};

INLINE float* memory_of(long floats) {
    static thread_local float* memory = nullptr;
    static thread_local long size = 0;
    if (floats > size) {
        free(memory);
        memory = (float*)aligned_alloc(64, (size_t)((floats * 4 + 63) / 64 * 64));
        if (!memory) abort();
        size = floats;
    }
    return memory;
}

template <class W>
static Rows take_rows(const Task& t, long first, long count) {
    // A vector more than the row, or rows would fall on the same lines of the cache.
    const long stride = (t.inputs + VL - 1) / VL * VL + VL;
    const Rows rows{memory_of(count * stride), stride, first, count};
    for (long r = 0; r < count; r++)
        ordered<W>(t.x + (first + r) * t.x_stride, t.inputs, 1.0f, rows.x + r * stride);
    return rows;
}

// Outputs [first, end) of one part, which begin at `column` of the result.
template <class W, int B>
INLINE void write_part(const Task& t, const Part& part, long column, long o, int blocks, long row, long rows,
                       const float* sums) {
    for (long r = 0; r < rows; r++) {
        float* out = t.out + (row + r) * t.out_stride + column + o;
        for (int b = 0; b < blocks; b++) {
            const float value = sums[r * B + b] + (part.bias ? part.bias[o + b] : 0.0f);
            out[b] = t.epilogue == ADD ? out[b] + value : value;
        }
    }
}

// silu(gate) * up: half of a block is rows of the gate's matrix, half the same rows of the other.
template <class W, int B>
INLINE void write_swiglu(const Task& t, long o, int pairs, long row, long rows, const float* sums) {
    constexpr int HALF = B / 2;
    const Part &gate = t.parts[0], &up = t.parts[1];
    float gates[TILE * BLOCK + VL] = {}, ups[TILE * BLOCK + VL] = {};
    for (long r = 0; r < rows; r++)
        for (int b = 0; b < HALF; b++) {
            gates[r * HALF + b] = sums[r * B + b] + (gate.bias && b < pairs ? gate.bias[o + b] : 0.0f);
            ups[r * HALF + b] = sums[r * B + HALF + b] + (up.bias && b < pairs ? up.bias[o + b] : 0.0f);
        }
    for (long i = 0; i < rows * HALF; i += VL) {
        const vf g = load(gates + i);
        store(gates + i, g / (splat(1.0f) + exponential(-g)) * load(ups + i));
    }
    for (long r = 0; r < rows; r++)
        for (int b = 0; b < pairs; b++) t.out[(row + r) * t.out_stride + o + b] = gates[r * HALF + b];
}

// All of `rows` against the outputs [first, end) of part `p`, B rows of weights at a time, `tiles` times.
template <class W, int B, class Dots>
INLINE void run_blocks(const Task& t, int p, long column, long first, long end, const Rows& rows, long tiles,
                       const Dots& dots_of_tile) {
    const bool swiglu = t.epilogue == SWIGLU;
    const int step = swiglu ? B / 2 : B;
    // The next block, by then the weights' way from memory is over.
    const long ahead = step * t.inputs * (long)sizeof(W);
    for (long o = first; o < end; o += step) {
        const int wanted = (int)least(step, end - o);
        const W* w[B];
        for (int b = 0; b < B; b++) {
            const int within = b % step;
            const Part& part = t.parts[swiglu && b >= step ? 1 : p];
            w[b] = (const W*)part.weight + (o + (within < wanted ? within : 0)) * t.inputs;
        }
        for (long tile = 0; tile < tiles; tile++) {
            const long begin = rows.count * tile / tiles, stop = rows.count * (tile + 1) / tiles;
            float sums[TILE * BLOCK];
            dots_of_tile((int)(stop - begin), w, rows.x + begin * rows.stride, tile == 0 ? ahead : 0, sums);
            if (swiglu)
                write_swiglu<W, B>(t, o, wanted, rows.first + begin, stop - begin, sums);
            else
                write_part<W, B>(t, t.parts[p], column, o, wanted, rows.first + begin, stop - begin, sums);
        }
    }
}

template <class W>
static void run_rows(const Task& t, int p, long column, long first, long end, const Rows& rows) {
    const auto one = [&](auto block) INLINE_LAMBDA {
        constexpr int B = decltype(block)::value;
        run_blocks<W, B>(t, p, column, first, end, rows, 1,
                         [&](int, const W* const* w, const float* x, long ahead, float* sums) INLINE_LAMBDA {
                             dots<W, 1, B>(w, x, rows.stride, t.inputs, ahead, sums);
                         });
    };
    // One row waits for the weights alone: as few streams as can be, which the processor then fetches by itself.
    if (rows.count == 1)
        return t.epilogue == SWIGLU ? one(std::integral_constant<int, 2>()) : one(std::integral_constant<int, 1>());
    run_blocks<W, BLOCK>(t, p, column, first, end, rows, (rows.count + TILE - 1) / TILE,
                         [&](int count, const W* const* w, const float* x, long ahead, float* sums) INLINE_LAMBDA {
                             dots_of<W, BLOCK>(count, w, x, rows.stride, t.inputs, ahead, sums);
                         });
}

template <class W>
static void run(const Task& t, int threads) {
    long row_block = ROWS_BYTES / (t.inputs * 4) / TILE * TILE;
    row_block = row_block < TILE ? TILE : row_block;
    const int parts = t.epilogue == SWIGLU ? 1 : t.num_parts;
    const long chunk = t.epilogue == SWIGLU ? CHUNK / 2 : CHUNK;
    long chunks = 0;
    for (int p = 0; p < parts; p++) chunks += (t.parts[p].outputs + chunk - 1) / chunk;
    const long row_blocks = (t.rows + row_block - 1) / row_block;
#pragma omp parallel num_threads(threads)
    {
        Rows rows{nullptr, 0, -1, 0};
#pragma omp for schedule(dynamic)
        for (long item = 0; item < chunks * row_blocks; item++) {
            const long row = item / chunks * row_block;
            if (rows.first != row) rows = take_rows<W>(t, row, least(row_block, t.rows - row));
            long index = item % chunks, column = 0;
            int p = 0;
            for (;; p++) {
                const long of_part = (t.parts[p].outputs + chunk - 1) / chunk;
                if (index < of_part) break;
                index -= of_part;
                column += t.parts[p].outputs;
            }
            const long first = index * chunk;
            run_rows<W>(t, p, column, first, least(first + chunk, t.parts[p].outputs), rows);
        }
    }
}

}  // namespace

// out (rows, sum of outputs) = x (rows, inputs) times each part's weight (outputs, inputs) transposed, plus its bias.
// `epilogue` ADD adds to what `out` holds; SWIGLU takes two parts of equal size, gate and up, and writes
// silu(gate) * up of shape (rows, outputs). Strides are in elements between rows; rows themselves are dense.
REPRISE_EXPORT(reprise_linear)
(const float* x, long rows, long x_stride, long inputs, const Part* parts, int num_parts, int is_bf16, int epilogue,
 float* out, long out_stride, int threads) {
    const Task task{x, rows, x_stride, inputs, parts, num_parts, (Epilogue)epilogue, out, out_stride};
    if (is_bf16)
        run<bf16>(task, threads);
    else
        run<float>(task, threads);
}
