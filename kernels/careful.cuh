// The careful path of forward and decode: rows that tensor cores may have got wrong, computed again.
#pragma once

#include "ptx.cuh"
#include "softmax.cuh"

namespace cuflash {

// An element as the number that sums are made of, and back.
template <typename T>
__device__ __forceinline__ auto to_real(T x) {
    if constexpr (sizeof(T) == 2) {
        return to_float(x);
    } else {
        return x;
    }
}
template <typename T, typename Real>
__device__ __forceinline__ T from_real(Real x) {
    if constexpr (sizeof(T) == 2) {
        return T{static_cast<unsigned short>(cvt_pair(T{}, x, 0.0f))};
    } else {
        return x;
    }
}

// One row again, by a warp, reading visible keys only and rounding each score by itself: for rows where a hidden value
// that is not finite may have met a weight of 0 on the tensor cores, or whose scores are huge. `keys(j)`, `values(j)` are
// addresses.
template <typename Args, typename Keys, typename Values>
__device__ __forceinline__ void careful_row_of(const Args& args, const char* q, Keys keys, Values values, char* out,
                                               char* lse, int first, int end) {
    using Real = decltype(to_real(Element{}));
    constexpr int SIZE = sizeof(Element), MOST = ((HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) + WARP - 1) / WARP;
    const int lane = lane_index();
    Real query[MOST], sums[MOST] = {};
#pragma unroll
    for (int n = 0; n < MOST; ++n) {
        int d = n * WARP + lane;
        query[n] = d < args.head_dim ? to_real(load_global<Element>(q + SIZE * d)) : Real(0);
    }
    auto score = [&](int j) {
        Real s = 0;
#pragma unroll
        for (int n = 0; n < MOST; ++n) {
            int d = n * WARP + lane;
            if (d >= args.head_dim) continue;
            s = fused_multiply_add(query[n], to_real(load_global<Element>(keys(j) + SIZE * d)), s);
        }
#pragma unroll
        for (int lanes = WARP / 2; lanes > 0; lanes /= 2) s += shuffle_xor(s, lanes);
        return multiply(s, args.scale_log2);
    };
    SoftmaxRow<Real> row;
    for (int j = first; j < end; ++j) row.reference = maximum(row.reference, score(j));
    for (int j = first; j < end; ++j) {
        Real s = score(j);
        if (s == -INFINITE) continue;
        Real weight = exp2_of(s - row.shift());
        row.sum += weight;
#pragma unroll
        for (int n = 0; n < MOST; ++n) {
            int d = n * WARP + lane;
            if (d < args.value_dim) {
                sums[n] = fused_multiply_add(weight, to_real(load_global<Element>(values(j) + SIZE * d)), sums[n]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < MOST; ++n) {
        int d = n * WARP + lane;
        if (d < args.value_dim) store_global(out + SIZE * d, from_real<Element>(sums[n] * row.inverse_sum()));
    }
    if (row.too_coarse() && args.lse != nullptr && lane == 0) store_global(lse, row.lse());  // else it is right already
}

// The same of keys and values that lie at equal distances.
template <typename Args>
__device__ __noinline__ void careful_row(const Args& args, const char* q, const char* k, const char* v, char* out,
                                         char* lse, int first, int end) {
    careful_row_of(
        args, q, [&](int j) { return k + j * args.k_strides.row; }, [&](int j) { return v + j * args.v_strides.row; },
        out, lse, first, end);
}

}  // namespace cuflash
