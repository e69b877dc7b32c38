#include "kernels/math/math.h"
#include "kernels/math/scalar.h"

namespace trivet::generic {
namespace {

void exp(const float* x, int32_t n, float* out) {
    for (int32_t i = 0; i < n; ++i) out[i] = exp_f32(x[i]);
}

}  // namespace

const MathKernels math_kernels = {exp};

}  // namespace trivet::generic
