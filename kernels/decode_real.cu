// out = softmax(scale q k^T) v and lse of the newest rows of sequences whose keys lie in a cache, for float32 and
// float64, by multiply-adds, on any GPU since sm_80.
//
//   q (sequences, heads, queries, head_dim), k, v (pages, key_heads, page_size, head_dim or value_dim), lengths and a
//   table of pages -> out (sequences, heads, queries, value_dim), lse (sequences, heads, queries)
//
// Blocks, splits, rings and parts are those of split.cuh. A lane has a key of a tile, or KEY_LANES neighbours in the
// chunks of its columns have it together, and its scores with all rows. Weights go through shared memory, where lanes
// that have a chunk of columns of v each, and of out for all rows, find those of one key after the other.
//
// A sum over many keys would drift: that over the keys of one tile begins at zero, and is added to out when it is done.
//
// What limits speed: memory. On an H200 it brings a multiprocessor 512 bytes of keys or values in some 24 cycles. Each
// of these 128 numbers of float32 takes a multiply-add a row, of which 128 are a cycle. A chunk of q or of weights,
// which all lanes read at once, takes a cycle of shared memory and serves 128 of them, or 512; what 32 lanes read of k
// or v, each a chunk of its own, takes four and serves all rows. So 8 rows, a tile, take 8 cycles of multiply-adds and
// 12 of shared memory and leave room to wait, where 16 would take 20; more rows than a tile has find keys in the L2
// cache. Tensor cores would add to this the splitting of every number into three.
//
// Of float64 512 bytes are half as many numbers, and half as many multiply-adds are a cycle: 8 again. Chunks serve half
// as many rows or columns, which costs nothing of q, two cycles more of weights, and lanes that have a key together
// take 2 cycles for exponentials, 20 instructions each. Of 256 columns registers hold out of 4 rows, which are a tile.
#include "careful_cache.cuh"
#include "score.cuh"
#include "rings.cuh"

namespace cuflash {

static_assert(WARP % TILE_K == 0, "TILE_K: a lane has a key, or a part of one");
static_assert(TILE_Q == 4 || TILE_Q == 8, "TILE_Q: what the last choice of code is for");

constexpr int KEY_LANES = WARP / TILE_K;                        // lanes that share a key
constexpr int VALUE_LANES = least(WARP, ValueTile::CHUNKS);     // lanes that share a row of values
constexpr int VALUE_CHUNKS = ValueTile::CHUNKS / VALUE_LANES;   // that each has of it
constexpr int VALUE_ROWS = WARP / VALUE_LANES;                  // such rows at a time
constexpr int SPAN = KeyTile::SPAN / CHUNK;                     // chunks of a row that the tile permutes among them
static_assert(VALUE_CHUNKS * VALUE_LANES == ValueTile::CHUNKS, "VALUE_DIM: whole chunks for all lanes");

constexpr int NUMBERS = CHUNK / WIDTH;
struct alignas(CHUNK) Chunk {  // neighbours that travel together
    Real values[NUMBERS];
};

// What a warp knows of ROWS rows: a lane of their sums those over its keys, and of out its columns, over every
// VALUE_ROWS-th key.
template <int ROWS>
struct Sums {
    SoftmaxRow<Real> rows[ROWS];
    Real out[VALUE_CHUNKS][ROWS][NUMBERS];
};

template <int ROWS>
__device__ __forceinline__ void clear(Sums<ROWS>& sums) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        sums.rows[r] = SoftmaxRow<Real>{};
#pragma unroll
        for (int c = 0; c < VALUE_CHUNKS; ++c) {
#pragma unroll
            for (int e = 0; e < NUMBERS; ++e) sums.out[c][r][e] = 0;
        }
    }
}

// scores = q k^T of the lane's key.
template <int ROWS>
__device__ __forceinline__ void multiply_keys(Real (&scores)[ROWS], uint32 queries, uint32 keys, int head_dim) {
    const uint32 part = lane_index() / TILE_K, lane = KeyTile::offset(lane_index() % TILE_K, part);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) scores[r] = 0;
    queries += part * CHUNK;
#pragma unroll 1
    for (int d = 0; d < head_dim; d += SPAN * NUMBERS, keys += SPAN * CHUNK, queries += SPAN * CHUNK) {
#pragma unroll ROWS * WIDTH < 64 ? SPAN : 1  // with 8 rows of float64 no registers are left to read q ahead
        for (int c = 0; c < SPAN; c += KEY_LANES) {
            const Chunk k = load_shared<Chunk>(keys + KeyTile::step(lane, 0, c));
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Chunk q = load_shared<Chunk>(queries + QueryTile::offset(r, c));
#pragma unroll
                for (int e = 0; e < NUMBERS; ++e) scores[r] = fused_multiply_add(q.values[e], k.values[e], scores[r]);
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
__device__ __forceinline__ void hide(Real (&scores)[ROWS], const Mask& mask, const Paged& place, int first_row,
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
__device__ __forceinline__ void raise(Sums<ROWS>& sums, const Real (&scores)[ROWS], const ScaledBy<Real>& score) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        SoftmaxRow<Real>& row = sums.rows[r];
        const Real top = scores[r] * score.factor();
        if (!any(row.outgrown(top))) continue;
        const Real factor = row.raise(maximum_of_row<WARP>(top));
#pragma unroll
        for (int c = 0; c < VALUE_CHUNKS; ++c) {
#pragma unroll
            for (int e = 0; e < NUMBERS; ++e) sums.out[c][r][e] *= factor;
        }
    }
}

// weights = exp(scores - reference), summed and left in shared memory: key by key those of all rows.
template <int ROWS>
__device__ __forceinline__ void weigh(Sums<ROWS>& sums, const Real (&scores)[ROWS],
                                      const ScaledBy<Real>& score, uint32 weights) {
    const bool mine = lane_index() < TILE_K;  // of lanes that share a key, the first
#pragma unroll
    for (int r = 0; r < ROWS; r += NUMBERS) {
        Chunk chunk;
#pragma unroll
        for (int e = 0; e < NUMBERS; ++e) {
            SoftmaxRow<Real>& row = sums.rows[r + e];
            chunk.values[e] = exp2_of(fused_multiply_add(scores[r + e], score.factor(), -row.shift()));
            if (mine) row.sum += chunk.values[e];
        }
        if (mine) store_shared(weights + lane_index() * WEIGHT_PITCH + r * sizeof(Real), chunk);
    }
}

// out += weights v.
template <int ROWS>
__device__ __forceinline__ void multiply_values(Sums<ROWS>& sums, uint32 weights, uint32 values) {
    const int first = lane_index() / VALUE_LANES, chunk = lane_index() % VALUE_LANES;
#pragma unroll
    for (int c = 0; c < VALUE_CHUNKS; ++c) {
        Real part[ROWS][NUMBERS] = {};
#pragma unroll VALUE_CHUNKS == 1 ? TILE_K : 4  // where out takes many registers, values are not read as far ahead
        for (int n = 0; n < TILE_K; n += VALUE_ROWS) {
            const Chunk v = load_shared<Chunk>(values + ValueTile::offset(n + first, chunk + c * VALUE_LANES));
#pragma unroll
            for (int r = 0; r < ROWS; r += NUMBERS) {
                const Chunk w = load_shared<Chunk>(weights + (n + first) * WEIGHT_PITCH + r * sizeof(Real));
#pragma unroll
                for (int row = 0; row < NUMBERS; ++row) {
#pragma unroll
                    for (int e = 0; e < NUMBERS; ++e) {
                        Real& sum = part[r + row][e];
                        sum = fused_multiply_add(w.values[row], v.values[e], sum);
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int e = 0; e < NUMBERS; ++e) sums.out[c][r][e] += part[r][e];
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
        if (lane == 0) store_shared(rows_shared + r * sizeof(SoftmaxRow<Real>), sums.rows[r]);
#pragma unroll
        for (int c = 0; c < VALUE_CHUNKS; ++c) {
            Chunk chunk;
#pragma unroll
            for (int e = 0; e < NUMBERS; ++e) {
                chunk.values[e] = sums.out[c][r][e];
#pragma unroll
                for (int lanes = VALUE_LANES; lanes < WARP; lanes *= 2) {
                    chunk.values[e] += shuffle_xor(chunk.values[e], lanes);
                }
            }
            if (lane < VALUE_LANES) store_shared(ring + r * OUT_PITCH + (c * VALUE_LANES + lane) * CHUNK, chunk);
        }
    }
}

// The work of a block that has no more than ROWS rows.
template <int ROWS>
__device__ __forceinline__ void decode(const Args& args, const Mask& mask, const Paged& place, const Work& work) {
    const Pages pages = pages_of(args, place.sequence);
    const ScaledBy<Real> score{args.scale_log2};
    const uint32 shared = shared_memory();
    const uint32 weights = shared + WEIGHTS_START + warp_index() * WEIGHT_BYTES;
    load_queries(args, place, work, shared);
    cp_async_commit_group();

    Sums<ROWS> sums;
    auto begin = [&] {
        sync_threads();  // the rows of q are here
        clear(sums);
    };
    auto with_keys = [&](int key, uint32 stage) {
        Real scores[ROWS];
        multiply_keys(scores, shared, stage, args.head_dim);
        if (key < work.all_first || key + TILE_K > work.all_end) hide(scores, mask, place, work.first_row, key);
        raise(sums, scores, score);
        weigh(sums, scores, score, weights);
    };
    auto with_values = [&](uint32 stage) { multiply_values(sums, weights, stage + KEY_BYTES); };
    const bool missing = stream(args, place, work, pages, shared, NoScales{}, begin, with_keys, with_values);

    auto write = [&](char* to, int column, const Real(&x)[QUAD]) {
        if (args.out_vectors) {
#pragma unroll
            for (int c = 0; c < QUAD; c += NUMBERS) {
                Chunk chunk;
#pragma unroll
                for (int e = 0; e < NUMBERS; ++e) chunk.values[e] = x[c + e];
                if (column + c < args.value_dim) store_global(to + (column + c) * WIDTH, chunk);
            }
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
    cuflash_decode_real(const __grid_constant__ Args args) {
    const Paged place = locate(args);
    const Mask mask = mask_of(args, place.sequence, args.capacity);
    const Work work = work_of(args, mask, place);
    if (place.split >= work.splits) return;
    begin_late(args, work);
    if (TILE_Q == 4 || work.rows <= 4) {
        decode<4>(args, mask, place, work);
    } else {
        decode<TILE_Q>(args, mask, place, work);
    }
}

}  // namespace cuflash
