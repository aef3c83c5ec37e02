// Tiles of 64 rows and 64 columns there and back: from one tensor, through shared memory and registers, to another.
//
// Axes of both tensors: column, head, row, batch, and one of length 1. A tile holds PACK heads of 64 / PACK rows, the
// heads next to one another. `image` receives each tile as it lies in shared memory.
#include "tile_sm90.cuh"

namespace cuflash {

constexpr int THREADS = WARPGROUP, BUFFERS = 2;
using Tile = Panels<64, 64>;

constexpr int IN = 0, OUT = IN + Tile::BYTES, BARRIER = OUT + BUFFERS * Tile::BYTES;
static_assert(SHARED_BYTES == BARRIER + 8, "SHARED_BYTES: a tile that comes, two that go, a barrier");

struct Args {
    TensorMap in, out;
    char* image;
    int64 tiles, heads;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) tiles(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory(), barrier = shared + BARRIER;
    const int thread = thread_index(), lane = lane_index(), warp = warp_index();
    if (thread == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }
    sync_threads();
#pragma unroll 1
    for (int t = 0; t < args.tiles; ++t) {
        // One row block of each group of heads of each batch after another, blocks of rows outermost.
        const int groups = static_cast<int>(args.heads) / PACK;
        const Corner corner = {0, t % groups * PACK, t / groups / BATCHES * (64 / PACK), t / groups % BATCHES, 0};
        if (thread == 0) Tile::load(shared + IN, args.in, barrier, corner, EVICT_FIRST);
        mbarrier_wait(barrier, t % 2);

        const uint32 offset = Tile::offset(16 * warp + lane % 16, lane / 16);
        uint32 r[4][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) ldmatrix_x4(r[step], shared + IN + (offset ^ step * 32));
        for (int word = thread; word < Tile::BYTES / 4; word += THREADS) {
            store_global<uint32>(args.image + static_cast<int64>(t) * Tile::BYTES + word * 4, load_shared<uint32>(shared + IN + word * 4));
        }
        const uint32 out = shared + OUT + t % BUFFERS * Tile::BYTES;
        if (thread == 0) cp_async_bulk_wait_group_read<BUFFERS - 1>();
        sync_threads();  // all have read the tile, and the buffer is free
#pragma unroll
        for (int step = 0; step < 4; ++step) stmatrix_x4(out + (offset ^ step * 32), r[step]);
        fence_proxy_async();
        sync_threads();
        if (thread == 0) {
            cp_async_bulk_tensor_store(args.out, out, corner);
            cp_async_bulk_commit_group();
        }
    }
    if (thread == 0) cp_async_bulk_wait_group_read<0>();
}

}  // namespace cuflash
