// bfloat16: the upper half of a float32, so with its range and 8 significant
// bits.
//
// Numbers are converted to float32, which is exact, combined there, and rounded
// to the nearest bfloat16, to the even one of two: once for each operation. The
// conversions are shifts and an addition of integers, which the compiler makes
// vector instructions of on any processor. The instruction that some have for
// the rounding (AVX512_BF16) takes subnormal numbers for zero: their sums would
// be others.

#ifndef HOROVOD_BFLOAT16_H
#define HOROVOD_BFLOAT16_H

#include <cstdint>
#include <cstring>

#if __CUDACC__
#define HOROVOD_BFLOAT16_CALL __host__ __device__ inline
#else
#define HOROVOD_BFLOAT16_CALL inline
#endif

namespace horovod {
namespace common {

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;

  HOROVOD_BFLOAT16_CALL BFloat16(float value) {
    uint32_t whole;
    memcpy(&whole, &value, sizeof(whole));
    bool is_nan = (whole & 0x7fffffff) > 0x7f800000;
    uint32_t rounded = (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
    bits = is_nan ? 0x7fc0 : rounded;
  }

  HOROVOD_BFLOAT16_CALL operator float() const {
    uint32_t whole = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &whole, sizeof(value));
    return value;
  }

  HOROVOD_BFLOAT16_CALL BFloat16& operator*=(float factor) {
    return *this = *this * factor;
  }
};

} // namespace common
} // namespace horovod

#endif // HOROVOD_BFLOAT16_H
