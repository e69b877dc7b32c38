#include "kernels/math/scalar.h"
#include "kernels/quantize/quantize.h"

namespace trivet {

void sum_bf16_groups(const uint16_t* x, int32_t k_padded, int32_t group, int32_t num_groups,
                     float* sums) {
    for (int32_t g = 0; g < num_groups; ++g) {
        const int32_t begin = g * group;
        const int32_t end = begin + group < k_padded ? begin + group : k_padded;
        float sum = 0.0f;
        for (int32_t k = begin; k < end; k += 32) {
            float even = 0.0f, odd = 0.0f;
            for (int32_t i = k; i < k + 32 && i < end; i += 2) {
                even = even + from_bf16(x[i]);
                odd = odd + from_bf16(x[i + 1]);
            }
            sum = sum + (even + odd);
        }
        sums[g] = sum;
    }
}

}  // namespace trivet
