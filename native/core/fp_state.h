// The floating-point state of the numerics contract: round to nearest even, FTZ, DAZ, no traps.
#pragma once
#include <cstdint>

#ifdef TRIVET_X86
#include <xmmintrin.h>
#endif

namespace trivet {

// Sets the state for the lifetime of the object and restores the caller's.
class FpState {
  public:
#ifdef TRIVET_X86
    FpState() : saved_(_mm_getcsr()) { _mm_setcsr(kContract); }
    ~FpState() { _mm_setcsr(saved_); }

  private:
    static constexpr unsigned kContract = 0x9fc0;  // FTZ, all exceptions masked, nearest, DAZ
    unsigned saved_;
#elif defined(__aarch64__)
    FpState() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" : : "r"(kContract));
    }
    ~FpState() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

  private:
    static constexpr uint64_t kContract = 1u << 24;  // FZ
    uint64_t saved_;
#else
#error "no floating-point state for this CPU"
#endif

  public:
    FpState(const FpState&) = delete;
    FpState& operator=(const FpState&) = delete;
};

}  // namespace trivet
