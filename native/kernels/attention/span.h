// The span algorithm of the levels whose products run on plain vectors, written once over a level's
// primitives (a type Isa with static functions):
//
//   Isa::product(num_q, a, a_stride, b, lanes, pairs, c, c_stride, accumulate, ahead)
//       c[q][lane] (+)= sum over pairs of a[q][2i] * b[i][lane][0] + a[q][2i+1] * b[i][lane][1] in
//       the contract's order: 16 pairs at a time, an even and an odd chain, their sum added. a:
//       float32 holding bf16 values; b: bf16 or int8 [pairs][lanes][2]. ahead: memory to ask for
//       meanwhile, a little with every pair. Other codes are widened before.
//   Isa::softmax(scores, valid, padded, t, v_scale, m, l)
//       scores [padded] become P (bf16 values as float32; zero from `valid` on); t: factors of the
//       scores per key, or their single factor; v_scale: factors of P per key, or null.
//   Isa::widen(codes, count, wide)    int8, e4m3 or pairs of 4-bit codes as bf16 bits, in order
//   Isa::widen_tokens(codes, dim, wide)    4-bit V of a page [32][dim / 2] as bf16 [16][dim][2]
//   Isa::kHasPlanes    whether many query vectors multiply K and V as planes: float32
//       [pairs][even, odd][lanes], made once a page for all of them, of lanes a multiple of 8:
//       Isa::planes(codes, pairs, lanes, planes) from bf16 or int8, and product over planes
//   Isa::settle(o, n)    adds +0, so that the number of empty products before cannot show in a sign
//
// Everything has internal linkage, so that nothing is shared between levels.
#pragma once
#include <algorithm>
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

// Codes that are only multiplied as bf16.
struct Fp8 {
    uint8_t bits;
};
struct Int4Pair {  // code + 8 in each nibble, the first in the low one
    uint8_t bits;
};

template <typename T>
constexpr bool kOnlyWide = false;
template <>
constexpr bool kOnlyWide<Fp8> = true;
template <>
constexpr bool kOnlyWide<Int4Pair> = true;
template <typename T>
constexpr bool kIsInt4 = false;
template <>
constexpr bool kIsInt4<Int4Pair> = true;

// bf16 bits of m * 2^-9, the e4m3 codes below 8.
constexpr uint16_t kSubnormalFp8[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
// bf16 bits of -8..7.
constexpr uint16_t kInt4Bf16[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                    0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

inline uint16_t widened(Fp8 code) {
    const int32_t magnitude = code.bits & 0x7f, sign = (code.bits & 0x80) << 8;
    const int32_t normal = (magnitude << 4) + 0x3c00;
    return static_cast<uint16_t>(sign | (magnitude < 8 ? kSubnormalFp8[magnitude] : normal));
}

// The generic form of widen and widen_tokens.
inline void widen_codes(const Fp8* codes, int32_t count, uint16_t* wide) {
    for (int32_t i = 0; i < count; ++i) wide[i] = widened(codes[i]);
}

inline void widen_codes(const Int4Pair* codes, int32_t count, uint16_t* wide) {
    for (int32_t i = 0; i < count; ++i) {
        wide[2 * i] = kInt4Bf16[codes[i].bits & 15];
        wide[2 * i + 1] = kInt4Bf16[codes[i].bits >> 4];
    }
}

// Pairs [begin, dim / 2) of dimensions.
inline void widen_token_pairs(const Int4Pair* codes, int32_t dim, int32_t begin, uint16_t* wide) {
    for (int32_t token = 0; token < kPageTokens; ++token) {
        const Int4Pair* row = codes + token * (dim / 2);
        uint16_t* out = wide + token / 2 * dim * 2 + token % 2;
        for (int32_t i = begin; i < dim / 2; ++i) {
            out[4 * i] = kInt4Bf16[row[i].bits & 15];
            out[4 * i + 2] = kInt4Bf16[row[i].bits >> 4];
        }
    }
}

// The widening of a level that has no vectors for it; a base of its Isa.
struct WidenOneByOne {
    static constexpr bool kHasPlanes = false;

    static void widen(const int8_t* codes, int32_t count, uint16_t* wide) {
        for (int32_t i = 0; i < count; ++i) wide[i] = widened(codes[i]);
    }
    template <typename T>
    static void widen(const T* codes, int32_t count, uint16_t* wide) {
        widen_codes(codes, count, wide);
    }
    static void widen_tokens(const Int4Pair* codes, int32_t dim, uint16_t* wide) {
        widen_token_pairs(codes, dim, 0, wide);
    }
};

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

// Where a page's K lies as bf16: codes are widened to `wide`, once for all query vectors.
template <typename Isa, typename T>
inline const uint16_t* bf16_keys(const SpanTask& task, int32_t p, uint16_t* wide) {
    const int32_t dim = task.head_dim;
    const uint8_t* page = task.pages[p];
    if constexpr (sizeof(T) == 2) {
        return reinterpret_cast<const uint16_t*>(page);
    } else {
        const PageBlock block = page_block(task.kind, dim);
        Isa::widen(reinterpret_cast<const T*>(page), static_cast<int32_t>(block.v), wide);
        if (p == 0 && task.is_first && keeps_first(task.kind)) {
            const uint8_t* first = page + block.first;
            for (int32_t d = 0; d < dim; d += 2) {
                std::memcpy(wide + d * kPageTokens, first + 2 * d, 2 * sizeof(uint16_t));
            }
        }
        return wide;
    }
}

// The same for V.
template <typename Isa, typename T>
inline const uint16_t* bf16_values(const SpanTask& task, int32_t p, uint16_t* wide) {
    const int32_t dim = task.head_dim;
    const PageBlock block = page_block(task.kind, dim);
    const uint8_t* page = task.pages[p];
    const T* codes = reinterpret_cast<const T*>(page + block.v);
    if constexpr (sizeof(T) == 2) {
        return codes;
    } else if constexpr (kIsInt4<T>) {
        Isa::widen_tokens(codes, dim, wide);
    } else {
        Isa::widen(codes, kPageTokens * dim, wide);
    }
    if (p == 0 && task.is_first && keeps_first(task.kind)) {
        const uint8_t* first = page + block.first + 2 * dim;
        for (int32_t d = 0; d < dim; ++d) {
            std::memcpy(wide + 2 * d, first + 2 * d, sizeof(uint16_t));
        }
    }
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

// last_pages for V as planes, which planes(page) makes. A token that a row does not see is replaced
// by zero while the row is multiplied.
template <typename Isa, typename Planes>
void last_plane_pages(const SpanTask& task, int32_t first_page, const float* p, int32_t p_stride,
                      float* kept, Planes planes) {
    const int32_t dim = task.head_dim, group = task.group;
    const int32_t most = task.valid[task.num_rows - 1];
    const size_t row_bytes = sizeof(float) * static_cast<size_t>(dim);
    for (int32_t page = first_page; page * kPageTokens < most; ++page) {
        float* v = planes(page);
        const int32_t first = page * kPageTokens;
        for (int32_t r = 0; r < task.num_rows; ++r) {
            const int32_t seen = std::min(task.valid[r] - first, kPageTokens);
            if (seen <= 0) continue;
            const int32_t pairs = (seen + 1) / 2;
            float* unseen =
                seen % 2 == 1 ? v + static_cast<ptrdiff_t>(2 * pairs - 1) * dim : nullptr;
            if (unseen != nullptr) {
                std::memcpy(kept, unseen, row_bytes);
                std::memset(unseen, 0, row_bytes);
            }
            Isa::product(group, p + r * group * p_stride + first, p_stride, v, dim, pairs,
                         task.o + static_cast<ptrdiff_t>(r) * group * dim, dim, page > 0, {});
            if (unseen != nullptr) std::memcpy(unseen, kept, row_bytes);
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
    float* planes = reinterpret_cast<float*>(wide + kPageTokens * dim);     // [32 * dim]
    const bool widens =
        kOnlyWide<T> || (kScaled && (num_q > 4 || (task.is_first && keeps_first(task.kind))));

    const bool uses_planes = Isa::kHasPlanes && num_q > 4 && dim % 8 == 0;
    // Planes of a page's codes, or of what bf16() makes of them where they are no plain numbers.
    [[maybe_unused]] const auto to_planes = [&](int32_t p, int64_t offset, int32_t pairs,
                                                int32_t lanes, auto bf16) {
        if constexpr (Isa::kHasPlanes) {
            if (kOnlyWide<T> || (kScaled && p == 0 && task.is_first && keeps_first(task.kind))) {
                Isa::planes(bf16(), pairs, lanes, planes);
            } else if constexpr (!kOnlyWide<T>) {
                Isa::planes(reinterpret_cast<const T*>(task.pages[p] + offset), pairs, lanes,
                            planes);
            }
        }
        return planes;
    };

    for (int32_t i = 0; i < num_q * dim; ++i) q[i] = from_bf16(task.q[i]);
    for (int32_t p = 0; p < num_pages; ++p) {
        float* target = scores + p * kPageTokens;
        Ahead ahead;
        if (task.num_rows == 1) {
            // The keys and values of a decoding request are read once and come from memory.
            const uint8_t* next = p + 1 < num_pages ? task.pages[p + 1] : nullptr;
            ahead = {reinterpret_cast<const char*>(task.pages[p] + block.v),
                     reinterpret_cast<const char*>(next != nullptr ? next : task.pages[p]),
                     block.bytes - block.v};
        }
        if (uses_planes) {
            if constexpr (Isa::kHasPlanes) {
                const float* keys = to_planes(p, 0, dim / 2, kPageTokens,
                                              [&] { return bf16_keys<Isa, T>(task, p, wide); });
                Isa::product(num_q, q, dim, keys, kPageTokens, dim / 2, target, kScoreStride, false,
                             ahead);
            }
        } else if (widens) {
            Isa::product(num_q, q, dim, bf16_keys<Isa, T>(task, p, wide), kPageTokens, dim / 2,
                         target, kScoreStride, false, ahead);
        } else if constexpr (!kOnlyWide<T>) {
            Isa::product(num_q, q, dim, reinterpret_cast<const T*>(task.pages[p]), kPageTokens,
                         dim / 2, target, kScoreStride, false, ahead);
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
    const auto multiply = [&](auto codes) {
        for (int32_t p = 0; p < whole_pages; ++p) {
            // The keys that come next: while the values, which are here, are multiplied.
            Ahead ahead;
            if (p < task.num_next) {
                const char* keys = reinterpret_cast<const char*>(task.next_pages[p]);
                ahead = {keys, keys + block.v / 2, block.v / 2};
            }
            Isa::product(num_q, scores + p * kPageTokens, kScoreStride, codes(p), dim,
                         kPageTokens / 2, task.o, dim, p > 0, ahead);
        }
    };
    if (uses_planes) {
        if constexpr (Isa::kHasPlanes) {
            const auto codes = [&](int32_t p) {
                return to_planes(p, block.v, kPageTokens / 2, dim,
                                 [&] { return bf16_values<Isa, T>(task, p, wide); });
            };
            multiply(codes);
            last_plane_pages<Isa>(task, whole_pages, scores, kScoreStride,
                                  reinterpret_cast<float*>(masked), codes);
        }
    } else if (widens) {
        const auto codes = [&](int32_t p) { return bf16_values<Isa, T>(task, p, wide); };
        multiply(codes);
        last_pages<Isa>(task, whole_pages, scores, kScoreStride, masked, codes);
    } else if constexpr (!kOnlyWide<T>) {
        const auto codes = [&](int32_t p) {
            return reinterpret_cast<const T*>(task.pages[p] + block.v);
        };
        multiply(codes);
        last_pages<Isa>(task, whole_pages, scores, kScoreStride, reinterpret_cast<T*>(masked),
                        codes);
    }
    Isa::settle(task.o, num_q * dim);
}

template <typename Isa>
void span(const SpanTask& task) {
    switch (code_kind(task.kind)) {
        case KvKind::kInt8:
            return span_of<Isa, int8_t>(task);
        case KvKind::kFp8:
            return span_of<Isa, Fp8>(task);
        case KvKind::kInt4:
            return span_of<Isa, Int4Pair>(task);
        default:
            return span_of<Isa, uint16_t>(task);
    }
}

}  // namespace
}  // namespace trivet
