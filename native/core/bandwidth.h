// How fast the machine streams memory: the yardstick for model bandwidth utilization.
#pragma once
#include <cstdint>
#include <vector>

namespace trivet {

// Bytes per second of each of `passes` passes that read `bytes` of memory once with `num_threads`
// threads. Throws std::bad_alloc.
std::vector<double> stream_rates(int64_t bytes, int num_threads, int passes);

}  // namespace trivet
