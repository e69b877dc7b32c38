#include "kernels/math/avx2.h"

#include "kernels/activation/activation.h"

namespace trivet::avx2 {
namespace {

void silu_mul(const float* gate, const float* up, int32_t n, float* out) {
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 activated = silu_ps(_mm256_loadu_ps(gate + i));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(activated, _mm256_loadu_ps(up + i)));
    }
    for (; i < n; ++i) out[i] = silu_f32(gate[i]) * up[i];
}

}  // namespace

const ActivationKernels activation_kernels = {silu_mul};

}  // namespace trivet::avx2
