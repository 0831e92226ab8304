// A wait for a GPU or for NCCL that sleeps, and that ends.
#pragma once

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "../utils/env_parser.h"

namespace horovod {
namespace common {

class GpuWait {
public:
  explicit GpuWait(std::string what) : what_(std::move(what)) {}

  // Let other threads run, from the 20th call on for 50 us. Throws
  // std::logic_error after the limit. A pause of this process, such as by
  // SIGSTOP, counts as one second at most.
  void Sleep() {
    using std::chrono::steady_clock;
    static const auto limit = std::chrono::seconds(
        GetIntEnvOrDefault("HVD_TRAIN_NCCL_TIMEOUT_SECONDS", 300));
    if (++calls_ < 20) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    auto now = steady_clock::now();
    waited_ +=
        std::min<steady_clock::duration>(now - last_, std::chrono::seconds(1));
    last_ = now;
    if (limit.count() > 0 && waited_ > limit) {
      throw std::logic_error(what_ + " has not ended after " +
                             std::to_string(limit.count()) +
                             " seconds (HVD_TRAIN_NCCL_TIMEOUT_SECONDS); "
                             "NCCL_DEBUG=INFO shows what NCCL does");
    }
  }

private:
  std::string what_;
  int calls_ = 0;
  std::chrono::steady_clock::duration waited_{};
  std::chrono::steady_clock::time_point last_ =
      std::chrono::steady_clock::now();
};

} // namespace common
} // namespace horovod
