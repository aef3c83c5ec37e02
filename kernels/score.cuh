// Scores: how much. A score turns the product q . k of query row i and key j into the exponent of the softmax.
#pragma once

#include "ptx.cuh"

namespace cuflash {

// scale * q . k. The factor, times log2 e, goes into the exponent's fused multiply-add: a positive factor commutes
// with the maximum, and the planner sees to it that the factor is positive.
template <typename Real>
struct ScaledBy {
    Real scale_log2;
    __device__ __forceinline__ Real factor() const { return scale_log2; }
};
using Scaled = ScaledBy<float>;

}  // namespace cuflash
