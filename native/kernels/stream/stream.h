// Reads memory and does no more with it than a reader must: the yardstick of decoding.
//
// sum: the words added modulo 2^64, in any order. words is a multiple of 16, data 64-byte aligned.
// Wide loads matter: with fewer instructions for a cache line more lines are under way at a time
// (16-byte loads were measured to reach 80 to 90 % of what 32-byte ones read). No level reads more
// than avx2 does.
#pragma once
#include <cstdint>

namespace trivet {

struct StreamKernels {
    uint64_t (*sum)(const uint64_t* data, int64_t words);
};

namespace generic {
extern const StreamKernels stream_kernels;
}
namespace avx2 {
extern const StreamKernels stream_kernels;
}

}  // namespace trivet
