// Codes of KV pages beyond int8: e4m3 and 4 bits, one scale for all of x.
//
// The arithmetic is exact per value, so there is one version for every level. Numerics: HACKING.md.
// x: float32 [count], not modified. A NaN or an infinity in x becomes the scale's, as with int8.
#pragma once
#include <cstdint>

namespace trivet {

// codes: e4m3 bytes of x * 448 / (largest magnitude).
void to_fp8(const float* x, int32_t count, uint8_t* codes, float* scale);

// codes: -8..7; the value of largest magnitude becomes -8, so the scale has the other sign.
void to_int4(const float* x, int32_t count, int8_t* codes, float* scale);

}  // namespace trivet
