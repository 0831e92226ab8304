#include "settings.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <unistd.h>

namespace fake {
namespace {

// Faults are told apart by their whole order, so that two orders of one name have two marks.
bool first_in_job(const std::string &order) {
    const char *folder = getenv("FAKE_GPU_ONCE");
    if (folder == nullptr) return true;
    std::string name = order;
    for (char &letter : name)
        if (letter == '/') letter = '_';
    int mark = open((std::string(folder) + "/" + name).c_str(), O_CREAT | O_EXCL | O_WRONLY, 0600);
    if (mark < 0) return false;
    close(mark);
    return true;
}

} // namespace

long setting(const char *name, long otherwise) {
    const char *value = getenv((std::string("FAKE_GPU_") + name).c_str());
    return value != nullptr && *value ? atol(value) : otherwise;
}

int rank_in_job() {
    const char *rank = getenv("HOROVOD_RANK");
    return rank != nullptr ? atoi(rank) : 0;
}

bool due(const char *name, int rank, long *value) {
    const char *orders = getenv("FAKE_GPU_FAULTS");
    if (orders == nullptr) return false;
    static std::mutex mutex;
    static auto &occasions = *new std::map<std::string, long>;
    long occasion;
    {
        std::lock_guard<std::mutex> guard(mutex);
        occasion = ++occasions[name];
    }
    std::istringstream words(orders);
    for (std::string order; words >> order;) {
        size_t at = order.find('@');
        if (at == std::string::npos || order.compare(0, at, name) != 0) continue;
        size_t equals = order.find('=', at), colon = order.find(':', at);
        if (atol(order.c_str() + at + 1) != occasion) continue;
        if (colon != std::string::npos && atoi(order.c_str() + colon + 1) != rank) continue;
        if (!first_in_job(order)) continue;
        if (value != nullptr) *value = equals != std::string::npos ? atol(order.c_str() + equals + 1) : 0;
        return true;
    }
    return false;
}

void report(const char *format, ...) {
    char text[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    char line[700];
    int length = snprintf(line, sizeof line, "fake_gpu: rank %d: %s\n", rank_in_job(), text);
    bool written = write(STDERR_FILENO, line, length) == length;
    if (const char *path = getenv("FAKE_GPU_REPORT")) {
        int file = open(path, O_CREAT | O_APPEND | O_WRONLY, 0600);
        written = file >= 0 && write(file, line, length) == length && written;
        if (file >= 0) close(file);
    }
    (void)written;
}

} // namespace fake
