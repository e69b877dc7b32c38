// RMSNorm of one row: out[i] = (x[i] * r) * gain[i], r = 1 / sqrt(sum(x^2) / n + eps).
//
// The sum of squares runs in 16 lanes (lane j takes elements j, j+16, ... by fma) that are added in
// a fixed tree, so that every level gives the same bits. Any n >= 1; no alignment; out must not
// overlap x or gain.
#pragma once
#include <cstdint>

namespace trivet {

struct NormKernels {
    void (*rms_norm)(const float* x, const float* gain, int32_t n, float eps, float* out);
};

namespace generic {
extern const NormKernels norm_kernels;
}
namespace avx2 {
extern const NormKernels norm_kernels;
}
namespace avx512 {
extern const NormKernels norm_kernels;
}

}  // namespace trivet
