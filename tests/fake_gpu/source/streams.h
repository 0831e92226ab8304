// Streams are threads: each does its tasks in order, and late whenever that is allowed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace fake {

// How far each stream, by number, is known to have come: up to which of its tasks, which count from 1.
using Clock = std::map<int, uint64_t>;

void merge(Clock &into, const Clock &from);

// Bytes that a task reads or writes.
struct Access {
    const void *begin;
    size_t size;
    bool writes;
};

struct Task {
    const char *name;
    std::vector<Access> accesses;
    std::function<void()> work;
    const Clock *after = nullptr; // besides the stream's own tasks, this is done before it
    Clock *stamp = nullptr;       // filled with what is done when the task is
};

class Stream {
  public:
    explicit Stream(int device);
    const int number, device;

    // Queues a task, after a look at whether CUDA orders it after those that use the same bytes (memory.h).
    void push(Task task);
    // Waits until all that is queued now is done. The host then knows it, unless it is not to be `known`.
    void wait(bool known = true);
    // Returns whether all that was queued is done; if so, the host knows it from then on.
    bool idle();
    // What is done before the next task. Call it with order() locked.
    Clock &clock();

  private:
    void run();
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    std::once_flag started_; // torch makes 128 streams at once, and uses one or two
    uint64_t queued_ = 0, done_ = 0;
    Clock clock_;
};

// Guards clocks and the table of memory: what is queued is looked at in one order.
std::mutex &order();
// The host has seen that this is done: whatever it queues from now on comes after it.
void observe(const Clock &seen);
// What the host has seen. Call it with order() locked.
const Clock &observed();

extern thread_local int current_device;
// Returns the stream of a handle; the default stream is the current device's.
Stream &stream_of(cudaStream_t handle);
Stream &default_stream(int device);
// Waits for all streams of a device.
void wait_for_device(int device);
// Waits for these streams, which the host does not learn from it.
void settle(const std::set<int> &numbers);

} // namespace fake
