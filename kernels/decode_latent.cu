// out = softmax(scale q k^T) v and lse of the newest rows of sequences whose values are the first columns of the keys,
// for 16-bit elements, on any GPU since sm_80: the form in which multi-head latent attention (DeepSeek-AI 2024) decodes
// once the matrices that make keys and values out of latent vectors are multiplied into q and out.
//
//   q (sequences, heads, queries, head_dim), k (pages, key_heads, page_size, head_dim), v = k[..., :value_dim], lengths
//   and a table of pages -> out (sequences, heads, queries, value_dim), lse (sequences, heads, queries)
//
// Blocks and splits are those of split.cuh. A tile of keys is read once, by all warps together, STAGES - 1 tiles ahead,
// and multiplied twice from where it lies in shared memory. Rows of out are too long for a warp's registers, so warps
// share them out twice:
//
//   scores   a warp owns 16 rows and KEYS keys of the tile; the KEY_WARPS of its rows tell one another their maxima
//   out      a warp owns COLUMNS columns of all rows, and reads all weights, which lie in shared memory as 16 bits
//
// What limits speed: memory, up to some 32 rows; shared memory, which feeds tensor cores, from there on.
#include "careful.cuh"
#include "score.cuh"
#include "split.cuh"

namespace cuflash {

static_assert(STAGES > 1, "STAGES: one to copy to while another is read");
static_assert(VALUE_DIM <= HEAD_DIM, "VALUE_DIM: values are columns of keys");
static_assert(WARPS % BLOCKS == 0, "WARPS: as many for each 16 rows");

constexpr int KEY_WARPS = WARPS / BLOCKS;   // that share 16 rows
constexpr int KEYS = TILE_K / KEY_WARPS;    // of a tile, whose scores a warp makes
constexpr int COLUMNS = VALUE_DIM / WARPS;  // of out, that a warp owns
static_assert(KEYS % 8 == 0 && (KEYS == 8 || KEYS % 16 == 0), "TILE_K: a warp has 8 keys, or 16 and a multiple");
static_assert(COLUMNS % CHUNK_ELEMENTS == 0 && COLUMNS / CHUNK_ELEMENTS % 8 == 0, "WARPS: whole spans of columns each");

using KeyTile = Tile<HEAD_DIM>;
using WeightTile = Tile<TILE_K>;
using Copy = TileCopy<TILE_K, HEAD_DIM, THREADS>;
constexpr int KEY_BYTES = TILE_K * KeyTile::PITCH;
constexpr int COPIED = TILE_K / Copy::ROW_STEP;  // rows of a tile that a thread copies chunks of

struct Shared {
    char queries[QUERY_BYTES];  // at the end, with the stages behind it: rows of out
    char stages[STAGES][KEY_BYTES];
    char weights[TILE_Q * WeightTile::PITCH];
    SoftmaxRow<float> rows[KEY_WARPS][TILE_Q];  // at the end; each over its warp's keys
    float tops[KEY_WARPS][TILE_Q];              // of a tile: largest scores of each warp's keys
    float factors[TILE_Q];                      // by which out has to shrink
    int missing[WARPS];                         // whether a page that a warp has looked up does not exist
    alignas(16) int last;                       // whether this block is the last of its rows
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: what the struct takes");
constexpr int STAGES_START = OFFSET_OF(Shared, stages), WEIGHTS_START = OFFSET_OF(Shared, weights);
constexpr int ROWS_START = OFFSET_OF(Shared, rows), TOPS_START = OFFSET_OF(Shared, tops);
constexpr int FACTORS_START = OFFSET_OF(Shared, factors), MISSING_START = OFFSET_OF(Shared, missing);
constexpr int LAST_START = OFFSET_OF(Shared, last);

// Rows of out lie so far apart that lanes which write together, 8 bytes each, meet no bank twice.
constexpr int OUT_PITCH = (VALUE_DIM + 8) * sizeof(float);
static_assert(TILE_Q * OUT_PITCH <= QUERY_BYTES + STAGES * KEY_BYTES, "STAGES: room for rows of out");

using Scores = float[1][KEYS / 8][4];
using Out = float[BLOCKS][COLUMNS / 8][4];
using Rows = SoftmaxRow<float>[2];  // a thread's rows g and g + 8 of its warp's 16

// Which part of the scores a warp owns.
__device__ __forceinline__ int block_of_warp() { return warp_index() / KEY_WARPS; }  // of 16 rows
__device__ __forceinline__ int share_of_warp() { return warp_index() % KEY_WARPS; }  // of the keys

// Copies ----------------------------------------------------------------------------------------------------------

// The pages of the rows of a tile that a thread copies, -1 where nothing is to be read.
struct Found {
    int page[COPIED];
};

__device__ __forceinline__ int copied_key(int tile, int n) {
    return tile * TILE_K + fresh_thread_index() / Copy::LANES + n * Copy::ROW_STEP;
}

// Sends for the pages of a tile. Nothing here waits for them.
__device__ __forceinline__ Found look_up(const Pages& pages, const Work& work, int tile) {
    Found found;
#pragma unroll
    for (int n = 0; n < COPIED; ++n) {
        const int key = copied_key(tile, n);
        const bool seen = key >= work.first_key && key < work.end_key;
        found.page[n] = seen ? pages.number(pages.size.divide(key)) : -1;
    }
    return found;
}

// Copies a tile of keys; what is not to be read becomes zeros, and pages that do not exist are `missing`.
__device__ __forceinline__ void load_keys(const Args& args, const Paged& place, const Pages& pages, const Work& work,
                                          const Found& found, int tile, uint32 stage, bool& missing) {
    int n = 0;
    auto row = [&](int) -> const char* {
        const int key = copied_key(tile, n), page = found.page[n];
        n += 1;
        const bool exists = pages.exists(page);
        missing |= !exists && key >= work.first_key && key < work.end_key;
        return exists ? pages.row(args.k, args.k_strides, page, place.key_head, key) : nullptr;
    };
    Copy::gather(stage, row, args.head_dim);
}

// Scores ----------------------------------------------------------------------------------------------------------

using RowsOfQ = Queries<1, QUERY_STEPS>;  // the warp's

// The warp's rows times its keys.
__device__ __forceinline__ void multiply_keys(Scores& scores, const RowsOfQ& queries, uint32 keys) {
    if constexpr (KEYS == 8) {  // 32 columns of 8 keys a load; two sums, for products to wait for one another less
        const uint32 lane = lane_index(), lane_k = KeyTile::offset(lane % 8, lane / 8);
        float odd[4] = {};
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 32; ++k) {
            uint32 a[2][4], b[4];
            queries(a[0], 0, 2 * k);
            queries(a[1], 0, 2 * k + 1);
            ldmatrix_x4(b, keys + KeyTile::step(lane_k, 0, 4 * k));
            if (k == 0) {
                mma_m16n8k16_first(Element{}, scores[0][0], a[0], b[0], b[1]);
            } else {
                mma_m16n8k16(Element{}, scores[0][0], a[0], b[0], b[1]);
            }
            mma_m16n8k16(Element{}, odd, a[1], b[2], b[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[0][0][e] += odd[e];
    } else {
        multiply_transposed<Element, 1, KEYS / 8, HEAD_DIM / 16, HEAD_DIM>(scores, queries, keys,
                                                                           lane_of_b<HEAD_DIM>());
    }
}

// Hidden scores are selected to -inf, whatever they are. `key` is the first of the warp's.
__device__ __forceinline__ void hide(Scores& scores, const Mask& mask, const Paged& place, int first_row, int key) {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = place.query(first_row + row_of(block_of_warp(), half));
        const int first = mask.first_key(i) - key, end = mask.end_key(i) - key;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
                const int j = 8 * n + lane % 4 * 2 + e % 2;
                scores[0][n][e] = j >= first && j < end ? scores[0][n][e] : -INFINITE;
            }
        }
    }
}

// Softmax ---------------------------------------------------------------------------------------------------------

// The largest scores of the warp's keys, where all warps of its rows find them.
__device__ __forceinline__ void tell_tops(const Scores& scores, uint32 shared) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = -INFINITE;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
            top = maximum(top, maximum(scores[0][n][2 * half], scores[0][n][2 * half + 1]));
        }
        top = maximum_of_row(top);
        const int r = share_of_warp() * TILE_Q + row_of(block_of_warp(), half);
        if (lane_index() % 4 == 0) store_shared(shared + TOPS_START + r * sizeof(float), top);
    }
}

// Raises the rows' references to what the tile needs, alike in all warps of these rows; one of them tells all others
// by how much out has to shrink. Then weights = exp(scores - reference), summed and left to shared memory.
__device__ __forceinline__ void weigh(Rows& rows, const Scores& scores, const Scaled& score, uint32 shared) {
    const int block = block_of_warp(), share = share_of_warp(), lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row_of(block, half);
        float top = -INFINITE;
#pragma unroll
        for (int n = 0; n < KEY_WARPS; ++n) {
            top = maximum(top, load_shared<float>(shared + TOPS_START + (n * TILE_Q + r) * sizeof(float)));
        }
        const float factor = rows[half].raise(top * score.factor());
        if (share == 0 && lane % 4 == 0) store_shared(shared + FACTORS_START + r * sizeof(float), factor);
    }
    const uint32 weights = shared + WEIGHTS_START + 16 * block * WeightTile::PITCH;
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
        const uint32 to = weights + lane_of_pair<TILE_K>(share * (KEYS / 8) + n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            SoftmaxRow<float>& row = rows[half];
            const float* s = scores[0][n] + 2 * half;
            const float low = ex2_approx(fused_multiply_add(s[0], score.factor(), -row.shift()));
            const float high = ex2_approx(fused_multiply_add(s[1], score.factor(), -row.shift()));
            row.sum += low + high;
            store_shared(to + 8 * half * WeightTile::PITCH, cvt_pair(Element{}, low, high));
        }
    }
}

// out = factors out + weights values, of the warp's columns.
__device__ __forceinline__ void accumulate(Out& out, uint32 shared, uint32 stage) {
    float factor[BLOCKS][2];
    bool moved = false;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factor[block][half] = load_shared<float>(shared + FACTORS_START + row_of(block, half) * sizeof(float));
            moved |= factor[block][half] != 1.0f;
        }
    }
    if (any(moved)) rescale(out, factor);
    const uint32 lane_w = lane_of_a<TILE_K>();
    const uint32 lane_v = lane_of_a<HEAD_DIM>(warp_index() * (COLUMNS / CHUNK_ELEMENTS));
#pragma unroll
    for (int step = 0; step < TILE_K / 16; ++step) {
        uint32 weights[BLOCKS][4];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            ldmatrix_x4(weights[block], shared + WEIGHTS_START + WeightTile::step(lane_w, 16 * block, 2 * step));
        }
        multiply_add<Element, BLOCKS, COLUMNS / 8, HEAD_DIM>(out, weights, stage, lane_v, 16 * step);
    }
}

// Parts -----------------------------------------------------------------------------------------------------------

// The warp's columns of out and its rows' sums go to shared memory.
__device__ __forceinline__ void leave(const Out& out, Rows& rows, bool missing, uint32 shared) {
    const int lane = lane_index();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32 row = shared + row_of(block, half) * OUT_PITCH + warp_index() * COLUMNS * sizeof(float);
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n) {
                const Pair pair = {out[block][n][2 * half], out[block][n][2 * half + 1]};
                store_shared(row + (8 * n + lane % 4 * 2) * sizeof(float), pair);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows[half].finish<4>();
        const int r = share_of_warp() * TILE_Q + row_of(block_of_warp(), half);
        if (lane % 4 == 0) store_shared(shared + ROWS_START + r * sizeof(SoftmaxRow<float>), rows[half]);
    }
    missing = any(missing);
    if (lane == 0) store_shared(shared + MISSING_START + warp_index() * sizeof(int), static_cast<int>(missing));
}

// Row r of what the block's keys come to; NaN where a page is missing, and so is all that it becomes part of.
__device__ __forceinline__ Part sum_of_warps(uint32 shared, int r) {
    SoftmaxRow<float> row = load_shared<SoftmaxRow<float>>(shared + ROWS_START + r * sizeof(SoftmaxRow<float>));
#pragma unroll
    for (int n = 1; n < KEY_WARPS; ++n) {
        row.sum += load_shared<SoftmaxRow<float>>(shared + ROWS_START + (n * TILE_Q + r) * sizeof(row)).sum;
    }
    bool missing = false;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        missing |= load_shared<int>(shared + MISSING_START + warp * sizeof(int)) != 0;
    }
    if (missing) row.sum = INFINITE - INFINITE;
    Part part = {row};
    static_assert(VALUE_DIM % (QUAD * WARP) == 0, "VALUE_DIM: all lanes have a quad of every piece");
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        part.out[p] = load_shared<Quad>(shared + r * OUT_PITCH + column_of(p) * sizeof(float));
    }
    return part;
}

// A row again, by the careful path, with all keys that it sees.
__device__ __noinline__ void careful_decode(const Args& args, int row, char* out, char* lse, int first, int end) {
    const Paged place = locate(args);
    const Pages pages = pages_of(args, place.sequence);
    auto key = [&](int j) {
        return pages.row(args.k, args.k_strides, pages.number(pages.size.divide(j)), place.key_head, j);
    };
    careful_row_at<Element>(args, place.row(args.q, args.q_strides, row), key, key, out, lse, first, end);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_decode_latent(const __grid_constant__ Args args) {
    const Paged place = locate(args);
    const Mask mask = mask_of(args, place.sequence, args.capacity);
    const Work work = work_of(args, mask, place);
    if (place.split >= work.splits) return;
    const Pages pages = pages_of(args, place.sequence);
    const Scaled score{args.scale_log2};
    const uint32 shared = shared_memory();

    // Tile n of the split goes through stage n % STAGES. Every step commits a group, be there something in it or not.
    bool missing = refused(args, place);
    auto stage_at = [&](int stage) { return shared + STAGES_START + stage * KEY_BYTES; };
    auto load = [&](int tile, int stage, const Found& found) {
        if (tile < work.end_tile) load_keys(args, place, pages, work, found, tile, stage_at(stage), missing);
        cp_async_commit_group();
    };
    load_queries(args, place, work, shared);  // in the first group
#pragma unroll
    for (int n = 0; n < STAGES - 1; ++n) load(work.first_tile + n, n, look_up(pages, work, work.first_tile + n));
    Found next = look_up(pages, work, work.first_tile + STAGES - 1);

    cp_async_wait_group<STAGES - 2>();
    sync_threads();  // the rows of q are here
    RowsOfQ queries(shared + 16 * block_of_warp() * QueryTile::PITCH);
    queries.keep();

    Scores scores;
    Out out = {};
    Rows rows = {SoftmaxRow<float>{}, SoftmaxRow<float>{}};
    int stage = 0, before = STAGES - 1;  // of this tile and of the one before
#pragma unroll 1
    for (int tile = work.first_tile; tile < work.end_tile; ++tile) {
        cp_async_wait_group<STAGES - 2>();
        sync_threads();  // the tile is here for all, and all have left the one before
        load(tile + STAGES - 1, before, next);
        next = look_up(pages, work, tile + STAGES);

        const int own = share_of_warp() * KEYS, key = tile * TILE_K + own;
        multiply_keys(scores, queries, stage_at(stage) + own * KeyTile::PITCH);
        if (key < work.all_first || key + KEYS > work.all_end) hide(scores, mask, place, work.first_row, key);
        tell_tops(scores, shared);
        sync_threads();  // all maxima are here
        weigh(rows, scores, score, shared);
        sync_threads();  // all weights are here
        accumulate(out, shared, stage_at(stage));
        before = stage;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    cp_async_wait_group<0>();
    sync_threads();  // all have left queries and stages
    leave(out, rows, missing, shared);
    sync_threads();

    auto write = [&](char* to, int column, const float(&x)[QUAD]) {
        store_halves(args, to, column, x, [](float low, float high) { return cvt_pair(Element{}, low, high); });
    };
    auto careful = [&](int row, char* to, char* lse, int first, int end) {
        careful_decode(args, row, to, lse, first, end);
    };
    conclude(
        args, place, work, shared + LAST_START, [&](int r) { return sum_of_warps(shared, r); },
        [&](int r, Part& part) { store(args, mask, place, work.first_row + r, part, write, careful); });
}

}  // namespace cuflash
