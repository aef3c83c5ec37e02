// dk and dv, and the sums that dq is made of, for float32, on the tensor cores of any GPU since sm_80.
//
//   p = exp2(scale_log2 q k^T - row_lse)    ds = p (dout v^T - row_delta)    row_delta = sum(dout out) - dlse
//   dv = p^T dout                           dk = scale ds^T q                dq = scale ds k
//
// The algorithm is that of backward.cu: a block owns TILE_K keys of a key head at a time and visits the tiles of TILE_Q
// query rows that see some of them; scores are computed transposed, so that p^T and ds^T leave the tensor cores as A
// operands of dv and dk. Every number is split into three bfloat16 and every product into six, see float32.cuh: k and v
// once an item, q and dout once a visit, when they come, p and ds in registers. The parts of ds go through shared
// memory for dq, which needs those of all keys. Floats of the next dout wait in registers while dv is computed, those
// of the next q while dk is: where they go others lie until then, and there is no room beside.
//
// A warp owns 16 keys and, of the queries of a tile, those of its part; of these it has sums of dk and dv of its own,
// which join its mate's when the item ends. So p never leaves its registers. Where sums of all columns are too many for
// them warps share columns instead, and compute the same scores.
//
// A tensor core cuts what it adds, so that long sums drift: the products of a visit meet in a sum that begins at zero,
// and that is added to dk, dv or dq by an addition that rounds.
//
// What limits speed: the tensor cores, six products for one. mma.sync reaches some 60 % of the H200's 990 TFLOP/s, 1.6
// clocks for each 16 x 8 x 16, so that 100 are the most there can be. Shared memory is close behind, and registers hold
// the tiles of warps small: at head_dim 128 a visit of 64 x 64 takes 7,680 products, 12,300 clocks. Of operands that
// take 4 clocks each a warp reads 9 for the 24 products of a step of q k^T, of dout v^T and of dq, 3 for 12 of dv and
// dk, 318 in all: 10,200 clocks for 8 warps, and 1,000 to write q, dout and ds. The five products have 6 bytes for each
// number of k, v, q, dout and ds in shared memory, 216 KB.
#include "agenda.cuh"
#include "backward_args.cuh"
#include "float32.cuh"
#include "mask.cuh"
#include "ptx.cuh"
#include "tile.cuh"
#include "visits.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
constexpr int ROWS = 16;  // keys of one warp
constexpr int KEY_WARPS = TILE_K / ROWS;
constexpr int MATES = WARPS / KEY_WARPS;                                    // warps that own the same keys
constexpr int QUERY_PARTS = MATES < TILE_Q / ROWS ? MATES : TILE_Q / ROWS;  // that have other queries
constexpr int COLUMN_PARTS = MATES / QUERY_PARTS;                           // that have other columns of dk and dv
constexpr int PART = TILE_Q / QUERY_PARTS;                                  // queries of a warp
constexpr int QUERIES = PART < 32 ? PART : 32;                              // whose scores it has at a time
constexpr int PIECES = PART / QUERIES;

static_assert(TILE_K % ROWS == 0 && WARPS % KEY_WARPS == 0, "TILE_K, WARPS: as many warps for each 16 keys");
static_assert(MATES % QUERY_PARTS == 0 && PART % QUERIES == 0 && QUERIES % 16 == 0, "TILE_Q: 16 queries for a warp");
static_assert(STAGES == 2, "STAGES: rows of q and dout wait in registers while those before are multiplied");
static_assert(QUERY_PARTS <= 2, "WARPS: two sums for dk and dv at most");
static_assert(HEAD_DIM % (16 * COLUMN_PARTS) == 0 && VALUE_DIM % (16 * COLUMN_PARTS) == 0,
              "WARPS: 16 columns of dk and dv for each");

// dq of the tile: 16 rows, and columns, of one warp.
constexpr int DQ_MATES = WARPS * ROWS / TILE_Q;  // warps that share rows
constexpr int DQ_COLUMNS = HEAD_DIM / DQ_MATES;
constexpr int DQ_TOGETHER = DQ_COLUMNS % 32 == 0 ? 4 : 2;  // blocks of 8 columns
static_assert(DQ_MATES > 0 && HEAD_DIM % (16 * DQ_MATES) == 0, "WARPS: 16 columns of dq for each");

using QueryTile = SplitTile<TILE_Q, HEAD_DIM>;
using DoutTile = SplitTile<TILE_Q, VALUE_DIM>;
using KeyTile = SplitTile<TILE_K, HEAD_DIM>;
using ValueTile = SplitTile<TILE_K, VALUE_DIM>;
using SlopeTile = SplitTile<TILE_K, TILE_Q>;  // ds^T: a row for each key

struct alignas(8) Two {
    float values[2];
};
struct alignas(16) Four {
    float values[4];
};

// Where an item's gradients go.
struct alignas(16) Results {
    char *dk, *dv, *suspect;
    int keys;  // of the tile
};

struct Shared {
    char keys[KeyTile::BYTES];  // at an item's end, with those of values, sums that a warp's mate adds
    char values[ValueTile::BYTES];
    char queries[QueryTile::BYTES];
    char douts[DoutTile::BYTES];
    char slopes[SlopeTile::BYTES];
    float rows[2][TILE_Q];  // row_lse, row_delta
    Results results;
    Agenda agenda;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and the agenda take");
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int QUERY_START = OFFSET_OF(Shared, queries), DOUT_START = OFFSET_OF(Shared, douts);
constexpr int SLOPE_START = OFFSET_OF(Shared, slopes), ROW_START = OFFSET_OF(Shared, rows);
constexpr int RESULT_START = OFFSET_OF(Shared, results), AGENDA_START = OFFSET_OF(Shared, agenda);

using Scores = float[QUERIES / 8][4];
using Operands = Parts[QUERIES / 16];  // the same, split: A operands
using KeySums = float[HEAD_DIM / 8 / COLUMN_PARTS][4];
using ValueSums = float[VALUE_DIM / 8 / COLUMN_PARTS][4];

// Splits rows of an operand into a tile; `source` is the address of row 0, rows outside [first, end) are 0.
template <int TILE_ROWS, int COLUMNS>
__device__ __forceinline__ void load_tile(uint32 base, const char* source, int64 stride, int columns, int first,
                                          int end) {
    SplitCopy<TILE_ROWS, TILE_ROWS, COLUMNS, THREADS> numbers;
    numbers.load(source, stride, columns, first, end);
    numbers.store(base);
}

// What the rows of a visit bring along, beside their tiles.
__device__ __forceinline__ void load_rows(const Args& args, uint32 shared, int tile) {
    constexpr int CHUNKS = TILE_Q * sizeof(float) / CHUNK;
    const int thread = fresh_thread_index();
    if (thread < 2 * CHUNKS) {
        const char* from = thread < CHUNKS ? args.row_lse : args.row_delta;
        cp_async_16(shared + ROW_START + thread * CHUNK,
                    from + static_cast<int64>(tile) * (TILE_Q * sizeof(float)) + thread % CHUNKS * CHUNK, true);
    }
    cp_async_commit_group();
}

// Which elements of a warp's transposed scores are seen, from its first key and query on.
struct Seen {
    int first[2], end[2];  // columns of the rows of this thread, less its first column
    __device__ __forceinline__ Seen(const Args& args, const Mask& mask, int key, int query) {
        const int lane = lane_index(), column = query + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int j = key + 8 * half + lane / 4;
            first[half] = mask.first_query(j, args.queries) - column;
            end[half] = j < args.keys ? mask.end_query(j, args.queries) - column : 0;
        }
    }
    __device__ __forceinline__ bool operator()(int half, int column) const {
        return static_cast<int>(column >= first[half]) & static_cast<int>(column < end[half]);
    }
};

// f(n, e) of all elements that a thread has of a warp's scores; e / 2 is the half of the rows.
template <typename Function>
__device__ __forceinline__ void for_each(Function f) {
#pragma unroll
    for (int n = 0; n < QUERIES / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(n, e);
    }
}

// Numbers of the query rows that are this thread's columns; `rows` is where that of the first lies.
struct Columns {
    Two numbers[QUERIES / 8];
    __device__ __forceinline__ explicit Columns(uint32 rows) {
#pragma unroll
        for (int n = 0; n < QUERIES / 8; ++n) numbers[n] = load_shared<Two>(rows + 8 * n * sizeof(float));
    }
    __device__ __forceinline__ float operator()(int n, int e) const { return numbers[n].values[e % 2]; }
};

// Accumulators as A operands.
__device__ __forceinline__ void split_operands(Operands& operands, const Scores& x) {
#pragma unroll
    for (int step = 0; step < QUERIES / 16; ++step) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {  // rows g and g + 8 of queries 0-7, then of queries 8-15
            const float(&pair)[4] = x[2 * step + r / 2];
            uint32 parts[PARTS];
            split<false>(parts, pair[r % 2 * 2], pair[r % 2 * 2 + 1]);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) operands[step][p][r] = parts[p];
        }
    }
}
// Writes them to a tile; `lane` is where the first of this thread go.
__device__ __forceinline__ void store_operands(uint32 lane, const Operands& operands) {
#pragma unroll
    for (int n = 0; n < QUERIES / 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                store_shared(SlopeTile::Shape::step(lane, 8 * half, n) + p * SlopeTile::PART_BYTES,
                             operands[n / 2][p][n % 2 * 2 + half]);
            }
        }
    }
}

// And reads them again.
__device__ __forceinline__ void load_operands(Operands& operands, uint32 lane) {
#pragma unroll
    for (int step = 0; step < QUERIES / 16; ++step) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            ldmatrix_x4(operands[step][p], p * SlopeTile::PART_BYTES + SlopeTile::Shape::step(lane, 0, 2 * step));
        }
    }
}

// scores (16 x QUERIES) = a b^T, for rows of tiles that begin at `a_rows` and `b_rows`.
template <typename A, typename B>
__device__ __forceinline__ void multiply_pairs(Scores& scores, uint32 a_rows, uint32 b_rows, int columns) {
    constexpr int COLUMNS = A::Shape::PITCH / 2;
    const uint32 lane_a = a_rows + lane_of_a<COLUMNS>(), lane_b = b_rows + lane_of_b<COLUMNS>();
    multiply_rows<A, B, 2>(scores, lane_a, lane_b, columns);
}

// A operands for multiply_columns: a warp's own, in its registers; 16 rows of ds, `lane` being where a lane finds those
// of the first 16 keys.
struct OwnOperands {
    const Operands& operands;
    __device__ __forceinline__ void operator()(Parts& a, int step) const {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
#pragma unroll
            for (int r = 0; r < 4; ++r) a[p][r] = operands[step][p][r];
        }
    }
};
struct SlopeOperands {
    uint32 lane;
    __device__ __forceinline__ void operator()(Parts& a, int step) const {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            ldmatrix_x4_trans(a[p], p * SlopeTile::PART_BYTES + SlopeTile::Shape::step(lane, 16 * step, 0));
        }
    }
};

// sums (16 x this warp's columns) += a (16 x QUERIES) b, b the rows of a tile that begin where `lane` is; columns from
// `columns` on are left out.
template <typename B, int COLUMNS>
__device__ __forceinline__ void add_product(float (&sums)[COLUMNS][4], const Operands& a, uint32 lane, int columns) {
    // Without a branch between these, the compiler would read ahead into more registers than there are.
    constexpr int TOGETHER = COLUMNS % 4 == 0 ? 4 : 2;  // blocks of 8 columns
#pragma unroll
    for (int n = 0; n < COLUMNS; n += TOGETHER) {
        if (8 * n * COLUMN_PARTS >= columns) continue;
        float sum[TOGETHER][4];
        multiply_columns<B, QUERIES / 16, 2 * COLUMN_PARTS>(sum, OwnOperands{a},
                                                            B::Shape::step(lane, 0, n * COLUMN_PARTS));
#pragma unroll
        for (int m = 0; m < TOGETHER; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[n + m][e] += sum[m][e];
        }
    }
}

// Sums that a warp's mate adds, on their way through shared memory.
template <int COLUMNS>
__device__ __forceinline__ uint32 place_of_sums(uint32 base) {
    const int warp = warp_index() / (QUERY_PARTS * COLUMN_PARTS) * COLUMN_PARTS + warp_index() % COLUMN_PARTS;
    return base + warp * (COLUMNS * WARP * sizeof(Four)) + lane_index() * sizeof(Four);
}
template <int COLUMNS>
__device__ __forceinline__ void give_sums(const float (&sums)[COLUMNS][4], uint32 base) {
    const uint32 place = place_of_sums<COLUMNS>(base);
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        store_shared(place + n * WARP * sizeof(Four), Four{{sums[n][0], sums[n][1], sums[n][2], sums[n][3]}});
    }
}
template <int COLUMNS>
__device__ __forceinline__ void take_sums(float (&sums)[COLUMNS][4], uint32 base) {
    const uint32 place = place_of_sums<COLUMNS>(base);
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        const Four given = load_shared<Four>(place + n * WARP * sizeof(Four));
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[n][e] += given.values[e];
    }
}

// The warp's part of a gradient of the block's keys to where it belongs. A quad of threads writes a whole sector.
template <int COLUMNS>
__device__ __forceinline__ void put(const float (&sums)[COLUMNS][4], float factor, char* rows, int64 stride, int dim,
                                    int keys, char* suspect) {
    const int lane = lane_index(), key_row = warp_index() / MATES * ROWS, part = warp_index() % COLUMN_PARTS;
    float finite = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = key_row + 8 * half + lane / 4;
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            const int d = 16 * (n / 2 * COLUMN_PARTS + part) + n % 2 * 8 + lane % 4 * 2;
            const float low = sums[n][2 * half] * factor, high = sums[n][2 * half + 1] * factor;
            if (r >= keys || d >= dim) continue;
            finite += (low - low) + (high - high);
            store_global(rows + r * stride + d * sizeof(float), Two{{low, high}});
        }
    }
    if (finite != 0.0f) store_global(suspect, 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_backward_f32(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const AgendaAt agenda{shared + AGENDA_START};
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    // Registers are short: what is soon found is found anew where it is used.
    auto first_thread = [] { return fresh_thread_index() == 0; };
    auto last_warp = [] { return warp_index() == WARPS - 1; };
    auto key_row = [] { return warp_index() / MATES * ROWS; };
    auto query_part = [] { return warp_index() / COLUMN_PARTS % QUERY_PARTS; };
    auto column_part = [] { return warp_index() % COLUMN_PARTS; };
    auto visit = [=](int half) { return agenda.visit(half); };
    auto set_visit = [=](int half, int n) {
        if (first_thread()) agenda.set_visit(half, n);
    };
    auto draw = [&] {
        if (first_thread()) agenda.set_next(atomic_add(args.turns + TICKET, 1));
    };
    auto release = [&](int n) {
        if (ORDERED && first_thread()) add_release(agenda.counter(args, n), 1);
    };
    // f(source, stride, columns, first, end) of the rows of q, or of dout, of the n-th visit.
    auto of_queries = [&](int n, auto f) {
        const Visit at = agenda.listed(n).visit;
        const int row = at.tile * TILE_Q;
        f(agenda.work().q + at.head * args.q_strides.head + row * args.q_strides.row, args.q_strides.row,
          args.head_dim, 0, args.queries - row);
    };
    auto of_douts = [&](int n, auto f) {
        const Visit at = agenda.listed(n).visit;
        const int row = at.tile * TILE_Q;
        f(agenda.work().dout + at.head * args.dout_strides.head + row * args.dout_strides.row, args.dout_strides.row,
          args.value_dim, 0, args.queries - row);
    };

    draw();
    for (;;) {
        sync_threads();  // the item is there, and all have left what is filled next
        const int index = agenda.next();
        if (index >= args.items) break;
        {
            const Item item = locate_item(args, mask, index);
            const int key = item.key_tile * TILE_K, head = item.key_head * args.group;
            if (first_thread()) {
                Work work;
                work.q = args.q + args.q_strides.offset(item.batch0, item.batch1, head);
                work.dout = args.dout + args.dout_strides.offset(item.batch0, item.batch1, head);
                work.first_tile = (item.batch * args.heads + head) * args.query_tiles;
                work.index = index;
                work.visits = item.span.visits;
                work.key = key;
                agenda.set_work(work);
                Results results;
                results.dk = args.dk + args.dk_strides.offset(item.batch0, item.batch1, item.key_head) +
                             key * args.dk_strides.row;
                results.dv = args.dv + args.dv_strides.offset(item.batch0, item.batch1, item.key_head) +
                             key * args.dv_strides.row;
                const int64 key_head = static_cast<int64>(item.batch) * (args.heads / args.group) + item.key_head;
                results.suspect = args.suspects + (key_head * args.key_tiles + item.key_tile) * sizeof(int);
                results.keys = args.keys - key;
                store_shared(shared + RESULT_START, results);
            }
            if (item.span.visits > 0) {
                load_tile<TILE_K, HEAD_DIM>(
                    shared + KEY_START,
                    args.k + args.k_strides.offset(item.batch0, item.batch1, item.key_head) + key * args.k_strides.row,
                    args.k_strides.row, args.head_dim, 0, args.keys - key);
                load_tile<TILE_K, VALUE_DIM>(
                    shared + VALUE_START,
                    args.v + args.v_strides.offset(item.batch0, item.batch1, item.key_head) + key * args.v_strides.row,
                    args.v_strides.row, args.value_dim, 0, args.keys - key);
                if (last_warp()) agenda.list(args, mask, item, 0);
            }
            set_visit(0, 0);
            sync_threads();  // the list is there
            if (item.span.visits > 0) {
                load_rows(args, shared, agenda.tile_of(args, agenda.listed(0).visit));
                of_queries(0, [&](auto... rows) { load_tile<TILE_Q, HEAD_DIM>(shared + QUERY_START, rows...); });
                of_douts(0, [&](auto... rows) { load_tile<TILE_Q, VALUE_DIM>(shared + DOUT_START, rows...); });
            }
        }

        KeySums dk = {};
        ValueSums dv = {};
        for (;;) {
            cp_async_wait_group<0>();
            sync_threads();  // the tiles are here for all warps, and all have left ds^T
            const int n = visit(0);
            if (n >= agenda.work().visits) break;
            if (n % WARP == WARP / 2 && last_warp()) {
                agenda.list(args, mask, locate_item(args, mask, agenda.work().index), n + WARP / 2);
            }
            set_visit(1, n);
            auto more = [&] { return visit(0) + 1 < agenda.work().visits; };
            // On their way to the next visit. (Not zeroed, they would be kept from visit to visit.)
            SplitCopy<TILE_Q, TILE_Q, HEAD_DIM, THREADS> queries = {};
            SplitCopy<TILE_Q, TILE_Q, VALUE_DIM, THREADS> douts = {};
#pragma unroll 1
            for (int piece = 0; piece < PIECES; ++piece) {
                auto query = [&] { return query_part() * PART + piece * QUERIES; };
                const bool last = piece == PIECES - 1;
                auto query_rows = [&] { return shared + QUERY_START + query() * QueryTile::Shape::PITCH; };
                auto dout_rows = [&] { return shared + DOUT_START + query() * DoutTile::Shape::PITCH; };
                auto slopes = [&] { return shared + SLOPE_START + key_row() * SlopeTile::Shape::PITCH; };
                auto numbers = [&] { return shared + ROW_START + (query() + lane_index() % 4 * 2) * sizeof(float); };
                auto plain = [&] { return agenda.listed(visit(0)).plain; };
                auto seen = [&] {
                    return Seen(args, mask, agenda.work().key + key_row(),
                                agenda.listed(visit(0)).visit.tile * TILE_Q + query());
                };
                Scores p, ds;
                multiply_pairs<KeyTile, QueryTile>(p, shared + KEY_START + key_row() * KeyTile::Shape::PITCH,
                                                   query_rows(), args.head_dim);
                {
                    const Columns lse(numbers());
                    for_each([&](int n, int e) { p[n][e] = fused_multiply_add(p[n][e], args.scale_log2, -lse(n, e)); });
                }
                if (!plain()) {  // hidden: p = 0; and no p above 1, of a coarse lse, but NaN stays NaN
                    const Seen is_seen = seen();
                    for_each([&](int n, int e) {
                        const float at_most = p[n][e] > 0.0f ? 0.0f : p[n][e];
                        p[n][e] = is_seen(e / 2, 8 * n + e % 2) ? at_most : -INFINITE;
                    });
                }
                for_each([&](int n, int e) { p[n][e] = ex2_approx(p[n][e]); });
                if (visit(0) > 0 && piece == 0) release(visit(0) - 1);  // whose sums have long arrived

                multiply_pairs<ValueTile, DoutTile>(ds, shared + VALUE_START + key_row() * ValueTile::Shape::PITCH,
                                                    dout_rows(), args.value_dim);
                {
                    const Columns delta(numbers() + TILE_Q * sizeof(float));
                    for_each([&](int n, int e) { ds[n][e] = p[n][e] * (ds[n][e] - delta(n, e)); });
                }
                if (!plain()) {  // hidden: ds = 0, whatever the product
                    const Seen is_seen = seen();
                    for_each([&](int n, int e) { ds[n][e] = is_seen(e / 2, 8 * n + e % 2) ? ds[n][e] : 0.0f; });
                }
                Operands parts;
                split_operands(parts, ds);
                if (column_part() == 0) {  // others have the same
                    store_operands(slopes() + lane_of_pair<TILE_Q>(query() / 8), parts);
                }
                split_operands(parts, p);
                if (last && more()) of_douts(visit(0) + 1, [&](auto... rows) { douts.load(rows...); });
                add_product<DoutTile>(dv, parts, dout_rows() + lane_of_a<VALUE_DIM>(2 * column_part()), args.value_dim);
                if (last || COLUMN_PARTS > 1) {
                    sync_threads();  // all have left dout, and ds^T is here
                } else {
                    sync_warp();
                }
                if (last && more()) {
                    douts.store(shared + DOUT_START);
                    of_queries(visit(0) + 1, [&](auto... rows) { queries.load(rows...); });
                }
                load_operands(parts, slopes() + lane_of_a<TILE_Q>(query() / 8));
                add_product<QueryTile>(dk, parts, query_rows() + lane_of_a<HEAD_DIM>(2 * column_part()), args.head_dim);
            }
            sync_threads();  // all have left q

            const bool again = visit(1) + 1 < agenda.work().visits;
            if (again) {
                load_rows(args, shared, agenda.tile_of(args, agenda.listed(visit(1) + 1).visit));
                queries.store(shared + QUERY_START);
            }
            {
                const int dq_mate = warp_index() % DQ_MATES, dq_row = warp_index() / DQ_MATES * ROWS;
                const SlopeOperands slopes{shared + SLOPE_START + lane_of_b<TILE_Q>(dq_row / 8)};
                const int64 tile = agenda.tile_of(args, agenda.listed(visit(1)).visit);
                char* to = args.dq_sum + (tile * TILE_Q + dq_row) * (HEAD_DIM * sizeof(float)) +
                           2 * dq_mate * SUM_BYTES + lane_index() * SUM_LANE;
                auto turns_had = [&] { return load_relaxed(agenda.counter(args, uniform(visit(1)))); };
                int turns = ORDERED ? turns_had() : 1;  // is back before the first product ends
                const bool first = ORDERED && agenda.listed(visit(1)).turn == 0;
#pragma unroll
                for (int n = 0; n < DQ_COLUMNS / 8; n += DQ_TOGETHER) {
                    float sum[DQ_TOGETHER][4] = {};
                    if (16 * dq_mate + 8 * n * DQ_MATES < args.head_dim) {
                        const uint32 lane = shared + KEY_START + lane_of_a<HEAD_DIM>(2 * dq_mate);
                        multiply_columns<KeyTile, TILE_K / 16, 2 * DQ_MATES>(
                            sum, slopes, KeyTile::Shape::step(lane, 0, n * DQ_MATES));
                    }
                    // Nothing is read that another block has written, so that nothing is to be acquired: memory adds,
                    // and has added what came before a counter that it shows.
                    while (ORDERED && turns < agenda.listed(visit(1)).turn) turns = turns_had();
#pragma unroll
                    for (int m = 0; m < DQ_TOGETHER; ++m) {
                        char* place = to + ((n + m) / 2 * 2 * DQ_MATES + m % 2) * SUM_BYTES;
                        if (first) {
                            store_global(place, Four{{sum[m][0], sum[m][1], sum[m][2], sum[m][3]}});
                        } else {
                            add_global<VECTOR_ADDS>(place, sum[m]);
                        }
                    }
                }
            }
            if (!again) draw();  // not before: a block that waits holds no item but its own
            set_visit(0, visit(1) + 1);
        }

        if (agenda.work().visits == 0) draw();
        if (agenda.work().visits > 0) release(agenda.work().visits - 1);
        if constexpr (QUERY_PARTS == 2) {  // one finishes dk, the other dv
            if (query_part() == 0) {
                give_sums(dv, shared + VALUE_START);
            } else {
                give_sums(dk, shared + KEY_START);
            }
            sync_threads();  // the sums are here
        }
        const Results results = load_shared<Results>(shared + RESULT_START);
        if (query_part() == 0) {
            if constexpr (QUERY_PARTS == 2) take_sums(dk, shared + KEY_START);
            put(dk, args.scale, results.dk, args.dk_strides.row, args.head_dim, results.keys, results.suspect);
        }
        if (query_part() == QUERY_PARTS - 1) {
            if constexpr (QUERY_PARTS == 2) take_sums(dv, shared + VALUE_START);
            put(dv, 1.0f, results.dv, args.dv_strides.row, args.value_dim, results.keys, results.suspect);
        }
    }
}

}  // namespace cuflash
