// out (64 x VALUE_DIM) = sum over tiles of round(q k^T / 2) v, as attention without softmax would take it.
//
// The first warpgroup takes the products, a thread of the warp after it brings the tiles. While the scores of one
// tile are taken those of the one before, rounded, are multiplied with its values: two groups of products in flight.
// The rounded scores stay in registers as the next product's A operand or, IN_SHARED, pass through shared memory.
#include "tile_sm90.cuh"

namespace cuflash {

constexpr int THREADS = WARPGROUP + WARP;
using Queries = Panels<64, HEAD_DIM>;
using Keys = Panels<TILE_K, HEAD_DIM>;
using Values = Panels<TILE_K, VALUE_DIM>;
using Weights = Panels<64, TILE_K>;

constexpr int STAGES = 2;
constexpr int QUERIES = 0, KEYS = QUERIES + Queries::BYTES, VALUES = KEYS + STAGES * Keys::BYTES;
constexpr int WEIGHTS = VALUES + STAGES * Values::BYTES;
constexpr int QUERIES_FULL = WEIGHTS + (IN_SHARED ? Weights::BYTES : 0);
constexpr int KEYS_FULL = QUERIES_FULL + 8, VALUES_FULL = KEYS_FULL + 8 * STAGES;
constexpr int KEYS_EMPTY = VALUES_FULL + 8 * STAGES, VALUES_EMPTY = KEYS_EMPTY + 8 * STAGES;
static_assert(SHARED_BYTES == VALUES_EMPTY + 8 * STAGES, "SHARED_BYTES: the tiles and their barriers");

struct Args {
    TensorMap q, k, v;
    char* out;
    int64 tiles;
};

__device__ __forceinline__ void produce(const Args& args, uint32 shared) {
    Queries::load(shared + QUERIES, args.q, shared + QUERIES_FULL, {0, 0, 0, 0, 0}, EVICT_FIRST);
#pragma unroll 1
    for (int t = 0; t < args.tiles; ++t) {
        const int stage = t % STAGES;
        const uint32 free = t / STAGES % 2 ^ 1;
        mbarrier_wait(shared + KEYS_EMPTY + 8 * stage, free);
        Keys::load(shared + KEYS + stage * Keys::BYTES, args.k, shared + KEYS_FULL + 8 * stage, {0, t * TILE_K, 0, 0, 0}, EVICT_LAST);
        mbarrier_wait(shared + VALUES_EMPTY + 8 * stage, free);
        Values::load(shared + VALUES + stage * Values::BYTES, args.v, shared + VALUES_FULL + 8 * stage, {0, t * TILE_K, 0, 0, 0},
                     EVICT_LAST);
    }
}

__device__ __forceinline__ void consume(const Args& args, uint32 shared) {
    float scores[TILE_K / 2], out[VALUE_DIM / 2];
    uint32 weights[TILE_K / 16][4];
    const int lane = lane_index(), warp = warp_index();
    const uint64 q = Queries::rows_descriptor((shared + QUERIES) / 16);

    auto multiply_keys = [&](int stage) {
        const uint64 k = Keys::rows_descriptor((shared + KEYS + stage * Keys::BYTES) / 16);
        pin(scores);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) {
            Wgmma<TILE_K>::template ss<0, 0>(scores, q + Queries::right(step), k + Keys::right(step), step > 0);
        }
        wgmma_commit_group();
    };
    auto multiply_values = [&](int stage, bool accumulate) {
        const uint64 v = Values::columns_descriptor((shared + VALUES + stage * Values::BYTES) / 16);
        const uint64 p = Weights::rows_descriptor((shared + WEIGHTS) / 16);
        pin(out);
        pin(weights);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
            if constexpr (IN_SHARED) {
                Wgmma<VALUE_DIM>::template ss<0, 1>(out, p + Weights::right(step), v + Values::down(step), accumulate || step > 0);
            } else {
                Wgmma<VALUE_DIM>::template rs<1>(out, weights[step], v + Values::down(step), accumulate || step > 0);
            }
        }
        wgmma_commit_group();
    };
    auto release = [&](uint32 barrier) {
        if (lane == 0) mbarrier_arrive(barrier);
    };
    auto halve = [&]() {
#pragma unroll
        for (int i = 0; i < TILE_K / 2; ++i) scores[i] *= 0.5f;
    };
    auto round = [&]() {
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                weights[step][i] = cvt_pair(Element{}, scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
            }
            if constexpr (IN_SHARED) {
                stmatrix_x4(shared + WEIGHTS + Weights::offset(16 * warp + lane % 16, 2 * step + lane / 16), weights[step]);
            }
        }
        if constexpr (IN_SHARED) {
            fence_proxy_async();
            bar_sync(1, WARPGROUP);
        }
    };

    mbarrier_wait(shared + QUERIES_FULL, 0);
    mbarrier_wait(shared + KEYS_FULL, 0);
    multiply_keys(0);
    wgmma_wait_group<0>();
    pin(scores);
    release(shared + KEYS_EMPTY);
    halve();
    round();
    int t = 1;
#pragma unroll 1
    for (; t < args.tiles; ++t) {
        const int stage = t % STAGES, before = (t - 1) % STAGES;
        mbarrier_wait(shared + KEYS_FULL + 8 * stage, t / STAGES % 2);
        multiply_keys(stage);
        mbarrier_wait(shared + VALUES_FULL + 8 * before, (t - 1) / STAGES % 2);
        multiply_values(before, t > 1);
        wgmma_wait_group<1>();
        pin(scores);
        release(shared + KEYS_EMPTY + 8 * stage);
        halve();
        wgmma_wait_group<0>();
        pin(out);
        pin(weights);
        release(shared + VALUES_EMPTY + 8 * before);
        round();
    }
    mbarrier_wait(shared + VALUES_FULL + 8 * ((t - 1) % STAGES), (t - 1) / STAGES % 2);
    multiply_values((t - 1) % STAGES, t > 1);
    wgmma_wait_group<0>();
    pin(out);

#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; ++i) {
        int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        store_global<float>(args.out + (row * VALUE_DIM + column) * 4, out[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) chain(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    if (thread_index() == 0) {
        mbarrier_init(shared + QUERIES_FULL, 1);
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared + KEYS_FULL + 8 * stage, 1);
            mbarrier_init(shared + VALUES_FULL + 8 * stage, 1);
            mbarrier_init(shared + KEYS_EMPTY + 8 * stage, 4);  // one arrival from each warp
            mbarrier_init(shared + VALUES_EMPTY + 8 * stage, 4);
        }
        fence_mbarrier_init();
    }
    sync_threads();
    if (uniform(warp_index()) < 4) {
        consume(args, shared);
    } else if (lane_index() == 0) {
        produce(args, shared);
    }
}

}  // namespace cuflash
