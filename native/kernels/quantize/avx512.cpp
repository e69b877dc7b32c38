// Activation kernels for AVX-512.
#include <immintrin.h>

#include "kernels/math/scalar.h"
#include "kernels/quantize/quantize.h"

namespace trivet::avx512 {
namespace {

inline __mmask16 first_lanes(int32_t count) {
    return static_cast<__mmask16>(count >= 16 ? 0xffff : (1 << count) - 1);
}

// bf16 bits of 16 values: nearest even, NaN quiet, subnormal numbers to zero of their sign.
inline __m256i bf16_bits(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 is_nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    const __mmask16 is_zero = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x00800000));
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    rounded =
        _mm512_mask_mov_epi32(rounded, is_nan, _mm512_or_si512(high, _mm512_set1_epi32(0x40)));
    rounded =
        _mm512_mask_mov_epi32(rounded, is_zero, _mm512_and_si512(high, _mm512_set1_epi32(0x8000)));
    return _mm512_cvtepi32_epi16(rounded);
}

// Lanes beyond k load as zero and become zero, which is the padding.
void to_bf16(const float* x, int32_t k, int32_t k_padded, uint16_t* out) {
    for (int32_t i = 0; i < k_padded; i += 16) {
        const __mmask16 lanes = first_lanes(k - i < 0 ? 0 : k - i);
        const __m256i bits = bf16_bits(_mm512_maskz_loadu_ps(lanes, x + i));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), bits);
    }
}

// The largest magnitude by its bits.
float max_magnitude(const float* x, int32_t count) {
    const __m512i clear_sign = _mm512_set1_epi32(0x7fffffff);
    __m512i largest = _mm512_setzero_si512();
    for (int32_t i = 0; i < count; i += 16) {
        const __m512 v = _mm512_maskz_loadu_ps(first_lanes(count - i), x + i);
        largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(v), clear_sign));
    }
    return bits_float(_mm512_reduce_max_epu32(largest));
}

void quantize_span(const float* x, int32_t count, float largest, int8_t* codes, float* scale,
                   int32_t* sum) {
    const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    __m512i total = _mm512_setzero_si512();
    for (int32_t i = 0; i < count; i += 16) {
        const __mmask16 lanes = first_lanes(count - i);
        // max and min return their second operand when the first is NaN, as the contract asks.
        __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), inverse);
        v = _mm512_max_ps(v, _mm512_set1_ps(-127.0f));
        v = _mm512_min_ps(v, _mm512_set1_ps(127.0f));
        const __m512i code = _mm512_maskz_mov_epi32(lanes, _mm512_cvtps_epi32(v));
        total = _mm512_add_epi32(total, code);
        _mm_mask_storeu_epi8(codes + i, lanes, _mm512_cvtepi32_epi8(code));
    }
    *scale = largest / 127.0f;
    *sum = _mm512_reduce_add_epi32(total);
}

void to_int8_group(const float* x, int32_t k, int32_t k_padded, int32_t group, int8_t* codes,
                   float* scales, int32_t* sums) {
    for (int32_t g = 0, begin = 0; begin < k; ++g, begin += group) {
        const int32_t count = k - begin < group ? k - begin : group;
        const float largest = max_magnitude(x + begin, count);
        quantize_span(x + begin, count, largest, codes + begin, scales + g, sums + g);
    }
    for (int32_t i = k; i < k_padded; ++i) codes[i] = 0;
}

// (a, b) -> (a + b, a - b) inside one vector: `swapped` has each lane's partner, `second` says
// which lanes are b.
inline __m512 butterfly(__m512 v, __m512 swapped, __m512i second) {
    const __m512i minus = _mm512_slli_epi32(second, 31);
    const __m512 negated = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(v), minus));
    return _mm512_add_ps(swapped, negated);
}

// The strides 1, 2, 4 and 8 below `width`, then those across the kVectors vectors.
template <int kVectors>
inline void rotate_block(const float* x, int32_t width, __mmask16 lanes, __m512 norm, float* out) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 v[kVectors];
    for (int i = 0; i < kVectors; ++i) {
        v[i] = _mm512_maskz_loadu_ps(lanes, x + 16 * i);
        v[i] = butterfly(v[i], _mm512_permute_ps(v[i], 0xb1), lane);
        if (width >= 4) {
            v[i] = butterfly(v[i], _mm512_permute_ps(v[i], 0x4e), _mm512_srli_epi32(lane, 1));
        }
        if (width >= 8) {
            v[i] =
                butterfly(v[i], _mm512_shuffle_f32x4(v[i], v[i], 0xb1), _mm512_srli_epi32(lane, 2));
        }
        if (width >= 16) {
            v[i] =
                butterfly(v[i], _mm512_shuffle_f32x4(v[i], v[i], 0x4e), _mm512_srli_epi32(lane, 3));
        }
    }
    for (int stride = 1; stride < kVectors; stride *= 2) {
        for (int i = 0; i < kVectors; ++i) {
            if (i & stride) continue;
            const __m512 a = v[i], b = v[i + stride];
            v[i] = _mm512_add_ps(a, b);
            v[i + stride] = _mm512_sub_ps(a, b);
        }
    }
    for (int i = 0; i < kVectors; ++i) {
        _mm512_mask_storeu_ps(out + 16 * i, lanes, _mm512_mul_ps(v[i], norm));
    }
}

template <int kVectors>
void rotate_wide(const float* x, int32_t k, int32_t width, float* out) {
    const __m512 norm = _mm512_set1_ps(hadamard_norm(width));
    for (int32_t i = 0; i < k; i += 16 * kVectors) {
        const __mmask16 lanes = first_lanes(k - i);
        rotate_block<kVectors>(x + i, width, lanes, norm, out + i);
    }
}

void rotate(const float* x, int32_t k, int32_t hadamard, float* out) {
    if (hadamard == 64) {
        rotate_wide<4>(x, k, hadamard, out);
    } else if (hadamard == 32) {
        rotate_wide<2>(x, k, hadamard, out);
    } else if (hadamard > 1) {
        rotate_wide<1>(x, k, hadamard, out);
    } else {
        for (int32_t i = 0; i < k; ++i) out[i] = x[i];
    }
}

void to_int8_row(const float* x, int32_t k, int32_t k_padded, int32_t hadamard, float amax,
                 float* scratch, int8_t* codes, float* scale, int32_t* sum) {
    const float* values = hadamard > 1 ? scratch : x;
    if (hadamard > 1) rotate(x, k, hadamard, scratch);
    quantize_span(values, k, row_range(max_magnitude(values, k), amax), codes, scale, sum);
    for (int32_t i = k; i < k_padded; ++i) codes[i] = 0;
}

}  // namespace

const QuantizeKernels quantize_kernels = {to_bf16, to_int8_group, to_int8_row, rotate};

}  // namespace trivet::avx512
