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
// What limits speed: the tensor cores from head_dim 128 on (95 % of their cycles are used), the chain from a product
// through the exponentials to the next product at 64.
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
static_assert(TILE_K % 16 == 0 && VALUE_DIM % 32 == 0, "whole steps of a product, whole chunks for each quad of threads");

// The registers of a multiprocessor, 64 K, as the launch deals them out: 168, 128 or 96 a thread. The producer gives
// away what the consumers need.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : CONSUMERS == 3 ? 160 : 112;

using QueryTile = Panels<ROWS, HEAD_DIM>;
using KeyTile = Panels<TILE_K, HEAD_DIM>;
using ValueTile = Panels<TILE_K, VALUE_DIM>;

// A tile of rows, and the tiles of keys that some row of it sees.
struct alignas(16) Work {
    int row;  // first packed row, or NONE
    int head, key_head, batch0, batch1;
    int first_tile, end_tile;
};
constexpr int NONE = -1;

// Every buffer has two barriers: full, which the copy completes, and empty, on which each warp that reads it arrives.
struct Shared {
    char queries[CONSUMERS][QueryTile::BYTES];
    char keys[STAGES][KeyTile::BYTES];
    char values[STAGES][ValueTile::BYTES];
    Work work[2][CONSUMERS];  // this tile's and the next one's
    uint64 queries_full[CONSUMERS], queries_empty[CONSUMERS];
    uint64 keys_full[STAGES], keys_empty[STAGES];
    uint64 values_full[STAGES], values_empty[STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and barriers take");
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int WORK_START = OFFSET_OF(Shared, work);
constexpr int QUERIES_FULL = OFFSET_OF(Shared, queries_full), QUERIES_EMPTY = OFFSET_OF(Shared, queries_empty);
constexpr int KEYS_FULL = OFFSET_OF(Shared, keys_full), KEYS_EMPTY = OFFSET_OF(Shared, keys_empty);
constexpr int VALUES_FULL = OFFSET_OF(Shared, values_full), VALUES_EMPTY = OFFSET_OF(Shared, values_empty);

struct Args {
    const char *q, *k, *v;
    char* out;
    char* lse;  // null where it is not wanted
    char* ticket;  // 0, and 0 again at the end
    TensorMap q_map, k_map, v_map;  // axes: column, head, row, and the two merged ones
    Strides q_strides, k_strides, v_strides, out_strides;
    Schedule schedule;
    int queries, keys, heads, group, pack, head_dim, value_dim;
    int head_blocks, batches1;   // blocks along heads; length of the inner merged axis
    int first_shift, end_shift;  // of the mask
    int out_vectors;             // rows of out can be written 16 bytes at a time
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
__device__ __forceinline__ Work locate(const Args& args, const Mask& mask, int block) {
    Work work{NONE, 0, 0, 0, 0, 0, 0};
    if (block >= args.blocks) return work;
    int tile, linear;
    args.schedule.locate(block, tile, linear);
    if (LAST_FIRST) tile = args.schedule.tiles - 1 - tile;
    work.head = linear % args.head_blocks * args.pack;
    work.key_head = work.head / args.group;
    linear /= args.head_blocks;
    work.batch0 = linear / args.batches1;
    work.batch1 = linear % args.batches1;

    const int rows = CONSUMERS * args.rows, all_rows = args.queries * args.pack;
    work.row = tile * rows;
    const int first_key = mask.first_key(query_of(work.row, args.pack));
    const int end_key = mask.end_key(query_of(clamp(work.row + rows, 0, all_rows) - 1, args.pack));
    work.first_tile = first_key / TILE_K;
    work.end_tile = first_key < end_key ? (end_key - 1) / TILE_K + 1 : work.first_tile;
    return work;
}

// One thread. Keys come first, tile after tile from the last to the first, so that those of the next rows are on their
// way before the buffer of q is free.
__device__ __forceinline__ void produce(const Args& args, const Mask& mask, uint32 shared) {
    Turn key{0, 1}, value{0, 1};
    uint32 query_parity = 1;
    int slot = 0;

    auto load_keys = [&](const Work& work, int tile) {
        mbarrier_wait(barrier(shared, KEYS_EMPTY, key.stage), key.parity);
        KeyTile::load(shared + KEY_START + key.stage * KeyTile::BYTES, args.k_map, barrier(shared, KEYS_FULL, key.stage),
                      {0, work.key_head, tile * TILE_K, work.batch0, work.batch1}, EVICT_LAST);
        key.advance();
    };
    auto load_values = [&](const Work& work, int tile) {
        mbarrier_wait(barrier(shared, VALUES_EMPTY, value.stage), value.parity);
        ValueTile::load(shared + VALUE_START + value.stage * ValueTile::BYTES, args.v_map,
                        barrier(shared, VALUES_FULL, value.stage),
                        {0, work.key_head, tile * TILE_K, work.batch0, work.batch1}, EVICT_LAST);
        value.advance();
    };

    for (int block = static_cast<int>(fresh_block_index());;) {
        const Work work = locate(args, mask, block);
        if (work.row != NONE) {  // every tile draws one ticket, so that the last to draw knows itself
            block = atomic_add(args.ticket, 1);
            if (block == args.blocks - 1) store_global(args.ticket, 0);
            block += grid_size();
        }
        int tile = work.end_tile - 1;
        const bool any_key = tile >= work.first_tile;
        if (any_key) load_keys(work, tile);
#pragma unroll 1
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            mbarrier_wait(barrier(shared, QUERIES_EMPTY, consumer), query_parity);
            store_shared(shared + WORK_START + (slot * CONSUMERS + consumer) * static_cast<int>(sizeof(Work)), work);
            const int row = work.row + consumer * args.rows;
            const uint32 full = barrier(shared, QUERIES_FULL, consumer);
            if (work.row == NONE) {
                mbarrier_arrive(full);
            } else {
                QueryTile::load(shared + consumer * QueryTile::BYTES, args.q_map, full,
                                {0, work.head, query_of(row, args.pack), work.batch0, work.batch1}, EVICT_FIRST,
                                args.rows * 128);
            }
        }
        if (work.row == NONE) return;
        query_parity ^= 1;
        slot ^= 1;
#pragma unroll 1
        for (; tile > work.first_tile; --tile) {
            load_keys(work, tile - 1);
            load_values(work, tile);
        }
        if (any_key) load_values(work, tile);
    }
}

// A consumer ---------------------------------------------------------------------------------------------------------

constexpr int STEPS = TILE_K / 16;  // of the product with v: 16 keys, 8 scores of each thread

using Scores = float[TILE_K / 2];
using Out = float[VALUE_DIM / 2];
using Weights = uint32[STEPS][4];
using Rows = SoftmaxRow<float>[2];  // of a thread: row g and row g + 8 of the warp's 16

// The row, of a thread's two, that element i of an accumulator belongs to, and its column.
__device__ constexpr int half_of(int i) { return i / 2 % 2; }
__device__ __forceinline__ int column_of(int lane, int i) { return 8 * (i / 4) + lane % 4 * 2 + i % 2; }

// Hidden scores are selected to -inf, whatever they are: those of keys before their row's first and from its end on.
__device__ __forceinline__ void hide_before(Scores& scores, const int (&first)[2]) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < TILE_K / 2; ++i) {
        scores[i] = column_of(lane, i) >= first[half_of(i)] ? scores[i] : -INFINITE;
    }
}
__device__ __forceinline__ void hide_from(Scores& scores, const int (&end)[2]) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < TILE_K / 2; ++i) {
        scores[i] = column_of(lane, i) < end[half_of(i)] ? scores[i] : -INFINITE;
    }
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
            const float limit = (rows[half].reference + LAG) * rcp_approx(factor);
            row[half] = limit >= 0.0f ? bits_of(limit) : bits_of(-0.0f);
        }
    }
};

// Raises the rows' references to what this tile needs; out is rescaled where one has moved.
__device__ __forceinline__ void raise(Rows& rows, Out& out, const Scores& scores, const Scaled& score) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = -INFINITE;
#pragma unroll
        for (int i = 2 * half; i < TILE_K / 2; i += 4) top = maximum(top, maximum(scores[i], scores[i + 1]));
        top = maximum(top, shuffle_xor(top, 1));
        top = maximum(top, shuffle_xor(top, 2));
        const float factor = rows[half].raise(top * score.factor());
#pragma unroll
        for (int i = 2 * half; i < VALUE_DIM / 2; i += 4) {
            out[i] *= factor;
            out[i + 1] *= factor;
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

// Words of four neighbouring blocks of 8 columns, one of each block a thread: after it, thread t of a quad has all
// four of block t. A transposition in two exchanges, with the neighbour and with the one after.
__device__ __forceinline__ Vector16 gather_chunk(const uint32 (&words)[4], int lane) {
    const bool odd = lane % 2, high = lane / 2 % 2;
    const uint32 kept[2] = {odd ? words[1] : words[0], odd ? words[3] : words[2]};
    const uint32 given[2] = {shuffle_xor(odd ? words[0] : words[1], 1), shuffle_xor(odd ? words[2] : words[3], 1)};
    const uint32 low_pair[2] = {odd ? given[0] : kept[0], odd ? kept[0] : given[0]};
    const uint32 high_pair[2] = {odd ? given[1] : kept[1], odd ? kept[1] : given[1]};
    uint32 own[2], other[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        own[n] = high ? high_pair[n] : low_pair[n];
        other[n] = shuffle_xor(high ? low_pair[n] : high_pair[n], 2);
    }
    return high ? Vector16{{other[0], other[1], own[0], own[1]}} : Vector16{{own[0], own[1], other[0], other[1]}};
}

// Writes a warp's 16 rows of out and lse.
__device__ __forceinline__ void store(const Args& args, const Mask& mask, const Work& work, int consumer, Out& out,
                                      Rows& rows) {
    const int lane = lane_index(), warp_row = warp_index() % 4 * 16;
    const int first_row = work.row + consumer * args.rows;
    const int all_rows = args.queries * args.pack;
    auto inside = [&](int r) { return r < args.rows && first_row + r < all_rows; };
    auto row_of = [&](const char* base, const Strides& strides, int r) {
        const int packed = first_row + r, head = args.pack == 1 ? work.head : work.head + packed % args.pack;
        return base + strides.offset(work.batch0, work.batch1, head) + query_of(packed, args.pack) * strides.row;
    };
    auto lse_of = [&](int r) {
        const int packed = first_row + r, head = args.pack == 1 ? work.head : work.head + packed % args.pack;
        const int64 batch = static_cast<int64>(work.batch0) * args.batches1 + work.batch1;
        return args.lse + ((batch * args.heads + head) * args.queries + query_of(packed, args.pack)) * sizeof(float);
    };
    uint32 suspects[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = warp_row + 8 * half + lane / 4;
        const float inverse = rows[half].inverse_sum();
        char* row = const_cast<char*>(row_of(args.out, args.out_strides, r));
        float total = 0.0f;  // finite only if all are
#pragma unroll
        for (int i = 2 * half; i < VALUE_DIM / 2; i += 4) {
            out[i] *= inverse;
            out[i + 1] *= inverse;
            total += out[i] + out[i + 1];
        }
        if (args.out_vectors) {
#pragma unroll
            for (int n = 0; n < VALUE_DIM / 8; n += 4) {
                uint32 words[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const int i = 4 * (n + m) + 2 * half;
                    words[m] = cvt_pair(Element{}, out[i], out[i + 1]);
                }
                const Vector16 chunk = gather_chunk(words, lane);
                const int column = 8 * (n + lane % 4);
                if (inside(r) && column < args.value_dim) store_global(row + 2 * column, chunk);
            }
        } else {
#pragma unroll
            for (int i = 2 * half; i < VALUE_DIM / 2; i += i % 2 ? 3 : 1) {
                const int column = column_of(lane, i);
                const Element element{static_cast<unsigned short>(cvt_pair(Element{}, out[i], 0.0f))};
                if (inside(r) && column < args.value_dim) store_global(row + 2 * column, element);
            }
        }
        if (inside(r) && args.lse != nullptr && lane % 4 == 0) store_global(lse_of(r), rows[half].lse());
        const bool lost = !is_finite(total) && is_finite(inverse);
        suspects[half] = ballot(inside(r) && (lost || rows[half].too_coarse()));
    }
    sync_warp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        while (suspects[half] != 0) {
            const int quad = find_first_set(suspects[half]) / 4;
            suspects[half] &= ~(0xfu << (4 * quad));
            const int r = warp_row + 8 * half + quad, i = query_of(first_row + r, args.pack);
            careful_row(args, row_of(args.q, args.q_strides, r),
                        args.k + args.k_strides.offset(work.batch0, work.batch1, work.key_head),
                        args.v + args.v_strides.offset(work.batch0, work.batch1, work.key_head),
                        const_cast<char*>(row_of(args.out, args.out_strides, r)), lse_of(r), mask.first_key(i),
                        mask.end_key(i));
        }
    }
}

__device__ __forceinline__ void consume(const Args& args, const Mask& mask, uint32 shared, int consumer) {
    const Scaled score{args.scale_log2};
    const bool leader = lane_index() == 0;  // arrives for its warp
    const uint32 query_shared = shared + consumer * QueryTile::BYTES;
    Turn key{0, 0}, value{0, 0};
    uint32 query_parity = 0;
    int slot = 0;
    Scores scores;
    Out out;
    Weights weights;
    uint32 queries[QUERY_REGISTERS ? HEAD_DIM / 16 : 1][4];

    // Products of the rows with the keys, and of the weights with the values, of a stage, in flight when they return.
    auto multiply_keys = [&](uint64 keys) {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) {
            if constexpr (QUERY_REGISTERS) {
                Wgmma<TILE_K>::template rs<0>(scores, queries[step], keys + KeyTile::right(step), step > 0);
            } else {
                const uint64 rows = QueryTile::rows_descriptor(uniform(query_shared)) + QueryTile::right(step);
                Wgmma<TILE_K>::template ss<0, 0>(scores, rows, keys + KeyTile::right(step), step > 0);
            }
        }
        wgmma_commit_group();
    };
    auto multiply_values = [&](uint64 values) {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            Wgmma<VALUE_DIM>::template rs<1>(out, weights[step], values + ValueTile::down(step), true);
        }
        wgmma_commit_group();
    };
    auto keys_of = [&](int stage) { return KeyTile::rows_descriptor(shared + KEY_START + stage * KeyTile::BYTES); };
    auto values_of = [&](int stage) {
        return ValueTile::columns_descriptor(shared + VALUE_START + stage * ValueTile::BYTES);
    };
    auto release = [&](int start, int index) {
        if (leader) mbarrier_arrive(barrier(shared, start, index));
    };
    auto skip = [&] {  // a tile of keys that no row of this consumer sees
        mbarrier_wait(barrier(shared, KEYS_FULL, key.stage), key.parity);
        release(KEYS_EMPTY, key.stage);
        key.advance();
        mbarrier_wait(barrier(shared, VALUES_FULL, value.stage), value.parity);
        release(VALUES_EMPTY, value.stage);
        value.advance();
    };

    while (true) {
        mbarrier_wait(barrier(shared, QUERIES_FULL, consumer), query_parity);
        query_parity ^= 1;
        const uint32 work_shared = shared + WORK_START + (slot * CONSUMERS + consumer) * static_cast<int>(sizeof(Work));
        slot ^= 1;
        const Work work = load_shared<Work>(work_shared);
        if (work.row == NONE) return;

        // Tiles of keys that some row of this consumer sees, and those among them that need no test.
        const int row = work.row + consumer * args.rows, all_rows = args.queries * args.pack;
        const int top = query_of(row, args.pack);
        const int bottom = query_of(clamp(row + args.rows, 0, all_rows) - 1, args.pack);
        const int some_first = mask.first_key(top), some_end = mask.end_key(bottom);
        const bool sees = row < all_rows && some_first < some_end;
        const int first_tile = sees ? uniform(some_first / TILE_K) : work.end_tile;
        const int end_tile = sees ? uniform((some_end - 1) / TILE_K + 1) : work.end_tile;
        const int plain_first = uniform((mask.first_key(bottom) + TILE_K - 1) / TILE_K);
        const int plain_end = uniform(mask.end_key(top) / TILE_K);

        if constexpr (QUERY_REGISTERS) {
            const int lane = lane_index(), warp_row = warp_index() % 4 * 16;
#pragma unroll
            for (int step = 0; step < HEAD_DIM / 16; ++step) {
                ldmatrix_x4(queries[step], query_shared + QueryTile::offset(warp_row + lane % 16, 2 * step + lane / 16));
            }
            sync_warp();
            release(QUERIES_EMPTY, consumer);
        }
        int tile = work.end_tile - 1;
#pragma unroll 1
        for (; tile >= end_tile; --tile) skip();

        Rows rows;
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 2; ++i) out[i] = 0.0f;
        auto hide = [&] {
            // Worked out again in the few tiles that need it: registers are short.
            auto query = [&](int half) {
                const int r = warp_index() % 4 * 16 + 8 * half + lane_index() / 4;
                return query_of(load_shared<Work>(work_shared).row + consumer * args.rows + r, args.pack);
            };
            const int key = tile * TILE_K;
            if (tile >= plain_end) hide_from(scores, {mask.end_key(query(0)) - key, mask.end_key(query(1)) - key});
            if (!Mask::FROM_FIRST && tile < plain_first) {
                hide_before(scores, {mask.first_key(query(0)) - key, mask.first_key(query(1)) - key});
            }
        };
        if (sees) {
            mbarrier_wait(barrier(shared, KEYS_FULL, key.stage), key.parity);
            pin(scores);
            multiply_keys(keys_of(uniform(key.stage)));
            wgmma_wait_group<0>();
            pin(scores);
            release(KEYS_EMPTY, key.stage);
            key.advance();
            hide();
            raise(rows, out, scores, score);
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
                multiply_keys(keys_of(KEYS));
                mbarrier_wait(barrier(shared, VALUES_FULL, VALUES), value.parity);
                multiply_values(values_of(VALUES));
                wgmma_wait_group<1>();
                pin(scores);
                release(KEYS_EMPTY, KEYS);
                hide();
                const bool outgrown = any(limits.outgrown(scores));
                if (!outgrown) {  // a branch, so that the compiler leaves this before the wait
                    begin_weights(scores, shift, score);
                }
                wgmma_wait_group<0>();
                pin(out);
                pin(weights);
                release(VALUES_EMPTY, VALUES);
                if (outgrown) {
                    raise(rows, out, scores, score);
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
            if (!QUERY_REGISTERS) release(QUERIES_EMPTY, consumer);
            mbarrier_wait(barrier(shared, VALUES_FULL, value.stage), value.parity);
            pin(out);
            pin(weights);
            multiply_values(values_of(uniform(value.stage)));
            rows[0].finish<4>();
            rows[1].finish<4>();
            wgmma_wait_group<0>();
            pin(out);
            release(VALUES_EMPTY, value.stage);
            value.advance();
        } else if (!QUERY_REGISTERS) {
            release(QUERIES_EMPTY, consumer);
        }
#pragma unroll 1
        for (const int rest = load_shared<Work>(work_shared).first_tile; tile >= rest; --tile) skip();
        store(args, mask, load_shared<Work>(work_shared), consumer, out, rows);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) cuflash_forward_sm90(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    if (thread_index() == 0) {
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
