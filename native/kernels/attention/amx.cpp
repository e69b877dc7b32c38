// Attention on AMX tiles: 16 query vectors at a time against a page of keys. The pages in which
// some row ends are left to vectors (span.h says why); they come last, so the order of sums is the
// same.
#include "kernels/attention/avx512.h"

namespace trivet::amx {
namespace {

// Tile registers; the intrinsics want their numbers spelled out.
//   0, 1  C: scores or outputs [16][16 lanes]
//   2     A: query vectors or P [16][32 of K]
//   3     B: K or V [16 pairs][16 lanes][2]
//   4, 5  A and B of the rest of head_dim's pairs beyond multiples of 16
//   6, 7  B and C of the rest of head_dim's lanes
struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t colsb[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int32_t num_rows, int32_t bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        colsb[tile] = static_cast<uint16_t>(bytes);
    }
};

struct Tiles : Vectors {
    using Vectors::widen;
    // count: a multiple of 16.
    static void widen(const int8_t* codes, int32_t count, uint16_t* out) {
        for (int32_t i = 0; i < count; i += 16) {
            const __m512i wide =
                _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
            const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(wide));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                                _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
        }
    }
};

template <typename T>
void span_of_tiles(const SpanTask& task) {
    const int32_t dim = task.head_dim, group = task.group, num_q = task.num_rows * group;
    const int32_t q_padded = (num_q + 15) / 16 * 16, tile_rows = num_q < 16 ? num_q : 16;
    const int32_t most = task.valid[task.num_rows - 1];
    const int32_t num_pages = (most + kPageTokens - 1) / kPageTokens;
    const int32_t whole_pages = task.valid[0] / kPageTokens;
    const int32_t padded = num_pages * kPageTokens;
    const int32_t k_pairs = dim / 2, k_tail = k_pairs % 16, lane_tail = dim % 16;
    const PageBlock block = page_block(task.kind, dim);
    constexpr bool kScaled = sizeof(T) == 1;

    float* scores = task.scratch;  // [q_padded][256], then P
    uint16_t* p_codes =            // [q_padded][256]
        reinterpret_cast<uint16_t*>(scores + q_padded * kSpanTokens);
    uint16_t* q = p_codes + q_padded * kSpanTokens;                              // [q_padded][dim]
    float* o = reinterpret_cast<float*>(q + q_padded * ((dim + 31) / 32 * 32));  // [q_padded][dim]
    float* t = o + q_padded * ((dim + 31) / 32 * 32);                            // [256]
    float* v_scale = t + kSpanTokens;                                            // [256]
    uint16_t* wide = reinterpret_cast<uint16_t*>(v_scale + kSpanTokens);         // [9][32 * dim]

    std::memcpy(q, task.q, sizeof(uint16_t) * static_cast<size_t>(num_q) * dim);
    std::memset(q + num_q * dim, 0, sizeof(uint16_t) * static_cast<size_t>(q_padded - num_q) * dim);

    TileConfig config;
    config.set(0, tile_rows, 64);
    config.set(1, tile_rows, 64);
    config.set(2, tile_rows, 64);
    config.set(3, 16, 64);
    if (k_tail > 0) {
        config.set(4, tile_rows, 4 * k_tail);
        config.set(5, k_tail, 64);
    }
    if (lane_tail > 0) {
        config.set(6, 16, 4 * lane_tail);
        config.set(7, tile_rows, 4 * lane_tail);
    }
    _tile_loadconfig(&config);

    // V of a page as bf16; each page has its own place for widened codes.
    auto values_of = [&](int32_t p) {
        return bf16_values<Tiles, T>(task, p, wide + p * kPageTokens * dim);
    };

    for (int32_t p = 0; p < num_pages; ++p) {
        if (task.num_rows == 1) {
            // The keys and values of a decoding request are read once and come from memory.
            const uint8_t* next = p + 1 < num_pages   ? task.pages[p + 1]
                                  : task.num_next > 0 ? task.next_pages[0]
                                                      : nullptr;
            Ahead ahead = {reinterpret_cast<const char*>(task.pages[p] + block.v),
                           reinterpret_cast<const char*>(next != nullptr ? next : task.pages[p]),
                           block.bytes - block.v};
            while (ahead.bytes > 0) ahead.fetch();
        }
        const uint16_t* k = bf16_keys<Tiles, T>(task, p, wide + p * kPageTokens * dim);
        for (int32_t first = 0; first < q_padded; first += 16) {
            float* target = scores + first * kSpanTokens + p * kPageTokens;
            const uint16_t* rows = q + first * dim;
            _tile_zero(0);
            _tile_zero(1);
            int32_t pair = 0;
            for (; pair + 16 <= k_pairs; pair += 16) {
                _tile_loadd(2, rows + 2 * pair, 2 * dim);
                _tile_loadd(3, k + pair * kPageTokens * 2, kPageTokens * 4);
                _tile_dpbf16ps(0, 2, 3);
                _tile_loadd(3, k + pair * kPageTokens * 2 + 32, kPageTokens * 4);
                _tile_dpbf16ps(1, 2, 3);
            }
            if (k_tail > 0) {
                _tile_loadd(4, rows + 2 * pair, 2 * dim);
                _tile_loadd(5, k + pair * kPageTokens * 2, kPageTokens * 4);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(5, k + pair * kPageTokens * 2 + 32, kPageTokens * 4);
                _tile_dpbf16ps(1, 4, 5);
            }
            _tile_stored(0, target, kSpanTokens * 4);
            _tile_stored(1, target + 16, kSpanTokens * 4);
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
        float* row = scores + i * kSpanTokens;
        Vectors::softmax<kScaled>(row, task.valid[i / group], padded, kScaled ? t : &task.sm_scale,
                                  v_scale, task.m + i, task.l + i);
        for (int32_t j = 0; j < padded; j += 16) {
            const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(row + j));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(p_codes + i * kSpanTokens + j),
                                _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
        }
    }
    std::memset(p_codes + num_q * kSpanTokens, 0,
                sizeof(uint16_t) * static_cast<size_t>(q_padded - num_q) * kSpanTokens);

    const uint16_t* v[kSpanPages];
    for (int32_t p = 0; p < whole_pages; ++p) v[p] = values_of(p);
    for (int32_t first = 0; first < q_padded && whole_pages > 0; first += 16) {
        const uint16_t* p_rows = p_codes + first * kSpanTokens;
        int32_t lane = 0;
        for (; lane + 16 <= dim; lane += 16) {
            _tile_zero(0);
            for (int32_t p = 0; p < whole_pages; ++p) {
                _tile_loadd(2, p_rows + p * kPageTokens, kSpanTokens * 2);
                _tile_loadd(3, v[p] + 2 * lane, 4 * dim);
                _tile_dpbf16ps(0, 2, 3);
            }
            _tile_stored(0, o + first * dim + lane, 4 * dim);
        }
        if (lane_tail > 0) {
            _tile_zero(7);
            for (int32_t p = 0; p < whole_pages; ++p) {
                _tile_loadd(2, p_rows + p * kPageTokens, kSpanTokens * 2);
                _tile_loadd(6, v[p] + 2 * lane, 4 * dim);
                _tile_dpbf16ps(7, 2, 6);
            }
            _tile_stored(7, o + first * dim + lane, 4 * dim);
        }
    }
    _tile_release();
    if (whole_pages > 0) {
        std::memcpy(task.o, o, sizeof(float) * static_cast<size_t>(num_q) * dim);
    }
    last_pages<Vectors>(task, whole_pages, scores, kSpanTokens,
                        wide + kSpanPages * kPageTokens * dim, values_of);
    Vectors::settle(task.o, num_q * dim);
}

void span_on_tiles(const SpanTask& task) {
    switch (code_kind(task.kind)) {
        case KvKind::kInt8:
            return span_of_tiles<int8_t>(task);
        case KvKind::kFp8:
            return span_of_tiles<Fp8>(task);
        case KvKind::kInt4:
            return span_of_tiles<Int4Pair>(task);
        default:
            return span_of_tiles<uint16_t>(task);
    }
}

}  // namespace

const AttentionKernels attention_kernels = {span_on_tiles, merge, finish};

}  // namespace trivet::amx
