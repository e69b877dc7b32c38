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

// A tuple in the field order of trivet.request.Logprob.
nanobind::tuple logprob_to_python(const sample::TokenLogprob& logprob);

}  // namespace trivet
