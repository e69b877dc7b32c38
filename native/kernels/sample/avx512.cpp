// The sampler's kernels for AVX-512 F, DQ: 16 lanes.
#include "kernels/math/avx512.h"

#include "kernels/sample/kernels.h"
#include "kernels/sample/sample_math.h"

namespace trivet::avx512 {
namespace {

constexpr int kWidth = 16;
using Floats = __m512;
using Words = __m512i;

inline Floats load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* x, Floats a) { _mm512_storeu_ps(x, a); }
inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }

inline uint32_t mask_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline uint32_t mask_above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Floats zero_unless_at_least(Floats value, Floats a, Floats b) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), value);
}

inline float horizontal_max(Floats a) { return _mm512_reduce_max_ps(a); }

// Sixteen running sums in double; vector i holds lanes 8i to 8i+7.
struct LaneSums {
    __m512d lanes[2];
};
inline void add_lanes(LaneSums& sums, int32_t, Floats a) {
    sums.lanes[0] = _mm512_add_pd(sums.lanes[0], _mm512_cvtps_pd(_mm512_castps512_ps256(a)));
    sums.lanes[1] = _mm512_add_pd(sums.lanes[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)));
}
inline void store_lanes(const LaneSums& sums, double* out) {
    for (int i = 0; i < 2; ++i) _mm512_storeu_pd(out + 8 * i, sums.lanes[i]);
}

inline Words splat_word(uint32_t x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }
inline Words counting_words(uint32_t first) {
    return _mm512_add_epi32(
        splat_word(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
inline Words xor_words(Words a, Words b) { return _mm512_xor_si512(a, b); }
inline void store_words(uint32_t* x, Words a) { _mm512_storeu_si512(x, a); }
inline void multiply_words(Words a, Words b, Words& low, Words& high) {
    const __m512i even = _mm512_mul_epu32(a, b);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
    low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}
// float(u >> 1)
inline Floats half_floats(Words u) { return _mm512_cvtepi32_ps(_mm512_srli_epi32(u, 1)); }

#include "kernels/sample/vector_kernels.h"

}  // namespace

const SampleKernels sample_kernels = kernel_table;

}  // namespace trivet::avx512
