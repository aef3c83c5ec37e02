// The end of the backward pass: dq = scale * dq_sum, rounded, in the rows of the caller's array; and, where a number of
// dq, dk or dv is not finite, that row again by the careful path.
//
// Blocks of two kinds. The first own 64 rows of dq of a head, as the main kernel's accumulators left them (visits.cuh
// says who did); they go through shared memory, so that rows leave in whole chunks of 16 bytes. The others own an item,
// a tile of keys, and do nothing unless it is suspect. Memory limits both.
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

constexpr int FLAG_BYTES = 4 * TILE_Q;  // whether a row is spoilt
constexpr int PADDING = CHUNK;          // of a row, to spread the banks
static_assert(SHARED_BYTES == FLAG_BYTES + TILE_Q * (HEAD_DIM * 4 + PADDING), "SHARED_BYTES: flags and the widest rows");

struct alignas(16) Accumulator {  // of a lane, for 16 x 8 numbers
    float x[4];
};

// Rows [first, first + TILE_Q) of dq of one head.
__device__ __forceinline__ void finish_rows(const Args& args, const Mask& mask, int64 linear, int first) {
    const uint32 flags = shared_memory(), rows = flags + FLAG_BYTES;
    const int64 batch = linear / args.heads, batch0 = batch / args.batches1, batch1 = batch % args.batches1;
    const int head = static_cast<int>(linear % args.heads), lane = lane_index();
    const int here = args.queries - first < TILE_Q ? args.queries - first : TILE_Q;
    const int size = args.dq_wide ? 4 : 2, pitch = args.columns * size + PADDING;

    // The tile of the main kernel that these rows are part of was stored by whoever visited it, if anybody did.
    const int tile_first = first / args.tile_q * args.tile_q;
    const int tile_last = clamp(tile_first + args.tile_q, 0, args.queries) - 1;
    const bool stored = args.clear || mask.first_key(tile_first) < mask.end_key(tile_last);

    if (thread_index() < TILE_Q) store_shared(flags + 4 * thread_index(), 0);
    sync_threads();
    const int block = warp_index() % 4;  // of 16 rows
    const int64 padded = static_cast<int64>(args.query_tiles) * args.tile_q;
    const char* sums = args.dq_sum + (linear * padded + first) * args.columns * 4;
    const int row = 16 * block + lane / 4;
    bool spoilt[2] = {};
#pragma unroll 4
    for (int n = warp_index() / 4; n < args.columns / 8; n += WARPS / 4) {
        const char* place = sums + ((n * 4 + block) * WARP + lane) * CHUNK;
        const Accumulator sum = stored ? load_global<Accumulator>(place) : Accumulator{};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float low = sum.x[2 * half] * args.scale, high = sum.x[2 * half + 1] * args.scale;
            spoilt[half] |= !is_finite(low) || !is_finite(high);
            const uint32 to = rows + (row + 8 * half) * pitch + (8 * n + lane % 4 * 2) * size;
            if (args.dq_wide) {
                store_shared(to, low);
                store_shared(to + 4, high);
            } else {
                store_shared(to, cvt_pair(Element{}, low, high));
            }
        }
    }
    for (int half = 0; half < 2; ++half) {
        if (spoilt[half]) store_shared(flags + 4 * (row + 8 * half), 1);
    }
    sync_threads();

    const int chunks = (args.head_dim * size + CHUNK - 1) / CHUNK;
    char* dq = args.dq + args.dq_strides.offset(batch0, batch1, head) + first * args.dq_strides.row;
    for (int n = thread_index(); n < here * chunks; n += THREADS) {
        const int r = n / chunks, chunk = n % chunks;
        if (load_shared<int>(flags + 4 * r)) continue;
        store_global(dq + r * args.dq_strides.row + chunk * CHUNK, load_shared<Vector16>(rows + r * pitch + chunk * CHUNK));
    }
    for (int r = warp_index(); r < here; r += WARPS) {
        const int i = first + r;
        if (load_shared<int>(flags + 4 * r)) careful_dq(args, batch, head, i, mask.first_key(i), mask.end_key(i));
    }
    sync_threads();  // the flags are read
}

// The rows of dk and dv of an item that are not finite.
__device__ __forceinline__ void finish_item(const Args& args, const Mask& mask, int item) {
    if (load_global<int>(args.suspects + 4 * static_cast<int64>(item)) == 0) return;
    const int key_heads = args.heads / args.group;
    const int first = item % args.key_tiles * args.tile_k, key_head = item / args.key_tiles % key_heads;
    const int64 batch = item / args.key_tiles / key_heads;
    const GradientRows<Args> rows(args, batch);
    const int end = clamp(first + args.tile_k, 0, args.keys);
    for (int j = first + warp_index(); j < end; j += WARPS) {
        const bool dk = is_spoilt(rows.at(args.dk, args.dk_strides, key_head, j), args.head_dim, args.dk_wide);
        const bool dv = is_spoilt(rows.at(args.dv, args.dv_strides, key_head, j), args.value_dim, args.dv_wide);
        if (!dk && !dv) continue;
        careful_dk_dv(args, batch, key_head, j, mask.first_query(j, args.queries), mask.end_query(j, args.queries), dk, dv);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_backward_finish(const __grid_constant__ Args args) {
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    const int64 heads = static_cast<int64>(args.items) / args.key_tiles * args.group;  // of all batches
    const int tiles = (args.queries + TILE_Q - 1) / TILE_Q;
    for (int64 work = fresh_block_index(); work < heads * tiles + args.items; work += grid_size()) {
        if (work < heads * tiles) {
            finish_rows(args, mask, work / tiles, static_cast<int>(work % tiles) * TILE_Q);
        } else {
            finish_item(args, mask, static_cast<int>(work - heads * tiles));
        }
    }
}

}  // namespace cuflash
