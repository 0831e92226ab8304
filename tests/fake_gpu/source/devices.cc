// The devices of a process, orders by environment variables, and reports.
#include "gpu.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sstream>
#include <string>
#include <unistd.h>

namespace fake {
namespace {

constexpr int DEVICES = 4;
thread_local cudaError_t last = cudaSuccess;

bool first_in_job(const std::string &order) {
    const char *folder = getenv("FAKE_GPU_ONCE");
    if (folder == nullptr) return true;
    int mark = open((std::string(folder) + "/" + order).c_str(), O_CREAT | O_EXCL | O_WRONLY, 0600);
    if (mark < 0) return false;
    close(mark);
    return true;
}

} // namespace

long setting(const char *name, long otherwise) {
    const char *value = getenv((std::string("FAKE_GPU_") + name).c_str());
    return value != nullptr ? atol(value) : otherwise;
}

int rank_in_job() {
    const char *rank = getenv("HOROVOD_RANK");
    return rank != nullptr ? atoi(rank) : 0;
}

bool due(const char *name, int rank) {
    const char *orders = getenv("FAKE_GPU_FAULTS");
    if (orders == nullptr) return false;
    static std::mutex mutex;
    static auto &occasions = *new std::map<std::string, long>;
    std::lock_guard<std::mutex> guard(mutex);
    std::string now = std::string(name) + "@" + std::to_string(++occasions[name]);
    std::string on_rank = now + ":" + std::to_string(rank);
    std::istringstream words(orders);
    for (std::string order; words >> order;)
        if ((order == now || order == on_rank) && first_in_job(order)) return true;
    return false;
}

void report(const char *format, ...) {
    char text[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    std::string line = "fake_gpu: rank " + std::to_string(rank_in_job()) + ": " + text + "\n";
    fputs(line.c_str(), stderr);
    const char *path = getenv("FAKE_GPU_REPORT");
    FILE *file = path != nullptr ? fopen(path, "a") : nullptr;
    if (file == nullptr) return;
    fputs(line.c_str(), file);
    fclose(file);
}

cudaError_t fail(cudaError_t error) { return last = error; }

} // namespace fake
using namespace fake;

API cudaError_t cudaGetDeviceCount(int *count) {
    *count = DEVICES;
    return cudaSuccess;
}

API cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= DEVICES) return fail(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= DEVICES) return fail(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "Fake GPU %d", device);
    properties->uuid.bytes[0] = char(device);
    properties->totalGlobalMem = size_t(8) << 30;
    properties->major = 9, properties->multiProcessorCount = 8, properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024, properties->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return cudaSuccess;
}

API cudaError_t cudaGetLastError() {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}

API cudaError_t cudaPeekAtLastError() { return last; }

API const char *cudaGetErrorString(cudaError_t error) {
    static thread_local std::string text;
    text = "error " + std::to_string(error) + " of the stand-in for CUDA";
    return text.c_str();
}

// The few calls of the driver (libcuda) that torch makes.
API CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current_device;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
    *flags = 0, *active = 1;
    return CUDA_SUCCESS;
}

// torch looks for support with some calls that are absent, and manages without.
static CUresult not_there() { return CUDA_ERROR_NOT_SUPPORTED; }

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (*function == nullptr) *function = reinterpret_cast<void *>(not_there);
    if (result != nullptr) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
