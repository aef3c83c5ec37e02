// The parts of float32 operands, see float32.cuh, as tensor copies want them: q by packed rows, k and v.
//
//   q_parts (PARTS, head blocks of all batches, queries x pack, HEAD_DIM)
//   k_parts (PARTS, key heads of all batches, keys, HEAD_DIM)   v_parts (PARTS, the same heads, keys, VALUE_DIM)
//
// Columns that an operand does not have are zeros. A block owns TILE_Q rows of one operand, a thread eight columns of a
// row at a time, which it reads and writes in whole chunks of 16 bytes: memory limits it.
#include "float32.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "ptx.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;
constexpr int COLUMNS = 8;  // of a thread
static_assert(STAGES == 1 && SHARED_BYTES == 0 && TILE_K == TILE_Q, "nothing is shared, and all rows are alike");

struct Args {
    const char *q, *k, *v;
    char* out;
    char* lse;
    char *q_parts, *k_parts, *v_parts;
    Strides q_strides, k_strides, v_strides, out_strides;
    Schedule schedule;
    int64 query_blocks, key_blocks;  // of q; of k, and of v
    int queries, keys, heads, group, pack, head_dim, value_dim;
    int head_blocks, batches1;
    int first_shift, end_shift;
    float scale_log2;
};
template struct ArgsLayout<Args>;

// Rows of one head of an operand, `columns` of WIDTH, to `parts`, whose parts are `part_bytes` apart.
template <int WIDTH, typename Row>
__device__ __forceinline__ void split_rows(Row row_of, int first, int rows, int columns, char* parts,
                                           int64 part_bytes) {
    constexpr int LANES = WIDTH / COLUMNS;
    static_assert(THREADS % LANES == 0, "WIDTH: whole rows of threads");
    const int thread = thread_index(), column = thread % LANES * COLUMNS;
#pragma unroll 2
    for (int r = first + thread / LANES; r < clamp(rows, 0, first + TILE_Q); r += THREADS / LANES) {
        const char* const from = row_of(r) + column * sizeof(float);
        float x[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int left = columns - column - 4 * n;
            if (columns % 4 == 0) {
                load_four<true>(x[n], from + n * CHUNK, left, true);
            } else {
                load_four<false>(x[n], from + n * CHUNK, left, true);
            }
        }
        uint32 pairs[4][PARTS];
#pragma unroll
        for (int n = 0; n < 4; ++n) split<true>(pairs[n], x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]);
        char* const to = parts + (static_cast<int64>(r) * WIDTH + column) * 2;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            store_global(to + p * part_bytes, Vector16{{pairs[0][p], pairs[1][p], pairs[2][p], pairs[3][p]}});
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_forward_parts(const __grid_constant__ Args args) {
    const int64 block = fresh_block_index();
    const bool of_q = block < args.query_blocks, of_k = !of_q && block < args.query_blocks + args.key_blocks;
    const int rows = of_q ? args.queries * args.pack : args.keys, tiles = (rows - 1) / TILE_Q + 1;
    const int64 here = block - (of_q ? 0 : args.query_blocks + (of_k ? 0 : args.key_blocks));
    const int first = static_cast<int>(here % tiles) * TILE_Q;
    const int64 linear = here / tiles;
    const int heads = of_q ? args.head_blocks : args.heads / args.group;  // blocks of heads, or heads, of a batch
    const int head = static_cast<int>(linear % heads) * (of_q ? args.pack : 1);
    const int64 batch = linear / heads;
    const int batch0 = static_cast<int>(batch / args.batches1), batch1 = static_cast<int>(batch % args.batches1);
    const int64 all_heads = args.schedule.heads / args.head_blocks * heads;
    const int width = of_q || of_k ? HEAD_DIM : VALUE_DIM;
    const int64 head_bytes = static_cast<int64>(rows) * width * 2;

    if (of_q) {
        const Strides strides = args.q_strides;
        auto row = [&](int r) {
            const int h = head + (args.pack == 1 ? 0 : r % args.pack);
            return args.q + strides.offset(batch0, batch1, h) + query_of(r, args.pack) * strides.row;
        };
        split_rows<HEAD_DIM>(row, first, rows, args.head_dim, args.q_parts + linear * head_bytes,
                             all_heads * head_bytes);
    } else {
        const Strides strides = of_k ? args.k_strides : args.v_strides;
        const char* const base = (of_k ? args.k : args.v) + strides.offset(batch0, batch1, head);
        auto row = [&](int r) { return base + r * strides.row; };
        if (of_k) {
            split_rows<HEAD_DIM>(row, first, rows, args.head_dim, args.k_parts + linear * head_bytes,
                                 all_heads * head_bytes);
        } else {
            split_rows<VALUE_DIM>(row, first, rows, args.value_dim, args.v_parts + linear * head_bytes,
                                  all_heads * head_bytes);
        }
    }
}

}  // namespace cuflash
