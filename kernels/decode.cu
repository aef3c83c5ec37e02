// out = softmax(scale q k^T) v and lse of the newest rows of sequences whose keys lie in a cache, for 16-bit elements,
// on any GPU since sm_80.
//
//   q (sequences, heads, queries, head_dim), k, v (pages, key_heads, page_size, head_dim or value_dim), lengths and a
//   table of pages -> out (sequences, heads, queries, value_dim), lse (sequences, heads, queries)
//
// Blocks, splits, rings and parts are those of split.cuh. Scores and weights are those of forward.cu.
//
// What limits speed: memory. The rings of a multiprocessor's blocks keep some 190 KB on the way to it.
#include "careful_cache.cuh"
#include "score.cuh"
#include "rings.cuh"

namespace cuflash {

// Softmax ---------------------------------------------------------------------------------------------------------

// Raises the rows' references to what this tile needs.
__device__ __forceinline__ void raise(Rows& rows, Out& out, const Scores& scores, const Scaled& score) {
    float top[BLOCKS][2];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = -INFINITE;
#pragma unroll
            for (int n = 0; n < TILE_K / 8; ++n) {
                most = maximum(most, maximum(scores[block][n][2 * half], scores[block][n][2 * half + 1]));
            }
            top[block][half] = most * score.factor();
        }
    }
    raise(rows, out, top);
}

// weights = exp(scores - reference), summed.
__device__ __forceinline__ void weigh(Weights& weights, Rows& rows, const Scores& scores, const Scaled& score) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int part = 0; part < 4; ++part) {  // A operand: rows g and g + 8 of keys 0-7, then of keys 8-15
                SoftmaxRow<float>& row = rows[block][part % 2];
                const float(&s)[4] = scores[block][2 * step + part / 2];
                float low = ex2_approx(fused_multiply_add(s[part % 2 * 2], score.factor(), -row.shift()));
                float high = ex2_approx(fused_multiply_add(s[part % 2 * 2 + 1], score.factor(), -row.shift()));
                row.sum += low + high;
                weights[step][block][part] = cvt_pair(Element{}, low, high);
            }
        }
    }
}

// A warp's part, of so many rows, goes to shared memory.
__device__ __forceinline__ void leave(const Out& out, const Rows& rows, int count, uint32 ring, uint32 rows_shared) {
    const int lane = lane_index();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row_of(block, half);
            if (r >= count) continue;
#pragma unroll
            for (int n = 0; n < VALUE_DIM / 8; ++n) {
                const Pair pair = {out[block][n][2 * half], out[block][n][2 * half + 1]};
                store_shared(ring + r * OUT_PITCH + (8 * n + lane % 4 * 2) * sizeof(float), pair);
            }
            if (lane % 4 == 0) store_shared(rows_shared + r * sizeof(SoftmaxRow<float>), rows[block][half]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) cuflash_decode(const __grid_constant__ Args args) {
    const Paged place = locate(args);
    const Mask mask = mask_of(args, place.sequence, args.capacity);
    const Work work = work_of(args, mask, place);
    if (place.split >= work.splits) return;
    begin_late(args, work);
    const Pages pages = pages_of(args, place.sequence);
    const Scaled score{args.scale_log2};
    const uint32 shared = shared_memory();
    load_queries(args, place, work, shared);
    cp_async_commit_group();

    const uint32 lane_k = lane_of_b<HEAD_DIM>(), lane_v = lane_of_a<VALUE_DIM>();
    RowsOfQ queries(shared);
    Weights weights;
    Out out = {};
    Rows rows;
    auto begin = [&] {
        sync_threads();  // the rows of q are here
        queries.keep();
        clear(rows);
    };
    auto with_keys = [&](int key, uint32 stage) {
        Scores scores;
        multiply_transposed<Element, BLOCKS, TILE_K / 8, HEAD_DIM / 16, HEAD_DIM>(scores, queries, stage, lane_k);
        if (key < work.all_first || key + TILE_K > work.all_end) hide(scores, mask, place, work.first_row, key);
        raise(rows, out, scores, score);
        weigh(weights, rows, scores, score);
    };
    auto with_values = [&](uint32 stage) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            multiply_add<Element, BLOCKS, VALUE_DIM / 8, VALUE_DIM>(out, weights[step], stage + KEY_BYTES, lane_v,
                                                                    16 * step);
        }
    };
    const bool missing = stream(args, place, work, pages, shared, NoScales{}, begin, with_keys, with_values);

    auto write = [&](char* to, int column, const float(&x)[QUAD]) {
        store_halves(args, to, column, x, [](float low, float high) { return cvt_pair(Element{}, low, high); });
    };
    auto careful = [&](int row, char* to, char* lse, int first, int end) {
        careful_decode(args, row, to, lse, first, end);
    };
    finish(rows, missing);
    join(
        args, place, work, shared, [&](uint32 to, uint32 row) { leave(out, rows, work.rows, to, row); },
        [&](int r, Part& part) { store(args, mask, place, work.first_row + r, part, write, careful); });
}

}  // namespace cuflash
