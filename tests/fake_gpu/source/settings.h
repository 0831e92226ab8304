// What is said to the stand-in by environment variables, and what it says of mistakes that it sees.
#pragma once

#define API extern "C" __attribute__((visibility("default")))

namespace fake {

// Returns the number in FAKE_GPU_<name>, or `otherwise` where it is not set.
long setting(const char *name, long otherwise);

// Returns this process's rank in its job, or 0 where no launcher has given it one.
int rank_in_job();

// Counts one more occasion for a fault of this name, and returns whether it is the one that FAKE_GPU_FAULTS orders:
// NAME@N is the N-th occasion in a process, NAME@N=V gives the fault a value, NAME@N:R is for rank R alone. Where
// FAKE_GPU_ONCE names a folder, each fault happens once among all processes that share it.
bool due(const char *name, int rank, long *value = nullptr);

// Tells a mistake of the program (a race, a use after free) on stderr, and in the file FAKE_GPU_REPORT.
__attribute__((format(printf, 1, 2))) void report(const char *format, ...);

} // namespace fake
