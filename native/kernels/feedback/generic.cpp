#include "kernels/feedback/panel.h"

namespace trivet::generic {

const FeedbackKernels feedback_kernels = {gptq, descend};

}  // namespace trivet::generic
