// What sums of a kernel's elements are made of.
#pragma once

#include "element.cuh"

namespace cuflash {

using Real = decltype(to_real(Element{}));

}  // namespace cuflash
