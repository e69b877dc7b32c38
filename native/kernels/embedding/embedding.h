// One row of a packed weight as float32: what the weight means exactly (scale * code rounded once,
// plus the minimum by one fma where there is one). Not for kInt8Row, whose columns are rotated.
//
// token in [0, w.n); out: float32 [w.k]. A gather of one column of 16; the conversion is exact on
// any CPU, so there is one version.
#pragma once
#include <cstdint>

#include "kernels/linear/linear.h"

namespace trivet {

void lookup_row(const LinearWeight& w, int32_t token, float* out);

}  // namespace trivet
