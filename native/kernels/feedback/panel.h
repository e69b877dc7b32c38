// The kernels of feedback.h in plain loops along rows, compiled once for every level.
// Static: level files export nothing but their tables.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/feedback/feedback.h"

namespace trivet {

constexpr int64_t kFeedbackRows = 64;  // rows at a time: a panel of so many lies in the L1 cache

// To the nearest integer, halves to even, for what is clipped to codes afterwards: beyond 2^22 the
// result is no integer of x's, but still beyond every code.
static inline float nearest(float x) {
    constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
    return (x + kShift) - kShift;
}

// Codes of one column and the values they stand for. wanted: in, and the values out.
static inline void code_column(const FeedbackGrid& grid, int32_t group, int64_t rows, int64_t at,
                               int64_t count, float* wanted, uint8_t* codes) {
    const float* scale = grid.scales + group * rows + at;
    const float* inverse = grid.inverse + group * rows + at;
    const float* zeros = grid.zeros ? grid.zeros + group * rows + at : nullptr;
    for (int64_t r = 0; r < count; ++r) {
        const float zero = zeros ? zeros[r] : grid.middle;
        float code = nearest(wanted[r] * inverse[r]) + zero;
        code = std::min(std::max(code, grid.low), grid.high);
        codes[r] = static_cast<uint8_t>(static_cast<int32_t>(code));
        wanted[r] = (code - zero) * scale[r];
    }
}

static void gptq_rows(const FeedbackPanel& p, const int32_t* places, int64_t at, int64_t count) {
    float value[kFeedbackRows];
    for (int32_t j = p.begin; j < p.end; ++j) {
        const float* coupling = p.matrix + static_cast<int64_t>(j) * p.columns;
        const float* left = p.target + j * p.rows + at;
        float* error = p.changes + (j - p.begin) * p.rows + at;
        std::copy_n(left, count, value);
        code_column(p.grid, p.grid.groups[j], p.rows, at, count, value,
                    p.codes + places[j] * p.rows + at);
        const float pivot = coupling[j];
        for (int64_t r = 0; r < count; ++r) error[r] = (left[r] - value[r]) / pivot;
        for (int32_t i = j + 1; i < p.end; ++i) {
            float* other = p.target + i * p.rows + at;
            const float c = coupling[i];
            for (int64_t r = 0; r < count; ++r) other[r] -= c * error[r];
        }
    }
}

static void descend_rows(const FeedbackPanel& p, const float* values, int64_t at, int64_t count) {
    float value[kFeedbackRows];
    for (int32_t j = p.begin; j < p.end; ++j) {
        const float* coupling = p.matrix + static_cast<int64_t>(j) * p.columns;
        const float* old = values + j * p.rows + at;
        float* slope = p.target + j * p.rows + at;
        float* change = p.changes + (j - p.begin) * p.rows + at;
        const float pivot = coupling[j];
        for (int64_t r = 0; r < count; ++r) value[r] = slope[r] / pivot + old[r];
        code_column(p.grid, p.grid.groups[j], p.rows, at, count, value, p.codes + j * p.rows + at);
        for (int64_t r = 0; r < count; ++r) change[r] = value[r] - old[r];
        for (int32_t i = j; i < p.end; ++i) {
            float* other = p.target + i * p.rows + at;
            const float c = coupling[i];
            for (int64_t r = 0; r < count; ++r) other[r] -= c * change[r];
        }
    }
}

static void gptq(const FeedbackPanel& panel, const int32_t* places) {
    for (int64_t at = 0; at < panel.rows; at += kFeedbackRows) {
        gptq_rows(panel, places, at, std::min(kFeedbackRows, panel.rows - at));
    }
}

static void descend(const FeedbackPanel& panel, const float* values) {
    for (int64_t at = 0; at < panel.rows; at += kFeedbackRows) {
        descend_rows(panel, values, at, std::min(kFeedbackRows, panel.rows - at));
    }
}

}  // namespace trivet
