// Warps that wait for memory alone: what kernels of decode have in common whose warps take keys for themselves.
//
// A warp owns every WARPS-th tile of the split, and all rows: it copies keys and values for itself, STAGES tiles ahead,
// into a ring of its own in shared memory, and waits for no other warp. A quad of its threads owns two rows, in the
// layout of mma.m16n8k16. A warp's result is a part, and at the end the block adds those of its warps in their order, a
// warp a row.
#pragma once

#include "split.cuh"

namespace cuflash {

static_assert(TILE_K % (MULTIPLY_ADDS ? 8 : 16) == 0, "TILE_K: whole steps of 16 keys, or 8");
static_assert(STAGES > 1, "STAGES: one to copy to while another is read");

using KeyTile = Tile<HEAD_DIM * WIDTH / 2>;
using ValueTile = Tile<VALUE_DIM * WIDTH / 2>;

constexpr int KEY_BYTES = TILE_K * KeyTile::PITCH, VALUE_BYTES = TILE_K * ValueTile::PITCH;
constexpr int SCALE_BYTES = WIDTH == 1 ? TILE_K * sizeof(float) : 0;  // of a tile's keys, and of its values
constexpr int STAGE_BYTES = KEY_BYTES + VALUE_BYTES + 2 * SCALE_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;

struct Shared {
    char queries[QUERY_BYTES];
    char rings[WARPS][RING_BYTES];  // a warp's stages of keys and values; at the end, its rows of out
    SoftmaxRow<Real> rows[WARPS][TILE_Q];
    alignas(16) int last;  // whether this block is the last of its rows
    int clustered;         // whether its splits are the blocks of a cluster, kept here since registers are few
};
// Behind it: of 8 bits, factors of rows of scores; of float32 and float64, weights of a tile, of each warp and key so
// far apart that lanes which write together meet no bank twice.
constexpr int FACTOR_BYTES = WIDTH == 1 ? TILE_Q * sizeof(float) : 0;
constexpr int WEIGHT_PITCH = TILE_Q * sizeof(Real) + CHUNK, WEIGHT_BYTES = MULTIPLY_ADDS ? TILE_K * WEIGHT_PITCH : 0;
static_assert(sizeof(Shared) + FACTOR_BYTES + WARPS * WEIGHT_BYTES == SHARED_BYTES,
              "SHARED_BYTES: what the rings and rows take");
constexpr int RINGS_START = OFFSET_OF(Shared, rings), ROWS_START = OFFSET_OF(Shared, rows);
constexpr int LAST_START = OFFSET_OF(Shared, last), CLUSTERED_START = OFFSET_OF(Shared, clustered);
constexpr int FACTORS_START = sizeof(Shared), WEIGHTS_START = sizeof(Shared);

using RowsOfQ = Queries<BLOCKS, BLOCKS * HEAD_DIM <= 128 ? HEAD_DIM / 16 : 0>;  // as there are registers for
using Scores = float[BLOCKS][TILE_K / 8][4];
constexpr int STEPS = (TILE_K + 15) / 16;  // of 16 keys, for tensor cores
using Weights = uint32[STEPS][BLOCKS][4];  // A operands
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

// The pages of a tile's rows, -1 where nothing is to be read: one of each run of KEYS keys, which are known to lie in a
// page, or, where KEYS is 1, one of each row that the lane copies.
template <int KEYS, int LANES>
struct RowPages {
    static_assert(TILE_K % KEYS == 0, "TILE_K: whole runs");
    static_assert(KEYS == 1 || KEYS % Lane<LANES>::ROW_STEP == 0, "LANES: a lane's rows begin each run alike");
    static constexpr int COUNT = KEYS == 1 ? Lane<LANES>::ROWS : TILE_K / KEYS;
    int page[COUNT];
    bool whole;  // once checked, of runs: all keys of the tile are to be read

    // The first key of run n, and whether one of its keys is of the split.
    static __device__ __forceinline__ int key(const Lane<LANES>& lane, int tile, int n) {
        return KEYS == 1 ? lane.key(tile, n) : tile * TILE_K + n * KEYS;
    }
    static __device__ __forceinline__ bool seen(const Work& work, int key) {
        return key + KEYS > work.first_key && key < work.end_key;
    }
};

// Sends for the pages of a tile. Nothing here waits for them.
template <int KEYS, int LANES>
__device__ __forceinline__ RowPages<KEYS, LANES> look_up(const Pages& pages, const Work& work, const Lane<LANES>& lane,
                                                         int tile) {
    RowPages<KEYS, LANES> rows;
#pragma unroll
    for (int n = 0; n < rows.COUNT; ++n) {
        const int key = rows.key(lane, tile, n), page = pages.size.divide(key);
        const bool seen = rows.seen(work, key);
        rows.page[n] = seen ? pages.number(page) : -1;
    }
    return rows;
}

// Pages that do not exist are not read, but `missing`. Finds out whether the tile is whole.
template <int KEYS>
__device__ __forceinline__ void check(RowPages<KEYS, LANES>& rows, const Pages& pages, const Work& work,
                                      const Lane<LANES>& lane, int tile, bool& missing) {
    rows.whole = tile * TILE_K >= work.first_key && (tile + 1) * TILE_K <= work.end_key;
#pragma unroll
    for (int n = 0; n < rows.COUNT; ++n) {
        const int key = rows.key(lane, tile, n);
        if (pages.exists(rows.page[n])) continue;
        rows.page[n] = -1;
        rows.whole = false;
        missing |= rows.seen(work, key);
    }
}

// Copies a tile of rows of `bytes`; what is not to be read becomes zeros. `source` is the lane's first chunk of row 0
// of page 0. A whole tile takes no test of its rows, where pages are those of runs.
template <typename Shape, int KEYS>
__device__ __forceinline__ void copy_rows(uint32 base, const char* source, const Strides& strides, const Pages& pages,
                                          const Work& work, const RowPages<KEYS, LANES>& rows, const Lane<LANES>& lane,
                                          int tile, int bytes) {
    constexpr int ROW_STEP = Lane<LANES>::ROW_STEP;
    constexpr int PERIOD = ROW_STEP < 8 ? 8 / ROW_STEP : 1;  // rows of the lane, after which swizzles repeat
    static_assert(LANES * CHUNK % Shape::SPAN == 0, "LANES: steps along a row keep its swizzle");
    uint32 first[PERIOD];
#pragma unroll
    for (int n = 0; n < PERIOD; ++n) first[n] = base + Shape::offset(lane.row + n * ROW_STEP, lane.chunk);
    auto each = [&](auto copy) {
        const char* address = source;
#pragma unroll
        for (int n = 0; n < lane.ROWS; ++n) {
            const int run = KEYS == 1 ? n : n * ROW_STEP / KEYS, key = lane.key(tile, n);
            const bool read = rows.page[run] >= 0 && (KEYS == 1 || (key >= work.first_key && key < work.end_key));
            if (n * ROW_STEP % KEYS == 0) {  // a run begins
                const int place = key - pages.size.divide(key) * pages.size.value;
                address = source + rows.page[run] * strides.batch1 + place * strides.row;
            } else {
                address += ROW_STEP * strides.row;
            }
#pragma unroll
            for (int c = 0; c < Shape::CHUNKS; c += LANES) {
                const uint32 to = Shape::step(first[n % PERIOD], n / PERIOD * PERIOD * ROW_STEP, c);
                const int left = bytes - static_cast<int>(lane.chunk + c) * CHUNK;  // to the row's end
                copy(to, address + c * CHUNK, left, read);
            }
        }
    };
    if (bytes % CHUNK == 0 && (KEYS == 1 || rows.whole)) {
        each([](uint32 to, const char* from, int left, bool read) {
            cp_async_16_once(to, from, (KEYS > 1 || read) && left > 0);
        });
    } else {
        each([](uint32 to, const char* from, int left, bool read) {
            cp_async_16(to, from, read ? clamp(left, 0, CHUNK) : 0);
        });
    }
}

// What is copied with a tile's keys, to behind its values: nothing.
struct NoScales {
    struct Found {};
    __device__ __forceinline__ Found look_up(int) const { return {}; }
    __device__ __forceinline__ void copy(uint32, int, const Found&) const {}
};

// A warp's tiles, one after the other, through its ring; returns whether a page of any lane's was missing. `begin()` is
// called when the rows of q, whose copies come first, are here for the thread; `with_keys(key, stage)` when a tile's
// keys are, from `key` on, in the stage at that address; `with_values(stage)` when its values are.
template <int KEYS, typename Scales, typename Begin, typename WithKeys, typename WithValues>
__device__ __forceinline__ bool stream_runs(const Args& args, const Paged& place, const Work& work, const Pages& pages,
                                            uint32 shared, const Scales& scales, Begin begin, WithKeys with_keys,
                                            WithValues with_values) {
    struct Found {
        RowPages<KEYS, LANES> rows;
        typename Scales::Found scales;
    };
    // Tile n of the warp goes through stage n % STAGES. Every step commits a group, be there something in it or not.
    const Lane<LANES> lane;
    const uint32 ring = shared + RINGS_START + warp_index() * RING_BYTES;
    if (CLUSTERS && fresh_thread_index() == 0) {
        store_shared(shared + CLUSTERED_START, static_cast<int>(place.clustered));
    }
    const char* keys = args.k + place.key_head * args.k_strides.head + lane.chunk * CHUNK;
    const char* values = args.v + place.key_head * args.v_strides.head + lane.chunk * CHUNK;
    bool missing = refused(args, place);
    auto tile_of = [&](int n) { return work.first_tile + warp_index() + n * WARPS; };
    auto find = [&](int tile) { return Found{look_up<KEYS>(pages, work, lane, tile), scales.look_up(tile)}; };
    auto load_keys = [&](int tile, int stage, const Found& from) {
        if (tile < work.end_tile) {
            const uint32 to = ring + stage * STAGE_BYTES;
            copy_rows<KeyTile>(to, keys, args.k_strides, pages, work, from.rows, lane, tile, args.head_dim * WIDTH);
            scales.copy(to + KEY_BYTES + VALUE_BYTES, tile, from.scales);
        }
        cp_async_commit_group();
    };
    auto load_values = [&](int tile, int stage, const Found& from) {
        if (tile < work.end_tile) {
            const uint32 to = ring + stage * STAGE_BYTES + KEY_BYTES;
            copy_rows<ValueTile>(to, values, args.v_strides, pages, work, from.rows, lane, tile,
                                 args.value_dim * WIDTH);
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

// The same. Pages are looked up once in a run of keys where they are made of whole ones: so the variant says or, where
// its RUN is 0, the page size.
template <typename Scales, typename Begin, typename WithKeys, typename WithValues>
__device__ __forceinline__ bool stream(const Args& args, const Paged& place, const Work& work, const Pages& pages,
                                       uint32 shared, const Scales& scales, Begin begin, WithKeys with_keys,
                                       WithValues with_values) {
    constexpr int LONGEST = least(TILE_K, 16);
    const bool whole = args.page_table == nullptr || args.page_size % LONGEST == 0;
    if (RUN == LONGEST || (RUN == 0 && whole)) {
        return stream_runs<LONGEST>(args, place, work, pages, shared, scales, begin, with_keys, with_values);
    }
    return stream_runs<1>(args, place, work, pages, shared, scales, begin, with_keys, with_values);
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

// Raises the rows' references to what a tile needs, given the largest of each row's scores (log2 units) that the thread
// has; out is rescaled where, rarely, one has moved.
__device__ __forceinline__ void raise(Rows& rows, Out& out, const float (&top)[BLOCKS][2]) {
    bool outgrown = false;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) outgrown |= rows[block][half].outgrown(top[block][half]);
    }
    if (!any(outgrown)) return;
    float factor[BLOCKS][2];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factor[block][half] = rows[block][half].raise(maximum_of_row(top[block][half]));
        }
    }
    rescale(out, factor);
}

// Parts -----------------------------------------------------------------------------------------------------------

// In shared memory rows of out lie so far apart that lanes which write together, 8 or 16 bytes each, meet no bank
// twice.
constexpr int OUT_PITCH = (VALUE_DIM + 16 / WIDTH) * sizeof(Real);
static_assert(TILE_Q * OUT_PITCH <= RING_BYTES, "STAGES: room for a warp's rows of out");

// Row r of the sum of the warps' parts.
__device__ __forceinline__ Part sum_of_warps(uint32 shared, int r) {
    Part part;
    const uint32 quads = shared + RINGS_START + r * OUT_PITCH;
    const uint32 rows = shared + ROWS_START + r * sizeof(SoftmaxRow<Real>);
    part.add<WARPS>(
        WARPS, [&](int warp) { return load_shared<SoftmaxRow<Real>>(rows + warp * TILE_Q * sizeof(part.row)); },
        [&](int warp, int column) { return load_shared<Quad>(quads + warp * RING_BYTES + column * sizeof(Real)); });
    return part;
}

__device__ __forceinline__ void finish(Rows& rows, bool missing) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) finish<4>(rows[block][half], missing);
    }
}

// A quad from the shared memory of another block of the cluster.
__device__ __forceinline__ Quad load_quad(uint32 address, int rank) {
    struct {
        Vector16 x[sizeof(Quad) / CHUNK];
    } chunks;
#pragma unroll
    for (int n = 0; n < static_cast<int>(sizeof(Quad)) / CHUNK; ++n) {
        chunks.x[n] = load_cluster<Vector16>(address + n * CHUNK, rank);
    }
    return __builtin_bit_cast(Quad, chunks);
}

// Splits that are the blocks of a cluster leave their parts in shared memory, where their first warp's were, and each
// takes some of the rows, to add those of all in the order of splits.
template <typename Store>
__device__ __forceinline__ void conclude_in_cluster(const Paged& place, const Work& work, uint32 shared, Store store) {
    auto out_at = [=](int r) { return shared + RINGS_START + r * OUT_PITCH; };
    auto row_at = [=](int r) { return shared + ROWS_START + r * static_cast<int>(sizeof(SoftmaxRow<Real>)); };
    for (int r = warp_index(); r < work.rows; r += WARPS) {
        const Part part = sum_of_warps(shared, r);
        sync_warp();  // all lanes have read what is written over
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            if (column_of(p) < VALUE_DIM) store_shared(out_at(r) + column_of(p) * sizeof(Real), part.out[p]);
        }
        if (lane_index() == 0) store_shared(row_at(r), part.row);
    }
    cluster_arrive();
    cluster_wait();
    for (int r = place.split + warp_index() * work.splits; r < work.rows; r += WARPS * work.splits) {
        Part part;
        part.add<ROWS_OF_CLUSTER>(
            work.splits, [&](int split) { return load_cluster<SoftmaxRow<Real>>(row_at(r), split); },
            [&](int split, int column) { return load_quad(out_at(r) + column * sizeof(Real), split); });
        store(r, part);
    }
    cluster_arrive();
    cluster_wait();  // until then others may read what is here
}

// The end of a block: its warps' parts are added and, where there are several splits, those of all. `leave(ring, rows)`
// writes the warp's part to shared memory, `store(r, part)` what row r of the block's tile comes to.
template <typename Leave, typename Store>
__device__ __forceinline__ void join(const Args& args, const Paged& place, const Work& work, uint32 shared, Leave leave,
                                     Store store) {
    sync_warp();
    leave(shared + RINGS_START + warp_index() * RING_BYTES,
          shared + ROWS_START + warp_index() * TILE_Q * sizeof(SoftmaxRow<Real>));
    sync_threads();
    if constexpr (CLUSTERS) {
        if (load_shared<int>(shared + CLUSTERED_START)) return conclude_in_cluster(place, work, shared, store);
    }
    conclude(args, place, work, shared + LAST_START, [&](int r) { return sum_of_warps(shared, r); }, store);
}

}  // namespace cuflash
