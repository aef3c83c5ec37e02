// What the backward pass needs of every query row, before its products:
//
//   row_delta = sum(dout * out) - dlse        row_lse = lse * log2 e
//
// Rows that see no key, and those that fill the last tile, get row_lse = inf, so that every weight exp2(s - row_lse)
// of theirs is 0, and row_delta = 0. A block owns TILE_Q rows of a head, eight neighbouring threads a row, and
// both operands are read once, 16 bytes at a time: memory limits it.
#include "backward_args.cuh"
#include "mask.cuh"
#include "ptx.cuh"
#include "tile.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
constexpr int ROW_THREADS = 8;
static_assert(TILE_Q % (THREADS / ROW_THREADS) == 0, "TILE_Q: whole rounds of the rows that threads work on at once");
static_assert(STAGES == 1 && SHARED_BYTES == 0, "STAGES, SHARED_BYTES: nothing is shared");

constexpr Real LOG2_E = 1.44269504088896340736;
constexpr Real COARSEST = sizeof(Real) == 4 ? 0x1p26 : 0x1p55;  // from here on a row's lse is rounded by more than 1

struct alignas(CHUNK) Chunk {  // neighbours that travel together
    static constexpr int ELEMENTS = CHUNK / sizeof(Element);
    Element x[ELEMENTS];
};

// This thread's share of the product of two rows: every eighth chunk, and what fills no chunk.
__device__ __forceinline__ Real partial_product(const char* a, const char* b, int columns, int first_chunk) {
    constexpr int SIZE = sizeof(Element);
    auto add = [](Element x, Element y, Real sum) { return fused_multiply_add(to_real(x), to_real(y), sum); };
    Real sum = 0;
    int d = first_chunk * Chunk::ELEMENTS;
#pragma unroll 4
    for (; d + Chunk::ELEMENTS <= columns; d += ROW_THREADS * Chunk::ELEMENTS) {
        const Chunk x = load_global<Chunk>(a + SIZE * d), y = load_global<Chunk>(b + SIZE * d);
#pragma unroll
        for (int n = 0; n < Chunk::ELEMENTS; ++n) sum = add(x.x[n], y.x[n], sum);
    }
    for (; d < columns; ++d) sum = add(load_global<Element>(a + SIZE * d), load_global<Element>(b + SIZE * d), sum);
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
        const Real lse = inside ? load_global<Real>(args.lse + sizeof(Real) * place) : Real(-INFINITE);
        const bool sees = lse != -INFINITE;
        Real delta = 0;
        if (sees) {
            delta = partial_product(dout + i * args.dout_strides.row, out + i * args.out_strides.row,
                                    args.value_dim, column);
        }
#pragma unroll
        for (int lanes = 1; lanes < ROW_THREADS; lanes *= 2) delta += shuffle_xor(delta, lanes);
        if (column != 0) continue;
        if (sees && args.dlse != nullptr) delta -= load_global<Real>(args.dlse + sizeof(Real) * place);
        const Real row_lse = sees ? multiply(lse, LOG2_E) : Real(INFINITE);
        const int64 to = static_cast<int64>(linear) * padded + i;
        store_global(args.row_lse + sizeof(Real) * to, row_lse);
        store_global(args.row_delta + sizeof(Real) * to, delta);
        if (is_finite(row_lse) && absolute(row_lse) >= COARSEST) store_global(args.turns + COARSE, 1);
    }
    if (args.clear) {
        char* sums = args.dq_sum + static_cast<int64>(tile) * TILE_Q * args.columns * sizeof(Real);
        for (int n = thread_index(); n < TILE_Q * args.columns * static_cast<int>(sizeof(Real)) / CHUNK; n += THREADS) {
            store_global(sums + CHUNK * n, Vector16{});
        }
    }
}

}  // namespace cuflash
