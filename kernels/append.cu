// The step before decode's: the newest keys and values of sequences go into their caches, and q and keys are rotated
// to their positions; for elements of 16 bits, float32 or float64, on any GPU since sm_80.
//
//   k_new, v_new (sequences, key_heads, queries, head_dim or value_dim) -> k, v from position `lengths` on
//   q (sequences, heads, queries, head_dim) -> rotated, where there are tables cos and sin (positions, half)
//   lengths -> totals, those that decode goes by, and overflow, 1 for a sequence whose rows do not fit, else 0
//
// Rotation turns pairs (x, y) of columns by angles that grow with the position (Su et al., "RoFormer", 2021), in
// float32 (float64 for float64), each result rounded once:
//
//   x' = x cos - y sin      y' = y cos + x sin
//
// A warp owns a row: of q, k_new or v_new, in this order. Of a sequence all rows go where they belong or none does, so
// each warp finds out by itself whether they fit: whether there are capacity, pages and angles for all. Where they do
// not, the total is -1, which decode answers with NaN.
//
// What limits speed: the launch, and waiting for a length, a page and a row, one after the other. So rows are spread as
// thin as warps allow.
#include "cache.cuh"
#include "element.cuh"
#include "place.cuh"
#include "ptx.cuh"
#include "real.cuh"

namespace cuflash {

constexpr int THREADS = WARP * WARPS;

struct Steps {  // bytes from a row, or a column, to the next
    int64 batch, head, row, column;  // batch: of sequences or pages
    __device__ __forceinline__ int64 offset(int64 b, int64 h, int64 r) const { return b * batch + h * head + r * row; }
};

struct Args {
    const char *q, *k_new, *v_new;
    char *k, *v, *rotated;
    const char *cos, *sin;   // null where nothing is rotated
    const char* lengths;     // before the append; null where all caches are full
    const char* page_table;  // null where a cache is one piece
    char* totals;
    char* overflow;  // null where it is not wanted
    Steps q_steps, k_new_steps, v_new_steps, k_steps, v_steps, rotated_steps;
    int64 cos_step, cos_column, sin_step, sin_column;  // of the tables: to the next position, and pair
    int64 length_stride, table_stride, table_step, overflow_stride;
    uint32 items;        // rows of the launch
    int first_sequence;  // of the launch
    int rows;            // of a sequence: those of q where it is rotated, of k_new and of v_new; 1 at least
    int queries, appended, capacity;  // appended: rows that the caches grow by, `queries` or 0
    int rotated_heads, key_heads, head_dim, value_dim;
    int half, positions;  // pairs of a row that are rotated, and rows of the tables
    int interleaved;      // whether pairs are neighbours, else `half` columns apart
    int single;           // whether tables are float32, else of the elements' type
    int pages, page_size;
    uint32 page_multiplier;  // see Divisor
    int page_shift;
    int k_vectors, v_vectors;  // rows can be copied 16 bytes at a time
};
template struct ArgsLayout<Args>;

// Where a sequence's rows belong ------------------------------------------------------------------------------------

struct Span {
    int first, total;  // position of row 0, keys when all is done
    bool fits;
};

__device__ __forceinline__ Span span_of(const Args& args, int sequence, const Pages& pages) {
    int length = args.capacity;
    if (args.lengths != nullptr) length = load_global<int>(args.lengths + sequence * args.length_stride);
    if (args.appended == 0) length = clamp(length, 0, args.capacity);  // as decode takes it
    Span span;
    span.fits = length >= 0 && length <= args.capacity - args.appended;
    span.total = span.fits ? length + args.appended : -1;
    span.first = span.total - args.queries;
    if (args.cos != nullptr) span.fits = span.fits && span.total <= args.positions;
    if (span.fits && args.appended > 0) {
        bool missing = false;
        for (int64 n = pages.size.divide(length) + lane_index(); n * pages.size.value < span.total; n += WARP) {
            missing |= !pages.exists(pages.number(static_cast<int>(n)));
        }
        span.fits = !any(missing);
    }
    return span;
}

// Rows --------------------------------------------------------------------------------------------------------------

template <typename Piece>
__device__ __forceinline__ void copy(const char* from, int64 from_step, char* to, int64 to_step, int first, int end) {
    for (int n = first + lane_index(); n < end; n += WARP) {
        store_global(to + n * to_step, load_global<Piece>(from + n * from_step));
    }
}

__device__ __forceinline__ void copy_row(const char* from, const Steps& source, char* to, const Steps& target,
                                         int columns, bool vectors) {
    if (vectors) {
        copy<Vector16>(from, sizeof(Vector16), to, sizeof(Vector16), 0, columns * sizeof(Element) / sizeof(Vector16));
    } else {
        copy<Element>(from, source.column, to, target.column, 0, columns);
    }
}

__device__ __forceinline__ Real angle_part(const char* address, bool single) {
    return single ? load_global<float>(address) : to_real(load_global<Element>(address));
}

// Columns beyond the pairs are copied.
__device__ __forceinline__ void rotate_row(const Args& args, const char* from, const Steps& source, char* to,
                                           const Steps& target, int position) {
    const char* cos = args.cos + position * args.cos_step;
    const char* sin = args.sin + position * args.sin_step;
    for (int n = lane_index(); n < args.half; n += WARP) {
        const int d = args.interleaved ? 2 * n : n, e = args.interleaved ? 2 * n + 1 : n + args.half;
        const Real x = to_real(load_global<Element>(from + d * source.column));
        const Real y = to_real(load_global<Element>(from + e * source.column));
        const Real c = angle_part(cos + n * args.cos_column, args.single);
        const Real s = angle_part(sin + n * args.sin_column, args.single);
        const Real turned = fused_multiply_add(x, c, -multiply(y, s));
        store_global(to + d * target.column, rounded<Element>(turned));
        store_global(to + e * target.column, rounded<Element>(fused_multiply_add(y, c, multiply(x, s))));
    }
    copy<Element>(from, source.column, to, target.column, 2 * args.half, args.head_dim);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) cuflash_append(const __grid_constant__ Args args) {
    const uint32 item = static_cast<uint32>(fresh_block_index()) * WARPS + warp_index();
    if (item >= args.items) return;
    const int sequence = args.first_sequence + static_cast<int>(item / args.rows);
    const int row = static_cast<int>(item % args.rows);
    const Pages pages = pages_of(args, sequence);
    const Span span = span_of(args, sequence, pages);
    if (row == 0 && lane_index() == 0) {
        store_global(args.totals + static_cast<int64>(sequence) * sizeof(int), span.fits ? span.total : -1);
        if (args.overflow != nullptr) {
            store_global(args.overflow + sequence * args.overflow_stride, static_cast<int>(!span.fits));
        }
    }
    if (!span.fits || args.queries == 0) return;

    int head = row / args.queries;
    const int i = row % args.queries;
    const int position = maximum(span.first + i, 0);  // less where a sequence has fewer keys than rows
    if (head < args.rotated_heads) {
        rotate_row(args, args.q + args.q_steps.offset(sequence, head, i), args.q_steps,
                   args.rotated + args.rotated_steps.offset(sequence, head, i), args.rotated_steps, position);
        return;
    }
    head -= args.rotated_heads;
    const int page = pages.size.divide(position), place = position - page * pages.size.value;
    const int number = pages.number(page);
    if (head < args.key_heads) {
        const char* from = args.k_new + args.k_new_steps.offset(sequence, head, i);
        char* to = args.k + args.k_steps.offset(number, head, place);
        if (args.cos != nullptr) {
            rotate_row(args, from, args.k_new_steps, to, args.k_steps, position);
        } else {
            copy_row(from, args.k_new_steps, to, args.k_steps, args.head_dim, args.k_vectors);
        }
    } else {
        head -= args.key_heads;
        copy_row(args.v_new + args.v_new_steps.offset(sequence, head, i), args.v_new_steps,
                 args.v + args.v_steps.offset(number, head, place), args.v_steps, args.value_dim, args.v_vectors);
    }
}

}  // namespace cuflash
