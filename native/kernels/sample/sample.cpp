#include "kernels/sample/sample.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>

#include "core/fp_state.h"
#include "kernels/sample/sample_math.h"

namespace trivet::sample {
namespace {

void check_ids(const char* field, const std::vector<int32_t>& ids, int32_t vocab_size) {
    for (int32_t id : ids) {
        if (id < 0 || id >= vocab_size) {
            throw std::invalid_argument(std::string(field) + ": token id " + std::to_string(id) +
                                        " is outside the vocabulary of " +
                                        std::to_string(vocab_size));
        }
    }
}

void sort_unique(std::vector<int32_t>& ids) {
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

bool contains(const std::vector<int32_t>& sorted, int32_t id) {
    return std::binary_search(sorted.begin(), sorted.end(), id);
}

// The entry of `id`, or where it belongs.
std::vector<State::Count>::const_iterator find_count(const std::vector<State::Count>& counts,
                                                     int32_t id) {
    return std::lower_bound(counts.begin(), counts.end(), id,
                            [](const State::Count& c, int32_t value) { return c.id < value; });
}

float penalized(const Params& params, float raw, int32_t in_output) {
    float logit = clean_logit(raw);
    if (params.repetition_penalty != 1.0f) {
        logit =
            logit > 0.0f ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    }
    if (in_output > 0) {
        logit = logit - params.frequency_penalty * static_cast<float>(in_output);
        logit = logit - params.presence_penalty;
    }
    return logit;
}

// A row as the truncations see it, and what is masked in it.
struct Row {
    const float* logits;
    bool masks_stop;
};

// Penalties, bias and masks on row `step` of the job. Returns the raw row when nothing applies.
Row edit_row(const Job& job, int32_t step, bool may_mask_stop, Scratch& scratch) {
    const State& state = *job.state;
    const Params& params = state.params();
    const float* raw = job.logits + step * job.stride;
    const int32_t n = params.vocab_size;
    const bool masks_stop = may_mask_stop && !params.stop.empty() &&
                            static_cast<int64_t>(job.position) + step <
                                static_cast<int64_t>(params.prompt_len) + params.min_tokens;
    const bool penalizes = state.has_penalties() && (!state.counts().empty() || step > 0);
    if (!penalizes && params.logit_bias.empty() && !params.allowed && params.banned.empty() &&
        !masks_stop) {
        return {raw, false};
    }

    std::vector<float>& row = scratch.row;
    row.assign(raw, raw + n);
    if (penalizes) {
        const std::vector<State::Count>& counts = state.counts();
        for (const State::Count& count : counts) {
            row[count.id] = penalized(params, raw[count.id], count.in_output);
        }
        for (int32_t i = 0; i < step; ++i) {
            const int32_t id = job.draft[i];
            const auto found = find_count(counts, id);
            const int32_t committed =
                found != counts.end() && found->id == id ? found->in_output : 0;
            const int32_t on_path =
                static_cast<int32_t>(std::count(job.draft, job.draft + step, id));
            row[id] = penalized(params, raw[id], committed + on_path);
        }
    }
    for (const auto& [id, bias] : params.logit_bias) row[id] = clean_logit(row[id]) + bias;
    if (params.allowed) {
        scratch.values.clear();
        for (int32_t id : *params.allowed) scratch.values.push_back(row[id]);
        std::fill(row.begin(), row.end(), kMinusInfinity);
        for (size_t i = 0; i < params.allowed->size(); ++i) {
            row[(*params.allowed)[i]] = scratch.values[i];
        }
    }
    for (int32_t id : params.banned) row[id] = kMinusInfinity;
    if (masks_stop) {
        for (int32_t id : params.stop) row[id] = kMinusInfinity;
    }
    return {row.data(), masks_stop};
}

std::optional<int32_t> lowest_unmasked(const Params& params, bool masks_stop) {
    for (int32_t id = 0; id < params.vocab_size; ++id) {
        if (params.allowed && !contains(*params.allowed, id)) continue;
        if (contains(params.banned, id) || (masks_stop && contains(params.stop, id))) continue;
        return id;
    }
    return std::nullopt;
}

int32_t num_groups(int32_t n) { return (n + kSampleGroup - 1) / kSampleGroup; }

// The lowest id whose logit is the row's maximum.
int32_t find_max(const float* x, const std::vector<float>& group_max, float max) {
    size_t group = 0;
    while (group_max[group] != max) ++group;
    int32_t id = static_cast<int32_t>(group) * kSampleGroup;
    while (clean_logit(x[id]) != max) ++id;
    return id;
}

// The order of truncation: logit descending, id ascending.
struct Ahead {
    const float* x;
    bool operator()(int32_t a, int32_t b) const {
        const float left = clean_logit(x[a]), right = clean_logit(x[b]);
        return left > right || (left == right && a < b);
    }
};

// The k first tokens in truncation order, unsorted but for the last one, in scratch.ids[0..k). 1 <=
// k < n. The k-th largest group maximum has at least k logits at or above it, so it bounds the
// search.
void select_top(const SampleKernels& kernels, const float* x, int32_t n, int32_t k,
                Scratch& scratch) {
    float threshold = kMinusInfinity;
    const int32_t groups = num_groups(n);
    if (k <= groups) {
        scratch.values.assign(scratch.group_max.begin(), scratch.group_max.begin() + groups);
        std::nth_element(scratch.values.begin(), scratch.values.begin() + (k - 1),
                         scratch.values.end(), std::greater<float>());
        threshold = scratch.values[k - 1];
    }
    scratch.ids.resize(n);
    const int32_t count =
        kernels.collect(x, n, scratch.group_max.data(), threshold, scratch.ids.data());
    std::nth_element(scratch.ids.begin(), scratch.ids.begin() + (k - 1),
                     scratch.ids.begin() + count, Ahead{x});
}

// Where top-k and top-p cut: the last survivor in truncation order.
struct Bound {
    float logit;
    int32_t id;
};

// scratch.values[i] = p of scratch.ids[i].
void find_probabilities(const SampleKernels& kernels, const float* x, float max, float temperature,
                        int32_t count, Scratch& scratch) {
    scratch.values.resize(count);
    for (int32_t i = 0; i < count; ++i) scratch.values[i] = x[scratch.ids[i]];
    kernels.probabilities(scratch.values.data(), count, max, temperature, scratch.values.data());
}

// Sorts ids[0..count), ascending, into truncation order: keys of (logit descending, id ascending),
// by comparison when few, else by three stable counting passes over the logit's bits.
void sort_by_rank(const float* x, int32_t count, Scratch& scratch) {
    std::vector<uint64_t>& keys = scratch.keys;
    keys.resize(count);
    for (int32_t i = 0; i < count; ++i) {
        const int32_t id = scratch.ids[i];
        const uint32_t bits = float_bits(clean_logit(x[id]) + 0.0f);  // -0 + 0 = +0
        const uint32_t descending = bits >> 31 ? bits : 0x7fffffffu - bits;
        keys[i] = static_cast<uint64_t>(descending) << 32 | static_cast<uint32_t>(id);
    }
    if (count < 1024) {
        std::sort(keys.begin(), keys.end());
    } else {
        constexpr int kDigitBits = 11;
        scratch.sorted_keys.resize(count);
        for (int shift = 32; shift < 64; shift += kDigitBits) {
            int32_t starts[(1 << kDigitBits) + 1] = {};
            const auto digit = [shift](uint64_t key) {
                return static_cast<uint32_t>(key >> shift) & ((1u << kDigitBits) - 1);
            };
            for (uint64_t key : keys) ++starts[digit(key) + 1];
            for (int i = 0; i < 1 << kDigitBits; ++i) starts[i + 1] += starts[i];
            for (uint64_t key : keys) scratch.sorted_keys[starts[digit(key)]++] = key;
            keys.swap(scratch.sorted_keys);
        }
    }
    for (int32_t i = 0; i < count; ++i) scratch.ids[i] = static_cast<int32_t>(keys[i]);
}

// Walks scratch.ids[0..count), ascending ids, in truncation order until the tokens passed hold
// `enough`; returns false when they never do.
bool walk_until(const SampleKernels& kernels, const float* x, float max, float temperature,
                double enough, int32_t count, Scratch& scratch, Bound& bound) {
    sort_by_rank(x, count, scratch);
    find_probabilities(kernels, x, max, temperature, count, scratch);
    double sum = 0.0;
    for (int32_t i = 0; i < count; ++i) {
        sum += scratch.values[i];
        bound = {clean_logit(x[scratch.ids[i]]), scratch.ids[i]};
        if (sum >= enough) return true;
    }
    return false;
}

// top-p among the top-k tokens in scratch.ids[0..k): their sum takes lane id % 16, ascending ids.
Bound nucleus_of_top(const SampleKernels& kernels, const float* x, float max, float temperature,
                     double top_p, int32_t k, Scratch& scratch) {
    std::sort(scratch.ids.begin(), scratch.ids.begin() + k);
    find_probabilities(kernels, x, max, temperature, k, scratch);
    double lanes[16] = {};
    for (int32_t i = 0; i < k; ++i) lanes[scratch.ids[i] % 16] += scratch.values[i];
    for (int32_t width = 8; width >= 1; width /= 2) {
        for (int32_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
    }
    Bound bound{};
    walk_until(kernels, x, max, temperature, top_p * lanes[0], k, scratch, bound);
    return bound;
}

// top-p over the whole row: candidates are collected down to a falling threshold until they hold
// enough.
Bound nucleus_of_row(const SampleKernels& kernels, const float* x, int32_t n, float max,
                     float temperature, double top_p, Scratch& scratch) {
    const double enough = top_p * kernels.exp_sum(x, n, max, temperature);
    const auto collect = [&](float threshold) {
        scratch.ids.resize(n);
        return kernels.collect(x, n, scratch.group_max.data(), threshold, scratch.ids.data());
    };
    Bound bound{};
    for (const float depth : {2.0f, 4.0f, 6.0f, 9.0f, 13.0f, 18.0f}) {
        const int32_t count = collect(max - depth * temperature);
        find_probabilities(kernels, x, max, temperature, count, scratch);
        double held = 0.0;
        for (int32_t i = 0; i < count; ++i) held += scratch.values[i];
        if (held < enough) continue;
        if (walk_until(kernels, x, max, temperature, enough, count, scratch, bound)) return bound;
    }
    walk_until(kernels, x, max, temperature, enough, collect(kMinusInfinity), scratch, bound);
    return bound;
}

uint32_t noise_bits(const Params& params, uint32_t position, int32_t token) {
    uint32_t words[4] = {static_cast<uint32_t>(token / kSampleGroup * 16 + token % 16), position,
                         params.choice, 0};
    philox4x32(words, static_cast<uint32_t>(params.seed), static_cast<uint32_t>(params.seed >> 32));
    return words[token % kSampleGroup / 16];
}

// The token of an edited row; scratch.group_max is that row's. max is finite.
int32_t draw(const SampleKernels& kernels, const State& state, const float* x, float max,
             uint32_t position, Scratch& scratch) {
    const Params& params = state.params();
    const int32_t n = params.vocab_size;
    const int32_t first = find_max(x, scratch.group_max, max);
    if (params.temperature < kMinTemperature || params.top_k == 1) return first;

    Bound bound{kMinusInfinity, n};
    const bool cuts_k = params.top_k > 0 && params.top_k < n;
    if (cuts_k) {
        select_top(kernels, x, n, params.top_k, scratch);
        const int32_t last = scratch.ids[params.top_k - 1];
        bound = {clean_logit(x[last]), last};
    }
    if (params.top_p < 1.0) {
        bound = cuts_k
                    ? nucleus_of_top(kernels, x, max, params.temperature, params.top_p,
                                     params.top_k, scratch)
                    : nucleus_of_row(kernels, x, n, max, params.temperature, params.top_p, scratch);
    }
    NoiseRace race{
        {static_cast<uint32_t>(params.seed), static_cast<uint32_t>(params.seed >> 32)},
        position,
        params.choice,
        max,
        params.temperature,
        state.min_scaled(),
        bound.logit,
        bound.id,
        noise_from_bits(noise_bits(params, position, first)),  // p of the maximum is 1
        first,
    };
    kernels.run_race(x, n, scratch.group_max.data(), &race);
    return race.best_id;
}

int32_t sample_row(const SampleKernels& kernels, const Job& job, int32_t step, Scratch& scratch) {
    const Params& params = job.state->params();
    const uint32_t position = static_cast<uint32_t>(job.position + step);
    for (const bool may_mask_stop : {true, false}) {
        const Row row = edit_row(job, step, may_mask_stop, scratch);
        const float max =
            kernels.group_max(row.logits, params.vocab_size, scratch.group_max.data());
        if (max > kMinusInfinity) {
            return draw(kernels, *job.state, row.logits, max, position, scratch);
        }
        const std::optional<int32_t> id = lowest_unmasked(params, row.masks_stop);
        if (id) return *id;
    }
    throw std::logic_error("every token is banned");  // refused by State
}

}  // namespace

State::State(Params params, const std::vector<int32_t>& prompt) : params_(std::move(params)) {
    const int32_t n = params_.vocab_size;
    if (n < 1) throw std::invalid_argument("vocab_size: must be at least 1");
    check_ids("prompt_ids", prompt, n);
    check_ids("banned_token_ids", params_.banned, n);
    check_ids("stop_token_ids", params_.stop, n);
    for (const auto& [id, bias] : params_.logit_bias) check_ids("logit_bias", {id}, n);
    sort_unique(params_.banned);
    sort_unique(params_.stop);
    if (params_.allowed) {
        check_ids("allowed_token_ids", *params_.allowed, n);
        sort_unique(*params_.allowed);
    }
    if (!lowest_unmasked(params_, false)) {
        throw std::invalid_argument("allowed_token_ids: every token is banned");
    }
    has_penalties_ = params_.repetition_penalty != 1.0f || params_.presence_penalty != 0.0f ||
                     params_.frequency_penalty != 0.0f;
    min_scaled_ = kScaledMin;
    if (params_.min_p > 0.0) {
        min_scaled_ = std::max(kScaledMin, static_cast<float>(log_positive(params_.min_p)));
    }
    if (params_.repetition_penalty != 1.0f) {
        std::vector<int32_t> ids = prompt;
        sort_unique(ids);
        for (int32_t id : ids) counts_.push_back(Count{id, 0});
    }
}

void State::commit(const int32_t* tokens, int32_t num_tokens) {
    for (int32_t i = 0; i < num_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= params_.vocab_size) {
            throw std::invalid_argument("token id " + std::to_string(tokens[i]) +
                                        " is outside the vocabulary of " +
                                        std::to_string(params_.vocab_size));
        }
    }
    num_committed_ += num_tokens;
    if (!has_penalties_) return;
    for (int32_t i = 0; i < num_tokens; ++i) {
        const auto found = find_count(counts_, tokens[i]);
        if (found == counts_.end() || found->id != tokens[i]) {
            counts_.insert(found, Count{tokens[i], 1});
        } else {
            counts_[found - counts_.begin()].in_output += 1;
        }
    }
}

const SampleKernels& kernels_for(Level level) {
#ifdef TRIVET_X86
    if (level == Level::kAvx2) return avx2::sample_kernels;
    if (level == Level::kAvx512 || level == Level::kAmx) return avx512::sample_kernels;
#endif
    (void)level;
    return generic::sample_kernels;
}

Scratch& thread_scratch() {
    thread_local Scratch scratch;
    return scratch;
}

void sample_one(const SampleKernels& kernels, const Job& job, Scratch& scratch, Result& result) {
    const FpState fp_state;
    const Params& params = job.state->params();
    result.tokens.clear();
    result.logprobs.clear();
    scratch.group_max.resize(num_groups(params.vocab_size));
    for (int32_t step = 0; step <= job.num_draft; ++step) {
        const int32_t token = sample_row(kernels, job, step, scratch);
        result.tokens.push_back(token);
        if (params.logprobs) {
            result.logprobs.push_back(token_logprob(kernels, job.logits + step * job.stride,
                                                    params.vocab_size, token, *params.logprobs,
                                                    scratch));
        }
        if (step < job.num_draft && token != job.draft[step]) return;
    }
}

TokenLogprob token_logprob(const SampleKernels& kernels, const float* logits, int32_t n,
                           int32_t token, int32_t top, Scratch& scratch) {
    const FpState fp_state;
    scratch.group_max.resize(num_groups(n));
    const float max = kernels.group_max(logits, n, scratch.group_max.data());
    const bool is_empty = max == kMinusInfinity;
    const double log_sum = is_empty ? 0.0 : log_positive(kernels.exp_sum(logits, n, max, 1.0f));
    const auto logprob = [&](int32_t id) {
        const float logit = clean_logit(logits[id]);
        if (logit == kMinusInfinity) return kMinusInfinity;
        const double shifted = static_cast<double>(logit) - static_cast<double>(max);
        return static_cast<float>(shifted - log_sum);
    };

    TokenLogprob result;
    result.token = token;
    result.logprob = logprob(token);
    const float logit = clean_logit(logits[token]);
    result.rank = 1 + kernels.count_above(logits, token, logit, true) +
                  kernels.count_above(logits + token, n - token, logit, false);
    const int32_t k = std::min(top, n);
    if (k > 0) {
        if (k < n) {
            select_top(kernels, logits, n, k, scratch);
        } else {
            scratch.ids.resize(n);
            for (int32_t id = 0; id < n; ++id) scratch.ids[id] = id;
        }
        std::sort(scratch.ids.begin(), scratch.ids.begin() + k, Ahead{logits});
        result.top_ids.assign(scratch.ids.begin(), scratch.ids.begin() + k);
        for (int32_t id : result.top_ids) result.top_logprobs.push_back(logprob(id));
    }
    return result;
}

}  // namespace trivet::sample
