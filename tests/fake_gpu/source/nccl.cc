// NCCL: how the ranks of a communicator meet in shared memory, and how they sum. A sum goes piece by piece on the
// stream's thread. An abort ends one halfway, and its event completes as if it were done, as on a GPU.
#include "gpu.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fcntl.h>
#include <memory>
#include <nccl.h>
#include <random>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <type_traits>
#include <unistd.h>

namespace fake {
namespace {

constexpr size_t PIECE = 1 << 20; // bytes that a rank gives in one round
constexpr int MOST_RANKS = 64;

// What the processes of a communicator share, before the pieces of all ranks.
struct Board {
    std::atomic<int> joined;
    std::atomic<uint64_t> given[MOST_RANKS], taken[MOST_RANKS];
};

// What a communicator shares with its operations, which may outlive it: an abort does not wait for them.
struct Communicator {
    Communicator(int rank, int size) : rank(rank), size(size) {}
    ~Communicator() {
        if (board != nullptr) munmap(board, bytes());
    }
    const int rank, size;
    std::atomic<bool> aborted{false};
    std::atomic<ncclResult_t> state{ncclInProgress};
    std::atomic<int> looks{0};           // until the last call counts as done, as for communicators that do not block
    std::atomic<std::thread::id> caller; // its thread
    uint64_t issued = 0;                 // operations begin in the order of their calls, on whatever streams they are
    std::atomic<uint64_t> finished{0};
    uint64_t rounds = 0;
    Board *board = nullptr;

    size_t bytes() const { return sizeof(Board) + size_t(size) * PIECE; }
    char *piece(int of_rank) const { return reinterpret_cast<char *>(board + 1) + size_t(of_rank) * PIECE; }

    template <class F> bool wait_until(F condition) const {
        while (!condition()) {
            if (aborted) return false;
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        return true;
    }

    // Waits for all ranks. Returns false if the memory is not to be had.
    bool join(const char *name) {
        int file = shm_open(name, O_CREAT | O_RDWR, 0600);
        if (file < 0 || ftruncate(file, off_t(bytes())) != 0) return false;
        void *memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (memory == MAP_FAILED) return false;
        board = static_cast<Board *>(memory);
        ++board->joined;
        wait_until([this] { return board->joined >= size; });
        shm_unlink(name); // by the first; the memory lives as long as a process maps it
        return true;
    }

    // One round: `give` fills this rank's piece; when all have, `take` reads the pieces. Returns false after an abort.
    template <class G, class T> bool round(G give, T take) {
        uint64_t now = ++rounds;
        auto all_are_past = [this](std::atomic<uint64_t> *ranks, uint64_t past) {
            return std::all_of(ranks, ranks + size, [past](auto &other) { return other >= past; });
        };
        if (!wait_until([&] { return all_are_past(board->taken, now - 1); })) return false;
        give(piece(rank));
        board->given[rank] = now;
        if (!wait_until([&] { return all_are_past(board->given, now); })) return false;
        take();
        board->taken[rank] = now;
        static const long slow = setting("NCCL_PIECE_US", 0);
        std::this_thread::sleep_for(std::chrono::microseconds(slow));
        return true;
    }
};

std::mutex table;
std::map<ncclComm_t, std::shared_ptr<Communicator>> &live() {
    static auto &all = *new std::map<ncclComm_t, std::shared_ptr<Communicator>>;
    return all;
}

// Returns the communicator of a handle, or nullptr, with a report, if it has been freed.
std::shared_ptr<Communicator> communicator_of(ncclComm_t handle, const char *call) {
    std::lock_guard<std::mutex> guard(table);
    auto found = live().find(handle);
    if (found != live().end()) return found->second;
    if (handle != nullptr) report("%s: communicator %p has been freed", call, (void *)handle);
    return nullptr;
}

ncclResult_t forget(ncclComm_t handle) {
    std::lock_guard<std::mutex> guard(table);
    live().erase(handle);
    return ncclSuccess;
}

// Adds up in the order of ranks, so that every rank has the same bits.
template <class T> void sum_pieces(const Communicator &ranks, T *to, size_t count, bool is_mean) {
    using Wide = std::conditional_t<sizeof(T) == 2, float, T>;
    memcpy(to, ranks.piece(0), count * sizeof(T));
    for (int rank = 1; rank < ranks.size; ++rank)
        for (size_t i = 0; i < count; ++i)
            to[i] = T(Wide(to[i]) + Wide(reinterpret_cast<T *>(ranks.piece(rank))[i]));
    for (size_t i = 0; is_mean && i < count; ++i)
        to[i] = T(Wide(to[i]) / Wide(ranks.size));
}

template <class T> void sum(Communicator &ranks, const void *in, void *out, size_t count, bool is_mean) {
    const size_t most = PIECE / sizeof(T);
    for (size_t at = 0; at < count; at += most) {
        size_t n = std::min(most, count - at);
        auto give = [&](char *mine) { memcpy(mine, static_cast<const T *>(in) + at, n * sizeof(T)); };
        if (!ranks.round(give, [&] { sum_pieces(ranks, static_cast<T *>(out) + at, n, is_mean); })) return;
    }
}

} // namespace
} // namespace fake
using namespace fake;

API const char *ncclGetErrorString(ncclResult_t result) {
    static thread_local std::string text;
    text = "result " + std::to_string(result) + " of the stand-in for NCCL";
    return text.c_str();
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    std::random_device random;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/fake_gpu-%d-%08x%08x", getpid(), random(), random());
    return ncclSuccess;
}

API const char *ncclGetLastError(ncclComm_t) { return "the stand-in has no more to say"; }

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *handle, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (size < 1 || size > MOST_RANKS || rank < 0 || rank >= size || config->blocking != 0) return ncclInvalidArgument;
    if (due("die-in-init", rank)) {
        fprintf(stderr, "fake_gpu: rank %d dies in ncclCommInitRankConfig, as ordered\n", rank);
        kill(getpid(), SIGKILL);
    }
    auto shared = std::make_shared<Communicator>(rank, size);
    std::thread([shared, id] { shared->state = shared->join(id.internal) ? ncclSuccess : ncclSystemError; }).detach();
    static uintptr_t created = 0;
    std::lock_guard<std::mutex> guard(table);
    *handle = reinterpret_cast<ncclComm_t>(++created);
    live()[*handle] = shared;
    return ncclInProgress;
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t *error) {
    auto shared = communicator_of(handle, "ncclCommGetAsyncError");
    if (shared == nullptr) return ncclInvalidArgument;
    *error = shared->state;
    if (*error == ncclSuccess && shared->looks > 0) {
        if (shared->caller != std::this_thread::get_id()) // both threads would end the thread on which the call runs
            report("ncclCommGetAsyncError: a call of another thread is in progress");
        --shared->looks;
        *error = ncclInProgress;
    }
    return ncclSuccess;
}

API ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    auto shared = communicator_of(handle, "ncclCommFinalize");
    if (shared == nullptr) return ncclInvalidArgument;
    shared->wait_until([&] { return shared->finished == shared->issued; });
    return ncclSuccess;
}

API ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    auto shared = communicator_of(handle, "ncclCommDestroy");
    if (shared == nullptr) return ncclInvalidArgument;
    shared->wait_until([&] { return shared->finished == shared->issued; });
    return forget(handle);
}

API ncclResult_t ncclCommAbort(ncclComm_t handle) {
    auto shared = communicator_of(handle, "ncclCommAbort");
    if (shared == nullptr) return ncclInvalidArgument;
    shared->aborted = true;
    return forget(handle);
}

API ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    auto shared = communicator_of(comm, "ncclAllReduce");
    if (shared == nullptr) return ncclInvalidArgument;
    if (shared->state == ncclInProgress || shared->looks > 0) {
        report("ncclAllReduce: the call before it is still in progress");
        return ncclInvalidUsage;
    }
    if (shared->state != ncclSuccess) return shared->state;
    bool is_half = type == ncclFloat16, is_bf16 = type == ncclBfloat16, is_double = type == ncclFloat64;
    bool is_integer = type == ncclInt64;
    if ((!is_half && !is_bf16 && !is_double && !is_integer && type != ncclFloat32) ||
        (op != ncclSum && op != ncclAvg)) {
        report("ncclAllReduce of type %d with operation %d is not in the stand-in", type, op);
        return ncclInvalidArgument;
    }
    bool is_error = due("async-error", shared->rank), hangs = is_error || due("hang", shared->rank);
    uint64_t number = shared->issued++;
    auto work = [=] {
        shared->wait_until([&] { return shared->finished == number; });
        if (is_error) shared->state = ncclRemoteError;
        shared->wait_until([&] { return !hangs; }); // until the abort
        auto *summed = is_half      ? sum<__half>
                       : is_bf16    ? sum<__nv_bfloat16>
                       : is_double  ? sum<double>
                       : is_integer ? sum<int64_t>
                                    : sum<float>;
        if (!shared->aborted) summed(*shared, in, out, count, op == ncclAvg);
        ++shared->finished;
    };
    size_t bytes = count * (is_half || is_bf16 ? 2 : is_double || is_integer ? 8 : 4);
    stream_of(stream, current_device).push({"ncclAllReduce", {{in, bytes, false}, {out, bytes, true}}, work});
    shared->caller = std::this_thread::get_id();
    shared->looks = 2;
    return ncclInProgress;
}
