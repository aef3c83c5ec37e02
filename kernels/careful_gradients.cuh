// The careful path of backward for 16-bit elements: rows of gradients that tensor cores may have got wrong, again.
//
// A number that is not finite, in a pair of row and key that is hidden, meets a weight of 0 on the tensor cores, and
// 0 * NaN spoils a sum. Here a warp makes one row of a gradient from the pairs that are visible alone.
#pragma once

#include "place.cuh"
#include "ptx.cuh"

namespace cuflash {

constexpr int ROW_NUMBERS = (HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) / WARP;  // of a row, for each lane

// A row of up to ROW_NUMBERS * WARP elements, every 32nd of them a lane's; zeros beyond its end.
struct LaneRow {
    float x[ROW_NUMBERS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < ROW_NUMBERS; ++n) x[n] = 0.0f;
    }
    __device__ __forceinline__ void load(const char* row, int columns) {
#pragma unroll
        for (int n = 0; n < ROW_NUMBERS; ++n) {
            const int d = n * WARP + lane_index();
            x[n] = d < columns ? to_float(load_global<Element>(row + 2 * d)) : 0.0f;
        }
    }
    // The product with another row, in all lanes.
    __device__ __forceinline__ float dot(const LaneRow& other) const {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < ROW_NUMBERS; ++n) sum = fused_multiply_add(x[n], other.x[n], sum);
#pragma unroll
        for (int lanes = WARP / 2; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
        return sum;
    }
    __device__ __forceinline__ void add(float factor, const LaneRow& other) {
#pragma unroll
        for (int n = 0; n < ROW_NUMBERS; ++n) x[n] = fused_multiply_add(factor, other.x[n], x[n]);
    }
    __device__ __forceinline__ void store(char* row, int columns, bool wide, float factor) const {
#pragma unroll
        for (int n = 0; n < ROW_NUMBERS; ++n) {
            const int d = n * WARP + lane_index();
            if (d >= columns) continue;
            if (wide) {
                store_global(row + 4 * d, x[n] * factor);
            } else {
                const uint32 pair = cvt_pair(Element{}, x[n] * factor, 0.0f);
                store_global(row + 2 * d, Element{static_cast<unsigned short>(pair)});
            }
        }
    }
};

// Whether a row that was stored holds a number that is not finite; all lanes get the answer.
__device__ __forceinline__ bool is_spoilt(const char* row, int columns, bool wide) {
    bool spoilt = false;
    for (int d = lane_index(); d < columns; d += WARP) {
        if (wide) {
            spoilt |= !is_finite(load_global<float>(row + 4 * d));
        } else {
            spoilt |= !is_finite(to_float(load_global<Element>(row + 2 * d)));
        }
    }
    return any(spoilt);
}

// Numbers of a pair: P and dS. A score of -inf has neither, whatever the rest holds.
struct Pair {
    float p, ds;
    bool seen;
    __device__ __forceinline__ Pair(float product, float scale_log2, float row_lse, float dp, float row_delta) {
        const float score = multiply(product, scale_log2), exponent = score - row_lse;
        seen = score != -INFINITE && row_lse != INFINITE;
        p = ex2_approx(exponent > 0.0f ? 0.0f : exponent);  // a weight is 1 at most; NaN stays
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
    __device__ __forceinline__ float of_row(const char* base, int head, int row) const {
        const int64 linear = (batch * args.heads + head) * args.query_tiles * args.tile_q + row;
        return load_global<float>(base + 4 * linear);
    }
};

// dq of one row.
template <typename Args>
__device__ __noinline__ void careful_dq(const Args& args, int64 batch, int head, int i, int first, int end) {
    const GradientRows<Args> rows(args, batch);
    const int key_head = head / args.group;
    const float row_lse = rows.of_row(args.row_lse, head, i), row_delta = rows.of_row(args.row_delta, head, i);
    LaneRow query, dout, sum;
    query.load(rows.at(args.q, args.q_strides, head, i), args.head_dim);
    dout.load(rows.at(args.dout, args.dout_strides, head, i), args.value_dim);
    sum.clear();
#pragma unroll 1
    for (int j = first; j < end; ++j) {
        LaneRow key, value;
        key.load(rows.at(args.k, args.k_strides, key_head, j), args.head_dim);
        value.load(rows.at(args.v, args.v_strides, key_head, j), args.value_dim);
        const Pair pair(query.dot(key), args.scale_log2, row_lse, dout.dot(value), row_delta);
        if (pair.seen) sum.add(pair.ds, key);
    }
    sum.store(rows.at(args.dq, args.dq_strides, head, i), args.head_dim, args.dq_wide, args.scale);
}

// dk and dv of one key, each where it is wanted.
template <typename Args>
__device__ __noinline__ void careful_dk_dv(const Args& args, int64 batch, int key_head, int j, int first, int end,
                                           bool wants_dk, bool wants_dv) {
    const GradientRows<Args> rows(args, batch);
    LaneRow key, value, dk, dv;
    key.load(rows.at(args.k, args.k_strides, key_head, j), args.head_dim);
    value.load(rows.at(args.v, args.v_strides, key_head, j), args.value_dim);
    dk.clear();
    dv.clear();
#pragma unroll 1
    for (int head = key_head * args.group; head < (key_head + 1) * args.group; ++head) {
#pragma unroll 1
        for (int i = first; i < end; ++i) {
            LaneRow query, dout;
            query.load(rows.at(args.q, args.q_strides, head, i), args.head_dim);
            dout.load(rows.at(args.dout, args.dout_strides, head, i), args.value_dim);
            const Pair pair(query.dot(key), args.scale_log2, rows.of_row(args.row_lse, head, i), dout.dot(value),
                            rows.of_row(args.row_delta, head, i));
            if (!pair.seen) continue;
            dk.add(pair.ds, query);
            dv.add(pair.p, dout);
        }
    }
    if (wants_dk) dk.store(rows.at(args.dk, args.dk_strides, key_head, j), args.head_dim, args.dk_wide, args.scale);
    if (wants_dv) dv.store(rows.at(args.dv, args.dv_strides, key_head, j), args.value_dim, args.dv_wide, 1.0f);
}

}  // namespace cuflash
