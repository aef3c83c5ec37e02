// sum[t] = what all blocks add to tile t, one after another, in an order that is the same in every run.
//
// Block b visits the tiles b, b + 1, ... and round again, so that it is block (t - s) mod BLOCKS that comes to tile t as
// number s. A counter for each tile tells whose turn it is: the first block stores, the others add. All blocks are there
// at once, or they would wait for ever.
//
// A tile is 64 x COLUMNS, float32, and lies as the accumulators of a warpgroup do: blocks of 16 x 8, column blocks
// outermost, each as the 32 lanes' four floats. `image` receives every block's tiles too, rounded and transposed.
//
// The last warp moves the tiles: one of its threads brings the block's own, and takes what the others, a warpgroup, have
// made of it (twice its numbers) to global memory. They tell one another that the two buffers are full, or free again.
#include "ptx_sm90.cuh"

namespace cuflash {

constexpr int THREADS = WARPGROUP + WARP;
constexpr int TILE_BYTES = 64 * COLUMNS * 4, IMAGE_BYTES = 64 * COLUMNS * 2;
constexpr int SOURCE = 0, SUM = SOURCE + TILE_BYTES, IMAGE = SUM + TILE_BYTES, SOURCE_FULL = IMAGE + IMAGE_BYTES;
static_assert(SHARED_BYTES == SOURCE_FULL + 8, "SHARED_BYTES: the tile that comes, its two forms that go, a barrier");
static_assert(COLUMNS % 16 == 0, "COLUMNS: pairs of 8, which stmatrix takes");

enum Named { FULL = 1, FREE };  // barriers

struct Args {
    const char* in;  // [block][tile]
    char *sum, *image;
    char* turns;  // int32, how many blocks have added to each tile
};

__device__ __forceinline__ int64 index(int block, int tile) { return static_cast<int64>(block) * BLOCKS + tile; }

__device__ __forceinline__ void load(const Args& args, uint32 shared, int block, int tile) {
    mbarrier_arrive_expect_tx(shared + SOURCE_FULL, TILE_BYTES);
    cp_async_bulk_load(shared + SOURCE, args.in + index(block, tile) * TILE_BYTES, TILE_BYTES, shared + SOURCE_FULL);
}

__device__ __forceinline__ void move(const Args& args, uint32 shared, int block) {
    const bool mover = lane_index() == 0;
    if (mover) load(args, shared, block, block);
    int tile = block;
#pragma unroll 1
    for (int step = 0; step < BLOCKS; ++step) {
        const int next = tile + 1 == BLOCKS ? 0 : tile + 1;
        bar_sync(FULL, THREADS);
        if (mover) {
            if (step + 1 < BLOCKS) load(args, shared, block, next);  // all have read the last one
            cp_async_bulk_store(args.image + index(block, tile) * IMAGE_BYTES, shared + IMAGE, IMAGE_BYTES);
            while (load_acquire(args.turns + tile * 4) != step) {
            }
            fence_proxy_async_global();  // what others have added before what this thread's copy adds
            char* const sum = args.sum + static_cast<int64>(tile) * TILE_BYTES;
            if (step == 0) {
                cp_async_bulk_store(sum, shared + SUM, TILE_BYTES);
            } else {
                cp_reduce_async_bulk_add(sum, shared + SUM, TILE_BYTES);
            }
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_group_read<0>();
        }
        if (step + 1 < BLOCKS) bar_arrive(FREE, THREADS);
        if (mover) {
            cp_async_bulk_wait_group<0>();
            fence_proxy_async_global();  // what it has added before the release
            add_release(args.turns + tile * 4, 1);
        }
        tile = next;
    }
}

__device__ __forceinline__ void make(uint32 shared) {
    const int lane = lane_index(), warp = warp_index();
    auto place = [&](int column_block) { return ((column_block * 4 + warp) * WARP + lane) * 16; };
#pragma unroll 1
    for (int step = 0; step < BLOCKS; ++step) {
        mbarrier_wait(shared + SOURCE_FULL, step % 2);
        float tile[COLUMNS / 8][4];
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) tile[n][i] = 2.0f * load_shared<float>(shared + SOURCE + place(n) + 4 * i);
        }
        if (step > 0) bar_sync(FREE, THREADS);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) store_shared<float>(shared + SUM + place(n) + 4 * i, tile[n][i]);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n += 2) {  // 16 columns, rows of the image
            uint32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) pairs[i] = cvt_pair(Element{}, tile[n + i / 2][i % 2 * 2], tile[n + i / 2][i % 2 * 2 + 1]);
            const int row = 8 * n + lane % 8 + lane / 16 * 8, chunk = 2 * warp + lane / 8 % 2;
            stmatrix_x4_trans(shared + IMAGE + row * 128 + chunk * 16, pairs);
        }
        fence_proxy_async();
        bar_arrive(FULL, THREADS);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) reduce(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    if (thread_index() == 0) {
        mbarrier_init(shared + SOURCE_FULL, 1);
        fence_mbarrier_init();
    }
    sync_threads();
    if (uniform(warp_index()) < 4) {
        make(shared);
    } else {
        move(args, shared, static_cast<int>(fresh_block_index()));
    }
}

}  // namespace cuflash
