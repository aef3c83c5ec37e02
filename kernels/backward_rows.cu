// What the backward pass needs of every query row, before its products:
//
//   row_delta = sum(dout * out) - dlse        row_lse = lse * log2 e
//
// Rows that see no key, and those that fill the last tile, get row_lse = inf, so that every weight exp2(s - row_lse)
// of theirs is 0, and row_delta = 0. A block owns 64 rows of a head, eight neighbouring threads a row, and both
// operands are read once, 16 bytes at a time: memory limits it.
#include "backward_args.cuh"
#include "mask.cuh"
#include "ptx.cuh"
#include "tile.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
constexpr int ROW_THREADS = 8;
static_assert(TILE_Q % (THREADS / ROW_THREADS) == 0, "TILE_Q: whole rounds of the rows that threads work on at once");
static_assert(STAGES == 1 && SHARED_BYTES == 0, "STAGES, SHARED_BYTES: nothing is shared");

constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float COARSEST = 1 << 26;  // from here on a row's lse is rounded by more than 1

__device__ __forceinline__ Element low_half(uint32 pair) { return Element{static_cast<unsigned short>(pair)}; }
__device__ __forceinline__ Element high_half(uint32 pair) { return Element{static_cast<unsigned short>(pair >> 16)}; }

// This thread's share of the product of two rows: every eighth chunk, and what fills no chunk.
__device__ __forceinline__ float partial_product(const char* a, const char* b, int columns, int first_chunk) {
    auto add = [](Element x, Element y, float sum) { return fused_multiply_add(to_float(x), to_float(y), sum); };
    float sum = 0.0f;
    int d = first_chunk * CHUNK_ELEMENTS;
#pragma unroll 4
    for (; d + CHUNK_ELEMENTS <= columns; d += ROW_THREADS * CHUNK_ELEMENTS) {
        const Vector16 x = load_global<Vector16>(a + 2 * d), y = load_global<Vector16>(b + 2 * d);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            sum = add(low_half(x.words[n]), low_half(y.words[n]), sum);
            sum = add(high_half(x.words[n]), high_half(y.words[n]), sum);
        }
    }
    for (; d < columns; ++d) sum = add(load_global<Element>(a + 2 * d), load_global<Element>(b + 2 * d), sum);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_backward_rows(const __grid_constant__ Args args) {
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    const int padded = args.query_tiles * args.tile_q, tiles = padded / TILE_Q;
    const int tile = static_cast<int>(fresh_block_index()), linear = tile / tiles, first = tile % tiles * TILE_Q;
    const int head = linear % args.heads, batch = linear / args.heads;
    const int batch0 = batch / args.batches1, batch1 = batch % args.batches1;
    const int row = thread_index() / ROW_THREADS, column = thread_index() % ROW_THREADS;
    const char* dout = args.dout + args.dout_strides.offset(batch0, batch1, head);
    const char* out = args.out + args.out_strides.offset(batch0, batch1, head);
#pragma unroll
    for (int r = 0; r < TILE_Q; r += THREADS / ROW_THREADS) {
        const int i = first + r + row;
        const int64 place = static_cast<int64>(linear) * args.queries + i;
        const bool inside = i < args.queries && mask.first_key(i) < mask.end_key(i);
        const float lse = inside ? load_global<float>(args.lse + 4 * place) : -INFINITE;
        const bool sees = lse != -INFINITE;
        float delta = 0.0f;
        if (sees) {
            delta = partial_product(dout + i * args.dout_strides.row, out + i * args.out_strides.row,
                                    args.value_dim, column);
        }
#pragma unroll
        for (int lanes = 1; lanes < ROW_THREADS; lanes *= 2) delta += shuffle_xor(delta, lanes);
        if (column != 0) continue;
        if (sees && args.dlse != nullptr) delta -= load_global<float>(args.dlse + 4 * place);
        const float row_lse = sees ? multiply(lse, LOG2_E) : INFINITE;
        const int64 to = static_cast<int64>(linear) * padded + i;
        store_global(args.row_lse + 4 * to, row_lse);
        store_global(args.row_delta + 4 * to, delta);
        if (is_finite(row_lse) && absolute(row_lse) >= COARSEST) store_global(args.turns + COARSE, 1);
    }
    if (args.clear) {
        char* sums = args.dq_sum + static_cast<int64>(tile) * TILE_Q * args.columns * 4;
        for (int n = thread_index(); n < TILE_Q * args.columns / 4; n += THREADS) {
            store_global(sums + CHUNK * n, Vector16{});
        }
    }
}

}  // namespace cuflash
