#include "core/cpu_features.h"

#include <array>
#include <stdexcept>

#ifdef TRIVET_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace trivet {
namespace {

struct Refusals {
    std::array<std::string, kNumLevels> reason;
};

#ifdef TRIVET_X86
struct Registers {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

uint64_t xgetbv0() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t{high} << 32) | low;
}

bool request_amx_permission() {
    constexpr long kArchReqXcompPerm = 0x1023;
    constexpr long kXfeatureXtiledata = 18;
    return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

// Appends `name` to `missing` when `has` is false.
void require(bool has, const char* name, std::string& missing) {
    if (!has) missing += missing.empty() ? name : std::string(", ") + name;
}

Refusals detect() {
    Refusals refusals;
    const Registers basic = cpuid(1, 0), extended = cpuid(7, 0);
    const bool osxsave = basic.ecx >> 27 & 1;
    const uint64_t saved = osxsave ? xgetbv0() : 0;

    std::string missing;
    require(extended.ebx >> 5 & 1, "avx2", missing);
    require(basic.ecx >> 12 & 1, "fma", missing);
    require(basic.ecx >> 29 & 1, "f16c", missing);
    auto finish = [&](Level level, uint64_t state, const char* state_name) {
        std::string& reason = refusals.reason[static_cast<int>(level)];
        if (!missing.empty()) {
            reason = "the CPU lacks " + missing;
        } else if ((saved & state) != state) {
            reason = std::string("the operating system does not save ") + state_name + " registers";
        }
    };
    finish(Level::kAvx2, 0x6, "AVX");
#ifdef TRIVET_EMULATED
    // native/emulation runs the levels above on AVX2.
    finish(Level::kAvx512, 0x6, "AVX");
    finish(Level::kAmx, 0x6, "AVX");
    return refusals;
#endif

    require(extended.ebx >> 16 & 1, "avx512f", missing);
    require(extended.ebx >> 17 & 1, "avx512dq", missing);
    require(extended.ebx >> 30 & 1, "avx512bw", missing);
    require(extended.ebx >> 31 & 1, "avx512vl", missing);
    require(extended.ecx >> 11 & 1, "avx512_vnni", missing);
    finish(Level::kAvx512, 0xe6, "AVX-512");

    require(extended.edx >> 24 & 1, "amx_tile", missing);
    require(extended.edx >> 25 & 1, "amx_int8", missing);
    require(extended.edx >> 22 & 1, "amx_bf16", missing);
    finish(Level::kAmx, 0x600e6, "AMX tile");
    std::string& amx = refusals.reason[static_cast<int>(Level::kAmx)];
    if (amx.empty() && !request_amx_permission()) {
        amx = "the kernel refused permission for AMX tiles";
    }
    return refusals;
}
#else
Refusals detect() {
    Refusals refusals;
    for (Level level : {Level::kAvx2, Level::kAvx512, Level::kAmx}) {
        refusals.reason[static_cast<int>(level)] = "not an x86-64 CPU";
    }
    return refusals;
}
#endif

}  // namespace

const char* level_name(Level level) {
    switch (level) {
        case Level::kGeneric:
            return "generic";
        case Level::kAvx2:
            return "avx2";
        case Level::kAvx512:
            return "avx512";
        case Level::kAmx:
            return "amx";
    }
    return "unknown";
}

const std::string& level_refusal(Level level) {
    static const Refusals refusals = detect();
    return refusals.reason[static_cast<int>(level)];
}

Level best_level() {
    for (int i = kNumLevels - 1; i > 0; --i) {
        if (level_refusal(static_cast<Level>(i)).empty()) return static_cast<Level>(i);
    }
    return Level::kGeneric;
}

Level parse_level(const std::string& name) {
    for (int i = 0; i < kNumLevels; ++i) {
        const Level level = static_cast<Level>(i);
        if (name != level_name(level)) continue;
        if (level_refusal(level).empty()) return level;
        throw std::invalid_argument("instruction-set level " + name +
                                    " cannot run here: " + level_refusal(level));
    }
    throw std::invalid_argument("instruction-set level '" + name +
                                "' is not known; allowed: generic, avx2, avx512, amx");
}

}  // namespace trivet
