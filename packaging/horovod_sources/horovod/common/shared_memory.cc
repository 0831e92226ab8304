#include "shared_memory.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "logging.h"
#include "utils/env_parser.h"

namespace horovod {
namespace common {

namespace {
constexpr size_t PAGE = 4096;
// What other data is copied through: large enough for few barriers, small
// enough for the processor's caches.
constexpr size_t CHUNK = 1024 * 1024;
// Up to this many bytes, splitting the work costs more than it saves: each rank
// reduces all of the data by itself.
constexpr size_t SMALL = 8 * 1024;
// The bytes that are summed at a time where they lie: they stay in the
// processor's nearest cache.
constexpr size_t BLOCK = 16 * 1024;
// How often a waiting rank looks before it sleeps: about ten microseconds.
constexpr int SPINS = 1000;
// How often a sleeping rank checks that the others are still there.
constexpr long LOOK_AROUND_NS = 5 * 1000 * 1000;

// Each rank locks one byte of the file for as long as it takes part. The kernel
// releases the lock when the process ends in any way, so the locks show
// which ranks are alive.
struct flock LockOf(int rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}
} // namespace

double SquaresOfFloats(const void* data, size_t n) {
  auto* x = static_cast<const float*>(data);
  float sums[16] = {}; // side by side, for the processor's vector units
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int k = 0; k < 16; ++k) {
      sums[k] += x[i + k] * x[i + k];
    }
  }
  double sum = std::accumulate(sums, sums + 16, 0.0);
  for (; i < n; ++i) {
    sum += double(x[i]) * x[i];
  }
  return sum;
}

std::unique_ptr<SharedMemory>
SharedMemory::Establish(const SharingRanks& ranks) {
  bool wanted = GetBoolEnvOrDefault(HVD_TRAIN_SHARED_MEMORY, true);
  if (!ranks.all(wanted && ranks.one_host && ranks.size > 1)) {
    return nullptr;
  }
  std::unique_ptr<SharedMemory> memory(
      new SharedMemory(ranks.rank, ranks.size, ranks.timeout));
  Origin origin{};
  if (ranks.rank == 0) {
    origin = memory->Create();
  }
  ranks.broadcast(&origin, sizeof(origin));
  bool joined = ranks.all(memory->Join(origin));
  LOG(DEBUG, ranks.rank) << "Sums over " << ranks.size << " ranks "
                         << (joined ? "go" : "cannot go")
                         << " through shared memory.";
  return joined ? std::move(memory) : nullptr;
}

SharedMemory::SharedMemory(int rank, int size,
                           std::chrono::milliseconds timeout)
    : rank_(rank), size_(size), timeout_(timeout) {}

SharedMemory::~SharedMemory() {
  if (memory_ != nullptr) {
    munmap(memory_, Bytes());
  }
  if (fd_ >= 0) {
    close(fd_); // also releases this rank's lock, which the others look at
  }
}

size_t SharedMemory::Bytes() const {
  return PAGE + 2 * size_ * SMALL + size_ * CHUNK;
}

SharedMemory::Origin SharedMemory::Create() {
  Origin origin{};
  std::random_device random;
  snprintf(origin.name, sizeof(origin.name), "horovod-%08x%08x", random(),
           random());
  fd_ = memfd_create(origin.name, MFD_CLOEXEC);
  // Reserve all pages now: if memory is limited, this call fails, and not a
  // later write, which would end the process by a signal.
  if (fd_ >= 0 && posix_fallocate(fd_, 0, (off_t)Bytes()) != 0) {
    close(fd_);
    fd_ = -1;
  }
  origin.pid = (int32_t)getpid();
  origin.fd = fd_;
  return origin;
}

bool SharedMemory::Join(const Origin& origin) {
  if (origin.fd < 0) {
    return false;
  }
  if (rank_ != 0) {
    auto path = "/proc/" + std::to_string(origin.pid) + "/fd/" +
                std::to_string(origin.fd);
    // In another container this path may lead to any other file, so check the
    // name before opening it.
    auto expected = "/memfd:" + std::string(origin.name) + " (deleted)";
    char found[64] = {};
    if (readlink(path.c_str(), found, sizeof(found) - 1) < 0 ||
        expected != found) {
      return false;
    }
    fd_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  }
  struct flock ours = LockOf(rank_);
  if (fd_ < 0 || fcntl(fd_, F_SETLK, &ours) != 0) {
    return false;
  }
  void* memory =
      mmap(nullptr, Bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  memory_ = memory == MAP_FAILED ? nullptr : static_cast<uint8_t*>(memory);
  return memory_ != nullptr;
}

SharedMemory::Header& SharedMemory::header() const {
  return *reinterpret_cast<Header*>(memory_);
}

uint8_t* SharedMemory::Small(int rank) const {
  return memory_ + PAGE + ((small_ones_ % 2) * size_ + rank) * SMALL;
}

uint8_t* SharedMemory::Chunk(int rank) const {
  return memory_ + PAGE + 2 * size_ * SMALL + rank * CHUNK;
}

size_t SharedMemory::Part(int rank, size_t elements) const {
  return elements * rank / size_;
}

void SharedMemory::Allreduce(void* data, size_t elements, size_t element_size,
                             const Reduction& reduce,
                             double (*squares)(const void*, size_t)) {
  auto* bytes = static_cast<uint8_t*>(data);
  auto of_ranks = PlacesOf(bytes);
  if (!of_ranks.empty()) {
    auto sum =
        AllreduceInPlace(of_ranks, elements, element_size, reduce, squares);
    std::lock_guard<std::mutex> guard(mutex_);
    squares_[data] = squares != nullptr ? sum : -1;
    return;
  }
  if (elements * element_size <= SMALL) {
    AllreduceSmall(bytes, elements, element_size, reduce);
    return;
  }
  for (int rank = 0; rank < size_; ++rank) {
    of_ranks.push_back(Chunk(rank));
  }
  const size_t most = CHUNK / element_size;
  for (size_t begin = 0; begin < elements; begin += most) {
    auto count = std::min(most, elements - begin);
    std::memcpy(Chunk(rank_), bytes + begin * element_size,
                count * element_size);
    AllreduceInPlace(of_ranks, count, element_size, reduce, nullptr);
    std::memcpy(bytes + begin * element_size, Chunk(rank_),
                count * element_size);
  }
}

void SharedMemory::Place(std::vector<uint8_t*> of_ranks, size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  places_ = std::move(of_ranks);
  placed_bytes_ = bytes;
  squares_.clear();
}

double SharedMemory::SquaresAt(const void* data) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto found = squares_.find(data);
  return found == squares_.end() ? -1 : found->second;
}

std::vector<uint8_t*> SharedMemory::PlacesOf(const uint8_t* data) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (places_.empty() || data < places_[rank_] ||
      data >= places_[rank_] + placed_bytes_) {
    return {};
  }
  auto found = places_;
  for (auto& place : found) {
    place += data - places_[rank_];
  }
  return found;
}

double SharedMemory::AllreduceInPlace(const std::vector<uint8_t*>& of_ranks,
                                      size_t elements, size_t element_size,
                                      const Reduction& reduce,
                                      double (*squares)(const void*, size_t)) {
  Barrier();
  alignas(64) uint8_t sum[BLOCK];
  double of_part = 0;
  const size_t end = Part(rank_ + 1, elements);
  for (size_t i = Part(rank_, elements); i < end; i += BLOCK / element_size) {
    auto count = std::min(BLOCK / element_size, end - i);
    auto offset = i * element_size;
    reduce(sum, of_ranks[0] + offset, of_ranks[1] + offset, count);
    for (int rank = 2; rank < size_; ++rank) {
      reduce(sum, sum, of_ranks[rank] + offset, count);
    }
    if (squares != nullptr) {
      of_part += squares(sum, count);
    }
    std::memcpy(of_ranks[rank_] + offset, sum, count * element_size);
  }
  // In turn, as in AllreduceSmall.
  ++small_ones_;
  std::memcpy(Small(rank_), &of_part, sizeof(of_part));
  Barrier();
  double of_all = 0;
  for (int rank = 0; rank < size_; ++rank) {
    std::memcpy(&of_part, Small(rank), sizeof(of_part));
    of_all += of_part;
    auto begin = Part(rank, elements) * element_size;
    if (rank != rank_) {
      std::memcpy(of_ranks[rank_] + begin, of_ranks[rank] + begin,
                  Part(rank + 1, elements) * element_size - begin);
    }
  }
  Barrier(); // from here on this rank may change its data
  return of_all;
}

void SharedMemory::AllreduceSmall(uint8_t* data, size_t elements,
                                  size_t element_size,
                                  const Reduction& reduce) {
  // The two sets of buffers are used in turn, since a slow rank may still be
  // reading the buffers of the previous call.
  ++small_ones_;
  std::memcpy(Small(rank_), data, elements * element_size);
  Barrier();
  reduce(data, Small(0), Small(1), elements);
  for (int rank = 2; rank < size_; ++rank) {
    reduce(data, data, Small(rank), elements);
  }
}

void SharedMemory::Barrier() {
  if (header().broken) {
    Break();
  }
  uint32_t generation = header().generation;
  if (++header().arrived == (uint32_t)size_) {
    header().arrived = 0;
    header().generation = generation + 1;
    if (header().sleepers > 0) {
      syscall(SYS_futex, &header().generation, FUTEX_WAKE, INT_MAX, nullptr,
              nullptr, 0);
    }
    return;
  }
  for (int spin = 0; spin < SPINS; ++spin) {
    if (header().generation != generation) {
      return;
    }
#if __x86_64__
    __builtin_ia32_pause();
#endif
  }
  Sleep(generation);
}

void SharedMemory::Sleep(uint32_t generation) {
  auto begin = std::chrono::steady_clock::now();
  struct timespec a_while{0, LOOK_AROUND_NS};
  bool hopeless = false;
  ++header().sleepers;
  while (header().generation == generation && !hopeless) {
    syscall(SYS_futex, &header().generation, FUTEX_WAIT, generation, &a_while,
            nullptr, 0);
    auto waited = std::chrono::steady_clock::now() - begin;
    hopeless = header().broken || RankLeft() ||
               (timeout_.count() > 0 && waited > timeout_);
  }
  --header().sleepers;
  // A rank may leave as soon as all have arrived, so a rank that has left is a
  // failure only if the barrier has not been passed.
  if (header().generation == generation) {
    Break();
  }
}

bool SharedMemory::RankLeft() const {
  for (int rank = 0; rank < size_; ++rank) {
    struct flock lock = LockOf(rank);
    if (rank != rank_ && fcntl(fd_, F_GETLK, &lock) == 0 &&
        lock.l_type == F_UNLCK) {
      return true;
    }
  }
  return false;
}

void SharedMemory::Break() {
  header().broken = 1; // so that the other ranks stop waiting as well
  throw std::runtime_error(
      "a rank on this host is gone or silent (shared memory)");
}

} // namespace common
} // namespace horovod
