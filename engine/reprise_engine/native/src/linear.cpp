// Linear layers over weights in their natural (out, in) layout, bfloat16 or float32, with float32 activations and sums.
//
// One kernel for every number of rows: a block of weight rows against a tile of activation rows, each pair summed in
// one vector along the input axis. So the sum of an output is the same, bit for bit, whichever rows share the batch.
// With one row the weights stream from memory once; with many, a block of activations stays in the second-level cache
// while the weights of a block stay in the first, and the tile is large enough to hide both behind the arithmetic.
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

// Rows [row, row + rows) of the outputs [first, end) of one part, which begin at `column` of the result.
template <class W>
static void run_part(const Task& t, const Part& part, long column, long first, long end, long row, long rows) {
    const long tiles = (rows + TILE - 1) / TILE;
    for (long o = first; o < end; o += BLOCK) {
        const int blocks = (int)least(BLOCK, end - o);
        const W* w[BLOCK];
        for (int b = 0; b < BLOCK; b++) w[b] = (const W*)part.weight + (o + (b < blocks ? b : 0)) * t.inputs;
        for (long tile = 0; tile < tiles; tile++) {
            const long begin = row + rows * tile / tiles, stop = row + rows * (tile + 1) / tiles;
            float sums[TILE][BLOCK];
            dots_of<W, BLOCK>((int)(stop - begin), w, t.x + begin * t.x_stride, t.x_stride, t.inputs, sums);
            for (long r = begin; r < stop; r++) {
                float* out = t.out + r * t.out_stride + column + o;
                for (int b = 0; b < blocks; b++) {
                    const float value = sums[r - begin][b] + (part.bias ? part.bias[o + b] : 0.0f);
                    out[b] = t.epilogue == ADD ? out[b] + value : value;
                }
            }
        }
    }
}

// silu(gate) * up: half of a block is rows of the gate's matrix, half the same rows of the other.
template <class W>
static void run_swiglu(const Task& t, long first, long end, long row, long rows) {
    constexpr int HALF = BLOCK / 2;
    const Part &gate = t.parts[0], &up = t.parts[1];
    const long tiles = (rows + TILE - 1) / TILE;
    for (long o = first; o < end; o += HALF) {
        const int pairs = (int)least(HALF, end - o);
        const W* w[BLOCK];
        for (int b = 0; b < HALF; b++) {
            const long at = (o + (b < pairs ? b : 0)) * t.inputs;
            w[b] = (const W*)gate.weight + at;
            w[HALF + b] = (const W*)up.weight + at;
        }
        for (long tile = 0; tile < tiles; tile++) {
            const long begin = row + rows * tile / tiles, stop = row + rows * (tile + 1) / tiles;
            float sums[TILE][BLOCK];
            float gates[TILE * BLOCK + VL] = {}, ups[TILE * BLOCK + VL] = {};
            dots_of<W, BLOCK>((int)(stop - begin), w, t.x + begin * t.x_stride, t.x_stride, t.inputs, sums);
            const int count = (int)(stop - begin);
            for (int r = 0; r < count; r++)
                for (int b = 0; b < HALF; b++) {
                    gates[r * HALF + b] = sums[r][b] + (gate.bias && b < pairs ? gate.bias[o + b] : 0.0f);
                    ups[r * HALF + b] = sums[r][HALF + b] + (up.bias && b < pairs ? up.bias[o + b] : 0.0f);
                }
            for (int i = 0; i < count * HALF; i += VL) {
                const vf g = load(gates + i);
                store(gates + i, g / (splat(1.0f) + exponential(-g)) * load(ups + i));
            }
            for (int r = 0; r < count; r++)
                for (int b = 0; b < pairs; b++) t.out[(begin + r) * t.out_stride + o + b] = gates[r * HALF + b];
        }
    }
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
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long item = 0; item < chunks * row_blocks; item++) {
        const long row = item / chunks * row_block, rows = least(row_block, t.rows - row);
        long index = item % chunks, column = 0;
        int p = 0;
        for (;; p++) {
            const long of_part = (t.parts[p].outputs + chunk - 1) / chunk;
            if (index < of_part) break;
            index -= of_part;
            column += t.parts[p].outputs;
        }
        const long first = index * chunk, end = least(first + chunk, t.parts[p].outputs);
        if (t.epilogue == SWIGLU)
            run_swiglu<W>(t, first, end, row, rows);
        else
            run_part<W>(t, t.parts[p], column, first, end, row, rows);
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
