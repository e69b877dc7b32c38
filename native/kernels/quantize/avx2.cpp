// Activation kernels for AVX2.
#include "kernels/math/avx2.h"

#include <immintrin.h>

#include "kernels/quantize/quantize.h"

namespace trivet::avx2 {
namespace {

void to_bf16(const float* x, int32_t k, int32_t k_padded, uint16_t* out) {
    int32_t i = 0;
    for (; i + 8 <= k; i += 8) store_bf16(out + i, _mm256_loadu_ps(x + i));
    for (; i < k; ++i) out[i] = trivet::to_bf16(x[i]);
    for (; i < k_padded; ++i) out[i] = 0;
}

inline __m256i magnitude(const float* x) {
    return _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x)), _mm256_set1_epi32(0x7fffffff));
}

// The largest magnitude by its bits.
float max_magnitude(const float* x, int32_t count) {
    __m256i largest = _mm256_setzero_si256();
    int32_t i = 0;
    for (; i + 8 <= count; i += 8) largest = _mm256_max_epu32(largest, magnitude(x + i));
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
    uint32_t result = 0;
    for (uint32_t lane : lanes) result = lane > result ? lane : result;
    for (; i < count; ++i) {
        const uint32_t bits = float_bits(x[i]) & 0x7fffffff;
        result = bits > result ? bits : result;
    }
    return bits_float(result);
}

// max and min return their second operand when the first is NaN, as the contract asks.
inline __m256i quantize8(const float* x, __m256 inverse) {
    __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x), inverse);
    v = _mm256_max_ps(v, _mm256_set1_ps(-127.0f));
    v = _mm256_min_ps(v, _mm256_set1_ps(127.0f));
    return _mm256_cvtps_epi32(v);
}

inline int32_t sum_lanes(__m256i v) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

void quantize_span(const float* x, int32_t count, float largest, int8_t* codes, float* scale,
                   int32_t* sum) {
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const __m256 inverses = _mm256_set1_ps(inverse);
    __m256i total = _mm256_setzero_si256();
    int32_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m256i a = quantize8(x + i, inverses), b = quantize8(x + i + 8, inverses);
        const __m256i c = quantize8(x + i + 16, inverses), d = quantize8(x + i + 24, inverses);
        total = _mm256_add_epi32(total,
                                 _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d)));
        const __m256i packed =
            _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                            _mm256_permutevar8x32_epi32(packed, order));
    }
    for (; i + 8 <= count; i += 8) {
        const __m256i code = quantize8(x + i, inverses);
        total = _mm256_add_epi32(total, code);
        const __m128i pairs =
            _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i), _mm_packs_epi16(pairs, pairs));
    }
    int32_t rest = 0;
    for (; i < count; ++i) {
        float v = x[i] * inverse;
        v = v > -127.0f ? v : -127.0f;
        v = v < 127.0f ? v : 127.0f;
        codes[i] = static_cast<int8_t>(float_bits(v + kRoundMagic) - float_bits(kRoundMagic));
        rest += codes[i];
    }
    *scale = largest / 127.0f;
    *sum = sum_lanes(total) + rest;
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

// (a, b) -> (a + b, a - b) inside one vector; `swapped` has each lane's partner, `minus` the sign
// bit in the lanes of b.
inline __m256 butterfly(__m256 v, __m256 swapped, __m256 minus) {
    return _mm256_add_ps(swapped, _mm256_xor_ps(v, minus));
}

// One block of 8 * kVectors values: the strides 1, 2, 4, ... in the contract's order.
template <int kVectors>
inline void rotate_block(const float* x, __m256 norm, float* out) {
    const __m256 odd = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
    const __m256 pairs = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
    const __m256 upper = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
    __m256 v[kVectors];
    for (int i = 0; i < kVectors; ++i) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        v[i] = butterfly(v[i], _mm256_permute_ps(v[i], 0xb1), odd);
        v[i] = butterfly(v[i], _mm256_permute_ps(v[i], 0x4e), pairs);
        v[i] = butterfly(v[i], _mm256_permute2f128_ps(v[i], v[i], 1), upper);
    }
    for (int stride = 1; stride < kVectors; stride *= 2) {
        for (int i = 0; i < kVectors; ++i) {
            if (i & stride) continue;
            const __m256 a = v[i], b = v[i + stride];
            v[i] = _mm256_add_ps(a, b);
            v[i + stride] = _mm256_sub_ps(a, b);
        }
    }
    for (int i = 0; i < kVectors; ++i) _mm256_storeu_ps(out + 8 * i, _mm256_mul_ps(v[i], norm));
}

template <int kVectors>
void rotate_wide(const float* x, int32_t k, float* out) {
    const __m256 norm = _mm256_set1_ps(hadamard_norm(8 * kVectors));
    for (int32_t i = 0; i < k; i += 8 * kVectors) rotate_block<kVectors>(x + i, norm, out + i);
}

// Widths below one vector: rows whose width has no factor 8.
void rotate_narrow(const float* x, int32_t k, int32_t width, float* out) {
    const float norm = hadamard_norm(width);
    for (int32_t i = 0; i < k; i += width) {
        if (width == 2) {
            out[i] = (x[i] + x[i + 1]) * norm;
            out[i + 1] = (x[i] - x[i + 1]) * norm;
        } else {
            const float a = x[i] + x[i + 1], b = x[i] - x[i + 1];
            const float c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
            out[i] = (a + c) * norm;
            out[i + 1] = (b + d) * norm;
            out[i + 2] = (a - c) * norm;
            out[i + 3] = (b - d) * norm;
        }
    }
}

void rotate(const float* x, int32_t k, int32_t hadamard, float* out) {
    switch (hadamard) {
        case 1:
            for (int32_t i = 0; i < k; ++i) out[i] = x[i];
            break;
        case 8:
            rotate_wide<1>(x, k, out);
            break;
        case 16:
            rotate_wide<2>(x, k, out);
            break;
        case 32:
            rotate_wide<4>(x, k, out);
            break;
        case 64:
            rotate_wide<8>(x, k, out);
            break;
        default:
            rotate_narrow(x, k, hadamard, out);
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

}  // namespace trivet::avx2
