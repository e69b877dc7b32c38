#include "kernels/embedding/embedding.h"

#include "kernels/math/scalar.h"

namespace trivet {
namespace {

float from_f16(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1fu;
    const uint32_t fraction = half & 0x3ffu;
    if (exponent == 31) return bits_float(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
        const float value = static_cast<float>(fraction) * 0x1p-24f;
        return bits_float(sign | float_bits(value));
    }
    return bits_float(sign | (exponent + 112u) << 23 | fraction << 13);
}

float load_scale(const void* scales, ScaleType type, int64_t index) {
    return type == ScaleType::kF16 ? from_f16(static_cast<const uint16_t*>(scales)[index])
                                   : static_cast<const float*>(scales)[index];
}

int32_t nibble(const uint8_t* codes, int64_t block, int32_t k_padded, int32_t lane, int32_t k) {
    const int32_t within = k % 32, row = within % 16 / 4;
    const uint8_t byte =
        codes[(((block * (k_padded / 32) + k / 32) * 4 + row) * 16 + lane) * 4 + within % 4];
    return within < 16 ? byte & 15 : byte >> 4;
}

}  // namespace

void lookup_row(const LinearWeight& w, int32_t token, float* out) {
    const int64_t block = token / 16;
    const int32_t lane = token % 16;
    if (w.kind == WeightKind::kBf16) {
        const uint16_t* codes = static_cast<const uint16_t*>(w.codes) + block * w.k_padded * 16;
        for (int32_t k = 0; k < w.k; ++k) out[k] = from_bf16(codes[k / 2 * 32 + lane * 2 + k % 2]);
        return;
    }
    for (int32_t g = 0; g < w.num_groups; ++g) {
        const int64_t index = scale_index(w, static_cast<int32_t>(block), g) + lane;
        const float scale = load_scale(w.scales, w.scale_type, index);
        const int32_t end = w.k < (g + 1) * w.group ? w.k : (g + 1) * w.group;
        for (int32_t k = g * w.group; k < end; ++k) {
            if (w.kind == WeightKind::kInt8Group) {
                const int8_t* codes = static_cast<const int8_t*>(w.codes);
                const int8_t code =
                    codes[((block * (w.k_padded / 4) + k / 4) * 16 + lane) * 4 + k % 4];
                out[k] = w.scheme == Scheme::kMin
                             ? fma_f32(scale, static_cast<float>(code),
                                       load_scale(w.minima, w.scale_type, index))
                             : scale * static_cast<float>(code);
                continue;
            }
            const int32_t code =
                nibble(static_cast<const uint8_t*>(w.codes), block, w.k_padded, lane, k);
            if (w.scheme == Scheme::kMin) {
                const float minimum = load_scale(w.minima, w.scale_type, index);
                out[k] = fma_f32(scale, static_cast<float>(code), minimum);
            } else {
                const int32_t zero = w.scheme == Scheme::kZeroPoint ? w.zeros[index] : 8;
                out[k] = scale * static_cast<float>(code - zero);
            }
        }
    }
}

}  // namespace trivet
