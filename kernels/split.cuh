// Flash-Decoding (Dao, Haziza, Massa & Sizov 2023): what kernels of decode share, whatever their caches hold.
//
// Few rows see many keys, so blocks share the keys of a sequence: a block owns TILE_Q packed rows of one key head's
// group, and a split, a run of whole tiles of TILE_K keys. How many tiles a split has follows from the sequence's own
// length, which the device alone knows; blocks for which none is left end at once. A warp owns every WARPS-th tile of
// the split, and all rows: it copies keys and values for itself, STAGES tiles ahead, into a ring of its own in shared
// memory, and waits for no other warp. A quad of its threads owns two rows, in the layout of mma.m16n8k16.
//
// A warp's result is a part: out against a reference of its own, and the sum of weights. At the end the block adds the
// parts of its warps in their order, a warp a row. Where there are several splits the sum is a part again, in global
// memory; the block that comes last adds those in the order of splits. So the order of arithmetic is that of the keys,
// whoever comes when, and wherever pages lie.
#pragma once

#include "cache.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tile.cuh"

namespace cuflash {

static_assert(TILE_K % 16 == 0, "TILE_K: whole steps of 16 keys");
static_assert(STAGES > 1, "STAGES: one to copy to while another is read");

constexpr int THREADS = WARP * WARPS;
constexpr int WIDTH = sizeof(Element);             // bytes of a cache's element
constexpr int ROW_WIDTH = WIDTH == 1 ? 2 : WIDTH;  // and of one of q and out
constexpr bool MULTIPLY_ADDS = WIDTH == 4;         // in place of tensor cores
static_assert(TILE_Q % (MULTIPLY_ADDS ? 4 : 16) == 0, "TILE_Q: 16 rows, one A operand, or a multiple");
constexpr int BLOCKS = (TILE_Q + 15) / 16;  // of 16 rows, one A operand each

// Rows of q of 16 bits lie as tensor cores read them, wider ones one behind the other: all lanes read the same of them.
template <int WIDTH>
struct QueryRows : Tile<HEAD_DIM> {};
template <>
struct QueryRows<4> {
    static constexpr int PITCH = HEAD_DIM * 4;
    static constexpr int CHUNKS = PITCH / CHUNK;
    static __device__ __forceinline__ uint32 offset(uint32 row, uint32 chunk) { return row * PITCH + chunk * CHUNK; }
};

using QueryTile = QueryRows<ROW_WIDTH>;
using KeyTile = Tile<HEAD_DIM * WIDTH / 2>;
using ValueTile = Tile<VALUE_DIM * WIDTH / 2>;

constexpr int QUERY_BYTES = TILE_Q * QueryTile::PITCH;
constexpr int KEY_BYTES = TILE_K * KeyTile::PITCH, VALUE_BYTES = TILE_K * ValueTile::PITCH;
constexpr int SCALE_BYTES = WIDTH == 1 ? TILE_K * sizeof(float) : 0;  // of a tile's keys, and of its values
constexpr int STAGE_BYTES = KEY_BYTES + VALUE_BYTES + 2 * SCALE_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;

struct Shared {
    char queries[QUERY_BYTES];
    char rings[WARPS][RING_BYTES];  // a warp's stages of keys and values; at the end, its rows of out
    SoftmaxRow<float> rows[WARPS][TILE_Q];
    alignas(16) int last;  // whether this block is the last of its rows
};
// Behind it: of 8 bits, factors of rows of scores; of float32, weights of a tile, of each warp and key so far apart
// that lanes which write together meet no bank twice.
constexpr int FACTOR_BYTES = WIDTH == 1 ? TILE_Q * sizeof(float) : 0;
constexpr int WEIGHT_PITCH = (TILE_Q + 4) * sizeof(float), WEIGHT_BYTES = MULTIPLY_ADDS ? TILE_K * WEIGHT_PITCH : 0;
static_assert(sizeof(Shared) + FACTOR_BYTES + WARPS * WEIGHT_BYTES == SHARED_BYTES,
              "SHARED_BYTES: what the rings and rows take");
constexpr int RINGS_START = OFFSET_OF(Shared, rings), ROWS_START = OFFSET_OF(Shared, rows);
constexpr int LAST_START = OFFSET_OF(Shared, last), FACTORS_START = sizeof(Shared), WEIGHTS_START = sizeof(Shared);

struct Args {
    const char *q, *k, *v;
    char* out;
    char* lse;                      // null where it is not wanted
    const char* lengths;            // null where all caches are full
    const char* page_table;         // null where a cache is one piece
    const char *k_scale, *v_scale;  // of caches of 8 bits; null for 1
    char* parts;                    // of splits
    char* arrived;                  // splits that have stored theirs, of each tile of rows: 0 before and after
    Strides q_strides, k_strides, v_strides, out_strides;  // batch1: of sequences or pages
    Strides k_scale_strides, v_scale_strides;              // row: from a slot to the next
    int64 length_stride, table_stride, table_step;         // table_step: from a sequence's page to the next
    int queries, capacity;
    int appended;  // whether lengths are those of the append step: -1 of a sequence whose rows are to be NaN
    int heads, group, head_dim, value_dim;
    int key_heads, tiles, splits;  // tiles: of packed rows; splits: at most
    int fewest;                    // tiles of keys of a split, at least
    int first_sequence;            // of the launch
    int pages, page_size;
    uint32 page_multiplier;  // see Divisor
    int page_shift;
    int left, right, top_left;  // of the mask
    int out_vectors;            // rows of out can be written 16 bytes at a time
    int bfloat16;               // 8-bit caches: of what dtype q and out are; else the variant says so
    int k_slots, v_slots;       // whether scales are one a slot, not one a head
    float scale_log2;           // scale * log2 e, positive
};
template struct ArgsLayout<Args>;

using Scores = float[BLOCKS][TILE_K / 8][4];
using Out = float[BLOCKS][VALUE_DIM / 8][4];
using Rows = SoftmaxRow<float>[BLOCKS][2];  // a thread's rows g and g + 8

// Spelled out: of an array of arrays of classes, NVRTC 13.0 runs the default initialisers of the first array alone.
__device__ __forceinline__ void clear(Rows& rows) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) rows[block][half] = SoftmaxRow<float>{};
    }
}

__device__ __forceinline__ void clear(Out& out) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) out[block][n][e] = 0.0f;
        }
    }
}

// Row within the tile of element e of an accumulator's 16 x 8 block.
__device__ __forceinline__ int row_of(int block, int half) { return 16 * block + 8 * half + lane_index() / 4; }

// Where and which -------------------------------------------------------------------------------------------------

__device__ __forceinline__ Paged locate(const Args& args) {
    return Paged(static_cast<uint32>(fresh_block_index()), args.first_sequence, args.key_heads, args.splits, args.tiles,
                 args.group);
}

// Whether the append step has turned the sequence away.
__device__ __forceinline__ bool refused(const Args& args, const Paged& place) {
    return args.appended && load_global<int>(args.lengths + place.sequence * args.length_stride) < 0;
}

// What a block has to do.
struct Work {
    int rows, first_row;       // of its tile: how many, and the first packed one
    int first_key, end_key;    // keys of the split that some row sees; the others are never read
    int all_first, all_end;    // keys that all rows see
    int first_tile, end_tile;  // tiles of the split
    int splits;                // that take part: one at least
};

__device__ __forceinline__ Work work_of(const Args& args, const Mask& mask, const Paged& place) {
    Work work;
    work.first_row = place.tile * TILE_Q;
    work.rows = clamp(args.queries * args.group - work.first_row, 0, TILE_Q);
    const int top = place.query(work.first_row), bottom = place.query(work.first_row + work.rows - 1);
    const int first_key = mask.first_key(top), end_key = mask.end_key(bottom);
    work.all_first = mask.first_key(bottom);
    work.all_end = mask.end_key(top);
    const int first_tile = first_key / TILE_K;
    const int tiles = first_key < end_key ? (end_key - 1) / TILE_K + 1 - first_tile : 0;
    const int share = maximum((tiles + args.splits - 1) / args.splits, args.fewest);
    work.splits = maximum((tiles + share - 1) / share, 1);
    work.first_tile = first_tile + clamp(place.split * share, 0, tiles);
    work.end_tile = first_tile + clamp((place.split + 1) * share, 0, tiles);
    work.first_key = first_key;
    work.end_key = clamp(work.end_tile * TILE_K, 0, end_key);
    return work;
}

// Copies ----------------------------------------------------------------------------------------------------------

// A lane copies the chunks chunk, chunk + LANES ... of every ROW_STEP-th row of a tile, of keys and of values.
constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int LANES = least(8, least(KeyTile::CHUNKS & -KeyTile::CHUNKS, ValueTile::CHUNKS & -ValueTile::CHUNKS));

template <int LANES>
struct Lane {
    static constexpr int ROW_STEP = WARP / LANES;
    static constexpr int ROWS = TILE_K / ROW_STEP;
    uint32 row, chunk;  // the first of each
    __device__ Lane() {
        const uint32 lane = lane_index();
        row = lane / LANES;
        chunk = lane % LANES;
    }
    // The key in row n of those of a tile that the lane copies.
    __device__ __forceinline__ int key(int tile, int n) const {
        return tile * TILE_K + static_cast<int>(row) + n * ROW_STEP;
    }
};

// The pages of a tile's rows, -1 where nothing is to be read: one of each row that a lane copies or, where RUN is above
// 1, one of each run of so many keys, which are known to lie in a page.
template <int RUN, int LANES>
struct RowPages {
    static constexpr int COUNT = RUN == 1 ? Lane<LANES>::ROWS : TILE_K / RUN;
    int page[COUNT];

    // The first key of run n, and whether one of its keys is of the split.
    static __device__ __forceinline__ int key(const Lane<LANES>& lane, int tile, int n) {
        return RUN == 1 ? lane.key(tile, n) : tile * TILE_K + n * RUN;
    }
    static __device__ __forceinline__ bool seen(const Work& work, int key) {
        return key + RUN > work.first_key && key < work.end_key;
    }
};

// Sends for the pages of a tile. Nothing here waits for them.
template <int RUN, int LANES>
__device__ __forceinline__ RowPages<RUN, LANES> look_up(const Pages& pages, const Work& work, const Lane<LANES>& lane,
                                                        int tile) {
    RowPages<RUN, LANES> rows;
#pragma unroll
    for (int n = 0; n < rows.COUNT; ++n) {
        const int key = rows.key(lane, tile, n), page = pages.size.divide(key);
        const bool seen = rows.seen(work, key);
        rows.page[n] = seen ? pages.number(page) : -1;
    }
    return rows;
}

// Pages that do not exist are not read, but `missing`.
template <int RUN, int LANES>
__device__ __forceinline__ void check(RowPages<RUN, LANES>& rows, const Pages& pages, const Work& work,
                                      const Lane<LANES>& lane, int tile, bool& missing) {
#pragma unroll
    for (int n = 0; n < rows.COUNT; ++n) {
        const int key = rows.key(lane, tile, n);
        if (pages.exists(rows.page[n])) continue;
        rows.page[n] = -1;
        missing |= rows.seen(work, key);
    }
}

// Copies a tile of rows of `bytes`; what is not to be read becomes zeros. `source` is the lane's first chunk of row 0 of
// page 0.
template <typename Shape, int RUN, int LANES>
__device__ __forceinline__ void copy_rows(uint32 base, const char* source, const Strides& strides, const Pages& pages,
                                          const Work& work, const RowPages<RUN, LANES>& rows, const Lane<LANES>& lane,
                                          int tile, int bytes) {
    auto each = [&](auto copy) {
        const char* address = source;
#pragma unroll
        for (int n = 0; n < lane.ROWS; ++n) {
            const int run = RUN == 1 ? n : n * lane.ROW_STEP / RUN, key = lane.key(tile, n);
            bool read = rows.page[run] >= 0;
            if (RUN > 1) read = read && key >= work.first_key && key < work.end_key;
            if (n * lane.ROW_STEP % RUN == 0) {  // a run begins
                const int place = key - pages.size.divide(key) * pages.size.value;
                address = source + rows.page[run] * strides.batch1 + place * strides.row;
            } else {
                address += lane.ROW_STEP * strides.row;
            }
#pragma unroll
            for (int c = 0; c < Shape::CHUNKS; c += LANES) {
                const uint32 to = base + Shape::offset(lane.row + n * lane.ROW_STEP, lane.chunk + c);
                const int left = bytes - static_cast<int>(lane.chunk + c) * CHUNK;  // to the row's end
                copy(to, address + c * CHUNK, left, read);
            }
        }
    };
    if (bytes % CHUNK == 0) {
        each([](uint32 to, const char* from, int left, bool read) { cp_async_16(to, from, read && left > 0); });
    } else {
        each([](uint32 to, const char* from, int left, bool read) {
            cp_async_16(to, from, read ? clamp(left, 0, CHUNK) : 0);
        });
    }
}

// The block's rows of q.
__device__ __forceinline__ void load_queries(const Args& args, const Paged& place, const Work& work, uint32 base) {
    for (int n = fresh_thread_index(); n < TILE_Q * QueryTile::CHUNKS; n += THREADS) {
        const int r = n / QueryTile::CHUNKS, chunk = n % QueryTile::CHUNKS;
        const int bytes = r < work.rows ? clamp(args.head_dim * ROW_WIDTH - chunk * CHUNK, 0, CHUNK) : 0;
        const char* row = place.row(args.q, args.q_strides, work.first_row + r);
        cp_async_16(base + QueryTile::offset(r, chunk), row + chunk * CHUNK, bytes);
    }
}

// What is copied with the rows of keys and values: nothing.
struct NoScales {
    struct Found {};
    __device__ __forceinline__ Found look_up(int) const { return {}; }
    __device__ __forceinline__ void copy_keys(uint32, int, const Found&) const {}
    __device__ __forceinline__ void copy_values(uint32, int, const Found&) const {}
};

// A warp's tiles, one after the other, through its ring; returns whether a page of any lane's was missing. `begin()` is
// called when the rows of q, whose copies come first, are here for the thread; `with_keys(key, stage)` when a tile's
// keys are, from `key` on, in the stage at that address; `with_values(stage)` when its values are.
template <int RUN, typename Scales, typename Begin, typename WithKeys, typename WithValues>
__device__ __forceinline__ bool stream(const Args& args, const Paged& place, const Work& work, const Pages& pages,
                                       uint32 ring, const Scales& scales, Begin begin, WithKeys with_keys,
                                       WithValues with_values) {
    struct Found {
        RowPages<RUN, LANES> rows;
        typename Scales::Found scales;
    };
    // Tile n of the warp goes through stage n % STAGES. Every step commits a group, be there something in it or not.
    const Lane<LANES> lane;
    const char* keys = args.k + place.key_head * args.k_strides.head + lane.chunk * CHUNK;
    const char* values = args.v + place.key_head * args.v_strides.head + lane.chunk * CHUNK;
    bool missing = refused(args, place);
    auto tile_of = [&](int n) { return work.first_tile + warp_index() + n * WARPS; };
    auto find = [&](int tile) { return Found{look_up<RUN>(pages, work, lane, tile), scales.look_up(tile)}; };
    auto load_keys = [&](int tile, int stage, const Found& from) {
        if (tile < work.end_tile) {
            const uint32 to = ring + stage * STAGE_BYTES;
            copy_rows<KeyTile>(to, keys, args.k_strides, pages, work, from.rows, lane, tile, args.head_dim * WIDTH);
            scales.copy_keys(to + KEY_BYTES + VALUE_BYTES, tile, from.scales);
        }
        cp_async_commit_group();
    };
    auto load_values = [&](int tile, int stage, const Found& from) {
        if (tile < work.end_tile) {
            const uint32 to = ring + stage * STAGE_BYTES + KEY_BYTES;
            copy_rows<ValueTile>(to, values, args.v_strides, pages, work, from.rows, lane, tile,
                                 args.value_dim * WIDTH);
            scales.copy_values(to + VALUE_BYTES + SCALE_BYTES, tile, from.scales);
        }
        cp_async_commit_group();
    };
    Found first[STAGES];
#pragma unroll
    for (int n = 0; n < STAGES; ++n) first[n] = find(tile_of(n));
    Found next = find(tile_of(STAGES));
#pragma unroll
    for (int n = 0; n < STAGES; ++n) {
        check(first[n].rows, pages, work, lane, tile_of(n), missing);
        load_keys(tile_of(n), n, first[n]);
        if (n < STAGES - 1) load_values(tile_of(n), n, first[n]);
    }
    Found from = first[STAGES - 1];  // of what was copied last
    cp_async_wait_group<2 * STAGES - 1>();
    begin();

    int stage = 0, before = STAGES - 1;  // of this tile and of the one before
#pragma unroll 1
    for (int tile = tile_of(0); tile < work.end_tile; tile += WARPS) {
        cp_async_wait_group<2 * STAGES - 2>();
        sync_warp();  // the keys are here for all lanes, and all have left the values before
        load_values(tile + (STAGES - 1) * WARPS, before, from);
        with_keys(tile * TILE_K, ring + stage * STAGE_BYTES);

        cp_async_wait_group<2 * STAGES - 2>();
        sync_warp();  // the values are here, and all have left the keys
        from = next;
        check(from.rows, pages, work, lane, tile + STAGES * WARPS, missing);
        load_keys(tile + STAGES * WARPS, stage, from);
        next = find(tile + (STAGES + 1) * WARPS);
        with_values(ring + stage * STAGE_BYTES);
        before = stage;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    return any(missing);
}

// Scores ----------------------------------------------------------------------------------------------------------

// Hidden scores are selected to -inf, whatever they are.
__device__ __forceinline__ void hide(Scores& scores, const Mask& mask, const Paged& place, int first_row, int key) {
    const int lane = lane_index();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = place.query(first_row + row_of(block, half));
            const int first = mask.first_key(i) - key, end = mask.end_key(i) - key;
#pragma unroll
            for (int n = 0; n < TILE_K / 8; ++n) {
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    const int j = 8 * n + lane % 4 * 2 + e % 2;
                    scores[block][n][e] = j >= first && j < end ? scores[block][n][e] : -INFINITE;
                }
            }
        }
    }
}

// Parts -----------------------------------------------------------------------------------------------------------

// A row of a part is a warp's: a lane has QUAD columns, and QUAD more WARP quads to the right.
constexpr int QUAD = 4;
constexpr int PIECES = (VALUE_DIM + QUAD * WARP - 1) / (QUAD * WARP);
struct alignas(16) Quad {
    float values[QUAD];
};
struct alignas(8) Pair {
    float low, high;
};
__device__ __forceinline__ int column_of(int piece) { return (piece * WARP + lane_index()) * QUAD; }

struct Part {
    SoftmaxRow<float> row;
    Quad out[PIECES] = {};

    // Adds a row over other keys, of which `load(column)` gives a quad of out.
    template <typename Load>
    __device__ __forceinline__ void add(const SoftmaxRow<float>& other, Load load) {
        const float factor = row.raise(other.reference);
        const float weight = other.sum == 0 ? 0.0f : ex2_approx(other.shift() - row.shift());  // 0: it has seen nothing
        row.sum = fused_multiply_add(weight, other.sum, row.sum);
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            if (column_of(p) >= VALUE_DIM) continue;
            const Quad quad = load(column_of(p));
#pragma unroll
            for (int e = 0; e < QUAD; ++e) {
                out[p].values[e] = fused_multiply_add(weight, quad.values[e], out[p].values[e] * factor);
            }
        }
    }
};

// In shared memory rows of out lie so far apart that lanes which write together, 8 or 16 bytes each, meet no bank
// twice.
constexpr int OUT_PITCH = (VALUE_DIM + 16 / WIDTH) * sizeof(float);
static_assert(TILE_Q * OUT_PITCH <= RING_BYTES, "STAGES: room for a warp's rows of out");

// In global memory a row of a part is its quads, then its reference and sum.
constexpr int PART_PITCH = (VALUE_DIM + QUAD) * sizeof(float);

__device__ __forceinline__ int64 tile_index(const Args& args, const Paged& place) {
    return (static_cast<int64>(place.sequence) * args.key_heads + place.key_head) * args.tiles + place.tile;
}
__device__ __forceinline__ char* part_row(const Args& args, const Paged& place, int split, int r) {
    const int rows = clamp(args.queries * args.group, 0, TILE_Q);  // that a part has room for
    return args.parts + ((tile_index(args, place) * args.splits + split) * rows + r) * PART_PITCH;
}

// Row r of the sum of the warps' parts.
__device__ __forceinline__ Part sum_of_warps(uint32 shared, int r) {
    Part part;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const uint32 ring = shared + RINGS_START + warp * RING_BYTES + r * OUT_PITCH;
        const uint32 row = shared + ROWS_START + (warp * TILE_Q + r) * sizeof(SoftmaxRow<float>);
        part.add(load_shared<SoftmaxRow<float>>(row),
                 [&](int column) { return load_shared<Quad>(ring + column * sizeof(float)); });
    }
    return part;
}

// Row r of the sum of the splits' parts.
__device__ __forceinline__ Part sum_of_splits(const Args& args, const Paged& place, int splits, int r) {
    Part part;
#pragma unroll 8  // as many loads on their way
    for (int split = 0; split < splits; ++split) {
        const char* row = part_row(args, place, split, r);
        part.add(load_global<SoftmaxRow<float>>(row + VALUE_DIM * sizeof(float)),
                 [&](int column) { return load_global<Quad>(row + column * sizeof(float)); });
    }
    return part;
}

// Results ---------------------------------------------------------------------------------------------------------

// Whether all pages of a run of keys exist.
__device__ __noinline__ bool exist(const Args& args, int first, int end) {
    const Pages pages = pages_of(args, locate(args).sequence);
    bool missing = false;
    for (int n = pages.size.divide(first) + lane_index(); n * static_cast<int64>(pages.size.value) < end; n += WARP) {
        missing |= !pages.exists(pages.number(n));
    }
    return !any(missing);
}

// Writes a quad of a row of out of 16 bits; `pair(low, high)` rounds two numbers to a register.
template <typename Pair>
__device__ __forceinline__ void store_halves(const Args& args, char* out, int column, const float (&x)[QUAD],
                                             Pair pair) {
    const Vector8 packed = {{pair(x[0], x[1]), pair(x[2], x[3])}};
    if (args.out_vectors) {
        if (column < args.value_dim) store_global(out + 2 * column, packed);
    } else {
#pragma unroll
        for (int e = 0; e < QUAD; ++e) {
            const auto bits = static_cast<unsigned short>(packed.words[e / 2] >> e % 2 * 16);
            if (column + e < args.value_dim) store_global(out + 2 * (column + e), bits);
        }
    }
}

// Writes a row of out and lse. `write(out, column, quad)` writes a quad of out; `careful(row, out, lse, first, end)`
// computes a row again.
template <typename Write, typename Careful>
__device__ __forceinline__ void store(const Args& args, const Mask& mask, const Paged& place, int row, Part& part,
                                      Write write, Careful careful) {
    char* out = const_cast<char*>(place.row(args.out, args.out_strides, row));
    const int64 head = static_cast<int64>(place.sequence) * args.heads + place.head_of(row), i = place.query(row);
    char* lse = args.lse + (head * args.queries + i) * sizeof(float);
    const float inverse = part.row.inverse_sum();
    float finite = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
#pragma unroll
        for (int e = 0; e < QUAD; ++e) {
            float& x = part.out[p].values[e];
            x *= inverse;
            finite += x - x;
        }
    }
    if (args.lse != nullptr && lane_index() == 0) store_global(lse, part.row.lse());
    const bool suspect = any((finite != 0.0f && is_finite(inverse)) || part.row.too_coarse());
    if (suspect && exist(args, mask.first_key(i), mask.end_key(i))) {
        careful(row, out, lse, mask.first_key(i), mask.end_key(i));
        return;
    }
#pragma unroll
    for (int p = 0; p < PIECES; ++p) write(out, column_of(p), part.out[p].values);
}

// A row of the block's part goes to global memory.
__device__ __forceinline__ void store_part(char* row, const Part& part) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        if (column_of(p) < VALUE_DIM) store_global(row + column_of(p) * sizeof(float), part.out[p]);
    }
    if (lane_index() == 0) store_global(row + VALUE_DIM * sizeof(float), part.row);
}

// Says that this block's part is stored; true for the block that comes last, for whom all parts are there.
__device__ __forceinline__ bool arrive(char* arrived, int splits, uint32 last) {
    sync_threads();
    if (fresh_thread_index() == 0) {
        const bool mine = atomic_add_acq_rel(arrived, 1) == splits - 1;
        if (mine) store_global(arrived, 0);  // for the next launch
        store_shared(last, static_cast<int>(mine));
    }
    sync_threads();
    return load_shared<int>(last);
}

// Makes sums those of all lanes of a row; NaN where a page is missing, and so is all that they become part of.
template <int LANES>
__device__ __forceinline__ void finish(SoftmaxRow<float>& row, bool missing) {
    row.finish<LANES>();
    if (missing) row.sum = INFINITE - INFINITE;
}
__device__ __forceinline__ void finish(Rows& rows, bool missing) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) finish<4>(rows[block][half], missing);
    }
}

// The end of a block: its warps' parts are added and, where there are several splits, those of all. `leave(ring, rows)`
// writes the warp's part to shared memory, `store(r, part)` what row r of the block's tile comes to.
template <typename Leave, typename Store>
__device__ __forceinline__ void join(const Args& args, const Paged& place, const Work& work, uint32 shared, Leave leave,
                                     Store store) {
    sync_warp();
    leave(shared + RINGS_START + warp_index() * RING_BYTES,
          shared + ROWS_START + warp_index() * TILE_Q * sizeof(SoftmaxRow<float>));
    sync_threads();
    for (int r = warp_index(); r < work.rows; r += WARPS) {
        Part part = sum_of_warps(shared, r);
        if (work.splits == 1) {
            store(r, part);
        } else {
            store_part(part_row(args, place, place.split, r), part);
        }
    }
    if (work.splits == 1) return;

    char* arrived = args.arrived + tile_index(args, place) * sizeof(int);
    if (!arrive(arrived, work.splits, shared + LAST_START)) return;
    for (int r = warp_index(); r < work.rows; r += WARPS) {
        Part part = sum_of_splits(args, place, work.splits, r);
        store(r, part);
    }
}

}  // namespace cuflash
