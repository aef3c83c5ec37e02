// The careful path of forward and decode on tensor cores: rows that these may have got wrong, computed again.
#pragma once

#include "ptx.cuh"
#include "softmax.cuh"

namespace cuflash {

// A row of 16-bit elements in global memory.
template <typename Element>
struct RowOf {
    const char* row;
    __device__ __forceinline__ float operator()(int d) const { return to_float(load_global<Element>(row + 2 * d)); }
};

// One row again, by a warp, reading visible keys only and rounding each score by itself: for rows where a hidden value
// that is not finite may have met a weight of 0 on the tensor cores, or whose scores are huge. `q(d)`, `keys(j)(d)` and
// `values(j)(d)` are numbers, `store(d, x)` writes one of out.
template <typename Args, typename Query, typename Keys, typename Values, typename Store>
__device__ __forceinline__ void careful_row_of(const Args& args, Query q, Keys keys, Values values, Store store,
                                               char* lse, int first, int end) {
    constexpr int MOST = (HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) / WARP;
    const int lane = lane_index();
    float query[MOST], sums[MOST] = {};
#pragma unroll
    for (int n = 0; n < MOST; ++n) {
        int d = n * WARP + lane;
        query[n] = d < args.head_dim ? q(d) : 0.0f;
    }
    auto score = [&](int j) {
        float s = 0.0f;
        const auto key = keys(j);
#pragma unroll
        for (int n = 0; n < MOST; ++n) {
            int d = n * WARP + lane;
            if (d < args.head_dim) s = fused_multiply_add(query[n], key(d), s);
        }
#pragma unroll
        for (int lanes = WARP / 2; lanes > 0; lanes /= 2) s += shuffle_xor(s, lanes);
        return multiply(s, args.scale_log2);
    };
    SoftmaxRow<float> row;
    for (int j = first; j < end; ++j) row.reference = maximum(row.reference, score(j));
    for (int j = first; j < end; ++j) {
        float s = score(j);
        if (s == -INFINITE) continue;
        float weight = ex2_approx(s - row.shift());
        row.sum += weight;
        const auto value = values(j);
#pragma unroll
        for (int n = 0; n < MOST; ++n) {
            int d = n * WARP + lane;
            if (d < args.value_dim) sums[n] = fused_multiply_add(weight, value(d), sums[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < MOST; ++n) {
        int d = n * WARP + lane;
        if (d < args.value_dim) store(d, sums[n] * row.inverse_sum());
    }
    if (row.too_coarse() && args.lse != nullptr && lane == 0) store_global(lse, row.lse());  // else it is right already
}

// The same of arrays of 16-bit elements: `keys(j)`, `values(j)` are addresses.
template <typename Element, typename Args, typename Keys, typename Values>
__device__ __forceinline__ void careful_row_at(const Args& args, const char* q, Keys keys, Values values, char* out,
                                               char* lse, int first, int end) {
    auto store = [&](int d, float x) {
        unsigned short bits = static_cast<unsigned short>(cvt_pair(Element{}, x, 0.0f));
        store_global(out + 2 * d, Element{bits});
    };
    careful_row_of(
        args, RowOf<Element>{q}, [&](int j) { return RowOf<Element>{keys(j)}; },
        [&](int j) { return RowOf<Element>{values(j)}; }, store, lse, first, end);
}

// The same of keys and values that lie at equal distances.
template <typename Element, typename Args>
__device__ __noinline__ void careful_row(const Args& args, const char* q, const char* k, const char* v, char* out,
                                         char* lse, int first, int end) {
    careful_row_at<Element>(
        args, q, [&](int j) { return k + j * args.k_strides.row; }, [&](int j) { return v + j * args.v_strides.row; },
        out, lse, first, end);
}

}  // namespace cuflash
