#include "kernels/activation/activation.h"
#include "kernels/math/scalar.h"

namespace trivet::generic {
namespace {

void silu_mul(const float* gate, const float* up, int32_t n, float* out) {
    for (int32_t i = 0; i < n; ++i) out[i] = silu_f32(gate[i]) * up[i];
}

}  // namespace

const ActivationKernels activation_kernels = {silu_mul};

}  // namespace trivet::generic
