// out = softmax(scale q k^T) v and lse, in float32 or float64 throughout: fused multiply-adds, no tensor cores.
//
//   q (queries, head_dim), k (keys, head_dim), v (keys, value_dim) -> out (queries, value_dim), lse (queries)
//
// A block owns TILE_Q rows and walks over the keys it can see in tiles of TILE_K. Eight neighbouring threads own a
// row: each of them TILE_K / 8 of its scores and every eighth column of out. What limits speed: reads of shared
// memory, one for each multiply-add.
#include "mask.cuh"
#include "place.cuh"
#include "ptx.cuh"
#include "softmax.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
constexpr int ROW_THREADS = 8;
static_assert(THREADS == TILE_Q * ROW_THREADS, "TILE_Q: eight threads a row");
static_assert(TILE_K % ROW_THREADS == 0, "TILE_K: whole columns for the threads of a row");

static_assert(STAGES == 1, "STAGES: one copy of each tile");

using Real = Element;

struct Args {
    const char *q, *k, *v;
    char* out;
    char* lse;  // null where it is not wanted
    Strides q_strides, k_strides, v_strides, out_strides;
    Schedule schedule;
    int64 first_block;
    int queries, keys, heads, group, pack, head_dim, value_dim;
    int head_blocks, batches1;   // blocks along heads; length of the inner merged axis
    int first_shift, end_shift;  // of the mask
    int out_vectors;             // unused here: elements are stored one by one
    double scale_log2;           // scale * log2 e, positive
};
template struct ArgsLayout<Args>;

constexpr int QUERY_PITCH = HEAD_DIM + 1;  // rows are padded by an element to spread the banks
constexpr int KEY_PITCH = (HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) + 1;

struct Shared {
    Real queries[TILE_Q * QUERY_PITCH];
    Real keys[TILE_K * KEY_PITCH];  // one tile of k, and then of v
    Real weights[TILE_Q * TILE_K];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the tiles take");
constexpr int KEY_START = OFFSET_OF(Shared, keys) / sizeof(Real), WEIGHT_START = OFFSET_OF(Shared, weights) / sizeof(Real);

constexpr Real HIDDEN = -1;  // in place of a weight: this key is left out

__device__ __forceinline__ uint32 element(uint32 base, int index) { return base + index * sizeof(Real); }

// Rows [first, end) of a tile, `columns` elements each; the rest is not read.
__device__ __forceinline__ void copy_rows(uint32 base, int start, int pitch, const char* source, int64 stride,
                                          int first, int end, int columns) {
    for (int r = first + warp_index(); r < end; r += WARPS) {
        for (int d = lane_index(); d < columns; d += WARP) {
            store_shared(element(base, start + r * pitch + d), load_global<Real>(source + r * stride + d * sizeof(Real)));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_forward_fma(const __grid_constant__ Args args) {
    const Dense place(args.schedule, args.first_block + fresh_block_index(), args.head_blocks, args.batches1, args.pack,
                      args.queries, LAST_FIRST);
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    const Real scale = static_cast<Real>(args.scale_log2);
    const int key_head = place.head / args.group;
    const char* k = args.k + args.k_strides.offset(place.batch0, place.batch1, key_head);
    const char* v = args.v + args.v_strides.offset(place.batch0, place.batch1, key_head);

    const int block_row = place.tile * TILE_Q, end_row = place.rows();
    const int last_row = block_row + TILE_Q < end_row ? block_row + TILE_Q - 1 : end_row - 1;
    const int row = thread_index() / ROW_THREADS, column = thread_index() % ROW_THREADS;
    const int packed = block_row + row < end_row ? block_row + row : last_row;  // spare threads repeat the last row
    const int i = place.query(packed), head = place.head_of(packed);
    const char* q = args.q + args.q_strides.offset(place.batch0, place.batch1, head) + i * args.q_strides.row;

    const int first_key = mask.first_key(place.query(block_row)), end_key = mask.end_key(place.query(last_row));
    const int row_first = mask.first_key(i), row_end = mask.end_key(i);

    const uint32 shared = shared_memory();
    for (int d = column; d < args.head_dim; d += ROW_THREADS) {
        store_shared(element(shared, row * QUERY_PITCH + d), load_global<Real>(q + d * sizeof(Real)));
    }
    Real out[VALUE_DIM / ROW_THREADS] = {};
    SoftmaxRow<Real> softmax;

    for (int key = first_key / TILE_K * TILE_K; key < end_key; key += TILE_K) {
        const int first = first_key > key ? first_key - key : 0;
        const int end = end_key - key < TILE_K ? end_key - key : TILE_K;
        sync_threads();  // all have left the tile of v
        copy_rows(shared, KEY_START, KEY_PITCH, k + key * args.k_strides.row, args.k_strides.row, first, end, args.head_dim);
        sync_threads();  // k is here

        Real scores[TILE_K / ROW_THREADS], top = -INFINITE;
#pragma unroll
        for (int n = 0; n < TILE_K / ROW_THREADS; ++n) {
            const int j = column + n * ROW_THREADS;
            scores[n] = -INFINITE;
            if (key + j < row_first || key + j >= row_end) continue;
            Real s = 0;
            for (int d = 0; d < args.head_dim; ++d) {
                s = fused_multiply_add(load_shared<Real>(element(shared, row * QUERY_PITCH + d)),
                                       load_shared<Real>(element(shared, KEY_START + j * KEY_PITCH + d)), s);
            }
            scores[n] = s;
            top = maximum(top, s);
        }
#pragma unroll
        for (int lanes = 1; lanes < ROW_THREADS; lanes *= 2) top = maximum(top, shuffle_xor(top, lanes));
        const Real factor = softmax.raise(multiply(top, scale));
#pragma unroll
        for (int n = 0; n < TILE_K / ROW_THREADS; ++n) {
            Real weight = HIDDEN;
            if (scores[n] != -INFINITE) {
                weight = exp2_of(multiply(scores[n], scale) - softmax.shift());
                softmax.sum += weight;
            }
            store_shared(element(shared, WEIGHT_START + row * TILE_K + column + n * ROW_THREADS), weight);
        }
        sync_threads();  // the weights are here, and all have left the tile of k
        copy_rows(shared, KEY_START, KEY_PITCH, v + key * args.v_strides.row, args.v_strides.row, first, end, args.value_dim);
        sync_threads();  // v is here
#pragma unroll
        for (int n = 0; n < VALUE_DIM / ROW_THREADS; ++n) out[n] *= factor;
        for (int j = first; j < end; ++j) {
            const Real weight = load_shared<Real>(element(shared, WEIGHT_START + row * TILE_K + j));
            if (weight == HIDDEN) continue;
#pragma unroll
            for (int n = 0; n < VALUE_DIM / ROW_THREADS; ++n) {
                const int d = column + n * ROW_THREADS;
                if (d >= args.value_dim) break;
                out[n] = fused_multiply_add(weight, load_shared<Real>(element(shared, KEY_START + j * KEY_PITCH + d)), out[n]);
            }
        }
    }

    softmax.template finish<ROW_THREADS>();
    if (block_row + row >= end_row) return;
    const Real inverse = softmax.inverse_sum();
    char* out_row = args.out + args.out_strides.offset(place.batch0, place.batch1, head) + i * args.out_strides.row;
#pragma unroll
    for (int n = 0; n < VALUE_DIM / ROW_THREADS; ++n) {
        const int d = column + n * ROW_THREADS;
        if (d < args.value_dim) store_global(out_row + d * sizeof(Real), out[n] * inverse);
    }
    if (args.lse != nullptr && column == 0) {
        store_global(args.lse + ((place.batch() * args.heads + head) * args.queries + i) * sizeof(Real), softmax.lse());
    }
}

}  // namespace cuflash
