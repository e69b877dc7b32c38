// Activations for the linear kernels: bf16 rounding, int8 per group, int8 per row after a block Hadamard.
//
// One row in, one row out; rows are independent, so threads may take any rows. x: float32 [k], 64-byte
// aligned, not modified. Outputs are padded with zeros to k_padded. Numerics: HACKING.md.
#pragma once
#include <cstdint>

namespace trivet {

struct QuantizeKernels {
    void (*to_bf16)(const float* x, int32_t k, int32_t k_padded, uint16_t* out);
    // scales and sums: [ceil(k / group)].
    void (*to_int8_group)(const float* x, int32_t k, int32_t k_padded, int32_t group, int8_t* codes,
                          float* scales, int32_t* sums);
    // scratch: float32 [k_padded]. hadamard: block width (a power of two dividing k, 1 for none).
    void (*to_int8_row)(const float* x, int32_t k, int32_t k_padded, int32_t hadamard, float* scratch,
                        int8_t* codes, float* scale, int32_t* sum);
};

namespace generic { extern const QuantizeKernels quantize_kernels; }
namespace avx2 { extern const QuantizeKernels quantize_kernels; }
namespace avx512 { extern const QuantizeKernels quantize_kernels; }

}  // namespace trivet
