// Attention over the paged pool, read in place: the softmax is accumulated over pieces of keys (online softmax, Milakov
// and Gimelshein 2018; tiled as in FlashAttention, Dao et al. 2022), so no score matrix and no copy of a request's KV
// exists. Scores, weights and sums are float32.
//
// A piece of work is one key/value head and a few rows: the queries, of all heads that share the key head, of
// consecutive tokens of one request. Up to TILE rows (decoding) the keys are taken as they lie, each once, and memory
// is the bound. More rows take a piece of keys transposed and widened in a buffer, and arithmetic is the bound.
//
// Requests that begin with the same blocks may name that prefix as shared: its keys are then read once for the queries
// of all of them, and each goes on from there with its own (cascade attention; the state of an online softmax, sums,
// maximum and total, is what merging by log-sum-exp would compute).
#include <stdlib.h>

#include "dots.h"

namespace {

constexpr long KEYS = 64;       // keys a piece
constexpr long ROWS = 128;      // most rows a piece of work
constexpr float NONE = -__builtin_inff();
// Elements below which a second thread costs more than it saves.
constexpr long SERIAL = 16384;

// Vectors of columns that a tile of a product holds, besides its TILE rows.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int COLUMNS = 4;
#else
constexpr int COLUMNS = 2;
#endif

struct Task {
    const float* q;
    long q_token, q_head;  // strides of q, in elements; the elements of a head are dense
    const void *key, *value;
    long block_size, kv_heads, group, head_size;
    const int* table;
    long table_stride;
    float scale;
    long window;  // 0: none
    float* out;   // (tokens, heads, head_size), dense
    // Of rows whose prefix is shared: `sums` in natural order, `most`, `total`, for each (token, head).
    float* state;
    long state_stride;
};

struct SharedPrefix {
    int64_t first, count;  // its requests are members[first], … members[first + count - 1]
    int64_t keys;          // every one of their queries comes after these
};

struct Piece {
    int request, kv_head;    // whose block table holds the keys
    const long* token_list;  // tokens of the step; null: consecutive ones from first_token
    long first_token, tokens;
    long first_position;  // of the first token in its sequence
    long skip;            // keys before these are in the state already
    long shared;          // keys of a shared prefix, all of them visible, whose state is kept; 0: to the end
};

INLINE long round_up(long value, long to) { return (value + to - 1) / to * to; }

// Memory for one piece of work, kept by its thread.
struct Scratch {
    float *query, *scores, *keys, *values, *sums, *most, *total;
    long stride;  // of a row of `query`, `values`, `sums`: the head size rounded up to whole vectors
};

INLINE Scratch scratch_of(long head_size) {
    static thread_local float* memory = nullptr;
    static thread_local long size = 0;
    const long stride = round_up(head_size, VL);
    const long needed = ROWS * stride * 2 + ROWS * KEYS + KEYS * stride * 2 + ROWS * 2;
    if (needed > size) {
        free(memory);
        memory = (float*)aligned_alloc(64, (size_t)round_up(needed * 4, 64));
        if (!memory) abort();
        size = needed;
    }
    Scratch s;
    s.stride = stride;
    s.query = memory;
    s.sums = s.query + ROWS * stride;
    s.scores = s.sums + ROWS * stride;
    s.keys = s.scores + ROWS * KEYS;
    s.values = s.keys + KEYS * stride;
    s.most = s.values + KEYS * stride;
    s.total = s.most + ROWS;
    return s;
}

// c (R, N vectors) = or += a (R, inner) times b (inner, N vectors).
template <int R, int N>
INLINE void product_tile(const float* a, long a_stride, const float* b, long b_stride, long inner, float* c,
                         long c_stride, bool add) {
    vf acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) acc[r][n] = add ? load(c + r * c_stride + n * VL) : vf{};
    for (long k = 0; k < inner; k++) {
        vf column[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) column[n] = load(b + k * b_stride + n * VL);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const vf value = splat(a[r * a_stride + k]);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) acc[r][n] += value * column[n];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(c + r * c_stride + n * VL, acc[r][n]);
}

template <int N>
static void product_rows(long rows, const float* a, long a_stride, const float* b, long b_stride, long inner, float* c,
                         long c_stride, bool add) {
    long r = 0;
    for (; r + TILE <= rows; r += TILE)
        product_tile<TILE, N>(a + r * a_stride, a_stride, b, b_stride, inner, c + r * c_stride, c_stride, add);
    a += r * a_stride;
    c += r * c_stride;
    switch (rows - r) {
        case 1: return product_tile<1, N>(a, a_stride, b, b_stride, inner, c, c_stride, add);
        case 2: return product_tile<2, N>(a, a_stride, b, b_stride, inner, c, c_stride, add);
        case 3: return product_tile<3, N>(a, a_stride, b, b_stride, inner, c, c_stride, add);
        case 4: return product_tile<4, N>(a, a_stride, b, b_stride, inner, c, c_stride, add);
        case 5: return product_tile<5, N>(a, a_stride, b, b_stride, inner, c, c_stride, add);
    }
}

// `columns` is a number of whole vectors, in elements.
static void product(long rows, const float* a, long a_stride, const float* b, long b_stride, long inner, float* c,
                    long c_stride, long columns, bool add) {
    long n = 0;
    for (; n + COLUMNS * VL <= columns; n += COLUMNS * VL)
        product_rows<COLUMNS>(rows, a, a_stride, b + n, b_stride, inner, c + n, c_stride, add);
    for (; n < columns; n += VL) product_rows<1>(rows, a, a_stride, b + n, b_stride, inner, c + n, c_stride, add);
}

// Where the keys and values of some consecutive positions of one request and key head lie.
template <class W>
struct Located {
    const W *key[KEYS], *value[KEYS];
    long count;
};

template <class W>
INLINE void locate(const Task& t, const int* table, long kv_head, long start, long end, Located<W>* out) {
    out->count = least(KEYS, end - start);
    long block = start / t.block_size, slot = start % t.block_size;
    for (long k = 0; k < out->count; k++) {
        const long at = (((long)table[block] * t.block_size + slot) * t.kv_heads + kv_head) * t.head_size;
        out->key[k] = (const W*)t.key + at;
        out->value[k] = (const W*)t.value + at;
        if (++slot == t.block_size) {
            slot = 0;
            block++;
        }
    }
}

// Those of one head lie apart from each other, which the processor does not foresee.
template <class W>
INLINE void prefetch(const Task& t, const Located<W>& located) {
    const long bytes = t.head_size * (long)sizeof(W);
    for (long k = 0; k < located.count; k++)
        for (long line = 0; line < bytes; line += 64) {
            __builtin_prefetch((const char*)located.key[k] + line, 0, 2);
            __builtin_prefetch((const char*)located.value[k] + line, 0, 2);
        }
}

INLINE long first_visible(const Task& t, long position) {
    return t.window && position >= t.window ? position - t.window + 1 : 0;
}

// Turns the scores of one row and piece into weights; returns what the row's earlier sums are to be multiplied by.
INLINE float soften(float* scores, long count, float* most, float* total) {
    vf high = splat(NONE);
    for (long i = 0; i < count; i += VL) high = maximum(high, load(scores + i));
    const float before = *most, now = largest(high) > before ? largest(high) : before;
    if (now == NONE) {
        for (long i = 0; i < count; i += VL) store(scores + i, vf{});
        return 1.0f;
    }
    vf added = {};
    for (long i = 0; i < count; i += VL) {
        const vf weight = exponential(load(scores + i) - splat(now));
        store(scores + i, weight);
        added += weight;
    }
    const float factor = before == NONE ? 0.0f : exponential(splat(before - now))[0];
    *most = now;
    *total = *total * factor + sum(added);
    return factor;
}

// sums (R, head) += weights (R, count) times the values as they lie.
template <class W, int R>
static void add_values(const W* const* value, long count, const float* weights, float* sums, long stride,
                       long head_size) {
    constexpr int N = R <= 2 ? 4 : 2;
    long n = 0;
    for (; n + N * VL <= head_size; n += N * VL) {
        vf acc[R][N];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < N; i++) acc[r][i] = load(sums + r * stride + n + i * VL);
        for (long k = 0; k < count; k++) {
            vf column[N];
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) column[i] = load(value[k] + n + i * VL);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const vf weight = splat(weights[r * KEYS + k]);
#pragma GCC unroll 4
                for (int i = 0; i < N; i++) acc[r][i] += weight * column[i];
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < N; i++) store(sums + r * stride + n + i * VL, acc[r][i]);
    }
    for (; n < head_size; n++)
        for (int r = 0; r < R; r++) {
            float total = sums[r * stride + n];
            for (long k = 0; k < count; k++) total += weights[r * KEYS + k] * widen(value[k][n]);
            sums[r * stride + n] = total;
        }
}

template <class W>
static void add_values_of(long rows, const W* const* value, long count, const float* weights, float* sums, long stride,
                          long head_size) {
    switch (rows) {
        case 1: return add_values<W, 1>(value, count, weights, sums, stride, head_size);
        case 2: return add_values<W, 2>(value, count, weights, sums, stride, head_size);
        case 3: return add_values<W, 3>(value, count, weights, sums, stride, head_size);
        case 4: return add_values<W, 4>(value, count, weights, sums, stride, head_size);
        case 5: return add_values<W, 5>(value, count, weights, sums, stride, head_size);
        case 6: return add_values<W, 6>(value, count, weights, sums, stride, head_size);
    }
}

template <class W>
static void scores_few(const Task& t, const Scratch& s, const W* const* key, long count, long rows) {
    for (long k = 0; k < count; k += BLOCK) {
        const W* block[BLOCK];
        const long keys = least(BLOCK, count - k);
        for (int b = 0; b < BLOCK; b++) block[b] = key[k + (b < keys ? b : 0)];
        float sums[TILE * BLOCK];
        dots_of<W, BLOCK>((int)rows, block, s.query, s.stride, t.head_size, 0, sums);
        for (long r = 0; r < rows; r++)
            for (long b = 0; b < keys; b++) s.scores[r * KEYS + k + b] = sums[r * BLOCK + b];
    }
}

// The piece's keys transposed to (head, KEYS), the values to (KEYS, stride), both float32.
template <class W>
static void widen_piece(const Task& t, const Scratch& s, const W* const* key, const W* const* value, long count) {
    const long whole = round_up(count, VL);
    long h = 0;
    for (; h + VL <= t.head_size; h += VL)
        for (long k = 0; k < whole; k += VL) {
            vf square[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) square[i] = k + i < count ? load(key[k + i] + h) : vf{};
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) store(s.keys + (h + i) * KEYS + k, square[i]);
        }
    for (; h < t.head_size; h++)
        for (long k = 0; k < whole; k++) s.keys[h * KEYS + k] = k < count ? widen(key[k][h]) : 0.0f;
    for (long k = 0; k < count; k++) {
        for (h = 0; h + VL <= t.head_size; h += VL) store(s.values + k * s.stride + h, load(value[k] + h));
        for (; h < s.stride; h++) s.values[k * s.stride + h] = h < t.head_size ? widen(value[k][h]) : 0.0f;
    }
}

template <class W>
static void attend(const Task& t, const Piece& piece) {
    const Scratch s = scratch_of(t.head_size);
    const int* table = t.table + piece.request * t.table_stride;
    const long rows = piece.tokens * t.group;
    const bool few = rows <= TILE;
    // Of row r, in elements of (tokens, heads).
    const auto place = [&](long r) INLINE_LAMBDA {
        const long token = piece.token_list ? piece.token_list[r / t.group] : piece.first_token + r / t.group;
        return token * t.kv_heads * t.group + piece.kv_head * t.group + r % t.group;
    };
    for (long r = 0; r < rows; r++) {
        const long token = place(r) / (t.kv_heads * t.group), head = place(r) % (t.kv_heads * t.group);
        const float* q = t.q + token * t.q_token + head * t.q_head;
        if (few)
            ordered<W>(q, t.head_size, t.scale, s.query + r * s.stride);
        else
            for (long h = 0; h < t.head_size; h++) s.query[r * s.stride + h] = q[h] * t.scale;
        if (piece.skip) {
            const float* state = t.state + place(r) * t.state_stride;
            memcpy(s.sums + r * s.stride, state, (size_t)s.stride * sizeof(float));
            s.most[r] = state[s.stride];
            s.total[r] = state[s.stride + 1];
        } else {
            for (long h = 0; h < s.stride; h++) s.sums[r * s.stride + h] = 0.0f;
            s.most[r] = NONE;
            s.total[r] = 0.0f;
        }
    }
    const long last = piece.shared ? piece.shared - 1 : piece.first_position + piece.tokens - 1;
    const long visible = piece.shared ? 0 : first_visible(t, piece.first_position);
    long start = visible > piece.skip ? visible : piece.skip;
    Located<W> located[2];
    locate<W>(t, table, piece.kv_head, start, last + 1, &located[0]);
    for (int now = 0; start <= last; now = 1 - now) {
        const W *const *key = located[now].key, *const *value = located[now].value;
        const long count = located[now].count;
        locate<W>(t, table, piece.kv_head, start + count, last + 1, &located[1 - now]);
        prefetch<W>(t, located[1 - now]);
        if (few) {
            scores_few<W>(t, s, key, count, rows);
        } else {
            widen_piece<W>(t, s, key, value, count);
            product(rows, s.query, s.stride, s.keys, KEYS, t.head_size, s.scores, KEYS, round_up(count, VL), false);
        }
        const long whole = round_up(count, VL);
        for (long r = 0; r < rows; r++) {
            float* scores = s.scores + r * KEYS;
            if (!piece.shared) {
                const long position = piece.first_position + r / t.group;
                const long hidden = first_visible(t, position) - start;
                for (long k = 0; k < hidden && k < count; k++) scores[k] = NONE;
                for (long k = position < start ? 0 : position - start + 1; k < whole; k++) scores[k] = NONE;
            }
            for (long k = count; k < whole; k++) scores[k] = NONE;
            const float factor = soften(scores, whole, s.most + r, s.total + r);
            if (factor != 1.0f)
                for (long h = 0; h < s.stride; h += VL)
                    store(s.sums + r * s.stride + h, load(s.sums + r * s.stride + h) * factor);
        }
        if (few)
            add_values_of<W>(rows, value, count, s.scores, s.sums, s.stride, t.head_size);
        else
            product(rows, s.scores, KEYS, s.values, s.stride, count, s.sums, s.stride, s.stride, true);
        start += count;
    }
    for (long r = 0; r < rows; r++) {
        const float* sums = s.sums + r * s.stride;
        if (piece.shared) {
            float* state = t.state + place(r) * t.state_stride;
            memcpy(state, sums, (size_t)s.stride * sizeof(float));
            state[s.stride] = s.most[r];
            state[s.stride + 1] = s.total[r];
        } else {
            float* out = t.out + place(r) * t.head_size;
            const float inverse = 1.0f / s.total[r];
            for (long h = 0; h < t.head_size; h++) out[h] = sums[h] * inverse;
        }
    }
}

static void attend_all(const Task& t, const Piece* pieces, long count, int is_bf16, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long i = 0; i < count; i++) {
        if (is_bf16)
            attend<bf16>(t, pieces[i]);
        else
            attend<float>(t, pieces[i]);
    }
}

INLINE void* memory_for(long bytes) {
    void* memory = malloc((size_t)bytes + 1);
    if (!memory) abort();
    return memory;
}

template <class W>
static void write_rows(const float* from, long token_stride, long head_stride, const int64_t* slots, long tokens,
                       long heads, long head_size, W* pool, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * head_size >= SERIAL)
    for (long token = 0; token < tokens; token++)
        for (long head = 0; head < heads; head++) {
            const float* x = from + token * token_stride + head * head_stride;
            W* to = pool + (slots[token] * heads + head) * head_size;
            for (long h = 0; h < head_size; h++) narrow(x[h], to + h);
        }
}

}  // namespace

// Writes rows (tokens, heads, head_size) to their slots of a pool (slots, heads, head_size), rounded to its type.
REPRISE_EXPORT(reprise_write_kv)
(const float* from, long token_stride, long head_stride, const int64_t* slots, long tokens, long heads, long head_size,
 void* pool, int is_bf16, int threads) {
    if (is_bf16)
        write_rows(from, token_stride, head_stride, slots, tokens, heads, head_size, (bf16*)pool, threads);
    else
        write_rows(from, token_stride, head_stride, slots, tokens, heads, head_size, (float*)pool, threads);
}

// Causal attention of every request's `query_lens` last positions over its `kv_lens` keys. Pools are (blocks,
// block_size, kv_heads, head_size); `table` holds each request's block ids; q is strided, out dense, both by token and
// head. `window` 0 is none; with one, nothing may be shared. A request is a member of one shared prefix at most.
REPRISE_EXPORT(reprise_attention)
(const float* q, long q_token, long q_head, const void* key, const void* value, int is_bf16, long block_size,
 long kv_heads, long group, long head_size, const int* table, long table_stride, const int64_t* query_lens,
 const int64_t* kv_lens, long requests, float scale, long window, const SharedPrefix* shared, long num_shared,
 const int64_t* members, float* out, int threads) {
    Task task{q, q_token, q_head, key, value, block_size, kv_heads, group, head_size, table, table_stride,
              scale, window, out, nullptr, round_up(head_size, VL) + 2};
    const long most_tokens = ROWS / group > 0 ? ROWS / group : 1;
    long count = 0, tokens = 0;
    for (long r = 0; r < requests; r++) {
        count += (query_lens[r] + most_tokens - 1) / most_tokens * kv_heads;
        tokens += query_lens[r];
    }
    long* first_token = (long*)memory_for((requests + tokens) * (long)sizeof(long));
    long* skip = (long*)memory_for(requests * (long)sizeof(long));
    for (long r = 0, first = 0; r < requests; first += query_lens[r++]) {
        first_token[r] = first;
        skip[r] = 0;
    }
    Piece* pieces = (Piece*)memory_for(count * (long)sizeof(Piece));
    if (num_shared) {
        task.state = (float*)memory_for(tokens * kv_heads * group * task.state_stride * (long)sizeof(float));
        long* list = first_token + requests;
        long index = 0;
        for (long g = 0; g < num_shared; g++) {
            const int64_t* member = members + shared[g].first;
            long listed = 0;
            for (long m = 0; m < shared[g].count; m++) {
                skip[member[m]] = shared[g].keys;
                for (long i = 0; i < query_lens[member[m]]; i++) list[listed++] = first_token[member[m]] + i;
            }
            const long tiles = (listed + most_tokens - 1) / most_tokens;
            for (long tile = 0; tile < tiles; tile++)
                for (long head = 0; head < kv_heads; head++) {
                    const long begin = listed * tile / tiles, end = listed * (tile + 1) / tiles;
                    pieces[index++] = {(int)member[0], (int)head, list + begin, 0, end - begin, 0, 0, shared[g].keys};
                }
            list += listed;
        }
        attend_all(task, pieces, index, is_bf16, threads);
    }
    long index = 0;
    for (long r = 0; r < requests; r++) {
        const long tiles = (query_lens[r] + most_tokens - 1) / most_tokens;
        // The last tile sees the most keys: it begins first, so that the threads end together.
        for (long tile = tiles - 1; tile >= 0; tile--)
            for (long head = 0; head < kv_heads; head++) {
                const long begin = query_lens[r] * tile / tiles, end = query_lens[r] * (tile + 1) / tiles;
                pieces[index++] = {(int)r, (int)head, nullptr, first_token[r] + begin, end - begin,
                                   kv_lens[r] - query_lens[r] + begin, skip[r], 0};
            }
    }
    attend_all(task, pieces, index, is_bf16, threads);
    free(task.state);
    free(pieces);
    free(skip);
    free(first_token);
}
