// Streams and events.
#include "gpu.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <utility>

namespace fake {

thread_local int current_device = 0;

namespace {

std::mutex table;
// Never destroyed: their threads outlive main().
std::vector<Stream *> &streams() {
    static auto &all = *new std::vector<Stream *>;
    return all;
}

std::atomic<int> created{0};

std::vector<Stream *> all_streams() {
    std::lock_guard<std::mutex> guard(table);
    return streams();
}

Clock &host_clock() {
    static auto &clock = *new Clock;
    return clock;
}

// A stream is prompt for some tasks and late for some. What counts on luck meets a stretch in which it has none.
class Mood {
  public:
    explicit Mood(uint64_t seed) : random_(seed) {}
    std::chrono::microseconds delay() {
        static const long longest = setting("DELAY_US", 200);
        if (random_() % 16 == 0) late_ = !late_;
        return std::chrono::microseconds(late_ && longest > 0 ? random_() % uint64_t(longest) : 0);
    }

  private:
    std::mt19937_64 random_;
    bool late_ = false;
};

void merge(Clock &into, const Clock &from) {
    for (auto &[stream, sequence] : from)
        into[stream] = std::max(into[stream], sequence);
}

// The host has seen that this is done: whatever it queues from now on comes after it.
void observe(const Clock &seen) {
    std::lock_guard<std::mutex> guard(order());
    merge(host_clock(), seen);
}

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
    // Which record an event waits for now, and what will have been done by then.
    std::pair<uint64_t, Clock> last_record() {
        std::lock_guard<std::mutex> guard(mutex);
        return {recorded, clock};
    }
};

std::shared_ptr<Moment> &moment_of(cudaEvent_t event) { return *reinterpret_cast<std::shared_ptr<Moment> *>(event); }

} // namespace

std::mutex &order() {
    static auto &mutex = *new std::mutex;
    return mutex;
}

const Clock &observed() { return host_clock(); }

Stream::Stream(int device) : number(++created), device(device) {
    std::lock_guard<std::mutex> guard(table);
    streams().push_back(this);
}

Clock &Stream::clock() {
    merge(clock_, observed());
    return clock_;
}

void Stream::push(Task task) {
    std::lock_guard<std::mutex> guard(order());
    if (task.after != nullptr) merge(clock_, *task.after);
    uint64_t sequence = queued_ + 1; // only this function changes it, with order() locked
    check(*this, sequence, task);
    clock()[number] = sequence;
    if (task.stamp != nullptr) *task.stamp = clock_;
    {
        std::lock_guard<std::mutex> mine(mutex_);
        queued_ = sequence;
        tasks_.push_back(std::move(task.work));
    }
    std::call_once(started_, [this] { std::thread([this] { run(); }).detach(); });
    changed_.notify_all();
}

void Stream::wait(bool known) {
    Clock seen;
    uint64_t last;
    {
        std::lock_guard<std::mutex> guard(order());
        seen = clock_, last = queued_;
    }
    {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return done_ >= last; });
    }
    if (known) observe(seen);
}

bool Stream::idle() {
    Clock seen;
    uint64_t last;
    {
        std::lock_guard<std::mutex> guard(order());
        seen = clock_, last = queued_;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (done_ < last) return false;
    }
    observe(seen);
    return true;
}

void Stream::run() {
    current_device = device;
    Mood mood(uint64_t(setting("SEED", 0)) * 1000003 + uint64_t(rank_in_job()) * 1009 + uint64_t(number));
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        auto work = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        if (auto delay = mood.delay(); delay.count() > 0) std::this_thread::sleep_for(delay);
        work();
        work = nullptr; // lets go of what it holds before it counts as done
        lock.lock();
        ++done_;
        changed_.notify_all();
    }
}

Stream &stream_of(cudaStream_t handle, int device) {
    if (handle != nullptr) return *reinterpret_cast<Stream *>(handle);
    static std::mutex mutex;
    static auto &defaults = *new std::map<int, Stream *>;
    std::lock_guard<std::mutex> guard(mutex);
    auto &stream = defaults[device];
    if (stream == nullptr) stream = new Stream(device);
    return *stream;
}

void settle(const std::set<int> &numbers) {
    for (auto *stream : all_streams())
        if (numbers.count(stream->number)) stream->wait(/*known=*/false);
}

} // namespace fake
using namespace fake;

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    *stream = reinterpret_cast<cudaStream_t>(new Stream(current_device));
    return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return stream_of(stream, current_device).idle() ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ++counts.waits;
    stream_of(stream, current_device).wait();
    return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() {
    ++counts.waits;
    for (auto *stream : all_streams())
        if (stream->device == current_device) stream->wait();
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

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = reinterpret_cast<cudaEvent_t>(new std::shared_ptr<Moment>(std::make_shared<Moment>()));
    return cudaSuccess;
}

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete &moment_of(event);
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
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
    stream_of(stream, current_device).push(std::move(task));
    std::lock_guard<std::mutex> guard(moment->mutex);
    moment->clock = stamp;
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
    auto moment = moment_of(event);
    Clock seen;
    {
        std::lock_guard<std::mutex> guard(moment->mutex);
        if (moment->done < moment->recorded) return cudaErrorNotReady;
        seen = moment->clock;
    }
    observe(seen);
    return cudaSuccess;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ++counts.waits;
    auto moment = moment_of(event);
    auto [record, seen] = moment->last_record();
    moment->wait_for(record);
    observe(seen);
    return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    auto time = moment_of(end)->time - moment_of(start)->time;
    *milliseconds = std::chrono::duration<float, std::milli>(time).count();
    return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    auto moment = moment_of(event);
    auto [record, seen] = moment->last_record();
    Task task{"cudaStreamWaitEvent", {}, [moment, record = record] { moment->wait_for(record); }};
    task.after = &seen;
    stream_of(stream, current_device).push(std::move(task));
    return cudaSuccess;
}

// For tests: keeps a stream of the current device busy.
API void fake_gpu_busy(cudaStream_t stream, int milliseconds) {
    auto time = std::chrono::milliseconds(milliseconds);
    stream_of(stream, current_device).push({"fake_gpu_busy", {}, [time] { std::this_thread::sleep_for(time); }});
}
