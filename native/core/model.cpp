#include "core/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/fp_state.h"
#include "kernels/embedding/embedding.h"
#include "kernels/math/scalar.h"

namespace trivet {
namespace {

constexpr int32_t kBlock = 16;  // output channels of a block of packed weights

// Neither infinity nor NaN: not all bits of the exponent are set.
bool is_finite(const float* values, int32_t count) {
    uint32_t found = 0;
    for (int32_t i = 0; i < count; ++i) {
        found |= static_cast<uint32_t>((float_bits(values[i]) & 0x7f800000u) == 0x7f800000u);
    }
    return found == 0;
}

// Cuts a loop's blocks into items, large ones first: each thread reads long stretches of weights,
// and the small ones at the end let nobody wait long for the other.
std::vector<int32_t> cut(int32_t num_blocks, int32_t threads) {
    if (threads == 1) return {0, num_blocks};
    std::vector<int32_t> bounds = {0};
    const int32_t least = std::max(1, num_blocks / (40 * threads));
    for (int32_t end = 0; end < num_blocks;) {
        // A little more than half of what is left, one item a thread.
        const int32_t item = std::max(least, (num_blocks - end) * 11 / (20 * threads));
        for (int32_t thread = 0; thread < threads && end < num_blocks; ++thread) {
            end = std::min(num_blocks, end + item);
            bounds.push_back(end);
        }
    }
    return bounds;
}

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

}  // namespace

const char* op_class_name(OpClass op) {
    static constexpr const char* kNames[kNumOpClasses] = {
        "embedding", "prepare",        "linear_qkv",  "attention",
        "linear_o",  "linear_gate_up", "linear_down", "head"};
    return kNames[static_cast<int>(op)];
}

Model::Model(ModelWeights weights, Level level, int num_threads)
    : weights_(std::move(weights)), kernels_(kernels_for(level)), pool_(num_threads) {
    const ModelWeights& w = weights_;
    require(w.hidden > 0 && w.ffn > 0 && w.vocab > 0 && w.max_positions > 0,
            "model: sizes must be positive");
    require(w.num_heads > 0 && w.num_kv_heads > 0 && w.num_heads % w.num_kv_heads == 0,
            "model: num_heads must be a multiple of num_kv_heads");
    require(w.head_dim >= 2 && w.head_dim % 2 == 0, "model: head_dim must be even");
    require(w.embedding.n == w.vocab && w.embedding.k == w.hidden,
            "model: the embedding is not [vocab, hidden]");
    require(w.embedding.kind != WeightKind::kInt8Row,
            "model: the embedding cannot be whole-row int8, whose columns are rotated");
    require(w.embedding.kind != WeightKind::kFp8, "model: the embedding cannot be fp8");
    q_width_ = w.num_heads * w.head_dim;
    qkv_width_ = q_width_ + 2 * w.num_kv_heads * w.head_dim;
    sm_scale_ = static_cast<float>(1.0 / std::sqrt(static_cast<double>(w.head_dim)));
    for (int32_t layer = 0; layer < num_layers(); ++layer) {
        const LayerWeights& l = w.layers[layer];
        auto linear = [&](int32_t index) { ops_.push_back({OpKind::kLinear, layer, index}); };
        linear(add_linear(OpClass::kQkv, Point::kAttnIn, Source::kNorm, l.attn_norm, w.hidden,
                          qkv_width_, l.qkv, false));
        ops_.push_back({OpKind::kAttention, layer, 0});
        ops_.push_back({OpKind::kLayerDone, layer, 0});
        linear(add_linear(OpClass::kO, Point::kOIn, Source::kAttention, nullptr, q_width_, w.hidden,
                          l.o, true));
        linear(add_linear(OpClass::kGateUp, Point::kFfnIn, Source::kNorm, l.ffn_norm, w.hidden,
                          2 * w.ffn, l.gate_up, false));
        linear(add_linear(OpClass::kDown, Point::kDownIn, Source::kGate, nullptr, w.ffn, w.hidden,
                          l.down, true));
    }
    head_ = add_linear(OpClass::kHead, Point::kFinal, Source::kNorm, w.final_norm, w.hidden,
                       w.vocab, {w.head}, false);

    const int32_t group = w.num_heads / w.num_kv_heads;
    const int32_t tile = std::max(group, kTileVectors);
    scratch_.resize(static_cast<size_t>(num_threads));
    for (Scratch& scratch : scratch_) {
        scratch.row.reserve(max_width_);
        scratch.ordered.reserve(max_width_);
        scratch.rotated.reserve(round_up(max_width_, 64));
        scratch.picked.reserve(max_width_);
        reserve_prepared(scratch.prepared, kSharedRows);
        scratch.q.reserve(int64_t{tile} * w.head_dim);
        scratch.head.reserve(int64_t{3} * round_up(w.head_dim, 64));
        scratch.codes.reserve(int64_t{2} * round_up(w.head_dim, 64) * 2);
        scratch.span.reserve(span_scratch_floats(tile, w.head_dim));
        scratch.partial.reserve(int64_t{2} * tile * (w.head_dim + 2));
    }
}

int32_t Model::add_linear(OpClass op_class, Point point, Source source, const float* gain,
                          int32_t width, int32_t out_width, const std::vector<LinearPart>& parts,
                          bool accumulate) {
    LinearOp op{op_class, point, source, gain, width, {}, {}, 0, accumulate, {}};
    const auto add_form = [&](const Form& form) {
        auto found = std::find(op.forms.begin(), op.forms.end(), form);
        if (found == op.forms.end()) found = op.forms.insert(op.forms.end(), form);
        const int64_t code_bytes = int64_t{form.k_padded} * (takes_bf16(form.kind) ? 2 : 1);
        max_code_bytes_ = std::max(max_code_bytes_, code_bytes);
        max_groups_ = std::max(max_groups_, int64_t{form.num_groups});
        return static_cast<int32_t>(found - op.forms.begin());
    };
    int32_t column = 0;
    for (const LinearPart& part : parts) {
        const LinearWeight& w = part.weight;
        require(w.k == width, std::string("model: a weight of ") + op_class_name(op_class) +
                                  " has input width " + std::to_string(w.k) + ", not " +
                                  std::to_string(width));
        const bool is_bf16 = takes_bf16(w.kind);
        const bool needs_sums = w.kind == WeightKind::kInt4Bf16 && w.scheme == Scheme::kMin;
        const bool plain = is_bf16 && !needs_sums;
        const WeightKind form_kind = plain             ? WeightKind::kBf16
                                     : needs_sums      ? WeightKind::kInt4Bf16
                                     : is_int4(w.kind) ? WeightKind::kInt8Group
                                                       : w.kind;
        const LinearWeight& high = part.outlier_weight;
        const int32_t num_outliers = part.outliers == nullptr ? 0 : high.k;
        const int32_t form = add_form({form_kind, plain ? 0 : w.group, part.hadamard, w.k_padded,
                                       plain ? 0 : w.num_groups, part.order, part.amax,
                                       part.outliers, num_outliers});
        op.parts.push_back(
            {w, select(*kernels_.linear, w.kind), form, column, op.num_blocks, accumulate});
        if (num_outliers > 0) {  // onto what the part before it has just written
            const int32_t high_form = add_form({WeightKind::kBf16, 0, 1, high.k_padded, 0,
                                                part.order, 0, part.outliers, num_outliers});
            op.parts.push_back(
                {high, kernels_.linear->bf16, high_form, column, op.num_blocks, true});
        }
        column += w.n;
        op.num_blocks += w.n_padded / kBlock;
    }
    require(column == out_width, std::string("model: the weights of ") + op_class_name(op_class) +
                                     " have " + std::to_string(column) + " outputs, not " +
                                     std::to_string(out_width));
    op.bounds = cut(op.num_blocks, pool_.num_threads());
    max_forms_ = std::max(max_forms_, static_cast<int32_t>(op.forms.size()));
    max_width_ = std::max(max_width_, width);
    linears_.push_back(std::move(op));
    return static_cast<int32_t>(linears_.size()) - 1;
}

int32_t Model::point_width(Point point) const {
    switch (point) {
        case Point::kOIn:
            return q_width_;
        case Point::kDownIn:
            return weights_.ffn;
        default:
            return weights_.hidden;
    }
}

void Model::reset_times() {
    times_ns_ = {};
    wait_ns_ = 0;
}

void Model::start_laps() {
    if (!timers_) return;
    lap_time_ns_ = clock_.now_ns();
    lap_wait_ns_ = pool_.wait_ns();
}

void Model::lap(OpClass op_class, uint64_t elsewhere_ns) {
    if (!timers_) return;
    const uint64_t time = clock_.now_ns(), wait = pool_.wait_ns();
    // The pool has another clock: of a lap that was all waiting it may see a little more than all.
    const uint64_t took = time - lap_time_ns_, waited = std::min(took, wait - lap_wait_ns_);
    times_ns_[static_cast<int>(op_class)] += took - waited - std::min(took - waited, elsewhere_ns);
    wait_ns_ += waited;
    lap_time_ns_ = time;
    lap_wait_ns_ = wait;
}

void Model::check(const Step& step, const Arena& arena) const {
    const ModelWeights& w = weights_;
    const ArenaGeometry& g = arena.geometry();
    require(g.num_layers == num_layers() && g.num_kv_heads == w.num_kv_heads &&
                g.head_dim == w.head_dim && g.kind == w.kv,
            "step: the arena was made for another model or KV format");
    require(step.layer_begin >= 0 && step.layer_begin <= step.layer_end &&
                step.layer_end <= num_layers(),
            "step: layers must lie in [0, " + std::to_string(num_layers()) + ")");
    require(step.layer_begin == 0 || step.hidden != nullptr,
            "step: a range that starts after layer 0 needs hidden states");
    if (step.hidden == nullptr) {
        for (int32_t row = 0; row < step.num_rows; ++row) {
            require(step.tokens[row] >= 0 && step.tokens[row] < w.vocab,
                    "step: token " + std::to_string(step.tokens[row]) + " in row " +
                        std::to_string(row) + " is outside the vocabulary of " +
                        std::to_string(w.vocab));
        }
    }
    int32_t next_row = 0;
    for (int32_t s = 0; s < step.num_segments; ++s) {
        const int32_t* segment = step.segments + 4 * static_cast<int64_t>(s);
        const std::string name = "step: segment " + std::to_string(s);
        require(segment[0] == next_row && segment[1] >= 1 && segment[1] <= step.num_rows - next_row,
                name + " does not follow the rows before it");
        next_row += segment[1];
        require(segment[2] >= 0 && segment[2] <= w.max_positions - segment[1],
                name + " passes position " + std::to_string(w.max_positions));
        require(segment[3] >= 0 && segment[3] < step.num_tables,
                name + " names page table " + std::to_string(segment[3]));
        const int32_t pages = (segment[2] + segment[1] + kPageTokens - 1) / kPageTokens;
        require(pages <= step.table_pages, name + " needs a longer page table");
        const int32_t* table =
            step.page_tables + static_cast<int64_t>(segment[3]) * step.table_pages;
        for (int32_t p = 0; p < pages; ++p) {
            require(
                table[p] >= 0 && table[p] < g.num_pages,
                name + " has page " + std::to_string(table[p]) + " at index " + std::to_string(p));
        }
    }
    require(next_row == step.num_rows, "step: the segments do not cover all rows");
    for (int32_t i = 0; i < step.num_logits; ++i) {
        require(step.logit_rows[i] >= 0 && step.logit_rows[i] < step.num_rows &&
                    (i == 0 || step.logit_rows[i] > step.logit_rows[i - 1]),
                "step: logit rows must be rows of the step, ascending");
    }
}

void Model::reserve_prepared(Prepared& prepared, int32_t num_rows) {
    const auto forms = static_cast<size_t>(max_forms_);
    prepared.codes.resize(forms);
    prepared.scales.resize(forms);
    prepared.sums.resize(forms);
    for (size_t i = 0; i < forms; ++i) {
        prepared.codes[i].reserve(num_rows * max_code_bytes_);
        prepared.scales[i].reserve(std::max<int64_t>(1, num_rows * max_groups_));
        prepared.sums[i].reserve(std::max<int64_t>(1, num_rows * max_groups_));
    }
}

void Model::reserve(const Step& step) {
    if (step.num_rows > row_capacity_) {
        const int64_t rows = step.num_rows;
        hidden_.reserve(rows * weights_.hidden);
        qkv_.reserve(rows * qkv_width_);
        q_.reserve(rows * q_width_);
        attention_.reserve(rows * q_width_);
        gate_up_.reserve(rows * 2 * weights_.ffn);
        reserve_prepared(prepared_, step.num_rows);
        row_capacity_ = step.num_rows;
    }
    logits_.reserve(int64_t{step.num_logits} * weights_.vocab);
}

void Model::forward(const Step& step, Arena& arena, const std::vector<Tap>& taps) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const FpState fp_state;
    check(step, arena);
    const bool with_head = step.layer_end == num_layers();
    num_logits_ = 0;
    nonfinite_logits_.clear();
    reserve(step);
    plan_attention(step);
    ++forward_count_;
    arena.set_progress(forward_count_ << 32 | static_cast<uint64_t>(step.layer_begin));
    start_laps();
    if (step.num_rows > 0) {
        if (step.hidden != nullptr) {
            std::memcpy(hidden_.data(), step.hidden,
                        sizeof(float) * static_cast<size_t>(step.num_rows) * weights_.hidden);
        } else {
            embed(step);
        }
        lap(OpClass::kEmbed);
        for (const Op& op : ops_) {
            if (op.layer < step.layer_begin || op.layer >= step.layer_end) continue;
            if (op.kind == OpKind::kAttention) {
                run_attention(step, arena, op.layer);
                continue;
            }
            if (op.kind == OpKind::kLayerDone) {
                arena.set_progress(forward_count_ << 32 | static_cast<uint64_t>(op.layer + 1));
                continue;
            }
            const LinearOp& linear = linears_[static_cast<size_t>(op.linear)];
            float* out = linear.accumulate                  ? hidden_.data()
                         : linear.op_class == OpClass::kQkv ? qkv_.data()
                                                            : gate_up_.data();
            const int64_t stride = linear.accumulate                  ? weights_.hidden
                                   : linear.op_class == OpClass::kQkv ? qkv_width_
                                                                      : 2 * weights_.ffn;
            run_linear(linear, op.layer, step.num_rows, nullptr, out, stride, taps);
        }
    }
    if (with_head) {
        run_linear(linears_[static_cast<size_t>(head_)], 0, step.num_logits, step.logit_rows,
                   logits_.data(), weights_.vocab, taps);
        num_logits_ = step.num_logits;
        for (int32_t i = 0; i < step.num_logits; ++i) {
            if (!is_finite(hidden_.data() + int64_t{step.logit_rows[i]} * weights_.hidden,
                           weights_.hidden)) {
                nonfinite_logits_.push_back(i);
            }
        }
    } else if (step.hidden_out != nullptr && step.num_rows > 0) {
        std::memcpy(step.hidden_out, hidden_.data(),
                    sizeof(float) * static_cast<size_t>(step.num_rows) * weights_.hidden);
    }
}

void Model::embed(const Step& step) {
    const int32_t chunk = 8, num_chunks = (step.num_rows + chunk - 1) / chunk;
    pool_.parallel_for(num_chunks, [&](int32_t item, int) {
        const int32_t end = std::min(step.num_rows, (item + 1) * chunk);
        for (int32_t row = item * chunk; row < end; ++row) {
            lookup_row(weights_.embedding, step.tokens[row],
                       hidden_.data() + static_cast<int64_t>(row) * weights_.hidden);
        }
    });
}

void Model::prepare_row(const LinearOp& op, int32_t source_row, int32_t row, Scratch& scratch,
                        Prepared& prepared, float* tap_row) {
    const float* row_values = scratch.row.data();
    if (op.source == Source::kNorm) {
        kernels_.norm->rms_norm(hidden_.data() + static_cast<int64_t>(source_row) * weights_.hidden,
                                op.gain, op.width, weights_.norm_eps, scratch.row.data());
    } else if (op.source == Source::kGate) {
        const float* gate = gate_up_.data() + static_cast<int64_t>(source_row) * 2 * weights_.ffn;
        kernels_.activation->silu_mul(gate, gate + weights_.ffn, op.width, scratch.row.data());
    } else {
        std::memcpy(scratch.row.data(),
                    attention_.data() + static_cast<int64_t>(source_row) * q_width_,
                    sizeof(float) * static_cast<size_t>(op.width));
    }
    if (tap_row != nullptr) {
        std::memcpy(tap_row, row_values, sizeof(float) * static_cast<size_t>(op.width));
    }
    for (size_t i = 0; i < op.forms.size(); ++i) {
        const Form& form = op.forms[i];
        const float* x = row_values;
        if (form.order != nullptr) {
            float* ordered = scratch.ordered.data();
            for (int32_t j = 0; j < op.width; ++j) ordered[j] = row_values[form.order[j]];
            x = ordered;
        }
        uint8_t* codes = prepared.codes[i].data();
        const int64_t offset = static_cast<int64_t>(row) * form.k_padded;
        float* scales = prepared.scales[i].data() + static_cast<int64_t>(row) * form.num_groups;
        const float* values = x;  // the columns of x that this form holds
        int32_t width = op.width;
        if (form.num_outliers > 0) {
            float* picked = scratch.picked.data();
            values = picked;
            if (takes_bf16(form.kind)) {
                width = form.num_outliers;
                for (int32_t j = 0; j < width; ++j) picked[j] = x[form.outliers[j]];
            } else {
                std::memcpy(picked, x, sizeof(float) * static_cast<size_t>(width));
                for (int32_t j = 0; j < form.num_outliers; ++j) picked[form.outliers[j]] = 0;
            }
        }
        if (takes_bf16(form.kind)) {
            uint16_t* rounded = reinterpret_cast<uint16_t*>(codes) + offset;
            kernels_.quantize->to_bf16(values, width, form.k_padded, rounded);
            if (form.kind == WeightKind::kInt4Bf16) {
                sum_bf16_groups(rounded, form.k_padded, form.group, form.num_groups, scales);
            }
            continue;
        }
        int8_t* out = reinterpret_cast<int8_t*>(codes) + offset;
        int32_t* sums = prepared.sums[i].data() + static_cast<int64_t>(row) * form.num_groups;
        if (form.kind == WeightKind::kInt8Row) {
            kernels_.quantize->to_int8_row(values, width, form.k_padded, form.hadamard, form.amax,
                                           scratch.rotated.data(), out, scales, sums);
        } else {
            kernels_.quantize->to_int8_group(values, width, form.k_padded, form.group, out, scales,
                                             sums);
        }
    }
}

Activations Model::activations(const Prepared& prepared, const Form& form, int32_t index,
                               int32_t num_rows) const {
    const auto i = static_cast<size_t>(index);
    const uint8_t* codes = prepared.codes[i].data();
    return {num_rows,
            form.k_padded,
            form.num_groups,
            reinterpret_cast<const uint16_t*>(codes),
            reinterpret_cast<const int8_t*>(codes),
            prepared.scales[i].data(),
            prepared.sums[i].data()};
}

void Model::run_linear(const LinearOp& op, int32_t layer, int32_t num_rows, const int32_t* rows,
                       float* out, int64_t out_stride, const std::vector<Tap>& taps) {
    if (num_rows == 0) return;
    const int32_t threads = pool_.num_threads();
    std::vector<const Tap*> sinks;
    for (const Tap& tap : taps) {
        if (tap.point == op.point && (tap.point == Point::kFinal || tap.layer == layer)) {
            sinks.push_back(&tap);
        }
    }
    auto source_row = [rows](int32_t row) { return rows == nullptr ? row : rows[row]; };
    const bool shared = threads == 1 || num_rows > kSharedRows || !sinks.empty();
    if (shared) {
        if (!sinks.empty()) tap_rows_.reserve(int64_t{num_rows} * op.width);
        const int32_t chunk = std::max(1, num_rows / (threads * 4));
        pool_.parallel_for((num_rows + chunk - 1) / chunk, [&](int32_t item, int thread) {
            const int32_t end = std::min(num_rows, (item + 1) * chunk);
            for (int32_t row = item * chunk; row < end; ++row) {
                float* tap_row =
                    sinks.empty() ? nullptr : tap_rows_.data() + int64_t{row} * op.width;
                prepare_row(op, source_row(row), row, scratch_[static_cast<size_t>(thread)],
                            prepared_, tap_row);
            }
        });
        if (!sinks.empty()) drain_taps(sinks, num_rows, op.width);
        lap(OpClass::kPrepare);
    }
    // Each thread that gets an item prepares the few rows for itself: cheaper than a loop of its
    // own.
    uint64_t prepare_ns = 0;
    const uint64_t prepared_for = ++prepared_count_;
    pool_.parallel_for(static_cast<int32_t>(op.bounds.size()) - 1, [&](int32_t item, int thread) {
        Scratch& scratch = scratch_[static_cast<size_t>(thread)];
        if (!shared && scratch.prepared_for != prepared_for) {
            const bool timed = timers_ && thread == 0;
            const uint64_t prepare_start = timed ? clock_.now_ns() : 0;
            for (int32_t row = 0; row < num_rows; ++row) {
                prepare_row(op, source_row(row), row, scratch, scratch.prepared, nullptr);
            }
            scratch.prepared_for = prepared_for;
            if (timed) prepare_ns = clock_.now_ns() - prepare_start;
        }
        const Prepared& prepared = shared ? prepared_ : scratch.prepared;
        const int32_t begin = op.bounds[static_cast<size_t>(item)];
        const int32_t end = op.bounds[static_cast<size_t>(item) + 1];
        for (const Part& part : op.parts) {
            const int32_t blocks = part.weight.n_padded / kBlock;
            const int32_t from = std::max(0, begin - part.first_block);
            const int32_t to = std::min(blocks, end - part.first_block);
            if (from >= to) continue;
            const Form& form = op.forms[static_cast<size_t>(part.form)];
            part.run(part.weight, activations(prepared, form, part.form, num_rows), from, to,
                     out + part.column, out_stride, part.accumulate);
        }
    });
    times_ns_[static_cast<int>(OpClass::kPrepare)] += prepare_ns;
    lap(op.op_class, prepare_ns);
}

void Model::drain_taps(const std::vector<const Tap*>& sinks, int32_t num_rows, int32_t width) {
    const float* rows = tap_rows_.data();
    const int32_t chunk = 16, num_chunks = (width + chunk - 1) / chunk;
    for (const Tap* tap : sinks) {
        if (tap->sink == Sink::kCopy) {
            std::memcpy(tap->data, rows,
                        sizeof(float) * static_cast<size_t>(num_rows) * static_cast<size_t>(width));
            continue;
        }
        // Split by column, rows in order: the sums do not depend on the number of threads.
        pool_.parallel_for(num_chunks, [&](int32_t item, int) {
            const int32_t begin = item * chunk, end = std::min(width, begin + chunk);
            for (int32_t row = 0; row < num_rows; ++row) {
                const float* x = rows + static_cast<int64_t>(row) * width;
                for (int32_t i = begin; i < end; ++i) {
                    const double value = x[i];
                    if (tap->sink == Sink::kAbsmax) {
                        float& most = static_cast<float*>(tap->data)[i];
                        most = std::max(most, std::fabs(x[i]));
                    } else if (tap->sink == Sink::kSumSquares) {
                        static_cast<double*>(tap->data)[i] += value * value;
                    } else {
                        double* gram =
                            static_cast<double*>(tap->data) + static_cast<int64_t>(i) * width;
                        for (int32_t j = 0; j < width; ++j) gram[j] += value * x[j];
                    }
                }
            }
        });
    }
}

}  // namespace trivet
