// NCCL's communicators.
#pragma once

#include "meeting.h"
#include "streams.h"

#include <memory>
#include <nccl.h>

namespace fake {

// What a communicator shares with its operations, which may outlive it: an abort does not wait for them.
struct Communicator {
    Communicator(int rank, int size, bool blocks) : meeting(rank, size), blocks(blocks) {}
    Meeting meeting;
    const bool blocks;
    std::atomic<ncclResult_t> state{ncclInProgress};
    std::atomic<int> waiting{0}; // operations that are queued or running
    uint64_t issued = 0;         // operations begin in the order of their calls, on whatever streams they are
    std::atomic<uint64_t> begun{0};

    bool wait_for_turn(uint64_t number) const;
};

// Returns the communicator of a handle, or nullptr, with a report, where it has been freed.
std::shared_ptr<Communicator> communicator_of(ncclComm_t handle, const char *call);

// NCCL's groups: returns whether this thread is in one; what is begun in a group is waited for at its end.
bool in_group();
void wait_at_end_of_group(std::function<ncclResult_t()> wait);

} // namespace fake
