#include "kernels/math/avx2.h"

#include "kernels/norm/norm.h"

namespace trivet::avx2 {
namespace {

void rms_norm(const float* x, const float* gain, int32_t n, float eps, float* out) {
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        low = _mm256_fmadd_ps(a, a, low);
        high = _mm256_fmadd_ps(b, b, high);
    }
    alignas(32) float lanes[16];
    _mm256_store_ps(lanes, low);
    _mm256_store_ps(lanes + 8, high);
    for (int32_t j = i; j < n; ++j) lanes[j - i] = fma_f32(x[j], x[j], lanes[j - i]);
    const float sum = tree_sum(_mm256_load_ps(lanes), _mm256_load_ps(lanes + 8));
    const float r = 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
    const __m256 scale = _mm256_set1_ps(r);
    for (i = 0; i + 8 <= n; i += 8) {
        const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i), scale);
        _mm256_storeu_ps(out + i, _mm256_mul_ps(y, _mm256_loadu_ps(gain + i)));
    }
    for (; i < n; ++i) out[i] = (x[i] * r) * gain[i];
}

}  // namespace

const NormKernels norm_kernels = {rms_norm};

}  // namespace trivet::avx2
