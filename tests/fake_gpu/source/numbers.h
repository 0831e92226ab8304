// How NCCL's number types are added up.
#pragma once

#include <cstddef>
#include <nccl.h>

namespace fake {

size_t size_of(ncclDataType_t type);
// Combines `count` numbers of two ranks into `total`; for a mean they are added up.
void combine(void *total, const void *other, size_t count, ncclDataType_t type, ncclRedOp_t operation);
// Makes the mean of a sum over `ranks`.
void divide(void *total, size_t count, ncclDataType_t type, int ranks);

} // namespace fake
