// Instruction-set levels, detected once. A level is usable when the CPU has it and the operating
// system saves its registers; AMX also needs the kernel's permission.
#pragma once
#include <string>

namespace trivet {

enum class Level : int { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };
inline constexpr int kNumLevels = 4;

const char* level_name(Level level);

// Empty when the level can run here, else why not, as text for people. Asks the kernel for AMX
// tiles on the first call.
const std::string& level_refusal(Level level);

// The highest usable level.
Level best_level();

// The level called `name`. Throws std::invalid_argument naming the value and what is allowed when
// it is not a level or cannot run here.
Level parse_level(const std::string& name);

}  // namespace trivet
