// out[c] (64 x N) = sum over tiles t of a[t, c] (64 x 64) b[t] (64 x N), one warpgroup for each c.
//
// The tiles pass through a ring of STAGES places in shared memory. A thread of the first warpgroup fills them; the
// others, CONSUMERS, work on one tile while the product of the one before is still being taken, and give its place
// back once it is. Each of their warps does so for itself: its own wait says nothing of its neighbours.
#include "tile_sm90.cuh"

namespace cuflash {

constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);
using A = Panels<64 * CONSUMERS, 64>;
using B = Panels<64, N>;

constexpr int A_START = 0, B_START = A_START + STAGES * A::BYTES;
constexpr int FULL = B_START + STAGES * B::BYTES, EMPTY = FULL + 8 * STAGES;
static_assert(SHARED_BYTES == EMPTY + 8 * STAGES, "SHARED_BYTES: the ring and its barriers");

struct Args {
    TensorMap a, b;
    char* out;
    int64 tiles;
};

// A place in the ring: its number, and the parity that changes with every turn.
struct Place {
    int stage = 0;
    uint32 parity = 0;
    __device__ __forceinline__ void advance() {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

__device__ __forceinline__ void produce(const Args& args, uint32 shared) {
    Place place;
#pragma unroll 1
    for (int t = 0; t < args.tiles; ++t, place.advance()) {
        const uint32 full = shared + FULL + 8 * place.stage;
        mbarrier_wait(shared + EMPTY + 8 * place.stage, place.parity ^ 1);
        A::load(shared + A_START + place.stage * A::BYTES, args.a, full, {0, t * 64 * CONSUMERS, 0, 0, 0}, EVICT_FIRST);
        B::load(shared + B_START + place.stage * B::BYTES, args.b, full, {0, t * 64, 0, 0, 0}, EVICT_FIRST);
    }
}

__device__ __forceinline__ void consume(const Args& args, uint32 shared, int consumer) {
    auto release = [&](int stage) {
        if (lane_index() == 0) mbarrier_arrive(shared + EMPTY + 8 * stage);
    };
    float d[N / 2] = {};
    Place place;
    int before = 0;
#pragma unroll 1
    for (int t = 0; t < args.tiles; ++t, place.advance()) {
        mbarrier_wait(shared + FULL + 8 * place.stage, place.parity);
        const uint64 a = A::rows_descriptor((shared + A_START + place.stage * A::BYTES + consumer * 64 * 128) / 16);
        const uint64 b = B::columns_descriptor((shared + B_START + place.stage * B::BYTES) / 16);
        pin(d);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            Wgmma<N>::template ss<0, 1>(d, a + A::right(step), b + B::down(step), true);
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (t > 0) release(before);
        before = place.stage;
    }
    wgmma_wait_group<0>();
    pin(d);

    const int lane = lane_index(), warp = warp_index() % 4;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        int row = consumer * 64 + 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        store_global<float>(args.out + (row * N + column) * 4, d[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) ring(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    if (thread_index() == 0) {
        prefetch_tensormap(args.a);
        prefetch_tensormap(args.b);
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared + FULL + 8 * stage, 2);  // one arrival with each operand
            mbarrier_init(shared + EMPTY + 8 * stage, 4 * CONSUMERS);
        }
        fence_mbarrier_init();
    }
    sync_threads();
    const int warpgroup = uniform(thread_index() / WARPGROUP);
    if (warpgroup == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (thread_index() == 0) produce(args, shared);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(args, shared, warpgroup - 1);
    }
}

}  // namespace cuflash
