// Scalar arithmetic of the sampler, shared by every level: Philox4x32-10, a log in double, the
// noise of a token. Everything has internal linkage, so that an ISA file never exports code built
// with its flags.
//
// Proved against the numpy definition (src/trivet/native/reference_sampling.py) by
// tests/native/test_sampling.py.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels/math/scalar.h"

namespace trivet {
namespace {

constexpr float kFloatMax = 3.402823466e+38f;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kScaledMin =
    -87.0f;  // scaled logits below have probability 0; exp(-87) is still normal

// exp(x) for x <= 0, the contract's polynomial; exactly 0 below kScaledMin and for NaN.
inline float exp_scaled(float x) { return x >= kScaledMin ? exp_f32(x) : 0.0f; }

// Natural log of a positive normal double: x = 2^k * m, m in [sqrt(1/2), sqrt(2)), then
// log(m) = 2 atanh(s), s = (m-1)/(m+1), by its series up to s^21 (truncation below 1e-17 of the
// sum). Plain multiply and add only, so that numpy float64 repeats it.
inline double log_positive(double x) {
    int64_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    int64_t k = ((bits >> 52) & 0x7ff) - 1023;
    bits = (bits & 0x000fffffffffffff) | 0x3ff0000000000000;
    double m;
    std::memcpy(&m, &bits, sizeof(m));
    if (m >= 1.4142135623730951) {
        m *= 0.5;
        k += 1;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double z = s * s;
    double sum = 1.0 / 21.0;
    for (int odd = 19; odd >= 1; odd -= 2) sum = sum * z + 1.0 / odd;
    return static_cast<double>(k) * 0.69314718055994531 + (2.0 * s) * sum;
}

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9;
constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85;

// Philox4x32-10 in place. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011.
inline void philox4x32(uint32_t counter[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = static_cast<uint64_t>(kPhiloxMultiplier0) * counter[0];
        const uint64_t product1 = static_cast<uint64_t>(kPhiloxMultiplier1) * counter[2];
        const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0;
        const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1;
        counter[1] = static_cast<uint32_t>(product1);
        counter[3] = static_cast<uint32_t>(product0);
        counter[0] = next0;
        counter[2] = next2;
        key0 += kPhiloxWeyl0;
        key1 += kPhiloxWeyl1;
    }
}

// E = -log1p(-v), v = (u + 1/2) / 2^32; 1 - v is exact in double, so the log of it loses nothing.
inline double noise_from_bits(uint32_t u) {
    const double v = (static_cast<double>(u) + 0.5) * 2.3283064365386963e-10;
    return -log_positive(1.0 - v);
}

// What the kernels see of a logit: NaN is -inf, +inf is the largest finite number.
inline float clean_logit(float x) {
    if (!(x >= kMinusInfinity)) return kMinusInfinity;
    return x > kFloatMax ? kFloatMax : x;
}

}  // namespace
}  // namespace trivet
