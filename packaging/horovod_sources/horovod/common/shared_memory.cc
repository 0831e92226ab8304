#include "shared_memory.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
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
constexpr size_t CHUNK = 512 * 1024;
// Up to this many bytes, splitting the work costs more than it saves: each rank
// reduces all of the data by itself.
constexpr size_t SMALL = 8 * 1024;
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
  return PAGE + 2 * size_ * SMALL + 2 * (size_ + 1) * CHUNK;
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

uint8_t* SharedMemory::Chunk(int rank, size_t k) const {
  return memory_ + PAGE + 2 * size_ * SMALL +
         ((k % 2) * (size_ + 1) + rank) * CHUNK;
}

uint8_t* SharedMemory::Sum(size_t k) const { return Chunk(size_, k); }

size_t SharedMemory::Part(int rank, size_t elements) const {
  return elements * rank / size_;
}

void SharedMemory::Allreduce(void* data, size_t elements, size_t element_size,
                             const Reduction& reduce) {
  auto* bytes = static_cast<uint8_t*>(data);
  if (elements * element_size <= SMALL) {
    AllreduceSmall(bytes, elements, element_size, reduce);
    return;
  }
  const size_t per_chunk = CHUNK / element_size;
  const size_t chunks = (elements + per_chunk - 1) / per_chunk;
  auto begin = [&](size_t k) { return bytes + k * per_chunk * element_size; };
  auto length = [&](size_t k) {
    return std::min(per_chunk, elements - k * per_chunk);
  };
  // A pipeline of three chunks with one barrier for each round: while chunk k
  // is copied in, chunk k - 1 is reduced, and the result of chunk k - 2 is
  // copied out.
  for (size_t k = 0; k < chunks + 2; ++k) {
    if (k < chunks) {
      LayDown(begin(k), length(k), element_size, k);
    }
    if (1 <= k && k <= chunks) {
      AddUp(begin(k - 1), length(k - 1), element_size, k - 1, reduce);
    }
    if (k >= 2) {
      Take(begin(k - 2), length(k - 2), element_size, k - 2);
    }
    if (k <= chunks) {
      Barrier();
    }
  }
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

void SharedMemory::LayDown(const uint8_t* data, size_t elements,
                           size_t element_size, size_t k) {
  // Leave out the part that this rank reduces itself: no other rank reads it.
  auto from = Part(rank_, elements) * element_size;
  auto to = Part(rank_ + 1, elements) * element_size;
  std::memcpy(Chunk(rank_, k), data, from);
  std::memcpy(Chunk(rank_, k) + to, data + to, elements * element_size - to);
}

void SharedMemory::AddUp(uint8_t* data, size_t elements, size_t element_size,
                         size_t k, const Reduction& reduce) {
  auto first = Part(rank_, elements);
  auto count = Part(rank_ + 1, elements) - first;
  auto offset = first * element_size;
  auto of = [&](int rank) -> const uint8_t* {
    return (rank == rank_ ? data : Chunk(rank, k)) + offset;
  };
  auto* sum = Sum(k) + offset;
  reduce(sum, of(0), of(1), count);
  for (int rank = 2; rank < size_; ++rank) {
    reduce(sum, sum, of(rank), count);
  }
}

void SharedMemory::Take(uint8_t* data, size_t elements, size_t element_size,
                        size_t k) {
  std::memcpy(data, Sum(k), elements * element_size);
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
