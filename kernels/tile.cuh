// Tiles: 16-bit matrices in shared memory, and the verbs that move them and multiply them.
//
// A tile of ROWS x COLUMNS lies row by row; the 16-byte chunks of a row are permuted by an XOR with the row, so that
// the eight rows a matrix instruction reads hit all 32 banks.
#pragma once

#include "ptx.cuh"

namespace cuflash {

constexpr int CHUNK = 16;                   // bytes moved at once
constexpr int CHUNK_ELEMENTS = CHUNK / 2;  // of 16 bits

template <int COLUMNS>
struct Tile {
    static constexpr int PITCH = COLUMNS * 2;
    static constexpr int CHUNKS = PITCH / CHUNK;
    static constexpr int SPAN = PITCH % 128 == 0 ? 128 : PITCH % 64 == 0 ? 64 : 32;  // bytes that the XOR permutes
    static_assert(PITCH % 32 == 0, "COLUMNS: a multiple of 16 elements");

    // Offset of a chunk. Rows of an odd number of 64-byte spans fill the banks by themselves every second row, those of
    // 32-byte spans every fourth.
    static __device__ __forceinline__ uint32 offset(uint32 row, uint32 chunk) {
        uint32 swizzle = SPAN == 128 ? row % 8 : SPAN == 64 ? row / 2 % 4 : row / 4 % 2;
        return row * PITCH + (chunk ^ swizzle) * CHUNK;
    }
    // The chunk CHUNK_STEP chunks to the right and ROW_STEP rows below one that `lane` addresses. Both are constants:
    // ROW_STEP a multiple of 8 keeps the swizzle, CHUNK_STEP even keeps the lowest bit, where lanes differ.
    static __device__ __forceinline__ uint32 step(uint32 lane, int row_step, int chunk_step) {
        int right = chunk_step * CHUNK;
        return (lane ^ (right % SPAN)) + right / SPAN * SPAN + row_step * PITCH;
    }
};

// Offsets in a tile from which a lane feeds ldmatrix_x4, from a chunk on: an even one, below the steps to be made.
// A operand, 16 x 16; also, transposed, a 16 (rows) x 16 (columns) B operand.
template <int COLUMNS>
__device__ __forceinline__ uint32 lane_of_a(int chunk = 0) {
    uint32 lane = lane_index();
    return Tile<COLUMNS>::offset(lane % 16, lane / 16 + chunk);
}
// Two B operands side by side, 8 rows each, 16 columns; also, transposed, an A operand of 16 (columns) x 16 (rows).
template <int COLUMNS>
__device__ __forceinline__ uint32 lane_of_b(int chunk = 0) {
    uint32 lane = lane_index();
    return Tile<COLUMNS>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 + chunk);
}
// Where a lane writes its two neighbours of an accumulator, as 16-bit elements.
template <int COLUMNS>
__device__ __forceinline__ uint32 lane_of_pair(int chunk = 0) {
    uint32 lane = lane_index();
    return Tile<COLUMNS>::offset(lane / 4, chunk) + lane % 4 * 4;
}

// Copies rows of an operand into a tile, THREADS together: cp.async, 16 bytes a thread and instruction. What lies
// beyond `columns` elements or outside rows [first, end) is not read and becomes zeros.
template <int ROWS, int COLUMNS, int THREADS>
struct TileCopy {
    using Shape = Tile<COLUMNS>;
    // Threads along a row: a power of two that divides it, small enough for steps of 8 rows, which keep the swizzle.
    static constexpr int DIVISOR = Shape::CHUNKS & -Shape::CHUNKS;
    static constexpr int LANES = DIVISOR < THREADS / 8 ? DIVISOR : THREADS / 8;
    static constexpr int ROW_STEP = THREADS / LANES;
    static_assert(ROWS % ROW_STEP == 0, "ROWS: whole rounds of the threads that copy");

    // `source` is the address of the tile's row 0. Tiles that lie inside, in whole chunks, take no test of their rows.
    static __device__ __forceinline__ void copy(uint32 base, const char* source, int64 stride, int columns, int first,
                                                int end) {
        const int thread = fresh_thread_index();
        const int row = thread / LANES, chunk = thread % LANES;
        const char* address = source + row * stride + chunk * CHUNK;
        const int left = columns * 2 - chunk * CHUNK;  // bytes from this thread's first chunk to the row's end
        if (first <= 0 && end >= ROWS && columns * 2 % CHUNK == 0) {
#pragma unroll
            for (int n = 0; n < ROWS / ROW_STEP; ++n, address += ROW_STEP * stride) {
#pragma unroll
                for (int c = 0; c < Shape::CHUNKS; c += LANES) {
                    cp_async_16(base + Shape::offset(row + n * ROW_STEP, chunk + c), address + c * CHUNK,
                                c * CHUNK < left);
                }
            }
        } else {
#pragma unroll 1
            for (int r = row; r < ROWS; r += ROW_STEP, address += ROW_STEP * stride) {
#pragma unroll 1
                for (int c = 0; c < Shape::CHUNKS; c += LANES) {
                    int bytes = r >= first && r < end ? clamp(left - c * CHUNK, 0, CHUNK) : 0;
                    cp_async_16(base + Shape::offset(r, chunk + c), address + c * CHUNK, bytes);
                }
            }
        }
    }

    // The same of rows that lie anywhere: `row(r)` is the address of row r, null where it becomes zeros.
    template <typename Row>
    static __device__ __forceinline__ void gather(uint32 base, Row row, int columns) {
        const int thread = fresh_thread_index();
        const int first = thread / LANES, chunk = thread % LANES;
        const int left = columns * 2 - chunk * CHUNK;
        auto each = [&](auto copy) {
#pragma unroll
            for (int r = first; r < first + ROWS; r += ROW_STEP) {
                const char* address = row(r);
                const bool read = address != nullptr;
#pragma unroll
                for (int c = 0; c < Shape::CHUNKS; c += LANES) {
                    copy(base + Shape::offset(r, chunk + c), address + (chunk + c) * CHUNK, left - c * CHUNK, read);
                }
            }
        };
        if (columns * 2 % CHUNK == 0) {
            each([](uint32 to, const char* from, int left, bool read) { cp_async_16(to, from, read && left > 0); });
        } else {
            each([](uint32 to, const char* from, int left, bool read) {
                cp_async_16(to, from, read ? clamp(left, 0, CHUNK) : 0);
            });
        }
    }
};

struct Nothing {
    __device__ __forceinline__ void operator()(int) const {}
};

// scores (16 BLOCKS x 8 N) = a (16 BLOCKS x 16 K) b^T, b a tile of 8 N rows. `load_a(a, block, k)` gives A operands.
// One A operand serves all of b's rows, one B operand all of a's blocks. Where these are few, and products would wait
// for one another, even and odd steps have a sum each. What `beside(k)` does is done while the tensor cores work on
// step k.
template <typename Element, int BLOCKS, int N, int K, int COLUMNS, typename LoadA, typename Beside = Nothing>
__device__ __forceinline__ void multiply_transposed(float (&scores)[BLOCKS][N][4], LoadA load_a, uint32 base,
                                                    uint32 lane, Beside beside = {}) {
    constexpr int SUMS = BLOCKS * N <= 2 ? 2 : 1;
    float odd[BLOCKS][N][4];
#pragma unroll
    for (int k = 0; k < K; ++k) {
        float(&sum)[BLOCKS][N][4] = k % SUMS == 0 ? scores : odd;
        uint32 a[BLOCKS][4];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) load_a(a[block], block, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32 b[4];
            ldmatrix_x4(b, base + Tile<COLUMNS>::step(lane, 8 * n, 2 * k));
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                if (k < SUMS) {
                    mma_m16n8k16_first(Element{}, sum[block][n], a[block], b[0], b[1]);
                    mma_m16n8k16_first(Element{}, sum[block][n + 1], a[block], b[2], b[3]);
                } else {
                    mma_m16n8k16(Element{}, sum[block][n], a[block], b[0], b[1]);
                    mma_m16n8k16(Element{}, sum[block][n + 1], a[block], b[2], b[3]);
                }
            }
        }
        beside(k);
    }
    if constexpr (SUMS > 1 && K > 1) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) scores[block][n][e] += odd[block][n][e];
            }
        }
    }
}

// out (16 BLOCKS x 8 N) += a (16 BLOCKS x 16) b, b the 16 rows of a tile that begin at ROW; of its columns all, or 16
// every STRIDE chunks.
template <typename Element, int BLOCKS, int N, int COLUMNS, int STRIDE = 2>
__device__ __forceinline__ void multiply_add(float (&out)[BLOCKS][N][4], const uint32 (&a)[BLOCKS][4], uint32 base,
                                             uint32 lane, int row) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32 b[4];
        ldmatrix_x4_trans(b, base + Tile<COLUMNS>::step(lane, row, n / 2 * STRIDE));
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            mma_m16n8k16(Element{}, out[block][n], a[block], b[0], b[1]);
            mma_m16n8k16(Element{}, out[block][n + 1], a[block], b[2], b[3]);
        }
    }
}

}  // namespace cuflash
