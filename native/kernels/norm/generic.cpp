#include <cmath>

#include "kernels/math/scalar.h"
#include "kernels/norm/norm.h"

namespace trivet::generic {
namespace {

void rms_norm(const float* x, const float* gain, int32_t n, float eps, float* out) {
    float lanes[16] = {};
    for (int32_t i = 0; i < n; ++i) lanes[i % 16] = fma_f32(x[i], x[i], lanes[i % 16]);
    for (int width = 8; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
    }
    const float r = 1.0f / __builtin_sqrtf(lanes[0] / static_cast<float>(n) + eps);
    for (int32_t i = 0; i < n; ++i) out[i] = (x[i] * r) * gain[i];
}

}  // namespace

const NormKernels norm_kernels = {rms_norm};

}  // namespace trivet::generic
