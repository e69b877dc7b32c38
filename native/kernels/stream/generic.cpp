#include "kernels/stream/stream.h"

namespace trivet::generic {
namespace {

uint64_t sum(const uint64_t* data, int64_t words) {
    uint64_t sums[16] = {};
    for (int64_t w = 0; w < words; w += 16) {
        for (int64_t j = 0; j < 16; ++j) sums[j] += data[w + j];
    }
    uint64_t total = 0;
    for (const uint64_t part : sums) total += part;
    return total;
}

}  // namespace

const StreamKernels stream_kernels = {sum};

}  // namespace trivet::generic
