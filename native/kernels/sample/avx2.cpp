// The sampler's kernels for AVX2 and FMA: 8 lanes.
#include "kernels/math/avx2.h"

#include "kernels/sample/kernels.h"
#include "kernels/sample/sample_math.h"

namespace trivet::avx2 {
namespace {

constexpr int kWidth = 8;
using Floats = __m256;
using Words = __m256i;

inline Floats load(const float* x) { return _mm256_loadu_ps(x); }
inline void store(float* x, Floats a) { _mm256_storeu_ps(x, a); }
inline Floats splat(float x) { return _mm256_set1_ps(x); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }

inline uint32_t mask_at_least(Floats a, Floats b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
}
inline uint32_t mask_above(Floats a, Floats b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
}
inline Floats zero_unless_at_least(Floats value, Floats a, Floats b) {
    return _mm256_and_ps(value, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
}

inline float horizontal_max(Floats a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// Sixteen running sums in double; vector i holds lanes 4i to 4i+3.
struct LaneSums {
    __m256d lanes[4];
};
inline void add_lanes(LaneSums& sums, int32_t first_lane, Floats a) {
    const int32_t i = first_lane / 4;
    sums.lanes[i] = _mm256_add_pd(sums.lanes[i], _mm256_cvtps_pd(_mm256_castps256_ps128(a)));
    sums.lanes[i + 1] =
        _mm256_add_pd(sums.lanes[i + 1], _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
}
inline void store_lanes(const LaneSums& sums, double* out) {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(out + 4 * i, sums.lanes[i]);
}

inline Words splat_word(uint32_t x) { return _mm256_set1_epi32(static_cast<int32_t>(x)); }
inline Words counting_words(uint32_t first) {
    return _mm256_add_epi32(splat_word(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Words xor_words(Words a, Words b) { return _mm256_xor_si256(a, b); }
inline void store_words(uint32_t* x, Words a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), a);
}
inline void multiply_words(Words a, Words b, Words& low, Words& high) {
    const __m256i even = _mm256_mul_epu32(a, b);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
// float(u >> 1)
inline Floats half_floats(Words u) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(u, 1)); }

#include "kernels/sample/vector_kernels.h"

}  // namespace

const SampleKernels sample_kernels = kernel_table;

}  // namespace trivet::avx2
