// The memory of the GPUs is the host's. Who uses which bytes is written down, and looked at: a race is told even where
// the bytes came out right by luck.
#pragma once

#include "streams.h"

namespace fake {

constexpr int PINNED = -1, PAGEABLE = -2; // in place of a device's number

// Returns new memory, full of NaN, on a device or PINNED; nullptr where it would be more than FAKE_GPU_MEMORY.
void *allocate(size_t size, int place);
// Takes memory back: it is full of NaN and stays unused for a while, so that a later use can be told.
bool release(void *begin);
// Pins memory of the program, or lets go of it again.
bool pin(void *begin, size_t size);
bool unpin(void *begin);
// Returns the device that has this memory, or PINNED or PAGEABLE.
int place_of(const void *pointer);
// Returns how many bytes of a device are in use.
size_t used_on(int device);
// Returns how many pieces of memory are in use, on devices and pinned ones that the program has asked for.
size_t pieces_in_use();
size_t memory_of_a_device();
// A stream has been told that it uses this memory, which will not be given to others before it has finished.
void tell(const void *pointer, const Stream &stream);
// Reports a task that uses freed memory, or bytes that another stream may still be writing, or reading where the task
// writes. Call it with order() locked.
void check(Stream &stream, uint64_t sequence, const Task &task);

} // namespace fake
