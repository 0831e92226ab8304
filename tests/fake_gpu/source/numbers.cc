#include "numbers.h"

#include <algorithm>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace fake {
namespace {

template <class T> T combined(T a, T b, ncclRedOp_t operation) {
    switch (operation) {
    case ncclMax:
        return std::max(a, b);
    case ncclMin:
        return std::min(a, b);
    case ncclProd:
        return T(a * b);
    default:
        return T(a + b);
    }
}

template <class T> void combine_as(void *total, const void *other, size_t count, ncclRedOp_t operation) {
    for (size_t i = 0; i < count; ++i) {
        T &sum = static_cast<T *>(total)[i];
        sum = combined(sum, static_cast<const T *>(other)[i], operation);
    }
}

void combine_halves(void *total, const void *other, size_t count, ncclRedOp_t operation) {
    for (size_t i = 0; i < count; ++i) {
        __half &sum = static_cast<__half *>(total)[i];
        float theirs = __half2float(static_cast<const __half *>(other)[i]);
        sum = __float2half(combined(__half2float(sum), theirs, operation));
    }
}

void combine_bfloats(void *total, const void *other, size_t count, ncclRedOp_t operation) {
    for (size_t i = 0; i < count; ++i) {
        __nv_bfloat16 &sum = static_cast<__nv_bfloat16 *>(total)[i];
        float theirs = __bfloat162float(static_cast<const __nv_bfloat16 *>(other)[i]);
        sum = __float2bfloat16(combined(__bfloat162float(sum), theirs, operation));
    }
}

} // namespace

size_t size_of(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 0;
    }
}

bool combine(void *total, const void *other, size_t count, ncclDataType_t type, ncclRedOp_t operation) {
    if (operation > ncclMin) return false;
    switch (type) {
    case ncclInt8:
        combine_as<int8_t>(total, other, count, operation);
        break;
    case ncclUint8:
        combine_as<uint8_t>(total, other, count, operation);
        break;
    case ncclInt32:
        combine_as<int32_t>(total, other, count, operation);
        break;
    case ncclUint32:
        combine_as<uint32_t>(total, other, count, operation);
        break;
    case ncclInt64:
        combine_as<int64_t>(total, other, count, operation);
        break;
    case ncclUint64:
        combine_as<uint64_t>(total, other, count, operation);
        break;
    case ncclFloat16:
        combine_halves(total, other, count, operation);
        break;
    case ncclFloat32:
        combine_as<float>(total, other, count, operation);
        break;
    case ncclFloat64:
        combine_as<double>(total, other, count, operation);
        break;
    case ncclBfloat16:
        combine_bfloats(total, other, count, operation);
        break;
    default:
        return false;
    }
    return true;
}

} // namespace fake
