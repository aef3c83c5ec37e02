// The two 16-bit formats, as conversions of their bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulator {

inline float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t bits_of_float(float x) { return __builtin_bit_cast(uint32_t, x); }

inline float float_of_half(uint16_t bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }
inline float float_of_bfloat(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

// To the nearest, ties to even; too large a number becomes infinite, NaN the one NaN that hardware makes.
inline uint16_t half_of_float(float x) {
    return x != x ? 0x7fff : __builtin_bit_cast(uint16_t, static_cast<_Float16>(x));
}
inline uint16_t bfloat_of_float(float x) {
    const uint32_t bits = bits_of_float(x);
    return x != x ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulator
