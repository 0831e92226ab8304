// Memory: who uses which bytes. Freed memory is full of NaN and stays unused for a while, so that a use is reported.
#include "gpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace fake {
namespace {

constexpr int PINNED = -1, PAGEABLE = -2; // in place of a device's number

constexpr int NANS = 0xFF; // bytes that are NaN in every format of floating point
constexpr size_t MOST_FREED = 64 << 20;

struct Past {
    const char *begin, *end;
    int stream;
    uint64_t sequence;
    bool writes;
    const char *name;
};

struct Block {
    size_t size = 0;
    int place = PINNED;
    bool is_freed = false;
    int owner = 0; // the stream that used it first: torch gives freed memory to that one again
    std::vector<Past> history;
};

using Blocks = std::map<const char *, Block>;
Blocks &blocks() {
    static auto &all = *new Blocks;
    return all;
}
std::deque<const char *> &freed() {
    static auto &queue = *new std::deque<const char *>;
    return queue;
}
// Never destroyed: the threads of streams outlive main().
auto &owners = *new std::map<int, Stream *>;
size_t freed_bytes = 0;

Blocks::iterator find(const void *pointer) {
    auto *at = static_cast<const char *>(pointer);
    auto after = blocks().upper_bound(at);
    if (after == blocks().begin()) return blocks().end();
    auto block = std::prev(after);
    return at < block->first + block->second.size ? block : blocks().end();
}

bool is_done(const Clock &clock, const Past &past) {
    auto known = clock.find(past.stream);
    return known != clock.end() && known->second >= past.sequence;
}

void check_order(Block &block, const Clock &clock, const Stream &stream, const Past &now) {
    for (auto &past : block.history) {
        bool overlaps = past.begin < now.end && now.begin < past.end;
        if (!overlaps || !(past.writes || now.writes) || past.stream == now.stream || is_done(clock, past)) continue;
        report("a race: %s on stream %d of GPU %d %s %zu bytes at %p while %s on stream %d may still %s them: the "
               "first has not been told to wait",
               now.name, now.stream, stream.device, now.writes ? "writes" : "reads", size_t(now.end - now.begin),
               (const void *)now.begin, past.name, past.stream, past.writes ? "write" : "read");
        break;
    }
    // What is done before everything that comes from here on, or before this use of the same bytes, cannot race.
    auto is_over = [&](const Past &past) {
        bool covered = now.begin <= past.begin && past.end <= now.end;
        return (covered && (now.writes || (past.stream == now.stream && !past.writes))) || is_done(observed(), past);
    };
    auto &history = block.history;
    history.erase(std::remove_if(history.begin(), history.end(), is_over), history.end());
    history.push_back(now);
}

cudaError_t allocate(void **pointer, size_t size, int place) {
    std::lock_guard<std::mutex> guard(order());
    if (posix_memalign(pointer, 512, std::max<size_t>(size, 1)) != 0) return fail(cudaErrorMemoryAllocation);
    if (place >= 0) memset(*pointer, NANS, size); // no program may count on zeros
    Block block;
    block.size = size, block.place = place;
    blocks()[static_cast<const char *>(*pointer)] = block;
    return cudaSuccess;
}

// Returns the device that has this memory, or PINNED or PAGEABLE.
int place_of(const void *pointer) {
    std::lock_guard<std::mutex> guard(order());
    auto found = find(pointer);
    return found == blocks().end() || found->second.is_freed ? PAGEABLE : found->second.place;
}

} // namespace

void check(Stream &stream, uint64_t sequence, const Task &task) {
    for (auto &access : task.accesses) {
        if (access.size == 0) continue;
        auto found = find(access.begin);
        if (found == blocks().end()) continue; // memory of the program
        auto *begin = static_cast<const char *>(access.begin);
        auto *end = begin + access.size;
        Block &block = found->second;
        if (block.is_freed)
            report("used after it was freed: %zu bytes at %p, by %s on stream %d", access.size, access.begin, task.name,
                   stream.number);
        else if (end > found->first + block.size)
            report("out of bounds: %s on stream %d uses %zu bytes at %p, of which %zu are there", task.name,
                   stream.number, access.size, access.begin, size_t(found->first + block.size - begin));
        if (!block.owner) block.owner = stream.number, owners[stream.number] = &stream;
        check_order(block, stream.clock(), stream, {begin, end, stream.number, sequence, access.writes, task.name});
    }
}

} // namespace fake
using namespace fake;

API cudaError_t cudaMalloc(void **pointer, size_t size) { return allocate(pointer, size, current_device); }
API cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned) { return allocate(pointer, size, PINNED); }

API cudaError_t cudaFree(void *pointer) {
    if (pointer == nullptr) return cudaSuccess;
    std::set<int> users;
    {
        std::lock_guard<std::mutex> guard(order());
        auto found = blocks().find(static_cast<const char *>(pointer));
        if (found == blocks().end() || found->second.is_freed) {
            report("%p is freed, which is no memory in use", pointer);
            return fail(cudaErrorInvalidValue);
        }
        Block &block = found->second;
        Clock clock = block.owner ? owners[block.owner]->clock() : Clock();
        for (auto &past : block.history)
            users.insert(past.stream);
        for (auto &past : block.history) {
            if (block.place < 0 || past.stream == block.owner || is_done(clock, past)) continue;
            report("freed too early: %zu bytes at %p of stream %d, which %s on stream %d may still use", block.size,
                   pointer, block.owner, past.name, past.stream);
            break;
        }
    }
    // cudaFree waits for the device; torch's cache, which is off here, waits for nobody, and a sum may hang.
    settle(users);
    std::lock_guard<std::mutex> guard(order());
    Block &block = blocks()[static_cast<const char *>(pointer)];
    block.is_freed = true;
    memset(pointer, NANS, block.size);
    freed().push_back(static_cast<const char *>(pointer));
    freed_bytes += block.size;
    while (freed_bytes > MOST_FREED) {
        auto *oldest = freed().front();
        freed().pop_front();
        freed_bytes -= blocks()[oldest].size;
        blocks().erase(oldest);
        free(const_cast<char *>(oldest));
    }
    return cudaSuccess;
}

API cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    int place = place_of(pointer);
    attributes->type = place >= 0        ? cudaMemoryTypeDevice
                       : place == PINNED ? cudaMemoryTypeHost
                                         : cudaMemoryTypeUnregistered;
    attributes->device = std::max(place, 0);
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t handle) {
    Stream &stream = stream_of(handle, current_device);
    ++counts.copies;
    bool from_program = place_of(from) == PAGEABLE, to_program = place_of(to) == PAGEABLE;
    stream.push({"cudaMemcpyAsync", {{from, size, false}, {to, size, true}}, [=] { memcpy(to, from, size); }});
    // Memory that is not pinned is read before the call returns, but its copy may come to the device later.
    if (from_program || to_program) stream.wait(/*known=*/to_program);
    return cudaSuccess;
}
