#include "meeting.h"

#include "settings.h"

#include <chrono>
#include <fcntl.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

namespace fake {

struct Meeting::Board {
    std::atomic<int> joined;
    std::atomic<uint64_t> given[MOST_RANKS], taken[MOST_RANKS];
};

size_t Meeting::bytes() const { return sizeof(Board) + size_t(size) * PIECE; }

const char *Meeting::piece(int of_rank) const {
    return reinterpret_cast<const char *>(board_ + 1) + size_t(of_rank) * PIECE;
}

Meeting::~Meeting() {
    if (board_ != nullptr) munmap(board_, bytes());
}

bool Meeting::wait_until(const std::function<bool()> &condition) const {
    while (!condition()) {
        if (aborted) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
}

bool Meeting::join(const std::string &name) {
    int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, off_t(bytes())) != 0) return false;
    void *memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return false;
    board_ = static_cast<Board *>(memory);
    ++board_->joined;
    bool complete = wait_until([this] { return board_->joined >= size; });
    shm_unlink(name.c_str()); // by the first; the memory lives as long as somebody has it
    return complete;
}

bool Meeting::round(const std::function<void(char *)> &give, const std::function<void()> &take) {
    uint64_t now = ++rounds_;
    auto all_are_past = [this](std::atomic<uint64_t> *ranks, uint64_t round) {
        for (int other = 0; other < size; ++other)
            if (ranks[other] < round) return false;
        return true;
    };
    if (!wait_until([&] { return all_are_past(board_->taken, now - 1); })) return false;
    give(const_cast<char *>(piece(rank)));
    board_->given[rank] = now;
    if (!wait_until([&] { return all_are_past(board_->given, now); })) return false;
    take();
    board_->taken[rank] = now;
    static const long slow = setting("NCCL_PIECE_US", 0);
    if (slow > 0) std::this_thread::sleep_for(std::chrono::microseconds(slow));
    return true;
}

} // namespace fake
