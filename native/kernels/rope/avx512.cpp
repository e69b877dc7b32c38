#include "kernels/math/avx512.h"

#include "kernels/rope/rope.h"

namespace trivet::avx512 {
namespace {

void rotate(const float* x, const float* cos, const float* sin, int32_t half, float* out) {
    for (int32_t i = 0; i < half; i += 16) {
        const __mmask16 mask =
            half - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (half - i)) - 1u);
        const __m512 lo = _mm512_maskz_loadu_ps(mask, x + i);
        const __m512 hi = _mm512_maskz_loadu_ps(mask, x + i + half);
        const __m512 c = _mm512_maskz_loadu_ps(mask, cos + i);
        const __m512 s = _mm512_maskz_loadu_ps(mask, sin + i);
        _mm512_mask_storeu_ps(out + i, mask, _mm512_fnmadd_ps(hi, s, _mm512_mul_ps(lo, c)));
        _mm512_mask_storeu_ps(out + i + half, mask, _mm512_fmadd_ps(lo, s, _mm512_mul_ps(hi, c)));
    }
}

}  // namespace

const RopeKernels rope_kernels = {rotate};

}  // namespace trivet::avx512
