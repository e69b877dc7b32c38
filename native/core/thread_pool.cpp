#include "core/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <stdexcept>

#include "core/fp_state.h"

namespace trivet {
namespace {

constexpr uint64_t kSpinNs = 20000;

uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

void relax() {
#ifdef TRIVET_X86
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

void futex_wait(std::atomic<int32_t>& word, int32_t expected) {
    syscall(SYS_futex, reinterpret_cast<int32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr,
            nullptr, 0);
}

void futex_wake(std::atomic<int32_t>& word, int count) {
    syscall(SYS_futex, reinterpret_cast<int32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr,
            nullptr, 0);
}

// Spins until `ready` holds, at most kSpinNs. Returns whether it holds.
template <typename F>
bool spin(const F& ready) {
    const uint64_t start = now_ns();
    for (;;) {
        for (int i = 0; i < 16; ++i) {
            if (ready()) return true;
            relax();
        }
        if (now_ns() - start > kSpinNs) return ready();
    }
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
    // Signals go to the threads that Python knows.
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    try {
        for (int thread = 1; thread < num_threads; ++thread) {
            helpers_.emplace_back([this, thread] { helper(thread); });
            pthread_setname_np(helpers_.back().native_handle(), "trivet");
        }
    } catch (...) {  // the system has no room for one more
        end_helpers();
        pthread_sigmask(SIG_SETMASK, &previous, nullptr);
        throw std::runtime_error("no more threads can be started");
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

ThreadPool::~ThreadPool() { end_helpers(); }

void ThreadPool::end_helpers() {
    stop_.store(true);
    wakes_.fetch_add(1);
    futex_wake(wakes_, INT_MAX);
    for (std::thread& thread : helpers_) thread.join();
}

void ThreadPool::run(int32_t count, Body body, const void* context) {
    if (helpers_.empty() || count <= 1) {
        for (int32_t item = 0; item < count; ++item) body(context, item, 0);
        return;
    }
    const uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    Loop& loop = loops_[number % 4];
    loop.body.store(body, std::memory_order_relaxed);
    loop.context.store(context, std::memory_order_relaxed);
    loop.count.store(count, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(number << 32);
    // Sequentially consistent with the helper's order (announce sleep, look at the ticket): either
    // it sees this ticket or this sees the sleeper.
    if (sleepers_.load() > 0) {
        wakes_.fetch_add(1);
        futex_wake(wakes_, count - 1);
    }
    work(0);
    wait_done(count);
}

bool ThreadPool::work(int thread) {
    bool worked = false;
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
        const Loop& loop = loops_[(ticket >> 32) % 4];
        const Body body = loop.body.load(std::memory_order_relaxed);
        const void* context = loop.context.load(std::memory_order_relaxed);
        const int32_t item = static_cast<int32_t>(ticket & 0xffffffffu);
        if (item >= loop.count.load(std::memory_order_relaxed)) return worked;
        if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                           std::memory_order_acquire)) {
            continue;
        }
        body(context, item, thread);
        worked = true;
        done_.fetch_add(1);
        if (caller_sleeps_.load()) futex_wake(done_, 1);
        ticket = ticket_.load(std::memory_order_acquire);
    }
}

bool ThreadPool::has_work() const {
    const uint64_t ticket = ticket_.load();
    return static_cast<int32_t>(ticket & 0xffffffffu) <
           loops_[(ticket >> 32) % 4].count.load(std::memory_order_relaxed);
}

void ThreadPool::wait_done(int32_t count) {
    auto finished = [&] { return done_.load(std::memory_order_acquire) == count; };
    if (finished()) return;
    const uint64_t start = now_ns();
    if (!spin(finished)) {
        caller_sleeps_.store(1);
        for (int32_t done = done_.load(); done != count; done = done_.load()) {
            futex_wait(done_, done);
        }
        caller_sleeps_.store(0);
    }
    wait_ns_ += now_ns() - start;
}

void ThreadPool::helper(int thread) {
    const FpState fp_state;
    while (!stop_.load(std::memory_order_relaxed)) {
        if (work(thread)) continue;
        if (spin([this] { return has_work() || stop_.load(std::memory_order_relaxed); })) continue;
        sleepers_.fetch_add(1);
        const int32_t wakes = wakes_.load();
        if (!has_work() && !stop_.load()) futex_wait(wakes_, wakes);
        sleepers_.fetch_sub(1);
    }
}

}  // namespace trivet
