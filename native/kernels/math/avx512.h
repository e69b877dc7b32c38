// The functions of scalar.h on 16 lanes, bit for bit. Included by files compiled for AVX-512 only.
#pragma once
#include <immintrin.h>

#include "kernels/math/scalar.h"

namespace trivet::avx512 {

static inline __m512 exp_ps(__m512 x) {
    // max and min return their second operand when either is NaN.
    x = _mm512_max_ps(_mm512_set1_ps(kExpLow), x);
    x = _mm512_min_ps(_mm512_set1_ps(kExpHigh), x);
    const __m512 magic = _mm512_set1_ps(kRoundMagic);
    const __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(kLog2E), magic);
    const __m512 n = _mm512_sub_ps(shifted, magic);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-kLn2High), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-kLn2Low), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(kExp7), r, _mm512_set1_ps(kExp6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    const __m512i bias = _mm512_set1_epi32(static_cast<int>(0x4b400000u - 127u));
    const __m512i exponent = _mm512_sub_epi32(_mm512_castps_si512(shifted), bias);
    return _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)));
}

static inline __m512 silu_ps(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 negated = _mm512_xor_ps(x, _mm512_set1_ps(-0.0f));
    return _mm512_div_ps(x, _mm512_add_ps(one, exp_ps(negated)));
}

// bf16 bits in the low half of each lane.
static inline __m512i to_bf16_epi32(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 is_nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    const __mmask16 is_zero = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x00800000));
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    rounded =
        _mm512_mask_mov_epi32(rounded, is_nan, _mm512_or_si512(high, _mm512_set1_epi32(0x40)));
    return _mm512_mask_mov_epi32(rounded, is_zero,
                                 _mm512_and_si512(high, _mm512_set1_epi32(0x8000)));
}

static inline void store_bf16(uint16_t* out, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(to_bf16_epi32(x)));
}

// The contract's tree over 16 lanes: l[j] += l[j+8], then +4, +2, +1.
static inline float tree_sum(__m512 lanes) {
    const __m256 eight =
        _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace trivet::avx512
