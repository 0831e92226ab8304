// C8: rank 1 of two processes is late; the limit of silence is a second.
//
//   c8_silence busy     it computes for three seconds before it comes
//   c8_silence asleep   it sleeps and never comes
//
// Rank 0 prints the sum, or why there is none.

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <pthread.h>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "shared_memory.h"

using std::chrono::seconds;
using std::chrono::steady_clock;

// What the two collective operations need that ranks agree by.
struct Agreement {
    pthread_barrier_t barrier;
    char bytes[256];
    bool mine[2];
};

int main(int, char **arguments) {
    auto *shared = static_cast<Agreement *>(
        mmap(nullptr, sizeof(Agreement), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    pthread_barrierattr_t between_processes;
    pthread_barrierattr_init(&between_processes);
    pthread_barrierattr_setpshared(&between_processes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &between_processes, 2);
    int rank = fork() == 0;
    if (rank == 1) prctl(PR_SET_PDEATHSIG, SIGKILL);
    auto meet = [&] { pthread_barrier_wait(&shared->barrier); };
    auto broadcast = [&](void *data, size_t size) {
        if (rank == 0) memcpy(shared->bytes, data, size);
        meet();
        memcpy(data, shared->bytes, size);
        meet();
    };
    auto all = [&](bool mine) {
        shared->mine[rank] = mine;
        meet();
        bool both = shared->mine[0] && shared->mine[1];
        meet();
        return both;
    };
    auto memory = horovod::common::SharedMemory::Establish({rank, 2, true, broadcast, all, seconds(1)});
    if (rank == 1 && std::string(arguments[1]) == "asleep") pause();
    for (auto end = steady_clock::now() + seconds(3); rank == 1 && steady_clock::now() < end;) {
    }
    int number = rank + 1;
    auto add = [](void *c, const void *a, const void *b, size_t) {
        *static_cast<int *>(c) = *static_cast<const int *>(a) + *static_cast<const int *>(b);
    };
    try {
        memory->Allreduce(&number, 1, sizeof(number), add);
        if (rank == 0) printf("sum %d\n", number);
    } catch (const std::exception &error) {
        if (rank == 0) printf("%s\n", error.what());
    }
}
