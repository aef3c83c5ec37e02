// dk and dv, and the sums that dq is made of, for 16-bit elements, on any GPU since sm_80.
//
//   p = exp2(scale_log2 q k^T - row_lse)    ds = p (dout v^T - row_delta)    row_delta = sum(dout out) - dlse
//   dv = p^T dout                           dk = scale ds^T q                dq = scale ds k
//
// A block owns TILE_K keys of a key head at a time and visits the tiles of TILE_Q query rows that see some of them, of
// all heads of the group (visits.cuh). Scores are computed transposed, a warp's rows being keys: so p^T and ds^T leave
// the tensor cores in the layout of the A operands of dv and dk, which stay in registers from the first visit to the
// last. A warp owns KEY_ROWS keys; where their dk and dv are too wide for its registers, MATES warps do: each has a
// part of the queries while scores are computed and a part of the columns while dk and dv are, and takes p^T and ds^T
// of the others' queries from shared memory. There ds^T goes anyway, for dq, which needs that of all keys: a warp
// computes some rows and columns of dq and adds them to dq_sum when the block's turn has come. q and dout arrive by
// cp.async: with two STAGES beside the visit before, with one beside its dq.
//
// What limits speed: shared memory, and the tensor cores close behind. At head_dim 128 a visit reads and writes 600 KB
// of it, 4,700 clocks at 128 bytes each, and takes 2,560 products of 16 x 8 x 16, 4,100 clocks on Hopper. The
// exponentials run beside the product with v. Turns cost next to nothing while blocks keep their distance: sums are
// sent off to be added, the counter is looked at a product ahead and raised a product after, when they have arrived.
#include "agenda.cuh"
#include "backward_args.cuh"
#include "mask.cuh"
#include "ptx.cuh"
#include "tile.cuh"
#include "visits.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
constexpr int KEY_ROWS = TILE_K < 32 ? TILE_K : 32;  // of one warp
constexpr int BLOCKS = KEY_ROWS / 16;                // of 16 rows, one A operand each
constexpr int KEY_WARPS = TILE_K / KEY_ROWS;
constexpr int MATES = WARPS / KEY_WARPS;                       // warps that own the same keys
constexpr int QUERIES = MATES == 1 ? 32 : TILE_Q / MATES;      // whose scores a warp has at a time
constexpr int PARTS = TILE_Q / MATES / QUERIES;

static_assert(TILE_Q % 64 == 0, "TILE_Q: whole blocks of 64 rows of dq_sum");
static_assert(TILE_K % KEY_ROWS == 0 && KEY_ROWS % 16 == 0, "TILE_K: 16 keys, or a multiple of 32");
static_assert(WARPS % KEY_WARPS == 0, "WARPS: as many for each 32 keys");
static_assert(QUERIES % 16 == 0 && PARTS * QUERIES * MATES == TILE_Q, "TILE_Q: whole steps of 16 queries for a warp");
static_assert(HEAD_DIM % (16 * MATES) == 0 && VALUE_DIM % (16 * MATES) == 0, "WARPS: 16 columns of dk and dv for each");

// dq of the tile: rows and columns of one warp.
constexpr int DQ_ROWS = HEAD_DIM % (16 * WARPS * 32 / TILE_Q) == 0 ? 32 : 16;
constexpr int DQ_BLOCKS = DQ_ROWS / 16;
constexpr int DQ_MATES = WARPS * DQ_ROWS / TILE_Q;  // warps that share rows
constexpr int DQ_COLUMNS = HEAD_DIM / DQ_MATES;
static_assert(DQ_MATES > 0 && HEAD_DIM % (16 * DQ_MATES) == 0, "WARPS: 16 columns of dq for each");

using QueryTile = Tile<HEAD_DIM>;
using KeyTile = Tile<HEAD_DIM>;
using ValueTile = Tile<VALUE_DIM>;  // of v and dout
using PairTile = Tile<TILE_Q>;      // of p^T and ds^T: a row for each key

struct alignas(8) Two {
    float values[2];
};

struct alignas(16) Four {
    float values[4];
};

struct Shared {
    char keys[TILE_K * KeyTile::PITCH];  // at an item's end dk and dv take their places
    char values[TILE_K * ValueTile::PITCH];
    char queries[STAGES][TILE_Q * QueryTile::PITCH];
    char douts[STAGES][TILE_Q * ValueTile::PITCH];
    char slopes[TILE_K * PairTile::PITCH];                    // ds^T
    char weights[MATES > 1 ? TILE_K * PairTile::PITCH : 16];  // p^T
    float rows[STAGES][2][TILE_Q];                            // row_lse, row_delta
    Agenda agenda;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and the agenda take");
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int QUERY_START = OFFSET_OF(Shared, queries), DOUT_START = OFFSET_OF(Shared, douts);
constexpr int SLOPE_START = OFFSET_OF(Shared, slopes), WEIGHT_START = OFFSET_OF(Shared, weights);
constexpr int ROW_START = OFFSET_OF(Shared, rows), AGENDA_START = OFFSET_OF(Shared, agenda);

using Scores = float[BLOCKS][QUERIES / 8][4];
using Pairs = uint32[QUERIES / 16][BLOCKS][4];  // the same of 16 bits: A operands

// Tiles of q and dout of the n-th visit, and what their rows bring along.
__device__ __forceinline__ void load_rows(const Args& args, uint32 shared, int n) {
    const AgendaAt agenda{shared + AGENDA_START};
    const Visit visit = agenda.listed(n).visit;
    const Work work = agenda.work();
    const int stage = n % STAGES, row = visit.tile * TILE_Q;
    TileCopy<TILE_Q, HEAD_DIM, THREADS>::copy(
        shared + QUERY_START + stage * (TILE_Q * QueryTile::PITCH),
        work.q + visit.head * args.q_strides.head + row * args.q_strides.row, args.q_strides.row, args.head_dim, 0,
        args.queries - row);
    TileCopy<TILE_Q, VALUE_DIM, THREADS>::copy(
        shared + DOUT_START + stage * (TILE_Q * ValueTile::PITCH),
        work.dout + visit.head * args.dout_strides.head + row * args.dout_strides.row, args.dout_strides.row,
        args.value_dim, 0, args.queries - row);
    constexpr int CHUNKS = TILE_Q * sizeof(float) / CHUNK;
    const int thread = fresh_thread_index();
    if (thread < 2 * CHUNKS) {
        const char* from = thread < CHUNKS ? args.row_lse : args.row_delta;
        cp_async_16(shared + ROW_START + stage * (2 * TILE_Q * sizeof(float)) + thread * CHUNK,
                    from + static_cast<int64>(agenda.tile_of(args, visit)) * (TILE_Q * sizeof(float)) +
                        thread % CHUNKS * CHUNK,
                    true);
    }
}

// Which elements of a warp's transposed scores are seen, from its first key and query on.
struct Seen {
    int first[BLOCKS][2], end[BLOCKS][2];  // columns of the rows of this thread, less its first column
    __device__ __forceinline__ Seen(const Args& args, const Mask& mask, int key, int query) {
        const int lane = lane_index(), column = query + lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int j = key + 16 * block + 8 * half + lane / 4;
                first[block][half] = mask.first_query(j, args.queries) - column;
                end[block][half] = j < args.keys ? mask.end_query(j, args.queries) - column : 0;
            }
        }
    }
    __device__ __forceinline__ bool operator()(int block, int half, int column) const {
        return static_cast<int>(column >= first[block][half]) & static_cast<int>(column < end[block][half]);
    }
};

// f(block, n, e) of all elements that a thread has of a warp's scores; e / 2 is the half of the block's rows.
template <typename Function>
__device__ __forceinline__ void for_each(Function f) {
#pragma unroll
    for (int n = 0; n < QUERIES / 8; ++n) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int e = 0; e < 4; ++e) f(block, n, e);
        }
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

// Two neighbours of an accumulator in their place of an A operand.
__device__ __forceinline__ void pack(Pairs& pairs, int block, int n, int half, float low, float high) {
    pairs[n / 2][block][n % 2 * 2 + half] = cvt_pair(Element{}, low, high);
}
// Writes 16 x 8 elements of these to a tile; `lane` is where the first of this thread go.
__device__ __forceinline__ void store_pairs(uint32 lane, int block, int n, const Pairs& pairs) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        store_shared(PairTile::step(lane, 16 * block + 8 * half, n), pairs[n / 2][block][n % 2 * 2 + half]);
    }
}

// A operands: those of a tile, from where a lane's first lies; a warp's own, in its registers.
template <int COLUMNS>
struct TileOperands {
    uint32 lane;
    __device__ __forceinline__ void operator()(uint32 (&a)[4], int block, int k) const {
        ldmatrix_x4(a, Tile<COLUMNS>::step(lane, 16 * block, 2 * k));
    }
};
struct OwnOperands {
    const Pairs& pairs;
    __device__ __forceinline__ void operator()(uint32 (&a)[4], int block, int k) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = pairs[k][block][e];
    }
};

// sums (KEY_ROWS x this warp's columns) += a (KEY_ROWS x QUERIES) b, b from row `query` of a tile of COLUMNS on.
template <int COLUMNS, typename LoadA>
__device__ __forceinline__ void add_product(float (&sums)[BLOCKS][COLUMNS / 8 / MATES][4], LoadA load_a, uint32 b,
                                            uint32 lane, int query) {
#pragma unroll
    for (int step = 0; step < QUERIES / 16; ++step) {
        uint32 a[BLOCKS][4];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) load_a(a[block], block, step);
        multiply_add<Element, BLOCKS, COLUMNS / 8 / MATES, COLUMNS, 2 * MATES>(
            sums, a, b + query * Tile<COLUMNS>::PITCH, lane, 16 * step);
    }
}

// The warp's part of a gradient of the block's keys: 16-bit elements to the tile at `base`, from which rows leave in
// whole chunks, or floats to where they belong.
template <int COLUMNS>
__device__ __forceinline__ void put(const float (&sums)[BLOCKS][COLUMNS / 8 / MATES][4], float factor, uint32 base,
                                    char* wide, int64 stride, int dim, int keys, char* suspect) {
    const int lane = lane_index(), key_row = warp_index() / MATES * KEY_ROWS, mate = warp_index() % MATES;
    float finite = 0.0f;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = key_row + 16 * block + 8 * half + lane / 4;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8 / MATES; ++n) {
                const int chunk = n / 2 * 2 * MATES + 2 * mate + n % 2;
                const float low = sums[block][n][2 * half] * factor, high = sums[block][n][2 * half + 1] * factor;
                if (r < keys) finite += (low - low) + (high - high);
                if (wide == nullptr) {
                    store_shared(base + Tile<COLUMNS>::offset(r, chunk) + lane % 4 * 4, cvt_pair(Element{}, low, high));
                } else if (r < keys && 8 * chunk + lane % 4 * 2 < dim) {
                    store_global(wide + r * stride + (8 * chunk + lane % 4 * 2) * sizeof(float), Two{{low, high}});
                }
            }
        }
    }
    if (finite != 0.0f) store_global(suspect, 1);
}
template <int COLUMNS>
__device__ __forceinline__ void store_rows(uint32 base, char* rows, int64 stride, int dim, int keys) {
    using Shape = Tile<COLUMNS>;
    for (int n = fresh_thread_index(); n < TILE_K * Shape::CHUNKS; n += THREADS) {
        const int r = n / Shape::CHUNKS, chunk = n % Shape::CHUNKS;
        if (r < keys && chunk * CHUNK_ELEMENTS < dim) {
            store_global(rows + r * stride + chunk * CHUNK, load_shared<Vector16>(base + Shape::offset(r, chunk)));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_backward(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const AgendaAt agenda{shared + AGENDA_START};
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    // Registers are short: what is soon found is found anew where it is used.
    auto first_thread = [] { return fresh_thread_index() == 0; };
    auto last_warp = [] { return warp_index() == WARPS - 1; };
    auto mate = [] { return warp_index() % MATES; };
    auto key_row = [] { return warp_index() / MATES * KEY_ROWS; };
    auto visit = [=](int half) { return agenda.visit(half); };
    auto set_visit = [=](int half, int n) {
        if (first_thread()) agenda.set_visit(half, n);
    };
    auto queries = [=](int n) { return shared + QUERY_START + n % STAGES * (TILE_Q * QueryTile::PITCH); };
    auto douts = [=](int n) { return shared + DOUT_START + n % STAGES * (TILE_Q * ValueTile::PITCH); };
    auto lane_dk = [=] { return lane_of_a<HEAD_DIM>(2 * mate()); };  // where a lane finds the columns it has
    auto lane_dv = [=] { return lane_of_a<VALUE_DIM>(2 * mate()); };
    auto draw = [&] {
        if (first_thread()) agenda.set_next(atomic_add(args.turns + TICKET, 1));
    };
    auto release = [&](int n) {
        if (ORDERED && first_thread()) add_release(agenda.counter(args, n), 1);
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
            }
            if (item.span.visits > 0) {
                TileCopy<TILE_K, HEAD_DIM, THREADS>::copy(
                    shared + KEY_START,
                    args.k + args.k_strides.offset(item.batch0, item.batch1, item.key_head) + key * args.k_strides.row,
                    args.k_strides.row, args.head_dim, 0, args.keys - key);
                TileCopy<TILE_K, VALUE_DIM, THREADS>::copy(
                    shared + VALUE_START,
                    args.v + args.v_strides.offset(item.batch0, item.batch1, item.key_head) + key * args.v_strides.row,
                    args.v_strides.row, args.value_dim, 0, args.keys - key);
                if (last_warp()) agenda.list(args, mask, item, 0);
            }
            set_visit(0, 0);
            sync_threads();  // the list is there
            if (item.span.visits > 0) load_rows(args, shared, 0);
            cp_async_commit_group();
        }

        float dk[BLOCKS][HEAD_DIM / 8 / MATES][4] = {}, dv[BLOCKS][VALUE_DIM / 8 / MATES][4] = {};
        for (;;) {
            cp_async_wait_group<0>();
            sync_threads();  // the tiles are here for all warps, and all have left what is filled next
            const int n = visit(0);
            if (n >= agenda.work().visits) break;
            if (STAGES == 2 && n + 1 < agenda.work().visits) load_rows(args, shared, n + 1);
            cp_async_commit_group();
            if (n % WARP == WARP / 2 && last_warp()) {
                agenda.list(args, mask, locate_item(args, mask, agenda.work().index), n + WARP / 2);
            }
#pragma unroll 1
            for (int part = 0; part < PARTS; ++part) {
                const int query = (mate() * PARTS + part) * QUERIES;
                const uint32 rows = shared + ROW_START + visit(0) % STAGES * (2 * TILE_Q * sizeof(float)) +
                                    (query + lane_index() % 4 * 2) * sizeof(float);
                auto plain = [&] { return agenda.listed(visit(0)).plain; };
                auto seen = [&] {
                    return Seen(args, mask, agenda.work().key + key_row(),
                                agenda.listed(visit(0)).visit.tile * TILE_Q + query);
                };
                const TileOperands<HEAD_DIM> keys{lane_of_a<HEAD_DIM>() + shared + KEY_START +
                                                  key_row() * KeyTile::PITCH};
                const TileOperands<VALUE_DIM> values{lane_of_a<VALUE_DIM>() + shared + VALUE_START +
                                                     key_row() * ValueTile::PITCH};
                const uint32 lane_pairs = lane_of_pair<TILE_Q>(query / 8) + shared + key_row() * PairTile::PITCH;

                Scores p, dp;
                multiply_transposed<Element, BLOCKS, QUERIES / 8, HEAD_DIM / 16, HEAD_DIM>(
                    p, keys, queries(visit(0)) + query * QueryTile::PITCH, lane_of_b<HEAD_DIM>());
                {
                    const Columns lse(rows);
                    for_each([&](int block, int n, int e) {
                        p[block][n][e] = fused_multiply_add(p[block][n][e], args.scale_log2, -lse(n, e));
                    });
                }
                if (!plain()) {  // hidden: p = 0; and no p above 1, of a coarse lse, but NaN stays NaN
                    const Seen is_seen = seen();
                    for_each([&](int block, int n, int e) {
                        float& x = p[block][n][e];
                        const float at_most = x > 0.0f ? 0.0f : x;
                        x = is_seen(block, e / 2, 8 * n + e % 2) ? at_most : -INFINITE;
                    });
                }
                if (part == PARTS - 1 && visit(0) > 0) release(visit(0) - 1);  // whose sums have long arrived

                Pairs weights, slopes;
                multiply_transposed<Element, BLOCKS, QUERIES / 8, VALUE_DIM / 16, VALUE_DIM>(
                    dp, values, douts(visit(0)) + query * ValueTile::PITCH, lane_of_b<VALUE_DIM>(), [&](int k) {
                        constexpr int STEPS = VALUE_DIM / 16, PIECES = BLOCKS * QUERIES / 8;
#pragma unroll
                        for (int piece = k * PIECES / STEPS; piece < (k + 1) * PIECES / STEPS; ++piece) {
                            const int block = piece % BLOCKS, n = piece / BLOCKS;
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                float &low = p[block][n][2 * half], &high = p[block][n][2 * half + 1];
                                low = ex2_approx(low), high = ex2_approx(high);
                                pack(weights, block, n, half, low, high);
                            }
                            if (MATES > 1) store_pairs(lane_pairs + WEIGHT_START, block, n, weights);
                        }
                    });
                add_product<VALUE_DIM>(dv, OwnOperands{weights}, douts(visit(0)), lane_dv(), query);
                {
                    const Columns delta(rows + TILE_Q * sizeof(float));
                    for_each([&](int block, int n, int e) {
                        dp[block][n][e] = p[block][n][e] * (dp[block][n][e] - delta(n, e));
                    });
                }
                if (!plain()) {  // hidden: ds = 0, whatever the product
                    const Seen is_seen = seen();
                    for_each([&](int block, int n, int e) {
                        dp[block][n][e] = is_seen(block, e / 2, 8 * n + e % 2) ? dp[block][n][e] : 0.0f;
                    });
                }
                for_each([&](int block, int n, int e) {
                    if (e % 2 == 1) pack(slopes, block, n, e / 2, dp[block][n][e - 1], dp[block][n][e]);
                    if (e == 3) store_pairs(lane_pairs + SLOPE_START, block, n, slopes);
                });
                add_product<HEAD_DIM>(dk, OwnOperands{slopes}, queries(visit(0)), lane_dk(), query);
            }
            set_visit(1, visit(0));
            sync_threads();  // p^T and ds^T are here
#pragma unroll
            for (int other = 1; other < MATES; ++other) {
                const int query = (mate() + other) % MATES * QUERIES;
                const uint32 lane = lane_of_a<TILE_Q>(query / 8) + shared + key_row() * PairTile::PITCH;
                const TileOperands<TILE_Q> weights{lane + WEIGHT_START}, slopes{lane + SLOPE_START};
                add_product<VALUE_DIM>(dv, weights, douts(visit(1)), lane_dv(), query);
                add_product<HEAD_DIM>(dk, slopes, queries(visit(1)), lane_dk(), query);
            }
            if constexpr (STAGES == 1) {
                sync_threads();  // all have left the tiles
                if (visit(1) + 1 < agenda.work().visits) load_rows(args, shared, visit(1) + 1);
                cp_async_commit_group();
            }

            auto turns_had = [&] { return load_relaxed(agenda.counter(args, uniform(visit(1)))); };
            int turns = ORDERED ? turns_had() : 1;  // is back before the product ends
            const int dq_mate = warp_index() % DQ_MATES, dq_row = warp_index() / DQ_MATES * DQ_ROWS;
            const uint32 lane_slopes = lane_of_b<TILE_Q>(dq_row / 8), lane_dq = lane_of_a<HEAD_DIM>(2 * dq_mate);
            float dq[DQ_BLOCKS][DQ_COLUMNS / 8][4] = {};
#pragma unroll
            for (int step = 0; step < TILE_K / 16; ++step) {
                uint32 a[DQ_BLOCKS][4];
#pragma unroll
                for (int block = 0; block < DQ_BLOCKS; ++block) {
                    ldmatrix_x4_trans(a[block],
                                      shared + SLOPE_START + PairTile::step(lane_slopes, 16 * step, 2 * block));
                }
                multiply_add<Element, DQ_BLOCKS, DQ_COLUMNS / 8, HEAD_DIM, 2 * DQ_MATES>(dq, a, shared + KEY_START,
                                                                                        lane_dq, 16 * step);
            }
            // Nothing is read that another block has written, so that nothing is to be acquired: memory adds, and has
            // added what came before a counter that it shows.
            while (ORDERED && turns < agenda.listed(visit(1)).turn) turns = turns_had();
            const bool last = visit(1) + 1 == agenda.work().visits;
            if (last) draw();  // not before: a block that waits holds no item but its own
            const int64 tile = agenda.tile_of(args, agenda.listed(visit(1)).visit);
            char* to = args.dq_sum + tile * (TILE_Q * HEAD_DIM * sizeof(float)) + lane_index() * 16 +
                       (dq_row / 64 * (HEAD_DIM / 8 * 4) + 2 * dq_mate * 4 + dq_row % 64 / 16) * 512;
            auto send = [&](auto put) {
#pragma unroll
                for (int m = 0; m < DQ_COLUMNS / 8; ++m) {
#pragma unroll
                    for (int block = 0; block < DQ_BLOCKS; ++block) {
                        put(to + ((m / 2 * 2 * DQ_MATES + m % 2) * 4 + block) * 512, dq[block][m]);
                    }
                }
            };
            if (ORDERED && agenda.listed(visit(1)).turn == 0) {
                send([](char* place, const float(&x)[4]) { store_global(place, Four{{x[0], x[1], x[2], x[3]}}); });
            } else {
                send([](char* place, const float(&x)[4]) { add_global<VECTOR_ADDS>(place, x); });
            }
            set_visit(0, visit(1) + 1);
        }

        if (agenda.work().visits == 0) draw();
        if (agenda.work().visits > 0) release(agenda.work().visits - 1);
        const Item item = locate_item(args, mask, agenda.work().index);  // again, rather than in registers all along
        const int key = item.key_tile * TILE_K, keys = args.keys - key;
        auto rows_of = [&](char* base, const Strides& strides) {
            return base + strides.offset(item.batch0, item.batch1, item.key_head) + key * strides.row;
        };
        char *const dk_rows = rows_of(args.dk, args.dk_strides), *const dv_rows = rows_of(args.dv, args.dv_strides);
        const int64 head = item.batch * (args.heads / args.group) + item.key_head;
        char* suspect = args.suspects + (head * args.key_tiles + item.key_tile) * sizeof(int);
        put<HEAD_DIM>(dk, args.scale, shared + KEY_START, args.dk_wide ? dk_rows : nullptr, args.dk_strides.row,
                      args.head_dim, keys, suspect);
        put<VALUE_DIM>(dv, 1.0f, shared + VALUE_START, args.dv_wide ? dv_rows : nullptr, args.dv_strides.row,
                       args.value_dim, keys, suspect);
        sync_threads();  // the tiles are full
        if (!args.dk_wide) {
            store_rows<HEAD_DIM>(shared + KEY_START, dk_rows, args.dk_strides.row, args.head_dim, keys);
        }
        if (!args.dv_wide) {
            store_rows<VALUE_DIM>(shared + VALUE_START, dv_rows, args.dv_strides.row, args.value_dim, keys);
        }
    }
}

}  // namespace cuflash
