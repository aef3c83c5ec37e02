// The end of the backward pass: dq = scale * dq_sum, rounded, in the rows of the caller's array; and, where a number of
// dq, dk or dv is not finite, that row again by the careful path.
//
// Where dq has been summed in global memory, a block owns TILE_Q of its rows of a head, as the main kernel's
// accumulators left them (visits.cuh says who did): a warp takes 16 of them, and loads of TOGETHER times COLUMNS are
// issued before the first is used. A block owns an item as well, a tile of keys, for which it does nothing unless it is
// suspect. There may be more of the one or of the other. Memory limits both.
#include "backward_args.cuh"
#include "careful_gradients.cuh"
#include "mask.cuh"
#include "ptx.cuh"
#include "tile.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
static_assert(TILE_Q == 16 * WARPS, "TILE_Q: the rows of a block of dq_sum, 16 for every warp");
static_assert(STAGES == 1 && SHARED_BYTES == 0, "STAGES, SHARED_BYTES: nothing is shared");

constexpr int COLUMNS = 32;  // of a row, that its four lanes store together: of 16 bits in whole chunks
constexpr int TOGETHER = sizeof(Real) == 4 ? 2 : 1;

struct alignas(16) Accumulator {  // of a lane, for 16 x 8 numbers
    Real x[4];
};

// Or zeros, if it is not there to be read.
template <typename Accumulator>
__device__ __forceinline__ Accumulator load_sum(const char* sums, int lane, bool read) {
    if constexpr (sizeof(Real) == 4) {
        return __builtin_bit_cast(Accumulator, load_global_16(sums + lane * SUM_LANE, read));
    } else {
        Accumulator sum = {};
#pragma unroll
        for (int e = 0; read && e < 4; ++e) sum.x[e] = load_global<Real>(sums + lane * SUM_LANE + e * SUM_NEXT);
        return sum;
    }
}

struct alignas(2 * sizeof(Real)) Two {
    Real low, high;
};

// Words of four neighbouring blocks of 8 columns, one of each block a thread: after it, thread t of a quad has all
// four of block t. A transposition in two exchanges, with the neighbour and with the one after.
__device__ __forceinline__ Vector16 gather_chunk(const uint32 (&words)[4], int lane) {
    const bool odd = lane % 2, high = lane / 2 % 2;
    const uint32 kept[2] = {odd ? words[1] : words[0], odd ? words[3] : words[2]};
    const uint32 given[2] = {shuffle_xor(odd ? words[0] : words[1], 1), shuffle_xor(odd ? words[2] : words[3], 1)};
    const uint32 low_pair[2] = {odd ? given[0] : kept[0], odd ? kept[0] : given[0]};
    const uint32 high_pair[2] = {odd ? given[1] : kept[1], odd ? kept[1] : given[1]};
    uint32 own[2], other[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        own[n] = high ? high_pair[n] : low_pair[n];
        other[n] = shuffle_xor(high ? low_pair[n] : high_pair[n], 2);
    }
    return high ? Vector16{{other[0], other[1], own[0], own[1]}} : Vector16{{own[0], own[1], other[0], other[1]}};
}

// COLUMNS of a row from `first` on, of which a lane has two of each 8, to where they belong; a row that is null to
// nowhere. 16-bit elements leave in whole chunks. `zero` takes sums of 0 times a number: NaN where one is not finite.
template <typename Element>
__device__ __forceinline__ void store_columns(const Args& args, char* row, int first, int lane, int half,
                                              const Accumulator (&sums)[4], Real& zero) {
    Two numbers[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        numbers[m] = {sums[m].x[2 * half] * args.scale, sums[m].x[2 * half + 1] * args.scale};
        zero += (numbers[m].low - numbers[m].low) + (numbers[m].high - numbers[m].high);
    }
    const int end = row == nullptr ? 0 : args.head_dim;
    if (sizeof(Element) == sizeof(Real) || args.dq_wide) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int column = first + 8 * m + lane % 4 * 2;
            if (column < end) store_global(row + static_cast<int>(sizeof(Real)) * column, numbers[m]);
        }
    } else if constexpr (sizeof(Element) == 2) {
        uint32 words[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) words[m] = cvt_pair(Element{}, numbers[m].low, numbers[m].high);
        const Vector16 chunk = gather_chunk(words, lane);
        const int column = first + 8 * (lane % 4);
        if (column < end) store_global(row + 2 * column, chunk);
    }
}

// Of rows [first, first + TILE_Q) of dq of one head, a warp's 16.
__device__ __forceinline__ void finish_rows(const Args& args, const Mask& mask, int linear, int first) {
    const int batch = linear / args.heads, batch0 = batch / args.batches1, batch1 = batch % args.batches1;
    const int head = linear % args.heads, lane = lane_index(), block = warp_index();

    // The tile of the main kernel that these rows are part of was stored by whoever visited it, if anybody did.
    const int tile_first = first / args.tile_q * args.tile_q;
    const int tile_last = clamp(tile_first + args.tile_q, 0, args.queries) - 1;
    const bool stored = args.clear || mask.first_key(tile_first) < mask.end_key(tile_last);

    const int64 padded = static_cast<int64>(args.query_tiles) * args.tile_q;
    const char* const sums = args.dq_sum + (linear * padded + first) * args.columns * static_cast<int64>(sizeof(Real));
    const int row = first + 16 * block + lane / 4;  // and 8 below
    char* const dq = args.dq + args.dq_strides.offset(batch0, batch1, head) + row * args.dq_strides.row;
    Real zeros[2] = {};
#pragma unroll 1
    for (int first = 0; first < args.columns; first += TOGETHER * COLUMNS) {
        const char* const place = sums + (first / 8 * WARPS + block) * SUM_BYTES;
        Accumulator sum[TOGETHER][4];
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                sum[n][m] = load_sum<Accumulator>(place + (4 * n + m) * WARPS * SUM_BYTES, lane,
                                                  stored && first + n * COLUMNS < args.columns);
            }
        }
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                char* const here = row + 8 * half < args.queries ? dq + 8 * half * args.dq_strides.row : nullptr;
                store_columns<Element>(args, here, first + n * COLUMNS, lane, half, sum[n], zeros[half]);
            }
        }
    }
    sync_warp();  // what is written again must have been written
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        uint32 spoilt = ballot((half ? zeros[1] : zeros[0]) != 0.0f && row + 8 * half < args.queries);
        while (spoilt != 0) {
            const int quad = find_first_set(spoilt) / 4, i = first + 16 * block + 8 * half + quad;
            spoilt &= ~(0xfu << (4 * quad));
            careful_dq(args, batch, head, i, mask.first_key(i), mask.end_key(i));
        }
    }
}

// The rows of dk and dv of an item that are not finite.
__device__ __forceinline__ void finish_item(const Args& args, const Mask& mask, int item) {
    const int key_heads = args.heads / args.group;
    const int first = item % args.key_tiles * args.tile_k, key_head = item / args.key_tiles % key_heads;
    const int64 batch = item / args.key_tiles / key_heads;
    const GradientRows<Args> rows(args, batch);
    const int end = clamp(first + args.tile_k, 0, args.keys);
    for (int j = first + warp_index(); j < end; j += WARPS) {
        const bool dk = is_spoilt(rows.at(args.dk, args.dk_strides, key_head, j), args.head_dim, args.dk_wide);
        const bool dv = is_spoilt(rows.at(args.dv, args.dv_strides, key_head, j), args.value_dim, args.dv_wide);
        const int first_query = mask.first_query(j, args.queries), end_query = mask.end_query(j, args.queries);
        if (dk) careful_dk_dv(args, batch, key_head, j, first_query, end_query, false);
        if (dv) careful_dk_dv(args, batch, key_head, j, first_query, end_query, true);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_backward_finish(const __grid_constant__ Args args) {
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    const int tiles = args.columns == 0 ? 0 : (args.queries + TILE_Q - 1) / TILE_Q;
    const int rows = args.items / args.key_tiles * args.group * tiles, work = static_cast<int>(fresh_block_index());
    const bool suspect = work < args.items && load_global<int>(args.suspects + 4 * static_cast<int64>(work)) != 0;
    // The main kernel's last sums first: the cache may hold them still.
    const int place = rows - 1 - work;
    if (place >= 0) finish_rows(args, mask, place / tiles, place % tiles * TILE_Q);
    if (suspect) finish_item(args, mask, work);
}

}  // namespace cuflash
