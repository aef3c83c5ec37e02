// out = softmax(scale q k^T) v and lse, for 16-bit elements, on Hopper.
//
//   q (queries, head_dim), k (keys, head_dim), v (keys, value_dim) -> out (queries, value_dim), lse (queries)
//
// The algorithm is FlashAttention's (Dao 2023), the division of labour FlashAttention-3's (Shah et al. 2024). Blocks
// stay, one a multiprocessor, and draw tiles of rows from a ticket, the longest first. In a block one warpgroup, the
// producer, has a single thread bring q, k and v by tensor copies; each of the others, the consumers, owns 64 rows of
// the tile. Scores, weights and out stay in registers: the accumulator of q k^T is, converted, the A operand of the
// product with v. K and V have two stages each, filled and released on their own.
//
// A consumer works on two key tiles at once: while the tensor cores run q k^T of one and then the product with v of
// the one before, its threads take the maxima of the first and begin its exponentials, which must not wait for the
// second. The rest of the exponentials runs while the other consumers' products fill the tensor cores.
//
// What limits speed: the tensor cores, and the power they take, from head_dim 128 on; at 64 the chain from a product
// through the exponentials to the next product.
#include "careful.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "ptx_sm90.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "tile_sm90.cuh"

namespace cuflash {

constexpr int ROWS = 64;  // of a consumer
constexpr int CONSUMERS = TILE_Q / ROWS;
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);

static_assert(WARPS == 4 * (1 + CONSUMERS) && TILE_Q % ROWS == 0, "WARPS: a producer, and a consumer every 64 rows");
static_assert(STAGES == 2, "STAGES: the loop over keys is written out for two");
static_assert(QUERY_STEPS <= HEAD_DIM / 16, "QUERY_STEPS: of 16 columns of q");
static_assert(TILE_K % 16 == 0 && VALUE_DIM % 32 == 0,
              "whole steps of a product, whole chunks for each quad of threads");

// The registers of a multiprocessor, 64 K, as the launch deals them out: 168, 128 or 96 a thread. The producer gives
// away what the consumers need.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : CONSUMERS == 3 ? 160 : 112;

using QueryTile = Panels<ROWS, HEAD_DIM>;
using KeyTile = Panels<TILE_K, HEAD_DIM>;
using ValueTile = Panels<TILE_K, VALUE_DIM>;
using OutTile = Panels<16, VALUE_DIM>;                          // of a warp, which leaves panel by panel
constexpr int STAGING_BYTES = OUT_STAGED * OutTile::PANEL_BYTES;  // by way of so many places
static_assert(OutTile::COUNT % OUT_STAGED == 0, "OUT_STAGED: as many rounds of the places as fill the tile");

// What a consumer is to do with its rows of a tile. Tiles of keys are visited from the last to the first.
struct alignas(16) Work {
    int row, end_row;                       // packed rows; row may be NONE
    int first_tile, end_tile;               // of the keys that some row sees; those beside them that
    int before, after;                      // the block brings for other consumers
    int plain_first, plain_end;             // tiles of keys that all rows see whole: no test is needed
    int head, batch0, batch1;               // where the rows lie
};
constexpr int NONE = -1;
constexpr int SLOTS = 3;  // rows worked on, rows to come and, written before their turn, rows after those

// What the producer has to know of a tile of rows: its first packed row, or NONE, and the keys that some row sees.
struct alignas(16) Place {
    int row, first_tile, end_tile;
    int head, key_head, batch0, batch1;
};

// Every buffer has two barriers: full, which the copy completes, and empty, on which each warp that reads it arrives.
struct Shared {
    char queries[CONSUMERS][QueryTile::BYTES];
    char keys[STAGES][KeyTile::BYTES];
    char values[STAGES][ValueTile::BYTES];
    char out[4 * CONSUMERS][STAGING_BYTES];
    Work work[SLOTS][CONSUMERS];
    Place next;
    uint64 queries_full[CONSUMERS], queries_empty[CONSUMERS];
    uint64 keys_full[STAGES], keys_empty[STAGES];
    uint64 values_full[STAGES], values_empty[STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and barriers take");
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int OUT_START = OFFSET_OF(Shared, out), WORK_START = OFFSET_OF(Shared, work);
constexpr int NEXT_START = OFFSET_OF(Shared, next);
constexpr int QUERIES_FULL = OFFSET_OF(Shared, queries_full), QUERIES_EMPTY = OFFSET_OF(Shared, queries_empty);
constexpr int KEYS_FULL = OFFSET_OF(Shared, keys_full), KEYS_EMPTY = OFFSET_OF(Shared, keys_empty);
constexpr int VALUES_FULL = OFFSET_OF(Shared, values_full), VALUES_EMPTY = OFFSET_OF(Shared, values_empty);

struct Args {
    const char *q, *k, *v;
    char* out;
    char* lse;  // null where it is not wanted
    char* ticket;  // 0, and 0 again at the end
    TensorMap q_map, k_map, v_map, out_map;  // axes: column, head, row, and the two merged ones
    Strides q_strides, k_strides, v_strides, out_strides;
    Schedule schedule;
    int queries, keys, heads, group, pack, head_dim, value_dim;
    int head_blocks, batches1;   // blocks along heads; length of the inner merged axis
    int first_shift, end_shift;  // of the mask
    int out_boxes;               // a warp's 16 rows of out are a box of out_map
    int blocks;                  // tiles of rows, of this launch
    int rows;                    // of a consumer that hold packed rows: 64, or the most that whole queries fill
    float scale_log2;            // scale * log2 e, positive
};
template struct ArgsLayout<Args>;

// Where a ring of stages goes on. Parities tell one round from the next.
struct Turn {
    int stage;
    uint32 parity;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};
template <int STAGE>
struct Stage {
    static constexpr int VALUE = STAGE;
};

__device__ __forceinline__ uint32 barrier(uint32 shared, int start, int index) { return shared + start + 8 * index; }

// The producer -------------------------------------------------------------------------------------------------------

// By one thread: nothing here may shuffle.
__device__ __forceinline__ Place locate(const Args& args, const Mask& mask, int block) {
    Place place;
    int tile, linear;
    args.schedule.locate(block, tile, linear);
    if (LAST_FIRST) tile = args.schedule.tiles - 1 - tile;
    place.head = linear % args.head_blocks * args.pack;
    place.key_head = place.head / args.group;
    linear /= args.head_blocks;
    place.batch0 = linear / args.batches1;
    place.batch1 = linear % args.batches1;

    const int rows = CONSUMERS * args.rows, all_rows = args.queries * args.pack;
    place.row = tile * rows;
    const int first_key = mask.first_key(query_of(place.row, args.pack));
    const int end_key = mask.end_key(query_of(clamp(place.row + rows, 0, all_rows) - 1, args.pack));
    place.first_tile = first_key / TILE_K;
    place.end_tile = first_key < end_key ? (end_key - 1) / TILE_K + 1 : place.first_tile;
    return place;
}

__device__ __forceinline__ Work work_of(const Args& args, const Mask& mask, const Place& place, int consumer) {
    const int row = place.row + consumer * args.rows, all_rows = args.queries * args.pack;
    const int top = query_of(row, args.pack), bottom = query_of(clamp(row + args.rows, 0, all_rows) - 1, args.pack);
    const int first_key = mask.first_key(top), end_key = mask.end_key(bottom);
    Work work;
    work.row = row;
    work.end_row = clamp(row + args.rows, 0, all_rows);
    work.first_tile = work.end_tile = place.end_tile;
    if (row < all_rows && first_key < end_key) {
        work.first_tile = first_key / TILE_K;
        work.end_tile = (end_key - 1) / TILE_K + 1;
    }
    work.before = work.first_tile - place.first_tile;
    work.after = place.end_tile - work.end_tile;
    work.plain_first = (mask.first_key(bottom) + TILE_K - 1) / TILE_K;
    work.plain_end = mask.end_key(top) / TILE_K;
    work.head = place.head;
    work.batch0 = place.batch0;
    work.batch1 = place.batch1;
    return work;
}

// One thread. Keys come first, tile after tile from the last to the first, so that those of the next rows are on their
// way before the buffer of q is free.
__device__ __forceinline__ void produce(const Args& args, const Mask& mask, uint32 shared) {
    Turn key{0, 1}, value{0, 1};
    uint32 query_parity = 1;
    int slot = 0;

    auto load_keys = [&](const Place& place, int tile) {
        mbarrier_wait(barrier(shared, KEYS_EMPTY, key.stage), key.parity);
        KeyTile::load(shared + KEY_START + key.stage * KeyTile::BYTES, args.k_map,
                      barrier(shared, KEYS_FULL, key.stage),
                      {0, place.key_head, tile * TILE_K, place.batch0, place.batch1}, EVICT_LAST);
        key.advance();
    };
    auto load_values = [&](const Place& place, int tile) {
        mbarrier_wait(barrier(shared, VALUES_EMPTY, value.stage), value.parity);
        ValueTile::load(shared + VALUE_START + value.stage * ValueTile::BYTES, args.v_map,
                        barrier(shared, VALUES_FULL, value.stage),
                        {0, place.key_head, tile * TILE_K, place.batch0, place.batch1}, EVICT_LAST);
        value.advance();
    };
    auto work_at = [&](int consumer) {
        return shared + WORK_START + (slot * CONSUMERS + consumer) * static_cast<int>(sizeof(Work));
    };
    // Finds the next place and leaves it in shared memory, since registers are few, and each consumer's work beside it.
    auto assign = [&](int block) {
        Place place{NONE, 0, 0, 0, 0, 0, 0};
        if (block < args.blocks) place = locate(args, mask, block);
        store_shared(shared + NEXT_START, place);
#pragma unroll 1
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            if (place.row == NONE) {
                store_shared(work_at(consumer), NONE);
            } else {
                store_shared(work_at(consumer), work_of(args, mask, place, consumer));
            }
        }
        slot = (slot + 1) % SLOTS;
    };

    assign(static_cast<int>(fresh_block_index()));
    while (true) {
        const Place place = load_shared<Place>(shared + NEXT_START);
        if (place.row == NONE) break;
        int tile = place.end_tile - 1;
        if (tile >= place.first_tile) load_keys(place, tile);
#pragma unroll 1
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            mbarrier_wait(barrier(shared, QUERIES_EMPTY, consumer), query_parity);
            QueryTile::load(shared + consumer * QueryTile::BYTES, args.q_map, barrier(shared, QUERIES_FULL, consumer),
                            {0, place.head, query_of(place.row + consumer * args.rows, args.pack), place.batch0,
                             place.batch1},
                            EVICT_FIRST, args.rows * 128);
        }
        query_parity ^= 1;
        auto load_next = [&] {
            load_keys(place, tile - 1);
            load_values(place, tile);
            --tile;
        };
#pragma unroll 1
        while (tile > place.first_tile + 1) load_next();
        // Late, so that what is drawn is not left waiting behind long rows, yet early enough to be there when it is
        // needed. A tile of rows draws one ticket, so that the last to draw knows itself.
        const int drawn = atomic_add(args.ticket, 1);
        if (tile > place.first_tile) load_next();
        if (drawn == args.blocks - 1) store_global(args.ticket, 0);
        assign(drawn + grid_size());
        if (tile == place.first_tile) load_values(place, tile);
    }
#pragma unroll 1
    for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
        mbarrier_wait(barrier(shared, QUERIES_EMPTY, consumer), query_parity);
        mbarrier_arrive(barrier(shared, QUERIES_FULL, consumer));
    }
}

// A consumer ---------------------------------------------------------------------------------------------------------

constexpr int STEPS = TILE_K / 16;  // of the product with v: 16 keys, 8 scores of each thread

using Scores = float[TILE_K / 2];
using Out = float[VALUE_DIM / 2];
using Weights = uint32[STEPS][4];
using Words = uint32[VALUE_DIM / 16][4];  // out, as elements
using Rows = SoftmaxRow<float>[2];  // of a thread: row g and row g + 8 of the warp's 16

// The row, of a thread's two, that element i of an accumulator belongs to, and its column, from the thread's first on.
__device__ constexpr int half_of(int i) { return i / 2 % 2; }
__device__ constexpr int column_of(int i) { return 8 * (i / 4) + i % 2; }
__device__ __forceinline__ int first_column() { return lane_index() % 4 * 2; }

// Hidden scores are selected to -inf, whatever they are: those of keys before their row's first and from its end on.
__device__ __forceinline__ void hide_before(Scores& scores, const int (&first)[2]) {
    const int limit[2] = {first[0] - first_column(), first[1] - first_column()};
#pragma unroll
    for (int i = 0; i < TILE_K / 2; ++i) scores[i] = limit[half_of(i)] <= column_of(i) ? scores[i] : -INFINITE;
}
__device__ __forceinline__ void hide_from(Scores& scores, const int (&end)[2]) {
    const int limit[2] = {end[0] - first_column(), end[1] - first_column()};
#pragma unroll
    for (int i = 0; i < TILE_K / 2; ++i) scores[i] = limit[half_of(i)] > column_of(i) ? scores[i] : -INFINITE;
}

// Scores, as integers, from which on a row's reference may have to rise.
struct Limits {
    int row[2];

    // Whether one of this thread's scores has reached them. Floats that are not negative are ordered as integers are;
    // where a limit is negative the answer is always yes, which costs time and nothing else.
    __device__ __forceinline__ bool outgrown(const Scores& scores) const {
        int top[2][2];
#pragma unroll
        for (int n = 0; n < 4; ++n) top[half_of(2 * n)][n / 2] = bits_of(scores[2 * n]);
#pragma unroll
        for (int i = 0; i < TILE_K / 2; i += 2) {
            int& most = top[half_of(i)][i / 4 % 2];
            most = maximum(most, bits_of(scores[i]), bits_of(scores[i + 1]));
        }
        return maximum(top[0][0], top[0][1]) >= row[0] || maximum(top[1][0], top[1][1]) >= row[1];
    }
    __device__ __forceinline__ void set(const Rows& rows, float factor) {
        constexpr float LAG = SoftmaxRow<float>::LAG - 0x1p-10f;  // less than raise() allows, rounding included
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float limit = (rows[half].reference + LAG) * reciprocal(factor);
            row[half] = limit >= 0.0f ? bits_of(limit) : bits_of(-0.0f);
        }
    }
};

// Raises the rows' references to what this tile needs; out is rescaled where one has moved, or cleared for the FIRST.
template <bool FIRST>
__device__ __forceinline__ void raise(Rows& rows, Out& out, const Scores& scores, const Scaled& score) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = -INFINITE;
#pragma unroll
        for (int i = 2 * half; i < TILE_K / 2; i += 4) top = maximum(top, maximum(scores[i], scores[i + 1]));
        const float factor = rows[half].raise(maximum_of_row(top) * score.factor());
#pragma unroll
        for (int i = 2 * half; i < VALUE_DIM / 2; i += 4) {
            out[i] = FIRST ? 0.0f : out[i] * factor;
            out[i + 1] = FIRST ? 0.0f : out[i + 1] * factor;
        }
    }
}

// The weights of 16 keys.
__device__ __forceinline__ float weight_of(float s, const float (&shift)[2], const Scaled& score, int i) {
    return ex2_approx(fused_multiply_add(s, score.factor(), -shift[half_of(i)]));
}

// The first EARLY steps of a tile's scores to weights, in place.
__device__ __forceinline__ void begin_weights(Scores& scores, const float (&shift)[2], const Scaled& score) {
#pragma unroll
    for (int i = 0; i < 8 * EARLY; ++i) scores[i] = weight_of(scores[i], shift, score, i);
}

// Sums the tile's weights and converts them to the A operand of the product with v; the first DONE steps are weights,
// the others still scores.
template <int DONE>
__device__ __forceinline__ void weigh(Weights& weights, Rows& rows, const Scores& scores, const float (&shift)[2],
                                      const Scaled& score) {
    float sums[2][2];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        float w[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float s = scores[8 * step + i];
            w[i] = step < DONE ? s : weight_of(s, shift, score, i);
        }
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // rows g and g + 8 of keys 0-7, then of keys 8-15
            weights[step][part] = cvt_pair(Element{}, w[2 * part], w[2 * part + 1]);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& sum = sums[part % 2][e];
                sum = step == 0 && part < 2 ? w[2 * part + e] : sum + w[2 * part + e];
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[half].sum += sums[half][0] + sums[half][1];
}

// Addresses of a packed row of q or out, and of its lse.
__device__ __forceinline__ int head_of(const Args& args, const Work& work, int packed) {
    return args.pack == 1 ? work.head : work.head + packed % args.pack;
}
template <typename Pointer>
__device__ __forceinline__ Pointer row_of(const Args& args, Pointer base, const Strides& strides, const Work& work,
                                          int packed) {
    return base + strides.offset(work.batch0, work.batch1, head_of(args, work, packed)) +
           query_of(packed, args.pack) * strides.row;
}
__device__ __forceinline__ char* lse_of(const Args& args, const Work& work, int packed) {
    const int64 batch = static_cast<int64>(work.batch0) * args.batches1 + work.batch1;
    const int64 row = (batch * args.heads + head_of(args, work, packed)) * args.queries + query_of(packed, args.pack);
    return args.lse + row * sizeof(float);
}

// A warp's 16 rows of out, by way of shared memory that is this warp's alone: as boxes or, where heads are packed so
// that no box holds the rows, a chunk a lane at a time.
__device__ __forceinline__ void store_rows(const Args& args, const Work& work, uint32 staging, int first_row,
                                           const Words& words) {
    const int lane = lane_index();
#pragma unroll
    for (int first = 0; first < OutTile::COUNT; first += OUT_STAGED) {
        auto place = [&](int panel) { return staging + (panel - first) * OutTile::PANEL_BYTES; };
        if (lane == 0) cp_async_bulk_wait_group_read<0>();  // the panels that were here have left
        sync_warp();
#pragma unroll
        for (int panel = first; panel < first + OUT_STAGED; ++panel) {
#pragma unroll
            for (int step = 4 * panel; step < 4 * panel + 4 && step < VALUE_DIM / 16; ++step) {
                stmatrix_x4(place(panel) + OutTile::offset(lane % 16, 2 * (step % 4) + lane / 16), words[step]);
            }
        }
        if (args.out_boxes) {
            fence_proxy_async();
            sync_warp();
            if (lane == 0 && first_row < work.end_row) {
#pragma unroll
                for (int panel = first; panel < first + OUT_STAGED; ++panel) {
                    cp_async_bulk_tensor_store(
                        args.out_map, place(panel),
                        {64 * panel, work.head, query_of(first_row, args.pack), work.batch0, work.batch1});
                }
                cp_async_bulk_commit_group();
            }
        } else {
            sync_warp();
#pragma unroll 1
            for (int n = lane; n < 16 * 8 * OUT_STAGED; n += WARP) {
                const int r = n % 16, chunk = n / 16, column = 64 * first + 8 * chunk;
                if (first_row + r < work.end_row && column < args.value_dim) {
                    store_global(row_of(args, args.out, args.out_strides, work, first_row + r) + 2 * column,
                                 load_shared<Vector16>(place(first + chunk / 8) + OutTile::offset(r, chunk % 8)));
                }
            }
            sync_warp();
        }
    }
}

// Zeros and -inf, for a warp's 16 rows that see no key.
__device__ __forceinline__ void store_nothing(const Args& args, const Work& work) {
    const Rows rows;
    const int first_row = work.row + warp_index() % 4 * 16, end_row = clamp(work.end_row, first_row, first_row + 16);
    for (int packed = first_row; packed < end_row; ++packed) {
        for (int d = lane_index(); d < args.value_dim; d += WARP) {
            store_global(row_of(args, args.out, args.out_strides, work, packed) + 2 * d, Element{0});
        }
        if (args.lse != nullptr && lane_index() == 0) store_global(lse_of(args, work, packed), rows[0].lse());
    }
}

// Writes a warp's 16 rows of out and lse. A product that another tile has begun may be in flight.
__device__ __forceinline__ void store(const Args& args, const Mask& mask, const Work& work, uint32 staging,
                                      const Out& out, const Rows& rows) {
    const int lane = lane_index(), first_row = work.row + warp_index() % 4 * 16;  // of the warp
    Words words;
    uint32 zeros[2] = {};  // sums of 0 times an element: NaN where one is not finite
    const float inverse[2] = {rows[0].inverse_sum(), rows[1].inverse_sum()};
#pragma unroll
    for (int step = 0; step < VALUE_DIM / 16; ++step) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // rows g and g + 8 of 8 columns, then of the next 8
            const float* pair = out + 8 * step + 2 * part;
            words[step][part] = cvt_pair(Element{}, pair[0] * inverse[part % 2], pair[1] * inverse[part % 2]);
            zeros[part % 2] = fma_pair(Element{}, words[step][part], 0, zeros[part % 2]);
        }
    }
    uint32 suspects[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half + lane / 4;
        const bool inside = row < work.end_row, lost = (zeros[half] & 0x7fff7fff) != 0 && is_finite(inverse[half]);
        suspects[half] = ballot(inside && (lost || rows[half].too_coarse()));
        if (args.lse != nullptr && lane % 4 == 0 && inside) store_global(lse_of(args, work, row), rows[half].lse());
    }
    store_rows(args, work, staging, first_row, words);
    if ((suspects[0] | suspects[1]) == 0) return;
    if (lane == 0) cp_async_bulk_wait_group<0>();  // what is written again must have been written
    sync_warp();
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
        if ((suspects[r / 8] >> (r % 8 * 4) & 0xf) == 0) continue;
        const int row = first_row + r, i = query_of(row, args.pack), key_head = work.head / args.group;
        careful_row<Element>(args, row_of(args, args.q, args.q_strides, work, row),
                    args.k + args.k_strides.offset(work.batch0, work.batch1, key_head),
                    args.v + args.v_strides.offset(work.batch0, work.batch1, key_head),
                    row_of(args, args.out, args.out_strides, work, row), lse_of(args, work, row), mask.first_key(i),
                    mask.end_key(i));
    }
}

__device__ __forceinline__ void consume(const Args& args, const Mask& mask, uint32 shared, int consumer) {
    const Scaled score{args.scale_log2};
    const bool leader = lane_index() == 0;  // arrives for its warp
    const uint32 query_shared = shared + consumer * QueryTile::BYTES;
    const uint32 staging = shared + OUT_START + (warp_index() - 4) * STAGING_BYTES;  // the producer's warps come first
    Turn key{0, 0}, value{0, 0};
    uint32 query_parity = 0;
    int slot = SLOTS - 1;
    Scores scores;
    Out out;
    Weights weights;
    uint32 queries[QUERY_STEPS > 0 ? QUERY_STEPS : 1][4];  // the first steps of q
    constexpr bool QUERIES_HELD = QUERY_STEPS == HEAD_DIM / 16;  // all

    // Products of the rows with the keys, and of the weights with the values, of a stage, in flight when they return.
    auto multiply_keys = [&](int stage) {
        const uint32 keys = (shared + KEY_START) / 16 + stage * (KeyTile::BYTES / 16);
        const uint32 rows = QUERIES_HELD ? 0 : uniform(query_shared / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) {
            const uint64 b = KeyTile::rows_descriptor(keys + KeyTile::right(step));
            if (step < QUERY_STEPS) {
                Wgmma<TILE_K>::template rs<0>(scores, queries[step], b, step > 0);
            } else {
                Wgmma<TILE_K>::template ss<0, 0>(scores, QueryTile::rows_descriptor(rows + QueryTile::right(step)), b,
                                                 step > 0);
            }
        }
        wgmma_commit_group();
    };
    auto multiply_values = [&](int stage) {
        const uint32 values = (shared + VALUE_START) / 16 + stage * (ValueTile::BYTES / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            Wgmma<VALUE_DIM>::template rs<1>(out, weights[step],
                                             ValueTile::columns_descriptor(values + ValueTile::down(step)), true);
        }
        wgmma_commit_group();
    };
    auto release = [&](int start, int index) {
        if (leader) mbarrier_arrive(barrier(shared, start, index));
    };
    auto skip = [&](int tiles) {  // tiles of keys that the block brings for other consumers
#pragma unroll 1
        for (; tiles > 0; --tiles) {
            mbarrier_wait(barrier(shared, KEYS_FULL, key.stage), key.parity);
            release(KEYS_EMPTY, key.stage);
            key.advance();
            mbarrier_wait(barrier(shared, VALUES_FULL, value.stage), value.parity);
            release(VALUES_EMPTY, value.stage);
            value.advance();
        }
    };

    bool more;  // rows are being worked on
    int tile, first_tile, plain_first, plain_end;
    auto work_shared = [&](int slot) {
        return shared + WORK_START + (slot * CONSUMERS + consumer) * static_cast<int>(sizeof(Work));
    };
    auto row_of_work = [&] { return load_shared<int>(work_shared(slot)); };
    // Takes the next rows, up to their first tile of keys. Rows that see no key are done with at once.
    auto take = [&] {
        while (true) {
            mbarrier_wait(barrier(shared, QUERIES_FULL, consumer), query_parity);
            query_parity ^= 1;
            slot = (slot + 1) % SLOTS;
            more = uniform(row_of_work()) != NONE;
            if (!more) return;
            const Work work = load_shared<Work>(work_shared(slot));
            tile = uniform(work.end_tile) - 1;
            first_tile = uniform(work.first_tile);
            plain_first = uniform(work.plain_first);
            plain_end = uniform(work.plain_end);
            if (tile >= first_tile) break;
            release(QUERIES_EMPTY, consumer);
            skip(uniform(work.before));
            store_nothing(args, work);
            sync_warp();  // what follows takes warps that are together
        }
        if constexpr (QUERY_STEPS > 0) {
            const int lane = lane_index(), warp_row = warp_index() % 4 * 16;
#pragma unroll
            for (int step = 0; step < QUERY_STEPS; ++step) {
                ldmatrix_x4(queries[step],
                            query_shared + QueryTile::offset(warp_row + lane % 16, 2 * step + lane / 16));
            }
            sync_warp();
            if (QUERIES_HELD) release(QUERIES_EMPTY, consumer);
        }
        skip(uniform(load_shared<Work>(work_shared(slot)).after));
        mbarrier_wait(barrier(shared, KEYS_FULL, key.stage), key.parity);
    };
    // Their first product. After the last rows it is one of old rows and keys, for nothing: registers of a product in
    // flight must not depend on a branch.
    auto begin = [&] {
        pin(scores);
        multiply_keys(uniform(key.stage));
    };
    auto finish = [&] {
        wgmma_wait_group<0>();
        pin(scores);
    };
    auto hide = [&] {
        auto query = [&](int half) {
            return query_of(row_of_work() + warp_index() % 4 * 16 + 8 * half + lane_index() / 4, args.pack);
        };
        const int key = tile * TILE_K;
        if (tile >= plain_end) hide_from(scores, {mask.end_key(query(0)) - key, mask.end_key(query(1)) - key});
        if (!Mask::FROM_FIRST && tile < plain_first) {
            hide_before(scores, {mask.first_key(query(0)) - key, mask.first_key(query(1)) - key});
        }
    };

    take();
    begin();
    finish();
    while (more) {
        release(KEYS_EMPTY, key.stage);
        if (!QUERIES_HELD && tile == first_tile) release(QUERIES_EMPTY, consumer);
        key.advance();
        Rows rows;
        hide();
        raise<true>(rows, out, scores, score);
        Limits limits;
        limits.set(rows, score.factor());
        float shift[2] = {rows[0].shift(), rows[1].shift()};
        weigh<0>(weights, rows, scores, shift, score);

        // The keys of `tile` and the values of the tile before it, whose stage is the other one.
        auto step = [&](auto stage) {
            constexpr int KEYS = decltype(stage)::VALUE, VALUES = 1 - KEYS;
            mbarrier_wait(barrier(shared, KEYS_FULL, KEYS), key.parity);
            pin(scores);
            pin(out);
            pin(weights);
            multiply_keys(KEYS);
            mbarrier_wait(barrier(shared, VALUES_FULL, VALUES), value.parity);
            multiply_values(VALUES);
            wgmma_wait_group<1>();
            pin(scores);
            release(KEYS_EMPTY, KEYS);
            if (!QUERIES_HELD && tile == first_tile) release(QUERIES_EMPTY, consumer);
            hide();
            const bool outgrown = any(limits.outgrown(scores));
            if (!outgrown) begin_weights(scores, shift, score);  // a branch keeps the compiler from waiting first
            wgmma_wait_group<0>();
            pin(out);
            pin(weights);
            release(VALUES_EMPTY, VALUES);
            if (outgrown) {
                raise<false>(rows, out, scores, score);
                limits.set(rows, score.factor());
                shift[0] = rows[0].shift(), shift[1] = rows[1].shift();
                begin_weights(scores, shift, score);
            }
            weigh<EARLY>(weights, rows, scores, shift, score);
            if (KEYS == 1) key.parity ^= 1;
            if (VALUES == 1) value.parity ^= 1;
        };
        if (--tile >= first_tile) {
            bool second = key.stage == 1;
#pragma unroll 1
            while (true) {
                if (!second) {
                    step(Stage<0>());
                    if (--tile < first_tile) {
                        key.stage = 1;
                        value.stage = 0;
                        break;
                    }
                }
                second = false;
                step(Stage<1>());
                if (--tile < first_tile) {
                    key.stage = 0;
                    value.stage = 1;
                    break;
                }
            }
        }
        mbarrier_wait(barrier(shared, VALUES_FULL, value.stage), value.parity);
        pin(out);
        pin(weights);
        multiply_values(uniform(value.stage));
        rows[0].finish<4>();
        rows[1].finish<4>();
        wgmma_wait_group<0>();
        pin(out);
        release(VALUES_EMPTY, value.stage);
        value.advance();
        const Work done = load_shared<Work>(work_shared(slot));
        skip(uniform(done.before));
        take();
        begin();  // beside it these rows are written
        store(args, mask, done, staging, out, rows);
        sync_warp();
        finish();
    }
    if (leader) cp_async_bulk_wait_group_read<0>();  // shared memory goes with the block
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_forward_sm90(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    if (thread_index() == 0) {
        prefetch_tensormap(args.q_map);
        prefetch_tensormap(args.k_map);
        prefetch_tensormap(args.v_map);
        for (int n = 0; n < CONSUMERS; ++n) {
            mbarrier_init(barrier(shared, QUERIES_FULL, n), 1);
            mbarrier_init(barrier(shared, QUERIES_EMPTY, n), 4);
        }
        for (int n = 0; n < STAGES; ++n) {
            mbarrier_init(barrier(shared, KEYS_FULL, n), 1);
            mbarrier_init(barrier(shared, VALUES_FULL, n), 1);
            mbarrier_init(barrier(shared, KEYS_EMPTY, n), 4 * CONSUMERS);
            mbarrier_init(barrier(shared, VALUES_EMPTY, n), 4 * CONSUMERS);
        }
        fence_mbarrier_init();
    }
    sync_threads();
    const int warpgroup = uniform(thread_index() / WARPGROUP);
    if (warpgroup == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (thread_index() == 0) produce(args, mask, shared);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(args, mask, shared, warpgroup - 1);
    }
}

}  // namespace cuflash
