// out = softmax(scale q k^T) v and lse, for 16-bit elements, on any GPU since sm_80.
//
//   q (queries, head_dim), k (keys, head_dim), v (keys, value_dim) -> out (queries, value_dim), lse (queries)
//
// The algorithm is FlashAttention-2 (Dao 2023). A block owns TILE_Q rows of one head, or of all heads of a group when
// there are few rows, and walks over the keys it can see in tiles of TILE_K, from the last to the first. A warp owns
// ROWS of the rows, a quad of its threads two rows of every 16: scores, weights and out stay in registers, in the
// layout of mma.m16n8k16, whose accumulator is the next product's A operand as it is. K and V come through shared
// memory by cp.async. With two STAGES a whole tile arrives while another is worked on. With one, the next keys arrive
// while the values are worked on, and the values while the keys are: half the memory, twice the barriers.
//
// With PAGED, keys and values lie in a cache: each row of a tile is where a page table says, and how many there are is
// for the sequence's length to say, which the device alone knows. A thread looks up a row a tile ahead, so that nobody
// waits for the number of a page, and leaves its address in shared memory for those who copy it.
//
// What limits speed: the tensor cores at head_dim 64 and 128 (with the exponentials close behind at 64), shared
// memory reads at 256, where a warp can own only 16 rows and so reads all of K and V for each 16.
#include "cache.cuh"
#include "careful.cuh"
#include "forward_args.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "ptx.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "tile.cuh"

namespace cuflash {

static_assert(TILE_Q % (16 * WARPS) == 0, "TILE_Q: 16 rows, or a multiple, for every warp");
static_assert(TILE_K % 16 == 0, "TILE_K: whole steps of 16 keys");

constexpr int THREADS = WARP * WARPS;
constexpr int ROWS = TILE_Q / WARPS;  // of one warp
constexpr int BLOCKS = ROWS / 16;     // of 16 rows, one A operand each

using QueryTile = Tile<HEAD_DIM>;
using KeyTile = Tile<HEAD_DIM>;
using ValueTile = Tile<VALUE_DIM>;

constexpr int KEY_BYTES = TILE_K * KeyTile::PITCH;
constexpr int VALUE_BYTES = TILE_K * ValueTile::PITCH;
constexpr int WARP_BYTES = ROWS * (HEAD_DIM > VALUE_DIM ? QueryTile::PITCH : ValueTile::PITCH);

// What a warp needs once a tile waits in shared memory, since registers are short.
struct alignas(16) Facts {
    const char *k, *v;         // key 0 of the block's head
    int first_key, end_key;    // keys that some row of the block sees; the others are never read
    int some_first, some_end;  // keys that some row of the warp sees
    int all_first, all_end;    // keys that all rows of the warp see
    int warp_row;              // first packed row of the warp
    int sequence;              // of a cache
};

struct Shared {
    char rows[WARPS][WARP_BYTES];  // a warp's rows of q and, at the end, of out: no other warp touches them
    char keys[STAGES][KEY_BYTES];
    char values[STAGES][VALUE_BYTES];
    Facts facts[WARPS];
};
constexpr int KEY_START = OFFSET_OF(Shared, keys), VALUE_START = OFFSET_OF(Shared, values);
constexpr int FACTS_START = OFFSET_OF(Shared, facts);

// Behind it, of a cache: where the rows of a tile and of the next one lie, and what each warp has missed.
struct alignas(16) CacheRow {
    const char *key, *value;  // null: zeros
};
constexpr int ROWS_START = sizeof(Shared), MISSING_START = ROWS_START + 2 * TILE_K * sizeof(CacheRow);
constexpr int CACHE_BYTES = PAGED ? MISSING_START + 16 - ROWS_START : 0;
static_assert(sizeof(Shared) + CACHE_BYTES == SHARED_BYTES, "SHARED_BYTES: what the tiles and facts take");
static_assert(!PAGED || (TILE_K <= THREADS && WARPS <= 4), "TILE_K: a thread for each row; WARPS: 16 bytes of flags");

struct Args {
    const char *q, *k, *v;
    char* out;
    char* lse;               // null where it is not wanted
    const char* lengths;     // of a cache; null where it is full
    const char* page_table;  // null where it is one piece
    Strides q_strides, k_strides, v_strides, out_strides;
    Schedule schedule;
    int64 first_block;
    int64 length_stride, table_stride, table_step;  // table_step: from a sequence's page to the next
    int queries, keys, heads, group, pack, head_dim, value_dim;
    int head_blocks, batches1;   // blocks along heads; length of the inner merged axis
    int first_shift, end_shift;  // of the mask
    int out_vectors;             // rows of out can be written 16 bytes at a time
    int pages, page_size;        // of a cache
    uint32 page_multiplier;      // see Divisor
    int page_shift;
    int left, right, top_left;   // of the mask against a length
    float scale_log2;            // scale * log2 e, positive
};
template struct ArgsLayout<Args>;

// Which keys are seen. A cache has its sequences along the one leading axis.
__device__ __forceinline__ Mask locate_mask(const Args& args) {
    if constexpr (PAGED) {
        return mask_of(args, locate(args).batch1, args.keys);
    } else {
        return Mask(args.keys, args.first_shift, args.end_shift);
    }
}

using Scores = float[BLOCKS][TILE_K / 8][4];
using Out = float[BLOCKS][VALUE_DIM / 8][4];
using Rows = SoftmaxRow<float>[BLOCKS][2];

// Spelled out: of an array of arrays of classes, NVRTC 13.0 runs the default initialisers of the first array alone.
__device__ __forceinline__ void clear(Rows& rows) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) rows[block][half] = SoftmaxRow<float>{};
    }
}

// Row and column, within the warp's rows and the tile, of element e of an accumulator's 16 x 8 block.
__device__ __forceinline__ int row_of(int lane, int block, int half) { return 16 * block + 8 * half + lane / 4; }
__device__ __forceinline__ int column_of(int lane, int n, int e) { return 8 * n + lane % 4 * 2 + e % 2; }

// Hidden scores are selected to -inf, whatever they are.
__device__ __forceinline__ void hide(Scores& scores, const Mask& mask, int pack, int warp_row, int key) {
    const int lane = lane_index();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int i = query_of(warp_row + row_of(lane, block, half), pack);
            int first = mask.first_key(i) - key, end = mask.end_key(i) - key;
#pragma unroll
            for (int n = 0; n < TILE_K / 8; ++n) {
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    int j = column_of(lane, n, e);
                    scores[block][n][e] = j >= first && j < end ? scores[block][n][e] : -INFINITE;
                }
            }
        }
    }
}

// Raises the rows' references to what this tile needs; out is rescaled where, rarely, one has moved.
__device__ __forceinline__ void raise(Rows& rows, Out& out, const Scores& scores, const Scaled& score) {
    float factor[BLOCKS][2];
    bool moved = false;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = -INFINITE;
#pragma unroll
            for (int n = 0; n < TILE_K / 8; ++n) {
                top = maximum(top, maximum(scores[block][n][2 * half], scores[block][n][2 * half + 1]));
            }
            factor[block][half] = rows[block][half].raise(maximum_of_row(top) * score.factor());
            moved |= factor[block][half] != 1.0f;
        }
    }
    if (any(moved)) rescale(out, factor);
}

// weights = exp(scores - reference), 16 keys at a time, summed and at once multiplied with v: the exponentials of the
// next 16 keys run while the tensor cores work on these.
__device__ __forceinline__ void accumulate(Rows& rows, Out& out, const Scores& scores, const Scaled& score,
                                           uint32 values, uint32 lane) {
#pragma unroll
    for (int step = 0; step < TILE_K / 16; ++step) {
        uint32 weights[BLOCKS][4];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int part = 0; part < 4; ++part) {  // A operand: rows g and g + 8 of keys 0-7, then of keys 8-15
                SoftmaxRow<float>& row = rows[block][part % 2];
                const float(&s)[4] = scores[block][2 * step + part / 2];
                float low = ex2_approx(fused_multiply_add(s[part % 2 * 2], score.factor(), -row.shift()));
                float high = ex2_approx(fused_multiply_add(s[part % 2 * 2 + 1], score.factor(), -row.shift()));
                row.sum += low + high;
                weights[block][part] = cvt_pair(Element{}, low, high);
            }
        }
        multiply_add<Element, BLOCKS, VALUE_DIM / 8, VALUE_DIM>(out, weights, values, lane, 16 * step);
    }
}

// The careful path, of a row whose keys lie in a cache.
__device__ __noinline__ void careful_row_of_cache(const Args& args, int sequence, int key_head, const char* q,
                                                  char* out, char* lse, int first, int end) {
    const Pages pages = pages_of(args, sequence);
    auto row_of = [&](const char* base, const Strides& strides, int j) {
        return pages.row(base, strides, pages.number(pages.size.divide(j)), key_head, j);
    };
    careful_row_at<Element>(
        args, q, [&](int j) { return row_of(args.k, args.k_strides, j); },
        [&](int j) { return row_of(args.v, args.v_strides, j); }, out, lse, first, end);
}

// Writes the warp's rows of out and lse. out goes through shared memory, so that rows leave in whole chunks; lse is
// written by one thread of each quad. Where a page was missing all of it is NaN.
__device__ __forceinline__ void store(const Args& args, const Mask& mask, const Out& out, Rows& rows,
                                      uint32 warp_shared, bool missing) {
    const int lane = lane_index();
    const Dense place = locate(args);  // again, rather than in registers all along
    const int warp_row = place.tile * TILE_Q + warp_index() * ROWS;
    uint32 suspects[BLOCKS][2];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            SoftmaxRow<float>& row = rows[block][half];
            row.finish<4>();
            if (missing) row.sum = INFINITE - INFINITE;
            const float inverse = row.inverse_sum();
            const int r = row_of(lane, block, half);
            float finite = 0.0f;
#pragma unroll
            for (int n = 0; n < VALUE_DIM / 8; ++n) {
                float low = out[block][n][2 * half] * inverse, high = out[block][n][2 * half + 1] * inverse;
                finite += (low - low) + (high - high);
                store_shared(warp_shared + ValueTile::offset(r, n) + lane % 4 * 4, cvt_pair(Element{}, low, high));
            }
            const bool inside = warp_row + r < place.rows();
            suspects[block][half] =
                ballot(inside && !missing && ((finite != 0.0f && is_finite(inverse)) || row.too_coarse()));
            if (inside && args.lse != nullptr && lane % 4 == 0) {
                store_global(lse_of(args, place, warp_row + r), row.lse());
            }
        }
    }
    sync_warp();
    if (args.out_vectors) {
        for (int n = lane; n < ROWS * ValueTile::CHUNKS; n += WARP) {
            int r = n / ValueTile::CHUNKS, chunk = n % ValueTile::CHUNKS;
            if (warp_row + r < place.rows() && chunk * CHUNK_ELEMENTS < args.value_dim) {
                store_global(out_of(args, place, warp_row + r) + chunk * CHUNK,
                             load_shared<Vector16>(warp_shared + ValueTile::offset(r, chunk)));
            }
        }
    } else {
        for (int r = 0; r < ROWS && warp_row + r < place.rows(); ++r) {
            for (int d = lane; d < args.value_dim; d += WARP) {
                uint32 address = warp_shared + ValueTile::offset(r, d / CHUNK_ELEMENTS) + d % CHUNK_ELEMENTS * 2;
                store_global(out_of(args, place, warp_row + r) + 2 * d, load_shared<Element>(address));
            }
        }
    }
    sync_warp();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            while (suspects[block][half] != 0) {
                int quad = find_first_set(suspects[block][half]) / 4;
                suspects[block][half] &= ~(0xfu << (4 * quad));
                const int row = warp_row + 16 * block + 8 * half + quad;
                if constexpr (PAGED) {
                    const int i = place.query(row);
                    careful_row_of_cache(args, place.batch1, place.head / args.group,
                                         place.row(args.q, args.q_strides, row), out_of(args, place, row),
                                         lse_of(args, place, row), mask.first_key(i), mask.end_key(i));
                } else {
                    compute_again(args, mask, place, row);
                }
            }
        }
    }
}

__device__ __forceinline__ Facts gather(const Args& args, const Mask& mask, const Dense& place) {
    const int block_row = place.tile * TILE_Q, last_row = clamp(block_row + TILE_Q, 0, place.rows()) - 1;
    const int warp_row = block_row + warp_index() * ROWS;
    const int top = place.query(warp_row), bottom = place.query(warp_row + ROWS - 1);
    Facts facts;
    const int batch1 = PAGED ? 0 : place.batch1;  // of keys; those of a cache have pages along that axis
    facts.k = args.k + args.k_strides.offset(place.batch0, batch1, place.head / args.group);
    facts.v = args.v + args.v_strides.offset(place.batch0, batch1, place.head / args.group);
    facts.first_key = mask.first_key(place.query(block_row));
    facts.end_key = mask.end_key(place.query(last_row));
    facts.some_first = mask.first_key(top);
    facts.some_end = mask.end_key(bottom);
    facts.all_first = mask.first_key(bottom);
    facts.all_end = mask.end_key(top);
    facts.warp_row = warp_row;
    facts.sequence = place.batch1;
    return facts;
}

// Rows of a cache -------------------------------------------------------------------------------------------------

// What a thread knows of the rows that it looks up: one of each tile.
struct LookUp {
    int page;              // of its row in the tile that was sent for
    bool missing = false;  // whether a page was one that does not exist

    static __device__ __forceinline__ int key(int tile) { return tile * TILE_K + fresh_thread_index(); }
    static __device__ __forceinline__ bool seen(const Facts& facts, int key) {
        return fresh_thread_index() < TILE_K && key >= facts.first_key && key < facts.end_key;
    }

    // Sends for the page of the thread's row. Nothing here waits for it.
    __device__ __forceinline__ void send(const Args& args, const Facts& facts, int tile) {
        const Pages pages = pages_of(args, facts.sequence);
        if (seen(facts, key(tile))) page = pages.number(pages.size.divide(key(tile)));
    }

    // Writes down where the row is. Pages that do not exist are not read.
    __device__ __forceinline__ void keep(const Args& args, const Facts& facts, int tile, uint32 rows) {
        const Pages pages = pages_of(args, facts.sequence);
        CacheRow row = {nullptr, nullptr};
        if (seen(facts, key(tile))) {
            if (pages.exists(page)) {
                row = {pages.row(facts.k, args.k_strides, page, 0, key(tile)),
                       pages.row(facts.v, args.v_strides, page, 0, key(tile))};
            } else {
                missing = true;
            }
        }
        if (fresh_thread_index() < TILE_K) store_shared(rows + fresh_thread_index() * sizeof(CacheRow), row);
    }

    // Whether a thread of the block has missed a page.
    __device__ __forceinline__ bool any_missing(uint32 flags) const {
        const bool mine = any(missing);
        if (lane_index() == 0) store_shared(flags + warp_index() * sizeof(int), static_cast<int>(mine));
        sync_threads();
        return any(lane_index() < WARPS && load_shared<int>(flags + lane_index() % WARPS * sizeof(int)) != 0);
    }
};

// Each warp fetches its own rows of q.
__device__ __forceinline__ void load_queries(const Args& args, const Dense& place, int warp_row, uint32 warp_shared) {
    for (int n = lane_index(); n < ROWS * QueryTile::CHUNKS; n += WARP) {
        const int r = n / QueryTile::CHUNKS, chunk = n % QueryTile::CHUNKS;
        const int bytes = warp_row + r < place.rows() ? clamp(args.head_dim * 2 - chunk * CHUNK, 0, CHUNK) : 0;
        const char* row = place.row(args.q, args.q_strides, warp_row + r);
        cp_async_16(warp_shared + QueryTile::offset(r, chunk), row + chunk * CHUNK, bytes);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_forward(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const uint32 warp_shared = shared + warp_index() * WARP_BYTES;
    auto facts_shared = [=] { return shared + FACTS_START + warp_index() * sizeof(Facts); };
    const Mask mask = locate_mask(args);
    const Scaled score{args.scale_log2};

    int tile, first_tile;
    {
        const Dense place = locate(args);
        const Facts facts = gather(args, mask, place);
        first_tile = facts.first_key / TILE_K;
        tile = facts.first_key < facts.end_key ? (facts.end_key - 1) / TILE_K : first_tile - 1;
        if (lane_index() == 0) store_shared(facts_shared(), facts);
        sync_warp();
        load_queries(args, place, facts.warp_row, warp_shared);
        cp_async_commit_group();
    }

    LookUp look_up;
    auto rows_shared = [=](int t) { return shared + ROWS_START + (t & 1) * TILE_K * sizeof(CacheRow); };
    auto send_for = [&](int t) {
        if constexpr (PAGED) look_up.send(args, load_shared<Facts>(facts_shared()), t);
    };
    auto write_down = [&](int t) {
        if constexpr (PAGED) look_up.keep(args, load_shared<Facts>(facts_shared()), t, rows_shared(t));
    };
    auto load_keys = [&](int t) {
        const uint32 to = shared + KEY_START + t % STAGES * KEY_BYTES;
        using Copy = TileCopy<TILE_K, HEAD_DIM, THREADS>;
        if constexpr (PAGED) {
            auto row = [&](int r) { return load_shared<CacheRow>(rows_shared(t) + r * sizeof(CacheRow)).key; };
            Copy::gather(to, row, args.head_dim);
        } else {
            const Facts facts = load_shared<Facts>(facts_shared());
            Copy::copy(to, facts.k + static_cast<int64>(t) * TILE_K * args.k_strides.row, args.k_strides.row,
                       args.head_dim, facts.first_key - t * TILE_K, facts.end_key - t * TILE_K);
        }
    };
    auto load_values = [&](int t) {
        const uint32 to = shared + VALUE_START + t % STAGES * VALUE_BYTES;
        using Copy = TileCopy<TILE_K, VALUE_DIM, THREADS>;
        if constexpr (PAGED) {
            auto row = [&](int r) { return load_shared<CacheRow>(rows_shared(t) + r * sizeof(CacheRow)).value; };
            Copy::gather(to, row, args.value_dim);
        } else {
            const Facts facts = load_shared<Facts>(facts_shared());
            Copy::copy(to, facts.v + static_cast<int64>(t) * TILE_K * args.v_strides.row, args.v_strides.row,
                       args.value_dim, facts.first_key - t * TILE_K, facts.end_key - t * TILE_K);
        }
    };
    if (tile >= first_tile) {
        if constexpr (PAGED) {
            send_for(tile);
            write_down(tile);
            send_for(tile - 1);
            sync_threads();  // the rows are written down
        }
        load_keys(tile);
        if (STAGES == 2) load_values(tile);
        cp_async_commit_group();
    }

    const uint32 lane_q = lane_of_a<HEAD_DIM>(), lane_k = lane_of_b<HEAD_DIM>(), lane_v = lane_of_a<VALUE_DIM>();
    auto load_query = [&](uint32(&a)[4], int block, int step) {
        ldmatrix_x4(a, warp_shared + QueryTile::step(lane_q, 16 * block, 2 * step));
    };
    Out out = {};
    Rows rows;
    clear(rows);

    for (; tile >= first_tile; --tile) {
        write_down(tile - 1);
        cp_async_wait_group<0>();
        sync_threads();  // what was copied is here for all warps, and all have left what is filled next
        if constexpr (STAGES == 1) {
            load_values(tile);
            cp_async_commit_group();
        } else if (tile > first_tile) {
            load_keys(tile - 1);
            load_values(tile - 1);
            cp_async_commit_group();
        }
        send_for(tile - 2);

        const int key = tile * TILE_K;
        const Facts facts = load_shared<Facts>(facts_shared());
        const bool seen = Mask::SEES_ALL || (key < facts.some_end && key + TILE_K > facts.some_first);
        if (STAGES == 2 && !seen) continue;
        Scores scores;
        if (STAGES == 2 || seen) {
            multiply_transposed<Element, BLOCKS, TILE_K / 8, HEAD_DIM / 16, HEAD_DIM>(
                scores, load_query, shared + KEY_START + tile % STAGES * KEY_BYTES, lane_k);
            if (key < facts.all_first || key + TILE_K > facts.all_end) {
                hide(scores, mask, args.pack, facts.warp_row, key);
            }
            raise(rows, out, scores, score);
        }
        if constexpr (STAGES == 1) {
            cp_async_wait_group<0>();
            sync_threads();  // the values are here, and all have left the keys
            if (tile > first_tile) load_keys(tile - 1);
            cp_async_commit_group();
        }
        if (STAGES == 2 || seen) {
            accumulate(rows, out, scores, score, shared + VALUE_START + tile % STAGES * VALUE_BYTES, lane_v);
        }
    }
    cp_async_wait_group<0>();  // q, where there was no tile: out takes its place
    sync_warp();

    bool missing = false;
    if constexpr (PAGED) missing = look_up.any_missing(shared + MISSING_START);
    store(args, mask, out, rows, warp_shared, missing);
}

}  // namespace cuflash
