// How NCCL's number types are added up.
#pragma once

#include <cstddef>
#include <nccl.h>

namespace fake {

size_t size_of(ncclDataType_t type);
// Combines `count` numbers of two ranks into `total`. Returns false for a type or an operation that is not there.
bool combine(void *total, const void *other, size_t count, ncclDataType_t type, ncclRedOp_t operation);

} // namespace fake
