// Linear kernels for AVX2 + FMA + F16C. One channel block is two vectors of 8 channels; each 32-bit
// lane holds one channel: a bf16 pair, or 4 int8 codes.
//
// 8-bit codes: vpmaddubsw takes |w| and x with the sign of w; a pair of products is at most
// 2 * 127 * 127 = 32258, so its int16 saturation never acts. 4-bit codes stay unsigned; a lane adds
// up 16 products of at most 15 * 127, 30480 in all, before it is widened. Both bounds are met
// exactly by test_extreme_codes_do_not_saturate.
//
// Rows are taken kRows at a time against one block, so that each weight is loaded and unpacked once
// for all of them; every row's own arithmetic is the same whatever the number beside it.
#include <immintrin.h>

#include "kernels/linear/linear.h"

namespace trivet::avx2 {
namespace {

constexpr int32_t kRows = 4;                // rows of one register tile
constexpr int32_t kSpanRows = 64 * kRows;   // rows that stay in a core's cache
constexpr int32_t kPanelRows = 24 * kRows;  // rows that share one unpacked panel
constexpr int32_t kWideColumns = 256;       // bf16 columns widened at a time: 6 KiB
constexpr int32_t kWideStride = 36;         // floats of one row's 32 widened columns
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

// Asks for weights a little ahead of their first use; `first` is false where a tile of rows before
// has already read them.
inline void prefetch(const void* p, bool first) {
    if (first) _mm_prefetch(static_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T0);
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

// Calls body(block, first row, end of rows) for all blocks and rows: many rows go in spans that
// stay in the core's cache while all blocks pass.
template <class Body>
inline void for_blocks(int32_t rows, int32_t block_begin, int32_t block_end, Body body) {
    for (int32_t first = 0; first < rows; first += kSpanRows) {
        const int32_t end = first + kSpanRows < rows ? first + kSpanRows : rows;
        for (int32_t block = block_begin; block < block_end; ++block) body(block, first, end);
    }
}

// ---- bf16 ----

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
inline void bf16_chain(const uint16_t* codes, const float* wide, bool first, __m256 (*sum)[2]) {
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
        if (!kOdd) prefetch(codes + 32 * i, first);
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
                                            int32_t columns, bool first, Pair* acc) {
    for (int32_t k = 0; k < columns; k += 32, wide += R * kWideStride) {
        __m256 sum[R][2];
        Pair evens[R];
        bf16_chain<R, false, 16>(codes + 16 * k, wide, first, sum);
        for (int r = 0; r < R; ++r) evens[r] = {sum[r][0], sum[r][1]};
        keep_in_memory(evens);
        bf16_chain<R, true, 16>(codes + 16 * k, wide, first, sum);
        for (int r = 0; r < R; ++r) {
            acc[r].lo = _mm256_add_ps(acc[r].lo, _mm256_add_ps(evens[r].lo, sum[r][0]));
            acc[r].hi = _mm256_add_ps(acc[r].hi, _mm256_add_ps(evens[r].hi, sum[r][1]));
        }
        keep_in_memory(acc);
    }
}

template <int R>
inline void bf16_tile(const LinearWeight& w, const uint16_t* codes, const uint16_t* x, bool first,
                      Pair* acc) {
    alignas(64) float wide[R * kWideStride * kWideColumns / 32];
    for (int r = 0; r < R; ++r) acc[r].lo = acc[r].hi = _mm256_setzero_ps();
    for (int32_t k = 0; k < w.k_padded; k += kWideColumns) {
        const int32_t left = w.k_padded - k;
        const int32_t columns = left < kWideColumns ? left : kWideColumns;
        widen_rows<R>(x + k, w.k_padded, columns, wide);
        bf16_columns<R>(codes + int64_t(k) * 16, wide, columns, first, acc);
    }
}

// One row: both chains together, each weight loaded once.
template <>
inline void bf16_tile<1>(const LinearWeight& w, const uint16_t* codes, const uint16_t* x,
                         bool first, Pair* acc) {
    acc->lo = acc->hi = _mm256_setzero_ps();
    for (int32_t k = 0; k < w.k_padded; k += 32) {
        Pair e{_mm256_setzero_ps(), _mm256_setzero_ps()}, o = e;
        for (int32_t i = k; i < k + 32; i += 2) {
            prefetch(codes + 16 * i, first);
            const __m256i a = load(codes + 16 * i), b = load(codes + 16 * i + 16);
            const __m256i pair = broadcast(x + i);
            e.lo = _mm256_fmadd_ps(even(pair), even(a), e.lo);
            e.hi = _mm256_fmadd_ps(even(pair), even(b), e.hi);
            o.lo = _mm256_fmadd_ps(odd(pair), odd(a), o.lo);
            o.hi = _mm256_fmadd_ps(odd(pair), odd(b), o.hi);
        }
        acc->lo = _mm256_add_ps(acc->lo, _mm256_add_ps(e.lo, o.lo));
        acc->hi = _mm256_add_ps(acc->hi, _mm256_add_ps(e.hi, o.hi));
    }
}

void bf16(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
          float* out, ptrdiff_t out_stride, bool accumulate) {
    for_blocks(x.rows, block_begin, block_end, [&](int32_t block, int32_t first, int32_t end) {
        const auto* codes =
            static_cast<const uint16_t*>(w.codes) + int64_t(block) * w.k_padded * 16;
        for_row_tiles(first, end, [&]<int R>(int32_t row) {
            Pair acc[R];
            bf16_tile<R>(w, codes, x.bf16 + int64_t(row) * w.k_padded, row == 0, acc);
            for (int r = 0; r < R; ++r) {
                store(w, block, acc[r], out + (row + r) * out_stride, accumulate);
            }
        });
    });
}

// Half a block: the 16 columns whose wide values begin at `wide`.
template <int R>
inline void bf16_half(const uint16_t* codes, const float* wide, Pair* acc) {
    __m256 evens[R][2], odds[R][2];
    bf16_chain<R, false, 8>(codes, wide, false, evens);
    bf16_chain<R, true, 8>(codes, wide, false, odds);
    for (int r = 0; r < R; ++r) {
        acc[r].lo = _mm256_add_ps(acc[r].lo, _mm256_add_ps(evens[r][0], odds[r][0]));
        acc[r].hi = _mm256_add_ps(acc[r].hi, _mm256_add_ps(evens[r][1], odds[r][1]));
    }
}

// ---- 8-bit codes ----

// Adds the products of `columns` columns (a multiple of 4) to sum[r][half], exactly.
template <int R>
TRIVET_INLINE void int8_dot(const int8_t* codes, const int8_t* x, ptrdiff_t x_stride,
                            int32_t columns, bool first, __m256i (*sum)[2]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i part[R][2];  // a copy: GCC would store `sum` in every iteration
    for (int r = 0; r < R; ++r) {
        part[r][0] = sum[r][0];
        part[r][1] = sum[r][1];
    }
#pragma GCC unroll 1
    for (int32_t k = 0; k < columns; k += 4) {
        prefetch(codes + 16 * k, R == 1 || first);
        const __m256i lo = load(codes + 16 * k), hi = load(codes + 16 * k + 32);
        const __m256i abs_lo = _mm256_abs_epi8(lo), abs_hi = _mm256_abs_epi8(hi);
        for (int r = 0; r < R; ++r) {
            const __m256i v = broadcast(x + r * x_stride + k);
            const __m256i p = _mm256_maddubs_epi16(abs_lo, _mm256_sign_epi8(v, lo));
            const __m256i q = _mm256_maddubs_epi16(abs_hi, _mm256_sign_epi8(v, hi));
            add32(part[r][0], _mm256_madd_epi16(p, ones));
            add32(part[r][1], _mm256_madd_epi16(q, ones));
        }
    }
    for (int r = 0; r < R; ++r) {
        sum[r][0] = part[r][0];
        sum[r][1] = part[r][1];
    }
}

void int8_row(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
              float* out, ptrdiff_t out_stride, bool accumulate) {
    for_blocks(x.rows, block_begin, block_end, [&](int32_t block, int32_t first, int32_t end) {
        const auto* codes = static_cast<const int8_t*>(w.codes) + int64_t(block) * w.k_padded * 16;
        const float* scales = static_cast<const float*>(w.scales) + block * 16;
        const __m256 scale_lo = _mm256_loadu_ps(scales), scale_hi = _mm256_loadu_ps(scales + 8);
        for_row_tiles(first, end, [&]<int R>(int32_t row) {
            __m256i sum[R][2];
            for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
            int8_dot<R>(codes, x.codes + int64_t(row) * w.k_padded, w.k_padded, w.k_padded,
                        row == 0, sum);
            for (int r = 0; r < R; ++r) {
                const __m256 sx = _mm256_set1_ps(x.scales[row + r]);
                const Pair y{
                    _mm256_mul_ps(_mm256_cvtepi32_ps(sum[r][0]), _mm256_mul_ps(sx, scale_lo)),
                    _mm256_mul_ps(_mm256_cvtepi32_ps(sum[r][1]), _mm256_mul_ps(sx, scale_hi))};
                store(w, block, y, out + (row + r) * out_stride, accumulate);
            }
        });
    });
}

// ---- groups ----

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

// sum[r][half] = products of one group; 4-bit codes packed as stored.
template <int R>
TRIVET_INLINE void int4_dot(const uint8_t* codes, const int8_t* x, ptrdiff_t x_stride,
                            int32_t columns, bool first, __m256i (*sum)[2]) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    for (int32_t k = 0; k < columns; k += 32) {
        __m256i part[R][2];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const uint8_t* bytes = codes + 8 * k + 64 * i;
            prefetch(bytes, R == 1 || first);
            const __m256i a = load(bytes), b = load(bytes + 32);
            const __m256i a_low = _mm256_and_si256(a, low), b_low = _mm256_and_si256(b, low);
            const __m256i a_high = _mm256_and_si256(_mm256_srli_epi16(a, 4), low);
            const __m256i b_high = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
            for (int r = 0; r < R; ++r) {
                const __m256i u = broadcast(x + r * x_stride + k + 4 * i);
                const __m256i v = broadcast(x + r * x_stride + k + 16 + 4 * i);
                const __m256i p = _mm256_maddubs_epi16(a_low, u);
                const __m256i q = _mm256_maddubs_epi16(b_low, u);
                if (i == 0) {
                    part[r][0] = p;
                    part[r][1] = q;
                } else {
                    add16(part[r][0], p);
                    add16(part[r][1], q);
                }
                add16(part[r][0], _mm256_maddubs_epi16(a_high, v));
                add16(part[r][1], _mm256_maddubs_epi16(b_high, v));
            }
        }
        for (int r = 0; r < R; ++r) {
            sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(part[r][0], ones));
            sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(part[r][1], ones));
        }
    }
}

// The 16 columns in the low or the high nibbles (shift 0 or 4) of one block of 32.
template <int R>
TRIVET_INLINE void int4_half_dot(const uint8_t* codes, int shift, const int8_t* x,
                                 ptrdiff_t x_stride, bool first, __m256i (*sum)[2]) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    const __m128i count = _mm_cvtsi32_si128(shift);
    __m256i part[R][2];
    for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int i = 0; i < 4; ++i) {
        const uint8_t* bytes = codes + 64 * i;
        prefetch(bytes, first);
        const __m256i a = _mm256_and_si256(_mm256_srl_epi16(load(bytes), count), low);
        const __m256i b = _mm256_and_si256(_mm256_srl_epi16(load(bytes + 32), count), low);
        for (int r = 0; r < R; ++r) {
            const __m256i u = broadcast(x + r * x_stride + 4 * i);
            add16(part[r][0], _mm256_maddubs_epi16(a, u));
            add16(part[r][1], _mm256_maddubs_epi16(b, u));
        }
    }
    for (int r = 0; r < R; ++r) {
        sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(part[r][0], ones));
        sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(part[r][1], ones));
    }
}

enum class Codes { kInt8, kInt4, kFp8 };

// Groups [group_begin, group_end) of one block against R rows: acc is read and written.
// `codes` points at the first of these groups, x at the row's first column of the whole input.
// kGroup: 16 or 32 where the group's size is known, 0 for multiples of 32; of 16, group_begin is
// even. Not inlined: the registers are for the sums of one group, acc waits in memory.
template <Codes kCodes, Scheme kScheme, ScaleType kScale, int32_t kGroup, int R>
__attribute__((noinline)) void group_tile(const LinearWeight& w, const Activations& x,
                                          int32_t block, const uint8_t* codes, int32_t row,
                                          int32_t group_begin, int32_t group_end, Pair* acc) {
    constexpr int32_t kColumnBytes = kCodes == Codes::kInt4 ? 8 : 16;
    const int8_t* x_codes = x.codes + int64_t(row) * w.k_padded;
    const float* x_scales = x.scales + int64_t(row) * w.num_groups;
    const int32_t* x_sums = x.sums + int64_t(row) * w.num_groups;
    for (int32_t g = group_begin; g < group_end; ++g) {
        const int32_t group = kGroup > 0 ? kGroup : w.group;
        const int32_t begin = g * group, left = w.k_padded - begin;
        const int32_t columns = kGroup > 0 || left >= group ? group : left;
        const uint8_t* group_codes = codes + int64_t(begin - group_begin * group) * kColumnBytes;
        __m256i sum[R][2];
        for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
        if constexpr (kCodes == Codes::kInt8) {
            int8_dot<R>(reinterpret_cast<const int8_t*>(group_codes), x_codes + begin, w.k_padded,
                        columns, row == 0, sum);
        } else if constexpr (kCodes == Codes::kInt4 && kGroup == 16) {
            // Two groups share a block of 32: the odd one lies in the high nibbles.
            int4_half_dot<R>(g % 2 == 0 ? group_codes : group_codes - 16 * kColumnBytes, g % 2 * 4,
                             x_codes + begin, w.k_padded, row == 0, sum);
        } else {
            int4_dot<R>(group_codes, x_codes + begin, w.k_padded, columns, row == 0, sum);
        }
        const int64_t index = scale_index(w, block, g);
        const Pair scale = load_scales<kScale>(w.scales, index);
        Pair minimum{};
        if constexpr (kScheme == Scheme::kMin) minimum = load_scales<kScale>(w.minima, index);
        __m256i zero_lo{}, zero_hi{};
        if constexpr (kScheme == Scheme::kZeroPoint) {
            const __m128i zeros =
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(w.zeros + index));
            zero_lo = _mm256_cvtepu8_epi32(zeros);
            zero_hi = _mm256_cvtepu8_epi32(_mm_srli_si128(zeros, 8));
        }
        for (int r = 0; r < R; ++r) {
            const int32_t sum_x = x_sums[int64_t(r) * w.num_groups + g];
            if constexpr (kCodes == Codes::kInt4 && kScheme == Scheme::kSym) {
                const __m256i v = _mm256_slli_epi32(_mm256_set1_epi32(sum_x), 3);
                sum[r][0] = _mm256_sub_epi32(sum[r][0], v);
                sum[r][1] = _mm256_sub_epi32(sum[r][1], v);
            }
            const float sx = x_scales[int64_t(r) * w.num_groups + g];
            if constexpr (kScheme == Scheme::kZeroPoint) {
                // Lanes are (zero, 0) and (sum_x, sign) in 16-bit halves: |sum_x| <= 127 * 128.
                const __m256i v = _mm256_set1_epi32(sum_x);
                sum[r][0] = _mm256_sub_epi32(sum[r][0], _mm256_madd_epi16(zero_lo, v));
                sum[r][1] = _mm256_sub_epi32(sum[r][1], _mm256_madd_epi16(zero_hi, v));
            }
            const __m256 s = _mm256_set1_ps(sx);
            acc[r].lo = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][0]), _mm256_mul_ps(s, scale.lo),
                                        acc[r].lo);
            acc[r].hi = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][1]), _mm256_mul_ps(s, scale.hi),
                                        acc[r].hi);
            if constexpr (kScheme == Scheme::kMin) {
                const __m256 u = _mm256_set1_ps(static_cast<float>(sum_x) * sx);
                acc[r].lo = _mm256_fmadd_ps(u, minimum.lo, acc[r].lo);
                acc[r].hi = _mm256_fmadd_ps(u, minimum.hi, acc[r].hi);
            }
        }
        if constexpr (R > 1) keep_in_memory(acc);
    }
}

template <Codes kCodes, Scheme kScheme, ScaleType kScale, int R>
inline auto group_tile_for(int32_t group) {
    if (group == 16) return group_tile<kCodes, kScheme, kScale, 16, R>;
    if (group == 32) return group_tile<kCodes, kScheme, kScale, 32, R>;
    return group_tile<kCodes, kScheme, kScale, 0, R>;
}

// Codes used as they are stored.
template <Codes kCodes, Scheme kScheme, ScaleType kScale>
void group_direct(const LinearWeight& w, const Activations& x, int32_t block_begin,
                  int32_t block_end, float* out, ptrdiff_t out_stride, bool accumulate) {
    constexpr int32_t kColumnBytes = kCodes == Codes::kInt4 ? 8 : 16;
    for_blocks(x.rows, block_begin, block_end, [&](int32_t block, int32_t first, int32_t end) {
        const uint8_t* codes =
            static_cast<const uint8_t*>(w.codes) + int64_t(block) * w.k_padded * kColumnBytes;
        for_row_tiles(first, end, [&]<int R>(int32_t row) {
            Pair acc[R];
            for (int r = 0; r < R; ++r) acc[r].lo = acc[r].hi = _mm256_setzero_ps();
            const auto tile = group_tile_for<kCodes, kScheme, kScale, R>(w.group);
            tile(w, x, block, codes, row, 0, w.num_groups, acc);
            for (int r = 0; r < R; ++r) {
                store(w, block, acc[r], out + (row + r) * out_stride, accumulate);
            }
        });
    });
}

// ---- 4-bit and e4m3 codes, bf16 activations ----
//
// A group is a bf16 product with the codes less their offset, scaled once. For many rows they are
// unpacked to bf16, kWideColumns at a time, in the layout of bf16 weights; all rows use the panel
// before the next. One or two rows take them as float32 in registers.

// The e4m3 values of one column. As the bits of an f16 a code's exponent is 8 too small, subnormal
// numbers included, which the conversion reads whatever MXCSR says; the product is exact.
inline Pair fp8_column(const uint8_t* codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7),
                                            _mm256_set1_epi16(int16_t(0xbfff)));
    const __m256 power = _mm256_set1_ps(256.0f);
    return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), power),
            _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), power)};
}

inline void unpack_fp8(const LinearWeight& w, int32_t block, int32_t begin, int32_t columns,
                       uint16_t* panel) {
    const auto* codes =
        static_cast<const uint8_t*>(w.codes) + (int64_t(block) * w.k_padded + begin) * 16;
    auto pair = [](__m256 even, __m256 odd) {  // the low halves are zero
        return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16),
                               _mm256_castps_si256(odd));
    };
    for (int32_t k = 0; k < columns; k += 2, codes += 32, panel += 32) {
        prefetch(codes, k % 4 == 0);
        const Pair even = fp8_column(codes), odd = fp8_column(codes + 16);
        auto* out = reinterpret_cast<__m256i*>(panel);
        _mm256_storeu_si256(out, pair(even.lo, odd.lo));
        _mm256_storeu_si256(out + 1, pair(even.hi, odd.hi));
    }
}

// bf16 bits of the integers in v, in the low half of each lane.
inline __m256i integers_bf16(__m256i v) {
    return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(v)), 16);
}

// Columns 2j and 2j + 1 of four in each lane of v, from bit kShift on, less the offset: one pair of
// bf16.
template <int kShift>
inline __m256i bf16_pair(__m256i v, __m256i offset) {
    const __m256i low = _mm256_set1_epi32(15);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(v, kShift), low);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(v, kShift + 8), low);
    return _mm256_or_si256(integers_bf16(_mm256_sub_epi32(even, offset)),
                           _mm256_slli_epi32(integers_bf16(_mm256_sub_epi32(odd, offset)), 16));
}

// 16 columns of 16 channels: the low (kHigh 0) or the high nibbles (kHigh 4) of a block of 32.
template <int kHigh>
inline void unpack_bf16_half(const uint8_t* codes, __m256i offset_lo, __m256i offset_hi,
                             uint16_t* panel) {
    for (int i = 0; i < 4; ++i) {
        const __m256i a = load(codes + 64 * i), b = load(codes + 64 * i + 32);
        auto* out = reinterpret_cast<__m256i*>(panel + 64 * i);
        _mm256_storeu_si256(out, bf16_pair<kHigh>(a, offset_lo));
        _mm256_storeu_si256(out + 1, bf16_pair<kHigh>(b, offset_hi));
        _mm256_storeu_si256(out + 2, bf16_pair<kHigh + 16>(a, offset_lo));
        _mm256_storeu_si256(out + 3, bf16_pair<kHigh + 16>(b, offset_hi));
    }
}

template <Scheme kScheme>
inline void unpack_bf16(const LinearWeight& w, int32_t block, int32_t begin, int32_t columns,
                        uint16_t* panel) {
    const auto* codes = static_cast<const uint8_t*>(w.codes) + int64_t(block) * w.k_padded * 8;
    __m256i lo = _mm256_set1_epi32(kScheme == Scheme::kSym ? 8 : 0), hi = lo;
    auto take_offsets = [&](int32_t column) {
        if constexpr (kScheme == Scheme::kZeroPoint) {
            const int32_t g = column / w.group, last = w.num_groups - 1;
            const uint8_t* zeros = w.zeros + scale_index(w, block, g < last ? g : last);
            const __m128i z = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
            lo = _mm256_cvtepu8_epi32(z);
            hi = _mm256_cvtepu8_epi32(_mm_srli_si128(z, 8));
        }
    };
    for (int32_t k = begin; k < begin + columns; k += 32, panel += 32 * 16) {
        const uint8_t* bytes = codes + int64_t(k) * 8;
        prefetch(bytes, true);
        prefetch(bytes + 128, true);
        take_offsets(k);
        unpack_bf16_half<0>(bytes, lo, hi, panel);
        if (w.group == 16) take_offsets(k + 16);
        unpack_bf16_half<4>(bytes, lo, hi, panel + 16 * 16);
    }
}

// Columns [begin, begin + columns) of one block against R rows. acc: sums of the groups before;
// product: the group begun in the panel before, where groups are wider than a panel.
template <Scheme kScheme, ScaleType kScale, int R>
__attribute__((noinline)) void bf16_groups_tile(const LinearWeight& w, const Activations& x,
                                                int32_t block, const uint16_t* panel, int32_t row,
                                                int32_t begin, int32_t columns, Pair* acc,
                                                Pair* product) {
    alignas(64) float wide[R * kWideStride * kWideColumns / 32];
    widen_rows<R>(x.bf16 + int64_t(row) * w.k_padded + begin, w.k_padded, columns, wide);
    for (int32_t k = begin; k < begin + columns;) {
        const int32_t g = k / w.group, group_end = (g + 1) * w.group;
        const int32_t most = begin + columns, end = group_end < most ? group_end : most;
        const int32_t at = k - begin;
        if (w.group == 16) {
            bf16_half<R>(panel + 16 * at, wide + at / 32 * R * kWideStride + at % 32 / 2, product);
        } else {
            bf16_columns<R>(panel + 16 * at, wide + at / 32 * R * kWideStride, end - k, false,
                            product);
        }
        k = end;
        if (end < group_end && end < w.k_padded) break;  // the group goes on in the next panel
        if (g >= w.num_groups) continue;                 // columns beyond k
        const int64_t index = scale_index(w, block, g);
        const Pair scale = load_scales<kScale>(w.scales, index);
        Pair minimum{};
        if constexpr (kScheme == Scheme::kMin) minimum = load_scales<kScale>(w.minima, index);
        for (int r = 0; r < R; ++r) {
            acc[r].lo = _mm256_fmadd_ps(product[r].lo, scale.lo, acc[r].lo);
            acc[r].hi = _mm256_fmadd_ps(product[r].hi, scale.hi, acc[r].hi);
            product[r].lo = product[r].hi = _mm256_setzero_ps();
            if constexpr (kScheme == Scheme::kMin) {
                const __m256 sum = _mm256_set1_ps(x.scales[int64_t(row + r) * w.num_groups + g]);
                acc[r].lo = _mm256_fmadd_ps(sum, minimum.lo, acc[r].lo);
                acc[r].hi = _mm256_fmadd_ps(sum, minimum.hi, acc[r].hi);
            }
        }
    }
}

template <Codes kCodes, Scheme kScheme, ScaleType kScale>
void bf16_groups(const LinearWeight& w, const Activations& x, int32_t block_begin,
                 int32_t block_end, float* out, ptrdiff_t out_stride, bool accumulate) {
    alignas(64) uint16_t panel[kWideColumns * 16];
    Pair acc[kPanelRows], product[kPanelRows];
    for (int32_t block = block_begin; block < block_end; ++block) {
        for (int32_t first = 0; first < x.rows; first += kPanelRows) {
            const int32_t end = first + kPanelRows < x.rows ? first + kPanelRows : x.rows;
            for (int32_t r = 0; r < end - first; ++r) {
                acc[r].lo = acc[r].hi = product[r].lo = product[r].hi = _mm256_setzero_ps();
            }
            for (int32_t k = 0; k < w.k_padded; k += kWideColumns) {
                const int32_t left = w.k_padded - k;
                const int32_t columns = left < kWideColumns ? left : kWideColumns;
                if constexpr (kCodes == Codes::kFp8) {
                    unpack_fp8(w, block, k, columns, panel);
                } else {
                    unpack_bf16<kScheme>(w, block, k, columns, panel);
                }
                for_row_tiles(first, end, [&]<int R>(int32_t row) {
                    bf16_groups_tile<kScheme, kScale, R>(w, x, block, panel, row, k, columns,
                                                         acc + (row - first),
                                                         product + (row - first));
                });
            }
            for (int32_t row = first; row < end; ++row) {
                store(w, block, acc[row - first], out + row * out_stride, accumulate);
            }
        }
    }
}

// The codes at bit kPos of each lane as float32, less 8 where kScheme is sym. A code in the
// fraction of 2^(23 - kPos) is that power plus the code; the subtraction is exact.
template <Scheme kScheme, int kPos>
inline __m256 code_floats(__m256i v) {
    constexpr int kAt = kPos <= 16 ? kPos : 0;  // beyond, the fraction has no room
    if constexpr (kPos > 16) v = _mm256_srli_epi32(v, kPos);
    constexpr float kPower = static_cast<float>(1 << (23 - kAt));
    const __m256i fraction = _mm256_and_si256(v, _mm256_set1_epi32(15 << kAt));
    const __m256i bits = _mm256_or_si256(fraction, _mm256_castps_si256(_mm256_set1_ps(kPower)));
    constexpr float kOffset = kScheme == Scheme::kSym ? 8.0f : 0.0f;
    return _mm256_sub_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(kPower + kOffset));
}

// The 16 columns in the low (kHigh 0) or the high nibbles (kHigh 4) of a block of 32 join the
// chains. wide: their even columns, the odd ones 16 floats on.
template <Scheme kScheme, int kHigh, int R>
inline void direct_half(const uint8_t* codes, Pair zero, const float* wide, Pair* e, Pair* o) {
    auto join = [&]<int kColumn>(__m256i a, __m256i b, const float* x, Pair* sum) {
        __m256 lo = code_floats<kScheme, kHigh + 8 * kColumn>(a);
        __m256 hi = code_floats<kScheme, kHigh + 8 * kColumn>(b);
        if constexpr (kScheme == Scheme::kZeroPoint) {
            lo = _mm256_sub_ps(lo, zero.lo);
            hi = _mm256_sub_ps(hi, zero.hi);
        }
        for (int r = 0; r < R; ++r) {
            const __m256 value = _mm256_broadcast_ss(x + r * kWideStride);
            sum[r].lo = _mm256_fmadd_ps(value, lo, sum[r].lo);
            sum[r].hi = _mm256_fmadd_ps(value, hi, sum[r].hi);
        }
    };
    for (int i = 0; i < 4; ++i) {
        if (kHigh == 0) prefetch(codes + 64 * i, true);
        const __m256i a = load(codes + 64 * i), b = load(codes + 64 * i + 32);
        join.template operator()<0>(a, b, wide + 2 * i, e);
        join.template operator()<1>(a, b, wide + 2 * i + 16, o);
        join.template operator()<2>(a, b, wide + 2 * i + 1, e);
        join.template operator()<3>(a, b, wide + 2 * i + 17, o);
    }
}

template <Scheme kScheme, ScaleType kScale, int R>
inline void direct_tile(const LinearWeight& w, const Activations& x, int32_t block, int32_t row,
                        Pair* acc) {
    alignas(64) float wide[R * kWideStride];
    const auto* codes = static_cast<const uint8_t*>(w.codes) + int64_t(block) * w.k_padded * 8;
    const uint16_t* rows = x.bf16 + int64_t(row) * w.k_padded;
    Pair product[R], e[R], o[R], zero{};
    auto clear = [](Pair* sums) {
        for (int r = 0; r < R; ++r) sums[r].lo = sums[r].hi = _mm256_setzero_ps();
    };
    auto begin_group = [&](int32_t g) {
        if constexpr (kScheme == Scheme::kZeroPoint) {
            const int32_t last = w.num_groups - 1;
            const uint8_t* zeros = w.zeros + scale_index(w, block, g < last ? g : last);
            const __m128i z = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
            zero.lo = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(z));
            zero.hi = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(z, 8)));
        }
    };
    auto end_chains = [&] {
        for (int r = 0; r < R; ++r) {
            product[r].lo = _mm256_add_ps(product[r].lo, _mm256_add_ps(e[r].lo, o[r].lo));
            product[r].hi = _mm256_add_ps(product[r].hi, _mm256_add_ps(e[r].hi, o[r].hi));
        }
        clear(e);
        clear(o);
    };
    auto end_group = [&](int32_t g) {
        if (g >= w.num_groups) return;  // columns beyond k
        const int64_t index = scale_index(w, block, g);
        const Pair scale = load_scales<kScale>(w.scales, index);
        for (int r = 0; r < R; ++r) {
            acc[r].lo = _mm256_fmadd_ps(product[r].lo, scale.lo, acc[r].lo);
            acc[r].hi = _mm256_fmadd_ps(product[r].hi, scale.hi, acc[r].hi);
            if constexpr (kScheme == Scheme::kMin) {
                const Pair minimum = load_scales<kScale>(w.minima, index);
                const __m256 sum = _mm256_set1_ps(x.scales[int64_t(row + r) * w.num_groups + g]);
                acc[r].lo = _mm256_fmadd_ps(sum, minimum.lo, acc[r].lo);
                acc[r].hi = _mm256_fmadd_ps(sum, minimum.hi, acc[r].hi);
            }
        }
        clear(product);
    };
    clear(acc);
    clear(product);
    clear(e);
    clear(o);
    int32_t left = 0, g = -1;  // columns left of group g
    for (int32_t k = 0; k < w.k_padded; k += 32) {
        widen_rows<R>(rows + k, w.k_padded, 32, wide);
        const uint8_t* bytes = codes + int64_t(k) * 8;
        if (left == 0) {
            begin_group(++g);
            left = w.group;
        }
        direct_half<kScheme, 0, R>(bytes, zero, wide, e, o);
        if (w.group == 16) {
            end_chains();
            end_group(g);
            begin_group(++g);
            left = 32;
        }
        direct_half<kScheme, 4, R>(bytes, zero, wide + 8, e, o);
        end_chains();
        left -= 32;
        if (left == 0) end_group(g);
    }
    if (left > 0) end_group(g);
}

template <Scheme kScheme, ScaleType kScale>
void bf16_direct(const LinearWeight& w, const Activations& x, int32_t block_begin,
                 int32_t block_end, float* out, ptrdiff_t out_stride, bool accumulate) {
    for (int32_t block = block_begin; block < block_end; ++block) {
        Pair acc[2];
        if (x.rows == 1) {
            direct_tile<kScheme, kScale, 1>(w, x, block, 0, acc);
        } else {
            direct_tile<kScheme, kScale, 2>(w, x, block, 0, acc);
        }
        for (int32_t r = 0; r < x.rows; ++r) {
            store(w, block, acc[r], out + r * out_stride, accumulate);
        }
    }
}

template <Scheme kScheme>
LinearFn bf16_scheme(ScaleType scale_type, int32_t rows) {
    const bool f16 = scale_type == ScaleType::kF16;
    if (rows == 1 || rows == 2) {
        return f16 ? bf16_direct<kScheme, ScaleType::kF16> : bf16_direct<kScheme, ScaleType::kF32>;
    }
    return f16 ? bf16_groups<Codes::kInt4, kScheme, ScaleType::kF16>
               : bf16_groups<Codes::kInt4, kScheme, ScaleType::kF32>;
}

void int4_bf16(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
               float* out, ptrdiff_t out_stride, bool accumulate) {
    LinearFn kernel = bf16_scheme<Scheme::kSym>(w.scale_type, x.rows);
    if (w.scheme == Scheme::kZeroPoint) {
        kernel = bf16_scheme<Scheme::kZeroPoint>(w.scale_type, x.rows);
    }
    if (w.scheme == Scheme::kMin) kernel = bf16_scheme<Scheme::kMin>(w.scale_type, x.rows);
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

template <ScaleType kScale, int R>
inline void fp8_tile(const LinearWeight& w, const Activations& x, int32_t block, Pair* acc) {
    alignas(64) float wide[R * kWideStride];
    const auto* codes = static_cast<const uint8_t*>(w.codes) + int64_t(block) * w.k_padded * 16;
    Pair product[R], e[R], o[R];
    auto clear = [](Pair* sums) {
        for (int r = 0; r < R; ++r) sums[r].lo = sums[r].hi = _mm256_setzero_ps();
    };
    auto join = [&](const uint8_t* column, const float* at, Pair* sum) {
        const Pair value = fp8_column(column);
        for (int r = 0; r < R; ++r) {
            const __m256 v = _mm256_broadcast_ss(at + r * kWideStride);
            sum[r].lo = _mm256_fmadd_ps(v, value.lo, sum[r].lo);
            sum[r].hi = _mm256_fmadd_ps(v, value.hi, sum[r].hi);
        }
    };
    clear(acc);
    clear(product);
    clear(e);
    clear(o);
    int32_t g = 0, group_end = w.group;
    for (int32_t k = 0; k < w.k_padded; k += 16) {
        const int32_t half = k % 32;
        if (half == 0) widen_rows<R>(x.bf16 + k, w.k_padded, 32, wide);
        const float* at = wide + half / 2;
#pragma GCC unroll 2
        for (int i = 0; i < 8; ++i, codes += 32) {
            prefetch(codes, i % 2 == 0);
            join(codes, at + i, e);
            join(codes + 16, at + i + 16, o);
        }
        const bool ends = k + 16 == group_end || k + 16 == w.k_padded;
        if (half == 0 && !ends) continue;
        for (int r = 0; r < R; ++r) {
            product[r].lo = _mm256_add_ps(product[r].lo, _mm256_add_ps(e[r].lo, o[r].lo));
            product[r].hi = _mm256_add_ps(product[r].hi, _mm256_add_ps(e[r].hi, o[r].hi));
        }
        clear(e);
        clear(o);
        if (!ends) continue;
        if (g == w.num_groups) return;  // columns beyond k
        const Pair scale = load_scales<kScale>(w.scales, scale_index(w, block, g));
        for (int r = 0; r < R; ++r) {
            acc[r].lo = _mm256_fmadd_ps(product[r].lo, scale.lo, acc[r].lo);
            acc[r].hi = _mm256_fmadd_ps(product[r].hi, scale.hi, acc[r].hi);
        }
        clear(product);
        ++g;
        group_end += w.group;
    }
}

template <ScaleType kScale>
void fp8_direct(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
                float* out, ptrdiff_t out_stride, bool accumulate) {
    for (int32_t block = block_begin; block < block_end; ++block) {
        Pair acc[2];
        if (x.rows == 1) {
            fp8_tile<kScale, 1>(w, x, block, acc);
        } else {
            fp8_tile<kScale, 2>(w, x, block, acc);
        }
        for (int32_t r = 0; r < x.rows; ++r) {
            store(w, block, acc[r], out + r * out_stride, accumulate);
        }
    }
}

void fp8(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
         float* out, ptrdiff_t out_stride, bool accumulate) {
    constexpr Scheme kSym = Scheme::kSym;
    const bool f16 = w.scale_type == ScaleType::kF16;
    LinearFn kernel = f16 ? bf16_groups<Codes::kFp8, kSym, ScaleType::kF16>
                          : bf16_groups<Codes::kFp8, kSym, ScaleType::kF32>;
    if (x.rows == 1 || x.rows == 2) {
        kernel = f16 ? fp8_direct<ScaleType::kF16> : fp8_direct<ScaleType::kF32>;
    }
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

// ---- integer activations ----

void int8_group(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
                float* out, ptrdiff_t out_stride, bool accumulate) {
    const bool f16 = w.scale_type == ScaleType::kF16;
    LinearFn kernel;
    if (w.scheme == Scheme::kMin) {
        kernel = f16 ? group_direct<Codes::kInt8, Scheme::kMin, ScaleType::kF16>
                     : group_direct<Codes::kInt8, Scheme::kMin, ScaleType::kF32>;
    } else {
        kernel = f16 ? group_direct<Codes::kInt8, Scheme::kSym, ScaleType::kF16>
                     : group_direct<Codes::kInt8, Scheme::kSym, ScaleType::kF32>;
    }
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

template <Scheme kScheme>
void int4_scheme(const LinearWeight& w, const Activations& x, int32_t block_begin,
                 int32_t block_end, float* out, ptrdiff_t out_stride, bool accumulate) {
    const bool f16 = w.scale_type == ScaleType::kF16;
    const LinearFn kernel = f16 ? group_direct<Codes::kInt4, kScheme, ScaleType::kF16>
                                : group_direct<Codes::kInt4, kScheme, ScaleType::kF32>;
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

void int4_group(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
                float* out, ptrdiff_t out_stride, bool accumulate) {
    switch (w.scheme) {
        case Scheme::kSym:
            return int4_scheme<Scheme::kSym>(w, x, block_begin, block_end, out, out_stride,
                                             accumulate);
        case Scheme::kZeroPoint:
            return int4_scheme<Scheme::kZeroPoint>(w, x, block_begin, block_end, out, out_stride,
                                                   accumulate);
        case Scheme::kMin:
            return int4_scheme<Scheme::kMin>(w, x, block_begin, block_end, out, out_stride,
                                             accumulate);
    }
}

}  // namespace

const LinearKernels linear_kernels = {bf16, int8_row, int8_group, int4_group, int4_bf16, fp8};

}  // namespace trivet::avx2
