// exp of arrays: the contract's function by itself. Other kernels use the inline versions in
// scalar.h, avx2.h and avx512.h, which these wrap.
//
// float32 [n] each, any n >= 0, no alignment; out may be x.
#pragma once
#include <cstdint>

namespace trivet {

struct MathKernels {
    void (*exp)(const float* x, int32_t n, float* out);
};

namespace generic {
extern const MathKernels math_kernels;
}
namespace avx2 {
extern const MathKernels math_kernels;
}
namespace avx512 {
extern const MathKernels math_kernels;
}

}  // namespace trivet
