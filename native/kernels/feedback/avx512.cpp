#include "kernels/feedback/panel.h"

namespace trivet::avx512 {

const FeedbackKernels feedback_kernels = {gptq, descend};

}  // namespace trivet::avx512
