// The calls of CUDA on memory: to get it, to copy it and to say where it is.
#include "errors.h"
#include "memory.h"
#include "notes.h"
#include "settings.h"

#include <cstring>

namespace fake {
namespace {

cudaError_t get(void **pointer, size_t size, int place) {
    RETURN_IF_BROKEN;
    *pointer = allocate(size, place);
    return *pointer != nullptr ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t give_back(void *pointer) {
    RETURN_IF_BROKEN;
    if (pointer == nullptr || release(pointer)) return cudaSuccess;
    return fail(cudaErrorInvalidValue);
}

cudaError_t copy(const char *name, void *to, const void *from, size_t size, Stream &stream, bool waits) {
    RETURN_IF_BROKEN;
    bool from_program = place_of(from) == PAGEABLE, to_program = place_of(to) == PAGEABLE;
    note(place_of(to) < 0 ? COPY_TO_HOST : place_of(from) < 0 ? COPY_TO_DEVICE : COPY_ON_DEVICE);
    if (waits) note(WAIT);
    Task task{name, {{from, size, false}, {to, size, true}}, [=] { memcpy(to, from, size); }};
    stream.push(std::move(task));
    // Memory that is not pinned is read before the call returns, but its copy may come to the device later.
    if (waits || to_program)
        stream.wait();
    else if (from_program)
        stream.wait(/*known=*/false);
    RETURN_IF_BROKEN;
    return cudaSuccess;
}

} // namespace
} // namespace fake
using namespace fake;

API cudaError_t cudaMalloc(void **pointer, size_t size) { return get(pointer, size, current_device); }
API cudaError_t cudaFree(void *pointer) { return give_back(pointer); }
API cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned) { return get(pointer, size, PINNED); }
API cudaError_t cudaMallocHost(void **pointer, size_t size) { return get(pointer, size, PINNED); }
API cudaError_t cudaFreeHost(void *pointer) { return give_back(pointer); }

API cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned) {
    RETURN_IF_BROKEN;
    return pin(pointer, size) ? cudaSuccess : fail(cudaErrorHostMemoryAlreadyRegistered);
}

API cudaError_t cudaHostUnregister(void *pointer) {
    RETURN_IF_BROKEN;
    return unpin(pointer) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    RETURN_IF_BROKEN;
    memset(attributes, 0, sizeof *attributes);
    int place = place_of(pointer);
    attributes->type = place >= 0        ? cudaMemoryTypeDevice
                       : place == PINNED ? cudaMemoryTypeHost
                                         : cudaMemoryTypeUnregistered;
    attributes->device = place >= 0 ? place : 0;
    auto *address = const_cast<void *>(pointer);
    if (place != PAGEABLE) attributes->devicePointer = address;
    if (place == PINNED) attributes->hostPointer = address;
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
    return copy("cudaMemcpyAsync", to, from, size, stream_of(stream), false);
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) {
    return copy("cudaMemcpy", to, from, size, stream_of(nullptr), true);
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
    return copy("cudaMemcpyPeerAsync", to, from, size, stream_of(stream), false);
}

API cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    RETURN_IF_BROKEN;
    stream_of(stream).push({"cudaMemsetAsync", {{to, size, true}}, [=] { memset(to, value, size); }});
    return cudaSuccess;
}

API cudaError_t cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, nullptr); }

// For tests: what this process has of a device's memory, and how many pieces of it and of pinned memory.
API size_t fake_gpu_bytes(int device) { return used_on(device); }
API size_t fake_gpu_pieces() { return pieces_in_use(); }
