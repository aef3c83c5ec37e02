// The careful path of backward: rows of gradients that tensor cores may have got wrong, again.
//
// A number that is not finite, in a pair of row and key that is hidden, meets a weight of 0 on the tensor cores, and
// 0 * NaN spoils a sum. Here a warp makes one row of a gradient from the pairs that are visible alone.
#pragma once

#include "element.cuh"
#include "place.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "softmax.cuh"

namespace cuflash {

constexpr int ROW_NUMBERS = (HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) / WARP;  // of a row, for each lane

// The product of two rows, in all lanes.
__device__ __forceinline__ Real dot(const char* a, const char* b, int columns) {
    const RowOf<Element> x{a}, y{b};
    Real sum = 0;
#pragma unroll 1
    for (int d = lane_index(); d < columns; d += WARP) sum = fused_multiply_add(x(d), y(d), sum);
#pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
    return sum;
}

// A row of a gradient in the making, every 32nd number a lane's. Registers are for these alone: the kernel beside which
// this lies wants few, and rows are read again as often as it takes.
struct RowSum {
    Real x[ROW_NUMBERS] = {};

    __device__ __forceinline__ void add(Real factor, const char* row, int columns) {
#pragma unroll
        for (int n = 0; n < ROW_NUMBERS; ++n) {
            const int d = n * WARP + lane_index();
            if (d < columns) x[n] = fused_multiply_add(factor, RowOf<Element>{row}(d), x[n]);
        }
    }
    __device__ __forceinline__ void store(char* row, int columns, bool wide, Real factor) const {
#pragma unroll
        for (int n = 0; n < ROW_NUMBERS; ++n) {
            const int d = n * WARP + lane_index();
            if (d >= columns) continue;
            if (wide) {
                store_global(row + RowOf<Real>::SIZE * d, x[n] * factor);
            } else {
                store_global(row + RowOf<Element>::SIZE * d, rounded<Element>(x[n] * factor));
            }
        }
    }
    __device__ __forceinline__ void join(int) {}
    __device__ __forceinline__ void join() {}
};

// The same of float32: terms of ADDED pairs are added before they join the others, as those of tiles are, since long
// sums lose more. join(n) comes after the n-th pair, join() after the last.
struct RowOfShortSums {
    static constexpr int ADDED = 64;
    RowSum sum, part;

    __device__ __forceinline__ void add(float factor, const char* row, int columns) { part.add(factor, row, columns); }
    __device__ __forceinline__ void join(int n) {
        if (n % ADDED == ADDED - 1) join();
    }
    __device__ __forceinline__ void join() {
#pragma unroll
        for (int n = 0; n < ROW_NUMBERS; ++n) sum.x[n] += part.x[n];
        part = {};
    }
    __device__ __forceinline__ void store(char* row, int columns, bool wide, float factor) const {
        sum.store(row, columns, wide, factor);
    }
};

template <typename>
struct GradientRow {
    using Sum = RowSum;
};
template <>
struct GradientRow<float> {
    using Sum = RowOfShortSums;
};

// Whether a row that was stored holds a number that is not finite; all lanes get the answer.
__device__ __forceinline__ bool is_spoilt(const char* row, int columns, bool wide) {
    bool spoilt = false;
    for (int d = lane_index(); d < columns; d += WARP) {
        spoilt |= !is_finite(wide ? RowOf<Real>{row}(d) : RowOf<Element>{row}(d));
    }
    return any(spoilt);
}

// Numbers of a pair: P and dS. A score of -inf has neither, whatever the rest holds.
struct Pair {
    Real p, ds;
    bool seen;
    __device__ __forceinline__ Pair(Real product, Real scale_log2, Real row_lse, Real dp, Real row_delta) {
        const Real score = multiply(product, scale_log2), exponent = score - row_lse;
        seen = score != -INFINITE && row_lse != INFINITE;
        p = exp2_of(exponent > 0 ? Real(0) : exponent);  // a weight is 1 at most; NaN stays
        ds = p * (dp - row_delta);
    }
};

// Addresses of the rows of one batch and head.
template <typename Args>
struct GradientRows {
    const Args& args;
    int64 batch, batch0, batch1;
    __device__ __forceinline__ GradientRows(const Args& args, int64 batch)
        : args(args), batch(batch), batch0(batch / args.batches1), batch1(batch % args.batches1) {}

    template <typename Pointer>
    __device__ __forceinline__ Pointer at(Pointer base, const Strides& strides, int head, int row) const {
        return base + strides.offset(batch0, batch1, head) + row * strides.row;
    }
    // Of row_lse and row_delta.
    __device__ __forceinline__ Real of_row(const char* base, int head, int row) const {
        const int64 linear = (batch * args.heads + head) * args.query_tiles * args.tile_q + row;
        return load_global<Real>(base + sizeof(Real) * linear);
    }
};

// dq of one row.
template <typename Args>
__device__ __noinline__ void careful_dq(const Args& args, int64 batch, int head, int i, int first, int end) {
    const GradientRows<Args> rows(args, batch);
    const int key_head = head / args.group;
    const Real row_lse = rows.of_row(args.row_lse, head, i), row_delta = rows.of_row(args.row_delta, head, i);
    const char* const query = rows.at(args.q, args.q_strides, head, i);
    const char* const dout = rows.at(args.dout, args.dout_strides, head, i);
    GradientRow<Element>::Sum sum;
#pragma unroll 1
    for (int j = first; j < end; ++j) {
        const char* const key = rows.at(args.k, args.k_strides, key_head, j);
        const char* const value = rows.at(args.v, args.v_strides, key_head, j);
        const Pair pair(dot(query, key, args.head_dim), args.scale_log2, row_lse, dot(dout, value, args.value_dim),
                        row_delta);
        if (pair.seen) sum.add(pair.ds, key, args.head_dim);
        sum.join(j - first);
    }
    sum.join();
    sum.store(rows.at(args.dq, args.dq_strides, head, i), args.head_dim, args.dq_wide, args.scale);
}

// dk or, if `is_dv`, dv of one key.
template <typename Args>
__device__ __noinline__ void careful_dk_dv(const Args& args, int64 batch, int key_head, int j, int first, int end,
                                           bool is_dv) {
    const GradientRows<Args> rows(args, batch);
    const char* const key = rows.at(args.k, args.k_strides, key_head, j);
    const char* const value = rows.at(args.v, args.v_strides, key_head, j);
    GradientRow<Element>::Sum sum;
#pragma unroll 1
    for (int head = key_head * args.group; head < (key_head + 1) * args.group; ++head) {
#pragma unroll 1
        for (int i = first; i < end; ++i) {
            const char* const query = rows.at(args.q, args.q_strides, head, i);
            const char* const dout = rows.at(args.dout, args.dout_strides, head, i);
            const Pair pair(dot(query, key, args.head_dim), args.scale_log2, rows.of_row(args.row_lse, head, i),
                            dot(dout, value, args.value_dim), rows.of_row(args.row_delta, head, i));
            if (pair.seen && is_dv) sum.add(pair.p, dout, args.value_dim);
            if (pair.seen && !is_dv) sum.add(pair.ds, query, args.head_dim);
            sum.join(i - first);
        }
        sum.join();
    }
    if (is_dv) {
        sum.store(rows.at(args.dv, args.dv_strides, key_head, j), args.value_dim, args.dv_wide, Real(1));
    } else {
        sum.store(rows.at(args.dk, args.dk_strides, key_head, j), args.head_dim, args.dk_wide, args.scale);
    }
}

}  // namespace cuflash
