#include "kernels/math/avx512.h"

#include "kernels/activation/activation.h"

namespace trivet::avx512 {
namespace {

void silu_mul(const float* gate, const float* up, int32_t n, float* out) {
    for (int32_t i = 0; i < n; i += 16) {
        const __mmask16 mask = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1u);
        const __m512 activated = silu_ps(_mm512_maskz_loadu_ps(mask, gate + i));
        _mm512_mask_storeu_ps(out + i, mask,
                              _mm512_mul_ps(activated, _mm512_maskz_loadu_ps(mask, up + i)));
    }
}

}  // namespace

const ActivationKernels activation_kernels = {silu_mul};

}  // namespace trivet::avx512
