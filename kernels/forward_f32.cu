// out = softmax(scale q k^T) v and lse, for float32, on the tensor cores of any GPU since sm_80.
//
//   q (queries, head_dim), k (keys, head_dim), v (keys, value_dim) -> out (queries, value_dim), lse (queries)
//
// The algorithm and the layout of registers are those of forward.cu; every number is split into three bfloat16 and
// every product into six, see float32.cuh. A block owns TILE_Q rows of one head, or of all heads of a group when there
// are few rows, and walks over the keys it can see in tiles of TILE_K, from the last to the first. A warp owns 16
// rows: its scores, weights and out stay in registers. More rows would halve what it reads of k and v, but six products
// for three parts already read half as much for each as 16-bit elements do.
//
// q is split once. Keys and values are split once a block, when they come: they are read to registers while the tensor
// cores work on what came before, and go to shared memory when all warps have left it. cp.async would need room for
// the floats besides, 4 bytes to the 6 of the parts, and shared memory is what tiles are short of. With one of STAGES
// they are read where they are needed: registers are short too where out is wide and warps are few.
//
// A tensor core cuts what it adds, so that long sums drift: weights meet the values of one tile in a sum that begins
// at zero, and that is added to out by an addition that rounds. A sum over n keys costs TILE_K cuts and n / TILE_K
// roundings instead of 6 n cuts.
//
// What limits speed: the tensor cores, six products for one. mma.sync reaches some 60 % of the H200's 990 TFLOP/s, so
// that 100 are the most there can be.
#include "float32.cuh"
#include "float32_rows.cuh"
#include "forward_args.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "ptx.cuh"
#include "score.cuh"
#include "tile.cuh"

namespace cuflash {

constexpr int ROWS = 16;  // of one warp
static_assert(TILE_Q == ROWS * WARPS, "TILE_Q: 16 rows for every warp");
static_assert(TILE_K % 16 == 0, "TILE_K: whole steps of 16 keys");

constexpr int THREADS = WARP * WARPS;

using QueryTile = SplitTile<ROWS, HEAD_DIM>;
using KeyTile = SplitTile<TILE_K, HEAD_DIM>;
using ValueTile = SplitTile<TILE_K, VALUE_DIM>;

// What a warp needs once a tile waits in shared memory, since registers are short.
struct alignas(16) Facts {
    const char *k, *v;       // key 0 of the block's head
    int first_key, end_key;  // keys that some row of the block sees; the others are never read
    int all_first, all_end;  // keys that all rows of the warp see
    int warp_row;            // first packed row of the warp
};

struct Shared {
    char queries[WARPS][QueryTile::BYTES];  // a warp's rows: no other touches them
    char keys[KeyTile::BYTES];
    char values[ValueTile::BYTES];
    Facts facts[WARPS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles and facts take");
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int FACTS_START = OFFSET_OF(Shared, facts);

using Args = DenseArgs;
template struct ArgsLayout<Args>;

// out += weights v, of its first `columns`, 16 at a time with a branch between, as in multiply_rows.
__device__ __forceinline__ void accumulate(Out& out, const Weights& weights, uint32 values, uint32 lane, int columns) {
    constexpr bool ONE_STEP = TILE_K == 16;  // all small products come before all large ones: one sum will do
#pragma unroll
    for (int n = 0; n < VALUE_DIM / 8; n += 2) {
        if (8 * n >= columns) continue;
        float small[2][4], large[2][4];
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
            Parts b;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                ldmatrix_x4_trans(b[p], values + p * ValueTile::PART_BYTES + Tile<VALUE_DIM>::step(lane, 16 * step, n));
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                multiply_small(small[m], weights[step], b, 2 * m, step == 0);
                multiply_large(ONE_STEP ? small[m] : large[m], weights[step], b, 2 * m, step == 0 && !ONE_STEP);
            }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) out[n + m][e] += ONE_STEP ? small[m][e] : large[m][e] + small[m][e];
        }
    }
}

__device__ __forceinline__ Facts gather(const Args& args, const Mask& mask, const Dense& place) {
    const int block_row = place.tile * TILE_Q, last_row = clamp(block_row + TILE_Q, 0, place.rows()) - 1;
    const int warp_row = block_row + warp_index() * ROWS;
    const int top = place.query(warp_row), bottom = place.query(warp_row + ROWS - 1);
    Facts facts;
    facts.k = head_of_keys(args, place, args.k, args.k_strides);
    facts.v = head_of_keys(args, place, args.v, args.v_strides);
    facts.first_key = mask.first_key(place.query(block_row));
    facts.end_key = mask.end_key(place.query(last_row));
    facts.all_first = mask.first_key(bottom);
    facts.all_end = mask.end_key(top);
    facts.warp_row = warp_row;
    return facts;
}

// Each warp splits its own rows of q.
__device__ __forceinline__ void load_queries(const Args& args, const Dense& place, int warp_row, uint32 warp_shared) {
    for (int n = lane_index(); n < ROWS * HEAD_DIM / 4; n += WARP) {
        const int r = n / (HEAD_DIM / 4), quad = n % (HEAD_DIM / 4);
        const char* row = place.row(args.q, args.q_strides, warp_row + r);
        float numbers[4];
        load_four<false>(numbers, row + quad * CHUNK, args.head_dim - 4 * quad, warp_row + r < place.rows());
        QueryTile::store(warp_shared, r, quad, numbers);
    }
}

// A tile of keys, or of values, on its way to shared memory: all of it in registers, or some rows after others.
template <int COLUMNS>
struct Coming {
    static constexpr int PIECE = STAGES == 2 ? TILE_K : SplitCopy<TILE_K, TILE_K, COLUMNS, THREADS>::ROW_STEP;
    SplitCopy<PIECE, TILE_K, COLUMNS, THREADS> numbers;
    const char* source;
    int64 stride;
    int columns, first, end;

    __device__ __forceinline__ void load(const char* source, int64 stride, int columns, int first, int end) {
        if constexpr (STAGES == 2) {
            numbers.load(source, stride, columns, first, end);
        } else {
            this->source = source, this->stride = stride, this->columns = columns, this->first = first, this->end = end;
        }
    }
    __device__ __forceinline__ void store(uint32 base) {
        if constexpr (STAGES == 2) {
            numbers.store(base);
        } else {
#pragma unroll 1
            for (int row = 0; row < TILE_K; row += PIECE) {
                numbers.load(source + row * stride, stride, columns, first - row, end - row);
                numbers.store(base, row);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_forward_f32(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const uint32 warp_shared = shared + warp_index() * QueryTile::BYTES;
    auto facts_shared = [=] { return shared + FACTS_START + warp_index() * sizeof(Facts); };
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    const Scaled score{args.scale_log2};

    int tile, first_tile;
    {
        const Dense place = locate(args);
        const Facts facts = gather(args, mask, place);
        first_tile = facts.first_key / TILE_K;
        tile = facts.first_key < facts.end_key ? (facts.end_key - 1) / TILE_K : first_tile - 1;
        if (lane_index() == 0) store_shared(facts_shared(), facts);
        load_queries(args, place, facts.warp_row, warp_shared);
        sync_warp();
    }

    Coming<HEAD_DIM> keys;
    Coming<VALUE_DIM> values;
    auto load_keys = [&](int t) {
        const Facts facts = load_shared<Facts>(facts_shared());
        keys.load(facts.k + static_cast<int64>(t) * TILE_K * args.k_strides.row, args.k_strides.row, args.head_dim,
                  facts.first_key - t * TILE_K, facts.end_key - t * TILE_K);
    };
    auto load_values = [&](int t) {
        const Facts facts = load_shared<Facts>(facts_shared());
        values.load(facts.v + static_cast<int64>(t) * TILE_K * args.v_strides.row, args.v_strides.row, args.value_dim,
                    facts.first_key - t * TILE_K, facts.end_key - t * TILE_K);
    };
    if (tile >= first_tile) {
        load_keys(tile);
        keys.store(shared + KEY_START);
    }

    const uint32 lane_q = lane_of_a<HEAD_DIM>(), lane_k = lane_of_b<HEAD_DIM>(), lane_v = lane_of_a<VALUE_DIM>();
    Out out = {};
    Rows rows;

    for (; tile >= first_tile; --tile) {
        load_values(tile);
        sync_threads();  // the keys are here, and all have left the values of the tile before
        const int key = tile * TILE_K;
        Scores scores;
        multiply_rows<QueryTile, KeyTile, 1>(scores, lane_q, lane_k, args.head_dim, warp_shared, shared + KEY_START);
        {
            const Facts facts = load_shared<Facts>(facts_shared());
            const bool all = key >= facts.all_first && key + TILE_K <= facts.all_end;
            if (!all) hide(scores, mask, args.pack, facts.warp_row, key);
        }
        raise(rows, out, scores, score);
        values.store(shared + VALUE_START);
        if (tile > first_tile) load_keys(tile - 1);
        sync_threads();  // the values are here, and all have left the keys
        Weights weights;
        weigh(weights, rows, scores, score);
        accumulate(out, weights, shared + VALUE_START, lane_v, args.value_dim);
        if (tile > first_tile) keys.store(shared + KEY_START);
    }

    const Dense place = locate(args);  // again, rather than in registers all along
    store(args, mask, place, place.tile * TILE_Q + warp_index() * ROWS, out, rows);
}

}  // namespace cuflash
