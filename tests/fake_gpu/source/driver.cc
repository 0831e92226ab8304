// The few calls of the driver (libcuda) that torch and Horovod make themselves.
#include "devices.h"
#include "settings.h"
#include "streams.h"

#include <cuda.h>
#include <dlfcn.h>

API CUresult cuInit(unsigned) { return fake::visible_devices() > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }

API CUresult cuDeviceGetCount(int *count) {
    *count = fake::visible_devices();
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version) { return CUresult(cudaDriverGetVersion(version)); }

API CUresult cuCtxGetDevice(CUdevice *device) {
    *device = fake::current_device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = reinterpret_cast<CUcontext>(1);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
    *flags = 0, *active = 1;
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString(cudaError_t(error));
    return CUDA_SUCCESS;
}

static CUresult not_there() { return CUDA_ERROR_NOT_SUPPORTED; }

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult *result) {
    void *found = dlsym(RTLD_DEFAULT, name);
    *function = found != nullptr ? found : reinterpret_cast<void *>(not_there);
    if (result != nullptr) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
