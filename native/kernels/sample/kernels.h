// Vector kernels of the sampler. One row of logits at a time; rows are independent.
//
// x: float32 [n], any alignment, not modified, n >= 1. A row is cut into groups of 64 ids (the last
// one may be shorter). Every kernel reads logits through clean_logit (NaN is -inf, +inf the largest
// finite number). Levels are bit-equal: tests/native/test_sampling.py.
#pragma once
#include <cstdint>

namespace trivet {

constexpr int32_t kSampleGroup = 64;

// The race for one position: the noise key, the survivors and the best ratio so far.
// A token survives when (logit, id) is not behind (bound_logit, bound_id) in the order "logit
// descending, id ascending" and its scaled logit (x - max) / temperature is at least min_scaled.
struct NoiseRace {
    uint32_t key[2];
    uint32_t position;
    uint32_t choice;
    float max;
    float temperature;
    float min_scaled;  // >= -87
    float bound_logit;
    int32_t bound_id;
    double best_ratio;  // E / p of best_id
    int32_t best_id;
};

struct SampleKernels {
    // group_max[g] = max of group g; returns the max of the row.
    float (*group_max)(const float* x, int32_t n, float* group_max);
    // Sum of p = exp((x - max) / temperature) in double: lane j of 16 adds ids j, j+16, ...
    // ascending, then lanes j and j+8, j+4, j+2, j+1 are added. max: finite, the max of the row.
    double (*exp_sum)(const float* x, int32_t n, float max, float temperature);
    // out[i] = p of x[i], any n >= 0; out may be x.
    void (*probabilities)(const float* x, int32_t n, float max, float temperature, float* out);
    // Ids with x >= threshold, ascending, into ids (room for n); groups whose max is below are
    // skipped.
    int32_t (*collect)(const float* x, int32_t n, const float* group_max, float threshold,
                       int32_t* ids);
    // Number of x > value (or_equal: x >= value).
    int32_t (*count_above)(const float* x, int32_t n, float value, bool or_equal);
    // Lowers race->best_* to the survivor with the smallest E / p; a tie goes to the lowest id.
    // Pruning only skips tokens that cannot win: E >= v > ratio * p.
    void (*run_race)(const float* x, int32_t n, const float* group_max, NoiseRace* race);
};

namespace generic {
extern const SampleKernels sample_kernels;
}
namespace avx2 {
extern const SampleKernels sample_kernels;
}
namespace avx512 {
extern const SampleKernels sample_kernels;
}

}  // namespace trivet
