// The sampler: one token per position as a pure function of (logits, parameters, seed, choice,
// position, tokens before it). Definition: src/trivet/native/reference_sampling.py, bit for bit.
//
// Order of work on one row: repetition penalty (prompt and output), frequency and presence penalty
// (output), logit bias, allowed and banned tokens, min_tokens mask, temperature, top-k, top-p,
// min-p, noise. Log-probabilities come from the raw row. NaN counts as -inf, +inf as the largest
// finite number.
//
// Thread rule: sample_one and token_logprob touch only their Scratch and output; any number may run
// at the same time on the same State. State::commit must not run beside them.
#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/cpu_features.h"
#include "kernels/sample/kernels.h"

namespace trivet::sample {

// Temperatures below this mean greedy.
inline constexpr float kMinTemperature = 1e-5f;

struct Params {
    int32_t vocab_size = 0;
    uint64_t seed = 0;
    uint32_t choice = 0;
    int32_t prompt_len = 0;
    int32_t min_tokens = 0;
    float temperature = 1.0f;
    int32_t top_k = 0;   // 0: off
    double top_p = 1.0;  // 1: off
    double min_p = 0.0;  // 0: off
    float repetition_penalty = 1.0f;
    float presence_penalty = 0.0f;
    float frequency_penalty = 0.0f;
    std::vector<std::pair<int32_t, float>> logit_bias;  // ids distinct
    std::optional<std::vector<int32_t>> allowed;
    std::vector<int32_t> banned;
    std::vector<int32_t> stop;  // EOS and stop ids: masked while position < prompt_len + min_tokens
    std::optional<int32_t> logprobs;
};

// One request's sampler. Memory is proportional to the distinct tokens seen, and only when a
// penalty needs them.
class State {
  public:
    // Throws std::invalid_argument when an id lies outside the vocabulary or every token is banned.
    State(Params params, const std::vector<int32_t>& prompt);

    // Counts tokens that became part of the output.
    void commit(const int32_t* tokens, int32_t count);

    struct Count {
        int32_t id;
        int32_t in_output;  // 0: only in the prompt
    };

    const Params& params() const { return params_; }
    int32_t num_committed() const { return num_committed_; }
    const std::vector<Count>& counts() const { return counts_; }  // ascending ids
    bool has_penalties() const { return has_penalties_; }
    float min_scaled() const { return min_scaled_; }

  private:
    Params params_;
    bool has_penalties_;
    float min_scaled_;  // ln(min_p), the least scaled logit that min-p keeps; >= -87
    int32_t num_committed_ = 0;
    std::vector<Count> counts_;
};

// One request's part of a step. Row i (logits + i * stride) predicts `position + i`, where the
// tokens before it are the committed ones and draft[0..i).
struct Job {
    const State* state;
    const float* logits;
    int64_t stride;  // floats between rows
    int32_t position;
    const int32_t* draft;
    int32_t num_draft;
};

struct TokenLogprob {
    int32_t token;
    float logprob;
    int32_t rank;  // 1: most likely; ties by lower id
    std::vector<int32_t> top_ids;
    std::vector<float> top_logprobs;
};

struct Result {
    std::vector<int32_t> tokens;
    std::vector<TokenLogprob> logprobs;  // parallel to tokens when asked for, else empty
};

// Buffers of one thread; grow to the vocabulary on first use.
struct Scratch {
    std::vector<float> row;
    std::vector<float> group_max;
    std::vector<int32_t> ids;
    std::vector<float> values;
    std::vector<uint64_t> keys;
    std::vector<uint64_t> sorted_keys;
};

// The calling thread's own; lives as long as the thread.
Scratch& thread_scratch();

// The kernels of a level (AMX uses AVX-512's).
const SampleKernels& kernels_for(Level level);

// Draws tokens for rows 0, 1, ... and stops after the first that differs from its draft token: 1 to
// num_draft + 1 tokens. The job is valid: position is prompt_len + committed, ids are in the
// vocabulary.
void sample_one(const SampleKernels& kernels, const Job& job, Scratch& scratch, Result& result);

// Log-probability, rank and the `top` most likely tokens of one raw row of n logits.
TokenLogprob token_logprob(const SampleKernels& kernels, const float* logits, int32_t n,
                           int32_t token, int32_t top, Scratch& scratch);

}  // namespace trivet::sample
