// A persistent pool that runs loops of a step. The caller takes part; who computes an item never
// changes a bit, because items are independent and each is computed whole by one thread.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace trivet {

class ThreadPool {
  public:
    using Body = void (*)(const void* context, int32_t item, int thread);

    // num_threads counts the caller: num_threads - 1 threads are started.
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return static_cast<int>(helpers_.size()) + 1; }

    // body(item, thread) for every item in [0, count); thread in [0, num_threads) is unique among
    // those running. Items are claimed one at a time from an atomic counter. Returns when all are
    // done. One caller at a time. A loop of one item runs on the caller without waking anybody.
    template <typename F>
    void parallel_for(int32_t count, const F& body) {
        run(
            count,
            [](const void* context, int32_t item, int thread) {
                (*static_cast<const F*>(context))(item, thread);
            },
            &body);
    }

    // Nanoseconds the caller has spent waiting for other threads to finish their items.
    uint64_t wait_ns() const { return wait_ns_; }

  private:
    struct Loop {
        std::atomic<Body> body{nullptr};
        std::atomic<const void*> context{nullptr};
        std::atomic<int32_t> count{0};
    };

    void run(int32_t count, Body body, const void* context);
    // Claims and runs items until none is left. Returns whether it ran any.
    bool work(int thread);
    bool has_work() const;
    void wait_done(int32_t count);
    void helper(int thread);
    void end_helpers();

    // A loop's number in the high half and its next unclaimed item in the low half: a claim is a
    // compare-and-swap of the whole word, so that a thread that was late cannot take an item of a
    // later loop with an earlier loop's body.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    Loop loops_[4];  // by loop number; a slot is rewritten only after its loop is done
    alignas(64) std::atomic<int32_t> done_{0};
    std::atomic<int32_t> caller_sleeps_{0};
    alignas(64) std::atomic<int32_t> wakes_{0};
    std::atomic<int32_t> sleepers_{0};
    std::atomic<bool> stop_{false};
    uint64_t wait_ns_ = 0;
    std::vector<std::thread> helpers_;
};

}  // namespace trivet
