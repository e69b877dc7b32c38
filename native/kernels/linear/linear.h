// y[rows, N] (+)= x[rows, K] * W[N, K]^T for every weight format, on every level.
//
// Weights are packed in blocks of 16 output channels (layouts: src/trivet/native/packing.py). A
// call computes the channel blocks [block_begin, block_end) for all rows, so that work can be split
// over threads by output channel and never by K; the split never changes a bit.
//
// Numerics: HACKING.md, "Numerics contract": bf16 products follow TDPBF16PS; integer groups are
// summed exactly in int32 and combined by one fma each in ascending order.
#pragma once
#include <cstddef>
#include <cstdint>

namespace trivet {

enum class WeightKind : int32_t {
    kBf16 = 0,
    kInt8Row = 1,    // codes int8, one f32 scale per channel, activations int8 per row (rotated)
    kInt8Group = 2,  // codes int8, scale per (channel, group), activations int8 per (row, group)
    kInt4Group = 3,  // codes uint4, scale per (channel, group) and the scheme's offset
    kInt4Row = 4,    // the same, but one scale and offset per channel; activations in groups of 32
    kInt4Bf16 = 5,   // like kInt4Group, activations bf16; one group may be the whole row
    kFp8 = 6,        // codes e4m3 without NaN, else like kInt4Bf16
};
enum class ScaleType : int32_t { kF16 = 0, kF32 = 1 };
enum class Scheme : int32_t { kSym = 0, kZeroPoint = 1, kMin = 2 };

// A packed weight. Arrays are read-only, do not alias, and should start on a cache line (for
// speed). Whole-row sums fit int32 up to k = 133,144 (test_wide_rows_accumulate_exactly).
struct LinearWeight {
    WeightKind kind;
    Scheme scheme;
    ScaleType scale_type;
    int32_t n;             // output channels
    int32_t k;             // input width
    int32_t n_padded;      // multiple of 16
    int32_t k_padded;      // multiple of 64; activations beyond k are zero
    int32_t group;         // columns of one sum: 16, 32, 64 or 128; 32 for kInt4Row; k_padded for
                           // kInt8Row, and for kInt4Bf16 and kFp8 with one scale a row; unused for
                           // bf16
    int32_t num_groups;    // ceil(k / group)
    int32_t scale_groups;  // scales per channel: num_groups; 1 for kInt4Row
    const void* codes;
    const void* scales;    // [n_padded/16][scale_groups][16] f16 or f32; kInt8Row: f32 [n_padded]
    const void* minima;    // like scales, scheme kMin only
    const uint8_t* zeros;  // [n_padded/16][scale_groups][16], 0..127, scheme kZeroPoint only
    const float* bias;     // [n_padded] or null
};

// Static, not inline: ISA files export nothing but their tables.
static inline bool is_int4(WeightKind kind) {
    return kind == WeightKind::kInt4Group || kind == WeightKind::kInt4Row ||
           kind == WeightKind::kInt4Bf16;
}

static inline bool takes_bf16(WeightKind kind) {
    return kind == WeightKind::kBf16 || kind == WeightKind::kInt4Bf16 || kind == WeightKind::kFp8;
}

// Index of the scale of a block's first channel in group g.
static inline int64_t scale_index(const LinearWeight& w, int32_t block, int32_t g) {
    return (int64_t(block) * w.scale_groups + (w.scale_groups == 1 ? 0 : g)) * 16;
}

// Activations in the form the weight kind asks for; made once per linear input by
// quantize/quantize.h.
struct Activations {
    int32_t rows;
    int32_t k_padded;
    int32_t num_groups;
    const uint16_t* bf16;  // [rows][k_padded], kBf16, kInt4Bf16 and kFp8
    const int8_t* codes;   // [rows][k_padded], the other kinds
    const float* scales;   // [rows][num_groups]; kInt4Bf16 with minima: sums of the group's values
    const int32_t* sums;   // [rows][num_groups] sum of codes per group
    // Codes of one row beyond k are zero, so the last group may be read up to k_padded.
};

// out[r * out_stride + c] for r in [0, rows), c in [16*block_begin, min(n, 16*block_end)).
// accumulate: out += y (one add after the bias add), else out = y. Columns >= n are not written.
// May be called from several threads with disjoint block ranges. Rows: any count >= 0.
using LinearFn = void (*)(const LinearWeight& w, const Activations& x, int32_t block_begin,
                          int32_t block_end, float* out, ptrdiff_t out_stride, bool accumulate);

struct LinearKernels {
    LinearFn bf16;
    LinearFn int8_row;
    LinearFn int8_group;
    LinearFn int4_group;
    LinearFn int4_bf16;
    LinearFn fp8;
};

namespace generic {
extern const LinearKernels linear_kernels;
}
namespace avx2 {
extern const LinearKernels linear_kernels;
}
namespace avx512 {
extern const LinearKernels linear_kernels;
}
namespace amx {
extern const LinearKernels linear_kernels;
}

inline LinearFn select(const LinearKernels& k, WeightKind kind) {
    switch (kind) {
        case WeightKind::kBf16:
            return k.bf16;
        case WeightKind::kInt8Row:
            return k.int8_row;
        case WeightKind::kInt8Group:
            return k.int8_group;
        case WeightKind::kInt4Group:
        case WeightKind::kInt4Row:
            return k.int4_group;
        case WeightKind::kInt4Bf16:
            return k.int4_bf16;
        case WeightKind::kFp8:
            return k.fp8;
    }
    return nullptr;
}

}  // namespace trivet
