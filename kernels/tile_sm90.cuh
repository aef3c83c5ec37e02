// Tiles as Hopper's tensor copies write them and its warpgroup products read them.
//
// A tile of ROWS x COLUMNS lies as panels of 64 columns, one after another: a panel's row is 128 bytes, its 16-byte
// chunks permuted by an XOR with the row. COLUMNS that are no multiple of 64 leave the last panel's rest unused.
#pragma once

#include "ptx_sm90.cuh"

namespace cuflash {

template <int ROWS, int COLUMNS>
struct Panels {
    static constexpr int COUNT = (COLUMNS + 63) / 64;
    static constexpr int PANEL_BYTES = ROWS * 128;
    static constexpr int BYTES = COUNT * PANEL_BYTES;
    static_assert(ROWS % 8 == 0 && COLUMNS % 16 == 0, "whole patterns of the swizzle, whole steps of a product");

    // Offset of a 16-byte chunk.
    static __device__ __forceinline__ uint32 offset(int row, int chunk) {
        return chunk / 8 * PANEL_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
    }
    // Descriptors of the tile at `place`, its address in units of 16 bytes, which steps along it are added to: those of
    // a tile as rows of a product (of q k^T) advance by 16 columns, those of a tile as columns of a product (v, whose
    // rows are summed over) by 16 rows.
    static __device__ __forceinline__ uint64 rows_descriptor(uint32 place) {
        return matrix_descriptor(place, 16, 1024);
    }
    static __device__ __forceinline__ uint64 columns_descriptor(uint32 place) {
        return matrix_descriptor(place, PANEL_BYTES, 1024);
    }
    static __device__ constexpr uint32 right(int step) { return step / 4 * (PANEL_BYTES / 16) + step % 4 * 2; }
    static __device__ constexpr uint32 down(int step) { return step * (16 * 128 / 16); }

    // The tile that begins at `corner`, panel by panel, boxes of `box_bytes` each.
    static __device__ __forceinline__ void load(uint32 address, const TensorMap& map, uint32 barrier, Corner corner,
                                                uint64 policy, int box_bytes = PANEL_BYTES) {
        mbarrier_arrive_expect_tx(barrier, COUNT * box_bytes);
#pragma unroll
        for (int panel = 0; panel < COUNT; ++panel, corner.column += 64) {
            cp_async_bulk_tensor_load(address + panel * PANEL_BYTES, map, barrier, corner, policy);
        }
    }
    // To the L2 cache alone.
    static __device__ __forceinline__ void prefetch(const TensorMap& map, Corner corner) {
#pragma unroll
        for (int panel = 0; panel < COUNT; ++panel, corner.column += 64) cp_async_bulk_prefetch_tensor(map, corner);
    }
    // The other way; for the caller to commit.
    static __device__ __forceinline__ void store(const TensorMap& map, uint32 address, Corner corner) {
#pragma unroll
        for (int panel = 0; panel < COUNT; ++panel) {
            corner.column = 64 * panel;
            cp_async_bulk_tensor_store(map, address + panel * PANEL_BYTES, corner);
        }
    }
};

}  // namespace cuflash
