// A GPU on the host: streams are threads, and device memory is the host's. The stand-in knows which task uses which
// bytes, so it reports a race even if the bytes came out right by luck.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace fake {

// Returns the number in FAKE_GPU_<name>, or `otherwise` if it is not set.
long setting(const char *name, long otherwise);
// Returns this process's rank in its job, or 0 without a launcher.
int rank_in_job();
// Counts an occasion for a fault; returns whether FAKE_GPU_FAULTS orders it: NAME@N, or NAME@N:R for rank R alone.
// If FAKE_GPU_ONCE names a folder, each fault happens once among all processes that share it.
bool due(const char *name, int rank);
// Reports a mistake of the program, or a call that is absent, on stderr and in the file FAKE_GPU_REPORT.
__attribute__((format(printf, 1, 2))) void report(const char *format, ...);
// What this process has asked for: operators of torch, other kernels, copies, and waits of a thread for the device.
struct Counts {
    std::atomic<long> operators{0}, kernels{0}, copies{0}, waits{0};
};
inline Counts counts;
// Keeps an error of this thread for cudaGetLastError, and returns it.
cudaError_t fail(cudaError_t error);

// How far each stream, by number, is known to have come: up to which of its tasks, which count from 1.
using Clock = std::map<int, uint64_t>;

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

    // Queues a task, after `check`.
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

// Guards clocks and the table of memory: tasks are checked in one order.
std::mutex &order();
// What the host has seen. Call it with order() locked.
const Clock &observed();
// Returns the stream of a handle; the default stream is the device's.
Stream &stream_of(cudaStream_t handle, int device);
// Waits for these streams, which the host does not learn from it.
void settle(const std::set<int> &numbers);
// Reports a task that uses freed memory, or bytes that another stream may still use. Call it with order() locked.
void check(Stream &stream, uint64_t sequence, const Task &task);

extern thread_local int current_device;

} // namespace fake
