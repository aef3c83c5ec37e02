// out = softmax(scale q k^T) v and lse, for float32, on Hopper.
//
//   q (queries, head_dim), k (keys, head_dim), v (keys, value_dim) -> out (queries, value_dim), lse (queries)
//
// Every number is three bfloat16 and every product six, see float32.cuh, or, where TF32 will do, two and three;
// forward_parts.cu has written the parts. A block owns TILE_Q packed rows of one head and walks over the keys it can
// see in tiles of TILE_K, from the last to the first. One warpgroup, the producer, has a single thread bring parts of
// q, k and v by tensor copies; each of the others, the consumers, owns 64 rows: their scores, weights and out stay in
// registers, and the parts of the weights are operands of the products with v as they are.
//
// Three parts leave room for one tile of keys or two. So a tile's parts are brought and released one by one, in the
// order in which products meet them, the least first, and values panel by panel of 64 columns: the next tile is on its
// way while this one is worked on.
//
// A tensor core cuts what it adds, so that long sums drift: weights meet the values of one tile in sums that begin at
// zero, and that are added to out by additions that round.
//
// What limits speed: the tensor cores, six products for one, and the power they take. The products of one consumer fill
// them while the other's threads turn scores into weights. Scores read shared memory at its full rate meanwhile: a
// product of 64 x 64 x 16 takes 32 clocks, and so do its 4 KB.
#include "float32.cuh"
#include "float32_rows.cuh"
#include "forward_args.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "ptx_sm90.cuh"
#include "score.cuh"
#include "tile_sm90.cuh"

namespace cuflash {

constexpr int ROWS = 64;  // of a consumer
constexpr int CONSUMERS = TILE_Q / ROWS;
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr bool ONE_SUM = PARTS < 3;  // two parts are not so true that cutting beside large products would show
constexpr int PANEL = ONE_SUM ? VALUE_DIM : 64, PANELS = VALUE_DIM / PANEL;

static_assert(WARPS == 4 * (1 + CONSUMERS) && TILE_Q % ROWS == 0, "WARPS: a producer, and a consumer every 64 rows");
static_assert(TILE_K % 16 == 0, "TILE_K: whole steps of a product");
static_assert(HEAD_DIM % 64 == 0 && VALUE_DIM % 64 == 0, "whole panels");

// The registers of a multiprocessor, 64 K, as the launch deals them out: 168 a thread.
static_assert(CONSUMERS == 2, "CONSUMERS: as the registers are dealt out");
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

using QueryTile = Panels<ROWS, HEAD_DIM>;
using KeyTile = Panels<TILE_K, HEAD_DIM>;
using ValuePanel = Panels<TILE_K, PANEL>;

// Every buffer has two barriers: full, which copies complete, and empty, on which each warp that reads it arrives.
struct Shared {
    char queries[CONSUMERS][PARTS][QueryTile::BYTES];
    char keys[STAGES][PARTS][KeyTile::BYTES];
    char values[STAGES][PANELS][PARTS][ValuePanel::BYTES];
    uint64 queries_full[CONSUMERS];
    uint64 keys_full[STAGES][PARTS], keys_empty[STAGES][PARTS];
    uint64 values_full[STAGES][PANELS], values_empty[STAGES][PANELS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and barriers take");
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int QUERIES_FULL = OFFSET_OF(Shared, queries_full);
constexpr int KEYS_FULL = OFFSET_OF(Shared, keys_full), KEYS_EMPTY = OFFSET_OF(Shared, keys_empty);
constexpr int VALUES_FULL = OFFSET_OF(Shared, values_full), VALUES_EMPTY = OFFSET_OF(Shared, values_empty);

struct Args {
    const char *q, *k, *v;
    char* out;
    char* lse;  // null where it is not wanted
    char *q_parts, *k_parts, *v_parts;
    TensorMap q_map, k_map, v_map;  // of the parts; axes: column, row, head of all batches, part
    Strides q_strides, k_strides, v_strides, out_strides;
    Schedule schedule;
    int64 first_block;
    int queries, keys, heads, group, pack, head_dim, value_dim;
    int head_blocks, batches1;   // blocks along heads; length of the inner merged axis
    int first_shift, end_shift;  // of the mask
    int out_vectors;             // rows of out can be written 8 bytes at a time
    float scale_log2;            // scale * log2 e, positive
};
template struct ArgsLayout<Args>;

// Tiles of keys.
struct Span {
    int first, end;
};
// Those that some of the packed rows from `row` on sees.
__device__ __forceinline__ Span span_of(const Mask& mask, const Dense& place, int row, int rows) {
    const int end_row = clamp(row + rows, 0, place.rows());
    if (row >= end_row) return {0, 0};
    const int first = mask.first_key(place.query(row)), end = mask.end_key(place.query(end_row - 1));
    return first < end ? Span{first / TILE_K, (end - 1) / TILE_K + 1} : Span{0, 0};
}

// The stage that a tile's buffers are in; parities tell one round of the stages from the next.
struct Turn {
    int stage = 0;
    uint32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ uint32 barrier(uint32 shared, int start, int index) { return shared + start + 8 * index; }

// One thread.
__device__ __forceinline__ void produce(const Args& args, const Dense& place, Span span, uint32 shared) {
    const int query_head = static_cast<int>(place.batch()) * args.head_blocks + place.head / args.pack;
    const int key_head = static_cast<int>(place.batch()) * (args.heads / args.group) + place.head / args.group;
    Turn turn;
    for (int tile = span.end - 1; tile >= span.first; --tile) {
        auto load_keys = [&](int part) {
            const int n = turn.stage * PARTS + part;
            mbarrier_wait(barrier(shared, KEYS_EMPTY, n), turn.parity ^ 1);
            KeyTile::load(shared + KEY_START + n * KeyTile::BYTES, args.k_map, barrier(shared, KEYS_FULL, n),
                          {0, tile * TILE_K, key_head, part, 0}, EVICT_LAST);
        };
        load_keys(PARTS - 1);
        if (tile == span.end - 1) {
            for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                for (int part = 0; part < PARTS; ++part) {
                    QueryTile::load(shared + (consumer * PARTS + part) * QueryTile::BYTES, args.q_map,
                                    barrier(shared, QUERIES_FULL, consumer),
                                    {0, place.tile * TILE_Q + consumer * ROWS, query_head, part, 0}, EVICT_FIRST);
                }
            }
        }
        for (int part = PARTS - 2; part >= 0; --part) load_keys(part);
        for (int panel = 0; panel < PANELS; ++panel) {
            const int n = turn.stage * PANELS + panel;
            mbarrier_wait(barrier(shared, VALUES_EMPTY, n), turn.parity ^ 1);
            for (int part = 0; part < PARTS; ++part) {
                ValuePanel::load(shared + VALUE_START + (n * PARTS + part) * ValuePanel::BYTES, args.v_map,
                                 barrier(shared, VALUES_FULL, n), {PANEL * panel, tile * TILE_K, key_head, part, 0},
                                 EVICT_LAST);
            }
        }
        turn.advance();
    }
}

__device__ __forceinline__ void consume(const Args& args, const Mask& mask, const Dense& place, Span span,
                                        uint32 shared, int consumer) {
    const Scaled score{args.scale_log2};
    const int first_row = place.tile * TILE_Q + consumer * ROWS, warp_row = first_row + warp_index() % 4 * 16;
    const int last_row = clamp(warp_row + 16, 0, place.rows()) - 1;
    const Span own = span_of(mask, place, first_row, ROWS);
    // Keys that all rows of the warp see.
    const int all_first = mask.first_key(place.query(last_row)), all_end = mask.end_key(place.query(warp_row));
    auto release = [&](int start, int index) {
        if (lane_index() == 0) mbarrier_arrive(barrier(shared, start, index));
    };

    Out out = {};
    Rows rows;
    Turn turn;
    // Sums of the large product and of the small ones: of scores, and of a panel of out.
    float large[TILE_K / 2], other[TILE_K / 2], large_out[PANEL / 2], other_out[PANEL / 2];
    float(&small)[TILE_K / 2] = ONE_SUM ? large : other;
    float(&small_out)[PANEL / 2] = ONE_SUM ? large_out : other_out;
    // sum += part I of q times part J of the keys.
    auto multiply_keys = [&](float(&sum)[TILE_K / 2], int i, int j, bool first) {
        const uint32 q = uniform((shared + (consumer * PARTS + i) * QueryTile::BYTES) / 16);
        const uint32 k = uniform((shared + KEY_START + (turn.stage * PARTS + j) * KeyTile::BYTES) / 16);
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) {
            Wgmma<TILE_K>::template ss<0, 0>(sum, QueryTile::rows_descriptor(q + QueryTile::right(step)),
                                             KeyTile::rows_descriptor(k + KeyTile::right(step)), !first || step > 0);
        }
    };
    // sum += part I of the weights times part J of a panel of values.
    auto multiply_values = [&](float(&sum)[PANEL / 2], const Weights& weights, int i, int panel, int j, bool first) {
        const int n = (turn.stage * PANELS + panel) * PARTS + j;
        const uint32 v = uniform((shared + VALUE_START + n * ValuePanel::BYTES) / 16);
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
            Wgmma<PANEL>::template rs<1>(sum, weights[step][i],
                                         ValuePanel::columns_descriptor(v + ValuePanel::down(step)),
                                         !first || step > 0);
        }
    };
    auto wait_keys = [&](int part) {
        mbarrier_wait(barrier(shared, KEYS_FULL, turn.stage * PARTS + part), turn.parity);
    };
    auto wait_values = [&](int panel) {
        mbarrier_wait(barrier(shared, VALUES_FULL, turn.stage * PANELS + panel), turn.parity);
    };

    if (span.first < span.end) mbarrier_wait(barrier(shared, QUERIES_FULL, consumer), 0);
    for (int tile = span.end - 1; tile >= span.first; --tile, turn.advance()) {
        if (tile < own.first || tile >= own.end) {  // brought for the other consumer
            for (int part = 0; part < PARTS; ++part) {
                wait_keys(part);
                release(KEYS_EMPTY, turn.stage * PARTS + part);
            }
            for (int panel = 0; panel < PANELS; ++panel) {
                wait_values(panel);
                release(VALUES_EMPTY, turn.stage * PANELS + panel);
            }
            continue;
        }
        Scores scores;
        pin(small);
        pin(large);
#pragma unroll
        for (int j = PARTS - 1; j >= 0; --j) {
            wait_keys(j);
            wgmma_fence();
#pragma unroll
            for (int i = PARTS - 1 - j; i > 0; --i) multiply_keys(small, i, j, j == PARTS - 1);
            multiply_keys(j > 0 ? small : large, 0, j, j == PARTS - 1 || (j == 0 && !ONE_SUM));
            wgmma_commit_group();
        }
        if constexpr (PARTS > 2) {
            wgmma_wait_group<2>();
            release(KEYS_EMPTY, turn.stage * PARTS + 2);
        }
        wgmma_wait_group<1>();
        release(KEYS_EMPTY, turn.stage * PARTS + 1);
        wgmma_wait_group<0>();
        pin(small);
        pin(large);
        release(KEYS_EMPTY, turn.stage * PARTS);
#pragma unroll
        for (int i = 0; i < TILE_K / 2; ++i) scores[i / 4][i % 4] = ONE_SUM ? large[i] : large[i] + small[i];
        const int key = tile * TILE_K;
        if (key < all_first || key + TILE_K > all_end) hide(scores, mask, args.pack, warp_row, key);
        raise(rows, out, scores, score);
        Weights weights;
        weigh(weights, rows, scores, score);
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            pin(small_out);
            pin(large_out);
#pragma unroll
            for (int step = 0; step < TILE_K / 16; ++step) pin(weights[step]);
            wait_values(panel);
            wgmma_fence();
#pragma unroll
            for (int j = PARTS - 1; j >= 0; --j) {
#pragma unroll
                for (int i = PARTS - 1 - j; i > 0; --i) multiply_values(small_out, weights, i, panel, j, false);
                multiply_values(j > 0 ? small_out : large_out, weights, 0, panel, j,
                                j == PARTS - 1 || (j == 0 && !ONE_SUM));
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            pin(small_out);
            pin(large_out);
            release(VALUES_EMPTY, turn.stage * PANELS + panel);
#pragma unroll
            for (int i = 0; i < PANEL / 2; ++i) {
                out[PANEL / 8 * panel + i / 4][i % 4] += ONE_SUM ? large_out[i] : large_out[i] + small_out[i];
            }
        }
    }
    store(args, mask, place, warp_row, out, rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_forward_f32_sm90(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    if (thread_index() == 0) {
        prefetch_tensormap(args.q_map);
        prefetch_tensormap(args.k_map);
        prefetch_tensormap(args.v_map);
        for (int n = 0; n < CONSUMERS; ++n) mbarrier_init(barrier(shared, QUERIES_FULL, n), PARTS);
        for (int n = 0; n < STAGES * PARTS; ++n) {
            mbarrier_init(barrier(shared, KEYS_FULL, n), 1);
            mbarrier_init(barrier(shared, KEYS_EMPTY, n), 4 * CONSUMERS);
        }
        for (int n = 0; n < STAGES * PANELS; ++n) {
            mbarrier_init(barrier(shared, VALUES_FULL, n), PARTS);
            mbarrier_init(barrier(shared, VALUES_EMPTY, n), 4 * CONSUMERS);
        }
        fence_mbarrier_init();
    }
    sync_threads();
    const Dense place = locate(args);
    const Span span = span_of(mask, place, place.tile * TILE_Q, TILE_Q);
    const int warpgroup = uniform(thread_index() / WARPGROUP);
    if (warpgroup == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (thread_index() == 0) produce(args, place, span, shared);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(args, mask, place, span, shared, warpgroup - 1);
    }
}

}  // namespace cuflash
