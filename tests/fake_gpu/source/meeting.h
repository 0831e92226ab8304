// Where the ranks of a communicator meet: memory that their processes share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace fake {

constexpr size_t PIECE = 1 << 20; // bytes that a rank gives in one round
constexpr int MOST_RANKS = 64;

class Meeting {
  public:
    Meeting(int rank, int size) : rank(rank), size(size) {}
    ~Meeting();
    Meeting(const Meeting &) = delete;

    const int rank, size;
    std::atomic<bool> aborted{false};

    // Waits for all ranks. Returns false where this one was aborted, or the memory is not to be had.
    bool join(const std::string &name);
    // One round: `give` fills this rank's piece; when all have, `take` reads the pieces. Returns false after an abort.
    bool round(const std::function<void(char *)> &give, const std::function<void()> &take);
    const char *piece(int of_rank) const;

  private:
    struct Board;
    bool wait_until(const std::function<bool()> &condition) const;
    size_t bytes() const;
    Board *board_ = nullptr;
    uint64_t rounds_ = 0;
};

} // namespace fake
