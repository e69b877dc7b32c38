// The functions of scalar.h on 8 lanes, bit for bit. Included by files compiled for AVX2 + FMA
// only.
#pragma once
#include <immintrin.h>

#include "kernels/math/scalar.h"

namespace trivet::avx2 {

// exp of x already below kExpHigh (or NaN).
static inline __m256 exp_negative_ps(__m256 x) {
    // max returns its second operand when either is NaN.
    x = _mm256_max_ps(_mm256_set1_ps(kExpLow), x);
    const __m256 magic = _mm256_set1_ps(kRoundMagic);
    const __m256 shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(kLog2E), magic);
    const __m256 n = _mm256_sub_ps(shifted, magic);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-kLn2High), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-kLn2Low), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(kExp7), r, _mm256_set1_ps(kExp6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExp5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExp4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExp3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExp2));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    const __m256i bias = _mm256_set1_epi32(static_cast<int>(0x4b400000u - 127u));
    const __m256i exponent = _mm256_sub_epi32(_mm256_castps_si256(shifted), bias);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

static inline __m256 exp_ps(__m256 x) {
    // min returns its second operand when either is NaN.
    return exp_negative_ps(_mm256_min_ps(_mm256_set1_ps(kExpHigh), x));
}

static inline __m256 silu_ps(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 negated = _mm256_xor_ps(x, _mm256_set1_ps(-0.0f));
    return _mm256_div_ps(x, _mm256_add_ps(one, exp_ps(negated)));
}

// bf16 bits in the low half of each lane.
static inline __m256i to_bf16_epi32(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    const __m256i is_zero = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), is_nan);
    return _mm256_blendv_epi8(rounded, _mm256_and_si256(high, _mm256_set1_epi32(0x8000)), is_zero);
}

// x rounded to bf16 as float32, for results of arithmetic, which are never subnormal.
static inline __m256 round_bf16_ps(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i rounded = _mm256_and_si256(sum, _mm256_set1_epi32(int(0xffff0000u)));
    const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

static inline void store_bf16(uint16_t* out, __m256 x) {
    const __m256i packed = _mm256_packus_epi32(to_bf16_epi32(x), _mm256_setzero_si256());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}

// The contract's tree over 16 lanes held in two halves: l[j] += l[j+8], then +4, +2, +1.
static inline float tree_sum(__m256 low, __m256 high) {
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace trivet::avx2
