// Activations for the linear kernels: bf16 rounding, int8 per group, int8 per row after a block
// Hadamard.
//
// One row in, one row out; rows are independent, so threads may take any rows. x: float32 [k], not
// modified. Outputs are padded with zeros to k_padded, a multiple of 64. Numerics: HACKING.md.
//
// A row or group that holds a NaN or an infinity gets that as its scale, so that its outputs are
// not finite either; its codes are defined (a NaN product becomes -127) but mean nothing.
#pragma once
#include <cstdint>

namespace trivet {

struct QuantizeKernels {
    void (*to_bf16)(const float* x, int32_t k, int32_t k_padded, uint16_t* out);
    // group: 16 or a multiple of 32. scales and sums: [ceil(k / group)].
    void (*to_int8_group)(const float* x, int32_t k, int32_t k_padded, int32_t group, int8_t* codes,
                          float* scales, int32_t* sums);
    // scratch: float32 [k_padded]. hadamard: block width (hadamard_width(k), or 1 for none).
    // amax: the stored range of every row, or 0: each row's own.
    void (*to_int8_row)(const float* x, int32_t k, int32_t k_padded, int32_t hadamard, float amax,
                        float* scratch, int8_t* codes, float* scale, int32_t* sum);
    // The block Hadamard alone: out float32 [k], not x. hadamard divides k.
    void (*rotate)(const float* x, int32_t k, int32_t hadamard, float* out);
};

// Sums of the bf16 values x [k_padded] of each group, as products with ones: one version for every
// level. sums: [num_groups].
void sum_bf16_groups(const uint16_t* x, int32_t k_padded, int32_t group, int32_t num_groups,
                     float* sums);

// Static, not inline: ISA files export nothing but their tables.
// The largest power of two up to 64 that divides k. 1 means no rotation.
static inline int32_t hadamard_width(int32_t k) {
    const int32_t power = k & -k;
    return power < 64 ? power : 64;
}

// The range that a row's codes span: the stored one, if there is one and the row is finite.
static inline float row_range(float largest, float amax) {
    constexpr float kLargestFinite = 3.40282346638528859812e+38f;
    return amax > 0.0f && largest <= kLargestFinite ? amax : largest;
}

// 1 / sqrt(width), rounded to float32.
static inline float hadamard_norm(int32_t width) {
    constexpr float kInverseRoot2 = 0.70710678118654752440f;
    float norm = 1.0f;
    for (; width >= 4; width /= 4) norm *= 0.5f;
    return width == 2 ? norm * kInverseRoot2 : norm;
}

namespace generic {
extern const QuantizeKernels quantize_kernels;
}
namespace avx2 {
extern const QuantizeKernels quantize_kernels;
}
namespace avx512 {
extern const QuantizeKernels quantize_kernels;
}

}  // namespace trivet
