#include "communicators.h"

#include "settings.h"

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <unistd.h>

struct ncclComm {
    std::shared_ptr<fake::Communicator> shared;
};

namespace fake {
namespace {

std::mutex table;
std::set<ncclComm_t> &live() {
    static auto &all = *new std::set<ncclComm_t>;
    return all;
}

thread_local int groups = 0;
thread_local std::vector<std::function<ncclResult_t()>> waits;

void pause_briefly() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

void join(const std::shared_ptr<Communicator> &shared, const std::string &name) {
    long late = 0;
    if (due("late-in-init", shared->meeting.rank, &late)) std::this_thread::sleep_for(std::chrono::milliseconds(late));
    if (due("die-in-init", shared->meeting.rank)) {
        fprintf(stderr, "fake_gpu: rank %d dies in ncclCommInitRank, as ordered\n", shared->meeting.rank);
        kill(getpid(), SIGKILL);
    }
    bool is_error = due("error-in-init", shared->meeting.rank);
    shared->state = !is_error && shared->meeting.join(name) ? ncclSuccess : ncclSystemError;
}

ncclResult_t wait_for(const std::shared_ptr<Communicator> &shared) {
    while (shared->state == ncclInProgress && !shared->meeting.aborted)
        pause_briefly();
    return shared->state;
}

ncclResult_t create(ncclComm_t *handle, int size, const ncclUniqueId &id, int rank, bool blocks) {
    if (size < 1 || size > MOST_RANKS || rank < 0 || rank >= size) return ncclInvalidArgument;
    auto shared = std::make_shared<Communicator>(rank, size, blocks);
    *handle = new ncclComm{shared};
    {
        std::lock_guard<std::mutex> guard(table);
        live().insert(*handle);
    }
    std::string name = id.internal;
    std::thread([shared, name] { join(shared, name); }).detach();
    if (!blocks) return ncclInProgress;
    if (!in_group()) return wait_for(shared);
    wait_at_end_of_group([shared] { return wait_for(shared); });
    return ncclSuccess;
}

void forget(ncclComm_t handle) {
    std::lock_guard<std::mutex> guard(table);
    live().erase(handle);
    delete handle;
}

} // namespace

bool Communicator::wait_for_turn(uint64_t number) const {
    while (begun != number) {
        if (meeting.aborted) return false;
        pause_briefly();
    }
    return true;
}

std::shared_ptr<Communicator> communicator_of(ncclComm_t handle, const char *call) {
    std::lock_guard<std::mutex> guard(table);
    if (live().count(handle)) return handle->shared;
    if (handle != nullptr) report("%s: communicator %p has been freed", call, (void *)handle);
    return nullptr;
}

bool in_group() { return groups > 0; }
void wait_at_end_of_group(std::function<ncclResult_t()> wait) { waits.push_back(std::move(wait)); }

} // namespace fake
using namespace fake;

API ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

API const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclSystemError:
        return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInvalidArgument:
        return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
        return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    case ncclInProgress:
        return "NCCL operation in progress";
    default:
        return "unknown result code";
    }
}

API const char *ncclGetLastError(ncclComm_t) { return "what the stand-in was ordered to say\n"; }

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    std::random_device random;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/fake_gpu-%d-%08x%08x", getpid(), random(), random());
    return ncclSuccess;
}

API ncclResult_t ncclCommInitRank(ncclComm_t *handle, int size, ncclUniqueId id, int rank) {
    return create(handle, size, id, rank, /*blocks=*/true);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *handle, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    return create(handle, size, id, rank, config == nullptr || config->blocking != 0);
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t *error) {
    auto shared = communicator_of(handle, "ncclCommGetAsyncError");
    if (shared == nullptr) return ncclInvalidArgument;
    *error = shared->state;
    return ncclSuccess;
}

API ncclResult_t ncclCommCount(ncclComm_t handle, int *count) {
    auto shared = communicator_of(handle, "ncclCommCount");
    if (shared == nullptr) return ncclInvalidArgument;
    *count = shared->meeting.size;
    return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(ncclComm_t handle, int *rank) {
    auto shared = communicator_of(handle, "ncclCommUserRank");
    if (shared == nullptr) return ncclInvalidArgument;
    *rank = shared->meeting.rank;
    return ncclSuccess;
}

API ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    auto shared = communicator_of(handle, "ncclCommFinalize");
    if (shared == nullptr) return ncclInvalidArgument;
    while (shared->waiting > 0 && !shared->meeting.aborted)
        pause_briefly();
    return ncclSuccess;
}

API ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    ncclResult_t result = ncclCommFinalize(handle);
    if (result == ncclSuccess) forget(handle);
    return result;
}

API ncclResult_t ncclCommAbort(ncclComm_t handle) {
    auto shared = communicator_of(handle, "ncclCommAbort");
    if (shared == nullptr) return ncclInvalidArgument;
    shared->meeting.aborted = true;
    forget(handle);
    return ncclSuccess;
}

API ncclResult_t ncclGroupStart() {
    ++groups;
    return ncclSuccess;
}

API ncclResult_t ncclGroupEnd() {
    if (groups == 0) return ncclInvalidUsage;
    if (--groups > 0) return ncclSuccess;
    ncclResult_t result = ncclSuccess;
    for (auto &wait : waits)
        if (ncclResult_t one = wait(); one != ncclSuccess) result = one;
    waits.clear();
    return result;
}

// For tests: how many communicators this process has.
API int fake_gpu_communicators() {
    std::lock_guard<std::mutex> guard(table);
    return int(live().size());
}
