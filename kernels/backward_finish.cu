// The end of the backward pass: dq = scale * dq_sum, rounded, in the rows of the caller's array; and, where a number of
// dq, dk or dv is not finite, that row again by the careful path.
//
// Blocks of two kinds. The first own 64 rows of dq of a head, as the main kernel's accumulators left them; they go
// through shared memory, so that rows leave in whole chunks of 16 bytes. Where dq is a part of a sum and so float32,
// four neighbouring threads have 32 bytes of a row, which is as good. The other blocks own an item, a tile of keys, and
// do nothing unless it is suspect. Memory limits both.
#include "backward_args.cuh"
#include "careful_gradients.cuh"
#include "mask.cuh"
#include "ptx.cuh"
#include "tile.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
static_assert(TILE_Q == 64, "TILE_Q: the rows of a block of dq_sum");
static_assert(WARPS % 4 == 0, "WARPS: as many for each 16 of the rows");
static_assert(STAGES == 1, "STAGES: one tile");

constexpr int SHARES = WARPS / 4;                // of each row, a warp each
constexpr int FLAG_BYTES = 4 * TILE_Q * SHARES;  // whether a share of a row is spoilt
constexpr int PADDING = CHUNK;                   // of a row, to spread the banks
static_assert(SHARED_BYTES == FLAG_BYTES + TILE_Q * (HEAD_DIM * 2 + PADDING), "SHARED_BYTES: flags, the widest rows");

struct alignas(16) Accumulator {  // of a lane, for 16 x 8 numbers
    float x[4];
};
struct alignas(8) Neighbours {
    float low, high;
};

__device__ __forceinline__ bool is_flagged(int r) {
    int found = 0;
#pragma unroll
    for (int n = 0; n < SHARES; ++n) found |= load_shared<int>(shared_memory() + 4 * (n * TILE_Q + r));
    return found != 0;
}

// Those of the rows that are flagged. Not inlined, so that what it keeps in registers is not kept while rows stream by.
__device__ __noinline__ void finish_flagged(const Args& args, int linear, int first) {
    const Mask mask(args.keys, args.first_shift, args.end_shift);
#pragma unroll 1
    for (int i = first + warp_index(); i < first + TILE_Q && i < args.queries; i += WARPS) {
        if (!is_flagged(i - first)) continue;
        careful_dq(args, linear / args.heads, linear % args.heads, i, mask.first_key(i), mask.end_key(i));
    }
}

// Rows [first, first + TILE_Q) of dq of one head.
__device__ __forceinline__ void finish_rows(const Args& args, int linear, int first) {
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    const uint32 flags = shared_memory(), rows = flags + FLAG_BYTES;
    const int head = linear % args.heads, batch = linear / args.heads, lane = lane_index();
    const int batch0 = batch / args.batches1, batch1 = batch % args.batches1;
    const int here = args.queries - first < TILE_Q ? args.queries - first : TILE_Q;
    const int pitch = args.columns * 2 + PADDING;
    char* dq = args.dq + args.dq_strides.offset(batch0, batch1, head) + first * args.dq_strides.row;

    // The tile of the main kernel that these rows are part of was stored by whoever visited it, if anybody did.
    const int tile_first = first / args.tile_q * args.tile_q;
    const int tile_last = clamp(tile_first + args.tile_q, 0, args.queries) - 1;
    const bool stored = args.clear || mask.first_key(tile_first) < mask.end_key(tile_last);

    const int block = warp_index() % 4, share = warp_index() / 4;  // of 16 rows, and of their columns
    const int64 padded = static_cast<int64>(args.query_tiles) * args.tile_q;
    const char* sums = args.dq_sum + (linear * padded + first) * args.columns * 4;
    const int row = 16 * block + lane / 4;
    int spoilt[2] = {};
#pragma unroll 4
    for (int n = share; n < args.columns / 8; n += SHARES) {
        const char* place = sums + ((n * 4 + block) * WARP + lane) * CHUNK;
        const Accumulator sum = stored ? load_global<Accumulator>(place) : Accumulator{};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float low = sum.x[2 * half] * args.scale, high = sum.x[2 * half + 1] * args.scale;
            spoilt[half] |= !is_finite(low) || !is_finite(high);
            const int r = row + 8 * half, d = 8 * n + lane % 4 * 2;
            if (!args.dq_wide) {
                store_shared(rows + r * pitch + d * 2, cvt_pair(Element{}, low, high));
            } else if (r < here && d < args.head_dim) {
                store_global(dq + r * args.dq_strides.row + d * 4, Neighbours{low, high});
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        spoilt[half] |= shuffle_xor(spoilt[half], 1);
        spoilt[half] |= shuffle_xor(spoilt[half], 2);
        if (lane % 4 == 0) store_shared(flags + 4 * (share * TILE_Q + row + 8 * half), spoilt[half]);
    }
    sync_threads();

    const int chunks = args.dq_wide ? 0 : (args.head_dim + CHUNK_ELEMENTS - 1) / CHUNK_ELEMENTS;
#pragma unroll 1
    for (int n = thread_index(); n < here * chunks; n += THREADS) {
        const int r = n / chunks, chunk = n % chunks;
        if (is_flagged(r)) continue;
        const Vector16 vector = load_shared<Vector16>(rows + r * pitch + chunk * CHUNK);
        store_global(dq + r * args.dq_strides.row + chunk * CHUNK, vector);
    }
    if (any(is_flagged(lane) || is_flagged(lane + WARP))) finish_flagged(args, linear, first);
}

// The rows of dk, or of dv, of an item that are not finite.
template <bool IS_DK>
__device__ __noinline__ void finish_item(const Args& args, int item) {
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    const int key_heads = args.heads / args.group;
    const int first = item % args.key_tiles * args.tile_k, key_head = item / args.key_tiles % key_heads;
    const int batch = item / args.key_tiles / key_heads;
    const int end = clamp(first + args.tile_k, 0, args.keys);
#pragma unroll 1
    for (int j = first + warp_index(); j < end; j += WARPS) {
        const GradientRows<Args> rows(args, batch);
        const char* row = IS_DK ? rows.at(args.dk, args.dk_strides, key_head, j)
                                : rows.at(args.dv, args.dv_strides, key_head, j);
        if (!is_spoilt(row, IS_DK ? args.head_dim : args.value_dim, IS_DK ? args.dk_wide : args.dv_wide)) continue;
        const int first_query = mask.first_query(j, args.queries), end_query = mask.end_query(j, args.queries);
        careful_dk_dv<IS_DK>(args, batch, key_head, j, first_query, end_query);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_backward_finish(const __grid_constant__ Args args) {
    const int tiles = (args.queries + TILE_Q - 1) / TILE_Q;  // of a head
    const int item = static_cast<int>(fresh_block_index()) - args.items / args.key_tiles * args.group * tiles;
    if (item < 0) {
        const int tile = static_cast<int>(fresh_block_index());
        finish_rows(args, tile / tiles, tile % tiles * TILE_Q);
    } else if (load_global<int>(args.suspects + 4 * static_cast<int64>(item)) != 0) {
        finish_item<true>(args, item);
        finish_item<false>(args, item);
    }
}

}  // namespace cuflash
