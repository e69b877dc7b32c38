#include <immintrin.h>

#include "kernels/stream/stream.h"

namespace trivet::avx2 {
namespace {

uint64_t sum(const uint64_t* data, int64_t words) {
    __m256i sums[4] = {};
    for (int64_t w = 0; w < words; w += 16) {
        for (int64_t j = 0; j < 4; ++j) {
            const auto* at = reinterpret_cast<const __m256i*>(data + w + 4 * j);
            sums[j] = _mm256_add_epi64(sums[j], _mm256_load_si256(at));
        }
    }
    const __m256i all =
        _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
    alignas(32) uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), all);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

}  // namespace

const StreamKernels stream_kernels = {sum};

}  // namespace trivet::avx2
