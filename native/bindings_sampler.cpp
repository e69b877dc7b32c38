#include "bindings_sampler.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/cpu_features.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trivet {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_rows(int64_t first, int64_t count, int64_t num_rows) {
    if (first < 0 || first + count > num_rows) {
        throw std::invalid_argument("first_logit: rows " + std::to_string(first) + " to " +
                                    std::to_string(first + count) + " are not among the " +
                                    std::to_string(num_rows) + " rows of logits");
    }
}

void check_token(int32_t token, int64_t vocab_size) {
    if (token < 0 || token >= vocab_size) {
        throw std::invalid_argument("token id " + std::to_string(token) +
                                    " is outside the vocabulary of " + std::to_string(vocab_size));
    }
}

nb::list to_list(const std::vector<int32_t>& values) {
    nb::list list;
    for (int32_t value : values) list.append(value);
    return list;
}

using RawList = nb::typed<nb::list, nb::any>;

RawList sample_rows(const Logits& logits, const nb::typed<nb::sequence, nb::object>& inputs,
                    const std::string& isa) {
    const SampleKernels& kernels = sample::kernels_for(parse_level(isa));
    const SampleJobs jobs =
        parse_sample_inputs(inputs, logits.data(), static_cast<int64_t>(logits.shape(0)),
                            static_cast<int32_t>(logits.shape(1)));
    std::vector<sample::Result> results(jobs.jobs.size());
    {
        const nb::gil_scoped_release release;
        sample::Scratch& scratch = sample::thread_scratch();
        for (size_t i = 0; i < results.size(); ++i) {
            sample::sample_one(kernels, jobs.jobs[i], scratch, results[i]);
        }
    }
    return sample_results_to_python(results, jobs);
}

RawList token_logprobs(const Logits& logits, int64_t first_logit,
                       const std::vector<int32_t>& token_ids, int32_t top, const std::string& isa) {
    const SampleKernels& kernels = sample::kernels_for(parse_level(isa));
    const int64_t vocab_size = static_cast<int64_t>(logits.shape(1));
    check_logprob_request(first_logit, token_ids, top, static_cast<int64_t>(logits.shape(0)),
                          vocab_size);
    std::vector<sample::TokenLogprob> results(token_ids.size());
    {
        const nb::gil_scoped_release release;
        for (size_t i = 0; i < results.size(); ++i) {
            const float* row = logits.data() + (first_logit + static_cast<int64_t>(i)) * vocab_size;
            results[i] = sample::token_logprob(kernels, row, static_cast<int32_t>(vocab_size),
                                               token_ids[i], top, sample::thread_scratch());
        }
    }
    return logprobs_to_python(results);
}

}  // namespace

SampleJobs parse_sample_inputs(nb::sequence inputs, const float* logits, int64_t num_rows,
                               int32_t vocab_size) {
    SampleJobs parsed;
    const size_t count = nb::len(inputs);
    parsed.jobs.reserve(count);
    parsed.drafts.resize(count);
    size_t index = 0;
    for (nb::handle input : inputs) {
        const auto* state = nb::cast<const sample::State*>(nb::getattr(input, "state"));
        const auto first = nb::cast<int64_t>(nb::getattr(input, "first_logit"));
        const auto position = nb::cast<int32_t>(nb::getattr(input, "position"));
        std::vector<int32_t>& draft = parsed.drafts[index++];
        draft = nb::cast<std::vector<int32_t>>(nb::getattr(input, "draft_ids"));
        if (state->params().vocab_size != vocab_size) {
            throw std::invalid_argument("the sampler is for a vocabulary of " +
                                        std::to_string(state->params().vocab_size) +
                                        ", the logits have " + std::to_string(vocab_size));
        }
        const int64_t next =
            static_cast<int64_t>(state->params().prompt_len) + state->num_committed();
        if (position != next) {
            throw std::invalid_argument("position: " + std::to_string(position) +
                                        " is not the next one, " + std::to_string(next));
        }
        check_rows(first, static_cast<int64_t>(draft.size()) + 1, num_rows);
        for (int32_t token : draft) check_token(token, vocab_size);
        parsed.jobs.push_back({state, logits + first * vocab_size, vocab_size, position,
                               draft.data(), static_cast<int32_t>(draft.size())});
    }
    return parsed;
}

void check_logprob_request(int64_t first_logit, const std::vector<int32_t>& token_ids, int32_t top,
                           int64_t num_rows, int64_t vocab_size) {
    check_rows(first_logit, static_cast<int64_t>(token_ids.size()), num_rows);
    for (int32_t token : token_ids) check_token(token, vocab_size);
    if (top < 0) throw std::invalid_argument("top: must be at least 0");
}

nb::list logprobs_to_python(const std::vector<sample::TokenLogprob>& logprobs) {
    nb::list list;
    for (const sample::TokenLogprob& logprob : logprobs) {
        nb::list top_logprobs;
        for (float value : logprob.top_logprobs) top_logprobs.append(static_cast<double>(value));
        list.append(nb::make_tuple(logprob.token, static_cast<double>(logprob.logprob),
                                   logprob.rank, to_list(logprob.top_ids), top_logprobs));
    }
    return list;
}

nb::list sample_results_to_python(const std::vector<sample::Result>& results,
                                  const SampleJobs& jobs) {
    nb::list list;
    for (size_t i = 0; i < results.size(); ++i) {
        nb::object logprobs = nb::none();
        if (jobs.jobs[i].state->params().logprobs) {
            logprobs = logprobs_to_python(results[i].logprobs);
        }
        list.append(nb::make_tuple(to_list(results[i].tokens), logprobs));
    }
    return list;
}

}  // namespace trivet

void bind_sampler(nb::module_& m) {
    using trivet::sample::Params;
    using trivet::sample::State;
    nb::class_<State>(m, "SamplerState",
                      "State of one request's sampler: parameters, noise key and penalty counts. "
                      "Made by trivet.native.sampling.new_sampler.")
        .def(
            "__init__",
            [](State* self, int32_t vocab_size, uint64_t seed, uint32_t choice,
               const std::vector<int32_t>& prompt_ids, int32_t min_tokens, float temperature,
               int32_t top_k, double top_p, double min_p, float repetition_penalty,
               float presence_penalty, float frequency_penalty,
               std::vector<std::pair<int32_t, float>> logit_bias,
               std::optional<std::vector<int32_t>> allowed_token_ids,
               std::vector<int32_t> banned_token_ids, std::vector<int32_t> stop_token_ids,
               std::optional<int32_t> logprobs) {
                Params params;
                params.vocab_size = vocab_size;
                params.seed = seed;
                params.choice = choice;
                params.prompt_len = static_cast<int32_t>(prompt_ids.size());
                params.min_tokens = min_tokens;
                params.temperature = temperature;
                params.top_k = top_k;
                params.top_p = top_p;
                params.min_p = min_p;
                params.repetition_penalty = repetition_penalty;
                params.presence_penalty = presence_penalty;
                params.frequency_penalty = frequency_penalty;
                params.logit_bias = std::move(logit_bias);
                params.allowed = std::move(allowed_token_ids);
                params.banned = std::move(banned_token_ids);
                params.stop = std::move(stop_token_ids);
                params.logprobs = logprobs;
                new (self) State(std::move(params), prompt_ids);
            },
            nb::kw_only(), "vocab_size"_a, "seed"_a, "choice"_a, "prompt_ids"_a, "min_tokens"_a,
            "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a,
            "presence_penalty"_a, "frequency_penalty"_a, "logit_bias"_a,
            "allowed_token_ids"_a.none(), "banned_token_ids"_a, "stop_token_ids"_a,
            "logprobs"_a.none())
        .def(
            "commit",
            [](State& self, const std::vector<int32_t>& token_ids) {
                self.commit(token_ids.data(), static_cast<int32_t>(token_ids.size()));
            },
            "token_ids"_a, "Count tokens that became part of the output.")
        .def_prop_ro("num_committed", &State::num_committed);

    m.def(
        "sample", &trivet::sample_rows, "logits"_a, "inputs"_a, "isa"_a,
        nb::sig("def sample(logits: NDArray[numpy.float32], inputs: Sequence[object], isa: str) -> "
                "list[tuple[list[int], list[tuple[int, float, int, list[int], list[float]]] | "
                "None]]"),
        "Draw tokens for each SampleInput from logits [L, V]; see trivet.native.sampling.");
    m.def("token_logprobs", &trivet::token_logprobs, "logits"_a, "first_logit"_a, "token_ids"_a,
          "top"_a, "isa"_a,
          nb::sig("def token_logprobs(logits: NDArray[numpy.float32], first_logit: int, "
                  "token_ids: Sequence[int], top: int, isa: str) -> "
                  "list[tuple[int, float, int, list[int], list[float]]]"),
          "Log-probability of token_ids[i] under row first_logit + i; see trivet.native.sampling.");
}
