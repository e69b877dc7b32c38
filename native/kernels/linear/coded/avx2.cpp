// Linear kernels for AVX2 + FMA + F16C: 4-bit and e4m3 codes, bf16 activations.
//
// A group is a bf16 product with the codes less their offset, scaled once. For many rows they are
// unpacked to bf16, kWideColumns at a time, in the layout of bf16 weights; all rows use the panel
// before the next. One or two rows take them as float32 in registers.
#include "kernels/linear/avx2.h"

namespace trivet::avx2 {
namespace {

constexpr int32_t kPanelRows = 24 * kRows;  // rows that share one unpacked panel

enum class Codes { kInt4, kFp8 };

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
        if (k % 4 == 0) prefetch(codes);
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
        prefetch(bytes);
        prefetch(bytes + 128);
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
            bf16_columns<R>(panel + 16 * at, wide + at / 32 * R * kWideStride, end - k,
                            nothing_ahead(panel), product);
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
        if (kHigh == 0) prefetch(codes + 64 * i);
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
            if (i % 2 == 0) prefetch(codes);
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

void int4_bf16(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
               float* out, ptrdiff_t out_stride, bool accumulate) {
    LinearFn kernel = bf16_scheme<Scheme::kSym>(w.scale_type, x.rows);
    if (w.scheme == Scheme::kZeroPoint) {
        kernel = bf16_scheme<Scheme::kZeroPoint>(w.scale_type, x.rows);
    }
    if (w.scheme == Scheme::kMin) kernel = bf16_scheme<Scheme::kMin>(w.scale_type, x.rows);
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
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

}  // namespace

const CodedKernels coded_kernels = {int4_bf16, fp8};

}  // namespace trivet::avx2
