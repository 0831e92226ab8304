// The calls of CUDA on streams and events.
#include "errors.h"
#include "notes.h"
#include "settings.h"
#include "streams.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

namespace fake {
namespace {

// What an event shares with the tasks that record it or wait for it: it may be destroyed before them.
struct Moment {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, done = 0;
    Clock clock; // what is done when the last record is
    std::chrono::steady_clock::time_point time;

    void wait_for(uint64_t record) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return done >= record; });
    }
};

std::shared_ptr<Moment> &moment_of(cudaEvent_t event) { return *reinterpret_cast<std::shared_ptr<Moment> *>(event); }

std::atomic<int> streams{0}, events{0}; // that have been created and not destroyed

cudaError_t create(cudaStream_t *stream) {
    RETURN_IF_BROKEN;
    ++streams;
    *stream = reinterpret_cast<cudaStream_t>(new Stream(current_device));
    return cudaSuccess;
}

} // namespace
} // namespace fake
using namespace fake;

API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return create(stream); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return create(stream); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) { return create(stream); }
API cudaError_t cudaStreamDestroy(cudaStream_t) {
    --streams; // its thread stays, idle
    return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    RETURN_IF_BROKEN;
    return stream_of(stream).idle() ? cudaSuccess : fail(cudaErrorNotReady);
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    RETURN_IF_BROKEN;
    note(WAIT);
    stream_of(stream).wait();
    RETURN_IF_BROKEN;
    return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() {
    RETURN_IF_BROKEN;
    note(WAIT);
    wait_for_device(current_device);
    RETURN_IF_BROKEN;
    return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *id,
                                         cudaGraph_t *, const cudaGraphNode_t **, const cudaGraphEdgeData **,
                                         size_t *) {
    *status = cudaStreamCaptureStatusNone;
    if (id != nullptr) *id = 0;
    return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    RETURN_IF_BROKEN;
    ++events;
    *event = reinterpret_cast<cudaEvent_t>(new std::shared_ptr<Moment>(std::make_shared<Moment>()));
    return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    --events;
    delete &moment_of(event);
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    RETURN_IF_BROKEN;
    auto moment = moment_of(event);
    uint64_t record;
    {
        std::lock_guard<std::mutex> guard(moment->mutex);
        record = ++moment->recorded;
    }
    Clock stamp;
    Task task{"cudaEventRecord", {}, [moment, record] {
                  std::lock_guard<std::mutex> guard(moment->mutex);
                  moment->done = record;
                  moment->time = std::chrono::steady_clock::now();
                  moment->changed.notify_all();
              }};
    task.stamp = &stamp;
    stream_of(stream).push(std::move(task));
    std::lock_guard<std::mutex> guard(moment->mutex);
    moment->clock = stamp;
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

// Which record an event waits for now, and what will have been done by then.
static std::pair<uint64_t, Clock> last_record(Moment &moment) {
    std::lock_guard<std::mutex> guard(moment.mutex);
    return {moment.recorded, moment.clock};
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
    RETURN_IF_BROKEN;
    auto moment = moment_of(event);
    Clock seen;
    {
        std::lock_guard<std::mutex> guard(moment->mutex);
        if (moment->done < moment->recorded) return fail(cudaErrorNotReady);
        seen = moment->clock;
    }
    observe(seen);
    return cudaSuccess;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    RETURN_IF_BROKEN;
    auto moment = moment_of(event);
    auto [record, seen] = last_record(*moment);
    note(WAIT_FOR_EVENT);
    moment->wait_for(record);
    observe(seen);
    RETURN_IF_BROKEN;
    return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    auto time = moment_of(end)->time - moment_of(start)->time;
    *milliseconds = std::chrono::duration<float, std::milli>(time).count();
    return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    RETURN_IF_BROKEN;
    auto moment = moment_of(event);
    auto [record, seen] = last_record(*moment);
    Task task{"cudaStreamWaitEvent", {}, [moment, record = record] { moment->wait_for(record); }};
    task.after = &seen;
    stream_of(stream).push(std::move(task));
    return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    RETURN_IF_BROKEN;
    stream_of(stream).push({"cudaLaunchHostFunc", {}, [=] { function(data); }});
    return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned) {
    RETURN_IF_BROKEN;
    stream_of(stream).push({"cudaStreamAddCallback", {}, [=] { function(stream, broken(), data); }});
    return cudaSuccess;
}

// For tests: keeps a stream of the current device busy.
API void fake_gpu_busy(cudaStream_t stream, int milliseconds) {
    auto time = std::chrono::milliseconds(milliseconds);
    stream_of(stream).push({"fake_gpu_busy", {}, [time] { std::this_thread::sleep_for(time); }});
}

// For tests: how many streams and events this process has.
API int fake_gpu_streams() { return streams; }
API int fake_gpu_events() { return events; }
