// Gradients on Hopper on their way to global memory: a consumer's 64 rows of dk, dv or dq, as accumulators hold them.
#pragma once

#include "place.cuh"
#include "ptx_sm90.cuh"
#include "tile_sm90.cuh"

namespace cuflash {

using Gradient = float[HEAD_DIM / 2];
using GradTile = Panels<64, HEAD_DIM>;  // as elements, in shared memory

// The row, of a thread's two, that element i of an accumulator belongs to, and its column.
__device__ constexpr int half_of(int i) { return i / 2 % 2; }
__device__ __forceinline__ int column_of(int lane, int i) { return 8 * (i / 4) + lane % 4 * 2 + i % 2; }

// The first of the 64 rows.
struct RowPlace {
    int head, row, batch0, batch1;
};

// Which of a thread's two rows hold a number that is not finite.
struct Lost {
    bool rows[2];
};

// Rounds and writes the 64 rows. `target` says where to: a tensor map of the elements; base, strides, rows and dim of
// the array; wide, whether it is of float32, for sums to come; boxes, whether elements leave by tensor copies; and the
// factor that sums are still to be multiplied by. Elements go by way of `staging`, where a warp writes its own 16 rows,
// from `warp_row` on; before and after copies the consumer's warps meet at a barrier of the number `meeting`.
// row_of(half) is a row of the thread's two. AWAITED: all has been written when this returns; else copies may be in
// flight, and the next call waits until they have left `staging`.
template <bool AWAITED, typename Target, typename RowOf>
__device__ __forceinline__ Lost store_gradient(const Target& target, const RowPlace& place, const Gradient& sums,
                                               uint32 staging, int meeting, int lane, int warp_row, RowOf row_of) {
    auto first_thread = [] { return thread_index() % WARPGROUP == 0; };
    char* const base = target.base + target.strides.offset(place.batch0, place.batch1, place.head);
    Lost lost;
    if (target.wide) {
        float zeros[2] = {};  // sums of 0 times a number: NaN where one is not finite
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) {
            const int half = half_of(i);
            const float x = sums[i] * target.factor;
            zeros[half] += 0.0f * x;
            char* const to = base + row_of(half) * target.strides.row;
            const int column = column_of(lane, i);
            if (row_of(half) < target.rows && column < target.dim) store_global(to + 4 * column, x);
        }
        lost.rows[0] = !is_finite(zeros[0]), lost.rows[1] = !is_finite(zeros[1]);
    } else {
        if (target.boxes && !AWAITED) {
            if (first_thread()) cp_async_bulk_wait_group_read<0>();  // what lay there has left
            bar_sync(meeting, WARPGROUP);
        }
        uint32 zeros[2] = {};
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) {
            uint32 words[4];
#pragma unroll
            for (int part = 0; part < 4; ++part) {  // rows g and g + 8 of 8 columns, then of the next 8
                const float* pair = sums + 8 * step + 2 * part;
                words[part] = cvt_pair(Element{}, pair[0] * target.factor, pair[1] * target.factor);
                zeros[part % 2] = fma_pair(Element{}, words[part], 0, zeros[part % 2]);
            }
            stmatrix_x4(staging + GradTile::offset(warp_row + lane % 16, 2 * step + lane / 16), words);
        }
        lost.rows[0] = (zeros[0] & 0x7fff7fff) != 0, lost.rows[1] = (zeros[1] & 0x7fff7fff) != 0;
        if (target.boxes) {
            fence_proxy_async();
            bar_sync(meeting, WARPGROUP);
            if (first_thread()) {
                GradTile::store(target.map, staging, {0, place.head, place.row, place.batch0, place.batch1});
                cp_async_bulk_commit_group();
                if (AWAITED) cp_async_bulk_wait_group<0>();
            }
            if (AWAITED) bar_sync(meeting, WARPGROUP);
        } else {
            sync_warp();
#pragma unroll 1
            for (int n = lane; n < 16 * HEAD_DIM / 8; n += WARP) {
                const int row = warp_row + n % 16, chunk = n / 16;
                if (place.row + row < target.rows && 8 * chunk < target.dim) {
                    store_global(base + (place.row + row) * target.strides.row + 16 * chunk,
                                 load_shared<Vector16>(staging + GradTile::offset(row, chunk)));
                }
            }
        }
    }
    sync_warp();
    return lost;
}

}  // namespace cuflash
