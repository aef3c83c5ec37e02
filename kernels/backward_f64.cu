// dk and dv, and the sums that dq is made of, in float64 on the tensor cores of any GPU since sm_80.
//
//   p = exp2(scale_log2 q k^T - row_lse)    ds = p (dout v^T - row_delta)    row_delta = sum(dout out) - dlse
//   dv = p^T dout                           dk = scale ds^T q                dq = scale ds k
//
// A block owns TILE_K keys of a key head at a time and visits the tiles of TILE_Q query rows that see some of them, as
// backward.cu does. Its warps are of two kinds, which do the same with other operands, at the same time:
//
//   weights:  s^T = k q^T        p^T  = exp2(scale_log2 s^T - row_lse)     dv += p^T dout
//   slopes:   dp^T = v dout^T    ds^T = p^T (dp^T - row_delta)             dk += ds^T q
//
// Two warps of a kind share KEY_ROWS keys: each has half of the queries while it multiplies first, and half of the
// columns of dk or dv, which stay in registers from the first visit to the last, while it multiplies again. Then all
// warps compute dq of the visit, a part each, and add it to dq_sum when the block's turn has come. The next q and dout
// arrive meanwhile, a half of them as soon as the rows of that half have met p^T and ds^T.
//
// Where things lie. An instruction sums its terms in whatever order its operands hold them, if only both agree, and
// nobody minds which row of a tile is which of an operand's. So rows come in octets, of which two share 16 rows:
// number g of octet n is row first_row(n) + row_in(g). With g = lane / 4 and t = lane % 4 a lane finds
//   - in s^T and dp^T: neighbours along head_dim as terms, 16 bytes at once, of k, v and of q, dout alike;
//   - in p^T and ds^T, kept in shared memory as lanes hold them: A operands of dv and dk, whose terms then are rows
//     t, 4 + t, 8 + t and 12 + t of dout and q; and a transposed one of ds for dq, of rows g and g + 8, 16 bytes each.
// The XOR in offset() lets lanes that load together hit all banks in all of these.
//
// What limits speed: the tensor cores. A product of 16 x 8 x 16 keeps those of a scheduler for 64 clocks on sm_90, in
// which shared memory gives 8 numbers to each lane of a warp. At head_dim 128 a product reads 6 where two operands of
// 16 rows or columns come from there with each other's, for s, dp and dq; 3 for dv and dk, where an A operand serves 8
// products; that is 24 of 40 for the five, and copies, p and ds take 3.5 more. A visit of 64 keys and 32 queries takes
// 640 products, 10,240 clocks, and its exponentials 20 instructions of float64 a pair at 64 a clock, 640 more.
#include "backward_args.cuh"
#include "float64.cuh"
#include "mask.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "visits.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
constexpr int KEY_WARPS = WARPS / 4;           // pairs of warps of a kind
constexpr int KEY_ROWS = TILE_K / KEY_WARPS;   // of a pair
constexpr int BLOCKS = KEY_ROWS / 16;          // of 16 rows, one A operand each
constexpr int QUERIES = TILE_Q / 2;            // whose scores a warp has
constexpr int OCTETS = QUERIES / 8;
constexpr int COLUMNS = HEAD_DIM / 2;          // that a warp has of dk or dv: every other 8
constexpr int HALVES = TILE_Q == 16 ? 1 : 2;   // of q and dout, copied by themselves
constexpr int HALF_ROWS = TILE_Q / HALVES;
constexpr int DQ_MATES = WARPS / (TILE_Q / 16);  // warps that share 16 rows of dq: each has 8 columns in turn
constexpr int DQ_OCTETS = HEAD_DIM / 8 / DQ_MATES;

static_assert(HEAD_DIM == VALUE_DIM, "VALUE_DIM: that of k, so that both kinds of warps do the same");
static_assert(HEAD_DIM % 32 == 0, "HEAD_DIM: a multiple of 32");
static_assert(WARPS % 4 == 0, "WARPS: two of each kind for the same keys");
static_assert(KEY_ROWS * KEY_WARPS == TILE_K && BLOCKS * 16 == KEY_ROWS, "TILE_K: whole blocks of 16 keys for each pair");
static_assert(HALF_ROWS % 16 == 0, "TILE_Q: whole steps of 16 queries");
static_assert(DQ_MATES % 2 == 0 && DQ_OCTETS * 8 * DQ_MATES == HEAD_DIM, "WARPS: as many columns of dq for each");
static_assert(STAGES == 1, "STAGES: one for q and dout");

constexpr int PITCH = HEAD_DIM * sizeof(double);
constexpr int LISTED = 2 * WARP;  // visits

// What a block is working on.
struct alignas(16) Work {
    const char *q, *dout;  // row 0 of the group's first head
    int first_tile;        // tile 0 of that head, among those of all heads
    int index;             // of the item
    int visits;
    int key;  // first of the tile
};
// A visit, looked up beforehand.
struct alignas(16) Listed {
    Visit visit;
    int turn;
    int plain;  // whether every row sees every key
};

struct alignas(16) Fragment {  // 16 keys and 8 queries of p^T or ds^T
    Pair halves[2][WARP];
};
using Fragments = Fragment[TILE_K / 16][TILE_Q / 8];

struct Shared {
    char keys[TILE_K][PITCH];
    char values[TILE_K][PITCH];
    char queries[TILE_Q][PITCH];
    char douts[TILE_Q][PITCH];
    Fragments weights, slopes;  // p^T, ds^T
    double row_lse[TILE_Q], row_delta[TILE_Q];
    Listed list[LISTED];
    Work work;
    int next;  // item
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and lists take");
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int QUERY_START = OFFSET_OF(Shared, queries), DOUT_START = OFFSET_OF(Shared, douts);
constexpr int WEIGHT_START = OFFSET_OF(Shared, weights), SLOPE_START = OFFSET_OF(Shared, slopes);
constexpr int LSE_START = OFFSET_OF(Shared, row_lse), DELTA_START = OFFSET_OF(Shared, row_delta);
constexpr int LIST_START = OFFSET_OF(Shared, list);
constexpr int WORK_START = OFFSET_OF(Shared, work), NEXT_START = OFFSET_OF(Shared, next);

using Scores = double[BLOCKS][OCTETS][4];
using Sums = double[BLOCKS][COLUMNS / 8][4];

// Where things lie -------------------------------------------------------------------------------------------------

__device__ __forceinline__ constexpr int first_row(int octet) { return octet / 2 * 16 + octet % 2 * 4; }
__device__ __forceinline__ int row_in(int g) { return g / 2 + g % 2 * 8; }

// Offset in a tile of a byte of a row: 16-byte chunks change places within 128 bytes. What rows 4 apart hold lies alike.
__device__ __forceinline__ uint32 offset(uint32 row, uint32 byte) {
    return row * PITCH + (byte ^ (row % 2 * 32 + (row / 2 ^ row / 8) % 2 * 64));
}
// Where a lane's number goes in half a fragment: quads of every other two rows swap their halves, so that eight lanes
// which read rows of ds hit all banks.
__device__ __forceinline__ uint32 place_in_fragment() { return (lane_index() ^ (lane_index() >> 2 & 2)) * sizeof(Pair); }

// What this warp is -------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool has_slopes() { return warp_index() >= WARPS / 2; }
__device__ __forceinline__ int key_warp() { return warp_index() / 2 % KEY_WARPS; }
__device__ __forceinline__ int mate() { return warp_index() % 2; }
__device__ __forceinline__ int warp_query() { return first_row(mate() * OCTETS); }  // row of its first octet

// Visits ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ Work load_work(uint32 shared) { return load_shared<Work>(shared + WORK_START); }
__device__ __forceinline__ Listed listed(uint32 shared, int n) {
    return load_shared<Listed>(shared + LIST_START + n % LISTED * sizeof(Listed));
}
// The tile of a visit among those of all heads.
__device__ __forceinline__ int tile_of(const Args& args, uint32 shared, const Visit& visit) {
    return load_work(shared).first_tile + visit.head * args.query_tiles + visit.tile;
}
__device__ __forceinline__ char* turn_counter(const Args& args, uint32 shared, int n) {
    return args.turns + COUNTERS + static_cast<int64>(tile_of(args, shared, listed(shared, n).visit)) * sizeof(int);
}

// A warp looks up 32 visits at once, one a lane, from the n-th on.
__device__ __forceinline__ void list_visits(const Args& args, const Mask& mask, const Item& item, uint32 shared,
                                            int n) {
    n += lane_index();
    if (n >= item.span.visits) return;
    Listed listed;
    listed.visit = visit_at(item.span, n);
    listed.turn = turn_of(args, mask, item, listed.visit);
    const int row = listed.visit.tile * TILE_Q, last_row = clamp(row + TILE_Q, 0, args.queries) - 1;
    const int key = item.key_tile * TILE_K;
    const bool coarse = load_global<int>(args.turns + COARSE) != 0;
    listed.plain = !coarse && mask.first_key(last_row) <= key && mask.end_key(row) >= key + TILE_K;
    store_shared(shared + LIST_START + n % LISTED * sizeof(Listed), listed);
}

// Copies ROWS rows of an operand to a tile, all threads together: what lies beyond `columns` or `end` rows is not read
// and becomes zeros.
template <int ROWS>
__device__ __forceinline__ void load_tile(uint32 tile, int first, const char* source, int64 stride, int columns, int end) {
    constexpr int CHUNKS = PITCH / 16;
#pragma unroll 4
    for (int n = fresh_thread_index(); n < ROWS * CHUNKS; n += THREADS) {
        const int row = first + n / CHUNKS, chunk = n % CHUNKS;
        const uint32 to = tile + offset(row, chunk * 16);
        const char* from = source + row * stride + chunk * 16;
        if (columns % 2 == 0) {
            cp_async_16(to, from, row < end && 2 * chunk < columns);
        } else {
            cp_async_16(to, from, row < end ? clamp(columns - 2 * chunk, 0, 2) * 8 : 0);
        }
    }
}

// A half of q and dout of the n-th visit; with the first, what all rows bring along.
__device__ __forceinline__ void load_rows(const Args& args, uint32 shared, int n, int half) {
    const Visit visit = listed(shared, n).visit;
    const Work work = load_work(shared);
    const int row = visit.tile * TILE_Q, first = half * HALF_ROWS;
    load_tile<HALF_ROWS>(shared + QUERY_START, first, work.q + visit.head * args.q_strides.head + row * args.q_strides.row,
                         args.q_strides.row, args.head_dim, args.queries - row);
    load_tile<HALF_ROWS>(shared + DOUT_START, first,
                         work.dout + visit.head * args.dout_strides.head + row * args.dout_strides.row,
                         args.dout_strides.row, args.value_dim, args.queries - row);
    constexpr int CHUNKS = TILE_Q * sizeof(double) / 16;
    const int thread = fresh_thread_index();
    if (half == 0 && thread < 2 * CHUNKS) {
        const char* from = thread < CHUNKS ? args.row_lse : args.row_delta;
        cp_async_16(shared + LSE_START + thread * 16,
                    from + static_cast<int64>(tile_of(args, shared, visit)) * (TILE_Q * sizeof(double)) +
                        thread % CHUNKS * 16,
                    true);
    }
}

// Products ----------------------------------------------------------------------------------------------------------

// scores = a b^T, `a` and `b` the first rows of the warp in two tiles.
__device__ __forceinline__ void multiply_transposed(Scores& scores, uint32 a, uint32 b) {
    const uint32 lane = offset(row_in(lane_index() / 4), lane_index() % 4 * 16);
    auto load = [&](uint32 rows, int octet, int step, int n) {
        return load_shared<Pair>(rows + (lane ^ n * 64) + step * 128 + first_row(octet) * PITCH);
    };
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
        double left[BLOCKS][8];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const Pair terms = load(a, 2 * block + half, step, n);
                    left[block][4 * n + half] = terms.low;
                    left[block][4 * n + 2 + half] = terms.high;
                }
            }
        }
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            double right[4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const Pair terms = load(b, octet, step, n);
                right[2 * n] = terms.low;
                right[2 * n + 1] = terms.high;
            }
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) multiply_add<16>(scores[block][octet], left[block], right);
        }
    }
}

// sums += p^T dout or ds^T q, of rows from `first` on, as many as half a tile has. `fragments` is where the lane's
// numbers of the warp's keys begin.
__device__ __forceinline__ void add_product(Sums& sums, uint32 fragments, uint32 tile, int first) {
    const uint32 lane = offset(lane_index() % 4, mate() * 64 + lane_index() / 4 * 8);
#pragma unroll
    for (int step = 0; step < HALF_ROWS / 16; ++step) {
        double left[BLOCKS][8];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int octet = first / 8 + 2 * step + n;
                    const Pair terms = load_shared<Pair>(fragments + (block * (TILE_Q / 8) + octet) * sizeof(Fragment) +
                                                         half * (WARP * sizeof(Pair)));
                    left[block][4 * n + half] = terms.low;
                    left[block][4 * n + 2 + half] = terms.high;
                }
            }
        }
#pragma unroll
        for (int column = 0; column < COLUMNS / 8; ++column) {
            double right[4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    right[2 * n + e] = load_shared<double>(tile + (lane ^ e * 64) + column * 128 +
                                                           (first + 16 * step + 4 * n + 8 * e) * PITCH);
                }
            }
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) multiply_add<16>(sums[block][column], left[block], right);
        }
    }
}

// The warp's part of ds k: rows of dq as they come, of every DQ_MATES-th 8 columns.
__device__ __forceinline__ void multiply_slopes(double (&dq)[DQ_OCTETS][4], uint32 shared) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    const int block = warp_index() / DQ_MATES, dq_mate = warp_index() % DQ_MATES;
    const uint32 slopes = shared + SLOPE_START + (2 * block + g / 4) * sizeof(Fragment) +
                          ((4 * t + g % 4) ^ (t & 2)) * sizeof(Pair);
    const uint32 lane = offset(row_in(t), dq_mate * 64 + g * 8), keys = shared + KEY_START;
#pragma unroll
    for (int step = 0; step < TILE_K / 16; ++step) {
        double left[8];
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // half n / 2 of 16 keys, numbers 0 to 3 or 4 to 7 of it
            const Pair rows = load_shared<Pair>(slopes + step * (TILE_Q / 8) * sizeof(Fragment) + n * (16 * sizeof(Pair)));
            left[2 * n] = rows.low;
            left[2 * n + 1] = rows.high;
        }
#pragma unroll
        for (int octet = 0; octet < DQ_OCTETS; ++octet) {
            double right[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                right[n] = load_shared<double>(keys + (lane ^ n % 2 * 64) + octet * (64 * DQ_MATES) +
                                               (16 * step + n / 2 * 4 + n % 2 * 2) * PITCH);
            }
            multiply_add<16>(dq[octet], left, right);
        }
    }
}

// Between them ------------------------------------------------------------------------------------------------------

// f(block, octet, half) of all pairs that a lane has of a warp's scores: a key, two queries.
template <typename Function>
__device__ __forceinline__ void for_each(Function f) {
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) f(block, octet, half);
        }
    }
}

// Which of them are seen.
struct Seen {
    int first[2 * BLOCKS], end[2 * BLOCKS];  // queries that see the lane's keys, less its first query
    __device__ __forceinline__ Seen(const Args& args, const Mask& mask, int key, int query) {
        query += lane_index() % 4;
#pragma unroll
        for (int octet = 0; octet < 2 * BLOCKS; ++octet) {
            const int j = key + first_row(octet) + row_in(lane_index() / 4);
            first[octet] = mask.first_query(j, args.queries) - query;
            end[octet] = j < args.keys ? mask.end_query(j, args.queries) - query : 0;
        }
    }
    __device__ __forceinline__ bool operator()(int block, int octet, int half, int e) const {
        const int column = first_row(octet) + 8 * e, row = 2 * block + half;
        return static_cast<int>(column >= first[row]) & static_cast<int>(column < end[row]);
    }
};

// Numbers of the query rows that a lane has; `rows` is where those of the warp begin.
__device__ __forceinline__ double number_of(uint32 rows, int octet, int e) {
    return load_shared<double>(rows + (lane_index() % 4 + first_row(octet) + 8 * e) * sizeof(double));
}

// The warp's part of dk or dv.
__device__ __forceinline__ void store(const Sums& sums, double factor, char* rows, int64 stride, int dim, int keys,
                                      char* suspect) {
    const int key = key_warp() * KEY_ROWS + row_in(lane_index() / 4), column = mate() * 8 + lane_index() % 4 * 2;
    double finite = 0;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = key + first_row(2 * block + half);
            if (r >= keys) continue;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n) {
                const int d = column + 16 * n;
                const Pair pair{sums[block][n][2 * half] * factor, sums[block][n][2 * half + 1] * factor};
                finite += (pair.low - pair.low) + (pair.high - pair.high);
                if (d < dim) store_global(rows + r * stride + d * sizeof(double), pair);
            }
        }
    }
    if (finite != 0) store_global(suspect, 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_backward_f64(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    auto first_thread = [] { return fresh_thread_index() == 0; };
    auto draw = [&] {
        if (first_thread()) store_shared(shared + NEXT_START, atomic_add(args.turns + TICKET, 1));
    };
    auto release = [&](int n) {
        if (ORDERED && first_thread()) add_release(turn_counter(args, shared, n), 1);
    };
    // Addresses, worked out where they are used: of the warp's first fragment, the lane's place in it; of its rows.
    auto fragments = [=](int start) {
        return shared + start + key_warp() * BLOCKS * (TILE_Q / 8) * sizeof(Fragment) + place_in_fragment();
    };
    auto own = [=](int start, int block, int octet, int half) {
        return fragments(start) + (block * (TILE_Q / 8) + mate() * OCTETS + octet) * sizeof(Fragment) +
               half * (WARP * sizeof(Pair));
    };
    auto key_rows = [=](int start) { return shared + start + key_warp() * KEY_ROWS * PITCH; };
    auto query_rows = [=](int start) { return shared + start + warp_query() * PITCH; };
    auto numbers = [=](int start) { return shared + start + warp_query() * static_cast<int>(sizeof(double)); };

    draw();
    for (;;) {
        sync_threads();  // the item is there, and all have left what is filled next
        const int index = load_shared<int>(shared + NEXT_START);
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
                store_shared(shared + WORK_START, work);
            }
            if (item.span.visits > 0) {
                load_tile<TILE_K>(
                    shared + KEY_START, 0,
                    args.k + args.k_strides.offset(item.batch0, item.batch1, item.key_head) + key * args.k_strides.row,
                    args.k_strides.row, args.head_dim, args.keys - key);
                load_tile<TILE_K>(
                    shared + VALUE_START, 0,
                    args.v + args.v_strides.offset(item.batch0, item.batch1, item.key_head) + key * args.v_strides.row,
                    args.v_strides.row, args.value_dim, args.keys - key);
                if (warp_index() == WARPS - 1) list_visits(args, mask, item, shared, 0);
            }
            sync_threads();  // the list is there
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                if (item.span.visits > 0) load_rows(args, shared, 0, half);
            }
            cp_async_commit_group();
        }

        Sums sums = {};  // of dv or dk
        for (int n = 0;; ++n) {
            cp_async_wait_group<0>();
            sync_threads();  // the tiles are here for all warps, and all have left what is filled next
            const int visits = load_work(shared).visits;
            if (n >= visits) break;
            if (n % WARP == WARP / 2 && warp_index() == WARPS - 1) {
                list_visits(args, mask, locate_item(args, mask, load_work(shared).index), shared, n + WARP / 2);
            }
            auto seen = [&] {
                return Seen(args, mask, load_work(shared).key + key_warp() * KEY_ROWS,
                            listed(shared, n).visit.tile * TILE_Q + warp_query());
            };

            Scores scores = {};
            if (has_slopes()) {
                multiply_transposed(scores, key_rows(VALUE_START), query_rows(DOUT_START));
            } else {
                multiply_transposed(scores, key_rows(KEY_START), query_rows(QUERY_START));
                if (n > 0) release(n - 1);  // whose sums have long arrived
                for_each([&](int block, int octet, int half) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        double& x = scores[block][octet][2 * half + e];
                        x = fused_multiply_add(x, args.scale_log2, -number_of(numbers(LSE_START), octet, e));
                    }
                });
                if (!listed(shared, n).plain) {  // hidden: p = 0; and no p above 1, of a coarse lse, but NaN stays NaN
                    const Seen is_seen = seen();
                    for_each([&](int block, int octet, int half) {
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            double& x = scores[block][octet][2 * half + e];
                            const double at_most = x > 0 ? 0 : x;
                            x = is_seen(block, octet, half, e) ? at_most : -INFINITE;
                        }
                    });
                }
                for_each([&](int block, int octet, int half) {
                    const double(&x)[4] = scores[block][octet];
                    store_shared(own(WEIGHT_START, block, octet, half),
                                 Pair{exp2_of(x[2 * half]), exp2_of(x[2 * half + 1])});
                });
            }
            sync_threads();  // p^T is here
            if (has_slopes()) {
                for_each([&](int block, int octet, int half) {
                    const Pair p = load_shared<Pair>(own(WEIGHT_START, block, octet, half));
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        double& x = scores[block][octet][2 * half + e];
                        x = (e == 0 ? p.low : p.high) * (x - number_of(numbers(DELTA_START), octet, e));
                    }
                });
                if (!listed(shared, n).plain) {  // hidden: ds = 0, whatever the product
                    const Seen is_seen = seen();
                    for_each([&](int block, int octet, int half) {
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            double& x = scores[block][octet][2 * half + e];
                            x = is_seen(block, octet, half, e) ? x : 0;
                        }
                    });
                }
                for_each([&](int block, int octet, int half) {
                    const double(&x)[4] = scores[block][octet];
                    store_shared(own(SLOPE_START, block, octet, half), Pair{x[2 * half], x[2 * half + 1]});
                });
            }
            sync_threads();  // ds^T is here

#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                add_product(sums, fragments(has_slopes() ? SLOPE_START : WEIGHT_START),
                            shared + (has_slopes() ? QUERY_START : DOUT_START), half * HALF_ROWS);
                sync_threads();  // all have left these rows
                if (n + 1 < visits) load_rows(args, shared, n + 1, half);
                cp_async_commit_group();
            }

            auto turns_had = [&] { return load_relaxed(turn_counter(args, shared, uniform(n))); };
            const int turn = listed(shared, n).turn;
            int turns = ORDERED ? turns_had() : turn;  // is back before the product ends
            double dq[DQ_OCTETS][4] = {};
            multiply_slopes(dq, shared);
            // Nothing is read that another block has written, so that nothing is to be acquired: memory adds, and has
            // added what came before a counter that it shows.
            while (turns < turn) turns = turns_had();
            if (n + 1 == visits) draw();  // not before: a block that waits holds no item but its own
            const int64 tile = tile_of(args, shared, listed(shared, n).visit);
            char* const to = args.dq_sum + tile * (TILE_Q * PITCH) + lane_index() * SUM_LANE +
                             (warp_index() / DQ_MATES * (HEAD_DIM / 8) + warp_index() % DQ_MATES) * SUM_BYTES;
            auto send = [&](auto put) {
#pragma unroll
                for (int octet = 0; octet < DQ_OCTETS; ++octet) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) put(to + octet * DQ_MATES * SUM_BYTES + e * SUM_NEXT, dq[octet][e]);
                }
            };
            if (ORDERED && turn == 0) {
                send([](char* place, double x) { store_global(place, x); });
            } else {
                send([](char* place, double x) { add_global(place, x); });
            }
        }

        const Work work = load_work(shared);
        if (work.visits == 0) draw();
        if (work.visits > 0) release(work.visits - 1);
        const Item item = locate_item(args, mask, work.index);  // again, rather than in registers all along
        const int64 head = item.batch * (args.heads / args.group) + item.key_head;
        auto store_sums = [&](double factor, char* base, const Strides& strides, int dim) {
            store(sums, factor, base + strides.offset(item.batch0, item.batch1, item.key_head) + work.key * strides.row,
                  strides.row, dim, args.keys - work.key,
                  args.suspects + (head * args.key_tiles + item.key_tile) * sizeof(int));
        };
        if (has_slopes()) {
            store_sums(args.scale, args.dk, args.dk_strides, args.head_dim);
        } else {
            store_sums(1, args.dv, args.dv_strides, args.value_dim);
        }
    }
}

}  // namespace cuflash
