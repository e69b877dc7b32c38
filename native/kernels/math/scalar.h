// Scalar arithmetic of the numerics contract: the readable definition, used by every generic.cpp.
// Assumes MXCSR: round to nearest even, FTZ, DAZ. Everything has internal linkage.
#pragma once
#include <cstdint>
#include <cstring>

namespace trivet {

static inline uint32_t float_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// a * b + c rounded once. Without the instruction: the product is exact in double; the sum is
// rounded to odd there (its error, found by two-sum, sets the last bit), so the second rounding is
// the only one.
static inline float fma_f32(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    const double product = static_cast<double>(a) * static_cast<double>(b), addend = c;
    const double sum = product + addend;
    const double back = sum - product;
    const double error = (product - (sum - back)) + (addend - back);
    int64_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    if ((bits & 1) == 0 && (error > 0 || error < 0)) bits += (error > 0) == (sum > 0) ? 1 : -1;
    double odd;
    std::memcpy(&odd, &bits, sizeof odd);
    return static_cast<float>(odd);
#endif
}

// bf16 bits of x, round to nearest even; NaN stays a quiet NaN, subnormals become zero.
static inline uint16_t to_bf16(float x) {
    const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    if (magnitude < 0x00800000u) return static_cast<uint16_t>((bits >> 16) & 0x8000u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float from_bf16(uint16_t bits) {
    return bits_float(static_cast<uint32_t>(bits) << 16);
}

// exp(x): x clamped to [kExpLow, kExpHigh], n = round(x / ln 2), exp(x - n ln 2) by a polynomial
// (Cephes' coefficients), times 2^n. Largest relative error 1.3e-7; results below the smallest
// normal are zero; NaN stays NaN.
static constexpr float kExpLow = -87.33654f, kExpHigh = 88.37626f;
static constexpr float kLog2E = 1.44269504088896341f;
static constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
static constexpr float kExp7 = 1.9875691500e-4f, kExp6 = 1.3981999507e-3f, kExp5 = 8.3334519073e-3f,
                       kExp4 = 4.1665795894e-2f, kExp3 = 1.6666665459e-1f, kExp2 = 5.0000001201e-1f;

static inline float exp_f32(float x) {
    x = x < kExpLow ? kExpLow : x;
    x = x > kExpHigh ? kExpHigh : x;
    const float shifted = fma_f32(x, kLog2E, kRoundMagic);
    const float n = shifted - kRoundMagic;
    float r = fma_f32(n, -kLn2High, x);
    r = fma_f32(n, -kLn2Low, r);
    float p = fma_f32(kExp7, r, kExp6);
    p = fma_f32(p, r, kExp5);
    p = fma_f32(p, r, kExp4);
    p = fma_f32(p, r, kExp3);
    p = fma_f32(p, r, kExp2);
    p = fma_f32(p, r, 1.0f);
    p = fma_f32(p, r, 1.0f);
    return p * bits_float((float_bits(shifted) - float_bits(kRoundMagic) + 127u) << 23);
}

static inline float silu_f32(float x) { return x / (1.0f + exp_f32(-x)); }

}  // namespace trivet
