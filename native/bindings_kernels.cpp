// Single kernels of any level outside the linears, for tests, and the thread pool's own cost: the
// model's forward uses the same tables and pool without passing through here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/buffer.h"
#include "core/dispatch.h"
#include "core/fp_state.h"
#include "core/thread_pool.h"
#include "kernels/feedback/feedback.h"
#include "kernels/math/math.h"
#include "kernels/quantize/kv_codes.h"
#include "kernels/stream/stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace trivet;

template <class T, size_t Rank>
using Array = nb::ndarray<T, nb::ndim<Rank>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

const MathKernels& math_table(const std::string& level) {
#ifdef TRIVET_X86
    switch (parse_level(level)) {
        case Level::kAvx2:
            return avx2::math_kernels;
        case Level::kAvx512:
        case Level::kAmx:
            return avx512::math_kernels;
        default:
            break;
    }
#endif
    return generic::math_kernels;
}

void apply_exp(const std::string& level, const Array<const float, 1>& x,
               const Array<float, 1>& out) {
    require(x.size() == out.size(), "x and out have one length");
    const MathKernels& table = math_table(level);
    const FpState fp_state;
    table.exp(x.data(), static_cast<int32_t>(x.size()), out.data());
}

void rms_norm(const std::string& level, const Array<const float, 2>& x,
              const Array<const float, 1>& gain, float eps, const Array<float, 2>& out) {
    const size_t n = x.shape(1);
    require(n > 0 && gain.size() == n && out.shape(0) == x.shape(0) && out.shape(1) == n,
            "x and out are [rows, n], gain is [n]");
    const Kernels kernels = kernels_for(parse_level(level));
    const FpState fp_state;
    for (size_t row = 0; row < x.shape(0); ++row) {
        kernels.norm->rms_norm(x.data() + row * n, gain.data(), static_cast<int32_t>(n), eps,
                               out.data() + row * n);
    }
}

void rope(const std::string& level, const Array<const float, 2>& x,
          const Array<const float, 2>& cos, const Array<const float, 2>& sin,
          const Array<float, 2>& out) {
    const size_t rows = x.shape(0), half = x.shape(1) / 2;
    require(x.shape(1) % 2 == 0 && cos.shape(0) == rows && cos.shape(1) == half &&
                sin.shape(0) == rows && sin.shape(1) == half && out.shape(0) == rows &&
                out.shape(1) == 2 * half,
            "x and out are [rows, 2 * half], cos and sin are [rows, half]");
    const Kernels kernels = kernels_for(parse_level(level));
    const FpState fp_state;
    for (size_t row = 0; row < rows; ++row) {
        kernels.rope->rotate(x.data() + row * 2 * half, cos.data() + row * half,
                             sin.data() + row * half, static_cast<int32_t>(half),
                             out.data() + row * 2 * half);
    }
}

void silu_mul(const std::string& level, const Array<const float, 1>& gate,
              const Array<const float, 1>& up, const Array<float, 1>& out) {
    require(gate.size() == up.size() && up.size() == out.size(), "all arrays have one length");
    const Kernels kernels = kernels_for(parse_level(level));
    const FpState fp_state;
    kernels.activation->silu_mul(gate.data(), up.data(), static_cast<int32_t>(gate.size()),
                                 out.data());
}

KvKind kv_kind(int kind) {
    require(is_kv_kind(kind), "the KV format is not known");
    return static_cast<KvKind>(kind);
}

void store_token(int kind, const Array<const uint8_t, 1>& k, float k_scale,
                 const Array<const uint8_t, 1>& v, float v_scale, int32_t slot, bool is_first_token,
                 const Array<uint8_t, 1>& page) {
    const KvKind page_kind = kv_kind(kind), codes = code_kind(page_kind);
    const bool is_first = slot == 0 && is_first_token && keeps_first(page_kind);
    const bool is_bf16 = codes == KvKind::kBf16 || is_first;
    const int32_t dim = static_cast<int32_t>(k.size()) / (is_bf16 ? 2 : 1);
    require(dim > 0 && dim % 2 == 0 && v.size() == k.size(), "k and v are one head");
    require(slot >= 0 && slot < kPageTokens, "slot lies in the page");
    require(static_cast<int64_t>(page.size()) == page_block(kv_kind(kind), dim).bytes,
            "page is one page block");
    const auto* wide_k = reinterpret_cast<const uint16_t*>(k.data());
    const auto* wide_v = reinterpret_cast<const uint16_t*>(v.data());
    if (is_first) {
        store_first_token(page_kind, wide_k, wide_v, dim, page.data());
    } else if (is_bf16) {
        store_token_bf16(wide_k, wide_v, dim, slot, page.data());
    } else if (codes == KvKind::kInt4) {
        store_token_int4(page_kind, reinterpret_cast<const int8_t*>(k.data()), k_scale,
                         reinterpret_cast<const int8_t*>(v.data()), v_scale, dim, slot,
                         page.data());
    } else {
        store_token_bytes(page_kind, k.data(), k_scale, v.data(), v_scale, dim, slot, page.data());
    }
}

void rotate(const std::string& level, const Array<const float, 2>& x, int32_t hadamard,
            const Array<float, 2>& out) {
    const auto k = static_cast<int32_t>(x.shape(1));
    require(out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1), "out is like x");
    require(hadamard >= 1 && hadamard <= 64 && k % hadamard == 0 && !(hadamard & (hadamard - 1)),
            "hadamard is a power of two up to 64 that divides k");
    const Kernels kernels = kernels_for(parse_level(level));
    const FpState fp_state;
    for (size_t row = 0; row < x.shape(0); ++row) {
        kernels.quantize->rotate(x.data() + row * x.shape(1), k, hadamard,
                                 out.data() + row * x.shape(1));
    }
}

void kv_codes(int kind, const Array<const float, 2>& x, const Array<uint8_t, 2>& codes,
              const Array<float, 1>& scales) {
    const KvKind code = kv_kind(kind);
    const size_t count = x.shape(1);
    require(code == KvKind::kFp8 || code == KvKind::kInt4, "codes are e4m3 or of 4 bits");
    require(codes.shape(0) == x.shape(0) && codes.shape(1) == count, "codes are like x");
    require(scales.size() == x.shape(0), "one scale a row");
    const FpState fp_state;
    for (size_t row = 0; row < x.shape(0); ++row) {
        const float* values = x.data() + row * count;
        uint8_t* out = codes.data() + row * count;
        if (code == KvKind::kFp8) {
            to_fp8(values, static_cast<int32_t>(count), out, scales.data() + row);
        } else {
            to_int4(values, static_cast<int32_t>(count), reinterpret_cast<int8_t*>(out),
                    scales.data() + row);
        }
    }
}

void attention_span(const std::string& level, int kind, const Array<const uint16_t, 2>& q,
                    int32_t group, const Array<const int32_t, 1>& valid,
                    const Array<const uint8_t, 2>& pages, bool is_first, float sm_scale,
                    const Array<float, 1>& m, const Array<float, 1>& l, const Array<float, 2>& o) {
    const auto num_q = static_cast<int32_t>(q.shape(0)), dim = static_cast<int32_t>(q.shape(1));
    const auto rows = static_cast<int32_t>(valid.size());
    require(dim > 0 && dim % 2 == 0 && rows > 0 && group > 0 && num_q == rows * group,
            "q is [rows * group, head_dim], valid is [rows]");
    require(m.size() == q.shape(0) && l.size() == q.shape(0) && o.shape(0) == q.shape(0) &&
                o.shape(1) == q.shape(1),
            "m and l are [rows * group], o is like q");
    const PageBlock block = page_block(kv_kind(kind), dim);
    require(static_cast<int64_t>(pages.shape(1)) == block.bytes, "pages are page blocks");
    for (int32_t r = 0; r < rows; ++r) {
        require(valid.data()[r] >= 1 && valid.data()[r] <= kSpanTokens &&
                    (r == 0 || valid.data()[r] >= valid.data()[r - 1]),
                "valid is 1 to 256, never falling");
    }
    const int32_t needed = (valid.data()[rows - 1] + kPageTokens - 1) / kPageTokens;
    require(static_cast<int32_t>(pages.shape(0)) >= needed, "too few pages");
    // Page blocks are 64-byte aligned in an arena; numpy's arrays need not be.
    Buffer<uint8_t> aligned;
    aligned.reserve(needed * block.bytes);
    const uint8_t* span_pages[kSpanPages] = {};
    for (int32_t p = 0; p < needed; ++p) {
        std::copy_n(pages.data() + p * block.bytes, block.bytes, aligned.data() + p * block.bytes);
        span_pages[p] = aligned.data() + p * block.bytes;
    }
    Buffer<float> scratch;
    scratch.reserve(span_scratch_floats(num_q, dim));
    const SpanTask task = {q.data(),   rows,           group,    dim,           valid.data(),
                           span_pages, nullptr,        0,        kv_kind(kind), is_first,
                           sm_scale,   scratch.data(), m.data(), l.data(),      o.data()};
    const Kernels kernels = kernels_for(parse_level(level));
    const FpState fp_state;
    kernels.attention->span(task);
}

void attention_merge(const std::string& level, const Array<const float, 1>& m2,
                     const Array<const float, 1>& l2, const Array<const float, 2>& o2,
                     const Array<float, 1>& m, const Array<float, 1>& l, const Array<float, 2>& o) {
    const size_t n = o.shape(0);
    require(m2.size() == n && l2.size() == n && m.size() == n && l.size() == n &&
                o2.shape(0) == n && o2.shape(1) == o.shape(1),
            "all have the same vectors");
    const Kernels kernels = kernels_for(parse_level(level));
    const FpState fp_state;
    kernels.attention->merge(static_cast<int32_t>(n), static_cast<int32_t>(o.shape(1)), m2.data(),
                             l2.data(), o2.data(), m.data(), l.data(), o.data());
}

void attention_finish(const std::string& level, const Array<const float, 1>& l,
                      const Array<const float, 2>& o, const Array<float, 2>& out) {
    require(l.size() == o.shape(0) && out.shape(0) == o.shape(0) && out.shape(1) == o.shape(1),
            "all have the same vectors");
    const Kernels kernels = kernels_for(parse_level(level));
    const FpState fp_state;
    kernels.attention->finish(static_cast<int32_t>(o.shape(0)), static_cast<int32_t>(o.shape(1)),
                              l.data(), o.data(), out.data(), static_cast<ptrdiff_t>(out.shape(1)));
}

const FeedbackKernels& feedback_table(const std::string& level) {
#ifdef TRIVET_X86
    switch (parse_level(level)) {
        case Level::kAvx2:
            return avx2::feedback_kernels;
        case Level::kAvx512:
        case Level::kAmx:
            return avx512::feedback_kernels;
        default:
            break;
    }
#endif
    return generic::feedback_kernels;
}

using Rows = Array<float, 2>;
using ConstRows = Array<const float, 2>;

// Checks what both kinds of panels are given. groups, and what `places` must be, are below `limit`.
FeedbackPanel feedback_panel(const ConstRows& matrix, const Rows& target,
                             const Array<const int32_t, 1>& groups, const ConstRows& scales,
                             const ConstRows& inverse, const std::optional<ConstRows>& zeros,
                             float middle, int32_t low, int32_t high, int32_t begin, int32_t end,
                             const Array<uint8_t, 2>& codes, const Rows& changes) {
    const size_t columns = target.shape(0), rows = target.shape(1);
    require(matrix.shape(0) == columns && matrix.shape(1) == columns && groups.size() == columns &&
                codes.shape(0) == columns && codes.shape(1) == rows,
            "target and codes are [columns, rows], matrix [columns, columns], groups [columns]");
    require(scales.shape(1) == rows && inverse.shape(0) == scales.shape(0) &&
                inverse.shape(1) == rows &&
                (!zeros || (zeros->shape(0) == scales.shape(0) && zeros->shape(1) == rows)),
            "scales, inverse and zeros are [groups, rows]");
    for (size_t j = 0; j < columns; ++j) {
        require(groups.data()[j] >= 0 && groups.data()[j] < static_cast<int64_t>(scales.shape(0)),
                "groups lie in scales");
    }
    require(0 <= begin && begin <= end && end <= static_cast<int64_t>(columns),
            "begin and end lie in the columns");
    require(changes.shape(0) >= static_cast<size_t>(end - begin) && changes.shape(1) == rows,
            "changes is [end - begin, rows] or longer");
    require(0 <= low && low <= high && high <= 255, "codes are bytes");
    return {{scales.data(), inverse.data(), zeros ? zeros->data() : nullptr, middle,
             static_cast<float>(low), static_cast<float>(high), groups.data()},
            static_cast<int64_t>(rows),
            static_cast<int32_t>(columns),
            begin,
            end,
            matrix.data(),
            target.data(),
            codes.data(),
            changes.data()};
}

void gptq_panel(const std::string& level, const ConstRows& upper, const Rows& left,
                const Array<const int32_t, 1>& places, const Array<const int32_t, 1>& groups,
                const ConstRows& scales, const ConstRows& inverse,
                const std::optional<ConstRows>& zeros, float middle, int32_t low, int32_t high,
                int32_t begin, int32_t end, const Array<uint8_t, 2>& codes, const Rows& errors) {
    const FeedbackPanel panel = feedback_panel(upper, left, groups, scales, inverse, zeros, middle,
                                               low, high, begin, end, codes, errors);
    require(places.size() == left.shape(0), "places is [columns]");
    for (size_t j = 0; j < places.size(); ++j) {
        require(places.data()[j] >= 0 && places.data()[j] < panel.columns,
                "places lie in the columns");
    }
    const FeedbackKernels& table = feedback_table(level);
    const nb::gil_scoped_release release;
    table.gptq(panel, places.data());
}

void descend_panel(const std::string& level, const ConstRows& gram, const Rows& slope,
                   const ConstRows& values, const Array<const int32_t, 1>& groups,
                   const ConstRows& scales, const ConstRows& inverse,
                   const std::optional<ConstRows>& zeros, float middle, int32_t low, int32_t high,
                   int32_t begin, int32_t end, const Array<uint8_t, 2>& codes,
                   const Rows& changes) {
    const FeedbackPanel panel = feedback_panel(gram, slope, groups, scales, inverse, zeros, middle,
                                               low, high, begin, end, codes, changes);
    require(values.shape(0) == slope.shape(0) && values.shape(1) == slope.shape(1),
            "values is like slope");
    const FeedbackKernels& table = feedback_table(level);
    const nb::gil_scoped_release release;
    table.descend(panel, values.data());
}

uint64_t stream_sum(const std::string& level, const Array<const uint64_t, 1>& words) {
    require(words.size() % 16 == 0, "words come in sixteens");
    require(words.size() == 0 || reinterpret_cast<uintptr_t>(words.data()) % 64 == 0,
            "words are 64-byte aligned");
    const auto count = static_cast<int64_t>(words.size());
#ifdef TRIVET_X86
    if (parse_level(level) != Level::kGeneric) {
        return avx2::stream_kernels.sum(words.data(), count);
    }
#endif
    return generic::stream_kernels.sum(words.data(), count);
}

// Seconds of pool loops with no work in which every thread takes one item: what it costs to hand
// work to all threads and to learn that they are done. Before each loop the caller sleeps for
// `pause_s`; beyond the pool's spinning time its threads sleep too and have to be woken.
std::vector<double> pool_loops(int num_threads, int num_loops, double pause_s) {
    require(num_threads >= 1 && num_threads <= 1024, "num_threads is 1 to 1024");
    require(num_loops >= 0 && pause_s >= 0 && pause_s <= 1, "num_loops >= 0, pause_s is 0 to 1");
    const nb::gil_scoped_release release;
    ThreadPool pool(num_threads);
    std::vector<double> seconds;
    for (int i = 0; i < num_loops; ++i) {
        if (pause_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(pause_s));
        std::atomic<int> arrived{0};
        const auto start = std::chrono::steady_clock::now();
        // No thread leaves before all have come, so that none can take two items.
        pool.parallel_for(num_threads, [&](int32_t, int) {
            arrived.fetch_add(1);
            for (int spins = 1; arrived.load() < num_threads; ++spins) {
                if (spins % 1024 == 0) sched_yield();
            }
        });
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        seconds.push_back(took.count());
    }
    return seconds;
}

}  // namespace

void bind_kernels(nb::module_& m) {
    m.def("kernel_exp", apply_exp, "level"_a, "x"_a, "out"_a, "exp of x into out.");
    m.def("kernel_rms_norm", rms_norm, "level"_a, "x"_a, "gain"_a, "eps"_a, "out"_a,
          "RMSNorm of rows of x into out.");
    m.def("kernel_rope", rope, "level"_a, "x"_a, "cos"_a, "sin"_a, "out"_a,
          "Rows of x rotated into out.");
    m.def("kernel_silu_mul", silu_mul, "level"_a, "gate"_a, "up"_a, "out"_a,
          "silu(gate) * up into out.");
    m.def("kernel_store_token", store_token, "kind"_a, "k"_a, "k_scale"_a, "v"_a, "v_scale"_a,
          "slot"_a, "is_first"_a, "page"_a,
          "One token's K and V, passed as bytes, into a slot of a page block. is_first: at "
          "position 0.");
    m.def("kernel_attention_span", attention_span, "level"_a, "kind"_a, "q"_a, "group"_a, "valid"_a,
          "pages"_a, "is_first"_a, "sm_scale"_a, "m"_a, "l"_a, "o"_a,
          "One span of attention over page blocks; writes m, l and o.");
    m.def("kernel_rotate", rotate, "level"_a, "x"_a, "hadamard"_a, "out"_a,
          "Rows of x through the block Hadamard into out.");
    m.def("kernel_kv_codes", kv_codes, "kind"_a, "x"_a, "codes"_a, "scales"_a,
          "Rows of x as e4m3 or 4-bit codes of a KV page, one scale each.");
    m.def("kernel_attention_merge", attention_merge, "level"_a, "m2"_a, "l2"_a, "o2"_a, "m"_a,
          "l"_a, "o"_a, "Takes a later span into m, l and o.");
    m.def("kernel_attention_finish", attention_finish, "level"_a, "l"_a, "o"_a, "out"_a,
          "o / l into out.");
    m.def("gptq_panel", gptq_panel, "level"_a, "upper"_a, "left"_a, "places"_a, "groups"_a,
          "scales"_a, "inverse"_a, "zeros"_a.none(), "middle"_a, "low"_a, "high"_a, "begin"_a,
          "end"_a, "codes"_a, "errors"_a,
          "Columns [begin, end) of GPTQ's pass; changes left and writes codes and errors.");
    m.def(
        "descend_panel", descend_panel, "level"_a, "gram"_a, "slope"_a, "values"_a, "groups"_a,
        "scales"_a, "inverse"_a, "zeros"_a.none(), "middle"_a, "low"_a, "high"_a, "begin"_a,
        "end"_a, "codes"_a, "changes"_a,
        "Columns [begin, end) of a sweep of coordinate descent; changes slope and writes codes and "
        "changes.");
    m.def("kernel_stream", stream_sum, "level"_a, "words"_a, "The sum of the words modulo 2^64.");
    m.def("pool_loops", pool_loops, "num_threads"_a, "num_loops"_a, "pause_s"_a,
          "Seconds of each of num_loops empty pool loops, pause_s of sleep before each.");
}
