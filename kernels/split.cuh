// Flash-Decoding (Dao, Haziza, Massa & Sizov 2023): what kernels of decode share, whatever their caches hold.
//
// Few rows see many keys, so blocks share the keys of a sequence: a block owns TILE_Q packed rows of one key head's
// group, and a split, a run of whole tiles of TILE_K keys. How many tiles a split has follows from lengths, which the
// device alone knows (shares.cuh); blocks for which none is left end at once.
//
// What a block makes of its rows is a part: out against a reference of its own, and the sum of weights. Where there are
// several splits it goes to global memory; the block that comes last adds those of all in the order of splits. Or it
// stays in shared memory, where splits are the blocks of a cluster, which add all in the same order (rings.cuh). So the
// order of arithmetic is that of the keys, whoever comes when, and wherever pages lie.
#pragma once

#include "cache.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "shares.cuh"
#include "softmax.cuh"
#include "tile.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
constexpr int WIDTH = sizeof(Element);             // bytes of a cache's element
constexpr int ROW_WIDTH = WIDTH == 1 ? 2 : WIDTH;  // and of one of q and out
constexpr bool MULTIPLY_ADDS = WIDTH >= 4;         // in place of tensor cores
static_assert(TILE_Q % (MULTIPLY_ADDS ? 4 : 16) == 0, "TILE_Q: 16 rows, one A operand, or a multiple");
constexpr int BLOCKS = (TILE_Q + 15) / 16;  // of 16 rows, one A operand each

// Row within the tile, of the lane's two in a block of an accumulator.
__device__ __forceinline__ int row_of(int block, int half) { return 16 * block + 8 * half + lane_index() / 4; }

// Rows of q of 16 bits lie as tensor cores read them, wider ones one behind the other: all lanes read the same of them.
template <int WIDTH>
struct QueryRows {
    static constexpr int PITCH = HEAD_DIM * WIDTH;
    static constexpr int CHUNKS = PITCH / CHUNK;
    static __device__ __forceinline__ uint32 offset(uint32 row, uint32 chunk) { return row * PITCH + chunk * CHUNK; }
};
template <>
struct QueryRows<2> : Tile<HEAD_DIM> {};

using QueryTile = QueryRows<ROW_WIDTH>;
constexpr int QUERY_BYTES = TILE_Q * QueryTile::PITCH;

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
    int sequences;                 // whose lengths decide on shares; 0 where `splits` does, whatever lengths are
    int lone, wave, waves;         // blocks beside one an item: one a multiprocessor, as fit on it, some times as many
    int least_share, short_share, usual_share;  // tiles of keys of a block
    int late_first, late_end;      // blocks that begin late
    int pages, page_size;
    uint32 page_multiplier;  // see Divisor
    int page_shift;
    int left, right, top_left;  // of the mask
    int out_vectors;            // rows of out can be written 16 bytes at a time
    int bfloat16;               // 8-bit caches: of what dtype q and out are; else the variant says so
    int k_slots, v_slots;       // whether scales are one a slot, not one a head
    Real scale_log2;            // scale * log2 e, positive
};
template struct ArgsLayout<Args>;

// Where and which -------------------------------------------------------------------------------------------------

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
    const int share = maximum((tiles + place.splits - 1) / place.splits, place.fewest);
    work.splits = maximum((tiles + share - 1) / share, 1);
    work.first_tile = first_tile + clamp(place.split * share, 0, tiles);
    work.end_tile = first_tile + clamp((place.split + 1) * share, 0, tiles);
    work.first_key = first_key;
    work.end_key = clamp(work.end_tile * TILE_K, 0, end_key);
    return work;
}

// Blocks that begin together on a multiprocessor read together, and wait together when they begin and end. Where there
// are several waves, the second block of each in the first wave begins later, by a quarter of what it takes.
__device__ __forceinline__ void begin_late(const Args& args, const Work& work) {
    const int64 block = fresh_block_index();
    if (block < args.late_first || block >= args.late_end) return;
    constexpr int LATEST_NS = 8000, TILE_NS = TILE_K * (HEAD_DIM + VALUE_DIM) * WIDTH / 64;
    nanosleep(clamp(work.end_tile - work.first_tile, 0, LATEST_NS / TILE_NS) * TILE_NS);
}

// Copies ----------------------------------------------------------------------------------------------------------

// The block's rows of q.
__device__ __forceinline__ void load_queries(const Args& args, const Paged& place, const Work& work, uint32 base) {
    for (int n = fresh_thread_index(); n < TILE_Q * QueryTile::CHUNKS; n += THREADS) {
        const int r = n / QueryTile::CHUNKS, chunk = n % QueryTile::CHUNKS;
        const int bytes = r < work.rows ? clamp(args.head_dim * ROW_WIDTH - chunk * CHUNK, 0, CHUNK) : 0;
        const char* row = place.row(args.q, args.q_strides, work.first_row + r);
        cp_async_16(base + QueryTile::offset(r, chunk), row + chunk * CHUNK, bytes);
    }
}

// Rows of q of 16 bits as A operands, 16 ROW_BLOCKS of them of which `shared` is the first, 16 columns a step: of the
// first KEPT steps they stay in registers, once keep() has brought them, of the others they come from shared memory for
// each tile of keys anew.
template <int ROW_BLOCKS, int KEPT>
struct Queries {
    uint32 shared, lane;
    uint32 kept[ROW_BLOCKS][KEPT + 1][4];

    __device__ __forceinline__ explicit Queries(uint32 shared) : shared(shared), lane(lane_of_a<HEAD_DIM>()) {}
    __device__ __forceinline__ void read(uint32 (&a)[4], int block, int step) const {
        ldmatrix_x4(a, shared + Tile<HEAD_DIM>::step(lane, 16 * block, 2 * step));
    }
    // Once the rows are in shared memory.
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; ++block) {
#pragma unroll
            for (int step = 0; step < KEPT; ++step) read(kept[block][step], block, step);
        }
    }
    __device__ __forceinline__ void operator()(uint32 (&a)[4], int block, int step) const {
        if (step < KEPT) {
#pragma unroll
            for (int n = 0; n < 4; ++n) a[n] = kept[block][step][n];
        } else {
            read(a, block, step);
        }
    }
};

// Parts -----------------------------------------------------------------------------------------------------------

// A row of a part is a warp's: a lane has QUAD columns, and QUAD more WARP quads to the right.
constexpr int QUAD = 4;
constexpr int PIECES = (VALUE_DIM + QUAD * WARP - 1) / (QUAD * WARP);
struct alignas(16) Quad {
    Real values[QUAD];
};
struct alignas(8) Pair {
    float low, high;
};
__device__ __forceinline__ int column_of(int piece) { return (piece * WARP + lane_index()) * QUAD; }

struct Part {
    SoftmaxRow<Real> row;
    Quad out[PIECES] = {};

    // Makes room for rows with references up to `top`.
    __device__ __forceinline__ void raise(Real top) {
        const Real factor = row.raise(top);
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
#pragma unroll
            for (int e = 0; e < QUAD; ++e) out[p].values[e] *= factor;
        }
    }
    // What a row then counts for, nothing where it is empty or not there.
    __device__ __forceinline__ Real weight_of(const SoftmaxRow<Real>& other) const {
        return other.sum == 0 ? Real(0) : exp2_of(other.shift() - row.shift());
    }
    // Adds a row, by its sum and its out.
    __device__ __forceinline__ void add_row(Real weight, Real sum, const Quad (&quads)[PIECES]) {
        row.sum = fused_multiply_add(weight, sum, row.sum);
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
#pragma unroll
            for (int e = 0; e < QUAD; ++e) {
                out[p].values[e] = fused_multiply_add(weight, quads[p].values[e], out[p].values[e]);
            }
        }
    }
    // Adds rows over other keys in their order: for one after the other, `other(n)` gives the reference and sum of row
    // n, then `load(n, column)` quads of its out. COUNT are on their way together, and their weights do not wait for
    // one another.
    template <int COUNT, typename Other, typename Load>
    __device__ __forceinline__ void add(int count, Other other, Load load) {
#pragma unroll 1
        for (int first = 0; first < count; first += COUNT) {
            SoftmaxRow<Real> others[COUNT];
            Quad quads[COUNT][PIECES];
            Real top = -INFINITE;
#pragma unroll
            for (int n = 0; n < COUNT; ++n) {
                others[n] = SoftmaxRow<Real>{};
                if (first + n < count) others[n] = other(first + n);
#pragma unroll
                for (int p = 0; p < PIECES; ++p) {
                    quads[n][p] = Quad{};
                    if (first + n < count && column_of(p) < VALUE_DIM) quads[n][p] = load(first + n, column_of(p));
                }
            }
#pragma unroll
            for (int n = 0; n < COUNT; ++n) top = maximum(top, others[n].reference);
            raise(top);
#pragma unroll
            for (int n = 0; n < COUNT; ++n) add_row(weight_of(others[n]), others[n].finite_sum(), quads[n]);
        }
    }
};

// Rows of splits' parts that registers hold, where kernels have them to spare, and how many of these come from a
// cluster's blocks at once. So many share a reference: all splits that a cluster can have, or as many either way, so
// that they come to the same bits by way of global memory.
constexpr int ROWS_HELD = PIECES * sizeof(Real) == 4 ? WARP : 64 / (PIECES * sizeof(Real));
constexpr int ROWS_OF_CLUSTER = ROWS_HELD < 8 ? ROWS_HELD : 8;
static_assert(CLUSTERS <= 8, "CLUSTERS: no more than one reference serves");

// In global memory a row of a part is its quads, then its reference and sum.
constexpr int PART_PITCH = (VALUE_DIM + QUAD) * sizeof(Real);

__device__ __forceinline__ int64 tile_index(const Args& args, const Paged& place) {
    return (static_cast<int64>(place.sequence) * args.key_heads + place.key_head) * args.tiles + place.tile;
}
__device__ __forceinline__ int64 part_pitch(const Args& args) {
    return static_cast<int64>(clamp(args.queries * args.group, 0, TILE_Q)) * PART_PITCH;  // of the rows there can be
}
// Row r of this block's part, whose place is the block's own. Blocks of neighbouring splits are `tiles` apart.
__device__ __forceinline__ char* part_row(const Args& args, int r) {
    return args.parts + fresh_block_index() * part_pitch(args) + r * PART_PITCH;
}

// Row r of the sum of the splits' parts: the work of a warp that has its multiprocessor's quarter to itself, so what
// counts is how few instructions it takes and that no load waits for another. A lane has the reference and sum of one
// split and finds its weight. Past the last split that one is read again, and weighs nothing.
__device__ __forceinline__ Part sum_of_splits(const Args& args, const Paged& place, int splits, int r) {
    Part part;
    const int64 pitch = args.tiles * part_pitch(args);
    const char* const rows = part_row(args, r) - place.split * pitch;  // of the first split
#pragma unroll 1
    for (int first = 0; first < splits; first += ROWS_HELD) {
        const int count = uniform(clamp(splits - first, 0, ROWS_HELD));
        const char* const row = opaque(rows + first * pitch);
        auto at = [&](int n) { return row + static_cast<uint32>(clamp(n, 0, count - 1)) * pitch; };
        SoftmaxRow<Real> other = load_global<SoftmaxRow<Real>>(at(lane_index()) + VALUE_DIM * sizeof(Real));
        if (lane_index() >= count) other = SoftmaxRow<Real>{};
        Quad quads[ROWS_HELD][PIECES];
#pragma unroll
        for (int n = 0; n < ROWS_HELD; ++n) {
            if (n % 8 == 0 && n >= count) break;
            const char* const from = at(n);
#pragma unroll
            for (int p = 0; p < PIECES; ++p) {  // lanes without a column have the last ones
                const int column = p + 1 < PIECES ? column_of(p) : clamp(column_of(p), 0, VALUE_DIM - QUAD);
                quads[n][p] = load_global<Quad>(from + column * sizeof(Real));
            }
        }
        part.raise(maximum_of_row<WARP>(other.reference));
        const Real weight = part.weight_of(other), sum = other.finite_sum();
#pragma unroll
        for (int n = 0; n < ROWS_HELD; ++n) {
            if (n % 8 == 0 && n >= count) break;
            part.add_row(shuffle_from(weight, n), shuffle_from(sum, n), quads[n]);
        }
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
    char* lse = args.lse + (head * args.queries + i) * sizeof(Real);
    const Real inverse = part.row.inverse_sum();
    Real finite = 0;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
#pragma unroll
        for (int e = 0; e < QUAD; ++e) {
            Real& x = part.out[p].values[e];
            x = fused_multiply_add(x, inverse, Real(0));  // never -0: what weighs nothing shall not make a difference
            finite += x - x;
        }
    }
    if (args.lse != nullptr && lane_index() == 0) store_global(lse, part.row.lse());
    const bool suspect = any((finite != 0 && is_finite(inverse)) || part.row.too_coarse());
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
        if (column_of(p) < VALUE_DIM) store_global(row + column_of(p) * sizeof(Real), part.out[p]);
    }
    if (lane_index() == 0) store_global(row + VALUE_DIM * sizeof(Real), part.row);
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
template <int LANES, typename Real>
__device__ __forceinline__ void finish(SoftmaxRow<Real>& row, bool missing) {
    row.template finish<LANES>();
    if (missing) row.sum = INFINITE - INFINITE;
}
// The end of a block's rows: `part_of(r)` is what its keys make of row r of its tile, `store(r, part)` writes what the
// row comes to: that, or, where there are several splits, the sum of all, by the block that comes last.
template <typename PartOf, typename Store>
__device__ __forceinline__ void conclude(const Args& args, const Paged& place, const Work& work, uint32 last,
                                         PartOf part_of, Store store) {
    for (int r = warp_index(); r < work.rows; r += WARPS) {
        Part part = part_of(r);
        if (work.splits == 1) {
            store(r, part);
        } else {
            store_part(part_row(args, r), part);
        }
    }
    if (work.splits == 1) return;

    char* arrived = args.arrived + tile_index(args, place) * sizeof(int);
    if (!arrive(arrived, work.splits, last)) return;
    for (int r = warp_index(); r < work.rows; r += WARPS) {
        Part part = sum_of_splits(args, place, work.splits, r);
        store(r, part);
    }
}

}  // namespace cuflash
