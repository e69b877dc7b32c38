#include "kernels/feedback/panel.h"

namespace trivet::avx2 {

const FeedbackKernels feedback_kernels = {gptq, descend};

}  // namespace trivet::avx2
