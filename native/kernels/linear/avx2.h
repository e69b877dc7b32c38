// What the linear kernels for AVX2 + FMA + F16C share. One channel block is two vectors of 8
// channels; each 32-bit lane holds one channel: a bf16 pair, or 4 int8 codes.
//
// Rows are taken kRows at a time against one block, so that each weight is loaded and unpacked once
// for all of them; every row's own arithmetic is the same whatever the number beside it.
#pragma once
#include <immintrin.h>

#include "kernels/linear/linear.h"

namespace trivet::avx2 {

// Codes beside bf16 activations: coded/avx2.cpp.
struct CodedKernels {
    LinearFn int4_bf16, fp8;
};
extern const CodedKernels coded_kernels;

namespace {

constexpr int32_t kRows = 4;           // rows of one register tile
constexpr int32_t kWideColumns = 256;  // bf16 columns widened at a time: 6 KiB
constexpr int32_t kWideStride = 36;    // floats of one row's 32 widened columns
constexpr int32_t kPrefetchBytes = 1024;

// What must stand in the loop that calls it: as a call it would keep every sum in memory.
#define TRIVET_INLINE __attribute__((always_inline)) inline

struct Pair {
    __m256 lo, hi;
};

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// 4 bytes of x in every lane.
inline __m256i broadcast(const void* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return _mm256_set1_epi32(bits);
}

// acc += v in place: left to itself, GCC 12 copies every accumulator once per iteration.
inline void add16(__m256i& acc, __m256i v) { __asm__("vpaddw %1, %0, %0" : "+x"(acc) : "x"(v)); }
inline void add32(__m256i& acc, __m256i v) { __asm__("vpaddd %1, %0, %0" : "+x"(acc) : "x"(v)); }

// Ends the compiler's wish to hold what p points at in registers across an iteration.
inline void keep_in_memory(void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

inline void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T0);
}

// Asks for weights ahead of their use, a little with every line (64 bytes) of a block that a tile
// of rows multiplies.
struct Ahead {
    const char* at;
    ptrdiff_t step;  // bytes a line

    void fetch() {
        _mm_prefetch(at, _MM_HINT_T0);
        at += step;
    }
    Ahead after(int32_t lines) const { return {at + step * lines, step}; }
};

inline Ahead nothing_ahead(const void* p) { return {static_cast<const char*>(p), 0}; }

// Of `tiles` tiles of rows that pass over a block, what `tile` asks for: its share of the next
// block, so that memory and arithmetic both go on all the time. One tile alone, or the first of
// all, has nothing that was asked for before: it asks for what it needs itself soon.
inline Ahead ahead_of(const void* codes, int64_t block_bytes, int32_t tile, int32_t tiles,
                      bool is_first_block) {
    const char* own = static_cast<const char*>(codes);
    if (tiles == 1 || (tile == 0 && is_first_block)) return {own + kPrefetchBytes, 64};
    return {own + block_bytes + block_bytes * tile / tiles, tiles < 64 ? 64 / tiles : 1};
}

// Lanes below n - 8 * half of block's 16 channels.
inline __m256i tail_mask(int32_t channels) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(channels),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Adds the bias, then writes one row's 16 outputs or adds them to what is there.
inline void store(const LinearWeight& w, int32_t block, Pair y, float* out_row, bool accumulate) {
    const int32_t channel = block * 16, left = w.n - channel;
    if (w.bias != nullptr) {
        y.lo = _mm256_add_ps(y.lo, _mm256_loadu_ps(w.bias + channel));
        y.hi = _mm256_add_ps(y.hi, _mm256_loadu_ps(w.bias + channel + 8));
    }
    float* out = out_row + channel;
    if (left >= 16) {
        if (accumulate) {
            y.lo = _mm256_add_ps(_mm256_loadu_ps(out), y.lo);
            y.hi = _mm256_add_ps(_mm256_loadu_ps(out + 8), y.hi);
        }
        _mm256_storeu_ps(out, y.lo);
        _mm256_storeu_ps(out + 8, y.hi);
        return;
    }
    const __m256i lo = tail_mask(left), hi = tail_mask(left - 8);
    if (accumulate) {
        y.lo = _mm256_add_ps(_mm256_maskload_ps(out, lo), y.lo);
        y.hi = _mm256_add_ps(_mm256_maskload_ps(out + 8, hi), y.hi);
    }
    _mm256_maskstore_ps(out, lo, y.lo);
    _mm256_maskstore_ps(out + 8, hi, y.hi);
}

// Calls tile<R>(first row) for all rows, R = kRows and then what is left.
template <class Tile>
inline void for_row_tiles(int32_t begin, int32_t end, Tile tile) {
    int32_t row = begin;
    for (; row + kRows <= end; row += kRows) tile.template operator()<kRows>(row);
    switch (end - row) {
        case 1:
            return tile.template operator()<1>(row);
        case 2:
            return tile.template operator()<2>(row);
        case 3:
            return tile.template operator()<3>(row);
        default:
            return;
    }
}

// Calls tile<R>(block, its codes, first row, what to ask for meanwhile) for rows [first, end) and
// all blocks.
template <class Tile>
inline void for_tiles(const LinearWeight& w, int32_t column_bytes, int32_t first, int32_t end,
                      int32_t block_begin, int32_t block_end, Tile tile) {
    const int64_t block_bytes = int64_t{w.k_padded} * column_bytes;
    const int32_t tiles = (end - first + kRows - 1) / kRows;
    for (int32_t block = block_begin; block < block_end; ++block) {
        const uint8_t* codes = static_cast<const uint8_t*>(w.codes) + block * block_bytes;
        for_row_tiles(first, end, [&]<int R>(int32_t row) {
            const Ahead ahead =
                ahead_of(codes, block_bytes, (row - first) / kRows, tiles, block == block_begin);
            tile.template operator()<R>(block, codes, row, ahead);
        });
    }
}

// Calls body(first row, end) for spans of so many rows.
template <class Body>
inline void for_spans(int32_t rows, int32_t span_rows, Body body) {
    for (int32_t first = 0; first < rows; first += span_rows) {
        body(first, first + span_rows < rows ? first + span_rows : rows);
    }
}

inline __m256 even(__m256i pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); }

inline __m256 odd(__m256i pair) {
    return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(int32_t(0xffff0000))));
}

// Rows of a tile widened to float32, 32 columns at a time: [k / 32][R][even 16, odd 16, 4 unused].
// The gap puts the broadcasts of neighbouring rows on different banks of the first-level cache.
template <int R>
inline void widen_rows(const uint16_t* x, ptrdiff_t x_stride, int32_t columns, float* wide) {
    for (int32_t k = 0; k < columns; k += 32) {
        for (int r = 0; r < R; ++r, wide += kWideStride) {
            const __m256i a = load(x + r * x_stride + k), b = load(x + r * x_stride + k + 16);
            _mm256_storeu_ps(wide, even(a));
            _mm256_storeu_ps(wide + 8, even(b));
            _mm256_storeu_ps(wide + 16, odd(a));
            _mm256_storeu_ps(wide + 24, odd(b));
        }
    }
}

// One chain of kPairs fused multiply-adds per row and channel over the even or the odd columns.
template <int R, bool kOdd, int kPairs>
inline void bf16_chain(const uint16_t* codes, const float* wide, Ahead ahead, __m256 (*sum)[2]) {
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
        if (!kOdd) ahead.fetch();
        const __m256i a = load(codes + 32 * i), b = load(codes + 32 * i + 16);
        const __m256 lo = kOdd ? odd(a) : even(a), hi = kOdd ? odd(b) : even(b);
        for (int r = 0; r < R; ++r) {
            const __m256 value = _mm256_broadcast_ss(wide + r * kWideStride + kOdd * 16 + i);
            sum[r][0] = _mm256_fmadd_ps(value, lo, sum[r][0]);
            sum[r][1] = _mm256_fmadd_ps(value, hi, sum[r][1]);
        }
    }
}

// Not inlined: the registers are for one chain's sums, everything else waits in memory.
template <int R>
__attribute__((noinline)) void bf16_columns(const uint16_t* codes, const float* wide,
                                            int32_t columns, Ahead ahead, Pair* acc) {
    for (int32_t k = 0; k < columns; k += 32, wide += R * kWideStride) {
        __m256 sum[R][2];
        Pair evens[R];
        bf16_chain<R, false, 16>(codes + 16 * k, wide, ahead.after(k / 2), sum);
        for (int r = 0; r < R; ++r) evens[r] = {sum[r][0], sum[r][1]};
        keep_in_memory(evens);
        bf16_chain<R, true, 16>(codes + 16 * k, wide, ahead, sum);
        for (int r = 0; r < R; ++r) {
            acc[r].lo = _mm256_add_ps(acc[r].lo, _mm256_add_ps(evens[r].lo, sum[r][0]));
            acc[r].hi = _mm256_add_ps(acc[r].hi, _mm256_add_ps(evens[r].hi, sum[r][1]));
        }
        keep_in_memory(acc);
    }
}

// Half a block: the 16 columns whose wide values begin at `wide`.
template <int R>
inline void bf16_half(const uint16_t* codes, const float* wide, Pair* acc) {
    __m256 evens[R][2], odds[R][2];
    bf16_chain<R, false, 8>(codes, wide, nothing_ahead(codes), evens);
    bf16_chain<R, true, 8>(codes, wide, nothing_ahead(codes), odds);
    for (int r = 0; r < R; ++r) {
        acc[r].lo = _mm256_add_ps(acc[r].lo, _mm256_add_ps(evens[r][0], odds[r][0]));
        acc[r].hi = _mm256_add_ps(acc[r].hi, _mm256_add_ps(evens[r][1], odds[r][1]));
    }
}

template <ScaleType kScale>
inline Pair load_scales(const void* values, int64_t index) {
    if constexpr (kScale == ScaleType::kF32) {
        const float* p = static_cast<const float*>(values) + index;
        return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
    } else {
        const auto* p =
            reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(values) + index);
        return {_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p + 1))};
    }
}

}  // namespace

}  // namespace trivet::avx2
