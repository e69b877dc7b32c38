// Codes of a weight chosen column by column, each column's change passed on to the columns after
// it: one panel of GPTQ's pass (arXiv:2210.17323, Algorithm 1) and one of cyclic coordinate
// descent.
//
// A weight's column is a row here: [columns, rows] float32 with the rows of the weight contiguous,
// so that all arithmetic runs along them and no sum is taken: every level gives the same bits. No
// product is fused with a sum. Nothing aliases; no alignment; values are finite.
#pragma once
#include <cstdint>

namespace trivet {

// How codes map to values: scale * (code - zero), codes between low and high.
struct FeedbackGrid {
    const float* scales;   // [groups, rows]
    const float* inverse;  // [groups, rows], 1 / scale, or 0 where the scale is 0
    const float* zeros;    // [groups, rows]; null: `middle` everywhere
    float middle, low, high;
    const int32_t* groups;  // [columns] group of each column, by step
};

struct FeedbackPanel {
    FeedbackGrid grid;
    int64_t rows;         // in memory, of all arrays [.., rows]
    int32_t columns;      // of the matrix: its row stride
    int32_t begin, end;   // steps of this panel
    const float* matrix;  // [columns, columns]
    float* target;        // [columns, rows], changed between begin and end
    uint8_t* codes;       // [columns, rows], by place
    float* changes;       // [end - begin, rows] out
};

struct FeedbackKernels {
    // GPTQ: matrix is the upper factor U, target the weights not yet coded, in order of the steps;
    // step j's codes go to row places[j]. changes: (target - value) / U[j][j].
    void (*gptq)(const FeedbackPanel& panel, const int32_t* places);
    // Descent: matrix is H, target H (w - q), values q [columns, rows], not changed.
    // changes: the new value less the old one.
    void (*descend)(const FeedbackPanel& panel, const float* values);
};

namespace generic {
extern const FeedbackKernels feedback_kernels;
}
namespace avx2 {
extern const FeedbackKernels feedback_kernels;
}
namespace avx512 {
extern const FeedbackKernels feedback_kernels;
}

}  // namespace trivet
