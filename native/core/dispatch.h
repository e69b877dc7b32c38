// The kernels of one instruction-set level: chosen once per model, never looked up again.
#pragma once
#include "core/cpu_features.h"
#include "kernels/activation/activation.h"
#include "kernels/attention/attention.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/norm.h"
#include "kernels/quantize/quantize.h"
#include "kernels/rope/rope.h"

namespace trivet {

struct Kernels {
    Level level;
    const LinearKernels* linear;
    const QuantizeKernels* quantize;
    const NormKernels* norm;
    const RopeKernels* rope;
    const AttentionKernels* attention;
    const ActivationKernels* activation;
};

// `level` must be usable here (level_refusal(level) is empty). An operation without code of its own
// at a level uses the level below: AMX has its own linear and attention kernels only.
Kernels kernels_for(Level level);

}  // namespace trivet
