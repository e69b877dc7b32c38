// Model and arena for Python. Policy (where weights lie, which level) stays in trivet.native.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings_sampler.h"
#include "core/arena.h"
#include "core/bandwidth.h"
#include "core/fp_state.h"
#include "core/model.h"
#include "kernels/sample/sample.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trivet {
namespace {

template <class T, size_t Rank>
using Array = nb::ndarray<T, nb::ndim<Rank>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Reads parts of the packed weights by offset, refusing anything outside them.
class Reader {
  public:
    explicit Reader(const Bytes& bytes) : base_(bytes.data()), size_(bytes.nbytes()) {}

    template <class T>
    const T* at(nb::handle offset, int64_t count, const char* what) const {
        const auto begin = nb::cast<int64_t>(offset);
        const auto bytes = static_cast<uint64_t>(count) * sizeof(T);
        if (begin < 0 || count < 0 || static_cast<uint64_t>(begin) > size_ ||
            bytes > size_ - static_cast<uint64_t>(begin)) {
            throw std::invalid_argument(std::string("model: ") + what +
                                        " lies outside the packed weights");
        }
        const uint8_t* data = base_ + begin;
        if (reinterpret_cast<uintptr_t>(data) % 64 != 0) {
            throw std::invalid_argument(std::string("model: ") + what + " is not 64-byte aligned");
        }
        return reinterpret_cast<const T*>(data);
    }

  private:
    const uint8_t* base_;
    uint64_t size_;
};

int32_t positive(nb::handle value, const char* what) {
    const auto number = nb::cast<int64_t>(value);
    if (number < 1 || number > (int64_t{1} << 28)) {
        throw std::invalid_argument(std::string("model: ") + what + " must be 1 to 2^28");
    }
    return static_cast<int32_t>(number);
}

int32_t enumerator(nb::handle value, int32_t count, const char* what) {
    const auto number = nb::cast<int32_t>(value);
    if (number < 0 || number >= count) {
        throw std::invalid_argument(std::string("model: ") + what + " is not known");
    }
    return number;
}

// How whole-row int8 takes its input: rotation, stored range, outlier columns in bf16.
void read_row_rule(const nb::dict& d, const Reader& reader, LinearPart& part) {
    const LinearWeight& w = part.weight;
    part.hadamard = positive(d["hadamard"], "hadamard");
    if (part.hadamard > 64 || w.k % part.hadamard || (part.hadamard & (part.hadamard - 1))) {
        throw std::invalid_argument("model: hadamard is a power of two up to 64 that divides k");
    }
    if (!d["amax"].is_none()) {
        part.amax = *reader.at<float>(d["amax"], 1, "amax");
        if (!(part.amax >= std::numeric_limits<float>::min()) || std::isinf(part.amax)) {
            throw std::invalid_argument("model: amax must be a finite number above zero");
        }
    }
    if (d["outliers"].is_none()) return;
    LinearWeight& high = part.outlier_weight;
    high = {};
    high.kind = WeightKind::kBf16;
    high.n = w.n;
    high.n_padded = w.n_padded;
    high.k = positive(d["num_outliers"], "num_outliers");
    high.k_padded = (high.k + 63) / 64 * 64;
    high.group = high.k_padded;
    high.num_groups = high.scale_groups = 1;
    const int64_t code_bytes = int64_t{2} * high.n_padded * high.k_padded;
    high.codes = reader.at<uint8_t>(d["outlier_codes"], code_bytes, "outlier codes");
    part.outliers = reader.at<int32_t>(d["outliers"], high.k, "outliers");
    for (int32_t i = 0; i < high.k; ++i) {
        if (part.outliers[i] < (i == 0 ? 0 : part.outliers[i - 1] + 1) || part.outliers[i] >= w.k) {
            throw std::invalid_argument("model: outliers must be columns, ascending");
        }
    }
}

LinearPart read_linear(const nb::dict& d, const Reader& reader) {
    LinearPart part;
    LinearWeight& w = part.weight;
    w = {};
    w.kind = static_cast<WeightKind>(enumerator(d["kind"], 7, "weight kind"));
    w.scheme = static_cast<Scheme>(enumerator(d["scheme"], 3, "scheme"));
    w.scale_type = static_cast<ScaleType>(enumerator(d["scale_type"], 2, "scale type"));
    w.n = positive(d["n"], "n");
    w.k = positive(d["k"], "k");
    w.n_padded = (w.n + 15) / 16 * 16;
    w.k_padded = (w.k + 63) / 64 * 64;
    const bool is_bf16 = w.kind == WeightKind::kBf16, is_row = w.kind == WeightKind::kInt8Row;
    w.group = is_bf16 || is_row ? w.k_padded : positive(d["group"], "group");
    if (w.group != 16 && w.group % 32 != 0) {
        throw std::invalid_argument("model: group must be 16 or a multiple of 32");
    }
    w.num_groups = (w.k + w.group - 1) / w.group;
    w.scale_groups = w.kind == WeightKind::kInt4Row ? 1 : w.num_groups;
    const int64_t count = int64_t{w.n_padded} * w.k_padded;
    const int64_t code_bytes = is_bf16 ? 2 * count : is_int4(w.kind) ? count / 2 : count;
    w.codes = reader.at<uint8_t>(d["codes"], code_bytes, "codes");
    if (!is_bf16) {
        const int64_t per_group = int64_t{w.n_padded} * w.scale_groups;
        const int64_t scale_bytes = per_group * (w.scale_type == ScaleType::kF16 ? 2 : 4);
        w.scales = reader.at<uint8_t>(d["scales"], scale_bytes, "scales");
        if (w.scheme == Scheme::kMin) {
            w.minima = reader.at<uint8_t>(d["minima"], scale_bytes, "minima");
        }
        if (w.scheme == Scheme::kZeroPoint) {
            w.zeros = reader.at<uint8_t>(d["zeros"], per_group, "zeros");
        }
    }
    if (!d["order"].is_none()) {
        part.order = reader.at<int32_t>(d["order"], w.k, "order");
        std::vector<bool> seen(static_cast<size_t>(w.k));
        for (int32_t j = 0; j < w.k; ++j) {
            const int32_t column = part.order[j];
            if (column < 0 || column >= w.k || seen[static_cast<size_t>(column)]) {
                throw std::invalid_argument("model: an order does not name each column once");
            }
            seen[static_cast<size_t>(column)] = true;
        }
    }
    if (!d["bias"].is_none()) w.bias = reader.at<float>(d["bias"], w.n_padded, "bias");
    if (is_row) read_row_rule(d, reader, part);
    return part;
}

std::vector<LinearPart> read_linears(nb::handle list, const Reader& reader) {
    std::vector<LinearPart> parts;
    for (nb::handle part : list) parts.push_back(read_linear(nb::cast<nb::dict>(part), reader));
    return parts;
}

void make_model(Model* self, const nb::typed<nb::dict, nb::str, nb::object>& spec,
                const Bytes& bytes, const std::string& level, int num_threads) {
    if (num_threads < 1 || num_threads > 1024) {
        throw std::invalid_argument("model: threads must be 1 to 1024");
    }
    const Reader reader(bytes);
    ModelWeights w;
    w.hidden = positive(spec["hidden_size"], "hidden_size");
    w.num_heads = positive(spec["num_heads"], "num_heads");
    w.num_kv_heads = positive(spec["num_kv_heads"], "num_kv_heads");
    w.head_dim = positive(spec["head_dim"], "head_dim");
    w.ffn = positive(spec["ffn_size"], "ffn_size");
    w.vocab = positive(spec["vocab_size"], "vocab_size");
    w.max_positions = positive(spec["max_positions"], "max_positions");
    w.norm_eps = nb::cast<float>(spec["norm_eps"]);
    w.kv = static_cast<KvKind>(enumerator(spec["kv"], 8, "KV format"));
    if (!is_kv_kind(static_cast<int32_t>(w.kv))) {
        throw std::invalid_argument("model: KV format is not known");
    }
    const int64_t table = int64_t{w.max_positions} * (w.head_dim / 2);
    w.cos = reader.at<float>(spec["rope_cos"], table, "rope table cos");
    w.sin = reader.at<float>(spec["rope_sin"], table, "rope table sin");
    w.final_norm = reader.at<float>(spec["final_norm"], w.hidden, "final norm");
    const LinearPart embedding = read_linear(nb::cast<nb::dict>(spec["embedding"]), reader);
    if (embedding.order != nullptr) {
        throw std::invalid_argument("model: the embedding's columns must be in order");
    }
    w.embedding = embedding.weight;
    w.head = read_linear(nb::cast<nb::dict>(spec["head"]), reader);
    for (nb::handle item : spec["layers"]) {
        const auto layer = nb::cast<nb::dict>(item);
        w.layers.push_back({reader.at<float>(layer["attn_norm"], w.hidden, "attention norm"),
                            reader.at<float>(layer["ffn_norm"], w.hidden, "ffn norm"),
                            read_linears(layer["qkv"], reader), read_linears(layer["o"], reader),
                            read_linears(layer["gate_up"], reader),
                            read_linears(layer["down"], reader)});
    }
    new (self) Model(std::move(w), parse_level(level), num_threads);
}

std::vector<Tap> read_taps(const Model& model, const nb::list& list, int32_t num_rows,
                           int32_t num_logits) {
    std::vector<Tap> taps;
    for (nb::handle item : list) {
        const auto fields = nb::cast<nb::tuple>(item);
        Tap tap{};
        tap.point = static_cast<Point>(enumerator(fields[0], 5, "tap point"));
        tap.layer = nb::cast<int32_t>(fields[1]);
        tap.sink = static_cast<Sink>(enumerator(fields[2], 4, "sink"));
        const int64_t width = model.point_width(tap.point);
        const int64_t rows = tap.point == Point::kFinal ? num_logits : num_rows;
        const bool is_double = tap.sink == Sink::kSumSquares || tap.sink == Sink::kGram;
        const int64_t count = tap.sink == Sink::kCopy   ? rows * width
                              : tap.sink == Sink::kGram ? width * width
                                                        : width;
        size_t size = 0;
        if (is_double) {
            const auto array =
                nb::cast<nb::ndarray<double, nb::c_contig, nb::device::cpu>>(fields[3]);
            tap.data = array.data();
            size = array.size();
        } else {
            const auto array =
                nb::cast<nb::ndarray<float, nb::c_contig, nb::device::cpu>>(fields[3]);
            tap.data = array.data();
            size = array.size();
        }
        if (static_cast<int64_t>(size) != count) {
            throw std::invalid_argument("taps: an array has " + std::to_string(size) +
                                        " elements, its sink needs " + std::to_string(count));
        }
        taps.push_back(tap);
    }
    return taps;
}

void forward(Model& model, Arena& arena, const Array<const int32_t, 1>& tokens,
             const Array<const int32_t, 2>& segments, const Array<const int32_t, 2>& page_tables,
             const Array<const int32_t, 1>& logit_rows, int32_t layer_begin, int32_t layer_end,
             const std::optional<Array<const float, 2>>& hidden,
             const std::optional<Array<float, 2>>& hidden_out,
             const nb::typed<nb::list, nb::object>& taps) {
    const auto require = [](bool holds, const char* what) {
        if (!holds) throw std::invalid_argument(std::string("step: ") + what);
    };
    const size_t width = static_cast<size_t>(model.weights().hidden);
    require(segments.shape(1) == 4, "segments must be [S, 4]");
    require(tokens.shape(0) < (1u << 24) && page_tables.size() < (1u << 30), "too large");
    for (const auto* array : {hidden ? &*hidden : nullptr}) {
        require(
            array == nullptr || (array->shape(0) == tokens.shape(0) && array->shape(1) == width),
            "hidden must be [rows, hidden_size]");
    }
    require(
        !hidden_out || (hidden_out->shape(0) == tokens.shape(0) && hidden_out->shape(1) == width),
        "hidden_out must be [rows, hidden_size]");
    const Step step = {tokens.data(),
                       static_cast<int32_t>(tokens.shape(0)),
                       segments.data(),
                       static_cast<int32_t>(segments.shape(0)),
                       page_tables.data(),
                       static_cast<int32_t>(page_tables.shape(0)),
                       static_cast<int32_t>(page_tables.shape(1)),
                       logit_rows.data(),
                       static_cast<int32_t>(logit_rows.shape(0)),
                       layer_begin,
                       layer_end,
                       hidden ? hidden->data() : nullptr,
                       hidden_out ? hidden_out->data() : nullptr};
    const std::vector<Tap> sinks = read_taps(model, taps, step.num_rows, step.num_logits);
    const nb::gil_scoped_release release;
    model.forward(step, arena, sinks);
}

nb::list sample_tokens(Model& model, const nb::sequence& inputs) {
    const SampleKernels& kernels = sample::kernels_for(model.level());
    const int32_t vocab = model.weights().vocab;
    const SampleJobs jobs = parse_sample_inputs(inputs, model.logits(), model.num_logits(), vocab);
    std::vector<sample::Result> results(jobs.jobs.size());
    {
        const nb::gil_scoped_release release;
        const std::lock_guard<std::mutex> lock(model.mutex());
        const FpState fp_state;
        model.pool().parallel_for(static_cast<int32_t>(results.size()), [&](int32_t i, int) {
            sample::sample_one(kernels, jobs.jobs[static_cast<size_t>(i)], sample::thread_scratch(),
                               results[static_cast<size_t>(i)]);
        });
    }
    return sample_results_to_python(results, jobs);
}

nb::list token_logprobs(Model& model, int64_t first_logit, const std::vector<int32_t>& token_ids,
                        int32_t top) {
    const SampleKernels& kernels = sample::kernels_for(model.level());
    const int32_t vocab = model.weights().vocab;
    check_logprob_request(first_logit, token_ids, top, model.num_logits(), vocab);
    std::vector<sample::TokenLogprob> results(token_ids.size());
    {
        const nb::gil_scoped_release release;
        const std::lock_guard<std::mutex> lock(model.mutex());
        model.pool().parallel_for(static_cast<int32_t>(results.size()), [&](int32_t i, int) {
            results[static_cast<size_t>(i)] = sample::token_logprob(
                kernels, model.logits() + (first_logit + i) * vocab, vocab,
                token_ids[static_cast<size_t>(i)], top, sample::thread_scratch());
        });
    }
    return logprobs_to_python(results);
}

void check_page(const Arena& arena, int32_t page) {
    if (page < 0 || page >= arena.geometry().num_pages) {
        throw std::invalid_argument("arena: page " + std::to_string(page) + " does not exist");
    }
}

void check_worker(const Arena& arena, int32_t worker) {
    if (worker < 0 || worker >= arena.geometry().num_workers) {
        throw std::invalid_argument("arena: worker " + std::to_string(worker) + " does not exist");
    }
}

void bind_arena(nb::module_& m) {
    nb::class_<Arena>(m, "Arena", "KV pages in a shared memory file; see trivet.native.arena.")
        .def_static(
            "create",
            [](int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int kv,
               int32_t num_pages, int32_t num_workers, int32_t worker) {
                return new Arena(ArenaGeometry{num_layers, num_kv_heads, head_dim,
                                               static_cast<KvKind>(kv), num_pages, num_workers},
                                 worker);
            },
            nb::rv_policy::take_ownership, nb::kw_only(), "num_layers"_a, "num_kv_heads"_a,
            "head_dim"_a, "kv"_a, "num_pages"_a, "num_workers"_a, "worker"_a)
        .def_static(
            "attach", [](int fd, int32_t worker) { return new Arena(fd, worker); },
            nb::rv_policy::take_ownership, "fd"_a, "worker"_a)
        .def_prop_ro("fd", &Arena::fd)
        .def_prop_ro("worker", &Arena::worker)
        .def_prop_ro("file_bytes", &Arena::file_bytes)
        .def_prop_ro("block_bytes", &Arena::block_bytes)
        .def_prop_ro(
            "geometry",
            [](const Arena& arena) {
                const ArenaGeometry& g = arena.geometry();
                return nb::make_tuple(g.num_layers, g.num_kv_heads, g.head_dim,
                                      static_cast<int>(g.kind), g.num_pages, g.num_workers);
            },
            nb::sig("def geometry(self) -> tuple[int, int, int, int, int, int]"))
        .def(
            "add_refs",
            [](Arena& arena, const std::vector<int32_t>& pages) {
                for (int32_t page : pages) check_page(arena, page);
                for (int32_t page : pages) arena.add_ref(page);
            },
            "pages"_a)
        .def(
            "drop_refs",
            [](Arena& arena, const std::vector<int32_t>& pages) {
                for (int32_t page : pages) check_page(arena, page);
                for (int32_t page : pages) {
                    if (!arena.drop_ref(page)) {
                        throw std::invalid_argument("arena: page " + std::to_string(page) +
                                                    " has no reference of this worker");
                    }
                }
            },
            "pages"_a)
        .def(
            "clear_column",
            [](Arena& arena, int32_t worker) {
                check_worker(arena, worker);
                arena.clear_column(worker);
            },
            "worker"_a)
        .def("total_refs",
             [](const Arena& arena) {
                 const auto count = static_cast<size_t>(arena.geometry().num_pages);
                 auto* totals = new int64_t[count];
                 for (size_t page = 0; page < count; ++page) {
                     totals[page] = arena.total_refs(static_cast<int32_t>(page));
                 }
                 const nb::capsule owner(
                     totals, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
                 return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(totals, {count}, owner);
             })
        .def(
            "column",
            [](const Arena& arena, int32_t worker) {
                check_worker(arena, worker);
                const auto count = static_cast<size_t>(arena.geometry().num_pages);
                auto* refs = new int32_t[count];
                for (size_t page = 0; page < count; ++page) {
                    refs[page] = arena.refs(worker, static_cast<int32_t>(page));
                }
                const nb::capsule owner(
                    refs, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
                return nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(refs, {count}, owner);
            },
            "worker"_a)
        .def(
            "copy_page",
            [](Arena& arena, int32_t from, int32_t to) {
                check_page(arena, from);
                check_page(arena, to);
                const nb::gil_scoped_release release;
                arena.copy_page(from, to);
            },
            "from_page"_a, "to_page"_a)
        .def(
            "block",
            [](nb::handle_t<Arena> self, int32_t layer, int32_t kv_head, int32_t page) {
                const Arena& arena = nb::cast<const Arena&>(self);
                const ArenaGeometry& g = arena.geometry();
                check_page(arena, page);
                if (layer < 0 || layer >= g.num_layers || kv_head < 0 ||
                    kv_head >= g.num_kv_heads) {
                    throw std::invalid_argument("arena: no such layer or KV head");
                }
                return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(
                    arena.block(layer, kv_head, page), {static_cast<size_t>(arena.block_bytes())},
                    self);
            },
            "layer"_a, "kv_head"_a, "page"_a,
            "A view of one page block; it keeps the arena mapped.")
        .def(
            "progress",
            [](const Arena& arena, int32_t worker) {
                check_worker(arena, worker);
                const uint64_t value = arena.progress(worker);
                return nb::make_tuple(value >> 32, value & 0xffffffffu);
            },
            "worker"_a, nb::sig("def progress(self, worker: int) -> tuple[int, int]"));
}

}  // namespace
}  // namespace trivet

void bind_model(nb::module_& m) {
    using trivet::Model;
    trivet::bind_arena(m);
    m.def("stream_rates", &trivet::stream_rates, "num_bytes"_a, "num_threads"_a, "passes"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          "Bytes per second of reading memory, of each pass.");
    nb::class_<Model>(m, "Model", "A model over packed weights; see trivet.native.model.")
        .def("__init__", &trivet::make_model, "spec"_a, "weights"_a, "level"_a, "num_threads"_a,
             nb::keep_alive<1, 3>())
        .def("forward", &trivet::forward, "arena"_a, "tokens"_a, "segments"_a, "page_tables"_a,
             "logit_rows"_a, "layer_begin"_a, "layer_end"_a, "hidden"_a.none(),
             "hidden_out"_a.none(), "taps"_a)
        .def("token_logprobs", &trivet::token_logprobs, "first_logit"_a, "token_ids"_a, "top"_a,
             nb::sig(
                 "def token_logprobs(self, first_logit: int, token_ids: Sequence[int], top: int) "
                 "-> list[tuple[int, float, int, list[int], list[float]]]"))
        .def("sample", &trivet::sample_tokens, "inputs"_a,
             nb::sig("def sample(self, inputs: Sequence[object]) -> list[tuple[list[int], "
                     "list[tuple[int, float, int, list[int], list[float]]] | None]]"))
        .def_prop_ro("num_logits", &Model::num_logits)
        .def("nonfinite_logits", &Model::nonfinite_logits,
             nb::sig("def nonfinite_logits(self) -> list[int]"),
             "Rows of the last step's logits whose hidden state holds infinity or NaN.")
        .def(
            "logits",
            [](nb::handle_t<Model> self) {
                const Model& model = nb::cast<const Model&>(self);
                return nb::ndarray<nb::numpy, const float, nb::ndim<2>>(
                    model.logits(),
                    {static_cast<size_t>(model.num_logits()),
                     static_cast<size_t>(model.weights().vocab)},
                    self);
            },
            "A view of the last step's logits; the next step overwrites it.")
        .def(
            "times_ns",
            [](const Model& model) {
                nb::dict times;
                const auto values = model.times_ns();
                for (int i = 0; i < trivet::kNumOpClasses; ++i) {
                    times[trivet::op_class_name(static_cast<trivet::OpClass>(i))] =
                        values[static_cast<size_t>(i)];
                }
                times["wait"] = model.wait_ns();
                return times;
            },
            nb::sig("def times_ns(self) -> dict[str, int]"))
        .def("reset_times", &Model::reset_times)
        .def("set_timers", &Model::set_timers, "on"_a);
}
