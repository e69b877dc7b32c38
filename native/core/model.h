// A decoder model and its forward step.
//
// The weights compile to a flat list of operations (embed, linear, attention, layer done, head); a
// step runs the list once for all rows. Buffers grow to the largest step seen and are kept; a step
// allocates nothing else. Every operation is one loop on the thread pool, whose items write
// disjoint outputs.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/arena.h"
#include "core/buffer.h"
#include "core/dispatch.h"
#include "core/lap_clock.h"
#include "core/thread_pool.h"

namespace trivet {

// One packed weight of a linear operation, and how it takes its input. order: [k] the input column
// that stands at each place of the weight, a permutation; null: they stand in the input's order.
// The rest is about kInt8Row. hadamard: width of the rotation, else 1. amax: the stored range, else
// 0: each row's own. outliers: ascending places that are left out of the row and multiplied in bf16
// with outlier_weight [n, their number], or null.
struct LinearPart {
    LinearWeight weight;
    int32_t hadamard = 1;
    const int32_t* order = nullptr;
    float amax = 0;
    const int32_t* outliers = nullptr;
    LinearWeight outlier_weight{};
};

struct LayerWeights {
    const float* attn_norm = nullptr;  // [hidden]
    const float* ffn_norm = nullptr;   // [hidden]
    // Parts of one operation read the same input and write side by side: q|k|v and gate|up.
    std::vector<LinearPart> qkv, o, gate_up, down;
};

struct ModelWeights {
    int32_t hidden = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0, ffn = 0, vocab = 0;
    int32_t max_positions = 0;
    float norm_eps = 0;
    KvKind kv = KvKind::kBf16;
    const float* cos = nullptr;         // [max_positions][head_dim / 2]
    const float* sin = nullptr;         // [max_positions][head_dim / 2]
    const float* final_norm = nullptr;  // [hidden]
    LinearWeight embedding{};           // [vocab, hidden], may be the head's
    LinearPart head;
    std::vector<LayerWeights> layers;
};

// One step; see trivet.native.api.StepInput.
struct Step {
    const int32_t* tokens;
    int32_t num_rows;
    const int32_t* segments;  // [num_segments][4]: first row, rows, position, page table
    int32_t num_segments;
    const int32_t* page_tables;  // [num_tables][table_pages]
    int32_t num_tables;
    int32_t table_pages;
    const int32_t* logit_rows;
    int32_t num_logits;
    int32_t layer_begin;
    int32_t layer_end;
    const float* hidden;  // [num_rows][hidden] input instead of the embedding, or null
    float* hidden_out;    // [num_rows][hidden] when layer_end is before the last layer, else null
};

// Where activations are observed: the float32 inputs of the linear operations, after norm or gate.
enum class Point : int32_t { kAttnIn = 0, kOIn = 1, kFfnIn = 2, kDownIn = 3, kFinal = 4 };

// What is kept of them. copy: float32 [num_rows][width] (final: [num_logits][width]), written;
// absmax: float32 [width]; sum of squares: float64 [width]; gram: float64 [width][width], sum of x
// x^T, all three accumulated.
enum class Sink : int32_t { kCopy = 0, kAbsmax = 1, kSumSquares = 2, kGram = 3 };

struct Tap {
    Point point;
    int32_t layer;  // ignored for kFinal
    Sink sink;
    void* data;
};

// Classes of operations whose time is counted apart.
enum class OpClass : int32_t { kEmbed, kPrepare, kQkv, kAttention, kO, kGateUp, kDown, kHead };
inline constexpr int kNumOpClasses = 8;
const char* op_class_name(OpClass op);

class Model {
  public:
    // `weights` points into memory the caller keeps. Throws std::invalid_argument when shapes do
    // not fit together.
    Model(ModelWeights weights, Level level, int num_threads);

    const ModelWeights& weights() const { return weights_; }
    Level level() const { return kernels_.level; }
    ThreadPool& pool() { return pool_; }
    int32_t num_layers() const { return static_cast<int32_t>(weights_.layers.size()); }
    // Floats of one row at a point.
    int32_t point_width(Point point) const;

    // Runs a step: writes KV into the arena, keeps the logits. Throws std::invalid_argument when
    // the step does not fit the model or the arena; nothing has been written then.
    void forward(const Step& step, Arena& arena, const std::vector<Tap>& taps);

    // Logits of the last step, [num_logits()][vocab].
    const float* logits() const { return logits_.data(); }
    int32_t num_logits() const { return num_logits_; }
    // The rows of logits() whose hidden state holds infinity or NaN, ascending: they mean nothing.
    const std::vector<int32_t>& nonfinite_logits() const { return nonfinite_logits_; }

    // Nanoseconds of the calling thread in each class of operation, waiting left out, and what it
    // waited in all of them, since reset. Without timers no clock is read and nothing is counted.
    std::array<uint64_t, kNumOpClasses> times_ns() const { return times_ns_; }
    uint64_t wait_ns() const { return wait_ns_; }
    void reset_times();
    void set_timers(bool on) { timers_ = on; }

    // Held during a step; callers that read logits beside another thread's step hold it too.
    std::mutex& mutex() { return mutex_; }

  private:
    enum class Source : int32_t { kNorm, kAttention, kGate };
    // One form of a linear operation's input; kInt4Bf16 means bf16 with sums of groups. Of
    // outliers (num_outliers columns) kInt8Row has all other columns and kBf16 them alone.
    struct Form {
        WeightKind kind;
        int32_t group, hadamard, k_padded, num_groups;
        const int32_t* order;
        float amax = 0;
        const int32_t* outliers = nullptr;
        int32_t num_outliers = 0;
        bool operator==(const Form&) const = default;
    };
    struct Part {
        LinearWeight weight;
        LinearFn run;
        int32_t form;    // index into forms
        int32_t column;  // first output column
        int32_t first_block;
        bool accumulate;
    };
    struct LinearOp {
        OpClass op_class;
        Point point;
        Source source;
        const float* gain;
        int32_t width;  // of the input
        std::vector<Form> forms;
        std::vector<Part> parts;
        int32_t num_blocks;
        bool accumulate;
        std::vector<int32_t> bounds;  // item i of the loop computes blocks [bounds[i], bounds[i+1])
    };
    enum class OpKind : int32_t { kLinear, kAttention, kLayerDone };
    struct Op {
        OpKind kind;
        int32_t layer;
        int32_t linear;  // index into linears_
    };
    // The prepared input of a linear operation in each of its forms.
    struct Prepared {
        std::vector<Buffer<uint8_t>> codes;
        std::vector<Buffer<float>> scales;
        std::vector<Buffer<int32_t>> sums;
    };
    // What one thread needs for itself.
    struct Scratch {
        Buffer<float> row;      // one row before quantization
        Buffer<float> ordered;  // the same, its columns in a weight's order
        Buffer<float> picked;   // its outlier columns, or the row without them
        Buffer<float> rotated;  // scratch of to_int8_row
        Prepared prepared;      // inputs of up to kSharedRows rows
        uint64_t prepared_for = 0;
        Buffer<uint16_t> q;     // query tile
        Buffer<float> head;     // a head after rope, a copied head, the first one block-rotated
        Buffer<int8_t> codes;   // one token's K and V codes
        Buffer<float> span;     // scratch of the span kernel
        Buffer<float> partial;  // m, l, o of a span and of the spans before it
    };
    // A tile of rows of one segment, for one KV head.
    struct Tile {
        int32_t row, num_rows, position, table, kv_head, num_spans;
        int64_t partials;  // first span's index among the split tiles' partial results
        int32_t num_items;
    };
    // Spans [span_begin, span_end) of a tile.
    struct Item {
        int32_t tile, span_begin, span_end;
    };

    // The time of the calling thread is counted in laps: one clock read between two operations.
    void start_laps();
    // Counts the lap that ends now, less `elsewhere_ns` of it, for a class of operations.
    void lap(OpClass op_class, uint64_t elsewhere_ns = 0);
    int32_t add_linear(OpClass op_class, Point point, Source source, const float* gain,
                       int32_t width, int32_t out_width, const std::vector<LinearPart>& parts,
                       bool accumulate);
    void check(const Step& step, const Arena& arena) const;
    void reserve(const Step& step);
    void plan_attention(const Step& step);
    void embed(const Step& step);
    void run_linear(const LinearOp& op, int32_t layer, int32_t num_rows, const int32_t* rows,
                    float* out, int64_t out_stride, const std::vector<Tap>& taps);
    void prepare_row(const LinearOp& op, int32_t source_row, int32_t row, Scratch& scratch,
                     Prepared& prepared, float* tap_row);
    void reserve_prepared(Prepared& prepared, int32_t num_rows);
    Activations activations(const Prepared& prepared, const Form& form, int32_t index,
                            int32_t num_rows) const;
    void drain_taps(const std::vector<const Tap*>& sinks, int32_t num_rows, int32_t width);
    void run_attention(const Step& step, Arena& arena, int32_t layer);
    void store_kv(const Step& step, Arena& arena, int32_t layer, int32_t row, int32_t position,
                  int32_t table, int32_t kv_head, Scratch& scratch);
    void rotate_q(int32_t row, int32_t position, int32_t head, int32_t num_heads, uint16_t* out,
                  Scratch& scratch);
    // The head after rope, rotated by the block Hadamard where the KV format asks for it.
    const float* block_rotated(Scratch& scratch) const;
    // next: the item that this thread takes afterwards, or null.
    void attend(const Step& step, Arena& arena, int32_t layer, const Item& item, const Item* next,
                Scratch& scratch);
    // The page blocks of a span that some row of the tile sees, at most kSpanPages. Returns how
    // many.
    int32_t span_pages(const Step& step, const Arena& arena, int32_t layer, const Tile& tile,
                       int32_t span, const uint8_t** blocks) const;

    static constexpr int32_t kSharedRows =
        2;  // up to this many rows each thread prepares by itself
    static constexpr int32_t kTileVectors = 48;

    ModelWeights weights_;
    Kernels kernels_;
    ThreadPool pool_;
    std::mutex mutex_;
    std::vector<Op> ops_;
    std::vector<LinearOp> linears_;
    int32_t head_ = 0;  // index into linears_
    int32_t max_forms_ = 1;
    int64_t max_code_bytes_ = 0, max_groups_ = 0;
    int32_t max_width_ = 0;
    int32_t qkv_width_, q_width_;
    float sm_scale_;

    int32_t row_capacity_ = 0;
    Buffer<float> hidden_, qkv_, attention_, gate_up_, tap_rows_, logits_;
    Buffer<uint16_t> q_;
    Prepared prepared_;
    std::vector<Scratch> scratch_;
    uint64_t prepared_count_ = 0;

    std::vector<Tile> tiles_;
    std::vector<Item> items_;
    std::unique_ptr<std::atomic<int32_t>[]> tile_items_;  // items of each split tile still to run
    size_t tile_items_capacity_ = 0;
    Buffer<float> partials_;
    bool fused_ = false;  // each attention item writes its own rows' KV

    int32_t num_logits_ = 0;
    std::vector<int32_t> nonfinite_logits_;
    uint64_t forward_count_ = 0;
    std::array<uint64_t, kNumOpClasses> times_ns_{};
    uint64_t wait_ns_ = 0;
    const LapClock clock_;
    uint64_t lap_time_ns_ = 0, lap_wait_ns_ = 0;  // when the lap began, the pool's waiting then
    bool timers_ = true;
};

}  // namespace trivet
