#include "kernels/math/avx2.h"

#include "kernels/rope/rope.h"

namespace trivet::avx2 {
namespace {

void rotate(const float* x, const float* cos, const float* sin, int32_t half, float* out) {
    int32_t i = 0;
    for (; i + 8 <= half; i += 8) {
        const __m256 lo = _mm256_loadu_ps(x + i), hi = _mm256_loadu_ps(x + i + half);
        const __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + i);
        _mm256_storeu_ps(out + i, _mm256_fnmadd_ps(hi, s, _mm256_mul_ps(lo, c)));
        _mm256_storeu_ps(out + i + half, _mm256_fmadd_ps(lo, s, _mm256_mul_ps(hi, c)));
    }
    for (; i < half; ++i) {
        const float lo = x[i], hi = x[i + half];
        out[i] = fma_f32(-hi, sin[i], lo * cos[i]);
        out[i + half] = fma_f32(lo, sin[i], hi * cos[i]);
    }
}

}  // namespace

const RopeKernels rope_kernels = {rotate};

}  // namespace trivet::avx2
