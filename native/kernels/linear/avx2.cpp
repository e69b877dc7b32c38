#include "kernels/linear/linear.h"
namespace trivet::avx2 {
namespace {
void bf16(const LinearWeight& w, const Activations& x, int32_t b, int32_t e, float* o, ptrdiff_t s,
          bool a) {
    generic::linear_kernels.bf16(w, x, b, e, o, s, a);
}
void int8_row(const LinearWeight& w, const Activations& x, int32_t b, int32_t e, float* o,
              ptrdiff_t s, bool a) {
    generic::linear_kernels.int8_row(w, x, b, e, o, s, a);
}
void int_group(const LinearWeight& w, const Activations& x, int32_t b, int32_t e, float* o,
               ptrdiff_t s, bool a) {
    generic::linear_kernels.int8_group(w, x, b, e, o, s, a);
}
}  // namespace
const LinearKernels linear_kernels = {bf16, int8_row, int_group, int_group};
}  // namespace trivet::avx2
