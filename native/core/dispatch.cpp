#include "core/dispatch.h"

namespace trivet {

Kernels kernels_for(Level level) {
#ifdef TRIVET_X86
    switch (level) {
        case Level::kGeneric:
            break;
        case Level::kAvx2:
            return {level,
                    &avx2::linear_kernels,
                    &avx2::quantize_kernels,
                    &avx2::norm_kernels,
                    &avx2::rope_kernels,
                    &avx2::attention_kernels,
                    &avx2::activation_kernels};
        case Level::kAvx512:
            return {level,
                    &avx512::linear_kernels,
                    &avx512::quantize_kernels,
                    &avx512::norm_kernels,
                    &avx512::rope_kernels,
                    &avx512::attention_kernels,
                    &avx512::activation_kernels};
        case Level::kAmx:
            return {level,
                    &amx::linear_kernels,
                    &avx512::quantize_kernels,
                    &avx512::norm_kernels,
                    &avx512::rope_kernels,
                    &amx::attention_kernels,
                    &avx512::activation_kernels};
    }
#endif
    return {Level::kGeneric,
            &generic::linear_kernels,
            &generic::quantize_kernels,
            &generic::norm_kernels,
            &generic::rope_kernels,
            &generic::attention_kernels,
            &generic::activation_kernels};
}

}  // namespace trivet
