#include "kernels/math/avx2.h"

#include "kernels/attention/attention.h"
#include "kernels/attention/span.h"

namespace trivet::avx2 {
namespace {

// Even, or odd, elements of 8 pairs as float32. Apart, because both at once take too many
// registers. Of planes the odd ones lie `lanes` further on.
inline __m256 load_even(const uint16_t* b) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

inline __m256 load_odd(const uint16_t* b, int32_t = 0) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    return _mm256_castsi256_ps(
        _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline __m256 load_even(const float* b) { return _mm256_loadu_ps(b); }
inline __m256 load_odd(const float* b, int32_t lanes) { return _mm256_loadu_ps(b + lanes); }

// The lanes from `lane` on.
template <typename T>
inline const T* from_lane(const T* b, int32_t lane) {
    return b + 2 * lane;
}
inline const float* from_lane(const float* b, int32_t lane) { return b + lane; }

// 8 * kWide lanes of kQ vectors: up to 12 chains in registers. The loops over q and w are unrolled
// by order, since GCC 12 otherwise keeps the chains in memory. b: bf16 pairs, or planes.
template <int kQ, int kWide, typename T>
inline void product_tile(const float* a, int32_t a_stride, const T* b, int32_t lanes, int32_t pairs,
                         float* c, int32_t c_stride, bool accumulate, Ahead& ahead) {
    Ahead next = ahead;  // by value: in registers
    for (int32_t begin = 0; begin < pairs; begin += 16) {
        const int32_t end = begin + 16 < pairs ? begin + 16 : pairs;
        __m256 even[kQ][kWide], odd[kQ][kWide];
#pragma GCC unroll 4
        for (int q = 0; q < kQ; ++q) {
#pragma GCC unroll 4
            for (int w = 0; w < kWide; ++w) even[q][w] = odd[q][w] = _mm256_setzero_ps();
        }
#pragma GCC unroll 1
        for (int32_t i = begin; i < end; ++i) {
            next.fetch();
            const T* pairs_of = b + i * lanes * 2;
            __m256 keys[kWide];
#pragma GCC unroll 4
            for (int w = 0; w < kWide; ++w) keys[w] = load_even(from_lane(pairs_of, 8 * w));
#pragma GCC unroll 4
            for (int q = 0; q < kQ; ++q) {
                const __m256 x = _mm256_broadcast_ss(a + q * a_stride + 2 * i);
#pragma GCC unroll 4
                for (int w = 0; w < kWide; ++w) {
                    even[q][w] = _mm256_fmadd_ps(x, keys[w], even[q][w]);
                }
            }
            // Loaded again: what both loads share would take the registers of two chains.
            __asm__("" : "+r"(pairs_of));
#pragma GCC unroll 4
            for (int w = 0; w < kWide; ++w) keys[w] = load_odd(from_lane(pairs_of, 8 * w), lanes);
#pragma GCC unroll 4
            for (int q = 0; q < kQ; ++q) {
                const __m256 x = _mm256_broadcast_ss(a + q * a_stride + 2 * i + 1);
#pragma GCC unroll 4
                for (int w = 0; w < kWide; ++w) {
                    odd[q][w] = _mm256_fmadd_ps(x, keys[w], odd[q][w]);
                }
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < kQ; ++q) {
#pragma GCC unroll 4
            for (int w = 0; w < kWide; ++w) {
                float* target = c + q * c_stride + 8 * w;
                const __m256 sum =
                    accumulate || begin > 0 ? _mm256_loadu_ps(target) : _mm256_setzero_ps();
                _mm256_storeu_ps(target, _mm256_add_ps(sum, _mm256_add_ps(even[q][w], odd[q][w])));
            }
        }
    }
    ahead = next;
}

// Four pairs as float32, in order.
inline __m256 load_pairs(const int8_t* b) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(pairs));
}

// The even and the odd value of a pair, four times.
inline __m256 broadcast_pair(const float* a) {
    int64_t bits;
    __builtin_memcpy(&bits, a, 8);
    return _mm256_castsi256_ps(_mm256_set1_epi64x(bits));
}

// product_tile over codes. Even and odd chains lie side by side, so that four pairs are widened by
// one load and one conversion; putting the sums in order at the end costs more than that saves for
// bf16.
template <int kQ, int kWide>
inline void product_tile(const float* a, int32_t a_stride, const int8_t* b, int32_t lanes,
                         int32_t pairs, float* c, int32_t c_stride, bool accumulate, Ahead& ahead) {
    Ahead next = ahead;  // by value: in registers
    for (int32_t begin = 0; begin < pairs; begin += 16) {
        const int32_t end = begin + 16 < pairs ? begin + 16 : pairs;
        __m256 chains[kQ][2 * kWide];  // even and odd in turns
#pragma GCC unroll 4
        for (int q = 0; q < kQ; ++q) {
#pragma GCC unroll 8
            for (int w = 0; w < 2 * kWide; ++w) chains[q][w] = _mm256_setzero_ps();
        }
#pragma GCC unroll 1
        for (int32_t i = begin; i < end; ++i) {
            next.fetch();
            const int8_t* pairs_of = b + i * lanes * 2;
            __m256 x[kQ];
#pragma GCC unroll 4
            for (int q = 0; q < kQ; ++q) x[q] = broadcast_pair(a + q * a_stride + 2 * i);
#pragma GCC unroll 8
            for (int w = 0; w < 2 * kWide; ++w) {
                const __m256 keys = load_pairs(pairs_of + 8 * w);
#pragma GCC unroll 4
                for (int q = 0; q < kQ; ++q) {
                    chains[q][w] = _mm256_fmadd_ps(x[q], keys, chains[q][w]);
                }
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < kQ; ++q) {
#pragma GCC unroll 4
            for (int w = 0; w < kWide; ++w) {
                // Even plus odd of lanes 0, 1, 4, 5, 2, 3, 6, 7.
                const __m256 added = _mm256_hadd_ps(chains[q][2 * w], chains[q][2 * w + 1]);
                const __m256 ordered = _mm256_castpd_ps(
                    _mm256_permute4x64_pd(_mm256_castps_pd(added), _MM_SHUFFLE(3, 1, 2, 0)));
                float* target = c + q * c_stride + 8 * w;
                const __m256 sum =
                    accumulate || begin > 0 ? _mm256_loadu_ps(target) : _mm256_setzero_ps();
                _mm256_storeu_ps(target, _mm256_add_ps(sum, ordered));
            }
        }
    }
    ahead = next;
}

struct Isa {
    static constexpr bool kHasPlanes = true;

    static void planes(const uint16_t* codes, int32_t pairs, int32_t lanes, float* out) {
        for (int32_t i = 0; i < pairs; ++i, codes += 2 * lanes, out += 2 * lanes) {
            for (int32_t lane = 0; lane < lanes; lane += 8) {
                _mm256_storeu_ps(out + lane, load_even(codes + 2 * lane));
                _mm256_storeu_ps(out + lanes + lane, load_odd(codes + 2 * lane));
            }
        }
    }

    static void planes(const int8_t* codes, int32_t pairs, int32_t lanes, float* out) {
        for (int32_t i = 0; i < pairs; ++i, codes += 2 * lanes, out += 2 * lanes) {
            for (int32_t lane = 0; lane < lanes; lane += 8) {
                const __m256i pair = _mm256_cvtepi16_epi32(
                    _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 2 * lane)));
                const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(pair, 24), 24);
                _mm256_storeu_ps(out + lane, _mm256_cvtepi32_ps(even));
                _mm256_storeu_ps(out + lanes + lane,
                                 _mm256_cvtepi32_ps(_mm256_srai_epi32(pair, 8)));
            }
        }
    }

    template <int kQ, int kWide, typename T>
    static void product_rows(const float* a, int32_t a_stride, const T* b, int32_t lanes,
                             int32_t pairs, float* c, int32_t c_stride, bool accumulate,
                             Ahead& ahead) {
        int32_t lane = 0;
        for (; lane + 8 * kWide <= lanes; lane += 8 * kWide) {
            product_tile<kQ, kWide>(a, a_stride, from_lane(b, lane), lanes, pairs, c + lane,
                                    c_stride, accumulate, ahead);
        }
        for (; lane + 8 <= lanes; lane += 8) {
            product_tile<kQ, 1>(a, a_stride, from_lane(b, lane), lanes, pairs, c + lane, c_stride,
                                accumulate, ahead);
        }
        if constexpr (sizeof(T) < sizeof(float)) {  // planes have no lanes beyond multiples of 8
            product_lanes(kQ, a, a_stride, b, lanes, lane, pairs, c, c_stride, accumulate);
        }
    }

    template <typename T>
    static void product(int32_t num_q, const float* a, int32_t a_stride, const T* b, int32_t lanes,
                        int32_t pairs, float* c, int32_t c_stride, bool accumulate, Ahead ahead) {
        int32_t q = 0;
        // Tiles of three, but four are two twos: a lone vector has too few chains to fill the
        // units.
        for (; num_q - q >= 3 && num_q - q != 4; q += 3) {
            product_rows<3, 2>(a + q * a_stride, a_stride, b, lanes, pairs, c + q * c_stride,
                               c_stride, accumulate, ahead);
        }
        for (; num_q - q >= 2; q += 2) {
            product_rows<2, 2>(a + q * a_stride, a_stride, b, lanes, pairs, c + q * c_stride,
                               c_stride, accumulate, ahead);
        }
        if (q < num_q) {
            product_rows<1, 4>(a + q * a_stride, a_stride, b, lanes, pairs, c + q * c_stride,
                               c_stride, accumulate, ahead);
        }
    }

    static void widen(const int8_t* codes, int32_t count, uint16_t* wide) {
        int32_t i = 0;
        for (; i + 16 <= count; i += 16) {
            const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
            const __m256 lo = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
            const __m256 hi = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)));
            const __m256i packed =
                _mm256_packus_epi32(_mm256_srli_epi32(_mm256_castps_si256(lo), 16),
                                    _mm256_srli_epi32(_mm256_castps_si256(hi), 16));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide + i),
                                _mm256_permute4x64_epi64(packed, 0xd8));
        }
        for (; i < count; ++i) wide[i] = widened(codes[i]);
    }

    static void widen(const Fp8* codes, int32_t count, uint16_t* wide) {
        // Bytes of kSubnormalFp8: the low ones, then the high ones.
        const __m256i tiny = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 0, char(0x80), char(0xc0), 0, 0x20, 0x40, 0x60,  //
                          0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c));
        const __m256i ones = _mm256_set1_epi16(0x0101), high = _mm256_set1_epi16(0x0800);
        int32_t i = 0;
        for (; i + 16 <= count; i += 16) {
            const __m256i code =
                _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
            const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
            const __m256i normal =
                _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), _mm256_set1_epi16(0x3c00));
            const __m256i small = _mm256_and_si256(magnitude, _mm256_set1_epi16(7));
            const __m256i index = _mm256_add_epi16(_mm256_mullo_epi16(small, ones), high);
            const __m256i subnormal = _mm256_shuffle_epi8(tiny, index);
            const __m256i is_tiny = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude);
            const __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(code, 7), 15);
            _mm256_storeu_si256(
                reinterpret_cast<__m256i*>(wide + i),
                _mm256_or_si256(sign, _mm256_blendv_epi8(normal, subnormal, is_tiny)));
        }
        widen_codes(codes + i, count - i, wide + i);
    }

    // 16 bytes of two 4-bit codes each: bf16 of the codes in the low nibbles, and in the high ones.
    static void nibbles(const Int4Pair* codes, __m128i (&low)[2], __m128i (&high)[2]) {
        const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        // Bytes of kInt4Bf16.
        const __m128i tops =
            _mm_setr_epi8(char(0xc1), char(0xc0), char(0xc0), char(0xc0), char(0xc0), char(0xc0),
                          char(0xc0), char(0xbf), 0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40);
        const __m128i ends =
            _mm_setr_epi8(0, char(0xe0), char(0xc0), char(0xa0), char(0x80), 0x40, 0, char(0x80), 0,
                          char(0x80), 0, 0x40, char(0x80), char(0xa0), char(0xc0), char(0xe0));
        const __m128i mask = _mm_set1_epi8(15);
        const __m128i a = _mm_and_si128(v, mask), b = _mm_and_si128(_mm_srli_epi16(v, 4), mask);
        const __m128i a_top = _mm_shuffle_epi8(tops, a), a_end = _mm_shuffle_epi8(ends, a);
        const __m128i b_top = _mm_shuffle_epi8(tops, b), b_end = _mm_shuffle_epi8(ends, b);
        low[0] = _mm_unpacklo_epi8(a_end, a_top);
        low[1] = _mm_unpackhi_epi8(a_end, a_top);
        high[0] = _mm_unpacklo_epi8(b_end, b_top);
        high[1] = _mm_unpackhi_epi8(b_end, b_top);
    }

    static void widen(const Int4Pair* codes, int32_t count, uint16_t* wide) {
        int32_t i = 0;
        for (; i + 16 <= count; i += 16) {
            __m128i low[2], high[2];
            nibbles(codes + i, low, high);
            auto* out = reinterpret_cast<__m128i*>(wide + 2 * i);
            for (int half = 0; half < 2; ++half) {
                _mm_storeu_si128(out + 2 * half, _mm_unpacklo_epi16(low[half], high[half]));
                _mm_storeu_si128(out + 2 * half + 1, _mm_unpackhi_epi16(low[half], high[half]));
            }
        }
        widen_codes(codes + i, count - i, wide + 2 * i);
    }

    static void widen_tokens(const Int4Pair* codes, int32_t dim, uint16_t* wide) {
        const int32_t whole = dim / 2 / 16 * 16;
        for (int32_t pair = 0; pair < kPageTokens / 2; ++pair) {
            const Int4Pair* row = codes + pair * dim;  // two tokens of dim / 2 bytes
            for (int32_t i = 0; i < whole; i += 16) {
                __m128i a_low[2], a_high[2], b_low[2], b_high[2];
                nibbles(row + i, a_low, a_high);
                nibbles(row + dim / 2 + i, b_low, b_high);
                auto* out = reinterpret_cast<__m128i*>(wide + pair * dim * 2 + 4 * i);
                for (int half = 0; half < 2; ++half, out += 4) {
                    // (token a, token b) of the even and of the odd dimensions, then interleaved.
                    const __m128i even_0 = _mm_unpacklo_epi16(a_low[half], b_low[half]);
                    const __m128i even_1 = _mm_unpackhi_epi16(a_low[half], b_low[half]);
                    const __m128i odd_0 = _mm_unpacklo_epi16(a_high[half], b_high[half]);
                    const __m128i odd_1 = _mm_unpackhi_epi16(a_high[half], b_high[half]);
                    _mm_storeu_si128(out, _mm_unpacklo_epi32(even_0, odd_0));
                    _mm_storeu_si128(out + 1, _mm_unpackhi_epi32(even_0, odd_0));
                    _mm_storeu_si128(out + 2, _mm_unpacklo_epi32(even_1, odd_1));
                    _mm_storeu_si128(out + 3, _mm_unpackhi_epi32(even_1, odd_1));
                }
            }
        }
        widen_token_pairs(codes, dim, whole, wide);
    }

    // Scores s * t of keys j..j+7.
    template <bool kScaled>
    static __m256 scaled(const float* scores, const float* t, int32_t j, __m256 factor) {
        return _mm256_mul_ps(_mm256_loadu_ps(scores + j),
                             kScaled ? _mm256_loadu_ps(t + j) : factor);
    }

    template <bool kScaled>
    static void softmax(float* scores, int32_t valid, int32_t padded, const float* t,
                        const float* v_scale, float* m, float* l) {
        const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256 lowest = _mm256_set1_ps(bits_float(0xff800000u));
        const __m256 factor = _mm256_set1_ps(t[0]);
        auto mask_at = [&](int32_t j) {
            return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(valid - j), index));
        };
        // max returns its second operand when the first is NaN.
        __m256 tops = lowest, more = lowest;
        int32_t j = 0;
        for (; j + 16 <= valid; j += 16) {
            tops = _mm256_max_ps(scaled<kScaled>(scores, t, j, factor), tops);
            more = _mm256_max_ps(scaled<kScaled>(scores, t, j + 8, factor), more);
        }
        for (; j < valid; j += 8) {
            const __m256 s = scaled<kScaled>(scores, t, j, factor);
            tops = _mm256_max_ps(_mm256_blendv_ps(lowest, s, mask_at(j)), tops);
        }
        tops = _mm256_max_ps(more, tops);
        const __m128 four =
            _mm_max_ps(_mm256_castps256_ps128(tops), _mm256_extractf128_ps(tops, 1));
        const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        const float top = _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
        const __m256 shift = _mm256_set1_ps(top);
        __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (j = 0; j < padded; j += 16) {
#pragma GCC unroll 2
            for (int32_t half = 0; half < 2; ++half) {
                const int32_t at = j + 8 * half;
                __m256 p =
                    exp_negative_ps(_mm256_sub_ps(scaled<kScaled>(scores, t, at, factor), shift));
                const __m256 mask = mask_at(at);
                if (j + 16 > valid) p = _mm256_and_ps(p, mask);
                sums[half] = _mm256_add_ps(sums[half], p);
                if constexpr (kScaled) {
                    p = _mm256_mul_ps(p, _mm256_loadu_ps(v_scale + at));
                    if (j + 16 > valid) p = _mm256_and_ps(p, mask);
                }
                _mm256_storeu_ps(scores + at, round_bf16_ps(p));
            }
        }
        *m = top;
        *l = tree_sum(sums[0], sums[1]);
    }

    static void settle(float* o, int32_t n) {
        int32_t i = 0;
        const __m256 zero = _mm256_setzero_ps();
        for (; i + 8 <= n; i += 8) {
            _mm256_storeu_ps(o + i, _mm256_add_ps(_mm256_loadu_ps(o + i), zero));
        }
        for (; i < n; ++i) o[i] += 0.0f;
    }
};

void merge(int32_t num_q, int32_t head_dim, const float* m2, const float* l2, const float* o2,
           float* m, float* l, float* o) {
    for (int32_t q = 0; q < num_q; ++q) {
        const float top = m2[q] > m[q] ? m2[q] : m[q];
        const float a = exp_f32(m[q] - top), b = exp_f32(m2[q] - top);
        m[q] = top;
        l[q] = fma_f32(l[q], a, l2[q] * b);
        float* row = o + static_cast<ptrdiff_t>(q) * head_dim;
        const float* row2 = o2 + static_cast<ptrdiff_t>(q) * head_dim;
        const __m256 scale = _mm256_set1_ps(a), scale2 = _mm256_set1_ps(b);
        int32_t d = 0;
        for (; d + 8 <= head_dim; d += 8) {
            const __m256 added = _mm256_mul_ps(_mm256_loadu_ps(row2 + d), scale2);
            _mm256_storeu_ps(row + d, _mm256_fmadd_ps(_mm256_loadu_ps(row + d), scale, added));
        }
        for (; d < head_dim; ++d) row[d] = fma_f32(row[d], a, row2[d] * b);
    }
}

void finish(int32_t num_q, int32_t head_dim, const float* l, const float* o, float* out,
            ptrdiff_t out_stride) {
    for (int32_t q = 0; q < num_q; ++q) {
        const float* row = o + static_cast<ptrdiff_t>(q) * head_dim;
        const __m256 divisor = _mm256_set1_ps(l[q]);
        int32_t d = 0;
        for (; d + 8 <= head_dim; d += 8) {
            _mm256_storeu_ps(out + q * out_stride + d,
                             _mm256_div_ps(_mm256_loadu_ps(row + d), divisor));
        }
        for (; d < head_dim; ++d) out[q * out_stride + d] = row[d] / l[q];
    }
}

}  // namespace

const AttentionKernels attention_kernels = {span<Isa>, merge, finish};

}  // namespace trivet::avx2
