// The sampler's kernels over the small vector interface that avx2.cpp and avx512.cpp define before
// they include this file inside their own anonymous namespace: Floats and Words of kWidth lanes.
// Bit-equal to generic.cpp (tests/native/test_sampling.py).

constexpr int kVectors = kSampleGroup / kWidth;  // vectors of one group

// The group's logits: in place, or copied and padded with -inf when the row ends inside the group.
inline const float* group_logits(const float* x, int32_t n, int32_t begin, float* padded) {
    if (begin + kSampleGroup <= n) return x + begin;
    for (int32_t i = 0; i < kSampleGroup; ++i)
        padded[i] = begin + i < n ? x[begin + i] : kMinusInfinity;
    return padded;
}

inline Floats load_clean(const float* x) {
    // max returns its second operand when the first is NaN.
    return min(max(load(x), splat(kMinusInfinity)), splat(kFloatMax));
}

float group_max(const float* x, int32_t n, float* out) {
    float padded[kSampleGroup];
    Floats row_max = splat(kMinusInfinity);
    for (int32_t begin = 0; begin < n; begin += kSampleGroup) {
        const float* group = group_logits(x, n, begin, padded);
        Floats best[4] = {load_clean(group), load_clean(group + kWidth),
                          load_clean(group + 2 * kWidth), load_clean(group + 3 * kWidth)};
        for (int i = 4; i < kVectors; ++i)
            best[i % 4] = max(best[i % 4], load_clean(group + i * kWidth));
        const Floats group_best = max(max(best[0], best[1]), max(best[2], best[3]));
        out[begin / kSampleGroup] = horizontal_max(group_best);
        row_max = max(row_max, group_best);
    }
    return horizontal_max(row_max);
}

// exp_scaled (sample_math.h) of every lane.
inline Floats exp_lanes(Floats x) { return zero_unless_at_least(exp_ps(x), x, splat(kScaledMin)); }

inline Floats scale(Floats logits, Floats row_max, Floats temperature) {
    return div(sub(logits, row_max), temperature);
}

double exp_sum(const float* x, int32_t n, float row_max, float temperature) {
    float padded[kSampleGroup];
    LaneSums sums = {};
    const Floats max_lanes = splat(row_max), temperature_lanes = splat(temperature);
    for (int32_t begin = 0; begin < n; begin += kSampleGroup) {
        const float* group = group_logits(x, n, begin, padded);
        for (int32_t i = 0; i < kSampleGroup; i += 16) {
            for (int32_t j = 0; j < 16; j += kWidth) {
                add_lanes(
                    sums, j,
                    exp_lanes(scale(load_clean(group + i + j), max_lanes, temperature_lanes)));
            }
        }
    }
    double lanes[16];
    store_lanes(sums, lanes);
    for (int32_t width = 8; width >= 1; width /= 2) {
        for (int32_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
    }
    return lanes[0];
}

void probabilities(const float* x, int32_t n, float row_max, float temperature, float* out) {
    const Floats max_lanes = splat(row_max), temperature_lanes = splat(temperature);
    int32_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
        store(out + i, exp_lanes(scale(load_clean(x + i), max_lanes, temperature_lanes)));
    }
    for (; i < n; ++i) out[i] = exp_scaled((clean_logit(x[i]) - row_max) / temperature);
}

int32_t collect(const float* x, int32_t n, const float* maxima, float threshold, int32_t* ids) {
    float padded[kSampleGroup];
    int32_t count = 0;
    for (int32_t begin = 0; begin < n; begin += kSampleGroup) {
        if (maxima[begin / kSampleGroup] < threshold) continue;
        const float* group = group_logits(x, n, begin, padded);
        for (int32_t i = 0; i < kSampleGroup; i += kWidth) {
            uint32_t hits = mask_at_least(load_clean(group + i), splat(threshold));
            for (; hits != 0; hits &= hits - 1) {
                const int32_t id = begin + i + __builtin_ctz(hits);
                if (id < n) ids[count++] = id;
            }
        }
    }
    return count;
}

int32_t count_above(const float* x, int32_t n, float value, bool or_equal) {
    int32_t count = 0;
    const Floats bound = splat(value);
    int32_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
        const Floats logits = load_clean(x + i);
        count +=
            __builtin_popcount(or_equal ? mask_at_least(logits, bound) : mask_above(logits, bound));
    }
    for (; i < n; ++i) {
        const float logit = clean_logit(x[i]);
        count += or_equal ? logit >= value : logit > value;
    }
    return count;
}

// Philox4x32-10 of kWidth counters; words[w] holds word w of each.
inline void philox_lanes(Words words[4], uint32_t key0, uint32_t key1) {
    const Words multiplier0 = splat_word(kPhiloxMultiplier0);
    const Words multiplier1 = splat_word(kPhiloxMultiplier1);
    for (int round = 0; round < 10; ++round) {
        Words low0, high0, low1, high1;
        multiply_words(words[0], multiplier0, low0, high0);
        multiply_words(words[2], multiplier1, low1, high1);
        words[0] = xor_words(xor_words(high1, words[1]), splat_word(key0));
        words[2] = xor_words(xor_words(high0, words[3]), splat_word(key1));
        words[1] = low1;
        words[3] = low0;
        key0 += kPhiloxWeyl0;
        key1 += kPhiloxWeyl1;
    }
}

// A token can win only when E <= ratio * p, and E >= v >= (u >> 1) / 2^31. The float comparison
// leaves room for its own roundings (2^-20 against a handful of 2^-24).
inline float win_bound(double ratio) {
    const double bound = ratio * (2147483648.0 * (1.0 + 1.0 / 1048576.0));
    return bound < kFloatMax ? static_cast<float>(bound) : kFloatMax;
}

void run_race(const float* x, int32_t n, const float* maxima, NoiseRace* race) {
    float padded[kSampleGroup];
    float p[kWidth];
    uint32_t noise[kWidth];
    float bound = win_bound(race->best_ratio);
    const Floats max_lanes = splat(race->max), temperature_lanes = splat(race->temperature);
    for (int32_t begin = 0; begin < n; begin += kSampleGroup) {
        const float best = maxima[begin / kSampleGroup];
        if (best < race->bound_logit) continue;
        const float best_scaled = (best - race->max) / race->temperature;
        if (best_scaled < race->min_scaled) continue;
        // No token of the group has a larger p than this, and few words of noise are small enough
        // for it; only those are looked at again. v >= 2^-33: below half of that every word loses.
        const float group_bound = exp_scaled(best_scaled) * 1.001f;
        if (group_bound * bound < 0.125f) continue;
        const float* group = group_logits(x, n, begin, padded);
        for (int32_t lane = 0; lane < 16; lane += kWidth) {
            Words words[4] = {
                counting_words(static_cast<uint32_t>(begin / kSampleGroup * 16 + lane)),
                splat_word(race->position), splat_word(race->choice), splat_word(0)};
            philox_lanes(words, race->key[0], race->key[1]);
            for (int32_t word = 0; word < 4; ++word) {
                const Floats halves = half_floats(words[word]);
                if (mask_at_least(splat(group_bound * bound), halves) == 0) continue;
                const Floats logits = load_clean(group + 16 * word + lane);
                const Floats scaled = scale(logits, max_lanes, temperature_lanes);
                const Floats probability = exp_lanes(scaled);
                uint32_t hits = mask_at_least(mul(probability, splat(bound)), halves) &
                                mask_at_least(logits, splat(race->bound_logit)) &
                                mask_at_least(scaled, splat(race->min_scaled));
                if (hits == 0) continue;
                store(p, probability);
                store_words(noise, words[word]);
                for (; hits != 0; hits &= hits - 1) {
                    const int32_t hit = __builtin_ctz(hits);
                    const int32_t id = begin + 16 * word + lane + hit;
                    if (id >= n) continue;
                    if (clean_logit(x[id]) == race->bound_logit && id > race->bound_id) continue;
                    const double ratio = noise_from_bits(noise[hit]) / static_cast<double>(p[hit]);
                    if (ratio < race->best_ratio ||
                        (ratio == race->best_ratio && id < race->best_id)) {
                        race->best_ratio = ratio;
                        race->best_id = id;
                        bound = win_bound(ratio);
                    }
                }
            }
        }
    }
}

const SampleKernels kernel_table = {group_max, exp_sum,     probabilities,
                                    collect,   count_above, run_race};
