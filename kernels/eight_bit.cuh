// Caches of 8-bit elements: their two formats, and how a word of four becomes B operands of float16.
//
// All values of both formats are numbers of float16, so conversions are exact.
#pragma once

#include "ptx.cuh"

namespace cuflash {

struct Int8 {
    signed char bits;
};
struct E4M3 {  // sign, 4 bits of exponent with bias 7, 3 of significand; no infinities; all ones are NaN
    unsigned char bits;
};

// How a word's elements fall into two pairs of float16: the even ones and the odd ones or, where it is an instruction
// less, neighbours.
enum class Pairs { ALTERNATE, NEIGHBOURS };

// The two pairs of a word. On an integer x + 128 is put into the significand of 1024, which then stands for 1152 + x.
template <bool, Pairs PAIRS>
__device__ __forceinline__ void spread(Int8, uint32 word, uint32& first, uint32& second) {
    static_assert(PAIRS == Pairs::ALTERNATE, "integers: no neighbours");
    constexpr uint32 BYTES = 0x00ff00ff, FROM = 0x64806480, MINUS_1152 = 0xe480e480;
    first = add_pair((word & BYTES) ^ FROM, MINUS_1152);
    second = add_pair((word >> 8 & BYTES) ^ FROM, MINUS_1152);
}

// CVT: whether the device has an instruction for it. Else the bits below the sign, moved to where float16 has its
// exponent and significand, stand for the number over 2^8, subnormal ones too. All ones get the exponent of NaN.
template <bool CVT, Pairs PAIRS>
__device__ __forceinline__ void spread(E4M3, uint32 word, uint32& first, uint32& second) {
    static_assert(CVT || PAIRS == Pairs::ALTERNATE, "bits that are moved: no neighbours");
    if constexpr (CVT) {
        const uint32 sorted = PAIRS == Pairs::NEIGHBOURS ? word : byte_permute(word, 0, 0x3120);
        first = cvt_pair_of_e4m3<0>(sorted);
        second = cvt_pair_of_e4m3<1>(sorted);
    } else {
        auto convert = [](uint32 bytes) {  // in the low halves
            const uint32 size = bytes & 0x007f007f, ones = (size + 0x00010001) & 0x00800080;
            return multiply_pair((size | ones) << 7 | (bytes & 0x00800080) << 8, 0x5c005c00);
        };
        first = convert(word);
        second = convert(word >> 8);
    }
}

// One element of a cache.
template <bool CVT, typename Element>
__device__ __forceinline__ float element_to_float(Element x) {
    uint32 even, odd;
    spread<CVT, Pairs::ALTERNATE>(x, static_cast<unsigned char>(x.bits), even, odd);
    return to_float(Float16{static_cast<unsigned short>(even)});
}

}  // namespace cuflash
