// out = softmax(scale q k^T) v and lse of the newest rows of sequences whose keys lie in a cache, for float32, by
// multiply-adds, on any GPU since sm_80.
//
//   q (sequences, heads, queries, head_dim), k, v (pages, key_heads, page_size, head_dim or value_dim), lengths and a
//   table of pages -> out (sequences, heads, queries, value_dim), lse (sequences, heads, queries)
//
// Blocks, splits, rings and parts are those of split.cuh. A lane has a key of a tile, or KEY_LANES neighbours in the
// quads of its columns have it together, and its scores with all rows. Weights go through shared memory, where lanes
// that have a quad of columns of v each, and of out for all rows, find those of one key after the other.
//
// A sum over many keys would drift: that over the keys of one tile begins at zero, and is added to out when it is done.
//
// What limits speed: memory. On an H200 it brings a multiprocessor 512 bytes of keys or values in some 24 cycles. Each
// of these 128 numbers takes a multiply-add a row, of which 128 are a cycle. A quad of q or of weights, which all lanes
// read at once, takes a cycle of shared memory and serves 128 of them, or 512; what 32 lanes read of k or v, each a
// quad of its own, takes four and serves all rows. So 8 rows, a tile, take 8 cycles of multiply-adds and 12 of shared
// memory and leave room to wait, where 16 would take 20; more rows than a tile has find keys in the L2 cache. Tensor
// cores would add to this the splitting of every number into three.
#include "careful_cache.cuh"
#include "score.cuh"
#include "rings.cuh"

namespace cuflash {

static_assert(WARP % TILE_K == 0, "TILE_K: a lane has a key, or a part of one");
static_assert(TILE_Q == 8, "TILE_Q: what the last choice of code is for");

constexpr int KEY_LANES = WARP / TILE_K;                        // lanes that share a key
constexpr int VALUE_LANES = least(WARP, VALUE_DIM / QUAD);      // lanes that share a row of values
constexpr int VALUE_ROWS = WARP / VALUE_LANES;                  // such rows at a time
constexpr int SPAN = KeyTile::SPAN / CHUNK;                     // quads of a row that the tile permutes among them
static_assert(PIECES * VALUE_LANES * QUAD == VALUE_DIM, "VALUE_DIM: whole quads for all lanes");

// What a warp knows of ROWS rows: a lane of their sums those over its keys, and of out its columns, over every
// VALUE_ROWS-th key.
template <int ROWS>
struct Sums {
    SoftmaxRow<float> rows[ROWS];
    float out[PIECES][ROWS][QUAD];
};

template <int ROWS>
__device__ __forceinline__ void clear(Sums<ROWS>& sums) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        sums.rows[r] = SoftmaxRow<float>{};
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
#pragma unroll
            for (int e = 0; e < QUAD; ++e) sums.out[p][r][e] = 0.0f;
        }
    }
}

// scores = q k^T of the lane's key.
template <int ROWS>
__device__ __forceinline__ void multiply_keys(float (&scores)[ROWS], uint32 queries, uint32 keys, int head_dim) {
    const uint32 part = lane_index() / TILE_K, lane = KeyTile::offset(lane_index() % TILE_K, part);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) scores[r] = 0.0f;
    queries += part * CHUNK;
#pragma unroll 1
    for (int d = 0; d < head_dim; d += SPAN * QUAD, keys += SPAN * CHUNK, queries += SPAN * CHUNK) {
#pragma unroll
        for (int c = 0; c < SPAN; c += KEY_LANES) {
            const Quad k = load_shared<Quad>(keys + KeyTile::step(lane, 0, c));
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Quad q = load_shared<Quad>(queries + QueryTile::offset(r, c));
#pragma unroll
                for (int e = 0; e < QUAD; ++e) scores[r] = fused_multiply_add(q.values[e], k.values[e], scores[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int lanes = TILE_K; lanes < WARP; lanes *= 2) scores[r] += shuffle_xor(scores[r], lanes);
    }
}

// Hidden scores are selected to -inf, whatever they are.
template <int ROWS>
__device__ __forceinline__ void hide(float (&scores)[ROWS], const Mask& mask, const Paged& place, int first_row,
                                     int key) {
    const int j = key + lane_index() % TILE_K;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int i = place.query(first_row + r);
        scores[r] = j >= mask.first_key(i) && j < mask.end_key(i) ? scores[r] : -INFINITE;
    }
}

// Raises the rows' references to what this tile needs; a row of out is rescaled where, rarely, its own has moved.
template <int ROWS>
__device__ __forceinline__ void raise(Sums<ROWS>& sums, const float (&scores)[ROWS], const Scaled& score) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        SoftmaxRow<float>& row = sums.rows[r];
        float top = scores[r] * score.factor();
        if (!any(top > row.reference + row.LAG)) continue;
#pragma unroll
        for (int lanes = 1; lanes < WARP; lanes *= 2) top = maximum(top, shuffle_xor(top, lanes));
        const float factor = row.raise(top);
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
#pragma unroll
            for (int e = 0; e < QUAD; ++e) sums.out[p][r][e] *= factor;
        }
    }
}

// weights = exp(scores - reference), summed and left in shared memory: key by key those of all rows.
template <int ROWS>
__device__ __forceinline__ void weigh(Sums<ROWS>& sums, const float (&scores)[ROWS], const Scaled& score,
                                      uint32 weights) {
    const bool mine = lane_index() < TILE_K;  // of lanes that share a key, the first
#pragma unroll
    for (int r = 0; r < ROWS; r += QUAD) {
        Quad quad;
#pragma unroll
        for (int e = 0; e < QUAD; ++e) {
            SoftmaxRow<float>& row = sums.rows[r + e];
            quad.values[e] = ex2_approx(fused_multiply_add(scores[r + e], score.factor(), -row.shift()));
            if (mine) row.sum += quad.values[e];
        }
        if (mine) store_shared(weights + lane_index() * WEIGHT_PITCH + r * sizeof(float), quad);
    }
}

// out += weights v.
template <int ROWS>
__device__ __forceinline__ void multiply_values(Sums<ROWS>& sums, uint32 weights, uint32 values) {
    const int first = lane_index() / VALUE_LANES, chunk = lane_index() % VALUE_LANES;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        float part[ROWS][QUAD] = {};
#pragma unroll PIECES == 1 ? TILE_K : 4  // where out takes many registers, values are not read as far ahead
        for (int n = 0; n < TILE_K; n += VALUE_ROWS) {
            const Quad v = load_shared<Quad>(values + ValueTile::offset(n + first, chunk + p * VALUE_LANES));
#pragma unroll
            for (int r = 0; r < ROWS; r += QUAD) {
                const Quad w = load_shared<Quad>(weights + (n + first) * WEIGHT_PITCH + r * sizeof(float));
#pragma unroll
                for (int row = 0; row < QUAD; ++row) {
#pragma unroll
                    for (int e = 0; e < QUAD; ++e) {
                        float& sum = part[r + row][e];
                        sum = fused_multiply_add(w.values[row], v.values[e], sum);
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int e = 0; e < QUAD; ++e) sums.out[p][r][e] += part[r][e];
        }
    }
}

// A warp's part goes to shared memory.
template <int ROWS>
__device__ __forceinline__ void leave(Sums<ROWS>& sums, bool missing, uint32 ring, uint32 rows_shared) {
    const int lane = lane_index();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        finish<WARP>(sums.rows[r], missing);
        if (lane == 0) store_shared(rows_shared + r * sizeof(SoftmaxRow<float>), sums.rows[r]);
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            Quad quad;
#pragma unroll
            for (int e = 0; e < QUAD; ++e) {
                quad.values[e] = sums.out[p][r][e];
#pragma unroll
                for (int lanes = VALUE_LANES; lanes < WARP; lanes *= 2) {
                    quad.values[e] += shuffle_xor(quad.values[e], lanes);
                }
            }
            if (lane < VALUE_LANES) store_shared(ring + r * OUT_PITCH + (p * VALUE_LANES + lane) * CHUNK, quad);
        }
    }
}

// The work of a block that has no more than ROWS rows.
template <int ROWS>
__device__ __forceinline__ void decode(const Args& args, const Mask& mask, const Paged& place, const Work& work) {
    const Pages pages = pages_of(args, place.sequence);
    const Scaled score{args.scale_log2};
    const uint32 shared = shared_memory();
    const uint32 ring = shared + RINGS_START + warp_index() * RING_BYTES;
    const uint32 weights = shared + WEIGHTS_START + warp_index() * WEIGHT_BYTES;
    load_queries(args, place, work, shared);
    cp_async_commit_group();

    Sums<ROWS> sums;
    auto begin = [&] {
        sync_threads();  // the rows of q are here
        clear(sums);
    };
    auto with_keys = [&](int key, uint32 stage) {
        float scores[ROWS];
        multiply_keys(scores, shared, stage, args.head_dim);
        if (key < work.all_first || key + TILE_K > work.all_end) hide(scores, mask, place, work.first_row, key);
        raise(sums, scores, score);
        weigh(sums, scores, score, weights);
    };
    auto with_values = [&](uint32 stage) { multiply_values(sums, weights, stage + KEY_BYTES); };
    const bool missing = stream<1>(args, place, work, pages, ring, NoScales{}, begin, with_keys, with_values);

    auto write = [&](char* to, int column, const float(&x)[QUAD]) {
        if (args.out_vectors) {
            if (column < args.value_dim) store_global(to + column * WIDTH, Quad{{x[0], x[1], x[2], x[3]}});
        } else {
#pragma unroll
            for (int e = 0; e < QUAD; ++e) {
                if (column + e < args.value_dim) store_global(to + (column + e) * WIDTH, x[e]);
            }
        }
    };
    auto careful = [&](int row, char* to, char* lse, int first, int end) {
        careful_decode(args, row, to, lse, first, end);
    };
    join(
        args, place, work, shared, [&](uint32 to, uint32 row) { leave(sums, missing, to, row); },
        [&](int r, Part& part) { store(args, mask, place, work.first_row + r, part, write, careful); });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_decode_f32(const __grid_constant__ Args args) {
    const Paged place = locate(args);
    const Mask mask = mask_of(args, place.sequence, args.capacity);
    const Work work = work_of(args, mask, place);
    if (place.split >= work.splits) return;
    if (work.rows <= 4) {
        decode<4>(args, mask, place, work);
    } else {
        decode<TILE_Q>(args, mask, place, work);
    }
}

}  // namespace cuflash
