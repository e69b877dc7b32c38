// How fast the machine streams memory: the yardstick for model bandwidth utilization.
#pragma once
#include <cstdint>

namespace trivet {

// Bytes per second of the fastest of `repeats` passes that read `bytes` of memory once with
// `num_threads` threads. Throws std::bad_alloc.
double stream_bandwidth(int64_t bytes, int num_threads, int repeats);

}  // namespace trivet
