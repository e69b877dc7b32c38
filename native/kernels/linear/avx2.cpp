// Linear kernels for AVX2 + FMA + F16C: bf16, and integer codes with integer activations.
//
// 8-bit codes: vpmaddubsw takes |w| and x with the sign of w; a pair of products is at most
// 2 * 127 * 127 = 32258, so its int16 saturation never acts. 4-bit codes stay unsigned; a lane adds
// up 16 products of at most 15 * 127, 30480 in all, before it is widened. Both bounds are met
// exactly by test_extreme_codes_do_not_saturate.
#include "kernels/linear/avx2.h"

namespace trivet::avx2 {
namespace {

constexpr int32_t kSpanRows = 64 * kRows;   // rows that stay in a core's cache
constexpr int32_t kWideFloats = 64 * 1024;  // of widened rows: half of a core's 512 KiB
constexpr int32_t kFewestWide = 24;         // rows that are worth a pass over the weights

// ---- bf16 ----

// One row: both chains together, each weight loaded once.
inline void bf16_row(const LinearWeight& w, const uint16_t* codes, const uint16_t* x, Ahead ahead,
                     Pair* acc) {
    acc->lo = acc->hi = _mm256_setzero_ps();
    for (int32_t k = 0; k < w.k_padded; k += 32) {
        Pair e{_mm256_setzero_ps(), _mm256_setzero_ps()}, o = e;
        for (int32_t i = k; i < k + 32; i += 2) {
            ahead.fetch();
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

// A tile of rows, widened kWideColumns at a time.
template <int R>
inline void bf16_tile(const LinearWeight& w, const uint16_t* codes, const uint16_t* x, Ahead ahead,
                      Pair* acc) {
    if constexpr (R == 1) return bf16_row(w, codes, x, ahead, acc);
    alignas(64) float wide[R * kWideStride * kWideColumns / 32];
    for (int r = 0; r < R; ++r) acc[r].lo = acc[r].hi = _mm256_setzero_ps();
    for (int32_t k = 0; k < w.k_padded; k += kWideColumns) {
        const int32_t left = w.k_padded - k;
        const int32_t columns = left < kWideColumns ? left : kWideColumns;
        widen_rows<R>(x + k, w.k_padded, columns, wide);
        bf16_columns<R>(codes + int64_t(k) * 16, wide, columns, ahead.after(k / 2), acc);
    }
}

// Rows [first, end), which fit into kWideFloats: widened once for all blocks.
void bf16_span(const LinearWeight& w, const Activations& x, int32_t first, int32_t end,
               int32_t block_begin, int32_t block_end, float* out, ptrdiff_t out_stride,
               bool accumulate) {
    const int32_t row_floats = w.k_padded / 32 * kWideStride;
    alignas(64) float wide[kWideFloats];
    for_row_tiles(first, end, [&]<int R>(int32_t row) {
        widen_rows<R>(x.bf16 + int64_t(row) * w.k_padded, w.k_padded, w.k_padded,
                      wide + (row - first) * row_floats);
    });
    for_tiles(w, 32, first, end, block_begin, block_end,
              [&]<int R>(int32_t block, const uint8_t* codes, int32_t row, Ahead ahead) {
                  Pair acc[R];
                  for (int r = 0; r < R; ++r) acc[r].lo = acc[r].hi = _mm256_setzero_ps();
                  bf16_columns<R>(reinterpret_cast<const uint16_t*>(codes),
                                  wide + (row - first) * row_floats, w.k_padded, ahead, acc);
                  for (int r = 0; r < R; ++r) {
                      store(w, block, acc[r], out + (row + r) * out_stride, accumulate);
                  }
              });
}

void bf16(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
          float* out, ptrdiff_t out_stride, bool accumulate) {
    // Short spans read the weights often: of wide inputs few rows fit, and they are widened for
    // each block instead.
    const int32_t fits = kWideFloats / (w.k_padded / 32 * kWideStride) / kRows * kRows;
    if (x.rows > 1 && (fits >= kFewestWide || fits >= x.rows)) {
        for_spans(x.rows, fits, [&](int32_t first, int32_t end) {
            bf16_span(w, x, first, end, block_begin, block_end, out, out_stride, accumulate);
        });
        return;
    }
    for_spans(x.rows, kSpanRows, [&](int32_t first, int32_t end) {
        for_tiles(w, 32, first, end, block_begin, block_end,
                  [&]<int R>(int32_t block, const uint8_t* codes, int32_t row, Ahead ahead) {
                      Pair acc[R];
                      bf16_tile<R>(w, reinterpret_cast<const uint16_t*>(codes),
                                   x.bf16 + int64_t(row) * w.k_padded, ahead, acc);
                      for (int r = 0; r < R; ++r) {
                          store(w, block, acc[r], out + (row + r) * out_stride, accumulate);
                      }
                  });
    });
}

// ---- 8-bit codes ----

// Adds the products of `columns` columns (a multiple of 4) to sum[r][half], exactly.
template <int R>
TRIVET_INLINE void int8_dot(const int8_t* codes, const int8_t* x, ptrdiff_t x_stride,
                            int32_t columns, Ahead& ahead, __m256i (*sum)[2]) {
    const __m256i ones = _mm256_set1_epi16(1);
    Ahead next = ahead;  // copies: GCC would store `sum` and `ahead` in every iteration
    __m256i part[R][2];
    for (int r = 0; r < R; ++r) {
        part[r][0] = sum[r][0];
        part[r][1] = sum[r][1];
    }
#pragma GCC unroll 1
    for (int32_t k = 0; k < columns; k += 4) {
        next.fetch();
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
    ahead = next;
    for (int r = 0; r < R; ++r) {
        sum[r][0] = part[r][0];
        sum[r][1] = part[r][1];
    }
}

void int8_row(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
              float* out, ptrdiff_t out_stride, bool accumulate) {
    for_spans(x.rows, kSpanRows, [&](int32_t first, int32_t end) {
        for_tiles(
            w, 16, first, end, block_begin, block_end,
            [&]<int R>(int32_t block, const uint8_t* codes, int32_t row, Ahead ahead) {
                const float* scales = static_cast<const float*>(w.scales) + block * 16;
                const Pair scale{_mm256_loadu_ps(scales), _mm256_loadu_ps(scales + 8)};
                __m256i sum[R][2];
                for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
                int8_dot<R>(reinterpret_cast<const int8_t*>(codes),
                            x.codes + int64_t(row) * w.k_padded, w.k_padded, w.k_padded, ahead,
                            sum);
                for (int r = 0; r < R; ++r) {
                    const __m256 sx = _mm256_set1_ps(x.scales[row + r]);
                    const Pair y{
                        _mm256_mul_ps(_mm256_cvtepi32_ps(sum[r][0]), _mm256_mul_ps(sx, scale.lo)),
                        _mm256_mul_ps(_mm256_cvtepi32_ps(sum[r][1]), _mm256_mul_ps(sx, scale.hi))};
                    store(w, block, y, out + (row + r) * out_stride, accumulate);
                }
            });
    });
}

// ---- groups ----

// sum[r][half] = products of one group; 4-bit codes packed as stored.
template <int R>
TRIVET_INLINE void int4_dot(const uint8_t* codes, const int8_t* x, ptrdiff_t x_stride,
                            int32_t columns, Ahead& ahead, __m256i (*sum)[2]) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    Ahead next = ahead;
    for (int32_t k = 0; k < columns; k += 32) {
        __m256i part[R][2];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const uint8_t* bytes = codes + 8 * k + 64 * i;
            next.fetch();
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
    ahead = next;
}

// The 16 columns in the low or the high nibbles (shift 0 or 4) of one block of 32.
template <int R>
TRIVET_INLINE void int4_half_dot(const uint8_t* codes, int shift, const int8_t* x,
                                 ptrdiff_t x_stride, Ahead& ahead, __m256i (*sum)[2]) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    const __m128i count = _mm_cvtsi32_si128(shift);
    __m256i part[R][2];
    for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int i = 0; i < 4; ++i) {
        const uint8_t* bytes = codes + 64 * i;
        if (shift == 0) ahead.fetch();  // both halves of a block lie in its lines
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

enum class Codes { kInt8, kInt4 };

// The groups of one block against R rows: acc is read and written. kGroup: 16 or 32 where the
// group's size is known, 0 for multiples of 32. Not inlined: the registers are for the sums of one
// group, acc waits in memory.
template <Codes kCodes, Scheme kScheme, ScaleType kScale, int32_t kGroup, int R>
__attribute__((noinline)) void group_tile(const LinearWeight& w, const Activations& x,
                                          int32_t block, const uint8_t* codes, int32_t row,
                                          Ahead ahead, Pair* acc) {
    constexpr int32_t kColumnBytes = kCodes == Codes::kInt4 ? 8 : 16;
    const int8_t* x_codes = x.codes + int64_t(row) * w.k_padded;
    const float* x_scales = x.scales + int64_t(row) * w.num_groups;
    const int32_t* x_sums = x.sums + int64_t(row) * w.num_groups;
    for (int32_t g = 0; g < w.num_groups; ++g) {
        const int32_t group = kGroup > 0 ? kGroup : w.group;
        const int32_t begin = g * group, left = w.k_padded - begin;
        const int32_t columns = kGroup > 0 || left >= group ? group : left;
        const uint8_t* group_codes = codes + int64_t(begin) * kColumnBytes;
        __m256i sum[R][2];
        for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
        if constexpr (kCodes == Codes::kInt8) {
            int8_dot<R>(reinterpret_cast<const int8_t*>(group_codes), x_codes + begin, w.k_padded,
                        columns, ahead, sum);
        } else if constexpr (kCodes == Codes::kInt4 && kGroup == 16) {
            // Two groups share a block of 32: the odd one lies in the high nibbles.
            int4_half_dot<R>(g % 2 == 0 ? group_codes : group_codes - 16 * kColumnBytes, g % 2 * 4,
                             x_codes + begin, w.k_padded, ahead, sum);
        } else {
            int4_dot<R>(group_codes, x_codes + begin, w.k_padded, columns, ahead, sum);
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
    for_spans(x.rows, kSpanRows, [&](int32_t first, int32_t end) {
        for_tiles(w, kColumnBytes, first, end, block_begin, block_end,
                  [&]<int R>(int32_t block, const uint8_t* codes, int32_t row, Ahead ahead) {
                      Pair acc[R];
                      for (int r = 0; r < R; ++r) acc[r].lo = acc[r].hi = _mm256_setzero_ps();
                      const auto tile = group_tile_for<kCodes, kScheme, kScale, R>(w.group);
                      tile(w, x, block, codes, row, ahead, acc);
                      for (int r = 0; r < R; ++r) {
                          store(w, block, acc[r], out + (row + r) * out_stride, accumulate);
                      }
                  });
    });
}

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

void int4_bf16(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
               float* out, ptrdiff_t out_stride, bool accumulate) {
    coded_kernels.int4_bf16(w, x, block_begin, block_end, out, out_stride, accumulate);
}

void fp8(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
         float* out, ptrdiff_t out_stride, bool accumulate) {
    coded_kernels.fp8(w, x, block_begin, block_end, out, out_stride, accumulate);
}

}  // namespace

const LinearKernels linear_kernels = {bf16, int8_row, int8_group, int4_group, int4_bf16, fp8};

}  // namespace trivet::avx2
