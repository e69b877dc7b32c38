// The activation kernels as the numerics contract writes them down.
#include "kernels/math/scalar.h"
#include "kernels/quantize/quantize.h"

namespace trivet::generic {
namespace {

// The largest magnitude by its bits, so that a NaN counts as larger than everything.
float max_magnitude(const float* x, int32_t count) {
    uint32_t largest = 0;
    for (int32_t i = 0; i < count; ++i) {
        const uint32_t magnitude = float_bits(x[i]) & 0x7fffffff;
        if (magnitude > largest) largest = magnitude;
    }
    return bits_float(largest);
}

// Quantizes `count` values with the scale of a range. A NaN product becomes -127.
void quantize_span(const float* x, int32_t count, float largest, int8_t* codes, float* scale,
                   int32_t* sum) {
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    int32_t total = 0;
    for (int32_t i = 0; i < count; ++i) {
        float v = x[i] * inverse;
        v = v > -127.0f ? v : -127.0f;
        v = v < 127.0f ? v : 127.0f;
        // Adding the magic number rounds to the nearest even integer, left in the low bits.
        const auto code =
            static_cast<int8_t>(float_bits(v + kRoundMagic) - float_bits(kRoundMagic));
        codes[i] = code;
        total += code;
    }
    *scale = largest / 127.0f;
    *sum = total;
}

void to_bf16(const float* x, int32_t k, int32_t k_padded, uint16_t* out) {
    for (int32_t i = 0; i < k; ++i) out[i] = trivet::to_bf16(x[i]);
    for (int32_t i = k; i < k_padded; ++i) out[i] = 0;
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

void rotate(const float* x, int32_t k, int32_t hadamard, float* out) {
    for (int32_t i = 0; i < k; ++i) out[i] = x[i];
    for (int32_t stride = 1; stride < hadamard; stride *= 2) {
        for (int32_t i = 0; i < k; ++i) {
            if (i & stride) continue;
            const float a = out[i], b = out[i + stride];
            out[i] = a + b;
            out[i + stride] = a - b;
        }
    }
    if (hadamard > 1) {
        const float norm = hadamard_norm(hadamard);
        for (int32_t i = 0; i < k; ++i) out[i] = out[i] * norm;
    }
}

void to_int8_row(const float* x, int32_t k, int32_t k_padded, int32_t hadamard, float amax,
                 float* scratch, int8_t* codes, float* scale, int32_t* sum) {
    rotate(x, k, hadamard, scratch);
    quantize_span(scratch, k, row_range(max_magnitude(scratch, k), amax), codes, scale, sum);
    for (int32_t i = k; i < k_padded; ++i) codes[i] = 0;
}

}  // namespace

const QuantizeKernels quantize_kernels = {to_bf16, to_int8_group, to_int8_row, rotate};

}  // namespace trivet::generic
