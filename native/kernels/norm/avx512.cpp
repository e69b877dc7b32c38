#include "kernels/math/avx512.h"

#include "kernels/norm/norm.h"

namespace trivet::avx512 {
namespace {

void rms_norm(const float* x, const float* gain, int32_t n, float eps, float* out) {
    __m512 lanes = _mm512_setzero_ps();
    for (int32_t i = 0; i < n; i += 16) {
        const __mmask16 mask = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1u);
        const __m512 a = _mm512_maskz_loadu_ps(mask, x + i);
        lanes = _mm512_mask3_fmadd_ps(a, a, lanes, mask);
    }
    const float r = 1.0f / __builtin_sqrtf(tree_sum(lanes) / static_cast<float>(n) + eps);
    const __m512 scale = _mm512_set1_ps(r);
    for (int32_t i = 0; i < n; i += 16) {
        const __mmask16 mask = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1u);
        const __m512 y = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), scale);
        _mm512_mask_storeu_ps(out + i, mask,
                              _mm512_mul_ps(y, _mm512_maskz_loadu_ps(mask, gain + i)));
    }
}

}  // namespace

const NormKernels norm_kernels = {rms_norm};

}  // namespace trivet::avx512
