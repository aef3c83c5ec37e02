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
// columns of dk or dv, which stay in registers from the first visit to the last, while it multiplies again. Then each
// computes its part of the visit's dq and adds it to dq_sum when the block's turn has come. The kinds wait for each
// other only for what the other has made, brought or left, so that what lies between two products of one runs beside
// those of the other. Each brings the rows that it is the last to read, weights dout and slopes q, a half of a tile as
// soon as it has met p^T or ds^T.
//
// Where things lie. An instruction sums its terms in whatever order its operands hold them, if only both agree, and
// nobody minds which column of s^T is which query. With g = lane / 4 and t = lane % 4, of every 16 queries
//   - s^T has query 4 n + t + 8 e where an accumulator has column 2t + e, of the first 8 or, n = 1, the others;
//   - p^T and ds^T, kept in shared memory as lanes hold them, are A operands of dv and dk with terms t, 8 + t, 4 + t
//     and 12 + t, rows of dout and q, which four lanes read together;
//   - ds^T, read across, is an A operand of dq with rows g and g + 8, and terms g, that is keys, of either half.
// All numbers go by 8 bytes to the registers where instructions want them, or by 16 where two are neighbours there. The
// XOR in offset() lets lanes that load together hit all banks.
//
// What limits speed: the tensor cores. On sm_90 a product of 16 x 8 x 16 keeps those of a scheduler for 64 clocks, in
// which shared memory has 8 numbers for each lane of a warp; an A operand takes 8 and a B operand 4. At head_dim 128
// each serves two products of s and dp, which so read 6; of dq an A operand serves four and a B operand one, 6 again;
// of dv and dk they serve eight and two, 3. That is 24 of 40 for the five, and copies of q and dout, p and ds take
// 3.5. A visit of 64 keys and 32 queries takes 640 products, 10,240 clocks of each scheduler. Its exponentials and
// what belongs to them, some 20 instructions of float64 a pair at 64 a clock, take 640, beside products of the others.
#include "agenda.cuh"
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
// Octets of columns that registers hold at once.
constexpr int DQ_ROUND = DQ_OCTETS % 4 == 0 ? 4 : DQ_OCTETS % 3 == 0 ? 3 : DQ_OCTETS % 2 == 0 ? 2 : 1;

static_assert(HEAD_DIM == VALUE_DIM, "VALUE_DIM: that of k, so that both kinds of warps do the same");
static_assert(HEAD_DIM % 32 == 0, "HEAD_DIM: a multiple of 32");
static_assert(WARPS % 4 == 0, "WARPS: two of each kind for the same keys");
static_assert(KEY_ROWS * KEY_WARPS == TILE_K && BLOCKS * 16 == KEY_ROWS, "TILE_K: 16 keys for a pair of warps, or 32");
static_assert(HALF_ROWS % 16 == 0, "TILE_Q: whole steps of 16 queries");
static_assert(DQ_MATES == 1 || DQ_MATES % 2 == 0, "WARPS: octets that a warp has of dq are an even number apart");
static_assert(DQ_OCTETS * 8 * DQ_MATES == HEAD_DIM, "WARPS: as many columns of dq for each");
static_assert(DQ_OCTETS % DQ_ROUND == 0, "DQ_ROUND: whole rounds");
static_assert(STAGES == 1, "STAGES: one for q and dout");

// Barriers, beside that of all. Of a kind:
constexpr int AMONG_WEIGHTS = 1, AMONG_SLOPES = 2;
// Where one kind waits for the other: weights for q, brought by those who have slopes, and for them to have read p^T;
// slopes for dout, brought by the others; slopes for p^T; weights for dout to have been read; and weights for ds^T.
constexpr int QUERIES_THERE = 3, DOUTS_THERE = 4, WEIGHTS_THERE = 5, DOUTS_READ = 6, SLOPES_THERE = 7;

constexpr int PITCH = HEAD_DIM * sizeof(double);

// 16 keys and 8 queries of p^T or ds^T: a lane's columns 2t and 2t + 1, each of keys g and g + 8.
struct alignas(16) Fragment {
    Pair columns[2][WARP];
};
constexpr int COLUMN_BYTES = WARP * sizeof(Pair);
using Fragments = Fragment[TILE_K / 16][TILE_Q / 8];

struct alignas(16) KeyPlaces {
    const char *k, *v;  // row 0 of the tile
};

struct Shared {
    char keys[KEYS_SHARED ? TILE_K * PITCH : 128];
    char values[KEYS_SHARED ? TILE_K * PITCH : 128];
    char queries[TILE_Q][PITCH];
    char douts[TILE_Q][PITCH];
    Fragments weights, slopes;  // p^T, ds^T
    double row_lse[TILE_Q], row_delta[TILE_Q];
    Agenda agenda;
    KeyPlaces places;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and lists take");
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int QUERY_START = OFFSET_OF(Shared, queries), DOUT_START = OFFSET_OF(Shared, douts);
constexpr int WEIGHT_START = OFFSET_OF(Shared, weights), SLOPE_START = OFFSET_OF(Shared, slopes);
constexpr int LSE_START = OFFSET_OF(Shared, row_lse), DELTA_START = OFFSET_OF(Shared, row_delta);
constexpr int AGENDA_START = OFFSET_OF(Shared, agenda), PLACES_START = OFFSET_OF(Shared, places);

using Scores = double[BLOCKS][OCTETS][4];
using Sums = double[BLOCKS][COLUMNS / 8][4];

// Where things lie -------------------------------------------------------------------------------------------------

// The query of an octet of columns that is its first, and number t of an accumulator's columns 2t + e beyond it.
__device__ __forceinline__ constexpr int first_query(int octet) { return octet / 2 * 16 + octet % 2 * 4; }
__device__ __forceinline__ constexpr int query_in(int t, int e) { return t + 8 * e; }

// Offset in a tile of a byte of a row: 16-byte chunks change places within 128 bytes. Rows 4 apart do it alike, those 8
// apart otherwise.
__device__ __forceinline__ uint32 offset(uint32 row, uint32 byte) {
    return row * PITCH + (byte ^ (row % 2 * 32 + (row / 2 ^ row / 8) % 2 * 64));
}

// What this warp is -------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool has_slopes() { return warp_index() >= WARPS / 2; }
__device__ __forceinline__ int key_warp() { return warp_index() / 2 % KEY_WARPS; }
__device__ __forceinline__ int mate() { return warp_index() % 2; }
__device__ __forceinline__ int dq_block() { return warp_index() / DQ_MATES; }
__device__ __forceinline__ int warp_query() { return first_query(mate() * OCTETS); }  // of its first octet

// What is copied ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ AgendaAt agenda_of(uint32 shared) { return {shared + AGENDA_START}; }

// Copies ROWS rows of an operand to a tile, TOGETHER threads: what lies beyond `columns` or `end` rows is not read and
// becomes zeros.
template <int ROWS, int TOGETHER>
__device__ __forceinline__ void load_tile(uint32 tile, int first, const char* source, int64 stride, int columns,
                                          int end) {
    constexpr int CHUNKS = PITCH / 16;
#pragma unroll 4
    for (int n = fresh_thread_index() % TOGETHER; n < ROWS * CHUNKS; n += TOGETHER) {
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

// A half of what this warp's kind brings of the n-th visit: q or, for weights, dout; with the first, numbers of rows.
__device__ __forceinline__ void load_rows(const Args& args, uint32 shared, int n, int half) {
    const AgendaAt agenda = agenda_of(shared);
    const Visit visit = agenda.listed(n).visit;
    const Work work = agenda.work();
    const int row = visit.tile * TILE_Q, first = half * HALF_ROWS;
    auto load = [&](int start, const char* source, const Strides& strides, int columns) {
        load_tile<HALF_ROWS, THREADS / 2>(shared + start, first, source + visit.head * strides.head + row * strides.row,
                                          strides.row, columns, args.queries - row);
    };
    if (has_slopes()) {
        load(QUERY_START, work.q, args.q_strides, args.head_dim);
    } else {
        load(DOUT_START, work.dout, args.dout_strides, args.value_dim);
    }
    constexpr int CHUNKS = TILE_Q * sizeof(double) / 16;
    const int thread = fresh_thread_index() % (THREADS / 2);
    if (half == 0 && thread < CHUNKS) {
        const char* const numbers = has_slopes() ? args.row_delta : args.row_lse;
        cp_async_16(shared + (has_slopes() ? DELTA_START : LSE_START) + thread * 16,
                    numbers + static_cast<int64>(agenda.tile_of(args, visit)) * (TILE_Q * sizeof(double)) + thread * 16,
                    true);
    }
}

// The tile's rows of k or v in global memory, where shared memory has no room for them.
struct GlobalRows {
    const char* rows;
    int64 stride;
    int columns, end;
    __device__ __forceinline__ double number(int row, int column) const {
        const char* const place = rows + row * stride + column * sizeof(double);
        return row < end && column < columns ? load_global<double>(place) : 0.0;
    }
};
// Them, from row `first` on.
__device__ __forceinline__ GlobalRows global_keys(const Args& args, uint32 shared, int first = 0) {
    const char* const rows = load_shared<KeyPlaces>(shared + PLACES_START).k + first * args.k_strides.row;
    return {rows, args.k_strides.row, args.head_dim, args.keys - agenda_of(shared).work().key - first};
}
__device__ __forceinline__ GlobalRows global_values(const Args& args, uint32 shared, int first = 0) {
    const char* const rows = load_shared<KeyPlaces>(shared + PLACES_START).v + first * args.v_strides.row;
    return {rows, args.v_strides.row, args.value_dim, args.keys - agenda_of(shared).work().key - first};
}

// Products ----------------------------------------------------------------------------------------------------------

// scores = a b^T, `a` and `b` the first rows of the warp in two tiles; `from` those of a where they are not shared.
__device__ __forceinline__ void multiply_transposed(Scores& scores, uint32 a, const GlobalRows& from, uint32 b) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    const uint32 lane_a = a + offset(g, t * 8), lane_b = b + offset(query_in(g / 2, g % 2), t * 8);
    auto load = [](uint32 lane, int flips, int row, int step) {
        return load_shared<double>((lane ^ flips) + row * PITCH + step * 128);
    };
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
        double right[OCTETS][4];
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
#pragma unroll
            for (int n = 0; n < 4; ++n) right[octet][n] = load(lane_b, n * 32, first_query(octet), step);
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            double left[8];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = 16 * block + 8 * half;
                    left[2 * n + half] = KEYS_SHARED ? load(lane_a, n * 32 ^ half * 64, row, step)
                                                     : from.number(row + g, 16 * step + 4 * n + t);
                }
            }
#pragma unroll
            for (int octet = 0; octet < OCTETS; ++octet) multiply_add<16>(scores[block][octet], left, right[octet]);
        }
    }
}

// sums += p^T dout or ds^T q, of rows from `first` on, as many as half a tile has. `fragments` is where the lane's
// numbers of the warp's keys begin.
__device__ __forceinline__ void add_product(Sums& sums, uint32 fragments, uint32 tile, int first) {
    const uint32 lane = tile + offset(lane_index() % 4, mate() * 64 + lane_index() / 4 * 8);
#pragma unroll
    for (int step = 0; step < HALF_ROWS / 16; ++step) {
        double left[BLOCKS][8];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {  // column n % 2 of octet n / 2
                const int fragment = block * (TILE_Q / 8) + first / 8 + 2 * step + n / 2;
                const Pair keys = load_shared<Pair>(fragments + fragment * sizeof(Fragment) + n % 2 * COLUMN_BYTES);
                left[block][2 * n] = keys.low;
                left[block][2 * n + 1] = keys.high;
            }
        }
#pragma unroll
        for (int column = 0; column < COLUMNS / 8; ++column) {
            double right[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int row = first + 16 * step + first_query(n / 2) + query_in(0, n % 2);
                right[n] = load_shared<double>((lane ^ n % 2 * 64) + row * PITCH + column * 128);
            }
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) multiply_add<16>(sums[block][column], left[block], right);
        }
    }
}

// The part of ds k that a warp has in a round: 16 rows of dq, of every DQ_MATES-th 8 columns from octet `first` on;
// `from` has k where it is not shared.
__device__ __forceinline__ void multiply_slopes(double (&dq)[DQ_ROUND][4], uint32 shared, const GlobalRows& from,
                                                int first) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    const int block = dq_block(), dq_mate = warp_index() % DQ_MATES;
    // Row g is a lane's first column in the fragment of octet g / 4, row g + 8 the second. Terms t are keys t / 2 and
    // t / 2 + 8, the next four those two beyond, and so on.
    const uint32 lane_a = shared + SLOPE_START + (2 * block + g / 4) * sizeof(Fragment) +
                          (t / 2 * 4 + g % 4) * sizeof(Pair) + t % 2 * sizeof(double);
    const int key = t / 2 + t % 2 * 8;
    const uint32 lane_b = shared + KEY_START + offset(key, dq_mate * 64 + g * 8);
#pragma unroll
    for (int step = 0; step < TILE_K / 16; ++step) {
        double left[8];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                left[2 * n + e] = load_shared<double>(lane_a + step * (TILE_Q / 8) * sizeof(Fragment) +
                                                      e * COLUMN_BYTES + n * (8 * sizeof(Pair)));
            }
        }
#pragma unroll
        for (int m = 0; m < DQ_ROUND; ++m) {
            const int octet = first + m;
            double right[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int row = 16 * step + 2 * n;
                const uint32 flipped = lane_b ^ n % 2 * 64 ^ (DQ_MATES == 1 ? octet % 2 * 64 : 0);
                const uint32 place = flipped + row * PITCH + octet * (64 * DQ_MATES) / 128 * 128;
                right[n] = KEYS_SHARED ? load_shared<double>(place)
                                       : from.number(row + key, (octet * DQ_MATES + dq_mate) * 8 + g);
            }
            multiply_add<16>(dq[m], left, right);
        }
    }
}

// Between them ------------------------------------------------------------------------------------------------------

// f(block, octet, e) of all pairs that a lane has of a warp's scores: of a query, keys g and g + 8 of a block.
template <typename Function>
__device__ __forceinline__ void for_each(Function f) {
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) f(block, octet, e);
        }
    }
}

// Which of them are seen.
struct Seen {
    int first[2 * BLOCKS], end[2 * BLOCKS];  // queries that see the lane's keys, less its first query
    __device__ __forceinline__ Seen(const Args& args, const Mask& mask, int key, int query) {
        query += lane_index() % 4;
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; ++n) {
            const int j = key + 8 * n + lane_index() / 4;
            first[n] = mask.first_query(j, args.queries) - query;
            end[n] = j < args.keys ? mask.end_query(j, args.queries) - query : 0;
        }
    }
    __device__ __forceinline__ bool operator()(int block, int octet, int e, int half) const {
        const int query = first_query(octet) + query_in(0, e), key = 2 * block + half;
        return static_cast<int>(query >= first[key]) & static_cast<int>(query < end[key]);
    }
};

// A number of a query of the lane's; `rows` is where those of the warp's queries begin.
__device__ __forceinline__ double number_of(uint32 rows, int octet, int e) {
    return load_shared<double>(rows + (lane_index() % 4 + first_query(octet) + query_in(0, e)) * sizeof(double));
}

// The warp's part of dk or dv.
__device__ __forceinline__ void store(const Sums& sums, double factor, char* rows, int64 stride, int dim, int keys,
                                      char* suspect) {
    const int key = key_warp() * KEY_ROWS + lane_index() / 4, column = mate() * 8 + lane_index() % 4 * 2;
    double finite = 0;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = key + 16 * block + 8 * half;
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
    const AgendaAt agenda = agenda_of(shared);
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    auto first_thread = [] { return fresh_thread_index() == THREADS / 2; };  // of those who have slopes
    auto draw = [&] {
        if (first_thread()) agenda.set_next(atomic_add(args.turns + TICKET, 1));
    };
    auto release = [&](int n) {
        if (ORDERED && first_thread()) add_release(agenda.counter(args, n), 1);
    };
    // Addresses, worked out where they are used: of the warp's first fragment, the lane's place in it; of its rows.
    auto fragments = [=](int start) {
        return shared + start + key_warp() * BLOCKS * (TILE_Q / 8) * sizeof(Fragment) +
               lane_index() * sizeof(Pair);
    };
    auto own = [=](int start, int block, int octet, int e) {
        const int fragment = block * (TILE_Q / 8) + mate() * OCTETS + octet;
        return fragments(start) + fragment * sizeof(Fragment) + e * COLUMN_BYTES;
    };
    auto key_rows = [=](int start) { return shared + start + key_warp() * KEY_ROWS * PITCH; };
    auto query_rows = [=](int start) { return shared + start + warp_query() * PITCH; };
    auto numbers = [=](int start) { return shared + start + warp_query() * static_cast<int>(sizeof(double)); };

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
                auto keys_of = [&](const char* base, const Strides& strides) {
                    return base + strides.offset(item.batch0, item.batch1, item.key_head) + key * strides.row;
                };
                const KeyPlaces places{keys_of(args.k, args.k_strides), keys_of(args.v, args.v_strides)};
                store_shared(shared + PLACES_START, places);
            }
            if (item.span.visits > 0 && warp_index() == WARPS - 1) agenda.list(args, mask, item, 0);
            sync_threads();  // it and the list are there
            if (item.span.visits > 0) {
                if constexpr (KEYS_SHARED) {
                    const KeyPlaces places = load_shared<KeyPlaces>(shared + PLACES_START);
                    auto load = [&](int start, const char* source, const Strides& strides, int columns) {
                        load_tile<TILE_K, THREADS>(shared + start, 0, source, strides.row, columns, args.keys - key);
                    };
                    load(KEY_START, places.k, args.k_strides, args.head_dim);
                    load(VALUE_START, places.v, args.v_strides, args.value_dim);
                }
#pragma unroll
                for (int half = 0; half < HALVES; ++half) load_rows(args, shared, 0, half);
            }
            cp_async_commit_group();
            cp_async_wait_group<0>();
            sync_threads();  // the tiles are here for all warps
        }

        Sums sums = {};  // of dv or dk
        auto seen = [&](int n) {
            return Seen(args, mask, agenda.work().key + key_warp() * KEY_ROWS,
                        agenda.listed(n).visit.tile * TILE_Q + warp_query());
        };
        auto is_last = [&](int n) { return n + 1 == agenda.work().visits; };
        auto add_products = [&](int n, int fragment_start, int tile_start, int among) {
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                add_product(sums, fragments(fragment_start), shared + tile_start, half * HALF_ROWS);
                if (half == 0 && !has_slopes()) bar_sync(DOUTS_READ, THREADS);
                bar_sync(among, THREADS / 2);  // all have left these rows
                if (!is_last(n)) load_rows(args, shared, n + 1, half);
                cp_async_commit_group();
            }
        };
        // The warp's part of dq of the n-th visit; what its kind has brought meanwhile is `there` after its first
        // product.
        auto add_dq = [&](int n, int there) {
            auto turns_had = [&] { return load_relaxed(agenda.counter(args, n)); };
            int turns = ORDERED ? turns_had() : 1;  // is back before the product ends
#pragma unroll
            for (int first = 0; first < DQ_OCTETS; first += DQ_ROUND) {
                double dq[DQ_ROUND][4] = {};
                multiply_slopes(dq, shared, global_keys(args, shared, 0), first);
                if (first == 0) {
                    cp_async_wait_group<0>();
                    if (!is_last(n)) bar_arrive(there, THREADS);
                    // Nothing is read that another block has written, so that nothing is to be acquired: memory
                    // adds, and has added what came before a counter that it shows.
                    while (ORDERED && turns < agenda.listed(n).turn) turns = turns_had();
                    if (is_last(n)) draw();  // not before: a block that waits holds no item but its own
                }
                const int64 tile = agenda.tile_of(args, agenda.listed(n).visit);
                const int octet = dq_block() * (HEAD_DIM / 8) + first * DQ_MATES + warp_index() % DQ_MATES;
                char* const to =
                    args.dq_sum + tile * (TILE_Q * PITCH) + octet * SUM_BYTES + lane_index() * SUM_LANE;
                auto send = [&](auto put) {
#pragma unroll
                    for (int n = 0; n < DQ_ROUND; ++n) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) put(to + n * DQ_MATES * SUM_BYTES + e * SUM_NEXT, dq[n][e]);
                    }
                };
                if (ORDERED && agenda.listed(n).turn == 0) {
                    send([](char* place, double x) { store_global(place, x); });
                } else {
                    send([](char* place, double x) { add_global(place, x); });
                }
            }
        };
        const int visits = agenda.work().visits;
        if (!has_slopes()) {
            for (int n = 0; n < visits; ++n) {
                if (n > 0) bar_sync(QUERIES_THERE, THREADS);
                Scores scores = {};
                const GlobalRows from = global_keys(args, shared, key_warp() * KEY_ROWS);
                multiply_transposed(scores, key_rows(KEY_START), from, query_rows(QUERY_START));
                for_each([&](int block, int octet, int e) {
                    const double lse = number_of(numbers(LSE_START), octet, e);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        double& x = scores[block][octet][2 * half + e];
                        x = fused_multiply_add(x, args.scale_log2, -lse);
                    }
                });
                if (!agenda.listed(n).plain) {  // hidden: p = 0; and no p above 1, of a coarse lse, but NaN stays NaN
                    const Seen is_seen = seen(n);
                    for_each([&](int block, int octet, int e) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            double& x = scores[block][octet][2 * half + e];
                            const double at_most = x > 0 ? 0 : x;
                            x = is_seen(block, octet, e, half) ? at_most : -INFINITE;
                        }
                    });
                }
                for_each([&](int block, int octet, int e) {
                    const double(&x)[4] = scores[block][octet];
                    store_shared(own(WEIGHT_START, block, octet, e), Pair{exp2_of(x[e]), exp2_of(x[2 + e])});
                });
                bar_arrive(WEIGHTS_THERE, THREADS);
                bar_sync(AMONG_WEIGHTS, THREADS / 2);
                add_products(n, WEIGHT_START, DOUT_START, AMONG_WEIGHTS);
                bar_sync(SLOPES_THERE, THREADS);
                add_dq(n, DOUTS_THERE);
            }
        } else {
            for (int n = 0; n < visits; ++n) {
                if (n % WARP == WARP / 2 && warp_index() == WARPS - 1) {
                    agenda.list(args, mask, locate_item(args, mask, agenda.work().index), n + WARP / 2);
                }
                if (n > 0) bar_sync(DOUTS_THERE, THREADS);
                Scores scores = {};
                const GlobalRows from = global_values(args, shared, key_warp() * KEY_ROWS);
                multiply_transposed(scores, key_rows(VALUE_START), from, query_rows(DOUT_START));
                bar_arrive(DOUTS_READ, THREADS);
                bar_sync(WEIGHTS_THERE, THREADS);
                for_each([&](int block, int octet, int e) {
                    const Pair p = load_shared<Pair>(own(WEIGHT_START, block, octet, e));
                    const double delta = number_of(numbers(DELTA_START), octet, e);
                    double(&x)[4] = scores[block][octet];
                    x[e] = p.low * (x[e] - delta);
                    x[2 + e] = p.high * (x[2 + e] - delta);
                });
                if (!agenda.listed(n).plain) {  // hidden: ds = 0, whatever the product
                    const Seen is_seen = seen(n);
                    for_each([&](int block, int octet, int e) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            double& x = scores[block][octet][2 * half + e];
                            x = is_seen(block, octet, e, half) ? x : 0;
                        }
                    });
                }
                for_each([&](int block, int octet, int e) {
                    const double(&x)[4] = scores[block][octet];
                    store_shared(own(SLOPE_START, block, octet, e), Pair{x[e], x[2 + e]});
                });
                bar_arrive(SLOPES_THERE, THREADS);
                bar_sync(AMONG_SLOPES, THREADS / 2);
                if (n > 0) release(n - 1);  // whose sums, the others' too, who have p^T of this one, have long arrived
                add_products(n, SLOPE_START, QUERY_START, AMONG_SLOPES);
                add_dq(n, QUERIES_THERE);
            }
        }
        if (visits > 0) {
            sync_threads();  // all have sent their sums
            release(visits - 1);
        }

        const Work work = agenda.work();
        if (work.visits == 0) draw();
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
