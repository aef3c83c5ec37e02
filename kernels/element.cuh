// Elements of any dtype as the numbers that sums are made of.
#pragma once

#include "ptx.cuh"

namespace cuflash {

// An element as the number that sums are made of, and such a number as an element.
template <typename Element>
__device__ __forceinline__ auto to_real(Element x) {
    if constexpr (sizeof(Element) == 2) {
        return to_float(x);
    } else {
        return x;
    }
}
template <typename Element, typename Real>
__device__ __forceinline__ Element rounded(Real x) {
    if constexpr (sizeof(Element) == 2) {
        return Element{static_cast<unsigned short>(cvt_pair(Element{}, x, 0.0f))};
    } else {
        return x;
    }
}

// A row of elements in global memory.
template <typename Element>
struct RowOf {
    static constexpr int SIZE = sizeof(Element);
    const char* row;
    __device__ __forceinline__ auto operator()(int d) const { return to_real(load_global<Element>(row + SIZE * d)); }
};

}  // namespace cuflash
