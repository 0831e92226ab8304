// Allreduce among the ranks of one host, through memory that they share.
//
// Gloo sends everything through sockets, even between two processes on the same
// host: the kernel copies each piece twice and wakes Gloo's thread for it. MPI
// uses shared memory, but polls. If all ranks of a process set are on one
// host, they instead place their data side by side in shared memory, and each
// rank reduces its own part of it, in the order of the ranks. The memory has no
// name in any file system: the other ranks open it through /proc/<pid>/fd of
// rank 0, and the kernel frees it when the last process has closed it.

#ifndef HOROVOD_SHARED_MEMORY_H
#define HOROVOD_SHARED_MEMORY_H

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

// With the value 0, every allreduce goes through Gloo or MPI, as in the
// published release.
#define HVD_TRAIN_SHARED_MEMORY "HVD_TRAIN_SHARED_MEMORY"

namespace horovod {
namespace common {

// The ranks that are about to share memory, and the two collective operations
// that they use to agree on it.
struct SharingRanks {
  int rank;
  int size;
  // Whether all ranks of the process set are on one host.
  bool one_host;
  // Copies this many bytes from rank 0 to all ranks.
  std::function<void(void*, size_t)> broadcast;
  // Returns on every rank whether the argument was true on all ranks.
  std::function<bool(bool)> all;
  // The longest wait for a rank that is alive but silent; zero means no limit.
  std::chrono::milliseconds timeout;
};

// Returns the sum of the squares of n floats.
double SquaresOfFloats(const void* data, size_t n);

class SharedMemory {
public:
  // Computes c[i] = a[i] op b[i] for the given number of elements; c may be a.
  using Reduction =
      std::function<void(void* c, const void* a, const void* b, size_t)>;

  // Collective. Returns null on all ranks if any one of them cannot use the
  // memory: ranks on several hosts or in containers of their own, too little
  // memory, or HVD_TRAIN_SHARED_MEMORY=0.
  static std::unique_ptr<SharedMemory> Establish(const SharingRanks& ranks);

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Collective: all ranks call it between the same two operations. From now on
  // Allreduce sums data in this memory where it lies: `of_ranks[r]` is the
  // address in this process of what rank r passes, `bytes` long. It must stay
  // until the next call or the end of this object.
  void Place(std::vector<uint8_t*> of_ranks, size_t bytes);

  // Collective. Replaces the data with the reduction over all ranks. Throws
  // std::runtime_error if another rank has left, or stays silent for longer
  // than the timeout; nothing can be reduced afterwards.
  void Allreduce(void* data, size_t elements, size_t element_size,
                 const Reduction& reduce,
                 double (*squares)(const void*, size_t) = nullptr);

  // Returns the sum of the squares of what the last Allreduce wrote to this
  // address; negative if it did not add them up. It does so with `squares`, for
  // data that lies in the memory of `Place`.
  double SquaresAt(const void* data);

private:
  // The start of the shared memory. A new file is all zeros, which is the state
  // before the first barrier.
  struct Header {
    // The number of barriers passed so far; ranks sleep on it as a futex.
    std::atomic<uint32_t> generation;
    // The number of ranks that have reached the current barrier.
    std::atomic<uint32_t> arrived;
    // The number of ranks that sleep, so that the last one knows to wake them.
    std::atomic<uint32_t> sleepers;
    // Not zero after a failure on any rank.
    std::atomic<uint32_t> broken;
  };

  // How the other ranks find the memory that rank 0 has created.
  struct Origin {
    int32_t pid;
    int32_t fd; // negative: rank 0 could not create it
    char name[32];
  };

  SharedMemory(int rank, int size, std::chrono::milliseconds timeout);

  // The size of the memory. Its layout: the header in a page of its own; two
  // sets of small buffers, one buffer for each rank, used in turn; a chunk for
  // each rank.
  size_t Bytes() const;
  Origin Create();
  bool Join(const Origin& origin);
  Header& header() const;
  uint8_t* Small(int rank) const;
  uint8_t* Chunk(int rank) const;
  // The first element that this rank reduces.
  size_t Part(int rank, size_t elements) const;
  // This process's addresses of all ranks' data, in the order of the ranks;
  // nothing if the data is not in the memory of `Place`.
  std::vector<uint8_t*> PlacesOf(const uint8_t* data);
  // Reduces this rank's part of all ranks' data, then copies the other parts.
  // Returns the squares of all parts.
  double AllreduceInPlace(const std::vector<uint8_t*>& of_ranks,
                          size_t elements, size_t element_size,
                          const Reduction& reduce,
                          double (*squares)(const void*, size_t));
  void AllreduceSmall(uint8_t* data, size_t elements, size_t element_size,
                      const Reduction& reduce);
  // Returns when all ranks have called it, or throws as Allreduce does.
  void Barrier();
  void Sleep(uint32_t generation);
  bool RankLeft() const;
  [[noreturn]] void Break();

  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  int fd_ = -1;
  uint8_t* memory_ = nullptr;
  uint64_t small_ones_ = 0; // the number of small allreduces so far
  // For the members below, which another thread uses.
  std::mutex mutex_;
  std::vector<uint8_t*> places_;
  size_t placed_bytes_ = 0;
  std::map<const void*, double> squares_;
};

} // namespace common
} // namespace horovod

#endif // HOROVOD_SHARED_MEMORY_H
