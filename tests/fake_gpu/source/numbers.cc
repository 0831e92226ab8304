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

template <class T> void divide_as(void *total, size_t count, int ranks) {
    for (size_t i = 0; i < count; ++i)
        static_cast<T *>(total)[i] = T(static_cast<T *>(total)[i] / T(ranks));
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

void combine(void *total, const void *other, size_t count, ncclDataType_t type, ncclRedOp_t operation) {
    switch (type) {
    case ncclInt8:
        return combine_as<int8_t>(total, other, count, operation);
    case ncclUint8:
        return combine_as<uint8_t>(total, other, count, operation);
    case ncclInt32:
        return combine_as<int32_t>(total, other, count, operation);
    case ncclUint32:
        return combine_as<uint32_t>(total, other, count, operation);
    case ncclInt64:
        return combine_as<int64_t>(total, other, count, operation);
    case ncclUint64:
        return combine_as<uint64_t>(total, other, count, operation);
    case ncclFloat16:
        return combine_halves(total, other, count, operation);
    case ncclBfloat16:
        return combine_bfloats(total, other, count, operation);
    case ncclFloat32:
        return combine_as<float>(total, other, count, operation);
    default:
        return combine_as<double>(total, other, count, operation);
    }
}

void divide(void *total, size_t count, ncclDataType_t type, int ranks) {
    switch (type) {
    case ncclInt8:
        return divide_as<int8_t>(total, count, ranks);
    case ncclUint8:
        return divide_as<uint8_t>(total, count, ranks);
    case ncclInt32:
        return divide_as<int32_t>(total, count, ranks);
    case ncclUint32:
        return divide_as<uint32_t>(total, count, ranks);
    case ncclInt64:
        return divide_as<int64_t>(total, count, ranks);
    case ncclUint64:
        return divide_as<uint64_t>(total, count, ranks);
    case ncclFloat16:
        for (size_t i = 0; i < count; ++i) {
            __half &number = static_cast<__half *>(total)[i];
            number = __float2half(__half2float(number) / float(ranks));
        }
        return;
    case ncclBfloat16:
        for (size_t i = 0; i < count; ++i) {
            __nv_bfloat16 &number = static_cast<__nv_bfloat16 *>(total)[i];
            number = __float2bfloat16(__bfloat162float(number) / float(ranks));
        }
        return;
    case ncclFloat32:
        return divide_as<float>(total, count, ranks);
    default:
        return divide_as<double>(total, count, ranks);
    }
}

} // namespace fake
