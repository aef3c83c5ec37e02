// Sixteen rows of float32 in a warp: scores, weights and out as the accumulators of products hold them, a thread two
// rows, lane / 4 and 8 below it, and of each block of 8 columns two neighbours.
#pragma once

#include "float32.cuh"
#include "forward_args.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "score.cuh"
#include "softmax.cuh"

namespace cuflash {

using Scores = float[TILE_K / 8][4];
using Out = float[VALUE_DIM / 8][4];
using Weights = Parts[TILE_K / 16];
using Rows = SoftmaxRow<float>[2];

// Column, within the tile, of element e of an accumulator's 16 x 8 block.
__device__ __forceinline__ int column_of(int lane, int n, int e) { return 8 * n + lane % 4 * 2 + e % 2; }

// Hidden scores are selected to -inf, whatever they are.
__device__ __forceinline__ void hide(Scores& scores, const Mask& mask, int pack, int warp_row, int key) {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int i = query_of(warp_row + 8 * half + lane / 4, pack);
        int first = mask.first_key(i) - key, end = mask.end_key(i) - key;
#pragma unroll
        for (int n = 0; n < TILE_K / 8; ++n) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
                int j = column_of(lane, n, e);
                scores[n][e] = j >= first && j < end ? scores[n][e] : -INFINITE;
            }
        }
    }
}

// Raises the rows' references to what this tile needs; out is rescaled where, rarely, one has moved.
__device__ __forceinline__ void raise(Rows& rows, Out& out, const Scores& scores, const Scaled& score) {
    float factor[2];
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = -INFINITE;
#pragma unroll
        for (int n = 0; n < TILE_K / 8; ++n) {
            top = maximum(top, maximum(scores[n][2 * half], scores[n][2 * half + 1]));
        }
        factor[half] = rows[half].raise(maximum_of_row(top) * score.factor());
        moved |= factor[half] != 1.0f;
    }
    if (!any(moved)) return;
#pragma unroll
    for (int n = 0; n < VALUE_DIM / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n][e] *= factor[e / 2];
    }
}

// Turns scores into weights: their parts, as A operands of 16 rows and 16 keys, and their sums. Those of a tile are
// summed by themselves, before they join the others.
__device__ __forceinline__ void weigh(Weights& weights, Rows& rows, const Scores& scores, const Scaled& score) {
    float sums[2] = {};
#pragma unroll
    for (int step = 0; step < TILE_K / 16; ++step) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {  // rows g and g + 8 of keys 0-7, then of keys 8-15
            const float(&s)[4] = scores[2 * step + r / 2];
            const float shift = rows[r % 2].shift();
            float low = ex2_approx(fused_multiply_add(s[r % 2 * 2], score.factor(), -shift));
            float high = ex2_approx(fused_multiply_add(s[r % 2 * 2 + 1], score.factor(), -shift));
            sums[r % 2] += low + high;
            uint32 parts[PARTS];
            split<false>(parts, low, high);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) weights[step][p][r] = parts[p];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[half].sum += sums[half];
}

// Writes a warp's 16 rows of out and lse, from `warp_row` on. A quad of threads writes 32 neighbouring bytes, a whole
// sector, at once; lse is written by one thread of each.
template <typename Args>
__device__ __forceinline__ void store(const Args& args, const Mask& mask, const Dense& place, int warp_row,
                                      const Out& out, Rows& rows) {
    const int lane = lane_index();
    uint32 suspects[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        SoftmaxRow<float>& row = rows[half];
        row.finish<4>();
        const float inverse = row.inverse_sum();
        const int r = 8 * half + lane / 4;
        const bool inside = warp_row + r < place.rows();
        char* const to = inside ? out_of(args, place, warp_row + r) : nullptr;
        float finite = 0.0f;
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 8; ++n) {
            float low = out[n][2 * half] * inverse, high = out[n][2 * half + 1] * inverse;
            finite += (low - low) + (high - high);
            const int d = column_of(lane, n, 0);
            if (!inside || d >= args.value_dim) continue;
            if (args.out_vectors) {
                const Vector8 pair{{__builtin_bit_cast(uint32, low), __builtin_bit_cast(uint32, high)}};
                store_global(to + d * sizeof(float), pair);
            } else {
                store_global(to + d * sizeof(float), low);
                if (d + 1 < args.value_dim) store_global(to + (d + 1) * sizeof(float), high);
            }
        }
        // The parts of an infinity are NaN to the products, where infinities and hidden values may have no such effect.
        suspects[half] = ballot(inside && (finite != 0.0f || row.too_coarse()));
        if (inside && args.lse != nullptr && lane % 4 == 0) {
            store_global(lse_of(args, place, warp_row + r), row.lse());
        }
    }
    sync_warp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        while (suspects[half] != 0) {
            int quad = find_first_set(suspects[half]) / 4;
            suspects[half] &= ~(0xfu << (4 * quad));
            compute_again(args, mask, place, warp_row + 8 * half + quad);
        }
    }
}

}  // namespace cuflash
