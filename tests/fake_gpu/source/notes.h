// What a program asks of the GPU and where it waits for it, in the order of its calls: a letter each.
#pragma once

namespace fake {

constexpr char OPERATOR = 'o', KERNEL = 'k', COPY_TO_DEVICE = 'd', COPY_TO_HOST = 'h', COPY_ON_DEVICE = 'c', WAIT = 'w',
               WAIT_FOR_EVENT = 'e', SUM = 's';

// Writes a letter down, where somebody has asked for notes.
void note(char letter);

} // namespace fake
