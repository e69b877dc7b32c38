#include "kernels/attention/avx512.h"

namespace trivet::avx512 {

const AttentionKernels attention_kernels = {span<Vectors>, merge, finish};

}  // namespace trivet::avx512
