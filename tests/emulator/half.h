// The two 16-bit formats, as conversions of their bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

inline float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t bits_of_float(float x) { return __builtin_bit_cast(uint32_t, x); }

inline float float_of_half(uint16_t bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }
inline float float_of_bfloat(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

// E4M3 has no infinities and one NaN of each sign; all its numbers are of float16.
inline uint16_t half_of_e4m3(uint32_t bits) {
    const uint32_t sign = (bits & 0x80) << 8, size = bits & 0x7f;
    if (size == 0x7f) return 0x7fff;
    const float value = size < 8 ? size * 0x1p-9f : (8 + size % 8) * std::ldexp(1.0f, static_cast<int>(size / 8) - 10);
    return static_cast<uint16_t>(sign | __builtin_bit_cast(uint16_t, static_cast<_Float16>(value)));
}

// To the nearest, ties to even; too large a number becomes infinite, NaN the one NaN that hardware makes.
inline uint16_t half_of_float(float x) {
    return x != x ? 0x7fff : __builtin_bit_cast(uint16_t, static_cast<_Float16>(x));
}
inline uint16_t bfloat_of_float(float x) {
    const uint32_t bits = bits_of_float(x);
    return x != x ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulator
