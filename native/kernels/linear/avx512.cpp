// Linear kernels for AVX-512 with VNNI. One channel block is one vector; each 32-bit lane holds one
// channel: a bf16 pair, or 4 int8 codes.
//
// vpdpbusd multiplies unsigned by signed bytes into int32 without saturation. 8-bit codes become
// unsigned by adding 128 (a flip of the sign bit), 4-bit codes are; what that adds, a constant
// times the sum of the activation codes, is where the sum starts.
//
// Rows are taken kRows at a time against one block, so that each weight is loaded and unpacked once
// for all of them; every row's own arithmetic is the same whatever the number beside it.
#include <immintrin.h>

#include "kernels/linear/linear.h"

namespace trivet::avx512 {
namespace {

constexpr int32_t kRows = 8;           // rows of one register tile
constexpr int32_t kWideColumns = 256;  // bf16 columns widened at a time
constexpr int32_t kPrefetchBytes = 1024;

inline __m512i load(const void* p) { return _mm512_loadu_si512(p); }

// 4 bytes of x in every lane.
inline __m512i broadcast(const void* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return _mm512_set1_epi32(bits);
}

inline void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T0);
}

// Adds the bias, then writes one row's 16 outputs or adds them to what is there.
inline void store(const LinearWeight& w, int32_t block, __m512 y, float* out_row, bool accumulate) {
    const int32_t channel = block * 16, left = w.n - channel;
    const auto mask = static_cast<__mmask16>(left >= 16 ? 0xffff : (1 << left) - 1);
    if (w.bias != nullptr) y = _mm512_add_ps(y, _mm512_loadu_ps(w.bias + channel));
    float* out = out_row + channel;
    if (accumulate) y = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), y);
    _mm512_mask_storeu_ps(out, mask, y);
}

// Calls tile<R>(first row) for all rows: R = kRows, then 4, 2 and 1.
template <class Tile>
inline void for_row_tiles(int32_t rows, Tile tile) {
    int32_t row = 0;
    for (; row + kRows <= rows; row += kRows) tile.template operator()<kRows>(row);
    if (rows - row >= 4) {
        tile.template operator()<4>(row);
        row += 4;
    }
    if (rows - row >= 2) {
        tile.template operator()<2>(row);
        row += 2;
    }
    if (rows - row >= 1) tile.template operator()<1>(row);
}

// ---- bf16 ----

inline __m512 even(__m512i pair) { return _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)); }

inline __m512 odd(__m512i pair) {
    return _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(int32_t(0xffff0000))));
}

// Columns of R rows widened to float32: [k / 32][R][even 16, odd 16].
template <int R>
inline void widen_rows(const uint16_t* x, ptrdiff_t x_stride, int32_t columns, float* wide) {
    for (int32_t k = 0; k < columns; k += 32) {
        for (int r = 0; r < R; ++r, wide += 32) {
            const __m512i pairs = load(x + r * x_stride + k);
            _mm512_storeu_ps(wide, even(pairs));
            _mm512_storeu_ps(wide + 16, odd(pairs));
        }
    }
}

template <int R>
void bf16_tile(const LinearWeight& w, int32_t block, const uint16_t* x, float* out,
               ptrdiff_t out_stride, bool accumulate) {
    alignas(64) float wide[R * kWideColumns];
    const auto* codes = static_cast<const uint16_t*>(w.codes) + int64_t(block) * w.k_padded * 16;
    __m512 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
    for (int32_t begin = 0; begin < w.k_padded; begin += kWideColumns) {
        const int32_t left = w.k_padded - begin;
        const int32_t columns = left < kWideColumns ? left : kWideColumns;
        widen_rows<R>(x + begin, w.k_padded, columns, wide);
        for (int32_t k = 0; k < columns; k += 32) {
            const uint16_t* block_codes = codes + int64_t(begin + k) * 16;
            const float* block_x = wide + R * k;
            __m512 e[R], o[R];
            for (int r = 0; r < R; ++r) e[r] = o[r] = _mm512_setzero_ps();
#pragma GCC unroll 2
            for (int i = 0; i < 16; ++i) {
                if (R == 1) prefetch(block_codes + 32 * i);
                const __m512i pairs = load(block_codes + 32 * i);
                const __m512 evens = even(pairs), odds = odd(pairs);
                for (int r = 0; r < R; ++r) {
                    e[r] = _mm512_fmadd_ps(_mm512_set1_ps(block_x[r * 32 + i]), evens, e[r]);
                    o[r] = _mm512_fmadd_ps(_mm512_set1_ps(block_x[r * 32 + 16 + i]), odds, o[r]);
                }
            }
            for (int r = 0; r < R; ++r) acc[r] = _mm512_add_ps(acc[r], _mm512_add_ps(e[r], o[r]));
        }
    }
    for (int r = 0; r < R; ++r) store(w, block, acc[r], out + r * out_stride, accumulate);
}

void bf16(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
          float* out, ptrdiff_t out_stride, bool accumulate) {
    for (int32_t block = block_begin; block < block_end; ++block) {
        for_row_tiles(x.rows, [&]<int R>(int32_t row) {
            bf16_tile<R>(w, block, x.bf16 + int64_t(row) * w.k_padded, out + row * out_stride,
                         out_stride, accumulate);
        });
    }
}

// ---- integer codes ----

// sum[r] += products of `columns` 8-bit columns (a multiple of 16) + 128 * their activation codes.
template <int R>
inline void int8_dot(const int8_t* codes, const int8_t* x, ptrdiff_t x_stride, int32_t columns,
                     __m512i* sum) {
    const __m512i flip = _mm512_set1_epi8(int8_t(-128));
    if constexpr (R == 1) {
        // Four chains hide the latency of vpdpbusd.
        __m512i b = _mm512_setzero_si512(), c = b, d = b;
        for (int32_t k = 0; k < columns; k += 16) {
            const int8_t* p = codes + 16 * k;
            for (int i = 0; i < 4; ++i) prefetch(p + 64 * i);
            sum[0] = _mm512_dpbusd_epi32(sum[0], _mm512_xor_si512(load(p), flip), broadcast(x + k));
            b = _mm512_dpbusd_epi32(b, _mm512_xor_si512(load(p + 64), flip), broadcast(x + k + 4));
            c = _mm512_dpbusd_epi32(c, _mm512_xor_si512(load(p + 128), flip), broadcast(x + k + 8));
            d = _mm512_dpbusd_epi32(d, _mm512_xor_si512(load(p + 192), flip),
                                    broadcast(x + k + 12));
        }
        sum[0] = _mm512_add_epi32(_mm512_add_epi32(sum[0], b), _mm512_add_epi32(c, d));
    } else {
        for (int32_t k = 0; k < columns; k += 4) {
            const __m512i v = _mm512_xor_si512(load(codes + 16 * k), flip);
            for (int r = 0; r < R; ++r) {
                sum[r] = _mm512_dpbusd_epi32(sum[r], v, broadcast(x + r * x_stride + k));
            }
        }
    }
}

// sum[r] += products of `columns` unsigned 4-bit columns (a multiple of 32).
template <int R>
inline void int4_dot(const uint8_t* codes, const int8_t* x, ptrdiff_t x_stride, int32_t columns,
                     __m512i* sum) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i upper[R];
    for (int r = 0; r < R; ++r) upper[r] = _mm512_setzero_si512();
    for (int32_t k = 0; k < columns; k += 32) {
        for (int i = 0; i < 4; ++i) {
            if (R == 1) prefetch(codes + 8 * k + 64 * i);
            const __m512i v = load(codes + 8 * k + 64 * i);
            const __m512i a = _mm512_and_si512(v, low);
            const __m512i b = _mm512_and_si512(_mm512_srli_epi32(v, 4), low);
            for (int r = 0; r < R; ++r) {
                const int8_t* p = x + r * x_stride + k + 4 * i;
                sum[r] = _mm512_dpbusd_epi32(sum[r], a, broadcast(p));
                upper[r] = _mm512_dpbusd_epi32(upper[r], b, broadcast(p + 16));
            }
        }
    }
    for (int r = 0; r < R; ++r) sum[r] = _mm512_add_epi32(sum[r], upper[r]);
}

// The 16 columns in the low (half 0) or the high nibbles (half 1) of one block of 32.
template <int R>
inline void int4_half_dot(const uint8_t* codes, int32_t half, const int8_t* x, ptrdiff_t x_stride,
                          __m512i* sum) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int i = 0; i < 4; ++i) {
        if (R == 1) prefetch(codes + 64 * i);
        const __m512i v = load(codes + 64 * i);
        const __m512i a = _mm512_and_si512(half == 0 ? v : _mm512_srli_epi32(v, 4), low);
        for (int r = 0; r < R; ++r) {
            sum[r] = _mm512_dpbusd_epi32(sum[r], a, broadcast(x + r * x_stride + 4 * i));
        }
    }
}

template <int R>
void int8_row_tile(const LinearWeight& w, const Activations& x, int32_t block, int32_t row,
                   float* out, ptrdiff_t out_stride, bool accumulate) {
    const auto* codes = static_cast<const int8_t*>(w.codes) + int64_t(block) * w.k_padded * 16;
    __m512i sum[R];
    for (int r = 0; r < R; ++r) sum[r] = _mm512_set1_epi32(-128 * x.sums[row + r]);
    int8_dot<R>(codes, x.codes + int64_t(row) * w.k_padded, w.k_padded, w.k_padded, sum);
    const __m512 scale = _mm512_loadu_ps(static_cast<const float*>(w.scales) + block * 16);
    for (int r = 0; r < R; ++r) {
        const __m512 t = _mm512_mul_ps(_mm512_set1_ps(x.scales[row + r]), scale);
        store(w, block, _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r]), t), out + r * out_stride,
              accumulate);
    }
}

void int8_row(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
              float* out, ptrdiff_t out_stride, bool accumulate) {
    for (int32_t block = block_begin; block < block_end; ++block) {
        for_row_tiles(x.rows, [&]<int R>(int32_t row) {
            int8_row_tile<R>(w, x, block, row, out + row * out_stride, out_stride, accumulate);
        });
    }
}

template <ScaleType kScale>
inline __m512 load_scales(const void* values, int64_t index) {
    if constexpr (kScale == ScaleType::kF32) {
        return _mm512_loadu_ps(static_cast<const float*>(values) + index);
    } else {
        const auto* p = static_cast<const uint16_t*>(values) + index;
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
}

template <WeightKind kKind, Scheme kScheme, ScaleType kScale, int R>
void group_tile(const LinearWeight& w, const Activations& x, int32_t block, int32_t row, float* out,
                ptrdiff_t out_stride, bool accumulate) {
    constexpr bool kInt4 = kKind == WeightKind::kInt4Group;
    constexpr int32_t kColumnBytes = kInt4 ? 8 : 16;
    const auto* codes =
        static_cast<const uint8_t*>(w.codes) + int64_t(block) * w.k_padded * kColumnBytes;
    const int8_t* x_codes = x.codes + int64_t(row) * w.k_padded;
    const float* x_scales = x.scales + int64_t(row) * w.num_groups;
    const int32_t* x_sums = x.sums + int64_t(row) * w.num_groups;
    __m512 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
    for (int32_t g = 0; g < w.num_groups; ++g) {
        const int32_t begin = g * w.group, left = w.k_padded - begin;
        const int32_t columns = left < w.group ? left : w.group;
        const int64_t index = scale_index(w, block, g);
        __m512i sum[R], zero = _mm512_setzero_si512();
        if constexpr (kScheme == Scheme::kZeroPoint) {
            const auto* p = reinterpret_cast<const __m128i*>(w.zeros + index);
            zero = _mm512_cvtepu8_epi32(_mm_loadu_si128(p));
        }
        for (int r = 0; r < R; ++r) {
            const int32_t sum_x = x_sums[int64_t(r) * w.num_groups + g];
            if constexpr (kScheme == Scheme::kZeroPoint) {
                // Lanes are (zero, 0) and (-sum_x, sign) in 16-bit halves: |sum_x| <= 127 * 128.
                sum[r] = _mm512_madd_epi16(zero, _mm512_set1_epi32(-sum_x));
            } else if constexpr (kScheme == Scheme::kSym || !kInt4) {
                sum[r] = _mm512_set1_epi32((kInt4 ? -8 : -128) * sum_x);
            } else {
                sum[r] = _mm512_setzero_si512();
            }
        }
        const uint8_t* group_codes = codes + int64_t(begin) * kColumnBytes;
        if (kInt4 && w.group == 16) {
            // Two groups share a block of 32: the odd one lies in the high nibbles.
            int4_half_dot<R>(g % 2 == 0 ? group_codes : group_codes - 16 * kColumnBytes, g % 2,
                             x_codes + begin, w.k_padded, sum);
        } else if constexpr (kInt4) {
            int4_dot<R>(group_codes, x_codes + begin, w.k_padded, columns, sum);
        } else {
            int8_dot<R>(reinterpret_cast<const int8_t*>(group_codes), x_codes + begin, w.k_padded,
                        columns, sum);
        }
        const __m512 scale = load_scales<kScale>(w.scales, index);
        for (int r = 0; r < R; ++r) {
            const float sx = x_scales[int64_t(r) * w.num_groups + g];
            const __m512 t = _mm512_mul_ps(_mm512_set1_ps(sx), scale);
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), t, acc[r]);
            if constexpr (kScheme == Scheme::kMin) {
                const int32_t sum_x = x_sums[int64_t(r) * w.num_groups + g];
                const __m512 u = _mm512_set1_ps(static_cast<float>(sum_x) * sx);
                acc[r] = _mm512_fmadd_ps(u, load_scales<kScale>(w.minima, index), acc[r]);
            }
        }
    }
    for (int r = 0; r < R; ++r) store(w, block, acc[r], out + r * out_stride, accumulate);
}

template <WeightKind kKind, Scheme kScheme, ScaleType kScale>
void group_rows(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
                float* out, ptrdiff_t out_stride, bool accumulate) {
    for (int32_t block = block_begin; block < block_end; ++block) {
        for_row_tiles(x.rows, [&]<int R>(int32_t row) {
            group_tile<kKind, kScheme, kScale, R>(w, x, block, row, out + row * out_stride,
                                                  out_stride, accumulate);
        });
    }
}

template <WeightKind kKind, Scheme kScheme>
void group_scheme(const LinearWeight& w, const Activations& x, int32_t block_begin,
                  int32_t block_end, float* out, ptrdiff_t out_stride, bool accumulate) {
    const LinearFn kernel = w.scale_type == ScaleType::kF16
                                ? group_rows<kKind, kScheme, ScaleType::kF16>
                                : group_rows<kKind, kScheme, ScaleType::kF32>;
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

void int4_group(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
                float* out, ptrdiff_t out_stride, bool accumulate) {
    constexpr WeightKind kKind = WeightKind::kInt4Group;
    LinearFn kernel = group_scheme<kKind, Scheme::kSym>;
    if (w.scheme == Scheme::kZeroPoint) kernel = group_scheme<kKind, Scheme::kZeroPoint>;
    if (w.scheme == Scheme::kMin) kernel = group_scheme<kKind, Scheme::kMin>;
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

// ---- 4-bit codes, bf16 activations: codes less their offset are exact in float32 ----

// One column of the four in each lane of v, from bit kShift on, less the offset.
template <int kShift>
inline __m512 column(__m512i v, __m512i offset) {
    const __m512i code = _mm512_and_si512(_mm512_srli_epi32(v, kShift), _mm512_set1_epi32(15));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(code, offset));
}

// The 16 columns in the low (kHigh 0) or the high nibbles (kHigh 4) of one block of 32 join the
// chains. wide: their even columns, the odd ones 16 floats on, 32 floats a row.
template <int kHigh, int R>
inline void bf16_half(const uint8_t* codes, __m512i offset, const float* wide, __m512* e,
                      __m512* o) {
    for (int i = 0; i < 4; ++i) {
        if (R == 1 && kHigh == 0) prefetch(codes + 64 * i);
        const __m512i v = load(codes + 64 * i);
        const __m512 a = column<kHigh>(v, offset), b = column<kHigh + 8>(v, offset);
        const __m512 c = column<kHigh + 16>(v, offset), d = column<kHigh + 24>(v, offset);
        for (int r = 0; r < R; ++r) {
            const float* x = wide + 32 * r + 2 * i;
            e[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[0]), a, e[r]);
            o[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[16]), b, o[r]);
            e[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[1]), c, e[r]);
            o[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[17]), d, o[r]);
        }
    }
}

template <Scheme kScheme, ScaleType kScale, int R>
void bf16_groups_tile(const LinearWeight& w, const Activations& x, int32_t block, int32_t row,
                      float* out, ptrdiff_t out_stride, bool accumulate) {
    alignas(64) float wide[R * 32];
    const auto* codes = static_cast<const uint8_t*>(w.codes) + int64_t(block) * w.k_padded * 8;
    const uint16_t* rows = x.bf16 + int64_t(row) * w.k_padded;
    __m512 acc[R], product[R];
    for (int r = 0; r < R; ++r) acc[r] = product[r] = _mm512_setzero_ps();
    __m512i offset = _mm512_set1_epi32(kScheme == Scheme::kSym ? 8 : 0);
    auto begin_group = [&](int32_t g) {
        if constexpr (kScheme == Scheme::kZeroPoint) {
            const int32_t last = w.num_groups - 1;
            const uint8_t* zeros = w.zeros + scale_index(w, block, g < last ? g : last);
            offset = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)));
        }
    };
    auto end_group = [&](int32_t g) {
        if (g >= w.num_groups) return;  // columns beyond k
        const int64_t index = scale_index(w, block, g);
        const __m512 scale = load_scales<kScale>(w.scales, index);
        for (int r = 0; r < R; ++r) {
            acc[r] = _mm512_fmadd_ps(product[r], scale, acc[r]);
            product[r] = _mm512_setzero_ps();
            if constexpr (kScheme == Scheme::kMin) {
                const float sum = x.scales[int64_t(row + r) * w.num_groups + g];
                acc[r] = _mm512_fmadd_ps(_mm512_set1_ps(sum), load_scales<kScale>(w.minima, index),
                                         acc[r]);
            }
        }
    };
    __m512 e[R], o[R];
    auto begin_chains = [&] {
        for (int r = 0; r < R; ++r) e[r] = o[r] = _mm512_setzero_ps();
    };
    auto end_chains = [&] {
        for (int r = 0; r < R; ++r) {
            product[r] = _mm512_add_ps(product[r], _mm512_add_ps(e[r], o[r]));
        }
    };
    for (int32_t k = 0; k < w.k_padded; k += 32) {
        widen_rows<R>(rows + k, w.k_padded, 32, wide);
        const uint8_t* bytes = codes + int64_t(k) * 8;
        if (k % w.group == 0) begin_group(k / w.group);
        begin_chains();
        bf16_half<0, R>(bytes, offset, wide, e, o);
        if (w.group == 16) {
            end_chains();
            end_group(k / 16);
            begin_group(k / 16 + 1);
            begin_chains();
        }
        bf16_half<4, R>(bytes, offset, wide + 8, e, o);
        end_chains();
        if ((k + 32) % w.group == 0 || k + 32 == w.k_padded) end_group((k + 31) / w.group);
    }
    for (int r = 0; r < R; ++r) store(w, block, acc[r], out + r * out_stride, accumulate);
}

template <Scheme kScheme, ScaleType kScale>
void bf16_groups(const LinearWeight& w, const Activations& x, int32_t block_begin,
                 int32_t block_end, float* out, ptrdiff_t out_stride, bool accumulate) {
    for (int32_t block = block_begin; block < block_end; ++block) {
        for_row_tiles(x.rows, [&]<int R>(int32_t row) {
            bf16_groups_tile<kScheme, kScale, R>(w, x, block, row, out + row * out_stride,
                                                 out_stride, accumulate);
        });
    }
}

template <Scheme kScheme>
LinearFn bf16_scheme(ScaleType scale_type) {
    return scale_type == ScaleType::kF16 ? bf16_groups<kScheme, ScaleType::kF16>
                                         : bf16_groups<kScheme, ScaleType::kF32>;
}

void int4_bf16(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
               float* out, ptrdiff_t out_stride, bool accumulate) {
    LinearFn kernel = bf16_scheme<Scheme::kSym>(w.scale_type);
    if (w.scheme == Scheme::kZeroPoint) kernel = bf16_scheme<Scheme::kZeroPoint>(w.scale_type);
    if (w.scheme == Scheme::kMin) kernel = bf16_scheme<Scheme::kMin>(w.scale_type);
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

// ---- e4m3 codes, bf16 activations ----

// The e4m3 values of one column. As the bits of an f16 a code's exponent is 8 too small, subnormal
// numbers included, which the conversion reads whatever MXCSR says; the product is exact.
inline __m512 fp8_column(const uint8_t* codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7),
                                            _mm256_set1_epi16(int16_t(0xbfff)));
    return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f));
}

template <ScaleType kScale, int R>
void fp8_tile(const LinearWeight& w, const Activations& x, int32_t block, int32_t row, float* out,
              ptrdiff_t out_stride, bool accumulate) {
    alignas(64) float wide[R * 32];
    const auto* codes = static_cast<const uint8_t*>(w.codes) + int64_t(block) * w.k_padded * 16;
    const uint16_t* rows = x.bf16 + int64_t(row) * w.k_padded;
    __m512 acc[R], product[R], e[R], o[R];
    for (int r = 0; r < R; ++r) acc[r] = product[r] = e[r] = o[r] = _mm512_setzero_ps();
    int32_t g = 0, group_end = w.group;
    for (int32_t k = 0; k < w.k_padded; k += 16) {
        const int32_t half = k % 32;
        if (half == 0) widen_rows<R>(rows + k, w.k_padded, 32, wide);
        for (int i = half / 2; i < half / 2 + 8; ++i, codes += 32) {
            if (R == 1 && i % 2 == 0) prefetch(codes);
            const __m512 evens = fp8_column(codes), odds = fp8_column(codes + 16);
            for (int r = 0; r < R; ++r) {
                e[r] = _mm512_fmadd_ps(_mm512_set1_ps(wide[32 * r + i]), evens, e[r]);
                o[r] = _mm512_fmadd_ps(_mm512_set1_ps(wide[32 * r + i + 16]), odds, o[r]);
            }
        }
        const bool ends = k + 16 == group_end || k + 16 == w.k_padded;
        if (half == 0 && !ends) continue;
        for (int r = 0; r < R; ++r) {
            product[r] = _mm512_add_ps(product[r], _mm512_add_ps(e[r], o[r]));
            e[r] = o[r] = _mm512_setzero_ps();
        }
        if (!ends) continue;
        if (g == w.num_groups) break;  // columns beyond k
        const __m512 scale = load_scales<kScale>(w.scales, scale_index(w, block, g));
        for (int r = 0; r < R; ++r) {
            acc[r] = _mm512_fmadd_ps(product[r], scale, acc[r]);
            product[r] = _mm512_setzero_ps();
        }
        ++g;
        group_end += w.group;
    }
    for (int r = 0; r < R; ++r) store(w, block, acc[r], out + r * out_stride, accumulate);
}

template <ScaleType kScale>
void fp8_rows(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
              float* out, ptrdiff_t out_stride, bool accumulate) {
    for (int32_t block = block_begin; block < block_end; ++block) {
        for_row_tiles(x.rows, [&]<int R>(int32_t row) {
            fp8_tile<kScale, R>(w, x, block, row, out + row * out_stride, out_stride, accumulate);
        });
    }
}

void fp8(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
         float* out, ptrdiff_t out_stride, bool accumulate) {
    const LinearFn kernel =
        w.scale_type == ScaleType::kF16 ? fp8_rows<ScaleType::kF16> : fp8_rows<ScaleType::kF32>;
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

void int8_group(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
                float* out, ptrdiff_t out_stride, bool accumulate) {
    constexpr WeightKind kKind = WeightKind::kInt8Group;
    LinearFn kernel = group_scheme<kKind, Scheme::kSym>;
    if (w.scheme == Scheme::kMin) kernel = group_scheme<kKind, Scheme::kMin>;
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

}  // namespace

const LinearKernels linear_kernels = {bf16, int8_row, int8_group, int4_group, int4_bf16, fp8};

}  // namespace trivet::avx512
