// Gated SiLU: out[i] = silu(gate[i]) * up[i] with silu(x) = x / (1 + exp(-x)), exp of
// math/scalar.h.
//
// float32 [n] each, any n >= 0, no alignment; out must not overlap the inputs.
#pragma once
#include <cstdint>

namespace trivet {

struct ActivationKernels {
    void (*silu_mul)(const float* gate, const float* up, int32_t n, float* out);
};

namespace generic {
extern const ActivationKernels activation_kernels;
}
namespace avx2 {
extern const ActivationKernels activation_kernels;
}
namespace avx512 {
extern const ActivationKernels activation_kernels;
}

}  // namespace trivet
