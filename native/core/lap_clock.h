// A clock for the times of single operations. Reading the system's clock in a step that streams
// weights costs several cache misses; the processor's own counter costs none.
#pragma once
#include <cstdint>

namespace trivet {

class LapClock {
  public:
    // The first one of a process compares the counter with the system's clock, for a millisecond.
    LapClock();

    // Nanoseconds since some moment; from the system's clock where the counter's rate may change.
    uint64_t now_ns() const {
#ifdef TRIVET_X86
        if (ns_per_tick_ > 0) {
            return static_cast<uint64_t>(static_cast<double>(__builtin_ia32_rdtsc() - first_tick_) *
                                         ns_per_tick_);
        }
#endif
        return system_ns();
    }

  private:
    static uint64_t system_ns();

    uint64_t first_tick_ = 0;
    double ns_per_tick_ = 0;
};

}  // namespace trivet
