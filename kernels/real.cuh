// What sums of a kernel's elements are made of.
#pragma once

#include "ptx.cuh"

namespace cuflash {

template <int WIDTH>
struct RealOf {
    using Type = float;
};
template <>
struct RealOf<8> {
    using Type = double;
};
using Real = RealOf<sizeof(Element)>::Type;

}  // namespace cuflash
