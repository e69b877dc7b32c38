// KV pages of one machine in one anonymous memory file, shared by its workers by descriptor.
//
//   header | one reference column per worker (uint32 [num_pages] each) | pages
//
// Pages lie as [layer][kv head][page] of page blocks (kernels/attention/attention.h). The file's
// size is sealed; memory is taken when a page is first written. Each worker writes its own column
// only; a page is free when all columns are zero. Nothing has a name, so nothing is left behind by
// a crash.
#pragma once
#include <atomic>
#include <cstdint>

#include "kernels/attention/attention.h"

namespace trivet {

struct ArenaGeometry {
    int32_t num_layers;
    int32_t num_kv_heads;
    int32_t head_dim;
    KvKind kind;
    int32_t num_pages;
    int32_t num_workers;
};

class Arena {
  public:
    // Makes the memory file; `worker` in [0, num_workers) is this process's column. Throws
    // std::invalid_argument on a geometry that makes no sense, std::system_error when memory fails.
    Arena(const ArenaGeometry& geometry, int32_t worker);
    // Maps the arena behind a descriptor of another process, which stays the caller's. Throws
    // std::invalid_argument when it is not an arena.
    Arena(int fd, int32_t worker);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    const ArenaGeometry& geometry() const { return geometry_; }
    int32_t worker() const { return worker_; }
    int fd() const { return fd_; }
    int64_t file_bytes() const { return file_bytes_; }
    int64_t block_bytes() const { return block_bytes_; }

    uint8_t* block(int32_t layer, int32_t kv_head, int32_t page) const {
        const int64_t row = int64_t{layer} * geometry_.num_kv_heads + kv_head;
        return pages_ + (row * geometry_.num_pages + page) * block_bytes_;
    }

    // References of all workers to `page`.
    int64_t total_refs(int32_t page) const;
    int32_t refs(int32_t worker, int32_t page) const;
    // This worker's column.
    void add_ref(int32_t page);
    // Returns false, and changes nothing, when the count is zero already.
    bool drop_ref(int32_t page);
    // Clears a dead worker's column; the caller has proved the death.
    void clear_column(int32_t worker);
    // Copies all layers and heads of a page.
    void copy_page(int32_t from, int32_t to);

    // What a transfer thread follows: the worker's forward call in the high half, and how many of
    // its layers have their KV in the pages in the low half.
    uint64_t progress(int32_t worker) const;
    void set_progress(uint64_t value);

  private:
    void map(int64_t bytes);
    void lay_out();
    std::atomic_ref<uint32_t> cell(int32_t worker, int32_t page) const;

    ArenaGeometry geometry_{};
    int32_t worker_ = 0;
    int fd_ = -1;
    int64_t file_bytes_ = 0, block_bytes_ = 0;
    uint8_t* base_ = nullptr;
    uint64_t* progress_ = nullptr;
    uint32_t* columns_ = nullptr;
    uint8_t* pages_ = nullptr;
};

}  // namespace trivet
