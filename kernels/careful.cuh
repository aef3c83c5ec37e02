// The careful path of forward and decode: rows that tensor cores may have got wrong, computed again.
#pragma once

#include "ptx.cuh"
#include "softmax.cuh"

namespace cuflash {

__device__ __forceinline__ float to_float(float x) { return x; }

template <typename T>
__device__ __forceinline__ T rounded(T, float x) {
    return T{static_cast<unsigned short>(cvt_pair(T{}, x, 0.0f))};
}
__device__ __forceinline__ float rounded(float, float x) { return x; }

constexpr int ADDED = 64;  // keys whose terms are added before they join the others
// An infinity makes scores of split numbers NaN, whatever they should be.
constexpr bool SPLIT_SCORES = sizeof(Element) == sizeof(float);

// One row again, by a warp, reading visible keys only and rounding each score by itself: for rows where a hidden value
// that is not finite may have met a weight of 0 on the tensor cores, or whose scores are huge. `keys(j)`, `values(j)` are
// addresses.
template <typename Args, typename Keys, typename Values>
__device__ __forceinline__ void careful_row_of(const Args& args, const char* q, Keys keys, Values values, char* out,
                                               char* lse, int first, int end) {
    constexpr int MOST = (HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) / WARP;
    const int lane = lane_index();
    constexpr int SIZE = sizeof(Element);
    float query[MOST], sums[MOST] = {};
#pragma unroll
    for (int n = 0; n < MOST; ++n) {
        int d = n * WARP + lane;
        query[n] = d < args.head_dim ? to_float(load_global<Element>(q + SIZE * d)) : 0.0f;
    }
    auto score = [&](int j) {
        float s = 0.0f;
#pragma unroll
        for (int n = 0; n < MOST; ++n) {
            int d = n * WARP + lane;
            if (d < args.head_dim) s = fused_multiply_add(query[n], to_float(load_global<Element>(keys(j) + SIZE * d)), s);
        }
#pragma unroll
        for (int lanes = WARP / 2; lanes > 0; lanes /= 2) s += shuffle_xor(s, lanes);
        return multiply(s, args.scale_log2);
    };
    SoftmaxRow<float> row;
    for (int j = first; j < end; ++j) {
        const float s = score(j);
        if (SPLIT_SCORES && s != s) {  // which decides the row by itself
            first = j;
            end = j + 1;
        }
        row.reference = maximum(row.reference, s);
    }
    for (int start = first; start < end; start += ADDED) {
        float part[MOST] = {};
        for (int j = start; j < end && j < start + ADDED; ++j) {
            float s = score(j);
            if (s == -INFINITE) continue;
            float weight = ex2_approx(s - row.shift());
            if (j % WARP == lane) row.sum += weight;
#pragma unroll
            for (int n = 0; n < MOST; ++n) {
                int d = n * WARP + lane;
                if (d < args.value_dim) {
                    part[n] = fused_multiply_add(weight, to_float(load_global<Element>(values(j) + SIZE * d)), part[n]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < MOST; ++n) sums[n] += part[n];
    }
    row.template finish<WARP>();
#pragma unroll
    for (int n = 0; n < MOST; ++n) {
        int d = n * WARP + lane;
        if (d < args.value_dim) store_global(out + SIZE * d, rounded(Element{}, sums[n] * row.inverse_sum()));
    }
    const bool wrong = SPLIT_SCORES || row.too_coarse();  // else lse is right already
    if (wrong && args.lse != nullptr && lane == 0) store_global(lse, row.lse());
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
