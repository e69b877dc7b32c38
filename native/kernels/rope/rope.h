// Rotary embedding of one head at one position, rotate-half form: with lo = x[0:half], hi =
// x[half:], out_lo = fma(-hi, sin, lo * cos), out_hi = fma(lo, sin, hi * cos).
//
// x, out: float32 [2 * half], which may be the same but not overlap otherwise; cos, sin: float32
// [half] of this position. No alignment.
#pragma once
#include <cstdint>

namespace trivet {

struct RopeKernels {
    void (*rotate)(const float* x, const float* cos, const float* sin, int32_t half, float* out);
};

namespace generic {
extern const RopeKernels rope_kernels;
}
namespace avx2 {
extern const RopeKernels rope_kernels;
}
namespace avx512 {
extern const RopeKernels rope_kernels;
}

}  // namespace trivet
