// The span algorithm of the levels whose products run on plain vectors, written once over a level's
// primitives (a type Isa with static functions):
//
//   Isa::product(num_q, a, a_stride, b, lanes, pairs, c, c_stride, accumulate)
//       c[q][lane] (+)= sum over pairs of a[q][2i] * b[i][lane][0] + a[q][2i+1] * b[i][lane][1] in
//       the contract's order: 16 pairs at a time, an even and an odd chain, their sum added. a:
//       float32 holding bf16 values; b: bf16 or int8 [pairs][lanes][2].
//   Isa::softmax(scores, valid, padded, t, v_scale, m, l)
//       scores [padded] become P (bf16 values as float32; zero from `valid` on); t: factors of the
//       scores per key, or their single factor; v_scale: factors of P per key, or null.
//   Isa::settle(o, n)    adds +0, so that the number of empty products before cannot show in a sign
//
// Included into one anonymous namespace per level, so that nothing is shared between levels.
#include <cstring>

#include "kernels/attention/attention.h"
#include "kernels/math/scalar.h"

namespace trivet {
namespace {

template <typename Isa, typename T>
void span_of(const SpanTask& task) {
    const int32_t dim = task.head_dim, group = task.group, num_q = task.num_rows * group;
    const int32_t most = task.valid[task.num_rows - 1], least = task.valid[0];
    const int32_t num_pages = (most + kPageTokens - 1) / kPageTokens;
    const int32_t padded = num_pages * kPageTokens;
    const PageBlock block = page_block(task.kind, dim);
    constexpr bool kScaled = sizeof(T) == 1;

    float* scores = task.scratch;                             // [num_q][256], then P
    float* q = scores + num_q * kSpanTokens;                  // [num_q][dim]
    float* t = q + num_q * dim;                               // [256]
    float* v_scale = t + kSpanTokens;                         // [256]
    T* masked = reinterpret_cast<T*>(v_scale + kSpanTokens);  // [16][dim][2]

    for (int32_t i = 0; i < num_q * dim; ++i) q[i] = from_bf16(task.q[i]);
    for (int32_t p = 0; p < num_pages; ++p) {
        const T* k = reinterpret_cast<const T*>(task.pages[p]);
        Isa::product(num_q, q, dim, k, kPageTokens, dim / 2, scores + p * kPageTokens, kSpanTokens,
                     false);
        if constexpr (kScaled) {
            const float* k_scale = reinterpret_cast<const float*>(task.pages[p] + block.k_scale);
            for (int32_t j = 0; j < kPageTokens; ++j) {
                t[p * kPageTokens + j] = task.sm_scale * k_scale[j];
            }
            std::memcpy(v_scale + p * kPageTokens, task.pages[p] + block.v_scale,
                        kPageTokens * sizeof(float));
        }
    }
    for (int32_t i = 0; i < num_q; ++i) {
        Isa::template softmax<kScaled>(scores + i * kSpanTokens, task.valid[i / group], padded,
                                       kScaled ? t : &task.sm_scale, v_scale, task.m + i,
                                       task.l + i);
    }
    for (int32_t p = 0; p < num_pages; ++p) {
        const T* v = reinterpret_cast<const T*>(task.pages[p] + block.v);
        const int32_t first = p * kPageTokens;
        if (first + kPageTokens <= least) {
            Isa::product(num_q, scores + first, kSpanTokens, v, dim, kPageTokens / 2, task.o, dim,
                         p > 0);
            continue;
        }
        // Some row ends in this page: each row multiplies only the pairs it sees, and a token that
        // it does not see (which may be stale or not a number) is replaced by zero.
        for (int32_t r = 0; r < task.num_rows; ++r) {
            const int32_t seen = task.valid[r] - first;
            float* o = task.o + static_cast<ptrdiff_t>(r) * group * dim;
            if (seen <= 0) continue;
            const T* rows = v;
            int32_t pairs = kPageTokens / 2;
            if (seen < kPageTokens) {
                pairs = (seen + 1) / 2;
                if (seen % 2 == 1) {
                    std::memcpy(masked, v, sizeof(T) * static_cast<size_t>(pairs) * dim * 2);
                    T* last = masked + static_cast<ptrdiff_t>(pairs - 1) * dim * 2;
                    for (int32_t d = 0; d < dim; ++d) last[2 * d + 1] = 0;
                    rows = masked;
                }
            }
            Isa::product(group, scores + r * group * kSpanTokens + first, kSpanTokens, rows, dim,
                         pairs, o, dim, p > 0);
        }
    }
    Isa::settle(task.o, num_q * dim);
}

template <typename Isa>
void span(const SpanTask& task) {
    if (task.kind == KvKind::kBf16) {
        span_of<Isa, uint16_t>(task);
    } else {
        span_of<Isa, int8_t>(task);
    }
}

}  // namespace
}  // namespace trivet
