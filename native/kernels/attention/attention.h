// Grouped-query attention over paged KV, one span at a time.
//
// A page holds 32 tokens of one KV head of one layer ("page block"):
//   K codes   [head_dim / 2][32 tokens][2]     pair-interleaved by token
//   V codes   [16 token pairs][head_dim][2]    pair-interleaved by dimension
//   all but bf16: k_scale float32 [32], v_scale float32 [32]
//   formats that keep the first token: bf16 [head_dim] K and bf16 [head_dim] V of slot 0, which
//   replace its codes in the first page of a request and mean nothing in others
// Codes are bf16 (uint16), int8, e4m3 or 4 bits: code + 8, the first of a pair in the low nibble; V
// is then [32 tokens][head_dim / 2] pairs of dimensions, so that no two tokens share a byte.
// head_dim is even. Blocks are 64-byte aligned.
//
// A span is 256 keys at absolute positions, 8 pages. span() gives one span's maximum score m, sum l
// of exp(score - m) and the unnormalized output o for several query vectors of one KV head; merge()
// adds a span to those before it (in ascending order) and finish() divides. Numerics: HACKING.md.
#pragma once
#include <cstddef>
#include <cstdint>

namespace trivet {

inline constexpr int32_t kPageTokens = 32;
inline constexpr int32_t kSpanTokens = 256;
inline constexpr int32_t kSpanPages = kSpanTokens / kPageTokens;

// A format that keeps the first token in bf16 is that of its codes plus 4.
enum class KvKind : int32_t {
    kBf16 = 0,
    kInt8 = 1,
    kFp8 = 2,
    kInt4 = 3,
    kInt8First = 5,
    kFp8First = 6,
    kInt4First = 7,
};

// Static, not inline: level files export nothing but their tables.
static constexpr bool is_kv_kind(int32_t value) { return value >= 0 && value < 8 && value != 4; }
static constexpr bool keeps_first(KvKind kind) { return static_cast<int32_t>(kind) > 4; }
// The kind without the first token.
static constexpr KvKind code_kind(KvKind kind) {
    return static_cast<KvKind>(static_cast<int32_t>(kind) & 3);
}
// Whether K and the query are rotated by the block Hadamard before they are rounded.
static constexpr bool rotates_k(KvKind kind) { return code_kind(kind) == KvKind::kInt4; }

// Offsets of the parts of a page block, and its size, in bytes.
struct PageBlock {
    int64_t v, k_scale, v_scale, first, bytes;
};

static constexpr PageBlock page_block(KvKind kind, int32_t head_dim) {
    const KvKind code = code_kind(kind);
    const int64_t bits = code == KvKind::kBf16 ? 16 : code == KvKind::kInt4 ? 4 : 8;
    const int64_t codes = int64_t{kPageTokens} * head_dim * bits / 8;
    const int64_t scales = code == KvKind::kBf16 ? 0 : kPageTokens * 4;
    const int64_t first = 2 * codes + 2 * scales;
    const int64_t bytes = first + (keeps_first(kind) ? int64_t{4} * head_dim : 0);
    return {codes, 2 * codes, 2 * codes + scales, first, (bytes + 63) / 64 * 64};
}

struct SpanTask {
    const uint16_t* q;  // bf16 [num_rows * group][head_dim]: row by row, the heads of one KV head
    int32_t num_rows;   // consecutive positions of one request
    int32_t group;      // query heads per KV head
    int32_t head_dim;
    const int32_t* valid;  // [num_rows] keys of this span each row sees, 1..256, never falling
    const uint8_t* const* pages;  // page blocks of the span, ceil(valid[num_rows - 1] / 32) of them
    const uint8_t* const* next_pages;  // page blocks that this thread reads after these
    int32_t num_next;
    KvKind kind;
    bool is_first;   // the span begins at position 0
    float sm_scale;  // 1 / sqrt(head_dim)
    float* scratch;  // span_scratch_floats(num_rows * group, head_dim), 64-byte aligned
    float* m;        // [num_rows * group]
    float* l;        // [num_rows * group]
    float* o;        // [num_rows * group][head_dim]
};

// The largest need of any level, in floats.
static constexpr int64_t span_scratch_floats(int32_t num_q, int32_t head_dim) {
    const int64_t q_padded = (num_q + 15) / 16 * 16, dims = (head_dim + 31) / 32 * 32;
    return q_padded * (kSpanTokens + 2 * dims + kSpanTokens / 2) + 2 * kSpanTokens +
           int64_t{kSpanTokens} * dims + 64;
}

struct AttentionKernels {
    void (*span)(const SpanTask& task);
    // (m, l, o) of num_q vectors takes in (m2, l2, o2), which lies after it.
    void (*merge)(int32_t num_q, int32_t head_dim, const float* m2, const float* l2,
                  const float* o2, float* m, float* l, float* o);
    // out[i * out_stride + d] = o[i][d] / l[i].
    void (*finish)(int32_t num_q, int32_t head_dim, const float* l, const float* o, float* out,
                   ptrdiff_t out_stride);
};

namespace generic {
extern const AttentionKernels attention_kernels;
}
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}
namespace amx {
extern const AttentionKernels attention_kernels;
}

// Writes one token's K and V of one head into slot [0, 32) of a page block. k, v: bf16 [head_dim].
void store_token_bf16(const uint16_t* k, const uint16_t* v, int32_t head_dim, int32_t slot,
                      uint8_t* page);
// The same for int8 or e4m3 codes with their scales. kind: the page's.
void store_token_bytes(KvKind kind, const uint8_t* k, float k_scale, const uint8_t* v,
                       float v_scale, int32_t head_dim, int32_t slot, uint8_t* page);
// The same for codes -8..7.
void store_token_int4(KvKind kind, const int8_t* k, float k_scale, const int8_t* v, float v_scale,
                      int32_t head_dim, int32_t slot, uint8_t* page);
// The first token of a request, in a page of a kind that keeps it: its codes become zero, its
// scales 1.
void store_first_token(KvKind kind, const uint16_t* k, const uint16_t* v, int32_t head_dim,
                       uint8_t* page);

}  // namespace trivet
