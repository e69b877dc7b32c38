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

// Two codes -8..7 in one byte.
uint8_t nibbles(const int8_t* codes) {
    return static_cast<uint8_t>((codes[0] + 8) | (codes[1] + 8) << 4);
}

void store_scales(const PageBlock& block, float k_scale, float v_scale, int32_t slot,
                  uint8_t* page) {
    std::memcpy(page + block.k_scale + 4 * slot, &k_scale, 4);
    std::memcpy(page + block.v_scale + 4 * slot, &v_scale, 4);
}

}  // namespace

void store_token_bf16(const uint16_t* k, const uint16_t* v, int32_t head_dim, int32_t slot,
                      uint8_t* page) {
    const PageBlock block = page_block(KvKind::kBf16, head_dim);
    scatter(k, v, head_dim, slot, reinterpret_cast<uint16_t*>(page),
            reinterpret_cast<uint16_t*>(page + block.v));
}

void store_token_bytes(KvKind kind, const uint8_t* k, float k_scale, const uint8_t* v,
                       float v_scale, int32_t head_dim, int32_t slot, uint8_t* page) {
    const PageBlock block = page_block(kind, head_dim);
    scatter(k, v, head_dim, slot, page, page + block.v);
    store_scales(block, k_scale, v_scale, slot, page);
}

void store_token_int4(KvKind kind, const int8_t* k, float k_scale, const int8_t* v, float v_scale,
                      int32_t head_dim, int32_t slot, uint8_t* page) {
    const PageBlock block = page_block(kind, head_dim);
    uint8_t* v_row = page + block.v + int64_t{slot} * (head_dim / 2);
    for (int32_t i = 0; i < head_dim / 2; ++i) {
        page[i * kPageTokens + slot] = nibbles(k + 2 * i);
        v_row[i] = nibbles(v + 2 * i);
    }
    store_scales(block, k_scale, v_scale, slot, page);
}

void store_first_token(KvKind kind, const uint16_t* k, const uint16_t* v, int32_t head_dim,
                       uint8_t* page) {
    const PageBlock block = page_block(kind, head_dim);
    const size_t bytes = sizeof(uint16_t) * static_cast<size_t>(head_dim);
    std::memcpy(page + block.first, k, bytes);
    std::memcpy(page + block.first + bytes, v, bytes);
    constexpr int8_t kZeros[2] = {0, 0};
    for (int32_t i = 0; i < head_dim / 2; ++i) {
        if (code_kind(kind) == KvKind::kInt4) {
            page[i * kPageTokens] = page[block.v + i] = nibbles(kZeros);
        } else {
            std::memset(page + 2 * i * kPageTokens, 0, 2);
            page[block.v + 4 * i] = page[block.v + 4 * i + 2] = 0;
        }
    }
    store_scales(block, 1.0f, 1.0f, 0, page);
}

}  // namespace trivet
