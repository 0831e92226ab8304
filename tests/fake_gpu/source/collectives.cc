// NCCL's operations, piece by piece on the stream's thread. An abort ends one halfway, and its event completes as if it
// were done, as on a GPU.
#include "communicators.h"
#include "errors.h"
#include "notes.h"
#include "numbers.h"
#include "settings.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <thread>
#include <unistd.h>

namespace fake {
namespace {

// What all operations have in common: they come in the order of their calls, and may go wrong as ordered.
void run(const std::shared_ptr<Communicator> &shared, uint64_t number, long stall, bool dies, bool is_error,
         const std::function<void(Meeting &)> &rounds) {
    auto &meeting = shared->meeting;
    if (shared->wait_for_turn(number)) {
        if (dies) {
            fprintf(stderr, "fake_gpu: rank %d dies in an operation of NCCL, as ordered\n", meeting.rank);
            kill(getpid(), SIGKILL);
        }
        if (stall > 0) std::this_thread::sleep_for(std::chrono::milliseconds(stall));
        if (is_error) shared->state = ncclRemoteError;
        while (is_error && !meeting.aborted) // it hangs until somebody has looked for the error
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        if (!meeting.aborted) rounds(meeting);
        ++shared->begun;
    }
    --shared->waiting;
}

ncclResult_t queue(const char *name, ncclComm_t handle, cudaStream_t stream, std::vector<Access> accesses,
                   std::function<void(Meeting &)> rounds) {
    auto shared = communicator_of(handle, name);
    if (shared == nullptr) return ncclInvalidArgument;
    if (broken() != cudaSuccess) return ncclUnhandledCudaError;
    if (shared->state != ncclSuccess) return shared->state == ncclInProgress ? ncclInvalidUsage : shared->state.load();
    int rank = shared->meeting.rank;
    if (due("call-error", rank)) return ncclSystemError;
    long stall = 0, slow = 0;
    bool is_error = due("async-error", rank), dies = due("die-in-operation", rank);
    due("stall", rank, &stall);
    note(SUM);
    ++shared->waiting;
    uint64_t number;
    {
        static std::mutex mutex;
        std::lock_guard<std::mutex> guard(mutex);
        number = shared->issued++;
    }
    auto work = [=, rounds = std::move(rounds)] { run(shared, number, stall, dies, is_error, rounds); };
    Task task{name, std::move(accesses), std::move(work)};
    if (!due("slow-call", rank, &slow) || shared->blocks) {
        stream_of(stream).push(std::move(task));
        return ncclSuccess;
    }
    shared->state = ncclInProgress; // until it is on its stream, as where ranks are connected by their first operation
    std::thread([=, task = std::move(task)]() mutable {
        std::this_thread::sleep_for(std::chrono::milliseconds(slow));
        stream_of(stream).push(std::move(task));
        shared->state = ncclSuccess;
    }).detach();
    return ncclInProgress;
}

// Calls `part(at, count)` for the pieces of `total` numbers.
template <class F> void in_pieces(size_t total, size_t most, F part) {
    for (size_t at = 0; at < total; at += most)
        if (!part(at, std::min(most, total - at))) return;
}

// Adds up in the order of ranks, so that every rank has the same bits.
void sum_pieces(const Meeting &meeting, size_t offset, char *to, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    memcpy(to, meeting.piece(0) + offset, count * size_of(type));
    for (int rank = 1; rank < meeting.size; ++rank)
        combine(to, meeting.piece(rank) + offset, count, type, op);
    if (op == ncclAvg) divide(to, count, type, meeting.size);
}

bool is_known(ncclDataType_t type, ncclRedOp_t operation) { return size_of(type) > 0 && operation <= ncclAvg; }

ncclResult_t reduce(const char *name, const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                    int root, ncclComm_t handle, cudaStream_t stream) {
    if (!is_known(type, op)) return ncclInvalidArgument;
    size_t size = size_of(type);
    auto *from = static_cast<const char *>(in);
    auto *to = static_cast<char *>(out);
    auto rounds = [=](Meeting &meeting) {
        in_pieces(count, PIECE / size, [&](size_t at, size_t n) {
            return meeting.round([&](char *mine) { memcpy(mine, from + at * size, n * size); },
                                 [&] {
                                     if (root < 0 || root == meeting.rank)
                                         sum_pieces(meeting, 0, to + at * size, n, type, op);
                                 });
        });
    };
    std::vector<Access> accesses{{in, count * size, false}};
    auto shared = communicator_of(handle, name);
    if (shared == nullptr) return ncclInvalidArgument;
    if (root < 0 || root == shared->meeting.rank) accesses.push_back({out, count * size, true});
    return queue(name, handle, stream, accesses, rounds);
}

} // namespace
} // namespace fake
using namespace fake;

API ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    return reduce("ncclAllReduce", in, out, count, type, op, -1, comm, stream);
}

API ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                            ncclComm_t comm, cudaStream_t stream) {
    return reduce("ncclReduce", in, out, count, type, op, root, comm, stream);
}

API ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                   ncclComm_t comm, cudaStream_t stream) {
    if (!is_known(type, op)) return ncclInvalidArgument;
    auto shared = communicator_of(comm, "ncclReduceScatter");
    if (shared == nullptr) return ncclInvalidArgument;
    size_t size = size_of(type), ranks = size_t(shared->meeting.size);
    auto *from = static_cast<const char *>(in);
    auto *to = static_cast<char *>(out);
    auto rounds = [=](Meeting &meeting) {
        // A piece has a part for every rank.
        in_pieces(count, PIECE / size / ranks, [&](size_t at, size_t n) {
            return meeting.round(
                [&](char *mine) {
                    for (size_t rank = 0; rank < ranks; ++rank)
                        memcpy(mine + rank * n * size, from + (rank * count + at) * size, n * size);
                },
                [&] { sum_pieces(meeting, size_t(meeting.rank) * n * size, to + at * size, n, type, op); });
        });
    };
    return queue("ncclReduceScatter", comm, stream, {{in, count * size * ranks, false}, {out, count * size, true}},
                 rounds);
}

API ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                               cudaStream_t stream) {
    if (size_of(type) == 0) return ncclInvalidArgument;
    size_t bytes = count * size_of(type);
    auto *from = static_cast<const char *>(in);
    auto *to = static_cast<char *>(out);
    auto rounds = [=](Meeting &meeting) {
        in_pieces(bytes, PIECE, [&](size_t at, size_t n) {
            return meeting.round(
                [&](char *mine) {
                    if (meeting.rank == root) memcpy(mine, from + at, n);
                },
                [&] { memcpy(to + at, meeting.piece(root), n); });
        });
    };
    auto shared = communicator_of(comm, "ncclBroadcast");
    if (shared == nullptr) return ncclInvalidArgument;
    std::vector<Access> accesses{{out, bytes, true}};
    if (shared->meeting.rank == root) accesses.push_back({in, bytes, false});
    return queue("ncclBroadcast", comm, stream, accesses, rounds);
}

API ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

API ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,
                               cudaStream_t stream) {
    auto shared = communicator_of(comm, "ncclAllGather");
    if (shared == nullptr || size_of(type) == 0) return ncclInvalidArgument;
    size_t bytes = count * size_of(type);
    auto *from = static_cast<const char *>(in);
    auto *to = static_cast<char *>(out);
    auto rounds = [=](Meeting &meeting) {
        in_pieces(bytes, PIECE, [&](size_t at, size_t n) {
            return meeting.round([&](char *mine) { memcpy(mine, from + at, n); },
                                 [&] {
                                     for (int rank = 0; rank < meeting.size; ++rank)
                                         memcpy(to + size_t(rank) * bytes + at, meeting.piece(rank), n);
                                 });
        });
    };
    return queue("ncclAllGather", comm, stream, {{in, bytes, false}, {out, bytes * size_t(shared->meeting.size), true}},
                 rounds);
}
