#include "kernels/math/scalar.h"
#include "kernels/rope/rope.h"

namespace trivet::generic {
namespace {

void rotate(const float* x, const float* cos, const float* sin, int32_t half, float* out) {
    for (int32_t i = 0; i < half; ++i) {
        const float lo = x[i], hi = x[i + half];
        out[i] = fma_f32(-hi, sin[i], lo * cos[i]);
        out[i + half] = fma_f32(lo, sin[i], hi * cos[i]);
    }
}

}  // namespace

const RopeKernels rope_kernels = {rotate};

}  // namespace trivet::generic
