#include "kernels/quantize/kv_codes.h"

#include "kernels/math/scalar.h"

namespace trivet {
namespace {

// The largest magnitude by its bits, so that a NaN counts as larger than everything.
float max_magnitude(const float* x, int32_t count) {
    uint32_t largest = 0;
    for (int32_t i = 0; i < count; ++i) {
        const uint32_t magnitude = float_bits(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return bits_float(largest);
}

// v rounded to the nearest even integer, |v| < 2^22.
int32_t round_even(float v) {
    return static_cast<int32_t>(float_bits(v + kRoundMagic) - float_bits(kRoundMagic));
}

// The e4m3 code nearest to v (ties to even), |v| <= 448.
uint8_t to_e4m3(float v) {
    const uint32_t bits = float_bits(v), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    // Below 2^-6 the codes are multiples of 2^-9, above they keep three bits of the fraction.
    const uint32_t tiny = static_cast<uint32_t>(round_even(bits_float(magnitude) * 512.0f));
    const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    return static_cast<uint8_t>(sign | (magnitude < 0x3c800000 ? tiny : normal));
}

}  // namespace

void to_fp8(const float* x, int32_t count, uint8_t* codes, float* scale) {
    const float largest = max_magnitude(x, count);
    const float inverse = largest > 0.0f ? 448.0f / largest : 0.0f;
    for (int32_t i = 0; i < count; ++i) {
        float v = x[i] * inverse;
        v = v > -448.0f ? v : -448.0f;
        v = v < 448.0f ? v : 448.0f;
        codes[i] = to_e4m3(v);
    }
    *scale = largest / 448.0f;
}

void to_int4(const float* x, int32_t count, int8_t* codes, float* scale) {
    float low = 0.0f, high = 0.0f;
    for (int32_t i = 0; i < count; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const float largest = max_magnitude(x, count), eight = -low >= high ? 8.0f : -8.0f;
    const float inverse = largest > 0.0f ? eight / largest : 0.0f;
    for (int32_t i = 0; i < count; ++i) {
        float v = x[i] * inverse;
        v = v > -8.0f ? v : -8.0f;
        v = v < 7.0f ? v : 7.0f;
        codes[i] = static_cast<int8_t>(round_even(v));
    }
    *scale = largest / eight;
}

}  // namespace trivet
