// Products in float64 on the tensor cores.
#pragma once

#include "ptx.cuh"

namespace cuflash {

struct alignas(16) Pair {  // neighbours that travel together
    double low, high;
};

// d += a b, 16 x 8 += 16 x TERMS times TERMS x 8. Where there is no instruction of that size, those of 8 rows and 4
// terms take its operands as they are.
template <int TERMS>
__device__ __forceinline__ void multiply_add(double (&d)[4], const double (&a)[TERMS / 2],
                                             const double (&b)[TERMS / 4]) {
    if constexpr (TALL_PRODUCTS) {
        mma_m16n8(d, a, b);
    } else {
#pragma unroll
        for (int n = 0; n < TERMS / 4; ++n) {
            mma_m8n8k4(d[0], d[1], a[2 * n], b[n]);
            mma_m8n8k4(d[2], d[3], a[2 * n + 1], b[n]);
        }
    }
}

}  // namespace cuflash
