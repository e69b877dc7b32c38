#include "kernels/math/avx2.h"

#include "kernels/math/math.h"

namespace trivet::avx2 {
namespace {

void exp(const float* x, int32_t n, float* out) {
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, exp_ps(_mm256_loadu_ps(x + i)));
    for (; i < n; ++i) out[i] = exp_f32(x[i]);
}

}  // namespace

const MathKernels math_kernels = {exp};

}  // namespace trivet::avx2
