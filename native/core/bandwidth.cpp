#include "core/bandwidth.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "core/buffer.h"
#include "core/cpu_features.h"
#include "core/thread_pool.h"
#include "kernels/stream/stream.h"

namespace trivet {
namespace {

const StreamKernels& stream_table() {
#ifdef TRIVET_X86
    if (level_refusal(Level::kAvx2).empty()) return avx2::stream_kernels;
#endif
    return generic::stream_kernels;
}

}  // namespace

std::vector<double> stream_rates(int64_t bytes, int num_threads, int passes) {
    constexpr int64_t kChunkWords = (int64_t{1} << 18) / 8;
    const int64_t words = std::max(kChunkWords, bytes / 8 / kChunkWords * kChunkWords);
    Buffer<uint64_t> buffer;
    buffer.reserve(words);
    // Huge pages where the system has them: the yardstick is the memory, not the page tables.
    const auto begin = (reinterpret_cast<uintptr_t>(buffer.data()) + 4095) & ~uintptr_t{4095};
    const auto end = reinterpret_cast<uintptr_t>(buffer.data() + words) & ~uintptr_t{4095};
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
    std::memset(buffer.data(), 1, static_cast<size_t>(words) * 8);
    const StreamKernels& kernels = stream_table();
    ThreadPool pool(num_threads);
    std::atomic<uint64_t> sink{0};
    std::vector<double> rates;
    for (int i = 0; i < passes; ++i) {
        const auto start = std::chrono::steady_clock::now();
        pool.parallel_for(static_cast<int32_t>(words / kChunkWords), [&](int32_t item, int) {
            sink.fetch_add(kernels.sum(buffer.data() + item * kChunkWords, kChunkWords),
                           std::memory_order_relaxed);
        });
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        rates.push_back(static_cast<double>(words) * 8 / seconds.count());
    }
    return rates;
}

}  // namespace trivet
