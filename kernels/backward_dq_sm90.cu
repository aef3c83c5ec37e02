// dq on Hopper, where the registers that dk and dv take leave none for it (head_dim above 128).
//
//   s = q k^T, p_ij = exp2(scale_log2 s_ij - row_lse_i), dp = dout v^T, ds_ij = p_ij (dp_ij - row_delta_i)
//   dq = scale ds k                               row_lse, row_delta: of backward_rows.cu
//
// Scores and dp are made a second time, seven products for five; but a block sums dq of its rows by itself, in the
// order of the keys, so that nothing is added in global memory, and nobody waits for a turn.
//
// A block owns TILE_Q rows of a query head and visits the tiles of keys that one of them sees. A producer warpgroup has
// one thread bring q and dout once, then keys and values tile by tile; each of two consumers owns 64 rows. ds is, as
// the accumulator of dout v^T left it, the A operand of the product with the keys: neither it nor dq leaves registers.
//
// A consumer works on two tiles at once: while the tensor cores have the scores of one and then the product of the ds
// before with the keys before, its threads compute exponentials. The products of dp are waited for beside those of the
// other consumer.
//
// What limits speed: the tensor cores, and the port of shared memory as much.
#include "careful_gradients.cuh"
#include "gradients_sm90.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "ptx_sm90.cuh"
#include "tile_sm90.cuh"

namespace cuflash {

constexpr int ROWS = 64;  // of a consumer
constexpr int CONSUMERS = TILE_Q / ROWS;
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);

static_assert(HEAD_DIM == VALUE_DIM, "one size for both: copies fill the columns that are not there with zeros");
static_assert(CONSUMERS == 2 && WARPS == 4 * (1 + CONSUMERS), "WARPS: a producer, and two consumers");
static_assert(TILE_K % 16 == 0, "TILE_K: whole steps of a product");
static_assert(STAGES == 2, "STAGES: of keys; the other one is 1 - stage");

constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

using QueryTile = Panels<ROWS, HEAD_DIM>;  // q or dout of a consumer
using KeyTile = Panels<TILE_K, HEAD_DIM>;  // keys or values

struct Shared {
    char queries[CONSUMERS][QueryTile::BYTES];
    char douts[CONSUMERS][QueryTile::BYTES];
    char keys[STAGES][KeyTile::BYTES];
    char values[KeyTile::BYTES];
    uint64 queries_full[CONSUMERS], douts_full[CONSUMERS];
    uint64 keys_full[STAGES], keys_empty[STAGES];
    uint64 values_full, values_empty;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and barriers take");
constexpr int DOUT_START = OFFSET_OF(Shared, douts);
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int QUERIES_FULL = OFFSET_OF(Shared, queries_full), DOUTS_FULL = OFFSET_OF(Shared, douts_full);
constexpr int KEYS_FULL = OFFSET_OF(Shared, keys_full), KEYS_EMPTY = OFFSET_OF(Shared, keys_empty);
constexpr int VALUES_FULL = OFFSET_OF(Shared, values_full), VALUES_EMPTY = OFFSET_OF(Shared, values_empty);

struct Args {
    const char *q, *k, *v, *dout, *out, *lse, *dlse;
    char *dq, *dk, *dv;
    const char *row_lse, *row_delta;
    char *dq_sum, *turns, *suspects;
    TensorMap q_map, dout_map, k_map, v_map, dq_map;  // axes: column, head, row, and the two merged ones
    Strides q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides, dk_strides, dv_strides;
    int queries, keys, heads, group, head_dim, value_dim;
    int batches1;                // length of the inner merged axis
    int first_shift, end_shift;  // of the mask
    int query_tiles, key_tiles;
    int cyclic, passes_log2, section, items;
    int tile_q, tile_k, columns, parts, clear;
    int dq_wide, dk_wide, dv_wide;  // float32, for sums to come
    int boxes;                      // dq, where it is elements, is written by tensor copies
    float scale, scale_log2;        // scale_log2 = scale * log2 e
    Schedule schedule;              // of tiles of rows
};
template struct ArgsLayout<Args>;

constexpr int COARSE = 4;  // in turns, see backward_args.cuh

__device__ __forceinline__ uint32 barrier(uint32 shared, int start, int index = 0) {
    return shared + start + 8 * index;
}

// What a block works on.
struct Place {
    int row;                   // the first
    int head, batch0, batch1;  // and the linear one:
    int64 batch;
    int first_tile, end_tile;  // of the keys that some row sees

    __device__ __forceinline__ Place(const Args& args, const Mask& mask) {
        int tile, linear;
        args.schedule.locate(static_cast<int>(fresh_block_index()), tile, linear);
        row = (args.schedule.tiles - 1 - tile) * TILE_Q;  // under a causal mask the longest come first
        head = linear % args.heads;
        batch = linear / args.heads;
        batch0 = static_cast<int>(batch) / args.batches1;
        batch1 = static_cast<int>(batch) % args.batches1;
        const int first_key = mask.first_key(row), end_key = mask.end_key(clamp(row + TILE_Q, 0, args.queries) - 1);
        first_tile = first_key / TILE_K;
        end_tile = first_key < end_key ? (end_key - 1) / TILE_K + 1 : first_tile;
    }
};

// The producer: one thread, so that nothing here may shuffle ----------------------------------------------------------

__device__ __forceinline__ void produce(const Args& args, const Place& place, uint32 shared) {
    auto load_rows = [&](int start, const TensorMap& map, int full, int consumer) {
        QueryTile::load(shared + start + consumer * QueryTile::BYTES, map, barrier(shared, full, consumer),
                        {0, place.head, place.row + consumer * ROWS, place.batch0, place.batch1}, EVICT_FIRST);
    };
    auto load_tile = [&](uint32 address, const TensorMap& map, uint32 full, int tile) {
        const Corner corner{0, place.head / args.group, tile * TILE_K, place.batch0, place.batch1};
        KeyTile::load(address, map, full, corner, EVICT_LAST);
    };
#pragma unroll 1
    for (int tile = place.first_tile, n = 0; tile < place.end_tile; ++tile, ++n) {
        const int stage = n % STAGES;
        if (n == 0) load_rows(0, args.q_map, QUERIES_FULL, 0);
        mbarrier_wait(barrier(shared, KEYS_EMPTY, stage), n / STAGES % 2 ^ 1);
        load_tile(shared + KEY_START + stage * KeyTile::BYTES, args.k_map, barrier(shared, KEYS_FULL, stage), tile);
        if (n == 0) {
            load_rows(0, args.q_map, QUERIES_FULL, 1);
            load_rows(DOUT_START, args.dout_map, DOUTS_FULL, 0);
        }
        mbarrier_wait(barrier(shared, VALUES_EMPTY), n % 2 ^ 1);
        load_tile(shared + VALUE_START, args.v_map, barrier(shared, VALUES_FULL), tile);
        if (n == 0) load_rows(DOUT_START, args.dout_map, DOUTS_FULL, 1);
    }
}

// A consumer ---------------------------------------------------------------------------------------------------------

using Scores = float[TILE_K / 2];        // of 64 rows by a tile of keys: scores, their weights, gradients of either
using Operand = uint32[TILE_K / 16][4];  // the same, of elements, as the A operand of a product

// Where dq goes. Numbers of the arguments are read where they are used: registers are short.
struct Target {
    const TensorMap& map;
    char* base;
    const Strides& strides;
    const int &rows, &boxes, &dim;
    const int& wide;  // float32
    const float& factor;
};

struct Consumer {
    const Args& args;
    const Mask& mask;
    const Place& place;
    uint32 shared;
    int index, first_row;  // of the consumer's rows
    bool leader;           // of its warp: arrives for it
    float row_lse[2], row_delta[2];

    __device__ __forceinline__ Consumer(const Args& args, const Mask& mask, const Place& place, uint32 shared,
                                        int index)
        : args(args), mask(mask), place(place), shared(shared), index(index), first_row(place.row + index * ROWS),
          leader(lane_index() == 0) {
        const int64 linear = (place.batch * args.heads + place.head) * args.query_tiles * args.tile_q;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row_of(half);
            const bool inside = i < args.queries;
            row_lse[half] = inside ? load_global<float>(args.row_lse + 4 * (linear + i)) : INFINITE;
            row_delta[half] = inside ? load_global<float>(args.row_delta + 4 * (linear + i)) : 0.0f;
        }
    }
    __device__ __forceinline__ int row_of(int half) const {
        return first_row + warp_index() % 4 * 16 + 8 * half + lane_index() / 4;
    }
    __device__ __forceinline__ void wait(int start, int number, uint32 parity) const {
        mbarrier_wait(barrier(shared, start, number), parity);
    }
    __device__ __forceinline__ void release(int start, int number = 0) const {
        if (leader) mbarrier_arrive(barrier(shared, start, number));
    }

    // Products, in flight when they return. The first is of these rows of q or dout with the rows of a tile.
    __device__ __forceinline__ void multiply_rows(Scores& scores, int start, int tile_start) const {
        const uint32 a = uniform((shared + start + index * QueryTile::BYTES) / 16);
        const uint32 b = uniform((shared + tile_start) / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) {
            Wgmma<TILE_K>::template ss<0, 0>(scores, QueryTile::rows_descriptor(a + QueryTile::right(step)),
                                             KeyTile::rows_descriptor(b + KeyTile::right(step)), step > 0);
        }
        wgmma_commit_group();
    }
    __device__ __forceinline__ void multiply_keys(Gradient& dq, const Operand& dscores, int stage,
                                                  bool accumulate) const {
        const uint32 b = uniform((shared + KEY_START + stage * KeyTile::BYTES) / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
            Wgmma<HEAD_DIM>::template rs<1>(dq, dscores[step], KeyTile::columns_descriptor(b + KeyTile::down(step)),
                                            step > 0 || accumulate);
        }
        wgmma_commit_group();
    }

    // Whether some pair of these rows and a tile has to be tested.
    __device__ __forceinline__ bool tested(int key) const {
        const int last_row = clamp(first_row + ROWS, 0, args.queries) - 1;
        return key < mask.first_key(last_row) || key + TILE_K > mask.end_key(first_row);
    }
    // Ends of the runs of keys that a thread's rows see, in a tile.
    __device__ __forceinline__ void run_of(int (&first)[2], int (&end)[2], int key) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            first[half] = mask.first_key(row_of(half)) - key;
            end[half] = mask.end_key(row_of(half)) - key;
        }
    }

    __device__ __forceinline__ Target target() const {
        return {args.dq_map, args.dq,       args.dq_strides, args.queries,
                args.boxes,  args.head_dim, args.dq_wide,    args.scale};
    }
    __device__ __forceinline__ RowPlace first() const {
        return {place.head, first_row, place.batch0, place.batch1};
    }
    // Writes dq by way of shared memory, where q was, whose 16 rows a warp's own products alone have read; and makes
    // again by the careful path, once all has been written, what is not finite.
    __device__ __forceinline__ void store(const Gradient& dq) const {
        const int lane = lane_index(), warp_row = warp_index() % 4 * 16;
        const uint32 staging = shared + index * QueryTile::BYTES;
        const Lost lost = store_gradient<true>(target(), first(), dq, staging, 1 + index, lane, warp_row,
                                               [this](int half) { return row_of(half); });
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            uint32 spoilt = ballot((half ? lost.rows[1] : lost.rows[0]) && row_of(half) < args.queries);
            while (spoilt != 0) {
                const int quad = find_first_set(spoilt) / 4, i = first_row + warp_row + 8 * half + quad;
                spoilt &= ~(0xfu << (4 * quad));
                careful_dq(args, place.batch, place.head, i, mask.first_key(i), mask.end_key(i));
            }
        }
    }
    // Zeros, for rows that see no key.
    __device__ __forceinline__ void store_nothing() const {
        char* const base = args.dq + args.dq_strides.offset(place.batch0, place.batch1, place.head);
        const int first = first_row + warp_index() % 4 * 16, end = clamp(args.queries, first, first + 16);
#pragma unroll 1
        for (int i = first; i < end; ++i) {
            char* const row = base + i * args.dq_strides.row;
#pragma unroll 1
            for (int d = lane_index(); d < args.head_dim; d += WARP) {
                if (args.dq_wide) {
                    store_global(row + 4 * d, 0.0f);
                } else {
                    store_global(row + 2 * d, Element{0});
                }
            }
        }
    }
};

__device__ __forceinline__ void consume(const Args& args, const Mask& mask, const Place& place, uint32 shared,
                                        int index) {
    const Consumer self(args, mask, place, shared, index);
    const int tiles = place.end_tile - place.first_tile;
    if (tiles == 0) {
        self.store_nothing();
        return;
    }
    const bool coarse = uniform(load_global<int>(args.turns + COARSE)) != 0;
    Scores scores, dscores;
    Operand operand = {};
    Gradient dq;

    self.wait(QUERIES_FULL, index, 0);
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
        const int stage = n % STAGES, key = (place.first_tile + n) * TILE_K;
        self.wait(KEYS_FULL, stage, n / STAGES % 2);
        self.multiply_rows(scores, 0, KEY_START + stage * KeyTile::BYTES);
        // dq of the tile before. Where there is none the product is of zeros, for nothing: registers of products in
        // flight must not depend on a branch.
        self.multiply_keys(dq, operand, n > 0 ? 1 - stage : stage, n > 1);
        const bool tested = coarse || self.tested(key);
        if (n == 0) self.wait(DOUTS_FULL, index, 0);
        self.wait(VALUES_FULL, 0, n % 2);

        wgmma_wait_group<1>();
        pin(scores);
        int first[2], end[2];
        if (tested) {
            self.run_of(first, end, key);
#pragma unroll
            for (int i = 0; i < TILE_K / 2; ++i) {
                const int column = column_of(lane_index(), i), half = half_of(i);
                const float exponent = fused_multiply_add(scores[i], args.scale_log2, -self.row_lse[half]);
                const bool shown = column >= first[half] && column < end[half];
                // A weight is at most 1.
                scores[i] = ex2_approx(!shown ? -INFINITE : exponent > 0.0f ? 0.0f : exponent);
            }
        } else {
#pragma unroll
            for (int i = 0; i < TILE_K / 2; ++i) {
                scores[i] = ex2_approx(fused_multiply_add(scores[i], args.scale_log2, -self.row_lse[half_of(i)]));
            }
        }
        wgmma_wait_group<0>();
        pin(dq);
        if (n > 0) self.release(KEYS_EMPTY, 1 - stage);
        self.multiply_rows(dscores, DOUT_START, VALUE_START);
        wgmma_wait_group<0>();
        pin(dscores);
        self.release(VALUES_EMPTY);
#pragma unroll
        for (int i = 0; i < TILE_K / 2; ++i) dscores[i] = scores[i] * (dscores[i] - self.row_delta[half_of(i)]);
        if (tested) {  // a weight of 0 is not enough where dout, v or delta are not finite
#pragma unroll
            for (int i = 0; i < TILE_K / 2; ++i) {
                const int column = column_of(lane_index(), i), half = half_of(i);
                dscores[i] = column >= first[half] && column < end[half] ? dscores[i] : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < TILE_K / 2; i += 2) {
            operand[i / 8][i / 2 % 4] = cvt_pair(Element{}, dscores[i], dscores[i + 1]);
        }
    }
    self.multiply_keys(dq, operand, (tiles - 1) % STAGES, tiles > 1);
    wgmma_wait_group<0>();
    pin(dq);
    self.store(dq);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_backward_dq_sm90(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    if (thread_index() == 0) {
        prefetch_tensormap(args.q_map);
        prefetch_tensormap(args.k_map);
        prefetch_tensormap(args.dout_map);
        prefetch_tensormap(args.v_map);
        for (int n = 0; n < CONSUMERS; ++n) {
            mbarrier_init(barrier(shared, QUERIES_FULL, n), 1);
            mbarrier_init(barrier(shared, DOUTS_FULL, n), 1);
        }
        for (int n = 0; n < STAGES; ++n) {
            mbarrier_init(barrier(shared, KEYS_FULL, n), 1);
            mbarrier_init(barrier(shared, KEYS_EMPTY, n), 4 * CONSUMERS);
        }
        mbarrier_init(barrier(shared, VALUES_FULL), 1);
        mbarrier_init(barrier(shared, VALUES_EMPTY), 4 * CONSUMERS);
        fence_mbarrier_init();
    }
    sync_threads();
    const Place place(args, mask);
    const int warpgroup = uniform(thread_index() / WARPGROUP);
    if (warpgroup == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (thread_index() == 0) produce(args, place, shared);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(args, mask, place, shared, warpgroup - 1);
    }
}

}  // namespace cuflash
