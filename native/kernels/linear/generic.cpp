// The linear kernels as the numerics contract writes them down: one channel, one row at a time.
#include "kernels/linear/linear.h"
#include "kernels/math/scalar.h"

namespace trivet::generic {
namespace {

constexpr int32_t kChannels = 16;

// Exact for every f16, subnormal numbers included.
float from_f16(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16;
    const uint32_t exponent = bits >> 10 & 0x1f;
    const uint32_t mantissa = bits & 0x3ff;
    if (exponent == 0) {
        return bits_float(float_bits(static_cast<float>(mantissa) * 0x1p-24f) | sign);
    }
    if (exponent == 31) return bits_float(sign | 0x7f800000 | mantissa << 13);
    return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

float load_scale(const void* values, ScaleType type, int64_t index) {
    if (type == ScaleType::kF32) return static_cast<const float*>(values)[index];
    return from_f16(static_cast<const uint16_t*>(values)[index]);
}

// Code of channel `lane` of block `block` at column k, as stored (4-bit codes unsigned).
int32_t code_at(const LinearWeight& w, int32_t block, int32_t lane, int32_t k) {
    const int64_t row = int64_t(block) * w.k_padded;  // columns of the blocks before
    if (is_int4(w.kind)) {
        const auto* bytes = static_cast<const uint8_t*>(w.codes) + row * 8;
        const int32_t inner = k % 16;
        const uint8_t byte = bytes[(k / 32) * 256 + (inner / 4) * 64 + lane * 4 + inner % 4];
        return k % 32 < 16 ? byte & 15 : byte >> 4;
    }
    const auto* bytes = static_cast<const int8_t*>(w.codes) + row * 16;
    return bytes[(k / 4) * 64 + lane * 4 + k % 4];
}

// The value of the e4m3 code of channel `lane` of block `block` at column k.
float fp8_at(const LinearWeight& w, int32_t block, int32_t lane, int32_t k) {
    const auto* codes = static_cast<const uint8_t*>(w.codes);
    const uint8_t code = codes[(int64_t(block) * w.k_padded + k) * 16 + lane];
    const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                          : bits_float((exponent + 120) << 23 | mantissa << 20);
    return code & 0x80 ? -magnitude : magnitude;
}

void store(const LinearWeight& w, float y, int32_t channel, float* out, bool accumulate) {
    if (w.bias != nullptr) y = y + w.bias[channel];
    out[channel] = accumulate ? out[channel] + y : y;
}

// Calls body(row, block, lane) for every output of the call and stores what it returns.
template <class Body>
void for_each_output(const LinearWeight& w, const Activations& x, int32_t block_begin,
                     int32_t block_end, float* out, ptrdiff_t out_stride, bool accumulate,
                     Body body) {
    for (int32_t row = 0; row < x.rows; ++row) {
        for (int32_t block = block_begin; block < block_end; ++block) {
            for (int32_t lane = 0; lane < kChannels; ++lane) {
                const int32_t channel = block * kChannels + lane;
                if (channel >= w.n) break;
                store(w, body(row, block, lane), channel, out + row * out_stride, accumulate);
            }
        }
    }
}

void bf16(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
          float* out, ptrdiff_t out_stride, bool accumulate) {
    auto dot = [&](int32_t row, int32_t block, int32_t lane) {
        const uint16_t* a = x.bf16 + int64_t(row) * w.k_padded;
        const auto* b = static_cast<const uint16_t*>(w.codes) + int64_t(block) * w.k_padded * 16;
        float acc = 0.0f;
        for (int32_t k = 0; k < w.k_padded; k += 32) {
            float even = 0.0f, odd = 0.0f;
            for (int32_t i = k; i < k + 32; i += 2) {
                const uint16_t* pair = b + (i / 2) * 32 + lane * 2;
                even = fma_f32(from_bf16(a[i]), from_bf16(pair[0]), even);
                odd = fma_f32(from_bf16(a[i + 1]), from_bf16(pair[1]), odd);
            }
            acc = acc + (even + odd);
        }
        return acc;
    };
    for_each_output(w, x, block_begin, block_end, out, out_stride, accumulate, dot);
}

void int8_row(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
              float* out, ptrdiff_t out_stride, bool accumulate) {
    auto dot = [&](int32_t row, int32_t block, int32_t lane) {
        const int8_t* a = x.codes + int64_t(row) * w.k_padded;
        int32_t sum = 0;
        for (int32_t k = 0; k < w.k; ++k) sum += a[k] * code_at(w, block, lane, k);
        const float scale = static_cast<const float*>(w.scales)[block * kChannels + lane];
        const float t = x.scales[row] * scale;
        return static_cast<float>(sum) * t;
    };
    for_each_output(w, x, block_begin, block_end, out, out_stride, accumulate, dot);
}

// Groups of 4-bit codes (all schemes) and of 8-bit codes (schemes sym and min). A group's sum is
// exact: at most 128 products of at most 127 * 127.
void int_group(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
               float* out, ptrdiff_t out_stride, bool accumulate) {
    auto dot = [&](int32_t row, int32_t block, int32_t lane) {
        const int8_t* a = x.codes + int64_t(row) * w.k_padded;
        float acc = 0.0f;
        for (int32_t g = 0; g < w.num_groups; ++g) {
            const int64_t index = scale_index(w, block, g) + lane;
            int32_t offset = 0;
            if (is_int4(w.kind) && w.scheme == Scheme::kSym) offset = 8;
            if (w.scheme == Scheme::kZeroPoint) offset = w.zeros[index];
            const int32_t end = w.k < (g + 1) * w.group ? w.k : (g + 1) * w.group;
            int32_t sum = 0;
            for (int32_t k = g * w.group; k < end; ++k) {
                sum += (code_at(w, block, lane, k) - offset) * a[k];
            }
            const float sx = x.scales[int64_t(row) * w.num_groups + g];
            const float t = sx * load_scale(w.scales, w.scale_type, index);
            acc = fma_f32(static_cast<float>(sum), t, acc);
            if (w.scheme == Scheme::kMin) {
                const int32_t sum_x = x.sums[int64_t(row) * w.num_groups + g];
                const float u = static_cast<float>(sum_x) * sx;
                acc = fma_f32(u, load_scale(w.minima, w.scale_type, index), acc);
            }
        }
        return acc;
    };
    for_each_output(w, x, block_begin, block_end, out, out_stride, accumulate, dot);
}

// 4-bit codes less their offset and e4m3 values are exact in bf16: each group is a bf16 product,
// scaled once.
void groups_bf16(const LinearWeight& w, const Activations& x, int32_t block_begin,
                 int32_t block_end, float* out, ptrdiff_t out_stride, bool accumulate) {
    auto dot = [&](int32_t row, int32_t block, int32_t lane) {
        const uint16_t* a = x.bf16 + int64_t(row) * w.k_padded;
        float acc = 0.0f;
        for (int32_t g = 0; g < w.num_groups; ++g) {
            const int64_t index = scale_index(w, block, g) + lane;
            int32_t offset = w.scheme == Scheme::kSym ? 8 : 0;
            if (w.scheme == Scheme::kZeroPoint) offset = w.zeros[index];
            auto value = [&](int32_t k) {
                if (w.kind == WeightKind::kFp8) return fp8_at(w, block, lane, k);
                return static_cast<float>(code_at(w, block, lane, k) - offset);
            };
            const int32_t begin = g * w.group;
            const int32_t end = w.k_padded < begin + w.group ? w.k_padded : begin + w.group;
            float product = 0.0f;
            for (int32_t k = begin; k < end; k += 32) {
                float even = 0.0f, odd = 0.0f;
                for (int32_t i = k; i < k + 32 && i < end; i += 2) {
                    even = fma_f32(from_bf16(a[i]), value(i), even);
                    odd = fma_f32(from_bf16(a[i + 1]), value(i + 1), odd);
                }
                product = product + (even + odd);
            }
            acc = fma_f32(product, load_scale(w.scales, w.scale_type, index), acc);
            if (w.scheme == Scheme::kMin) {
                const float sum_x = x.scales[int64_t(row) * w.num_groups + g];
                acc = fma_f32(sum_x, load_scale(w.minima, w.scale_type, index), acc);
            }
        }
        return acc;
    };
    for_each_output(w, x, block_begin, block_end, out, out_stride, accumulate, dot);
}

}  // namespace

const LinearKernels linear_kernels = {bf16,      int8_row,    int_group,
                                      int_group, groups_bf16, groups_bf16};

}  // namespace trivet::generic
