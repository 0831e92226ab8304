// Errors as CUDA keeps them: the last one of each thread, and the one after which nothing works any more.
#pragma once

#include <cuda_runtime_api.h>

namespace fake {

// Returns the error after which every call of this process fails, or cudaSuccess.
cudaError_t broken();
// A kernel has gone wrong: from now on every call fails.
void break_down(cudaError_t error);
// Keeps an error for cudaGetLastError, and returns it.
cudaError_t fail(cudaError_t error);

} // namespace fake

#define RETURN_IF_BROKEN                                                                                               \
    if (fake::broken() != cudaSuccess) return fake::fail(fake::broken())
