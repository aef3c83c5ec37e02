// Gradients of attention on Hopper: dk, dv, and the float32 sums that backward_finish.cu makes dq of.
//
//   s = q k^T, p_ij = exp2(scale_log2 s_ij - row_lse_i), dp = dout v^T, ds_ij = p_ij (dp_ij - row_delta_i)
//   dv = p^T dout, dk = scale ds^T q, dq_sum = ds k       row_lse, row_delta: of backward_rows.cu
//
// Blocks stay, one a multiprocessor, and draw items: a tile of keys of one key head, which they bring once and visit
// with every tile of queries that sees some of it (visits.cuh). A block has a producer warpgroup, four threads of which
// work, and two consumers.
//
// Everything a consumer computes has keys as rows, 64 of them. The accumulators of k q^T and v dout^T are then, as p
// and ds, the A operands of the products with dout and q that dv and dk sum: they never leave registers, nor do dv and
// dk. Nor do as many of the keys, the A operand of k q^T, as there is room for.
//
// To head_dim 128 ds goes to shared memory as well, transposed, for dq; each consumer makes one part of the product
// ds k, a half of its columns or, where TILE_Q is 128, of its rows. The part goes on, by way of shared memory, to a
// thread of the producer warpgroup, which waits for the block's turn and has it added in global memory. Turns make dq
// reproducible, and no sum needs zeros to begin with: the first stores.
//
// There both consumers do the same, for 64 keys each, and take turns. While one computes exponentials, the tensor cores
// have the products of the other, and a token sees to it: who has it issues the last products of a visit, those of dv
// and dk, and the first two of the next, and gives it away. dq comes a visit late, when both consumers' ds have been
// written. What takes long and what others do not wait for, to read numbers of rows from shared memory, to fence what
// has been written there, is begun or done while products are in flight.
//
// Beyond, registers hold only one of dv and dk, so the consumers have roles, with the same 64 keys. The first makes p,
// which it leaves in shared memory for the other, and dv; the second dp, ds and dk. They run out of step by themselves.
// What dq takes there, 64 KB added for each 64 x 64 pairs, would be what limits all: it has a kernel of its own,
// backward_dq_sm90.cu.
//
// The copies of a tile of queries end a phase of its `full` barrier, the warps that have read it one of its `empty`
// barrier, and so for all that lies in shared memory. Visits are numbered through all items of the block, and so are
// the items: stage and parity follow from the number.
//
// What limits speed: the tensor cores and the port of shared memory, at clocks that power decides on.
#include "gradients_sm90.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "ptx_sm90.cuh"
#include "tile_sm90.cuh"
#include "visits.cuh"

namespace cuflash {

constexpr bool ROLES = HEAD_DIM > 128;  // else consumers take turns
constexpr int CONSUMERS = 2;
constexpr int ROWS = 64;  // keys of a consumer
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);

static_assert(HEAD_DIM == VALUE_DIM, "one size for both: copies fill the columns that are not there with zeros");
static_assert(TILE_K == (ROLES ? ROWS : CONSUMERS * ROWS), "TILE_K: 64 keys a consumer, the same ones for roles");
static_assert(ROLES || TILE_Q * HEAD_DIM == 64 * 128, "TILE_Q: a part of dq has 64 rows and columns");
static_assert(WARPS == 4 * (1 + CONSUMERS), "WARPS: a producer, and two consumers");
static_assert(STAGES == 2, "STAGES: the other one is 1 - stage");

constexpr bool PARTS_ARE_ROWS = TILE_Q == 128;  // of a tile of dq, else columns
constexpr int PART_COLUMNS = 64;
constexpr int PART_BYTES = ROWS * PART_COLUMNS * 4;

// A multiprocessor's 64 K registers are dealt out 168 a thread. The producer gives away what the consumers need.
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

using QueryTile = Panels<TILE_Q, HEAD_DIM>;  // q and dout
using KeyTile = Panels<TILE_K, HEAD_DIM>;    // k and v
using ScoreTile = Panels<TILE_Q, TILE_K>;    // ds
constexpr int ROW_BYTES = TILE_Q * 4;        // row_lse or row_delta

// A visit, for those that follow the plan.
struct Step {
    int head;
    int place;   // of the tile of queries, among those of all heads
    int turn;    // blocks whose dq comes first
    int row;     // the tile's first
    int tested;  // by bit: consumers whose pairs need a test
};
constexpr int STEPS = 8;  // planned and not yet sent
constexpr int NONE = -1;  // visits of what comes after the last item

struct Shared {
    char queries[STAGES][QueryTile::BYTES];
    char douts[STAGES][QueryTile::BYTES];
    char keys[KeyTile::BYTES];
    char values[KeyTile::BYTES];
    char dscores[STAGES][ROLES ? 16 : ScoreTile::BYTES];
    char parts[CONSUMERS][ROLES ? 16 : PART_BYTES];
    char grads[CONSUMERS][ROLES ? 16 : GradTile::BYTES];        // on their way; for roles in place of keys and values
    char weights[ROLES ? TILE_K * TILE_Q * 4 : 16];             // from the first role to the second
    float row_lse[STAGES][TILE_Q];
    float row_delta[STAGES][TILE_Q];
    Step steps[STEPS];
    Item items[2];
    uint64 queries_full[STAGES], queries_empty[STAGES];          // q and row_lse
    uint64 douts_full[STAGES], douts_empty[STAGES];    // dout and row_delta
    uint64 keys_full, keys_empty, values_full, values_empty;
    uint64 dscores_full[STAGES], dscores_empty[STAGES];
    uint64 weights_full, weights_empty;
    uint64 parts_full[CONSUMERS], parts_empty[CONSUMERS];
    uint64 steps_full[STEPS], steps_empty[STEPS];
    uint64 items_full[2], items_empty[2];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and barriers take");
constexpr int QUERY_START = OFFSET_OF(Shared, queries), DOUT_START = OFFSET_OF(Shared, douts);
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int DSCORE_START = OFFSET_OF(Shared, dscores), PART_START = OFFSET_OF(Shared, parts);
constexpr int WEIGHT_START = OFFSET_OF(Shared, weights), GRAD_START = OFFSET_OF(Shared, grads);
constexpr int ROW_LSE_START = OFFSET_OF(Shared, row_lse), ROW_DELTA_START = OFFSET_OF(Shared, row_delta);
constexpr int STEP_START = OFFSET_OF(Shared, steps), STEP_BYTES = sizeof(Step);
constexpr int ITEM_START = OFFSET_OF(Shared, items), ITEM_BYTES = sizeof(Item);
constexpr int QUERIES_FULL = OFFSET_OF(Shared, queries_full), QUERIES_EMPTY = OFFSET_OF(Shared, queries_empty);
constexpr int DOUTS_FULL = OFFSET_OF(Shared, douts_full), DOUTS_EMPTY = OFFSET_OF(Shared, douts_empty);
constexpr int KEYS_FULL = OFFSET_OF(Shared, keys_full), KEYS_EMPTY = OFFSET_OF(Shared, keys_empty);
constexpr int VALUES_FULL = OFFSET_OF(Shared, values_full), VALUES_EMPTY = OFFSET_OF(Shared, values_empty);
constexpr int DSCORES_FULL = OFFSET_OF(Shared, dscores_full), DSCORES_EMPTY = OFFSET_OF(Shared, dscores_empty);
constexpr int WEIGHTS_FULL = OFFSET_OF(Shared, weights_full), WEIGHTS_EMPTY = OFFSET_OF(Shared, weights_empty);
constexpr int PARTS_FULL = OFFSET_OF(Shared, parts_full), PARTS_EMPTY = OFFSET_OF(Shared, parts_empty);
constexpr int STEPS_FULL = OFFSET_OF(Shared, steps_full), STEPS_EMPTY = OFFSET_OF(Shared, steps_empty);
constexpr int ITEMS_FULL = OFFSET_OF(Shared, items_full), ITEMS_EMPTY = OFFSET_OF(Shared, items_empty);

// Barriers by number, of consumer 0 and, after it, of consumer 1.
constexpr int TOKEN = 1;    // has come; of roles, the first needs the keys no more, and the second the values
constexpr int STAGING = 3;  // its dk or dv has left, or lies in shared memory

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
    int cyclic, passes_log2, section, items;    // of the order of visits
    int tile_q, tile_k, columns, parts, clear;
    int dq_wide, dk_wide, dv_wide;  // float32, for sums to come
    int boxes;                   // dk and dv, where they are elements, are written by tensor copies
    float scale, scale_log2;     // scale_log2 = scale * log2 e
};
template struct ArgsLayout<Args>;

// Offsets in turns, in bytes: see backward_args.cuh.
constexpr int TICKET = 0, COARSE = 4, COUNTERS = 128;

__device__ __forceinline__ uint32 barrier(uint32 shared, int start, int index = 0) {
    return shared + start + 8 * index;
}
// Of the numbered use of a ring.
template <int LENGTH = 2>
__device__ __forceinline__ int stage_of(uint32 number) {
    return number % LENGTH;
}
template <int LENGTH = 2>
__device__ __forceinline__ uint32 parity_of(uint32 number) {
    return number / LENGTH % 2;
}
__device__ __forceinline__ uint32 item_at(uint32 shared, uint32 number) {
    return shared + ITEM_START + stage_of(number) * ITEM_BYTES;
}
__device__ __forceinline__ uint32 step_at(uint32 shared, uint32 visit) {
    return shared + STEP_START + stage_of<STEPS>(visit) * STEP_BYTES;
}
// Of a tile of keys.
__device__ __forceinline__ int first_key_of(int consumer) { return ROLES ? 0 : consumer * ROWS; }

// The keys, or values, of an item.
__device__ __forceinline__ Corner keys_of(const Item& item) {
    return {0, item.key_head, item.key_tile * TILE_K, item.batch0, item.batch1};
}

// The producer -------------------------------------------------------------------------------------------------------
//
// Of its warpgroup single threads work: nothing here may shuffle.

// Which consumers have pairs to test.
__device__ __forceinline__ int tested(const Args& args, const Mask& mask, int row, int tile_key) {
    const int first_key = mask.first_key(clamp(row + TILE_Q, 0, args.queries) - 1), end_key = mask.end_key(row);
    int bits = 0;
#pragma unroll
    for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
        const int key = tile_key + first_key_of(consumer);
        if (key < first_key || key + ROWS > end_key) bits |= 1 << consumer;
    }
    return bits;
}

// Draws items and plans their visits.
__device__ __forceinline__ void plan(const Args& args, const Mask& mask, uint32 shared) {
    uint32 visit = 0;
    int index = atomic_add(args.turns + TICKET, 1);
#pragma unroll 1
    for (uint32 number = 0;; ++number) {
        const uint32 item_shared = item_at(shared, number);
        mbarrier_wait(barrier(shared, ITEMS_EMPTY, stage_of(number)), parity_of(number) ^ 1);
        if (index >= args.items) {
            store_shared(item_shared + OFFSET_OF(Item, span.visits), NONE);
            mbarrier_arrive(barrier(shared, ITEMS_FULL, stage_of(number)));
            break;
        }
        store_shared(item_shared, draw_item(args, index));
        store_shared(item_shared + OFFSET_OF(Item, span), span_of(args, mask, load_shared<Item>(item_shared)));
        mbarrier_arrive(barrier(shared, ITEMS_FULL, stage_of(number)));

        auto visits = [&] { return load_shared<int>(item_shared + OFFSET_OF(Item, span.visits)); };
        if (visits() > 0) {
            // Where the item before still has its keys, those of this one shall at least not come from afar.
            const Corner keys = keys_of(load_shared<Item>(item_shared));
            KeyTile::prefetch(args.v_map, keys);
            KeyTile::prefetch(args.k_map, keys);
        }
        Visit place{load_shared<int>(item_shared + OFFSET_OF(Item, span.start_head)),
                    load_shared<int>(item_shared + OFFSET_OF(Item, span.start))};
#pragma unroll 1
        for (int n = 0; n < visits(); ++n, ++visit) {
            // Field by field, and the item read again and again: registers are few.
            const uint32 step = step_at(shared, visit);
            auto item = [&] { return load_shared<Item>(item_shared); };
            mbarrier_wait(barrier(shared, STEPS_EMPTY, stage_of<STEPS>(visit)), parity_of<STEPS>(visit) ^ 1);
            store_shared(step + OFFSET_OF(Step, turn), ROLES ? 0 : turn_of(args, mask, item(), place));
            const int head = item().key_head * args.group + place.head, row = place.tile * TILE_Q;
            store_shared(step + OFFSET_OF(Step, head), head);
            store_shared(step + OFFSET_OF(Step, place),
                         (item().batch * args.heads + head) * args.query_tiles + place.tile);
            store_shared(step + OFFSET_OF(Step, row), row);
            const int all = load_global<int>(args.turns + COARSE) != 0 ? (1 << CONSUMERS) - 1 : 0;
            store_shared(step + OFFSET_OF(Step, tested), all | tested(args, mask, row, item().key_tile * TILE_K));
            mbarrier_arrive(barrier(shared, STEPS_FULL, stage_of<STEPS>(visit)));
            place.advance(item().span, args.group);
        }
        // The next item is drawn early, so that it is brought while this one ends, but no earlier than that: blocks
        // that wait for it would wait for this one as well. A block has no two items of a wave, which may wait for each
        // other.
        if (visits() > 0) {
            const uint32 last = visit - 1;
            mbarrier_wait(barrier(shared, QUERIES_FULL, stage_of(last)), parity_of(last));
        }
        const int wave_end = wave_of(args, load_shared<int>(item_shared + OFFSET_OF(Item, index))).end;
        while (load_acquire(args.turns + TICKET) < wave_end) {
        }
        index = atomic_add(args.turns + TICKET, 1);
    }
}

// Brings keys and values of each item, q, dout and the rows' numbers of each visit.
__device__ __forceinline__ void bring(const Args& args, uint32 shared) {
    uint32 visit = 0;
    // What is read again and again from shared memory need not stay in registers, which are few.
    auto load_queries = [&](uint32 item_shared, uint32 tile, const TensorMap& map, uint32 numbers_shared,
                            const char* numbers, uint32 full) {
        const Step step = load_shared<Step>(step_at(shared, visit));
        const Item item = load_shared<Item>(item_shared);
        QueryTile::load(tile, map, full, {0, step.head, step.row, item.batch0, item.batch1}, EVICT_LAST);
        mbarrier_arrive_expect_tx(full, ROW_BYTES);
        cp_async_bulk_load(numbers_shared, numbers + static_cast<int64>(step.place) * ROW_BYTES, ROW_BYTES, full);
    };
    auto load_keys = [&](uint32 item_shared, uint32 tile, const TensorMap& map, uint32 full) {
        KeyTile::load(tile, map, full, keys_of(load_shared<Item>(item_shared)), EVICT_FIRST);
    };
#pragma unroll 1
    for (uint32 number = 0;; ++number) {
        const uint32 item_shared = item_at(shared, number);
        mbarrier_wait(barrier(shared, ITEMS_FULL, stage_of(number)), parity_of(number));
        const int visits = load_shared<int>(item_shared + OFFSET_OF(Item, span.visits));
        if (visits == NONE) break;
        if (visits == 0) {  // nothing to bring
            mbarrier_wait(barrier(shared, VALUES_EMPTY), number % 2 ^ 1);
            mbarrier_arrive(barrier(shared, VALUES_FULL));
            mbarrier_wait(barrier(shared, KEYS_EMPTY), number % 2 ^ 1);
            mbarrier_arrive(barrier(shared, KEYS_FULL));
        }
        bool first = true;  // and not left == visits, which would take a register
#pragma unroll 1
        for (int left = visits; left > 0; --left, ++visit) {
            mbarrier_wait(barrier(shared, STEPS_FULL, stage_of<STEPS>(visit)), parity_of<STEPS>(visit));

            const int stage = stage_of(visit);
            mbarrier_wait(barrier(shared, QUERIES_EMPTY, stage), parity_of(visit) ^ 1);
            load_queries(item_shared, shared + QUERY_START + stage * QueryTile::BYTES, args.q_map,
                         shared + ROW_LSE_START + stage * ROW_BYTES, args.row_lse,
                         barrier(shared, QUERIES_FULL, stage));
            if (first) {
                mbarrier_wait(barrier(shared, VALUES_EMPTY), number % 2 ^ 1);
                load_keys(item_shared, shared + VALUE_START, args.v_map, barrier(shared, VALUES_FULL));
            }
            mbarrier_wait(barrier(shared, DOUTS_EMPTY, stage), parity_of(visit) ^ 1);
            load_queries(item_shared, shared + DOUT_START + stage * QueryTile::BYTES, args.dout_map,
                         shared + ROW_DELTA_START + stage * ROW_BYTES, args.row_delta,
                         barrier(shared, DOUTS_FULL, stage));
            if (first) {  // the keys last: those before are the last to be done with
                mbarrier_wait(barrier(shared, KEYS_EMPTY), number % 2 ^ 1);
                load_keys(item_shared, shared + KEY_START, args.k_map, barrier(shared, KEYS_FULL));
            }
            first = false;
        }
        // The place of the barrier is not worth a register while visits last.
        mbarrier_arrive(barrier(shared, ITEMS_EMPTY, stage_of(opaque(number))));
    }
}

// Sends a consumer's parts of dq to global memory, each in its turn. That the sums have arrived is for the fence of a
// release to see to: copies are done with before other blocks' adds are sure to come after theirs.
__device__ __forceinline__ void send(const Args& args, uint32 shared, int consumer) {
    const uint32 part_shared = shared + PART_START + consumer * PART_BYTES;
    uint32 visit = 0;
#pragma unroll 1
    for (uint32 number = 0;; ++number) {
        mbarrier_wait(barrier(shared, ITEMS_FULL, stage_of(number)), parity_of(number));
        const int visits = load_shared<int>(item_at(shared, number) + OFFSET_OF(Item, span.visits));
        mbarrier_arrive(barrier(shared, ITEMS_EMPTY, stage_of(number)));
        if (visits == NONE) break;
#pragma unroll 1
        for (int n = 0; n < visits; ++n, ++visit) {
            mbarrier_wait(barrier(shared, STEPS_FULL, stage_of<STEPS>(visit)), parity_of<STEPS>(visit));
            const Step step = load_shared<Step>(step_at(shared, visit));
            const int64 part = static_cast<int64>(step.place) * CONSUMERS + consumer;
            char* const counter = args.turns + COUNTERS + part * 4;
            char* const sum = args.dq_sum + part * PART_BYTES;
            if (ORDERED) {  // looked for before the part is there: the turn will still be this block's when it is
                while (load_acquire(counter) != step.turn) {
                }
                fence_proxy_async_global();
            }
            mbarrier_wait(barrier(shared, PARTS_FULL, consumer), visit % 2);
            mbarrier_arrive(barrier(shared, STEPS_EMPTY, stage_of<STEPS>(visit)));
            if (ORDERED && step.turn == 0) {
                cp_async_bulk_store(sum, part_shared, PART_BYTES);
            } else {
                cp_reduce_async_bulk_add(sum, part_shared, PART_BYTES);
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

// Registers of a consumer --------------------------------------------------------------------------------------------

using Scores = float[TILE_Q / 2];        // of 64 keys by a tile of queries: scores, their weights, gradients of either
using Operand = uint32[TILE_Q / 16][4];  // the same, of elements, as the A operand of a product
using Part = float[PART_COLUMNS / 2];    // of dq

// The first columns of a consumer's keys, as A operand of the product for scores, where consumers take turns: a product
// both of whose operands come from shared memory takes all that its port gives, so whatever else uses it takes time.
// More steps than these the compiler spills, which leaves 28 registers to all that is not a product's.
constexpr int KEPT = HEAD_DIM / 16 < 5 ? HEAD_DIM / 16 : 5;
using Kept = uint32[KEPT][4];

struct alignas(8) Pair {
    float values[2];
};
struct alignas(16) Quad {
    float values[4];
};

// Accumulators, two a column: the numbers that a tile of queries has, one a row, come in such batches. A role has
// registers for those of a whole tile.
constexpr int BATCH = ROLES ? 32 : 16;

// Those of a thread's columns. Shared memory is busy with operands of products and takes 200 clocks to answer, so a
// batch is asked for before what comes before its use.
struct Columns {
    Pair pairs[BATCH / 4];

    __device__ __forceinline__ void load(uint32 start, int batch = 0) {
        const uint32 column = static_cast<uint32>(fresh_thread_index()) % 4;  // a signed rest is four instructions
        const uint32 address = start + batch * 2 * BATCH * 4 + column * static_cast<uint32>(sizeof(Pair));
#pragma unroll
        for (int block = 0; block < BATCH / 4; ++block) pairs[block] = load_shared<Pair>(address + 32 * block);
    }
    __device__ __forceinline__ float operator[](int i) const {  // for element i of an accumulator
        return pairs[i % BATCH / 4].values[i % 2];
    }
};

// Which of a thread's pairs the mask shows: of either key, columns from the first on and before the end.
struct Shown {
    int first[2], end[2];

    __device__ __forceinline__ Shown(const Args& args, const Mask& mask, int first_key, int row) {
        const int lane = lane_index(), column = row + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = first_key + warp_index() % 4 * 16 + 8 * half + lane / 4;
            first[half] = mask.first_query(key, args.queries) - column;
            end[half] = key < args.keys ? mask.end_query(key, args.queries) - column : 0;
        }
    }
    // Of elements i and i + 1 of an accumulator, as a word of an operand holds them: ones where they are shown.
    __device__ __forceinline__ uint32 operator[](int i) const {
        const int column = 8 * (i / 4), half = i / 2 % 2;
        const bool low = column >= first[half] && column < end[half];
        const bool high = column + 1 >= first[half] && column + 1 < end[half];
        return (low ? 0x0000ffff : 0) | (high ? 0xffff0000 : 0);
    }
};

// Scores to exponents of weights, in place; the first batch of row_lse has been asked for.
__device__ __forceinline__ void to_exponents(Scores& scores, Columns& columns, uint32 row_lse, float scale_log2) {
#pragma unroll
    for (int first = 0; first < TILE_Q / 2; first += BATCH) {
#pragma unroll
        for (int i = first; i < first + BATCH; ++i) scores[i] = fused_multiply_add(scores[i], scale_log2, -columns[i]);
        if (first + BATCH < TILE_Q / 2) columns.load(row_lse, first / BATCH + 1);
    }
}
// Exponents to weights, in place: at most 1 where `clamped`, which a coarse row_lse would not see to. A branch between
// exponentials and the next wait would keep them from being computed under it.
__device__ __forceinline__ void to_weights(Scores& scores, bool clamped) {
    if (clamped) {
#pragma unroll
        for (int i = 0; i < TILE_Q / 2; ++i) scores[i] = scores[i] > 0.0f ? 0.0f : scores[i];
    }
#pragma unroll
    for (int i = 0; i < TILE_Q / 2; ++i) scores[i] = ex2_approx(scores[i]);
}
// Gradients of weights to gradients of scores, in place; the first batch of row_delta has been asked for.
__device__ __forceinline__ void differentiate(Scores& dweights, const Scores& weights, Columns& columns,
                                              uint32 row_delta) {
#pragma unroll
    for (int first = 0; first < TILE_Q / 2; first += BATCH) {
#pragma unroll
        for (int i = first; i < first + BATCH; ++i) dweights[i] -= columns[i];
        if (first + BATCH < TILE_Q / 2) columns.load(row_delta, first / BATCH + 1);
#pragma unroll
        for (int i = first; i < first + BATCH; ++i) dweights[i] *= weights[i];
    }
}
// Of hidden pairs nothing is left, whatever q, k, v and dout are. So late, since here registers are to be had.
__device__ __forceinline__ void hide(Operand& operand, const Shown& shown) {
#pragma unroll
    for (int i = 0; i < TILE_Q / 2; i += 2) operand[i / 8][i / 2 % 4] &= shown[i];
}
__device__ __forceinline__ void convert(Operand& operand, const Scores& scores) {
#pragma unroll
    for (int i = 0; i < TILE_Q / 2; i += 2) operand[i / 8][i / 2 % 4] = cvt_pair(Element{}, scores[i], scores[i + 1]);
}

// Products, in flight when they return. Tiles are places as descriptors have them, in units of 16 bytes.

// scores = a b^T, of 64 keys and a tile of queries; of `a` the first KEPT steps may be in registers.
__device__ __forceinline__ void multiply_steps(Scores& scores, uint32 a, uint32 b, int first) {
#pragma unroll
    for (int step = first; step < HEAD_DIM / 16; ++step) {
        Wgmma<TILE_Q>::template ss<0, 0>(scores, KeyTile::rows_descriptor(a + KeyTile::right(step)),
                                         QueryTile::rows_descriptor(b + QueryTile::right(step)), step > 0);
    }
}
__device__ __forceinline__ void multiply_rows(Scores& scores, uint32 a, uint32 b) {
    wgmma_fence();
    multiply_steps(scores, a, b, 0);
    wgmma_commit_group();
}
__device__ __forceinline__ void multiply_rows(Scores& scores, const Kept& kept, uint32 a, uint32 b) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KEPT; ++step) {
        Wgmma<TILE_Q>::template rs<0>(scores, kept[step], QueryTile::rows_descriptor(b + QueryTile::right(step)),
                                      step > 0);
    }
    multiply_steps(scores, a, b, KEPT);
    wgmma_commit_group();
}
// grad = or += a b, over a tile of queries; for the caller to fence and to commit.
__device__ __forceinline__ void multiply_columns(Gradient& grad, const Operand& a, uint32 b, bool accumulate) {
#pragma unroll
    for (int step = 0; step < TILE_Q / 16; ++step) {
        Wgmma<HEAD_DIM>::template rs<1>(grad, a[step], QueryTile::columns_descriptor(b + QueryTile::down(step)),
                                        step > 0 || accumulate);
    }
}
// A part of dq = dscores keys.
__device__ __forceinline__ void multiply_part(Part& dq, uint32 dscores, uint32 keys) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_K / 16; ++step) {
        Wgmma<PART_COLUMNS>::template ss<0, 1>(dq, ScoreTile::rows_descriptor(dscores + ScoreTile::right(step)),
                                               KeyTile::columns_descriptor(keys + KeyTile::down(step)), step > 0);
    }
    wgmma_commit_group();
}

// A consumer ---------------------------------------------------------------------------------------------------------

// Where dk or dv goes.
struct Target {
    const TensorMap& map;
    char* base;
    const Strides& strides;
    const int &rows, &boxes;
    int dim;
    bool wide;  // float32
    float factor;
};

struct Consumer {
    const Args& args;
    const Mask& mask;
    uint32 shared;
    int index;
    bool leader;          // of its warp: arrives for it
    uint32 tiles;         // where shared memory begins, in units of 16 bytes
    uint32 dscore_place;  // where this thread's part of ds goes, in the first stage

    __device__ __forceinline__ Consumer(const Args& args, const Mask& mask, uint32 shared, int index)
        : args(args), mask(mask), shared(shared), index(index), leader(lane_index() == 0), tiles(shared / 16) {
        const int lane = lane_index(), chunk = first_key_of(index) / 8 + warp_index() % 4 * 2 + lane / 8 % 2;
        dscore_place = shared + DSCORE_START + ScoreTile::offset(lane % 8 + lane / 16 * 8, chunk);
    }

    __device__ __forceinline__ void wait(int start, int number, uint32 parity) const {
        mbarrier_wait(barrier(shared, start, number), parity);
    }
    __device__ __forceinline__ void release(int start, int number = 0) const {
        if (leader) mbarrier_arrive(barrier(shared, start, number));
    }
    // Hands on what this warp has written. The fence waits until it is all there, some 200 clocks.
    __device__ __forceinline__ void show(int start, int number) const {
        fence_proxy_async();
        sync_warp();
        release(start, number);
    }
    __device__ __forceinline__ bool first_thread() const { return thread_index() % WARPGROUP == 0; }

    // Tiles in shared memory, for products: all queries, this consumer's keys as rows, its part of a tile of dq. A step
    // from one to the next is an instruction, and none of them is kept.
    __device__ __forceinline__ uint32 queries(int stage) const {
        return tiles + QUERY_START / 16 + stage * (QueryTile::BYTES / 16);
    }
    __device__ __forceinline__ uint32 douts(int stage) const {
        return tiles + DOUT_START / 16 + stage * (QueryTile::BYTES / 16);
    }
    __device__ __forceinline__ uint32 keys() const {
        return tiles + KEY_START / 16 + first_key_of(index) * (128 / 16);
    }
    __device__ __forceinline__ uint32 values() const {
        return tiles + VALUE_START / 16 + first_key_of(index) * (128 / 16);
    }
    __device__ __forceinline__ uint32 part_rows(int stage) const {
        const int rows = PARTS_ARE_ROWS ? index * ROWS : 0;
        return tiles + DSCORE_START / 16 + stage * (ScoreTile::BYTES / 16) + rows * (128 / 16);
    }
    __device__ __forceinline__ uint32 part_columns() const {
        const int panel = PARTS_ARE_ROWS ? 0 : index;
        return tiles + KEY_START / 16 + panel * (KeyTile::PANEL_BYTES / 16);
    }

    // The first columns of this consumer's keys.
    __device__ __forceinline__ void keep(Kept& kept) const {
        const int lane = lane_index(), row = first_key_of(index) + warp_index() % 4 * 16 + lane % 16;
#pragma unroll
        for (int step = 0; step < KEPT; ++step) {
            ldmatrix_x4(kept[step], shared + KEY_START + KeyTile::offset(row, 2 * step + lane / 16));
        }
    }

    // Waits for an item and returns its visits.
    __device__ __forceinline__ int begin(uint32 number) const {
        wait(ITEMS_FULL, stage_of(number), parity_of(number));
        return uniform(load_shared<int>(item_at(shared, number) + OFFSET_OF(Item, span.visits)));
    }
    __device__ __forceinline__ bool tested(uint32 visit) const {
        return uniform(load_shared<Step>(step_at(shared, visit)).tested >> index & 1) != 0;
    }
    __device__ __forceinline__ Shown shown(uint32 number, uint32 visit) const {
        const int tile = load_shared<int>(item_at(shared, number) + OFFSET_OF(Item, key_tile));
        return Shown(args, mask, tile * TILE_K + first_key_of(index), load_shared<Step>(step_at(shared, visit)).row);
    }

    // ds for the products of dq, transposed: a consumer's keys are a panel's columns. To be shown to these afterwards.
    __device__ __forceinline__ void store_dscores(int stage, const Operand& dscores) const {
        const uint32 address = dscore_place + stage * ScoreTile::BYTES;
#pragma unroll
        for (int step = 0; step < TILE_Q / 16; ++step) stmatrix_x4_trans(address + step * 16 * 128, dscores[step]);
    }
    __device__ __forceinline__ void show_dscores(int stage) const { show(DSCORES_FULL, stage); }
    // A part of dq for who sends it, as it is to lie in global memory. To be shown to it afterwards.
    __device__ __forceinline__ void store_part(uint32 visit, const Part& dq) const {
        const uint32 place = shared + PART_START + index * PART_BYTES + thread_index() % WARPGROUP * 16;
        wait(PARTS_EMPTY, index, visit % 2 ^ 1);
#pragma unroll
        for (int block = 0; block < PART_COLUMNS / 8; ++block) {
            const float* x = dq + 4 * block;
            store_shared(place + block * WARPGROUP * 16, Quad{{x[0], x[1], x[2], x[3]}});
        }
    }
    __device__ __forceinline__ void show_part() const { show(PARTS_FULL, index); }

    // Where this consumer's keys begin.
    __device__ __forceinline__ RowPlace place_of(const Item& item) const {
        return {item.key_head, item.key_tile * TILE_K + first_key_of(index), item.batch0, item.batch1};
    }
    // Writes dk or dv, by way of `staging`. Returns whether some number that counts is not finite.
    __device__ __forceinline__ bool store(const Item& item, uint32 staging, const Gradient& sums,
                                          const Target& target) const {
        const int lane = lane_index(), warp_row = warp_index() % 4 * 16;
        const RowPlace place = place_of(item);
        auto key_of = [&](int half) { return place.row + warp_row + 8 * half + lane / 4; };
        const Lost lost = store_gradient<false>(target, place, sums, staging, STAGING + index, lane, warp_row, key_of);
        const int key = place.row + warp_row + lane / 4;
        return any((lost.rows[0] && key < args.keys) || (lost.rows[1] && key + 8 < args.keys));
    }
    // Until what was written by way of shared memory has left it, of all warps of this consumer.
    __device__ __forceinline__ void flush() const {
        if (first_thread()) cp_async_bulk_wait_group_read<0>();
        bar_sync(STAGING + index, WARPGROUP);
    }
    // Zeros, for keys that no row sees.
    __device__ __forceinline__ void store_nothing(uint32 number, const Target& target) const {
        const Item item = load_shared<Item>(item_at(shared, number));
        char* const base = target.base + target.strides.offset(item.batch0, item.batch1, item.key_head);
        const int first_key = item.key_tile * TILE_K + first_key_of(index) + warp_index() % 4 * 16;
        const int end_key = clamp(args.keys, first_key, first_key + 16);
#pragma unroll 1
        for (int key = first_key; key < end_key; ++key) {
            char* const row = base + key * target.strides.row;
#pragma unroll 1
            for (int d = lane_index(); d < target.dim; d += WARP) {
                if (target.wide) {
                    store_global(row + 4 * d, 0.0f);
                } else {
                    store_global(row + 2 * d, Element{0});
                }
            }
        }
    }
    // Done with an item that has no visits: of keys and values a phase passes all the same.
    __device__ __forceinline__ void skip(uint32 number) const {
        wait(KEYS_FULL, 0, number % 2);
        wait(VALUES_FULL, 0, number % 2);
        sync_warp();
        release(KEYS_EMPTY);
        release(VALUES_EMPTY);
        release(ITEMS_EMPTY, stage_of(number));
    }
    // Done with an item. The careful path computes again what was lost.
    __device__ __forceinline__ void end(uint32 number, const Item& item, bool lost) const {
        if (lost && leader) {
            const int64 head = item.batch * (args.heads / args.group) + item.key_head;
            store_global(args.suspects + 4 * (head * args.key_tiles + item.key_tile), 1);
        }
        sync_warp();
        release(ITEMS_EMPTY, stage_of(number));
    }
};

__device__ __forceinline__ Target dk_target(const Args& args) {
    return {args.dk_map, args.dk, args.dk_strides, args.keys, args.boxes, args.head_dim, args.dk_wide != 0, args.scale};
}
__device__ __forceinline__ Target dv_target(const Args& args) {
    return {args.dv_map, args.dv, args.dv_strides, args.keys, args.boxes, args.value_dim, args.dv_wide != 0, 1.0f};
}

// Both consumers, where they take turns.
__device__ __forceinline__ void take_turns(const Args& args, const Mask& mask, uint32 shared, int index) {
    const Consumer self(args, mask, shared, index);
    const Target to_dk = dk_target(args), to_dv = dv_target(args);
    Scores scores, dweights;
    Operand weights, dscores;
    Gradient dk, dv;
    Part dq;
    Kept kept;
    auto give_token = [&] { bar_arrive(TOKEN + 1 - index, CONSUMERS * WARPGROUP); };
    auto await_token = [&] { bar_sync(TOKEN + index, CONSUMERS * WARPGROUP); };

    // A stage is free once dq of two visits before has been made: for 0 nobody else says so.
    self.release(DSCORES_EMPTY, 0);
    uint32 visit = 0;
#pragma unroll 1
    for (uint32 number = 0;; ++number) {
        const int visits = self.begin(number);
        if (visits == NONE) break;
        if (visits == 0) {
            self.store_nothing(number, to_dk);
            self.store_nothing(number, to_dv);
            self.skip(number);
            continue;
        }

        if (index == 1) give_token();
        self.wait(KEYS_FULL, 0, number % 2);
        self.keep(kept);
        self.wait(QUERIES_FULL, stage_of(visit), parity_of(visit));
#pragma unroll 1
        for (int n = 0; n < visits; ++n, ++visit) {
            const int stage = stage_of(visit);
            const uint32 row_lse = shared + ROW_LSE_START + stage * ROW_BYTES;
            const uint32 row_delta = shared + ROW_DELTA_START + stage * ROW_BYTES;
            const bool tested = self.tested(visit);
            Columns columns;
            columns.load(row_lse);
            wgmma_wait_group<0>();  // for dv and dk of the visit before
            pin(dv);
            pin(dk);
            if (n > 0) {
                self.release(DOUTS_EMPTY, 1 - stage);
                self.release(QUERIES_EMPTY, 1 - stage);
            }
            multiply_rows(scores, kept, self.keys(), self.queries(stage));
            if (n == 0) self.wait(VALUES_FULL, 0, number % 2);
            self.wait(DOUTS_FULL, stage, parity_of(visit));
            multiply_rows(dweights, self.values(), self.douts(stage));
            if (n > 0) give_token();
            if (n > 1) self.show_part();

            wgmma_wait_group<1>();
            pin(scores);
            to_exponents(scores, columns, row_lse, args.scale_log2);
            columns.load(row_delta);
            to_weights(scores, tested);
            self.wait(DSCORES_EMPTY, stage, parity_of(visit));  // here, lest the compiler wait for dweights any earlier
            wgmma_wait_group<0>();
            pin(dweights);
            differentiate(dweights, scores, columns, row_delta);
            convert(weights, scores);  // so late, since until here they would take registers of their own
            convert(dscores, dweights);
            if (tested) {
                const Shown shown = self.shown(number, visit);
                hide(weights, shown);
                hide(dscores, shown);
            }
            self.store_dscores(stage, dscores);

            // dq of the visit before. Where there is none the product is of what lies there, for nothing: registers of
            // products in flight must not depend on a branch.
            if (n > 0) self.wait(DSCORES_FULL, 1 - stage, parity_of(visit - 1));
            await_token();
            multiply_part(dq, self.part_rows(1 - stage), self.part_columns());
            wgmma_fence();
            multiply_columns(dv, weights, self.douts(stage), n > 0);
            multiply_columns(dk, dscores, self.queries(stage), n > 0);
            wgmma_commit_group();
            self.show_dscores(stage);
            if (n + 1 < visits) self.wait(QUERIES_FULL, 1 - stage, parity_of(visit + 1));
            wgmma_wait_group<1>();
            pin(dq);
            self.release(DSCORES_EMPTY, 1 - stage);  // each visit, whatever was read
            if (n > 0) self.store_part(visit - 1, dq);
        }
        if (index == 0) give_token();
        wgmma_wait_group<0>();
        pin(dv);
        pin(dk);
        const int stage = stage_of(visit - 1);
        self.release(QUERIES_EMPTY, stage);
        self.release(DOUTS_EMPTY, stage);
        self.release(VALUES_EMPTY);
        if (visits > 1) self.show_part();
        self.wait(DSCORES_FULL, stage, parity_of(visit - 1));
        multiply_part(dq, self.part_rows(stage), self.part_columns());
        wgmma_wait_group<0>();
        pin(dq);
        self.store_part(visit - 1, dq);
        self.show_part();
        self.release(KEYS_EMPTY);

        const Item item = load_shared<Item>(item_at(shared, number));
        const uint32 staging = shared + GRAD_START + index * GradTile::BYTES;
        const bool dv_lost = self.store(item, staging, dv, to_dv);
        const bool dk_lost = self.store(item, staging, dk, to_dk);
        self.end(number, item, dv_lost || dk_lost);
    }
    if (self.first_thread()) cp_async_bulk_wait_group_read<0>();  // shared memory goes with the block
}

// The first role: weights and dv.
__device__ __forceinline__ void make_weights(const Args& args, const Mask& mask, uint32 shared) {
    const Consumer self(args, mask, shared, 0);
    const Target to_dv = dv_target(args);
    const uint32 place = shared + WEIGHT_START + thread_index() % WARPGROUP * 16;
    Scores scores;
    Operand weights;
    Gradient dv;

    uint32 visit = 0;
#pragma unroll 1
    for (uint32 number = 0;; ++number) {
        const int visits = self.begin(number);
        if (visits == NONE) break;
        if (visits == 0) {
            self.store_nothing(number, to_dv);
            self.skip(number);
            continue;
        }

        self.wait(KEYS_FULL, 0, number % 2);
#pragma unroll 1
        for (int n = 0; n < visits; ++n, ++visit) {
            const int stage = stage_of(visit);
            const uint32 row_lse = shared + ROW_LSE_START + stage * ROW_BYTES;
            self.wait(QUERIES_FULL, stage, parity_of(visit));
            const bool tested = self.tested(visit);
            Columns columns;
            columns.load(row_lse);
            multiply_rows(scores, self.keys(), self.queries(stage));  // beside the product for dv of the visit before
            wgmma_wait_group<1>();
            pin(dv);
            if (n > 0) self.release(DOUTS_EMPTY, 1 - stage);
            wgmma_wait_group<0>();
            pin(scores);
            to_exponents(scores, columns, row_lse, args.scale_log2);
            to_weights(scores, tested);
            self.wait(WEIGHTS_EMPTY, 0, visit % 2 ^ 1);
#pragma unroll
            for (int block = 0; block < TILE_Q / 8; ++block) {
                const float* x = scores + 4 * block;
                store_shared(place + block * WARPGROUP * 16, Quad{{x[0], x[1], x[2], x[3]}});
            }
            convert(weights, scores);
            if (tested) hide(weights, self.shown(number, visit));
            sync_warp();
            self.release(WEIGHTS_FULL);
            self.release(QUERIES_EMPTY, stage);
            self.release(STEPS_EMPTY, stage_of<STEPS>(visit));

            self.wait(DOUTS_FULL, stage, parity_of(visit));
            wgmma_fence();
            multiply_columns(dv, weights, self.douts(stage), n > 0);
            wgmma_commit_group();
        }
        wgmma_wait_group<0>();
        pin(dv);
        self.release(DOUTS_EMPTY, stage_of(visit - 1));
        self.release(KEYS_EMPTY);
        bar_arrive(TOKEN, CONSUMERS * WARPGROUP);

        // The other is done with the values when it has written its last ds: when it has come to its end.
        bar_sync(TOKEN + 1, CONSUMERS * WARPGROUP);
        const Item item = load_shared<Item>(item_at(shared, number));
        const bool lost = self.store(item, shared + VALUE_START, dv, to_dv);
        self.flush();
        self.release(VALUES_EMPTY);
        self.end(number, item, lost);
    }
}

// The second role: gradients of scores, and dk.
__device__ __forceinline__ void make_dscores(const Args& args, const Mask& mask, uint32 shared) {
    const Consumer self(args, mask, shared, 1);
    const Target to_dk = dk_target(args);
    const uint32 place = shared + WEIGHT_START + thread_index() % WARPGROUP * 16;
    Scores weights, dweights;
    Operand dscores;
    Gradient dk;

    uint32 visit = 0;
#pragma unroll 1
    for (uint32 number = 0;; ++number) {
        const int visits = self.begin(number);
        if (visits == NONE) break;
        if (visits == 0) {
            self.store_nothing(number, to_dk);
            self.skip(number);
            continue;
        }

        self.wait(VALUES_FULL, 0, number % 2);
#pragma unroll 1
        for (int n = 0; n < visits; ++n, ++visit) {
            const int stage = stage_of(visit);
            const uint32 row_delta = shared + ROW_DELTA_START + stage * ROW_BYTES;
            self.wait(DOUTS_FULL, stage, parity_of(visit));
            const bool tested = self.tested(visit);
            Columns columns;
            columns.load(row_delta);
            multiply_rows(dweights, self.values(), self.douts(stage));  // beside the product for dk of the visit before
            wgmma_wait_group<1>();
            pin(dk);
            if (n > 0) self.release(QUERIES_EMPTY, 1 - stage);
            self.wait(WEIGHTS_FULL, 0, visit % 2);
#pragma unroll
            for (int block = 0; block < TILE_Q / 8; ++block) {
                const Quad quad = load_shared<Quad>(place + block * WARPGROUP * 16);
#pragma unroll
                for (int i = 0; i < 4; ++i) weights[4 * block + i] = quad.values[i];
            }
            wgmma_wait_group<0>();
            pin(dweights);
            differentiate(dweights, weights, columns, row_delta);
            convert(dscores, dweights);
            if (tested) hide(dscores, self.shown(number, visit));
            sync_warp();
            self.release(WEIGHTS_EMPTY);
            self.release(DOUTS_EMPTY, stage);
            self.release(STEPS_EMPTY, stage_of<STEPS>(visit));

            self.wait(QUERIES_FULL, stage, parity_of(visit));
            wgmma_fence();
            multiply_columns(dk, dscores, self.queries(stage), n > 0);
            wgmma_commit_group();
        }
        bar_arrive(TOKEN + 1, CONSUMERS * WARPGROUP);  // the values have been read
        wgmma_wait_group<0>();
        pin(dk);
        self.release(QUERIES_EMPTY, stage_of(visit - 1));
        self.release(VALUES_EMPTY);
        bar_sync(TOKEN, CONSUMERS * WARPGROUP);  // the other has read the keys

        const Item item = load_shared<Item>(item_at(shared, number));
        const bool lost = self.store(item, shared + KEY_START, dk, to_dk);
        self.flush();
        self.release(KEYS_EMPTY);
        self.end(number, item, lost);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_backward_sm90(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    if (thread_index() == 0) {
        prefetch_tensormap(args.q_map);
        prefetch_tensormap(args.dout_map);
        prefetch_tensormap(args.k_map);
        prefetch_tensormap(args.v_map);
        constexpr int ONE = 4, BOTH = 4 * CONSUMERS;  // warps of one consumer, of both
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(barrier(shared, QUERIES_FULL, n), 2);  // the tile and its rows' numbers
            mbarrier_init(barrier(shared, QUERIES_EMPTY, n), BOTH);
            mbarrier_init(barrier(shared, DSCORES_FULL, n), BOTH);
            mbarrier_init(barrier(shared, DSCORES_EMPTY, n), BOTH);
            mbarrier_init(barrier(shared, PARTS_FULL, n), ONE);
            mbarrier_init(barrier(shared, PARTS_EMPTY, n), 1);
            mbarrier_init(barrier(shared, ITEMS_FULL, n), 1);
            mbarrier_init(barrier(shared, ITEMS_EMPTY, n), BOTH + (ROLES ? 0 : CONSUMERS) + 1);  // who sends and brings
        }
        for (int n = 0; n < STEPS; ++n) {
            mbarrier_init(barrier(shared, STEPS_FULL, n), 1);
            mbarrier_init(barrier(shared, STEPS_EMPTY, n), ROLES ? BOTH : CONSUMERS);  // sending comes last
        }
        for (int n = 0; n < STAGES; ++n) {
            mbarrier_init(barrier(shared, DOUTS_FULL, n), 2);
            mbarrier_init(barrier(shared, DOUTS_EMPTY, n), BOTH);
        }
        mbarrier_init(barrier(shared, KEYS_FULL), 1);
        mbarrier_init(barrier(shared, KEYS_EMPTY), BOTH);
        mbarrier_init(barrier(shared, VALUES_FULL), 1);
        mbarrier_init(barrier(shared, VALUES_EMPTY), BOTH);
        mbarrier_init(barrier(shared, WEIGHTS_FULL), ONE);
        mbarrier_init(barrier(shared, WEIGHTS_EMPTY), ONE);
        fence_mbarrier_init();
    }
    sync_threads();
    const int warpgroup = uniform(thread_index() / WARPGROUP);
    if (warpgroup == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (lane_index() == 0) {
            const int warp = warp_index();
            if (!ROLES && warp < CONSUMERS) send(args, shared, warp);
            if (warp == CONSUMERS) bring(args, shared);
            if (warp == CONSUMERS + 1) plan(args, mask, shared);
        }
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        if constexpr (!ROLES) {
            take_turns(args, mask, shared, warpgroup - 1);
        } else if (warpgroup == 1) {
            make_weights(args, mask, shared);
        } else {
            make_dscores(args, mask, shared);
        }
    }
}

}  // namespace cuflash
