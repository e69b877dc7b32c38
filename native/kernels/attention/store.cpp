#include <cstring>

#include "kernels/attention/attention.h"

namespace trivet {
namespace {

template <typename T>
void scatter(const T* k, const T* v, int32_t head_dim, int32_t slot, T* k_codes, T* v_codes) {
    for (int32_t d = 0; d < head_dim; d += 2) {
        std::memcpy(k_codes + (d / 2 * kPageTokens + slot) * 2, k + d, 2 * sizeof(T));
    }
    T* row = v_codes + (slot / 2 * head_dim) * 2 + slot % 2;
    for (int32_t d = 0; d < head_dim; ++d) row[2 * d] = v[d];
}

}  // namespace

void store_token_bf16(const uint16_t* k, const uint16_t* v, int32_t head_dim, int32_t slot,
                      uint8_t* page) {
    const PageBlock block = page_block(KvKind::kBf16, head_dim);
    scatter(k, v, head_dim, slot, reinterpret_cast<uint16_t*>(page),
            reinterpret_cast<uint16_t*>(page + block.v));
}

void store_token_int8(const int8_t* k, float k_scale, const int8_t* v, float v_scale,
                      int32_t head_dim, int32_t slot, uint8_t* page) {
    const PageBlock block = page_block(KvKind::kInt8, head_dim);
    scatter(k, v, head_dim, slot, reinterpret_cast<int8_t*>(page),
            reinterpret_cast<int8_t*>(page + block.v));
    reinterpret_cast<float*>(page + block.k_scale)[slot] = k_scale;
    reinterpret_cast<float*>(page + block.v_scale)[slot] = v_scale;
}

}  // namespace trivet
