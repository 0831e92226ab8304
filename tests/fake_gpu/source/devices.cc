// What the devices are like, and the errors of calls.
#include "devices.h"
#include "errors.h"
#include "memory.h"
#include "settings.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake {
namespace {

constexpr int VERSION = 13020;
std::atomic<cudaError_t> breakdown{cudaSuccess};
thread_local cudaError_t last = cudaSuccess;

// Returns the numbers of the visible devices on the machine. As in CUDA, the list ends at the first that is not there.
const std::vector<int> &visible() {
    static auto &devices = *new std::vector<int>([] {
        std::vector<int> found;
        int count = int(setting("DEVICES", 4));
        const char *list = getenv("CUDA_VISIBLE_DEVICES");
        if (list == nullptr) {
            for (int device = 0; device < count; ++device)
                found.push_back(device);
            return found;
        }
        while (*list) {
            char *end;
            long device = strtol(list, &end, 10);
            if (end == list || device < 0 || device >= count) break;
            found.push_back(int(device));
            list = *end == ',' ? end + 1 : end;
        }
        return found;
    }());
    return devices;
}

int capability() { return int(setting("CAPABILITY", 90)); }

int driver_version() { return int(setting("DRIVER", VERSION)); }

bool is_there(int device) { return device >= 0 && device < int(visible().size()); }

} // namespace

int visible_devices() { return int(visible().size()); }
cudaError_t broken() { return breakdown; }
void break_down(cudaError_t error) { breakdown = error; }
cudaError_t fail(cudaError_t error) { return last = error; }

} // namespace fake
using namespace fake;

API cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    if (driver_version() / 1000 < VERSION / 1000) return fail(cudaErrorInsufficientDriver);
    *count = int(visible().size());
    return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
    RETURN_IF_BROKEN;
    if (!is_there(device)) return fail(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

API cudaError_t cudaInitDevice(int device, unsigned, unsigned) { return cudaSetDevice(device); }

API cudaError_t cudaDriverGetVersion(int *version) {
    *version = driver_version();
    return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (!is_there(device)) return fail(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    int number = visible()[device];
    snprintf(properties->name, sizeof properties->name, "Fake GPU %d", number);
    properties->uuid.bytes[0] = char(number);
    properties->pciBusID = number + 1;
    properties->totalGlobalMem = memory_of_a_device();
    properties->major = capability() / 10, properties->minor = capability() % 10;
    properties->multiProcessorCount = 8, properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024, properties->maxThreadsPerMultiProcessor = 2048;
    properties->sharedMemPerBlock = 48 << 10, properties->sharedMemPerBlockOptin = 227 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->l2CacheSize = 1 << 20;
    for (int axis = 0; axis < 3; ++axis)
        properties->maxThreadsDim[axis] = 1024, properties->maxGridSize[axis] = 65535;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    if (!is_there(device)) return fail(cudaErrorInvalidDevice);
    *value = attribute == cudaDevAttrComputeCapabilityMajor   ? capability() / 10
             : attribute == cudaDevAttrComputeCapabilityMinor ? capability() % 10
             : attribute == cudaDevAttrMultiProcessorCount    ? 8
                                                              : 0;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    if (!is_there(device)) return fail(cudaErrorInvalidDevice);
    snprintf(text, size_t(size), "0000:%02x:00.0", visible()[device] + 1);
    return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    RETURN_IF_BROKEN;
    *total = memory_of_a_device();
    *free = *total - used_on(current_device);
    return cudaSuccess;
}

API cudaError_t cudaGetLastError() {
    cudaError_t error = broken() != cudaSuccess ? broken() : last;
    last = cudaSuccess;
    return error;
}

API cudaError_t cudaPeekAtLastError() { return broken() != cudaSuccess ? broken() : last; }

// The driver has the names of errors: those that the stand-in gives are here.
API const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "cudaSuccess";
    case cudaErrorMemoryAllocation:
        return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver:
        return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
        return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
        return "cudaErrorInvalidDevice";
    case cudaErrorNoKernelImageForDevice:
        return "cudaErrorNoKernelImageForDevice";
    case cudaErrorIllegalAddress:
        return "cudaErrorIllegalAddress";
    case cudaErrorLaunchOutOfResources:
        return "cudaErrorLaunchOutOfResources";
    case cudaErrorNotReady:
        return "cudaErrorNotReady";
    case cudaErrorNotSupported:
        return "cudaErrorNotSupported";
    default:
        return "cudaErrorUnknown";
    }
}

API const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInsufficientDriver:
        return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice:
        return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice:
        return "no kernel image is available for execution on the device";
    case cudaErrorIllegalAddress:
        return "an illegal memory access was encountered";
    case cudaErrorLaunchOutOfResources:
        return "too many resources requested for launch";
    case cudaErrorNotReady:
        return "device not ready";
    case cudaErrorNotSupported:
        return "operation not supported";
    default:
        return "unknown error";
    }
}
