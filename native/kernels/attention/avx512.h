// The primitives of span.h on 16 lanes, for avx512.cpp and for what amx.cpp leaves to vectors.
#pragma once
#include "kernels/attention/span.h"
#include "kernels/math/avx512.h"

namespace trivet {
namespace {

using avx512::exp_ps;
using avx512::to_bf16_epi32;
using avx512::tree_sum;

// Even and odd elements of 16 pairs as float32.
inline void load_pairs(const uint16_t* b, __m512& even, __m512& odd) {
    const __m512i pairs = _mm512_loadu_si512(b);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    odd = _mm512_castsi512_ps(
        _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline void load_pairs(const int8_t* b, __m512& even, __m512& odd) {
    const __m512i pairs =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
    even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16));
    odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 16));
}

// 16 * kWide lanes of kQ vectors: up to 20 chains in registers.
template <int kQ, int kWide, typename T>
inline void product_tile(const float* a, int32_t a_stride, const T* b, int32_t lanes, int32_t pairs,
                         float* c, int32_t c_stride, bool accumulate, Ahead& ahead) {
    Ahead next = ahead;  // by value: in registers
    for (int32_t begin = 0; begin < pairs; begin += 16) {
        const int32_t end = begin + 16 < pairs ? begin + 16 : pairs;
        __m512 even[kQ][kWide], odd[kQ][kWide];
        for (int q = 0; q < kQ; ++q) {
            for (int w = 0; w < kWide; ++w) even[q][w] = odd[q][w] = _mm512_setzero_ps();
        }
        for (int32_t i = begin; i < end; ++i) {
            next.fetch();
            __m512 b_even[kWide], b_odd[kWide];
            for (int w = 0; w < kWide; ++w) {
                load_pairs(b + (i * lanes + 16 * w) * 2, b_even[w], b_odd[w]);
            }
            for (int q = 0; q < kQ; ++q) {
                const __m512 x = _mm512_set1_ps(a[q * a_stride + 2 * i]);
                const __m512 y = _mm512_set1_ps(a[q * a_stride + 2 * i + 1]);
                for (int w = 0; w < kWide; ++w) {
                    even[q][w] = _mm512_fmadd_ps(x, b_even[w], even[q][w]);
                    odd[q][w] = _mm512_fmadd_ps(y, b_odd[w], odd[q][w]);
                }
            }
        }
        for (int q = 0; q < kQ; ++q) {
            for (int w = 0; w < kWide; ++w) {
                float* target = c + q * c_stride + 16 * w;
                const __m512 sum =
                    accumulate || begin > 0 ? _mm512_loadu_ps(target) : _mm512_setzero_ps();
                _mm512_storeu_ps(target, _mm512_add_ps(sum, _mm512_add_ps(even[q][w], odd[q][w])));
            }
        }
    }
    ahead = next;
}

struct Vectors : WidenOneByOne {
    template <int kQ, typename T>
    static void product_rows(const float* a, int32_t a_stride, const T* b, int32_t lanes,
                             int32_t pairs, float* c, int32_t c_stride, bool accumulate,
                             Ahead& ahead) {
        int32_t lane = 0;
        for (; lane + 32 <= lanes; lane += 32) {
            product_tile<kQ, 2>(a, a_stride, b + 2 * lane, lanes, pairs, c + lane, c_stride,
                                accumulate, ahead);
        }
        for (; lane + 16 <= lanes; lane += 16) {
            product_tile<kQ, 1>(a, a_stride, b + 2 * lane, lanes, pairs, c + lane, c_stride,
                                accumulate, ahead);
        }
        product_lanes(kQ, a, a_stride, b, lanes, lane, pairs, c, c_stride, accumulate);
    }

    template <typename T>
    static void product(int32_t num_q, const float* a, int32_t a_stride, const T* b, int32_t lanes,
                        int32_t pairs, float* c, int32_t c_stride, bool accumulate, Ahead ahead) {
        int32_t q = 0;
        auto run = [&](auto rows) {
            product_rows<decltype(rows)::kCount>(a + q * a_stride, a_stride, b, lanes, pairs,
                                                 c + q * c_stride, c_stride, accumulate, ahead);
            q += decltype(rows)::kCount;
        };
        while (num_q - q >= 5) run(Rows<5>{});
        switch (num_q - q) {
            case 4:
                return run(Rows<4>{});
            case 3:
                return run(Rows<3>{});
            case 2:
                return run(Rows<2>{});
            case 1:
                return run(Rows<1>{});
        }
    }

    template <bool kScaled>
    static void softmax(float* scores, int32_t valid, int32_t padded, const float* t,
                        const float* v_scale, float* m, float* l) {
        auto mask_at = [valid](int32_t j) {
            return valid - j >= 16 ? static_cast<__mmask16>(0xffff)
                   : valid <= j    ? static_cast<__mmask16>(0)
                                   : static_cast<__mmask16>((1u << (valid - j)) - 1u);
        };
        const __m512 factor = _mm512_set1_ps(t[0]);
        __m512 tops = _mm512_set1_ps(bits_float(0xff800000u));
        for (int32_t j = 0; j < valid; j += 16) {
            const __m512 scale = kScaled ? _mm512_loadu_ps(t + j) : factor;
            const __m512 s = _mm512_mul_ps(_mm512_loadu_ps(scores + j), scale);
            _mm512_storeu_ps(scores + j, s);
            // max returns its second operand when the first is NaN.
            tops = _mm512_mask_mov_ps(tops, mask_at(j), _mm512_max_ps(s, tops));
        }
        float top = bits_float(0xff800000u);
        alignas(64) float lanes[16];
        _mm512_store_ps(lanes, tops);
        for (int j = 0; j < 16; ++j) top = lanes[j] > top ? lanes[j] : top;
        const __m512 shift = _mm512_set1_ps(top);
        __m512 sums = _mm512_setzero_ps();
        for (int32_t j = 0; j < padded; j += 16) {
            const __mmask16 mask = mask_at(j);
            __m512 p = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + j), shift));
            p = _mm512_maskz_mov_ps(mask, p);
            sums = _mm512_add_ps(sums, p);
            if constexpr (kScaled) {
                p = _mm512_maskz_mov_ps(mask, _mm512_mul_ps(p, _mm512_loadu_ps(v_scale + j)));
            }
            const __m512i bits = _mm512_slli_epi32(to_bf16_epi32(p), 16);
            _mm512_storeu_ps(scores + j, _mm512_castsi512_ps(bits));
        }
        *m = top;
        *l = tree_sum(sums);
    }

    static void settle(float* o, int32_t n) {
        for (int32_t i = 0; i < n; ++i) o[i] += 0.0f;
    }

  private:
    template <int kRows>
    struct Rows {
        static constexpr int kCount = kRows;
    };
};

inline void merge(int32_t num_q, int32_t head_dim, const float* m2, const float* l2,
                  const float* o2, float* m, float* l, float* o) {
    for (int32_t q = 0; q < num_q; ++q) {
        const float top = m2[q] > m[q] ? m2[q] : m[q];
        const float a = exp_f32(m[q] - top), b = exp_f32(m2[q] - top);
        m[q] = top;
        l[q] = fma_f32(l[q], a, l2[q] * b);
        float* row = o + static_cast<ptrdiff_t>(q) * head_dim;
        const float* row2 = o2 + static_cast<ptrdiff_t>(q) * head_dim;
        const __m512 scale = _mm512_set1_ps(a), scale2 = _mm512_set1_ps(b);
        int32_t d = 0;
        for (; d + 16 <= head_dim; d += 16) {
            const __m512 added = _mm512_mul_ps(_mm512_loadu_ps(row2 + d), scale2);
            _mm512_storeu_ps(row + d, _mm512_fmadd_ps(_mm512_loadu_ps(row + d), scale, added));
        }
        for (; d < head_dim; ++d) row[d] = fma_f32(row[d], a, row2[d] * b);
    }
}

inline void finish(int32_t num_q, int32_t head_dim, const float* l, const float* o, float* out,
                   ptrdiff_t out_stride) {
    for (int32_t q = 0; q < num_q; ++q) {
        const float* row = o + static_cast<ptrdiff_t>(q) * head_dim;
        const __m512 divisor = _mm512_set1_ps(l[q]);
        int32_t d = 0;
        for (; d + 16 <= head_dim; d += 16) {
            _mm512_storeu_ps(out + q * out_stride + d,
                             _mm512_div_ps(_mm512_loadu_ps(row + d), divisor));
        }
        for (; d < head_dim; ++d) out[q * out_stride + d] = row[d] / l[q];
    }
}

}  // namespace
}  // namespace trivet
