// What the backward pass needs of every query row, before its products:
//
//   row_delta = sum(dout * out) - dlse        row_lse = lse * log2 e
//
// Rows that see no key, and those that fill the last tile, get row_lse = inf, so that every weight exp2(s - row_lse)
// of theirs is 0, and row_delta = 0. A block owns TILE_Q rows of a head, eight neighbouring threads a row, ROUNDS rows
// one after the other. Memory limits it: both operands are read once, 16 bytes at a time, of all of a thread's rows
// before the first is used.
#include "backward_args.cuh"
#include "element.cuh"
#include "mask.cuh"
#include "ptx.cuh"
#include "tile.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
constexpr int ROW_THREADS = 8;
constexpr int WARP_ROWS = WARP / ROW_THREADS;  // that a warp works on at once
constexpr int ROUNDS = TILE_Q / (WARP_ROWS * WARPS);
static_assert(TILE_Q == ROUNDS * WARP_ROWS * WARPS, "TILE_Q: whole rounds of the rows that threads work on at once");
static_assert(ROUNDS <= ROW_THREADS, "ROUNDS: of a row's threads, each ends the row of one round at most");
static_assert(STAGES == 1 && SHARED_BYTES == 0, "STAGES, SHARED_BYTES: nothing is shared");

constexpr int CHUNK_NUMBERS = CHUNK / sizeof(Element);
constexpr Real LOG2_E = 1.44269504088896340736;
constexpr Real COARSEST = sizeof(Real) == 4 ? 0x1p26 : 0x1p55;  // from here on a row's lse is rounded by more than 1

struct alignas(CHUNK) Chunk {  // neighbours that travel together
    Element x[CHUNK_NUMBERS];
};

// The rows that a thread works on, one a round, `step` bytes from each other.
struct Rows {
    const char* first;
    int64 step;
    __device__ __forceinline__ const char* at(int round, int d) const {
        return first + round * step + d * static_cast<int>(sizeof(Element));
    }
};

// Adds to the sum of each row that is wanted the products from column d on: of a chunk, or of what fills none.
__device__ __forceinline__ void add_products(Real (&sums)[ROUNDS], const Rows& a, const Rows& b,
                                             const bool (&wanted)[ROUNDS], int d, int columns) {
    auto add = [](Element x, Element y, Real& sum) { sum = fused_multiply_add(to_real(x), to_real(y), sum); };
    if (d + CHUNK_NUMBERS <= columns) {
        Vector16 x[ROUNDS], y[ROUNDS];
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            x[r] = load_global_16_once(a.at(r, d), wanted[r]);
            y[r] = load_global_16_once(b.at(r, d), wanted[r]);
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const Chunk first = __builtin_bit_cast(Chunk, x[r]), second = __builtin_bit_cast(Chunk, y[r]);
#pragma unroll
            for (int n = 0; n < CHUNK_NUMBERS; ++n) add(first.x[n], second.x[n], sums[r]);
        }
    } else {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll 1
            for (int n = d; wanted[r] && n < columns; ++n) {
                add(load_global<Element>(a.at(r, n)), load_global<Element>(b.at(r, n)), sums[r]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_backward_rows(const __grid_constant__ Args args) {
    const Mask mask(args.keys, args.first_shift, args.end_shift);
    const int padded = args.query_tiles * args.tile_q, tiles = padded / TILE_Q;
    const int tile = static_cast<int>(fresh_block_index()), linear = tile / tiles, first = tile % tiles * TILE_Q;
    const int head = linear % args.heads, batch = linear / args.heads;
    const int batch0 = batch / args.batches1, batch1 = batch % args.batches1;
    const int warp = thread_index() / WARP, lane = thread_index() % WARP;
    const int row = first + warp * ROUNDS * WARP_ROWS + lane / ROW_THREADS;  // of the first round
    const int column = lane % ROW_THREADS, own = row + column * WARP_ROWS;    // the row that this thread ends
    const auto rows_of = [&](const char* base, const Strides& strides) {
        return Rows{base + strides.offset(batch0, batch1, head) + row * strides.row, WARP_ROWS * strides.row};
    };
    const Rows dout = rows_of(args.dout, args.dout_strides), out = rows_of(args.out, args.out_strides);
    bool inside[ROUNDS], own_inside = false;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int i = row + r * WARP_ROWS;
        inside[r] = i < args.queries && mask.first_key(i) < mask.end_key(i);
        if (column == r) own_inside = inside[r];
    }
    const int64 place = (static_cast<int64>(linear) * args.queries + own) * sizeof(Real);
    const Real lse = own_inside ? load_global<Real>(args.lse + place) : Real(-INFINITE);
    const Real dlse = own_inside && args.dlse != nullptr ? load_global<Real>(args.dlse + place) : Real(0);

    Real sums[ROUNDS] = {}, delta = 0;
#pragma unroll 1
    for (int d = column * CHUNK_NUMBERS; d < args.value_dim; d += ROW_THREADS * CHUNK_NUMBERS) {
        add_products(sums, dout, out, inside, d, args.value_dim);
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
        for (int lanes = 1; lanes < ROW_THREADS; lanes *= 2) sums[r] += shuffle_xor(sums[r], lanes);
        if (column == r) delta = sums[r];
    }
    if (column < ROUNDS) {
        const bool sees = lse != -INFINITE;
        const Real row_lse = sees ? multiply(lse, LOG2_E) : Real(INFINITE);
        const int64 to = (static_cast<int64>(linear) * padded + own) * sizeof(Real);
        store_global(args.row_lse + to, row_lse);
        store_global(args.row_delta + to, sees ? delta - dlse : Real(0));
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
