// The attention of a model's step: cut into items, keys and values stored, spans computed and
// merged.
#include <algorithm>
#include <cstring>

#include "core/model.h"
#include "kernels/quantize/kv_codes.h"

namespace trivet {

void Model::plan_attention(const Step& step) {
    const int32_t kv_heads = weights_.num_kv_heads, group = weights_.num_heads / kv_heads;
    const int32_t tile_rows = std::max(1, kTileVectors / group);
    const int32_t threads = pool_.num_threads();
    tiles_.clear();
    items_.clear();
    fused_ = true;
    bool single_rows = true;
    int64_t num_spans = 0;
    for (int32_t s = 0; s < step.num_segments; ++s) {
        const int32_t* segment = step.segments + 4 * static_cast<int64_t>(s);
        fused_ = fused_ && segment[1] <= tile_rows;
        single_rows = single_rows && segment[1] == 1;
        for (int32_t first = 0; first < segment[1]; first += tile_rows) {
            const int32_t rows = std::min(tile_rows, segment[1] - first);
            const int32_t position = segment[2] + first;
            const int32_t spans = (position + rows + kSpanTokens - 1) / kSpanTokens;
            for (int32_t head = 0; head < kv_heads; ++head) {
                tiles_.push_back(
                    {segment[0] + first, rows, position, segment[3], head, spans, 0, 1});
                num_spans += spans;
            }
        }
    }
    const int64_t num_tiles = static_cast<int64_t>(tiles_.size());
    const bool split = threads > 1 && num_tiles < 2 * threads && num_spans > num_tiles;
    if (split) {
        fused_ = fused_ && single_rows;
        const int64_t per_item = std::max<int64_t>(1, num_spans / (6 * int64_t{threads}));
        int64_t partials = 0;
        for (Tile& tile : tiles_) {
            tile.partials = partials;
            partials += tile.num_spans;
            tile.num_items = static_cast<int32_t>((tile.num_spans + per_item - 1) / per_item);
        }
        const int64_t vectors = std::max(group, kTileVectors);
        partials_.reserve(partials * vectors * (weights_.head_dim + 2));
        if (tiles_.size() > tile_items_capacity_) {
            tile_items_capacity_ = tiles_.size();
            tile_items_ = std::make_unique<std::atomic<int32_t>[]>(tile_items_capacity_);
        }
    }
    // The last tiles of a prefill see the most keys: they start first.
    for (int32_t t = static_cast<int32_t>(num_tiles) - 1; t >= 0; --t) {
        const Tile& tile = tiles_[static_cast<size_t>(t)];
        const int32_t per_item = (tile.num_spans + tile.num_items - 1) / tile.num_items;
        int32_t num_items = 0;
        for (int32_t span = 0; span < tile.num_spans; span += per_item) {
            items_.push_back({t, span, std::min(span + per_item, tile.num_spans)});
            ++num_items;
        }
        tiles_[static_cast<size_t>(t)].num_items = num_items;
    }
}

void Model::rotate_q(int32_t row, int32_t position, int32_t head, int32_t num_heads, uint16_t* out,
                     Scratch& scratch) {
    const int32_t dim = weights_.head_dim, half = dim / 2;
    const float* cos = weights_.cos + static_cast<int64_t>(position) * half;
    const float* sin = weights_.sin + static_cast<int64_t>(position) * half;
    const float* q = qkv_.data() + static_cast<int64_t>(row) * qkv_width_ + head * dim;
    for (int32_t i = 0; i < num_heads; ++i) {
        kernels_.rope->rotate(q + i * dim, cos, sin, half, scratch.head.data());
        // The quantizer writes whole multiples of 64.
        uint16_t* codes = reinterpret_cast<uint16_t*>(scratch.codes.data());
        kernels_.quantize->to_bf16(block_rotated(scratch), dim, round_up(dim, 64), codes);
        std::memcpy(out + i * dim, codes, sizeof(uint16_t) * static_cast<size_t>(dim));
    }
}

const float* Model::block_rotated(Scratch& scratch) const {
    float* head = scratch.head.data();
    if (!rotates_k(weights_.kv)) return head;
    const int32_t dim = weights_.head_dim;
    float* out = head + 2 * round_up(dim, 64);
    kernels_.quantize->rotate(head, dim, hadamard_width(dim), out);
    return out;
}

void Model::store_kv(const Step& step, Arena& arena, int32_t layer, int32_t row, int32_t position,
                     int32_t table, int32_t kv_head, Scratch& scratch) {
    const int32_t dim = weights_.head_dim, half = dim / 2, padded = round_up(dim, 64);
    const float* qkv = qkv_.data() + static_cast<int64_t>(row) * qkv_width_;
    const float* k = qkv + q_width_ + kv_head * dim;
    float* v = scratch.head.data() + padded;
    std::memcpy(v, k + weights_.num_kv_heads * dim, sizeof(float) * static_cast<size_t>(dim));
    kernels_.rope->rotate(k, weights_.cos + static_cast<int64_t>(position) * half,
                          weights_.sin + static_cast<int64_t>(position) * half, half,
                          scratch.head.data());
    const int32_t* pages = step.page_tables + static_cast<int64_t>(table) * step.table_pages;
    uint8_t* page = arena.block(layer, kv_head, pages[position / kPageTokens]);
    const int32_t slot = position % kPageTokens;
    const float* rotated = block_rotated(scratch);
    const KvKind kind = weights_.kv, code = code_kind(kind);
    if (code == KvKind::kBf16 || (position == 0 && keeps_first(kind))) {
        uint16_t* codes = reinterpret_cast<uint16_t*>(scratch.codes.data());
        kernels_.quantize->to_bf16(rotated, dim, padded, codes);
        kernels_.quantize->to_bf16(v, dim, padded, codes + padded);
        if (code == KvKind::kBf16) {
            store_token_bf16(codes, codes + padded, dim, slot, page);
        } else {
            store_first_token(kind, codes, codes + padded, dim, page);
        }
        return;
    }
    int8_t *k_codes = scratch.codes.data(), *v_codes = k_codes + padded;
    auto *k_bytes = reinterpret_cast<uint8_t*>(k_codes), *v_bytes = k_bytes + padded;
    float k_scale, v_scale;
    if (code == KvKind::kInt4) {
        to_int4(rotated, dim, k_codes, &k_scale);
        to_int4(v, dim, v_codes, &v_scale);
        store_token_int4(kind, k_codes, k_scale, v_codes, v_scale, dim, slot, page);
        return;
    }
    if (code == KvKind::kFp8) {
        to_fp8(rotated, dim, k_bytes, &k_scale);
        to_fp8(v, dim, v_bytes, &v_scale);
    } else {
        int32_t sum;
        kernels_.quantize->to_int8_group(rotated, dim, padded, padded, k_codes, &k_scale, &sum);
        kernels_.quantize->to_int8_group(v, dim, padded, padded, v_codes, &v_scale, &sum);
    }
    store_token_bytes(kind, k_bytes, k_scale, v_bytes, v_scale, dim, slot, page);
}

void Model::run_attention(const Step& step, Arena& arena, int32_t layer) {
    if (!fused_) {
        const int32_t chunk = std::max(1, step.num_rows / (pool_.num_threads() * 4));
        pool_.parallel_for((step.num_rows + chunk - 1) / chunk, [&](int32_t item, int thread) {
            Scratch& scratch = scratch_[static_cast<size_t>(thread)];
            const int32_t begin = item * chunk, end = std::min(step.num_rows, begin + chunk);
            for (int32_t s = 0; s < step.num_segments; ++s) {
                const int32_t* segment = step.segments + 4 * static_cast<int64_t>(s);
                const int32_t last = std::min(end, segment[0] + segment[1]);
                for (int32_t row = std::max(begin, segment[0]); row < last; ++row) {
                    const int32_t position = segment[2] + row - segment[0];
                    rotate_q(row, position, 0, weights_.num_heads,
                             q_.data() + static_cast<int64_t>(row) * q_width_, scratch);
                    for (int32_t head = 0; head < weights_.num_kv_heads; ++head) {
                        store_kv(step, arena, layer, row, position, segment[3], head, scratch);
                    }
                }
            }
        });
    }
    for (size_t t = 0; t < tiles_.size(); ++t) {
        if (tiles_[t].num_items > 1) {
            tile_items_[t].store(tiles_[t].num_items, std::memory_order_relaxed);
        }
    }
    // Decoding rows are many short items. A thread takes several in a row, so that it knows whose
    // keys come next.
    const int32_t count = static_cast<int32_t>(items_.size()), threads = pool_.num_threads();
    const int32_t run = fused_ ? std::max(1, count / (8 * threads)) : 1;
    pool_.parallel_for((count + run - 1) / run, [&](int32_t index, int thread) {
        const int32_t begin = index * run, end = std::min(count, begin + run);
        for (int32_t item = begin; item < end; ++item) {
            const int32_t next = item + 1 < end ? item + 1 : end + (threads - 1) * run;
            attend(step, arena, layer, items_[static_cast<size_t>(item)],
                   next < count ? &items_[static_cast<size_t>(next)] : nullptr,
                   scratch_[static_cast<size_t>(thread)]);
        }
    });
    lap(OpClass::kAttention);
}

int32_t Model::span_pages(const Step& step, const Arena& arena, int32_t layer, const Tile& tile,
                          int32_t span, const uint8_t** blocks) const {
    const int32_t* pages = step.page_tables + static_cast<int64_t>(tile.table) * step.table_pages;
    const int32_t tokens = tile.position + tile.num_rows - span * kSpanTokens;
    const int32_t count = std::min(kSpanPages, (tokens + kPageTokens - 1) / kPageTokens);
    for (int32_t p = 0; p < count; ++p) {
        blocks[p] = arena.block(layer, tile.kv_head, pages[span * kSpanPages + p]);
    }
    return count;
}

void Model::attend(const Step& step, Arena& arena, int32_t layer, const Item& item,
                   const Item* next, Scratch& scratch) {
    const Tile& tile = tiles_[static_cast<size_t>(item.tile)];
    const int32_t dim = weights_.head_dim, group = weights_.num_heads / weights_.num_kv_heads;
    const int32_t num_q = tile.num_rows * group, first_head = tile.kv_head * group;
    for (int32_t r = 0; r < tile.num_rows; ++r) {
        uint16_t* q = scratch.q.data() + static_cast<int64_t>(r) * group * dim;
        if (fused_) {
            rotate_q(tile.row + r, tile.position + r, first_head, group, q, scratch);
        } else {
            std::memcpy(
                q, q_.data() + static_cast<int64_t>(tile.row + r) * q_width_ + first_head * dim,
                sizeof(uint16_t) * static_cast<size_t>(group) * dim);
        }
    }
    // The item that reads the last span writes the tile's own tokens first.
    if (fused_ && item.span_end == tile.num_spans) {
        for (int32_t r = 0; r < tile.num_rows; ++r) {
            store_kv(step, arena, layer, tile.row + r, tile.position + r, tile.table, tile.kv_head,
                     scratch);
        }
    }

    const bool split = tile.num_items > 1;
    const int64_t result_floats = static_cast<int64_t>(std::max(group, kTileVectors)) * (dim + 2);
    // The results of a span lie as m [num_q], l [num_q], o [num_q][dim].
    float* total =
        split ? partials_.data() + tile.partials * result_floats : scratch.partial.data();
    auto merge = [&](const float* later, int32_t first) {
        kernels_.attention->merge(num_q - first, dim, later + first, later + num_q + first,
                                  later + 2 * num_q + static_cast<int64_t>(first) * dim,
                                  total + first, total + num_q + first,
                                  total + 2 * num_q + static_cast<int64_t>(first) * dim);
    };
    // The first vector of a span: rows before it do not reach the span.
    auto first_vector = [&](int32_t span) {
        return std::max(0, span * kSpanTokens - tile.position) * group;
    };
    for (int32_t span = item.span_begin; span < item.span_end; ++span) {
        const int32_t first = first_vector(span), first_row = first / group;
        int32_t valid[kTileVectors];
        for (int32_t r = first_row; r < tile.num_rows; ++r) {
            const int32_t keys = tile.position + r + 1 - span * kSpanTokens;
            valid[r - first_row] = std::min(keys, kSpanTokens);
        }
        const int32_t rows = tile.num_rows - first_row;
        const uint8_t *blocks[kSpanPages] = {}, *next_blocks[kSpanPages] = {};
        span_pages(step, arena, layer, tile, span, blocks);
        int32_t num_next = 0;
        if (span + 1 < item.span_end) {
            num_next = span_pages(step, arena, layer, tile, span + 1, next_blocks);
        } else if (next != nullptr) {
            num_next = span_pages(step, arena, layer, tiles_[static_cast<size_t>(next->tile)],
                                  next->span_begin, next_blocks);
        }
        float* result = split      ? total + span * result_floats
                        : span > 0 ? total + result_floats
                                   : total;
        const SpanTask task = {scratch.q.data() + static_cast<int64_t>(first) * dim,
                               rows,
                               group,
                               dim,
                               valid,
                               blocks,
                               next_blocks,
                               num_next,
                               weights_.kv,
                               span == 0,
                               sm_scale_,
                               scratch.span.data(),
                               result + first,
                               result + num_q + first,
                               result + 2 * num_q + static_cast<int64_t>(first) * dim};
        kernels_.attention->span(task);
        if (!split && span > 0) merge(result, first);
    }
    if (split) {
        // Whoever finishes the tile's last item merges all spans, in ascending order.
        if (tile_items_[static_cast<size_t>(item.tile)].fetch_sub(1) > 1) return;
        for (int32_t span = 1; span < tile.num_spans; ++span) {
            merge(total + span * result_floats, first_vector(span));
        }
    }
    for (int32_t r = 0; r < tile.num_rows; ++r) {
        float* out =
            attention_.data() + static_cast<int64_t>(tile.row + r) * q_width_ + first_head * dim;
        const int64_t vector = static_cast<int64_t>(r) * group;
        kernels_.attention->finish(group, dim, total + num_q + vector,
                                   total + 2 * num_q + vector * dim, out, dim);
    }
}

}  // namespace trivet
