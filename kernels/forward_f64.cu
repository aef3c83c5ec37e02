// out = softmax(scale q k^T) v and lse, in float64 on the tensor cores of any GPU since sm_80.
//
//   q (queries, head_dim), k (keys, head_dim), v (keys, value_dim) -> out (queries, value_dim), lse (queries)
//
// The algorithm is that of forward.cu. A block owns TILE_Q rows and walks over the keys it can see in tiles of TILE_K,
// from the last to the first. A warp owns 16 rows and, of VALUE_DIM columns of out, all or one of SHARES: 16 x 128 fill
// half its registers, so where values are wider two warps take the same scores and half of the columns each. The next
// keys arrive while the values are worked on, and the values while the keys are.
//
// An instruction sums its terms in whatever order its operands hold them, if only both agree. With g = lane / 4 and
// t = lane % 4:
//   - q and k: a lane's terms are neighbours along head_dim, so that it loads 16 bytes of k at once. q lies in shared
//     memory as lanes hold it, elements of rows g and g + 8 side by side;
//   - weights: a quad's 2t, 2t + 1 of 8 keys, as scores come, are terms t and 4 + t of the sum over keys, and the
//     values of keys 2t and 2t + 1 meet them there: no lane gives another anything.
// Rows of k and v in shared memory are padded so that lanes which load together hit all banks: 8 lanes take four
// chunks of two rows of k, which lie half a round of the banks apart; 16 lanes take four elements of every other row
// of v, which lie a quarter of a round apart.
//
// What limits speed: the tensor cores at wide head dims. On sm_90 they take 32 multiply-adds a clock and scheduler, so
// at head_dim 128 a tile of 16 x 32 pairs keeps them for 4096 clocks; its exponentials, sums and maxima, 18
// instructions of float64 a pair at 16 lanes a clock, take 576 more, and reads of shared memory are 63 % of what there
// is. At head_dim 8 or less what belongs to the exponentials takes about three quarters of the time.
#include "float64.cuh"
#include "forward_args.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "ptx.cuh"
#include "score.cuh"
#include "softmax.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
constexpr int ROWS = 16;                          // of a warp
constexpr int SHARES = WARPS * ROWS / TILE_Q;     // of the columns of out, a warp each
constexpr int COLUMNS = VALUE_DIM / SHARES;       // of a warp
constexpr int K = HEAD_DIM < 16 ? HEAD_DIM : 16;  // terms of one instruction in q k^T

static_assert(WARPS * ROWS == TILE_Q * SHARES, "TILE_Q: 16 rows for every warp, or every two");
static_assert(TILE_K % 16 == 0, "TILE_K: whole steps of 16 keys");
static_assert(HEAD_DIM == 4 || HEAD_DIM % K == 0, "HEAD_DIM: 4, 8 or a multiple of 16");
static_assert(COLUMNS % 8 == 0, "VALUE_DIM: 8 columns for every warp, or a multiple");
static_assert(STAGES == 1, "STAGES: keys and values arrive in turn");

constexpr int QUERY_BYTES = ROWS * HEAD_DIM * 8;  // of a warp's rows
// Bytes from one row to the next in shared memory; see above.
constexpr int KEY_PITCH = HEAD_DIM * 8 + (HEAD_DIM % 16 == 0 ? 64 : 0);
constexpr int VALUE_PITCH = VALUE_DIM * 8 + 16;

// What is needed once a tile, since registers are short.
struct alignas(16) Facts {
    const char *k, *v;       // key 0 of the block's head
    int first_key, end_key;  // keys that some row of the block sees; the others are never read
};

struct Shared {
    char queries[TILE_Q / ROWS][QUERY_BYTES];
    char keys[TILE_K][KEY_PITCH];
    char values[TILE_K][VALUE_PITCH];
    Facts facts;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and facts take");
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int FACTS_START = OFFSET_OF(Shared, facts);

using Args = DenseArgs;
template struct ArgsLayout<Args>;

using Scores = double[TILE_K / 8][4];
using Out = double[COLUMNS / 8][4];
using Rows = SoftmaxRow<double>[2];  // of a thread: lane / 4 of the warp's, and 8 below it
using Score = ScaledBy<double>;

// scores = q k^T. `queries` and `keys` are the addresses of the lane's first terms.
__device__ __forceinline__ void multiply_transposed(Scores& scores, uint32 queries, uint32 keys) {
#pragma unroll
    for (int step = 0; step < HEAD_DIM / K; ++step) {
        double a[K / 2];
#pragma unroll
        for (int n = 0; n < K / 4; ++n) {
            const Pair rows = load_shared<Pair>(queries + (step * K / 4 + n) * WARP * sizeof(Pair));
            a[2 * n] = rows.low;
            a[2 * n + 1] = rows.high;
        }
#pragma unroll
        for (int n = 0; n < TILE_K / 8; ++n) {
            double b[K / 4];
            const uint32 address = keys + step * K * 8 + 8 * n * KEY_PITCH;
            if constexpr (K == 4) {
                b[0] = load_shared<double>(address);
            } else {
#pragma unroll
                for (int m = 0; m < K / 8; ++m) {
                    const Pair terms = load_shared<Pair>(address + 64 * m);
                    b[2 * m] = terms.low;
                    b[2 * m + 1] = terms.high;
                }
            }
            multiply_add<K>(scores[n], a, b);
        }
    }
}

// Hidden scores are selected to -inf, whatever they are.
__device__ __forceinline__ void hide(Scores& scores, const Mask& mask, int pack, int warp_row, int key) {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = query_of(warp_row + 8 * half + lane / 4, pack);
        const int first = mask.first_key(i) - key, end = mask.end_key(i) - key;
#pragma unroll
        for (int n = 0; n < TILE_K / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int j = 8 * n + lane % 4 * 2 + e;
                double& score = scores[n][2 * half + e];
                score = j >= first && j < end ? score : -INFINITE;
            }
        }
    }
}

// Raises the rows' references to what this tile needs; out is rescaled where, rarely, one has moved.
__device__ __forceinline__ void raise(Rows& rows, Out& out, const Scores& scores, const Score& score) {
    double factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        double top = -INFINITE;
#pragma unroll
        for (int n = 0; n < TILE_K / 8; ++n) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) top = scores[n][e] > top ? scores[n][e] : top;
        }
        factor[half] = rows[half].raise(maximum_of_row(top) * score.factor());
    }
    if (!any(factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n][e] *= factor[e / 2];
    }
}

// weights = exp(scores - reference), 16 keys at a time, summed and at once multiplied with v: the exponentials of the
// next 16 keys run while the tensor cores work on these. `values` is the address of the lane's first: column g of the
// warp's, key 2t.
__device__ __forceinline__ void accumulate(Rows& rows, Out& out, const Scores& scores, const Score& score,
                                           uint32 values) {
#pragma unroll
    for (int step = 0; step < TILE_K / 16; ++step) {
        double a[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int n = 0; n < 4; n += 2) {  // terms n and n + 1: neighbours among 8 keys
                const double(&s)[4] = scores[2 * step + n / 2];
                const double low = exp2_of(fused_multiply_add(s[2 * half], score.factor(), -rows[half].shift()));
                const double high = exp2_of(fused_multiply_add(s[2 * half + 1], score.factor(), -rows[half].shift()));
                rows[half].sum += low + high;
                a[2 * n + half] = low;
                a[2 * n + 2 + half] = high;
            }
        }
#pragma unroll
        for (int column = 0; column < COLUMNS / 8; ++column) {
            double b[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                b[n] = load_shared<double>(values + (16 * step + n / 2 * 8 + n % 2) * VALUE_PITCH + column * 64);
            }
            multiply_add<16>(out[column], a, b);
        }
    }
}

// Writes the lane's columns of out and, of one warp of those that share rows, lse; computes again what went wrong.
__device__ __forceinline__ void store(const Args& args, const Mask& mask, const Out& out, Rows& rows, int warp_row,
                                      int first_column) {
    const int lane = lane_index();
    const Dense place = locate(args);  // again, rather than in registers all along
    uint32 suspects[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        SoftmaxRow<double>& row = rows[half];
        row.finish<4>();
        const double inverse = row.inverse_sum();
        const int r = 8 * half + lane / 4;
        const bool inside = warp_row + r < place.rows();
        double finite = 0;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
            finite += out[n][2 * half] * 0 + out[n][2 * half + 1] * 0;
        }
        suspects[half] = ballot(inside && ((finite != 0 && is_finite(inverse)) || row.too_coarse()));
        if (!inside) continue;
        char* const address = out_of(args, place, warp_row + r);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
            const int d = first_column + 8 * n + lane % 4 * 2;
            const Pair pair{out[n][2 * half] * inverse, out[n][2 * half + 1] * inverse};
            if (args.out_vectors) {  // value_dim is even then
                if (d < args.value_dim) store_global(address + d * 8, pair);
            } else {
                if (d < args.value_dim) store_global(address + d * 8, pair.low);
                if (d + 1 < args.value_dim) store_global(address + d * 8 + 8, pair.high);
            }
        }
        if (first_column == 0 && args.lse != nullptr && lane % 4 == 0) {
            store_global(lse_of(args, place, warp_row + r), row.lse());
        }
    }
    if constexpr (SHARES == 1) {
        sync_warp();
    } else {
        sync_threads();  // a row that one warp computes again may have columns that another has written
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        while (suspects[half] != 0) {
            const int quad = find_first_set(suspects[half]) / 4;
            suspects[half] &= ~(0xfu << (4 * quad));
            compute_again(args, mask, place, warp_row + 8 * half + quad);
        }
    }
}

// Copies a tile of k or v to shared memory, all threads together: what lies beyond `columns` or outside rows
// [first, end) is not read and becomes zeros. `source` is the address of the tile's row 0. Tiles that lie inside, in
// whole chunks, take no test of their rows.
template <int WIDTH, int PITCH>
__device__ __forceinline__ void load_tile(uint32 base, const char* source, int64 stride, int columns, int first,
                                          int end) {
    constexpr int CHUNKS = WIDTH / 2, DIVISOR = CHUNKS & -CHUNKS;
    constexpr int LANES = DIVISOR < THREADS ? DIVISOR : THREADS;  // threads along a row
    const int thread = fresh_thread_index(), row = thread / LANES, chunk = thread % LANES;
    const int left = columns - 2 * chunk;  // from this thread's first chunk to the row's end
    const char* address = source + row * stride + chunk * 16;
    base += row * PITCH + chunk * 16;
    if (first <= 0 && end >= TILE_K && columns % 2 == 0) {
#pragma unroll
        for (int r = 0; r < TILE_K; r += THREADS / LANES) {
            if (TILE_K % (THREADS / LANES) != 0 && row + r >= TILE_K) break;
#pragma unroll
            for (int c = 0; c < CHUNKS; c += LANES) {
                cp_async_16(base + r * PITCH + c * 16, address + c * 16, 2 * c < left);
            }
            address += THREADS / LANES * stride;
        }
    } else {
#pragma unroll 1
        for (int r = 0; row + r < TILE_K; r += THREADS / LANES) {
#pragma unroll 1
            for (int c = 0; c < CHUNKS; c += LANES) {
                const int bytes = row + r >= first && row + r < end ? clamp(left - 2 * c, 0, 2) * 8 : 0;
                cp_async_16(base + r * PITCH + c * 16, address + c * 16, bytes);
            }
            address += THREADS / LANES * stride;
        }
    }
}

// Loads the block's rows of q, element by element, since two neighbours of a row are not neighbours where they go.
__device__ __forceinline__ void load_queries(const Args& args, const Dense& place, uint32 base) {
#pragma unroll 4
    for (int n = fresh_thread_index(); n < TILE_Q * HEAD_DIM; n += THREADS) {
        const int r = n / HEAD_DIM, d = n % HEAD_DIM, row = place.tile * TILE_Q + r;
        const int t = K == 4 ? d : d % 8 / 2, term = K == 4 ? 0 : d / 8 * 2 + d % 2;
        const uint32 lane = r % 8 * 4 + t;
        const bool inside = row < place.rows() && d < args.head_dim;
        const double x = inside ? load_global<double>(place.row(args.q, args.q_strides, row) + d * 8) : 0.0;
        store_shared(base + r / ROWS * QUERY_BYTES + (term * WARP + lane) * sizeof(Pair) + r / 8 % 2 * 8, x);
    }
}

__device__ __forceinline__ Facts gather(const Args& args, const Mask& mask, const Dense& place) {
    const int block_row = place.tile * TILE_Q, last_row = clamp(block_row + TILE_Q, 0, place.rows()) - 1;
    Facts facts;
    facts.k = head_of_keys(args, place, args.k, args.k_strides);
    facts.v = head_of_keys(args, place, args.v, args.v_strides);
    facts.first_key = mask.first_key(place.query(block_row));
    facts.end_key = mask.end_key(place.query(last_row));
    return facts;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_forward_f64(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    const Score score{args.scale_log2};
    auto load_keys = [&](const Facts& facts, int key) {
        load_tile<HEAD_DIM, KEY_PITCH>(shared + KEY_START, facts.k + key * args.k_strides.row, args.k_strides.row,
                                       args.head_dim, facts.first_key - key, facts.end_key - key);
    };
    auto load_values = [&](const Facts& facts, int key) {
        load_tile<VALUE_DIM, VALUE_PITCH>(shared + VALUE_START, facts.v + key * args.v_strides.row, args.v_strides.row,
                                          args.value_dim, facts.first_key - key, facts.end_key - key);
    };

    int warp_row, key, first;  // first of the warp's rows; key 0 of the next tile and of the last
    {
        const Dense place = locate(args);
        const Facts facts = gather(args, mask, place);
        warp_row = place.tile * TILE_Q + ROWS * uniform(warp_index() / SHARES);
        first = facts.first_key / TILE_K * TILE_K;
        key = facts.first_key < facts.end_key ? (facts.end_key - 1) / TILE_K * TILE_K : first - TILE_K;
        if (key >= first) {
            if (thread_index() == 0) store_shared(shared + FACTS_START, facts);
            load_keys(facts, key);
            cp_async_commit_group();
            load_queries(args, place, shared);
        }
    }

    // Addresses of the lane's first terms, worked out where they are used.
    auto queries = [=] { return shared + warp_index() / SHARES * QUERY_BYTES + lane_index() * sizeof(Pair); };
    auto keys = [=] {
        return shared + KEY_START + lane_index() / 4 * KEY_PITCH + lane_index() % 4 * (K == 4 ? 8 : 16);
    };
    auto first_column = [] { return warp_index() % SHARES * COLUMNS; };  // that the warp has of out
    auto values = [=] {
        return shared + VALUE_START + lane_index() % 4 * 2 * VALUE_PITCH + (first_column() + lane_index() / 4) * 8;
    };
    Out out = {};
    Rows rows;

    for (; key >= first; key -= TILE_K) {
        cp_async_wait_group<0>();
        sync_threads();  // q and the keys are here for all warps, and all have left the values
        load_values(load_shared<Facts>(shared + FACTS_START), key);
        cp_async_commit_group();

        const int top = query_of(warp_row, args.pack), bottom = query_of(warp_row + ROWS - 1, args.pack);
        const bool seen = key < mask.end_key(bottom) && key + TILE_K > mask.first_key(top);  // by some row of the warp
        Scores scores = {};
        if (seen) {
            multiply_transposed(scores, queries(), keys());
            if (key < mask.first_key(bottom) || key + TILE_K > mask.end_key(top)) {
                hide(scores, mask, args.pack, warp_row, key);
            }
            raise(rows, out, scores, score);
        }
        cp_async_wait_group<0>();
        sync_threads();  // the values are here for all warps, and all have left the keys
        if (key > first) load_keys(load_shared<Facts>(shared + FACTS_START), key - TILE_K);
        cp_async_commit_group();
        if (seen) accumulate(rows, out, scores, score, values());
    }
    store(args, mask, out, rows, warp_row, first_column());
}

}  // namespace cuflash
