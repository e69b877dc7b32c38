#include "kernels/math/avx512.h"

#include "kernels/math/math.h"

namespace trivet::avx512 {
namespace {

__mmask16 first_lanes(int32_t count) {
    return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1u);
}

void exp(const float* x, int32_t n, float* out) {
    for (int32_t i = 0; i < n; i += 16) {
        const __mmask16 mask = first_lanes(n - i);
        _mm512_mask_storeu_ps(out + i, mask, exp_ps(_mm512_maskz_loadu_ps(mask, x + i)));
    }
}

}  // namespace

const MathKernels math_kernels = {exp};

}  // namespace trivet::avx512
