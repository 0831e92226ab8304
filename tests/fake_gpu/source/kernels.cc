// Kernels, by name: those of Horovod have a version for the host here. Those of torch have not; its operators come from
// operators.py, which says by fake_gpu_launch that it launches one.
#include "errors.h"
#include "memory.h"
#include "notes.h"
#include "settings.h"

#include <chrono>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

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
    return found == names().end() ? "that nobody has registered" : found->second;
}

// As in Horovod's cuda_kernels.h.
constexpr int BLOCKS_PER_COPY = 8;
struct Copies {
    void *out[160];
    void *in[160];
    size_t sizes[160];
};

template <class T, class S> void scale(const void *in, void *out, size_t count, S factor) {
    for (size_t i = 0; i < count; ++i)
        static_cast<T *>(out)[i] = T(factor * static_cast<const T *>(in)[i]);
}

// On a GPU, too, fp16 is multiplied with one rounding.
void scale_half(const void *in, void *out, size_t count, __half factor) {
    for (size_t i = 0; i < count; ++i) {
        float value = __half2float(static_cast<const __half *>(in)[i]);
        static_cast<__half *>(out)[i] = __float2half(__half2float(factor) * value);
    }
}

void scale_bfloat(const void *in, void *out, size_t count, float factor) {
    for (size_t i = 0; i < count; ++i) {
        float value = __bfloat162float(static_cast<const __nv_bfloat16 *>(in)[i]);
        static_cast<__nv_bfloat16 *>(out)[i] = __float2bfloat16(factor * value);
    }
}

// A number type as it stands in the names of kernels, and how such numbers are scaled by a factor of the launch.
struct Format {
    size_t size;
    std::function<void(const void *, void *, size_t)> scaled;
};

Format format(const std::string &letters, const void *factor) {
    auto wide = [&](auto number) {
        using T = decltype(number);
        double by = *static_cast<const double *>(factor);
        return Format{sizeof(T), [by](const void *in, void *out, size_t n) { scale<T>(in, out, n, by); }};
    };
    switch (letters[0]) {
    case 'h':
        return wide(uint8_t());
    case 'a':
        return wide(int8_t());
    case 'i':
        return wide(int32_t());
    case 'l':
        return wide(int64_t());
    case 'd':
        return wide(double());
    case 'f': {
        float by = *static_cast<const float *>(factor);
        return {4, [by](const void *in, void *out, size_t n) { scale<float>(in, out, n, by); }};
    }
    case 'N': { // horovod::common::BFloat16, all other types being outside of its namespaces
        float by = *static_cast<const float *>(factor);
        return {2, [by](const void *in, void *out, size_t n) { scale_bfloat(in, out, n, by); }};
    }
    default: {
        __half by = *static_cast<const __half *>(factor);
        return {2, [by](const void *in, void *out, size_t n) { scale_half(in, out, n, by); }};
    }
    }
}

bool starts(const std::string &name, const char *with) { return name.rfind(with, 0) == 0; }

void run_copies(const Copies &copies, int count, Stream &stream, const Format *format) {
    std::vector<Access> accesses;
    for (int i = 0; i < count; ++i) {
        accesses.push_back({copies.in[i], copies.sizes[i], false});
        accesses.push_back({copies.out[i], copies.sizes[i], true});
    }
    auto scaled = format != nullptr ? format->scaled : nullptr;
    size_t size = format != nullptr ? format->size : 1;
    auto work = [copies, count, scaled, size] {
        for (int i = 0; i < count; ++i) {
            if (scaled)
                scaled(copies.in[i], copies.out[i], copies.sizes[i] / size);
            else
                memcpy(copies.out[i], copies.in[i], copies.sizes[i]);
        }
    };
    stream.push({scaled ? "batched_scaled_memcpy_k" : "batched_memcpy_k", accesses, work});
}

// Returns whether there is a version for the host, which is then queued.
bool run_on_host(const std::string &mangled, dim3 grid, void **arguments, Stream &stream) {
    const std::string horovod = "_ZN7horovod6common";
    if (!starts(mangled, horovod.c_str())) return false;
    std::string name = mangled.substr(horovod.size());
    int copies = int(grid.x) / BLOCKS_PER_COPY;
    if (starts(name, "16batched_memcpy_k")) {
        run_copies(*static_cast<Copies *>(arguments[0]), copies, stream, nullptr);
        return true;
    }
    const std::string batched = "23batched_scaled_memcpy_kI", single = "14scale_buffer_kI";
    if (starts(name, batched.c_str())) {
        Format numbers = format(name.substr(batched.size()), arguments[1]);
        run_copies(*static_cast<Copies *>(arguments[0]), copies, stream, &numbers);
        return true;
    }
    bool is_half = starts(name, "20scale_buffer_half2_k");
    if (!is_half && !starts(name, single.c_str())) return false;
    Format numbers = format(is_half ? "6__half" : name.substr(single.size()), arguments[3]);
    auto *in = *static_cast<void **>(arguments[0]), *out = *static_cast<void **>(arguments[1]);
    size_t count = size_t(*static_cast<int64_t *>(arguments[2]));
    auto work = [=] { numbers.scaled(in, out, count); };
    stream.push({"scale_buffer_k", {{in, count * numbers.size, false}, {out, count * numbers.size, true}}, work});
    return true;
}

// Returns the error, if any, that was ordered for this launch.
cudaError_t ordered_error(Stream &stream) {
    int rank = rank_in_job();
    long value = 0;
    if (due("launch", rank)) return cudaErrorLaunchOutOfResources;
    if (due("broken", rank)) stream.push({"a kernel that goes wrong", {}, [] { break_down(cudaErrorIllegalAddress); }});
    if (due("busy", rank, &value))
        stream.push({"a long kernel", {}, [value] { std::this_thread::sleep_for(std::chrono::milliseconds(value)); }});
    return cudaSuccess;
}

cudaError_t launch(const void *kernel, dim3 grid, void **arguments, cudaStream_t handle) {
    RETURN_IF_BROKEN;
    Stream &stream = stream_of(handle);
    if (auto error = ordered_error(stream); error != cudaSuccess) return fail(error);
    const char *name = name_of(kernel);
    if (strstr(name, "7horovod") != nullptr && due("horovod-launch", rank_in_job()))
        return fail(cudaErrorNoKernelImageForDevice);
    note(KERNEL);
    if (run_on_host(name, grid, arguments, stream)) return cudaSuccess;
    fprintf(stderr, "fake_gpu: the kernel %s has no version for the host\n", name);
    return fail(cudaErrorNoKernelImageForDevice);
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

API cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3, void **arguments, size_t, cudaStream_t stream) {
    return launch(kernel, grid, arguments, stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    return launch(kernel, config->gridDim, arguments, config->stream);
}

// For operators.py. Waits for all that was put on a stream before a kernel of torch that is launched on it now, so that
// its operands can be read; the host does not count as having seen that. Returns the error of the launch.
API int fake_gpu_launch(int device, cudaStream_t handle) {
    Stream &stream = handle == nullptr ? default_stream(device) : stream_of(handle);
    note(OPERATOR);
    stream.wait(/*known=*/false);
    return int(broken() != cudaSuccess ? broken() : ordered_error(stream));
}

// The kernel reads `inputs` pieces of memory and has computed `outputs`: these are in the program's memory, at `from`,
// and come into the device's when the stream gets there. Where `from` is null, they are there already.
API void fake_gpu_effects(int device, cudaStream_t handle, const char *name, int inputs, const void **in,
                          const size_t *in_sizes, int outputs, void **to, const void **from, const size_t *out_sizes) {
    Stream &stream = handle == nullptr ? default_stream(device) : stream_of(handle);
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
    stream.push({name, std::move(accesses), std::move(work)});
}

// A stream is told of memory that it uses (record_stream).
API void fake_gpu_tell(int device, cudaStream_t handle, const void *pointer) {
    tell(pointer, handle == nullptr ? default_stream(device) : stream_of(handle));
}
