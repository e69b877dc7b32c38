// The Python module trivet.native._core: thin bindings, one bind_* function per part of the core.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "core/cpu_features.h"

namespace nb = nanobind;

void bind_kernels(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_model(nb::module_& m);
void bind_sampler(nb::module_& m);

NB_MODULE(_core, m) {
    m.doc() = "Native core of Trivet: kernels, the model forward, the KV arena and the sampler.";
    m.def(
        "isa_levels",
        [] {
            std::vector<std::tuple<std::string, std::string>> levels;
            for (int i = 0; i < trivet::kNumLevels; ++i) {
                const auto level = static_cast<trivet::Level>(i);
                levels.emplace_back(trivet::level_name(level), trivet::level_refusal(level));
            }
            return levels;
        },
        "Every instruction-set level, lowest first, with why it cannot run here (empty: it can).");
    bind_kernels(m);
    bind_linear(m);
    bind_model(m);
    bind_sampler(m);
}
