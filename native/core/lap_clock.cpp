#include "core/lap_clock.h"

#include <time.h>

#ifdef TRIVET_X86
#include <cpuid.h>
#endif

namespace trivet {

uint64_t LapClock::system_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

#ifdef TRIVET_X86
namespace {

struct Pair {
    uint64_t tick, ns;
};

// Both clocks at one moment: of several tries the one that took least.
Pair read_both(uint64_t (*system_ns)()) {
    Pair best{};
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 8; ++i) {
        const uint64_t before = __builtin_ia32_rdtsc();
        const uint64_t ns = system_ns();
        const uint64_t took = __builtin_ia32_rdtsc() - before;
        if (took < least) {
            least = took;
            best = {before + took / 2, ns};
        }
    }
    return best;
}

double measure_ns_per_tick(uint64_t (*system_ns)()) {
    constexpr uint64_t kLongEnoughNs = 1000000;
    uint32_t a = 0, b = 0, c = 0, d = 0;
    // Bit 8 of edx: the counter runs at one rate in every state of the processor.
    if (!__get_cpuid(0x80000007u, &a, &b, &c, &d) || !(d >> 8 & 1)) return 0;
    const Pair begin = read_both(system_ns);
    while (system_ns() - begin.ns < kLongEnoughNs) {
    }
    const Pair end = read_both(system_ns);
    if (end.tick <= begin.tick) return 0;
    return static_cast<double>(end.ns - begin.ns) / static_cast<double>(end.tick - begin.tick);
}

}  // namespace

LapClock::LapClock() {
    static const double measured = measure_ns_per_tick(system_ns);
    ns_per_tick_ = measured;
    first_tick_ = __builtin_ia32_rdtsc();
}
#else
LapClock::LapClock() = default;
#endif

}  // namespace trivet
