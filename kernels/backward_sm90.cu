// Gradients of attention on Hopper: dk, dv, and the float32 sums that backward_finish.cu makes dq of.
//
//   s = q k^T, p_ij = exp2(scale_log2 s_ij - row_lse_i), dp = dout v^T, ds_ij = p_ij (dp_ij - row_delta_i)
//   dv = p^T dout, dk = scale ds^T q, dq_sum = ds k       row_lse, row_delta: of backward_rows.cu
//
// Blocks stay, one a multiprocessor, and draw items: a tile of keys of one key head, which they bring once and visit
// with every tile of queries that sees some of it (visits.cuh). A block has a producer warpgroup, of which three threads
// work, and two consumers, of 64 keys each.
//
// Everything a consumer computes has its keys as rows. The accumulators of k q^T and v dout^T are then, as weights and
// their gradients ds, the A operands of the products with dout and q that dv and dk sum: they never leave registers, nor
// do dv and dk. For dq alone, a sum over keys of both consumers, ds goes to shared memory, transposed; a consumer makes
// one part of the product ds k: 64 of the tile's columns or, where TILE_Q is 128, of its rows. The part goes on, by way
// of shared memory, to a thread of the producer warpgroup, which waits for the block's turn and has it added in global
// memory. Turns make dq reproducible and need no zeros: the first stores.
//
// The consumers take turns too. While one has its exponentials to compute, the tensor cores have the products of the
// other, and a token sees to it: who has it issues the products of a visit, those of dv and dk first, up to dp of the
// next visit, and gives it away. Products of dv and dk stay in flight from a visit to the next; dq comes two visits
// late, when both consumers' ds have long been written.
//
// The copies of a tile of queries end a phase of its `full` barrier, the warps that have read it one of its `empty`
// barrier, and so for all that lies in shared memory. Visits are numbered through all items of the block, and so are the
// items: stage and parity follow from the number.
//
// What limits speed: the tensor cores and the ports of shared memory, and with either the power they take.
#include "mask.cuh"
#include "place.cuh"
#include "ptx_sm90.cuh"
#include "tile_sm90.cuh"
#include "visits.cuh"

namespace cuflash {

constexpr int ROWS = 64;  // keys of a consumer
constexpr int CONSUMERS = TILE_K / ROWS;
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);

static_assert(HEAD_DIM == VALUE_DIM, "one size for both: copies fill the columns that are not there with zeros");
static_assert(CONSUMERS == 2 && WARPS == 4 * (1 + CONSUMERS), "WARPS: a producer, and two consumers of 64 keys");
static_assert(TILE_Q * HEAD_DIM == 128 * 64, "TILE_Q: a consumer's part of dq is 64 x 64");
static_assert(STAGES == 2, "STAGES: the other one is 1 - stage");

constexpr bool PARTS_ARE_ROWS = TILE_Q == 128;  // of a tile of dq, else columns
constexpr int PART_COLUMNS = 64;
constexpr int PART_BYTES = ROWS * PART_COLUMNS * 4;
constexpr int LAG = 2;  // visits that dq comes later; its buffers are the stages of ds
constexpr bool TOKEN_EARLY = HEAD_DIM == 64;  // the token goes on before dp, whose product is short

// A multiprocessor's 64 K registers are dealt out 168 a thread. The producer gives away what the consumers need.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

using QueryTile = Panels<TILE_Q, HEAD_DIM>;  // q and dout
using KeyTile = Panels<TILE_K, HEAD_DIM>;    // k and v
using ScoreTile = Panels<TILE_Q, TILE_K>;    // ds: a panel is a consumer's
using GradTile = Panels<ROWS, HEAD_DIM>;     // a consumer's dk or dv, as elements
constexpr int ROW_BYTES = TILE_Q * 4;        // row_lse or row_delta

// A visit, for those that follow the producer.
struct alignas(16) Step {
    int place;   // of the tile of queries, among those of all heads
    int turn;    // blocks whose dq comes first
    int row;     // the tile's first
    int tested;  // by bit: consumers whose pairs need a test
};
constexpr int STEPS = 8;  // the producer is never so many ahead of the last to read one
constexpr int NONE = -1;  // visits of what comes after the last item

// Barriers of the asynchronous kind: see the head of this file.
struct Shared {
    char queries[STAGES][QueryTile::BYTES];
    char douts[STAGES][QueryTile::BYTES];
    char keys[KeyTile::BYTES];
    char values[KeyTile::BYTES];
    char dscores[STAGES][ScoreTile::BYTES];
    char parts[CONSUMERS][PART_BYTES];
    char grads[CONSUMERS][GradTile::BYTES];
    float row_lse[STAGES][TILE_Q];
    float row_delta[STAGES][TILE_Q];
    Step steps[STEPS];
    Item items[2];
    uint64 queries_full[STAGES], queries_empty[STAGES];  // q and row_lse
    uint64 douts_full[STAGES], douts_empty[STAGES];      // dout and row_delta
    uint64 keys_full, keys_empty, values_full, values_empty;
    uint64 dscores_full[STAGES], dscores_empty[STAGES];  // empty: once a visit, so full for the first as well
    uint64 parts_full[CONSUMERS], parts_empty[CONSUMERS];
    uint64 items_full[2], items_empty[2];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and barriers take");
constexpr int QUERY_START = OFFSET_OF(Shared, queries), DOUT_START = OFFSET_OF(Shared, douts);
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int DSCORE_START = OFFSET_OF(Shared, dscores), PART_START = OFFSET_OF(Shared, parts);
constexpr int GRAD_START = OFFSET_OF(Shared, grads), STEP_START = OFFSET_OF(Shared, steps);
constexpr int ROW_LSE_START = OFFSET_OF(Shared, row_lse), ROW_DELTA_START = OFFSET_OF(Shared, row_delta);
constexpr int ITEM_START = OFFSET_OF(Shared, items), ITEM_BYTES = sizeof(Item);
constexpr int QUERIES_FULL = OFFSET_OF(Shared, queries_full), QUERIES_EMPTY = OFFSET_OF(Shared, queries_empty);
constexpr int DOUTS_FULL = OFFSET_OF(Shared, douts_full), DOUTS_EMPTY = OFFSET_OF(Shared, douts_empty);
constexpr int KEYS_FULL = OFFSET_OF(Shared, keys_full), KEYS_EMPTY = OFFSET_OF(Shared, keys_empty);
constexpr int VALUES_FULL = OFFSET_OF(Shared, values_full), VALUES_EMPTY = OFFSET_OF(Shared, values_empty);
constexpr int DSCORES_FULL = OFFSET_OF(Shared, dscores_full), DSCORES_EMPTY = OFFSET_OF(Shared, dscores_empty);
constexpr int PARTS_FULL = OFFSET_OF(Shared, parts_full), PARTS_EMPTY = OFFSET_OF(Shared, parts_empty);
constexpr int ITEMS_FULL = OFFSET_OF(Shared, items_full), ITEMS_EMPTY = OFFSET_OF(Shared, items_empty);

// Barriers by name, of consumer 0 and, after it, consumer 1.
constexpr int TOKEN = 1;    // has come
constexpr int STAGING = 3;  // its buffer in `grads` is free, or written

struct Args {
    const char *q, *k, *v, *dout, *out, *lse, *dlse;
    char *dq, *dk, *dv;
    const char *row_lse, *row_delta;
    char *dq_sum, *turns, *suspects;
    TensorMap q_map, dout_map, k_map, v_map, dk_map, dv_map;  // axes: column, head, row, and the two merged ones
    Strides q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides, dk_strides, dv_strides;
    int queries, keys, heads, group, head_dim, value_dim;
    int batches1;                // length of the inner merged axis
    int first_shift, end_shift;  // of the mask
    int query_tiles, key_tiles;
    int cyclic, chunk, items;    // of the order of visits
    int tile_q, tile_k, columns, parts, clear;
    int dq_wide, dk_wide, dv_wide;  // float32, for sums to come
    int boxes;                   // dk and dv, where they are elements, are written by tensor copies
    float scale, scale_log2;     // scale_log2 = scale * log2 e
};
template struct ArgsLayout<Args>;

constexpr int COARSE = 4;  // offset in `turns`: whether some row_lse is too large to be close
constexpr int TURNS = 32 * 4;

__device__ __forceinline__ uint32 barrier(uint32 shared, int start, int index = 0) { return shared + start + 8 * index; }
// Of the numbered use of a ring of two.
__device__ __forceinline__ int stage_of(uint32 number) { return number % 2; }
__device__ __forceinline__ uint32 parity_of(uint32 number) { return number / 2 % 2; }

__device__ __forceinline__ uint32 item_at(uint32 shared, uint32 number) {
    return shared + ITEM_START + stage_of(number) * ITEM_BYTES;
}
__device__ __forceinline__ uint32 step_at(uint32 shared, uint32 visit) {
    return shared + STEP_START + visit % STEPS * static_cast<uint32>(sizeof(Step));
}

// The producer -------------------------------------------------------------------------------------------------------
//
// Of its warpgroup single threads work: nothing here may shuffle.

// The next item, early, so that it is brought while this one ends. A block must not draw two that wait for each other,
// so where tiles of keys go round it draws no second one of a chunk: there are blocks for all of them.
__device__ __forceinline__ int draw(const Args& args, int index) {
    if (args.cyclic) {
        const int tile = index % args.key_tiles, end = (tile / args.chunk + 1) * args.chunk;
        const int left = (end < args.key_tiles ? end : args.key_tiles) - tile;
        while (load_acquire(args.turns) + grid_size() < index + left) {
        }
    }
    return atomic_add(args.turns, 1) + grid_size();
}

// Which consumers have pairs to test.
__device__ __forceinline__ int tested(const Args& args, const Mask& mask, int row, int key) {
    const int first_key = mask.first_key(clamp(row + TILE_Q, 0, args.queries) - 1), end_key = mask.end_key(row);
    int bits = 0;
#pragma unroll
    for (int consumer = 0; consumer < CONSUMERS; ++consumer, key += ROWS) {
        if (key < first_key || key + ROWS > end_key) bits |= 1 << consumer;
    }
    return bits;
}

__device__ __forceinline__ void produce(const Args& args, const Mask& mask, uint32 shared) {
    const bool coarse = load_global<int>(args.turns + COARSE) != 0;
    uint32 visit = 0, brought = 0;  // brought: items with visits
    int index = static_cast<int>(fresh_block_index());
#pragma unroll 1
    for (uint32 number = 0;; ++number) {
        const uint32 item_shared = item_at(shared, number);
        mbarrier_wait(barrier(shared, ITEMS_EMPTY, stage_of(number)), parity_of(number) ^ 1);
        const bool last = index >= args.items;
        if (last) {
            store_shared(item_shared + OFFSET_OF(Item, visits), NONE);
        } else {
            store_shared(item_shared, locate_item(args, mask, index));
        }
        mbarrier_arrive(barrier(shared, ITEMS_FULL, stage_of(number)));
        if (last) break;

        const int visits = load_shared<int>(item_shared + OFFSET_OF(Item, visits));
        Visit place{load_shared<int>(item_shared + OFFSET_OF(Item, start_head)),
                    load_shared<int>(item_shared + OFFSET_OF(Item, start))};
#pragma unroll 1
        for (int n = 0; n < visits; ++n, ++visit) {
            const Item item = load_shared<Item>(item_shared);  // again: registers are few
            const int stage = stage_of(visit), row = place.tile * TILE_Q, head = item.key_head * args.group + place.head;
            Step step;
            step.place = static_cast<int>(item.batch * args.heads + head) * args.query_tiles + place.tile;
            step.turn = turn_of(args, mask, item, place);
            step.row = row;
            step.tested = coarse ? (1 << CONSUMERS) - 1 : tested(args, mask, row, item.key_tile * TILE_K);
            const Corner query{0, head, row, item.batch0, item.batch1};
            const Corner key{0, item.key_head, item.key_tile * TILE_K, item.batch0, item.batch1};

            mbarrier_wait(barrier(shared, QUERIES_EMPTY, stage), parity_of(visit) ^ 1);
            store_shared(step_at(shared, visit), step);
            QueryTile::load(shared + QUERY_START + stage * QueryTile::BYTES, args.q_map,
                            barrier(shared, QUERIES_FULL, stage), query, EVICT_LAST);
            mbarrier_arrive_expect_tx(barrier(shared, QUERIES_FULL, stage), ROW_BYTES);
            cp_async_bulk_load(shared + ROW_LSE_START + stage * ROW_BYTES,
                               args.row_lse + static_cast<int64>(step.place) * ROW_BYTES, ROW_BYTES,
                               barrier(shared, QUERIES_FULL, stage));
            if (n == 0) {
                mbarrier_wait(barrier(shared, VALUES_EMPTY), brought % 2 ^ 1);
                KeyTile::load(shared + VALUE_START, args.v_map, barrier(shared, VALUES_FULL), key, EVICT_FIRST);
            }
            mbarrier_wait(barrier(shared, DOUTS_EMPTY, stage), parity_of(visit) ^ 1);
            QueryTile::load(shared + DOUT_START + stage * QueryTile::BYTES, args.dout_map,
                            barrier(shared, DOUTS_FULL, stage), query, EVICT_LAST);
            mbarrier_arrive_expect_tx(barrier(shared, DOUTS_FULL, stage), ROW_BYTES);
            cp_async_bulk_load(shared + ROW_DELTA_START + stage * ROW_BYTES,
                               args.row_delta + static_cast<int64>(step.place) * ROW_BYTES, ROW_BYTES,
                               barrier(shared, DOUTS_FULL, stage));
            if (n == 0) {  // the keys last, since those before are the last to be free
                mbarrier_wait(barrier(shared, KEYS_EMPTY), brought % 2 ^ 1);
                KeyTile::load(shared + KEY_START, args.k_map, barrier(shared, KEYS_FULL), key, EVICT_FIRST);
                ++brought;
            }
            place.advance(item, args.group);
        }
        index = draw(args, index);
    }
}

// Sends a consumer's parts of dq to global memory, each in its turn.
__device__ __forceinline__ void send(const Args& args, uint32 shared, int consumer) {
    const uint32 part = shared + PART_START + consumer * PART_BYTES;
    uint32 visit = 0;
#pragma unroll 1
    for (uint32 number = 0;; ++number) {
        mbarrier_wait(barrier(shared, ITEMS_FULL, stage_of(number)), parity_of(number));
        const int visits = load_shared<int>(item_at(shared, number) + OFFSET_OF(Item, visits));
        mbarrier_arrive(barrier(shared, ITEMS_EMPTY, stage_of(number)));
        if (visits == NONE) break;
#pragma unroll 1
        for (int n = 0; n < visits; ++n, ++visit) {
            mbarrier_wait(barrier(shared, PARTS_FULL, consumer), visit % 2);
            const Step step = load_shared<Step>(step_at(shared, visit));
            const int64 place = static_cast<int64>(step.place) * CONSUMERS + consumer;
            char* const counter = args.turns + TURNS + place * 4;
            char* const sum = args.dq_sum + place * PART_BYTES;
            if (ORDERED) {
                while (load_acquire(counter) != step.turn) {
                }
                fence_proxy_async_global();
            }
            if (ORDERED && step.turn == 0) {
                cp_async_bulk_store(sum, part, PART_BYTES);
            } else {
                cp_reduce_async_bulk_add(sum, part, PART_BYTES);
            }
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_group_read<0>();
            mbarrier_arrive(barrier(shared, PARTS_EMPTY, consumer));
            if (ORDERED) {
                cp_async_bulk_wait_group<0>();
                fence_proxy_async_global();
                add_release(counter, 1);
            }
        }
    }
    cp_async_bulk_wait_group<0>();
}

// A consumer ---------------------------------------------------------------------------------------------------------

using Scores = float[TILE_Q / 2];            // of 64 keys by a tile of queries; their weights; gradients of either
using Operand = uint32[TILE_Q / 16][4];      // the same, of elements
using Gradient = float[HEAD_DIM / 2];        // dk or dv of 64 keys
using Part = float[PART_COLUMNS / 2];        // of dq

struct alignas(8) Pair {
    float values[2];
};
struct alignas(16) Quad {
    float values[4];
};

// Of the numbers a tile of queries has, one a row, those of a thread's columns. Registers hold the first EARLY.
struct Columns {
    static constexpr int EARLY = 8;
    uint32 address;
    Pair early[EARLY];

    __device__ __forceinline__ void begin(uint32 start) {
        address = start + lane_index() % 4 * static_cast<uint32>(sizeof(Pair));
#pragma unroll
        for (int block = 0; block < EARLY; ++block) early[block] = load_shared<Pair>(address + 32 * block);
    }
    __device__ __forceinline__ Pair of_block(int block) const {
        return block < EARLY ? early[block % EARLY] : load_shared<Pair>(address + 32 * block);
    }
};

// Which of a thread's pairs the mask shows: of either key, columns from the first on and before the end.
struct Shown {
    int first[2], end[2];

    __device__ __forceinline__ Shown(const Args& args, const Mask& mask, int consumer_key, int row) {
        const int lane = lane_index(), first_column = row + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = consumer_key + warp_index() % 4 * 16 + 8 * half + lane / 4;
            first[half] = mask.first_query(key, args.queries) - first_column;
            end[half] = key < args.keys ? mask.end_query(key, args.queries) - first_column : 0;
        }
    }
    __device__ __forceinline__ bool operator()(int i) const {  // an element of an accumulator
        const int column = 8 * (i / 4) + i % 2, half = i / 2 % 2;
        return column >= first[half] && column < end[half];
    }
};

struct Target {
    const TensorMap& map;
    char* base;
    const Strides& strides;
    int dim;
    bool wide;  // float32
    float factor;
};

// Writes a consumer's dk or dv. Returns whether a number of this thread's that counts is not finite.
__device__ __forceinline__ bool store_gradient(const Args& args, const Item& item, uint32 staging, int consumer,
                                               const Gradient& sums, const Target& target) {
    const int lane = lane_index(), warp_row = warp_index() % 4 * 16;
    const int first_key = item.key_tile * TILE_K + consumer * ROWS;
    char* const base = target.base + target.strides.offset(item.batch0, item.batch1, item.key_head);
    bool lost[2];
    if (target.wide) {
        float zeros[2] = {};  // sums of 0 times a number: NaN where one is not finite
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) {
            const int half = i / 2 % 2, column = 8 * (i / 4) + lane % 4 * 2 + i % 2;
            const int key = first_key + warp_row + 8 * half + lane / 4;
            const float x = sums[i] * target.factor;
            zeros[half] += 0.0f * x;
            if (key < args.keys && column < target.dim) store_global(base + key * target.strides.row + 4 * column, x);
        }
        lost[0] = !is_finite(zeros[0]), lost[1] = !is_finite(zeros[1]);
    } else {
        const bool first = thread_index() % WARPGROUP == 0;  // of the consumer
        if (args.boxes) {
            if (first) cp_async_bulk_wait_group_read<0>();  // what lay there has left
            bar_sync(STAGING + consumer, WARPGROUP);
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
        lost[0] = (zeros[0] & 0x7fff7fff) != 0, lost[1] = (zeros[1] & 0x7fff7fff) != 0;
        if (args.boxes) {
            fence_proxy_async();
            bar_sync(STAGING + consumer, WARPGROUP);
            if (first) {
                GradTile::store(target.map, staging, {0, item.key_head, first_key, item.batch0, item.batch1});
                cp_async_bulk_commit_group();
            }
            sync_warp();
        } else {
            sync_warp();
#pragma unroll 1
            for (int n = lane; n < 16 * HEAD_DIM / 8; n += WARP) {
                const int row = warp_row + n % 16, chunk = n / 16;
                if (first_key + row < args.keys && 8 * chunk < target.dim) {
                    store_global(base + (first_key + row) * target.strides.row + 16 * chunk,
                                 load_shared<Vector16>(staging + GradTile::offset(row, chunk)));
                }
            }
            sync_warp();
        }
    }
    const int key = first_key + warp_row + lane / 4;
    return (lost[0] && key < args.keys) || (lost[1] && key + 8 < args.keys);
}

// Zeros, for keys that no row sees.
__device__ __forceinline__ void store_nothing(const Args& args, const Item& item, int consumer, const Target& target) {
    char* const base = target.base + target.strides.offset(item.batch0, item.batch1, item.key_head);
    const int first_key = item.key_tile * TILE_K + consumer * ROWS + warp_index() % 4 * 16;
    const int end_key = clamp(args.keys, first_key, first_key + 16);
#pragma unroll 1
    for (int key = first_key; key < end_key; ++key) {
#pragma unroll 1
        for (int d = lane_index(); d < target.dim; d += WARP) {
            char* const row = base + key * target.strides.row;
            if (target.wide) {
                store_global(row + 4 * d, 0.0f);
            } else {
                store_global(row + 2 * d, Element{0});
            }
        }
    }
}

__device__ __forceinline__ void consume(const Args& args, const Mask& mask, uint32 shared, int consumer) {
    const bool leader = lane_index() == 0;  // arrives for its warp
    const Target dk_target{args.dk_map, args.dk, args.dk_strides, args.head_dim, args.dk_wide != 0, args.scale};
    const Target dv_target{args.dv_map, args.dv, args.dv_strides, args.value_dim, args.dv_wide != 0, 1.0f};
    Scores scores, dweights;
    Operand weights, dscores;
    Gradient dk, dv;
    Part dq;

    // Products in flight when they return. Tiles in units of 16 bytes, as descriptors have them.
    const uint32 consumer_rows = consumer * ROWS * 128 / 16;  // where the consumer's rows of a panel begin
    auto multiply_queries = [&](int stage) {  // scores = k q^T
        const uint32 keys = uniform((shared + KEY_START) / 16 + consumer_rows);
        const uint32 queries = uniform((shared + QUERY_START + stage * QueryTile::BYTES) / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) {
            Wgmma<TILE_Q>::template ss<0, 0>(scores, KeyTile::rows_descriptor(keys + KeyTile::right(step)),
                                             QueryTile::rows_descriptor(queries + QueryTile::right(step)), step > 0);
        }
        wgmma_commit_group();
    };
    auto multiply_douts = [&](int stage) {  // dweights = v dout^T
        const uint32 values = uniform((shared + VALUE_START) / 16 + consumer_rows);
        const uint32 douts = uniform((shared + DOUT_START + stage * QueryTile::BYTES) / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) {
            Wgmma<TILE_Q>::template ss<0, 0>(dweights, KeyTile::rows_descriptor(values + KeyTile::right(step)),
                                             QueryTile::rows_descriptor(douts + QueryTile::right(step)), step > 0);
        }
        wgmma_commit_group();
    };
    auto multiply_weights = [&](int stage, bool accumulate) {  // dv += weights dout, dk += dscores q
        const uint32 douts = uniform((shared + DOUT_START + stage * QueryTile::BYTES) / 16);
        const uint32 queries = uniform((shared + QUERY_START + stage * QueryTile::BYTES) / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < TILE_Q / 16; ++step) {
            Wgmma<HEAD_DIM>::template rs<1>(dv, weights[step],
                                            QueryTile::columns_descriptor(douts + QueryTile::down(step)),
                                            step > 0 || accumulate);
        }
#pragma unroll
        for (int step = 0; step < TILE_Q / 16; ++step) {
            Wgmma<HEAD_DIM>::template rs<1>(dk, dscores[step],
                                            QueryTile::columns_descriptor(queries + QueryTile::down(step)),
                                            step > 0 || accumulate);
        }
        wgmma_commit_group();
    };
    auto multiply_keys = [&](int stage) {  // dq = dscores k: this consumer's part, of both consumers' keys
        const uint32 rows = PARTS_ARE_ROWS ? consumer_rows : 0;
        const uint32 panel = PARTS_ARE_ROWS ? 0 : consumer * (KeyTile::PANEL_BYTES / 16);
        const uint32 tile = uniform((shared + DSCORE_START + stage * ScoreTile::BYTES) / 16 + rows);
        const uint32 keys = uniform((shared + KEY_START) / 16 + panel);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
            Wgmma<PART_COLUMNS>::template ss<0, 1>(dq, ScoreTile::rows_descriptor(tile + ScoreTile::right(step)),
                                                   KeyTile::columns_descriptor(keys + KeyTile::down(step)), step > 0);
        }
        wgmma_commit_group();
    };

    auto wait = [&](int start, int index, uint32 parity) { mbarrier_wait(barrier(shared, start, index), parity); };
    auto release = [&](int start, int index) {
        if (leader) mbarrier_arrive(barrier(shared, start, index));
    };
    auto give_token = [&] { bar_arrive(TOKEN + 1 - consumer, 2 * WARPGROUP); };
    auto take_token = [&] { bar_sync(TOKEN + consumer, 2 * WARPGROUP); };
    // Shows whoever sends them the numbers of dq, as they lie in global memory.
    auto store_part = [&](uint32 visit) {
        const uint32 part = shared + PART_START + consumer * PART_BYTES + thread_index() % WARPGROUP * 16;
        wait(PARTS_EMPTY, consumer, visit % 2 ^ 1);
#pragma unroll
        for (int block = 0; block < PART_COLUMNS / 8; ++block) {
            const float* x = dq + 4 * block;
            store_shared(part + block * WARPGROUP * 16, Quad{{x[0], x[1], x[2], x[3]}});
        }
        fence_proxy_async();
        sync_warp();
        release(PARTS_FULL, consumer);
    };
    auto store_dscores = [&](int stage) {
        const int lane = lane_index(), row = lane % 8 + lane / 16 * 8;
        const int chunk = 8 * consumer + 2 * (warp_index() % 4) + lane / 8 % 2;
        const uint32 address = shared + DSCORE_START + stage * ScoreTile::BYTES + ScoreTile::offset(row, chunk);
#pragma unroll
        for (int step = 0; step < TILE_Q / 16; ++step) stmatrix_x4_trans(address + step * 16 * 128, dscores[step]);
        fence_proxy_async();
        sync_warp();
        release(DSCORES_FULL, stage);
    };

    uint32 visit = 0, brought = 0;
#pragma unroll 1
    for (uint32 number = 0;; ++number) {
        wait(ITEMS_FULL, stage_of(number), parity_of(number));
        const uint32 item_shared = item_at(shared, number);
        const int visits = uniform(load_shared<int>(item_shared + OFFSET_OF(Item, visits)));
        if (visits == NONE) break;
        if (visits == 0) {
            const Item item = load_shared<Item>(item_shared);
            store_nothing(args, item, consumer, dk_target);
            store_nothing(args, item, consumer, dv_target);
            sync_warp();
            release(ITEMS_EMPTY, stage_of(number));
            continue;
        }

        if (consumer == 1) give_token();
        wait(KEYS_FULL, 0, brought % 2);
#pragma unroll 1
        for (int n = 0; n < visits; ++n, ++visit) {
            const int stage = stage_of(visit);
            const uint32 parity = parity_of(visit);
            // dq of the visit LAG before. Where there is none the product is of what lies there, for nothing:
            // registers of products in flight must not depend on a branch.
            if (n >= LAG) wait(DSCORES_FULL, stage, parity ^ 1);
            multiply_keys(stage);
            wait(QUERIES_FULL, stage, parity);
            wgmma_wait_group<1>();  // for dv and dk of the visit before
            pin(dv);
            pin(dk);
            if (n > 0) {
                release(DOUTS_EMPTY, 1 - stage);
                release(QUERIES_EMPTY, 1 - stage);
            }
            multiply_queries(stage);
            if (TOKEN_EARLY && n > 0) give_token();
            wgmma_wait_group<1>();
            pin(dq);
            release(DSCORES_EMPTY, stage);
            if (n >= LAG) store_part(visit - LAG);

            if (n == 0) wait(VALUES_FULL, 0, brought % 2);
            wait(DOUTS_FULL, stage, parity);
            multiply_douts(stage);
            if (!TOKEN_EARLY && n > 0) give_token();

            const Step step = load_shared<Step>(step_at(shared, visit));
            const bool tested = uniform(step.tested >> consumer & 1) != 0;
            auto shown = [&] {
                const int tile = load_shared<int>(item_shared + OFFSET_OF(Item, key_tile));
                return Shown(args, mask, tile * TILE_K + consumer * ROWS, load_shared<Step>(step_at(shared, visit)).row);
            };
            Columns columns;
            columns.begin(shared + ROW_LSE_START + stage * ROW_BYTES);
            wgmma_wait_group<1>();
            pin(scores);
            // Scores to weights. Hidden ones are 0; a weight is at most 1, which a coarse row_lse would not see to.
            if (tested) {
                const Shown seen = shown();
#pragma unroll
                for (int i = 0; i < TILE_Q / 2; ++i) {
                    const float lse = columns.of_block(i / 4).values[i % 2];
                    const float exponent = fused_multiply_add(scores[i], args.scale_log2, -lse);
                    scores[i] = ex2_approx(!seen(i) ? -INFINITE : exponent > 0.0f ? 0.0f : exponent);
                }
            } else {
#pragma unroll
                for (int i = 0; i < TILE_Q / 2; ++i) {
                    const float lse = columns.of_block(i / 4).values[i % 2];
                    scores[i] = ex2_approx(fused_multiply_add(scores[i], args.scale_log2, -lse));
                }
            }
            columns.begin(shared + ROW_DELTA_START + stage * ROW_BYTES);
            wait(DSCORES_EMPTY, stage, parity);  // here, so that the compiler does not wait for dweights any earlier
            wgmma_wait_group<0>();
            pin(dweights);
#pragma unroll
            for (int i = 0; i < TILE_Q / 2; ++i) {
                dweights[i] = scores[i] * (dweights[i] - columns.of_block(i / 4).values[i % 2]);
            }
            if (tested) {  // weights of 0 are not enough where dout, v or delta are not finite
                const Shown seen = shown();
#pragma unroll
                for (int i = 0; i < TILE_Q / 2; ++i) dweights[i] = seen(i) ? dweights[i] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < TILE_Q / 2; i += 2) {  // late: until here they would take registers
                weights[i / 8][i / 2 % 4] = cvt_pair(Element{}, scores[i], scores[i + 1]);
                dscores[i / 8][i / 2 % 4] = cvt_pair(Element{}, dweights[i], dweights[i + 1]);
            }
            store_dscores(stage);
            take_token();
            multiply_weights(stage, n > 0);
        }
        if (consumer == 0) give_token();
        wgmma_wait_group<0>();
        pin(dv);
        pin(dk);
        release(QUERIES_EMPTY, stage_of(visit - 1));
        release(DOUTS_EMPTY, stage_of(visit - 1));
        release(VALUES_EMPTY, 0);
#pragma unroll 1
        for (uint32 late = visit - (visits < LAG ? visits : LAG); late != visit; ++late) {
            wait(DSCORES_FULL, stage_of(late), parity_of(late));
            multiply_keys(stage_of(late));
            wgmma_wait_group<0>();
            pin(dq);
            store_part(late);
        }
        release(KEYS_EMPTY, 0);
        ++brought;

        const Item item = load_shared<Item>(item_shared);
        const uint32 staging = shared + GRAD_START + consumer * GradTile::BYTES;
        const bool dv_lost = store_gradient(args, item, staging, consumer, dv, dv_target);
        const bool dk_lost = store_gradient(args, item, staging, consumer, dk, dk_target);
        if (any(dv_lost || dk_lost) && leader) {
            const int64 tile = (item.batch * (args.heads / args.group) + item.key_head) * args.key_tiles + item.key_tile;
            store_global(args.suspects + 4 * tile, 1);
        }
        sync_warp();
        release(ITEMS_EMPTY, stage_of(number));
    }
    if (thread_index() % WARPGROUP == 0) cp_async_bulk_wait_group_read<0>();  // shared memory goes with the block
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) cuflash_backward_sm90(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    if (thread_index() == 0) {
        prefetch_tensormap(args.q_map);
        prefetch_tensormap(args.dout_map);
        prefetch_tensormap(args.k_map);
        prefetch_tensormap(args.v_map);
        constexpr int CONSUMER_WARPS = 4 * CONSUMERS;
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(barrier(shared, QUERIES_FULL, n), 2);  // the tile and its rows' numbers
            mbarrier_init(barrier(shared, QUERIES_EMPTY, n), CONSUMER_WARPS);
            mbarrier_init(barrier(shared, DOUTS_FULL, n), 2);
            mbarrier_init(barrier(shared, DOUTS_EMPTY, n), CONSUMER_WARPS);
            mbarrier_init(barrier(shared, DSCORES_FULL, n), CONSUMER_WARPS);
            mbarrier_init(barrier(shared, DSCORES_EMPTY, n), CONSUMER_WARPS);
            mbarrier_init(barrier(shared, PARTS_FULL, n), 4);
            mbarrier_init(barrier(shared, PARTS_EMPTY, n), 1);
            mbarrier_init(barrier(shared, ITEMS_FULL, n), 1);
            mbarrier_init(barrier(shared, ITEMS_EMPTY, n), CONSUMER_WARPS + CONSUMERS);  // and who sends dq
        }
        mbarrier_init(barrier(shared, KEYS_FULL), 1);
        mbarrier_init(barrier(shared, KEYS_EMPTY), CONSUMER_WARPS);
        mbarrier_init(barrier(shared, VALUES_FULL), 1);
        mbarrier_init(barrier(shared, VALUES_EMPTY), CONSUMER_WARPS);
        fence_mbarrier_init();
    }
    sync_threads();
    const int warpgroup = uniform(thread_index() / WARPGROUP);
    if (warpgroup == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int thread = thread_index();
        if (thread == 0) produce(args, mask, shared);
        if (thread == WARP || thread == 2 * WARP) send(args, shared, thread / WARP - 1);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(args, mask, shared, warpgroup - 1);
    }
}

}  // namespace cuflash
