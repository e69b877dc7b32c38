#include "kernels/attention/attention.h"
#include "kernels/attention/span.h"

namespace trivet::generic {
namespace {

struct Isa : WidenOneByOne {
    template <typename T>
    static void product(int32_t num_q, const float* a, int32_t a_stride, const T* b, int32_t lanes,
                        int32_t pairs, float* c, int32_t c_stride, bool accumulate, Ahead) {
        product_lanes(num_q, a, a_stride, b, lanes, 0, pairs, c, c_stride, accumulate);
    }

    template <bool kScaled>
    static void softmax(float* scores, int32_t valid, int32_t padded, const float* t,
                        const float* v_scale, float* m, float* l) {
        float top = bits_float(0xff800000u);
        for (int32_t j = 0; j < valid; ++j) {
            scores[j] *= kScaled ? t[j] : t[0];
            top = scores[j] > top ? scores[j] : top;
        }
        float lanes[16] = {};
        for (int32_t j = 0; j < valid; ++j) {
            const float p = exp_f32(scores[j] - top);
            lanes[j % 16] += p;
            scores[j] = from_bf16(to_bf16(kScaled ? p * v_scale[j] : p));
        }
        for (int32_t j = valid; j < padded; ++j) scores[j] = 0.0f;
        for (int width = 8; width > 0; width /= 2) {
            for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
        }
        *m = top;
        *l = lanes[0];
    }

    static void settle(float* o, int32_t n) {
        for (int32_t i = 0; i < n; ++i) o[i] += 0.0f;
    }
};

void merge(int32_t num_q, int32_t head_dim, const float* m2, const float* l2, const float* o2,
           float* m, float* l, float* o) {
    for (int32_t q = 0; q < num_q; ++q) {
        const float top = m2[q] > m[q] ? m2[q] : m[q];
        const float a = exp_f32(m[q] - top), b = exp_f32(m2[q] - top);
        m[q] = top;
        l[q] = fma_f32(l[q], a, l2[q] * b);
        for (int32_t d = 0; d < head_dim; ++d) {
            const int64_t i = static_cast<int64_t>(q) * head_dim + d;
            o[i] = fma_f32(o[i], a, o2[i] * b);
        }
    }
}

void finish(int32_t num_q, int32_t head_dim, const float* l, const float* o, float* out,
            ptrdiff_t out_stride) {
    for (int32_t q = 0; q < num_q; ++q) {
        for (int32_t d = 0; d < head_dim; ++d) {
            out[q * out_stride + d] = o[static_cast<int64_t>(q) * head_dim + d] / l[q];
        }
    }
}

}  // namespace

const AttentionKernels attention_kernels = {span<Isa>, merge, finish};

}  // namespace trivet::generic
