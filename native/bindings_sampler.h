// Conversion between Python's sampling arguments (trivet.native.api) and kernels/sample/sample.h.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "kernels/sample/sample.h"

namespace trivet {

// Jobs read from a sequence of trivet.native.api.SampleInput. Keep it alive while they run: they
// point into it, into the logits and into the states, which `inputs` keeps alive.
struct SampleJobs {
    std::vector<sample::Job> jobs;
    std::vector<std::vector<int32_t>> drafts;
};

// logits: float32 [num_rows, vocab_size], contiguous. Throws std::invalid_argument on a row,
// position, draft token or vocabulary that does not fit.
SampleJobs parse_sample_inputs(nanobind::sequence inputs, const float* logits, int64_t num_rows,
                               int32_t vocab_size);

// One (token_ids, logprobs) per result; logprobs is None or a list of tuples in the field order of
// trivet.request.Logprob.
nanobind::list sample_results_to_python(const std::vector<sample::Result>& results,
                                        const SampleJobs& jobs);

// Throws std::invalid_argument when rows or token ids lie outside float32 [num_rows, vocab_size].
void check_logprob_request(int64_t first_logit, const std::vector<int32_t>& token_ids, int32_t top,
                           int64_t num_rows, int64_t vocab_size);

// Tuples in the field order of trivet.request.Logprob.
nanobind::list logprobs_to_python(const std::vector<sample::TokenLogprob>& logprobs);

}  // namespace trivet
