// The careful path of forward and decode: rows that tensor cores may have got wrong, computed again.
#pragma once

#include "element.cuh"
#include "ptx.cuh"
#include "softmax.cuh"

namespace cuflash {

constexpr int ADDED = 64;  // keys whose terms are added before they join the others, where sums are short

// One row again, by a warp, reading visible keys only and rounding each score by itself: for rows where a hidden value
// that is not finite may have met a weight of 0 on the tensor cores, or whose scores are huge. `q(d)`, `keys(j)(d)` and
// `values(j)(d)` are numbers, `store(d, x)` writes one of out. WIDE, for elements of more than 16 bits: sums are short
// ones of sums, and lse is written too, for an infinity makes scores of split numbers NaN, whatever they should be.
template <bool WIDE, typename Args, typename Query, typename Keys, typename Values, typename Store>
__device__ __forceinline__ void careful_row_of(const Args& args, Query q, Keys keys, Values values, Store store,
                                               char* lse, int first, int end) {
    using Real = decltype(q(0));
    constexpr int MOST = ((HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) + WARP - 1) / WARP;
    const int lane = lane_index();
    Real query[MOST], sums[MOST] = {};
#pragma unroll
    for (int n = 0; n < MOST; ++n) {
        int d = n * WARP + lane;
        query[n] = d < args.head_dim ? q(d) : Real(0);
    }
    auto score = [&](int j) {
        Real s = 0;
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
    SoftmaxRow<Real> row;
    for (int j = first; j < end; ++j) {
        const Real s = score(j);
        if (WIDE && s != s) {  // which decides the row by itself
            first = j;
            end = j + 1;
        }
        row.reference = maximum(row.reference, s);
    }
    auto add = [&](Real(&sums)[MOST], int first, int end) {
        for (int j = first; j < end; ++j) {
            Real s = score(j);
            if (s == -INFINITE) continue;
            Real weight = exp2_of(s - row.shift());
            if (!WIDE || j % WARP == lane) row.sum += weight;
            const auto value = values(j);
#pragma unroll
            for (int n = 0; n < MOST; ++n) {
                int d = n * WARP + lane;
                if (d < args.value_dim) sums[n] = fused_multiply_add(weight, value(d), sums[n]);
            }
        }
    };
    if constexpr (WIDE) {
        for (int start = first; start < end; start += ADDED) {
            Real part[MOST] = {};
            add(part, start, end - start < ADDED ? end : start + ADDED);
#pragma unroll
            for (int n = 0; n < MOST; ++n) sums[n] += part[n];
        }
        row.template finish<WARP>();
    } else {
        add(sums, first, end);
    }
#pragma unroll
    for (int n = 0; n < MOST; ++n) {
        int d = n * WARP + lane;
        if (d < args.value_dim) store(d, sums[n] * row.inverse_sum());
    }
    const bool wrong = WIDE || row.too_coarse();  // else lse is right already
    if (wrong && args.lse != nullptr && lane == 0) store_global(lse, row.lse());
}

// The same of arrays: `keys(j)`, `values(j)` are addresses.
template <typename Element, typename Args, typename Keys, typename Values>
__device__ __forceinline__ void careful_row_at(const Args& args, const char* q, Keys keys, Values values, char* out,
                                               char* lse, int first, int end) {
    auto store = [&](int d, auto x) { store_global(out + sizeof(Element) * d, rounded<Element>(x)); };
    careful_row_of<(sizeof(Element) > 2)>(
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
