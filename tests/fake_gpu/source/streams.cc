#include "streams.h"

#include "memory.h"
#include "settings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

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

} // namespace

void merge(Clock &into, const Clock &from) {
    for (auto &[stream, sequence] : from) {
        auto &mine = into[stream];
        mine = std::max(mine, sequence);
    }
}

std::mutex &order() {
    static auto &mutex = *new std::mutex;
    return mutex;
}

void observe(const Clock &seen) {
    std::lock_guard<std::mutex> guard(order());
    merge(host_clock(), seen);
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

Stream &default_stream(int device) {
    static std::mutex mutex;
    static auto &defaults = *new std::map<int, Stream *>;
    std::lock_guard<std::mutex> guard(mutex);
    auto &stream = defaults[device];
    if (stream == nullptr) stream = new Stream(device);
    return *stream;
}

Stream &stream_of(cudaStream_t handle) {
    bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
    return is_default ? default_stream(current_device) : *reinterpret_cast<Stream *>(handle);
}

void wait_for_device(int device) {
    for (auto *stream : all_streams())
        if (stream->device == device) stream->wait();
}

void settle(const std::set<int> &numbers) {
    for (auto *stream : all_streams())
        if (numbers.count(stream->number)) stream->wait(/*known=*/false);
}

} // namespace fake
