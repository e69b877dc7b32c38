// The span algorithm of the levels whose products run on plain vectors, written once over a level's
// primitives (a type Isa with static functions):
//
//   Isa::product(num_q, a, a_stride, b, lanes, pairs, c, c_stride, accumulate, ahead)
//       c[q][lane] (+)= sum over pairs of a[q][2i] * b[i][lane][0] + a[q][2i+1] * b[i][lane][1] in
//       the contract's order: 16 pairs at a time, an even and an odd chain, their sum added. a:
//       float32 holding bf16 values; b: bf16 or int8 [pairs][lanes][2]. ahead: memory to ask for
//       meanwhile, a little with every pair.
//   Isa::softmax(scores, valid, padded, t, v_scale, m, l)
//       scores [padded] become P (bf16 values as float32; zero from `valid` on); t: factors of the
//       scores per key, or their single factor; v_scale: factors of P per key, or null.
//   Isa::widen(codes, count, wide)    int8 codes as bf16 bits
//   Isa::settle(o, n)    adds +0, so that the number of empty products before cannot show in a sign
//
// Everything has internal linkage, so that nothing is shared between levels.
#pragma once
#include <cstring>

#include "kernels/attention/attention.h"
#include "kernels/math/scalar.h"

namespace trivet {
namespace {

// Floats from one vector's scores to the next: the gap puts them on different banks of the
// first-level cache.
constexpr int32_t kScoreStride = kSpanTokens + 8;

inline float widen(uint16_t code) { return from_bf16(code); }
inline float widen(int8_t code) { return static_cast<float>(code); }

// The bf16 bits of a code, exactly.
inline uint16_t widened(int8_t code) {
    return static_cast<uint16_t>(float_bits(static_cast<float>(code)) >> 16);
}

// product for lanes [begin, lanes) one at a time.
template <typename T>
inline void product_lanes(int32_t num_q, const float* a, int32_t a_stride, const T* b,
                          int32_t lanes, int32_t begin, int32_t pairs, float* c, int32_t c_stride,
                          bool accumulate) {
    for (int32_t q = 0; q < num_q; ++q) {
        const float* x = a + q * a_stride;
        for (int32_t lane = begin; lane < lanes; ++lane) {
            float sum = accumulate ? c[q * c_stride + lane] : 0.0f;
            for (int32_t first = 0; first < pairs; first += 16) {
                const int32_t end = first + 16 < pairs ? first + 16 : pairs;
                float even = 0.0f, odd = 0.0f;
                for (int32_t i = first; i < end; ++i) {
                    const T* pair = b + (i * lanes + lane) * 2;
                    even = fma_f32(x[2 * i], widen(pair[0]), even);
                    odd = fma_f32(x[2 * i + 1], widen(pair[1]), odd);
                }
                sum += even + odd;
            }
            c[q * c_stride + lane] = sum;
        }
    }
}

// A page's part as bf16: int8 codes are widened to `wide`, once for all query vectors.
template <typename Isa>
inline const uint16_t* bf16_codes(const uint16_t* codes, int32_t, uint16_t*) {
    return codes;
}

template <typename Isa>
inline const uint16_t* bf16_codes(const int8_t* codes, int32_t count, uint16_t* wide) {
    Isa::widen(codes, count, wide);
    return wide;
}

// Adds P times V for the pages from `first_page` on, in which some row ends: each row multiplies
// only the pairs it sees, and a token that it does not see (which may be stale or not a number) is
// replaced by zero. p: [num_q][p_stride]; codes(page): its V; masked: scratch of [16][head_dim][2].
template <typename Isa, typename T, typename Codes>
void last_pages(const SpanTask& task, int32_t first_page, const float* p, int32_t p_stride,
                T* masked, Codes codes) {
    const int32_t dim = task.head_dim, group = task.group;
    const int32_t most = task.valid[task.num_rows - 1];
    for (int32_t page = first_page; page * kPageTokens < most; ++page) {
        const T* v = codes(page);
        const int32_t first = page * kPageTokens;
        for (int32_t r = 0; r < task.num_rows; ++r) {
            const int32_t seen = task.valid[r] - first;
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
            Isa::product(group, p + r * group * p_stride + first, p_stride, rows, dim, pairs,
                         task.o + static_cast<ptrdiff_t>(r) * group * dim, dim, page > 0, {});
        }
    }
}

// Two stretches of memory that are asked for while a product runs, a line of each with every pair
// of a tile: a burst of requests would stop the product until the memory has answered.
struct Ahead {
    const char* first = nullptr;
    const char* second = nullptr;
    int64_t bytes = 0;  // of each

    void fetch() {
        if (bytes <= 0) return;
        __builtin_prefetch(first);
        __builtin_prefetch(second);
        first += 64;
        second += 64;
        bytes -= 64;
    }
};

template <typename Isa, typename T>
void span_of(const SpanTask& task) {
    const int32_t dim = task.head_dim, group = task.group, num_q = task.num_rows * group;
    const int32_t most = task.valid[task.num_rows - 1];
    const int32_t num_pages = (most + kPageTokens - 1) / kPageTokens;
    const int32_t padded = num_pages * kPageTokens;
    const PageBlock block = page_block(task.kind, dim);
    constexpr bool kScaled = sizeof(T) == 1;

    float* scores = task.scratch;              // [num_q][256 + 8], then P
    float* q = scores + num_q * kScoreStride;  // [num_q][dim]
    float* t = q + num_q * dim;                // [256]
    float* v_scale = t + kSpanTokens;          // [256]
    uint16_t* masked = reinterpret_cast<uint16_t*>(v_scale + kSpanTokens);  // [16][dim][2]
    uint16_t* wide = masked + kPageTokens * dim;                            // [32 * dim]
    const bool widens = kScaled && num_q > 4;

    for (int32_t i = 0; i < num_q * dim; ++i) q[i] = from_bf16(task.q[i]);
    for (int32_t p = 0; p < num_pages; ++p) {
        const T* k = reinterpret_cast<const T*>(task.pages[p]);
        float* target = scores + p * kPageTokens;
        Ahead ahead;
        if (task.num_rows == 1) {
            // The keys and values of a decoding request are read once and come from memory.
            const uint8_t* next = p + 1 < num_pages ? task.pages[p + 1] : task.next;
            ahead = {reinterpret_cast<const char*>(task.pages[p] + block.v),
                     reinterpret_cast<const char*>(next != nullptr ? next : task.pages[p]),
                     block.bytes - block.v};
        }
        if (widens) {
            Isa::product(num_q, q, dim, bf16_codes<Isa>(k, kPageTokens * dim, wide), kPageTokens,
                         dim / 2, target, kScoreStride, false, ahead);
        } else {
            Isa::product(num_q, q, dim, k, kPageTokens, dim / 2, target, kScoreStride, false,
                         ahead);
        }
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
        Isa::template softmax<kScaled>(scores + i * kScoreStride, task.valid[i / group], padded,
                                       kScaled ? t : &task.sm_scale, v_scale, task.m + i,
                                       task.l + i);
    }
    const int32_t whole_pages = task.valid[0] / kPageTokens;
    const auto multiply = [&](auto codes, auto* scratch) {
        for (int32_t p = 0; p < whole_pages; ++p) {
            Isa::product(num_q, scores + p * kPageTokens, kScoreStride, codes(p), dim,
                         kPageTokens / 2, task.o, dim, p > 0, {});
        }
        last_pages<Isa>(task, whole_pages, scores, kScoreStride, scratch, codes);
    };
    const auto stored = [&](int32_t p) {
        return reinterpret_cast<const T*>(task.pages[p] + block.v);
    };
    if (widens) {
        multiply([&](int32_t p) { return bf16_codes<Isa>(stored(p), kPageTokens * dim, wide); },
                 masked);
    } else {
        multiply(stored, reinterpret_cast<T*>(masked));
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
