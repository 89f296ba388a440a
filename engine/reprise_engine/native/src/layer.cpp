// One decoder layer of the Llama and Qwen definitions: norm, attention, norm, gated MLP, each half added to the
// residual stream. Nothing is computed here: it is the order of the other kernels, in one call instead of ten.
#include "simd.h"

struct Part;
struct SharedPrefix;

#define KERNEL(name) extern "C" void REPRISE_JOIN(name, LEVEL)

KERNEL(reprise_linear)
(const float* x, long rows, long x_stride, long inputs, const Part* parts, int num_parts, int is_bf16, int epilogue,
 float* out, long out_stride, int threads);
KERNEL(reprise_rms_norm)
(const float* x, const float* weight, float eps, long rows, long size, float* out, int threads);
KERNEL(reprise_rotary)
(float* x, long rows, long stride, long query_heads, long key_heads, long head_size, const float* query_norm,
 const float* key_norm, float eps, const float* cosine, const float* sine, long rotary_size, int threads);
KERNEL(reprise_write_kv)
(const float* from, long token_stride, long head_stride, const int64_t* slots, long tokens, long heads, long head_size,
 void* pool, int is_bf16, int threads);
KERNEL(reprise_attention)
(const float* q, long q_token, long q_head, const void* key, const void* value, int is_bf16, long block_size,
 long kv_heads, long group, long head_size, const int* table, long table_stride, const int64_t* query_lens,
 const int64_t* kv_lens, long requests, float scale, long window, const SharedPrefix* shared, long num_shared,
 const int64_t* members, float* out, int threads);

namespace {

enum Epilogue { STORE = 0, ADD = 1, SWIGLU = 2 };

// Fields as in native/layer.py.
struct Layer {
    const float *input_norm, *post_attention_norm, *query_norm, *key_norm;
    const Part *qkv, *output, *gate_up, *down;
    long hidden, heads, kv_heads, head_size, inner;  // inner 0: the MLP is not ours
    long window;
    float eps, scale;
    int is_bf16;
};

struct Step {
    const int64_t *slots, *query_lens, *kv_lens, *members;
    const int* table;
    const SharedPrefix* shared;
    const float *cosine, *sine;
    long tokens, requests, table_stride, num_shared, rotary_size, block_size;
};

}  // namespace

// Adds the layer's two halves to `residual` (tokens, hidden). `scratch` has room for tokens rows of hidden, and of the
// larger of inner, and of the queries, keys, values and the attention's output together.
REPRISE_EXPORT(reprise_layer)
(const Layer* layer, const Step* step, void* key, void* value, int kv_is_bf16, float* residual, float* scratch,
 int threads) {
    const Layer& l = *layer;
    const Step& s = *step;
    const long query = l.heads * l.head_size, kv = l.kv_heads * l.head_size, all = query + 2 * kv;
    float *normed = scratch, *rows = normed + s.tokens * l.hidden, *attended = rows + s.tokens * all;
    REPRISE_JOIN(reprise_rms_norm, LEVEL)(residual, l.input_norm, l.eps, s.tokens, l.hidden, normed, threads);
    REPRISE_JOIN(reprise_linear, LEVEL)
    (normed, s.tokens, l.hidden, l.hidden, l.qkv, 3, l.is_bf16, STORE, rows, all, threads);
    REPRISE_JOIN(reprise_rotary, LEVEL)
    (rows, s.tokens, all, l.heads, l.kv_heads, l.head_size, l.query_norm, l.key_norm, l.eps, s.cosine, s.sine,
     s.rotary_size, threads);
    REPRISE_JOIN(reprise_write_kv, LEVEL)
    (rows + query, all, l.head_size, s.slots, s.tokens, l.kv_heads, l.head_size, key, kv_is_bf16, threads);
    REPRISE_JOIN(reprise_write_kv, LEVEL)
    (rows + query + kv, all, l.head_size, s.slots, s.tokens, l.kv_heads, l.head_size, value, kv_is_bf16, threads);
    REPRISE_JOIN(reprise_attention, LEVEL)
    (rows, all, l.head_size, key, value, kv_is_bf16, s.block_size, l.kv_heads, l.heads / l.kv_heads, l.head_size,
     s.table, s.table_stride, s.query_lens, s.kv_lens, s.requests, l.scale, l.window, s.shared,
     l.window ? 0 : s.num_shared, s.members, attended, threads);
    REPRISE_JOIN(reprise_linear, LEVEL)
    (attended, s.tokens, query, query, l.output, 1, l.is_bf16, ADD, residual, l.hidden, threads);
    if (!l.inner) return;
    REPRISE_JOIN(reprise_rms_norm, LEVEL)
    (residual, l.post_attention_norm, l.eps, s.tokens, l.hidden, normed, threads);
    REPRISE_JOIN(reprise_linear, LEVEL)
    (normed, s.tokens, l.hidden, l.hidden, l.gate_up, 2, l.is_bf16, SWIGLU, rows, l.inner, threads);
    REPRISE_JOIN(reprise_linear, LEVEL)
    (rows, s.tokens, l.inner, l.inner, l.down, 1, l.is_bf16, ADD, residual, l.hidden, threads);
}
