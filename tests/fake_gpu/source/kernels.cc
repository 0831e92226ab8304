// Kernels, by name: those of Horovod have a version for the host here. Those of torch have not; its operators come from
// operators.py, which says by fake_gpu_launch that it launches one.
#include "gpu.h"

#include <cstring>
#include <cuda_fp16.h>
#include <string>
#include <unordered_map>

namespace fake {
namespace {

// Names are constants of the libraries that register them. torch has 50,000.
std::unordered_map<const void *, const char *> &names() {
    static auto &all = *new std::unordered_map<const void *, const char *>;
    return all;
}

std::mutex table;

const char *name_of(const void *kernel) {
    std::lock_guard<std::mutex> guard(table);
    auto found = names().find(kernel);
    return found == names().end() ? "that no library has registered" : found->second;
}

// As in Horovod's cuda_kernels.h.
constexpr int BLOCKS_PER_COPY = 8;
struct Copies {
    void *out[160];
    void *in[160];
    size_t sizes[160];
};

// On a GPU, too, fp16 is multiplied with one rounding.
template <class T> void scale(const Copies &copies, int count, T factor) {
    for (int i = 0; i < count; ++i)
        for (size_t n = 0; n < copies.sizes[i] / sizeof(T); ++n)
            static_cast<T *>(copies.out[i])[n] = T(float(factor) * float(static_cast<T *>(copies.in[i])[n]));
}

cudaError_t launch(const void *kernel, dim3 grid, void **arguments, cudaStream_t handle) {
    ++counts.kernels;
    const std::string name = name_of(kernel), scaled = "_ZN7horovod6common23batched_scaled_memcpy_kI";
    if (due("horovod-launch", rank_in_job())) return fail(cudaErrorNoKernelImageForDevice);
    // The type of the numbers comes next in the name: 'f' is float.
    bool is_float = name.rfind(scaled + "f", 0) == 0, is_half = name.rfind(scaled + "6__half", 0) == 0;
    if (!is_float && !is_half) {
        report("the kernel %s has no version for the host", name.c_str());
        return fail(cudaErrorNoKernelImageForDevice);
    }
    auto copies = *static_cast<Copies *>(arguments[0]);
    int count = int(grid.x) / BLOCKS_PER_COPY;
    std::vector<Access> accesses;
    for (int i = 0; i < count; ++i) {
        accesses.push_back({copies.in[i], copies.sizes[i], false});
        accesses.push_back({copies.out[i], copies.sizes[i], true});
    }
    std::function<void()> work;
    if (is_float)
        work = [=, factor = *static_cast<float *>(arguments[1])] { scale(copies, count, factor); };
    else
        work = [=, factor = *static_cast<__half *>(arguments[1])] { scale(copies, count, factor); };
    stream_of(handle, current_device).push({"batched_scaled_memcpy_k", std::move(accesses), std::move(work)});
    return cudaSuccess;
}

struct Configuration {
    dim3 grid, block;
    size_t shared;
    void *stream;
};
thread_local std::vector<Configuration> configurations;

} // namespace
} // namespace fake
using namespace fake;

API void **__cudaRegisterFatBinary(void *) {
    static void *handle[8];
    return handle;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

API void __cudaRegisterFunction(void **, const char *kernel, char *, const char *name, int, void *, void *, void *,
                                void *, int *) {
    std::lock_guard<std::mutex> guard(table);
    names()[kernel] = name;
}

API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = static_cast<cudaKernel_t>(const_cast<void *>(function));
    return cudaSuccess;
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st *stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (configurations.empty()) return fail(cudaErrorUnknown);
    auto last = configurations.back();
    configurations.pop_back();
    *grid = last.grid, *block = last.block, *shared = last.shared;
    *static_cast<void **>(stream) = last.stream;
    return cudaSuccess;
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3, void **arguments, size_t, cudaStream_t s) {
    return launch(kernel, grid, arguments, s);
}

// For operators.py. Waits for all that was put on a stream before a kernel of torch that is launched on it now, so that
// its operands can be read; the host does not count as having seen that.
API void fake_gpu_launch(int device, cudaStream_t handle) {
    ++counts.operators;
    stream_of(handle, device).wait(/*known=*/false);
}

// For benchmarks/gpu_counts.py: the members of Counts, in their order.
API void fake_gpu_counts(long *to) {
    to[0] = counts.operators, to[1] = counts.kernels, to[2] = counts.copies, to[3] = counts.waits;
}

// The kernel reads `inputs` pieces of memory and has computed `outputs`: these are in the program's memory, at `from`,
// and come into the device's when the stream gets there. Where `from` is null, they are there already.
API void fake_gpu_effects(int device, cudaStream_t handle, const char *name, int inputs, const void **in,
                          const size_t *in_sizes, int outputs, void **to, const void **from, const size_t *out_sizes) {
    std::vector<Access> accesses;
    for (int i = 0; i < inputs; ++i)
        accesses.push_back({in[i], in_sizes[i], false});
    std::vector<std::pair<void *, std::string>> results;
    for (int i = 0; i < outputs; ++i) {
        accesses.push_back({to[i], out_sizes[i], true});
        if (from[i] != nullptr)
            results.emplace_back(to[i], std::string(static_cast<const char *>(from[i]), out_sizes[i]));
    }
    auto work = [results = std::move(results)] {
        for (auto &[target, bytes] : results)
            memcpy(target, bytes.data(), bytes.size());
    };
    stream_of(handle, device).push({name, std::move(accesses), std::move(work)});
}
