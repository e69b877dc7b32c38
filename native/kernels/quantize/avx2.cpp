#include "kernels/quantize/quantize.h"
namespace trivet::avx2 {
namespace {
void to_bf16(const float* x, int32_t k, int32_t p, uint16_t* o) {
    generic::quantize_kernels.to_bf16(x, k, p, o);
}
void to_int8_group(const float* x, int32_t k, int32_t p, int32_t g, int8_t* c, float* s,
                   int32_t* t) {
    generic::quantize_kernels.to_int8_group(x, k, p, g, c, s, t);
}
void to_int8_row(const float* x, int32_t k, int32_t p, int32_t h, float* r, int8_t* c, float* s,
                 int32_t* t) {
    generic::quantize_kernels.to_int8_row(x, k, p, h, r, c, s, t);
}
}  // namespace
const QuantizeKernels quantize_kernels = {to_bf16, to_int8_group, to_int8_row};
}  // namespace trivet::avx2
