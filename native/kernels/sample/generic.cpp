// The readable definition of the sampler's kernels.
#include "kernels/sample/kernels.h"
#include "kernels/sample/sample_math.h"

namespace trivet::generic {
namespace {

float group_max(const float* x, int32_t n, float* out) {
    float row_max = kMinusInfinity;
    for (int32_t begin = 0; begin < n; begin += kSampleGroup) {
        const int32_t end = begin + kSampleGroup < n ? begin + kSampleGroup : n;
        float best = kMinusInfinity;
        for (int32_t i = begin; i < end; ++i) {
            const float value = clean_logit(x[i]);
            if (value > best) best = value;
        }
        out[begin / kSampleGroup] = best;
        if (best > row_max) row_max = best;
    }
    return row_max;
}

double exp_sum(const float* x, int32_t n, float max, float temperature) {
    double lanes[16] = {};
    for (int32_t i = 0; i < n; ++i) {
        lanes[i % 16] += exp_scaled((clean_logit(x[i]) - max) / temperature);
    }
    for (int32_t width = 8; width >= 1; width /= 2) {
        for (int32_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
    }
    return lanes[0];
}

void probabilities(const float* x, int32_t n, float max, float temperature, float* out) {
    for (int32_t i = 0; i < n; ++i) out[i] = exp_scaled((clean_logit(x[i]) - max) / temperature);
}

int32_t collect(const float* x, int32_t n, const float* maxima, float threshold, int32_t* ids) {
    int32_t count = 0;
    for (int32_t begin = 0; begin < n; begin += kSampleGroup) {
        if (maxima[begin / kSampleGroup] < threshold) continue;
        const int32_t end = begin + kSampleGroup < n ? begin + kSampleGroup : n;
        for (int32_t i = begin; i < end; ++i) {
            if (clean_logit(x[i]) >= threshold) ids[count++] = i;
        }
    }
    return count;
}

int32_t count_above(const float* x, int32_t n, float value, bool or_equal) {
    int32_t count = 0;
    for (int32_t i = 0; i < n; ++i) {
        const float logit = clean_logit(x[i]);
        count += or_equal ? logit >= value : logit > value;
    }
    return count;
}

void run_race(const float* x, int32_t n, const float* maxima, NoiseRace* race) {
    for (int32_t begin = 0; begin < n; begin += kSampleGroup) {
        if (maxima[begin / kSampleGroup] < race->bound_logit) continue;
        if ((maxima[begin / kSampleGroup] - race->max) / race->temperature < race->min_scaled)
            continue;
        const int32_t end = begin + kSampleGroup < n ? begin + kSampleGroup : n;
        for (int32_t lane = 0; lane < 16; ++lane) {
            uint32_t words[4] = {static_cast<uint32_t>(begin / kSampleGroup * 16 + lane),
                                 race->position, race->choice, 0};
            bool has_noise = false;
            for (int32_t word = 0; word < 4; ++word) {
                const int32_t id = begin + 16 * word + lane;
                if (id >= end) break;
                const float logit = clean_logit(x[id]);
                const float scaled = (logit - race->max) / race->temperature;
                if (logit < race->bound_logit || !(scaled >= race->min_scaled)) continue;
                if (logit == race->bound_logit && id > race->bound_id) continue;
                if (!has_noise) philox4x32(words, race->key[0], race->key[1]);
                has_noise = true;
                const double p = exp_scaled(scaled);
                if (words[word] * 2.3283064365386963e-10 > race->best_ratio * p) continue;
                const double ratio = noise_from_bits(words[word]) / p;
                if (ratio < race->best_ratio || (ratio == race->best_ratio && id < race->best_id)) {
                    race->best_ratio = ratio;
                    race->best_id = id;
                }
            }
        }
    }
}

}  // namespace

const SampleKernels sample_kernels = {group_max, exp_sum,     probabilities,
                                      collect,   count_above, run_race};

}  // namespace trivet::generic
