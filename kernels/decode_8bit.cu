// out = softmax(scale q k^T) v and lse of the newest rows of sequences whose keys lie in a cache of 8-bit elements,
// int8 or E4M3, on any GPU since sm_80.
//
//   q (sequences, heads, queries, head_dim), k, v (pages, key_heads, page_size, head_dim or value_dim), lengths and a
//   table of pages, k_scale, v_scale (key_heads) or (pages, key_heads, page_size) -> out (sequences, heads, queries,
//   value_dim), lse (sequences, heads, queries); key j is k_scale[j] k[j], value j likewise
//
// Blocks, splits, rings and parts are those of split.cuh. Both products are of float16, which holds every such element:
//
//   scores   q is float16, or a row of bfloat16 is multiplied by a power of two that brings its largest element below
//            2^15; what underflows then is below 2^-39 of that one. The power, scale and a head's k_scale make a row's
//            factor in float32; a slot's k_scale multiplies the column of scores.
//   weights  p = 2^(score - reference), of which the sum is made. What meets v is p v_scale, so where scales are one a
//            slot the reference follows score + log2 v_scale, and p v_scale stays below 2^LAG as p does elsewhere. A
//            head's v_scale multiplies out at the end.
//
// A word of the cache becomes a thread's B operand where it is: ldmatrix brings four columns of a key, or two columns
// of two keys. Its bytes become two pairs, of columns the halves of an operand, of keys parts of two operands. The
// order of columns in the sum over head_dim is free, so q is laid out to suit; that of out is undone where a warp leaves
// its part.
//
// What limits speed: memory and, not far behind it, the instructions that convert: of each word of four elements 3 of
// integers and 2 of float16, or 2 to 3 where the device converts E4M3, beside one product.
#include "careful.cuh"
#include "eight_bit.cuh"
#include "rings.cuh"

namespace cuflash {

static_assert(TILE_K % WARP == 0, "TILE_K: a lane copies every 32nd scale");

constexpr Pairs KEY_PAIRS = CONVERTS ? Pairs::NEIGHBOURS : Pairs::ALTERNATE;

// Scales ----------------------------------------------------------------------------------------------------------

// What is copied with a tile's keys: their scales and those of its values, where there is one a slot.
struct Scales {
    using Key = Lane<1>;  // a lane's scales
    using Found = RowPages<1, 1>;
    const Args& args;
    const Paged& place;
    const Pages& pages;
    const Work& work;

    __device__ __forceinline__ Found look_up(int tile) const {
        Found rows;
        if (args.k_slots || args.v_slots) {
            rows = cuflash::look_up<1>(pages, work, Key{}, tile);
        } else {
#pragma unroll
            for (int n = 0; n < rows.COUNT; ++n) rows.page[n] = -1;
        }
        return rows;
    }
    __device__ __forceinline__ void copy(uint32 to, int tile, const Found& rows) const {
        if (args.k_slots) copy(to, args.k_scale, args.k_scale_strides, tile, rows);
        if (args.v_slots) copy(to + SCALE_BYTES, args.v_scale, args.v_scale_strides, tile, rows);
    }

  private:
    __device__ __forceinline__ void copy(uint32 to, const char* scales, const Strides& strides, int tile,
                                         const Found& rows) const {
        const Key lane;
#pragma unroll
        for (int n = 0; n < lane.ROWS; ++n) {
            const int key = lane.key(tile, n), slot = key - pages.size.divide(key) * pages.size.value;
            const char* from = scales + strides.offset(0, rows.page[n], place.key_head) + slot * strides.row;
            cp_async_4(to + (lane.row + n * WARP) * sizeof(float), from, pages.exists(rows.page[n]));
        }
    }
};

// The one scale of a key head.
__device__ __forceinline__ float head_scale(const char* scales, bool slots, const Strides& strides, int key_head) {
    return scales == nullptr || slots ? 1.0f : load_global<float>(scales + key_head * strides.head);
}

// A thread's scales of a tile: those of keys 8 n + 2 t and 8 n + 2 t + 1, t its place in the quad.
__device__ __forceinline__ Pair scales_of(uint32 scales, int n) {
    return load_shared<Pair>(scales + (8 * n + lane_index() % 4 * 2) * sizeof(float));
}

// Queries ---------------------------------------------------------------------------------------------------------

constexpr float LEAST_FACTOR = 0x1p-126f, MOST_FACTOR = 0x1p127f;

// What a block's rows of q are multiplied with: k_scale's sign goes to them, its size to the rows' factors.
__device__ __forceinline__ float sign_of(float k_scale) {
    const float zero = k_scale - k_scale;  // NaN of NaN and of infinities
    return zero + (k_scale > 0.0f ? 1.0f : k_scale < 0.0f ? -1.0f : 0.0f);
}

// Makes the block's rows of q float16 in place and stores their factors. Columns come as keys do: of every four the
// first pair among the first 8 of 16, the second among the last. A thread has 16 columns of a row.
__device__ __forceinline__ void convert_queries(const Args& args, uint32 queries, uint32 factors, float k_scale) {
    constexpr int THREADS_OF_ROW = HEAD_DIM / 16;
    constexpr bool NEIGHBOURS = KEY_PAIRS == Pairs::NEIGHBOURS;
    for (int n = fresh_thread_index(); n < TILE_Q * THREADS_OF_ROW; n += THREADS) {
        const int r = n / THREADS_OF_ROW, chunk = n % THREADS_OF_ROW * 2;
        const uint32 places[2] = {queries + QueryTile::offset(r, chunk), queries + QueryTile::offset(r, chunk + 1)};
        float x[16], largest = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Vector16 given = load_shared<Vector16>(places[half]);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const auto bits = static_cast<unsigned short>(given.words[e / 2] >> e % 2 * 16);
                x[8 * half + e] = args.bfloat16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
                largest = maximum(largest, absolute(x[8 * half + e]));
            }
        }
#pragma unroll
        for (int lanes = 1; lanes < THREADS_OF_ROW; lanes *= 2) largest = maximum(largest, shuffle_xor(largest, lanes));
        // 2^(exponent - 127) is the largest element's power of two; it becomes 2^14. Factors must stay normal numbers.
        const int exponent = clamp(static_cast<int>(__builtin_bit_cast(uint32, largest) >> 23), 64, 254);
        const float up = args.bfloat16 ? __builtin_bit_cast(float, (127 + 141 - exponent) << 23) : 1.0f;
        const float down = args.bfloat16 ? __builtin_bit_cast(float, (127 - 141 + exponent) << 23) : 1.0f;
        const float sign = sign_of(k_scale);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Vector16 made;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float low = x[4 * w + (NEIGHBOURS ? 2 * half : half)];
                const float high = x[4 * w + (NEIGHBOURS ? 2 * half + 1 : half + 2)];
                made.words[w] = cvt_pair(Float16{}, low * up * sign, high * up * sign);
            }
            store_shared(places[half], made);
        }
        const float factor = args.scale_log2 * (k_scale == 0.0f ? 1.0f : absolute(k_scale)) * down;
        if (chunk == 0) store_shared(factors + r * sizeof(float), minimum(maximum(factor, LEAST_FACTOR), MOST_FACTOR));
    }
}

// Of a thread's rows.
using Factors = float[BLOCKS][2];
__device__ __forceinline__ void load_factors(Factors& factors, uint32 from) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factors[block][half] = load_shared<float>(from + row_of(block, half) * sizeof(float));
        }
    }
}

// Products and softmax ----------------------------------------------------------------------------------------------

// scores = q k^T. A thread's B operand of 16 columns is a word.
__device__ __forceinline__ void multiply_keys(Scores& scores, const RowsOfQ& queries, uint32 keys) {
    const uint32 lane_k = lane_of_b<HEAD_DIM / 2>();  // of pairs of elements
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k += 2) {
        uint32 a[2][BLOCKS][4];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) queries(a[part][block], block, k + part);
        }
#pragma unroll
        for (int n = 0; n < TILE_K / 8; n += 2) {
            uint32 words[4];  // of 8 keys: step k, then k + 1; of the 8 keys below likewise
            ldmatrix_x4(words, keys + KeyTile::step(lane_k, 8 * n, k));
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                uint32 first, second;
                spread<CONVERTS, KEY_PAIRS>(Element{}, words[w], first, second);
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    if (k == 0 && w % 2 == 0) {
                        mma_m16n8k16_first(Float16{}, scores[block][n + w / 2], a[0][block], first, second);
                    } else {
                        mma_m16n8k16(Float16{}, scores[block][n + w / 2], a[w % 2][block], first, second);
                    }
                }
            }
        }
    }
}

// Scores times the scales of their keys.
__device__ __forceinline__ void scale_scores(Scores& scores, uint32 scales) {
#pragma unroll
    for (int n = 0; n < TILE_K / 8; ++n) {
        const Pair scale = scales_of(scales, n);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[block][n][e] *= e % 2 == 0 ? scale.low : scale.high;
        }
    }
}

// Raises the rows' references to what this tile needs. `lead(n)` is added to the scores of keys 8 n + 2 t and
// 8 n + 2 t + 1.
template <typename Lead>
__device__ __forceinline__ void raise(Rows& rows, Out& out, const Scores& scores, const Factors& factors, Lead lead) {
    float top[BLOCKS][2];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) top[block][0] = top[block][1] = -INFINITE;
#pragma unroll
    for (int n = 0; n < TILE_K / 8; ++n) {
        const Pair more = lead(n);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float ahead = e % 2 == 0 ? more.low : more.high;
                const float s = fused_multiply_add(scores[block][n][e], factors[block][e / 2], ahead);
                top[block][e / 2] = maximum(top[block][e / 2], s);
            }
        }
    }
    raise(rows, out, top);
}

// weights = exp(scores - reference), summed, times `scale(n)` of their keys.
template <typename Scale>
__device__ __forceinline__ void weigh(Weights& weights, Rows& rows, const Scores& scores, const Factors& factors,
                                      Scale scale) {
#pragma unroll
    for (int n = 0; n < TILE_K / 8; ++n) {
        const Pair more = scale(n);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                SoftmaxRow<float>& row = rows[block][half];
                const float(&s)[4] = scores[block][n];
                const float low = ex2_approx(fused_multiply_add(s[2 * half], factors[block][half], -row.shift()));
                const float high = ex2_approx(fused_multiply_add(s[2 * half + 1], factors[block][half], -row.shift()));
                row.sum += low + high;
                // A operand: rows g and g + 8 of keys 0-7, then of keys 8-15
                weights[n / 2][block][n % 2 * 2 + half] = cvt_pair(Float16{}, low * more.low, high * more.high);
            }
        }
    }
}

// out += weights v. Of each 16 columns the even ones are one tile of out, the odd ones the next.
__device__ __forceinline__ void multiply_values(Out& out, const Weights& weights, uint32 values) {
    const uint32 lane = lane_of_a<VALUE_DIM / 2>();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int chunk = 0; chunk < ValueTile::CHUNKS; chunk += 2) {
            uint32 words[4];  // of 16 columns: keys 0-7, then 8-15; of the next 16 columns likewise
            ldmatrix_x4_trans(words, values + ValueTile::step(lane, 16 * step, chunk));
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                uint32 even[2], odd[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    spread<CONVERTS, Pairs::ALTERNATE>(Element{}, words[2 * part + half], even[half], odd[half]);
                }
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    const int n = 2 * (chunk + part);
                    mma_m16n8k16(Float16{}, out[block][n], weights[step][block], even[0], even[1]);
                    mma_m16n8k16(Float16{}, out[block][n + 1], weights[step][block], odd[0], odd[1]);
                }
            }
        }
    }
}

// Results -----------------------------------------------------------------------------------------------------------

// A warp's part, of so many rows, goes to shared memory, columns in their order again: a thread has four of every 16.
__device__ __forceinline__ void leave(const Out& out, const Rows& rows, int count, uint32 ring, uint32 rows_shared) {
    const int lane = lane_index();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row_of(block, half);
            if (r >= count) continue;
#pragma unroll
            for (int n = 0; n < VALUE_DIM / 8; n += 2) {
                const float(&even)[4] = out[block][n], (&odd)[4] = out[block][n + 1];
                const Quad quad = {{even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]}};
                store_shared(ring + r * OUT_PITCH + (8 * n + lane % 4 * QUAD) * sizeof(float), quad);
            }
            if (lane % 4 == 0) store_shared(rows_shared + r * sizeof(SoftmaxRow<float>), rows[block][half]);
        }
    }
}

// A row of a cache, as numbers.
struct Scaled8 {
    const char* row;
    float scale;
    __device__ __forceinline__ float operator()(int d) const {
        return element_to_float<CONVERTS>(load_global<Element>(row + d)) * scale;
    }
};

__device__ __forceinline__ uint32 cvt_pair_of(const Args& args, float low, float high) {
    return args.bfloat16 ? cvt_pair(BFloat16{}, low, high) : cvt_pair(Float16{}, low, high);
}

// A row again, by the careful path, with all keys that it sees.
__device__ __noinline__ void careful_decode(const Args& args, int row, char* out, char* lse, int first, int end) {
    const Paged place = locate(args);
    const Pages pages = pages_of(args, place.sequence);
    const char* q = place.row(args.q, args.q_strides, row);
    auto query = [&](int d) { return args.bfloat16 ? RowOf<BFloat16>{q}(d) : RowOf<Float16>{q}(d); };
    auto row_of = [&](const char* base, const Strides& strides, const char* scales, const Strides& steps, int j) {
        const int n = pages.size.divide(j), page = pages.number(n), slot = j - n * pages.size.value;
        auto at = [&](const Strides& step) { return step.offset(0, page, place.key_head) + slot * step.row; };
        return Scaled8{base + at(strides), scales == nullptr ? 1.0f : load_global<float>(scales + at(steps))};
    };
    auto store = [&](int d, float x) {
        store_global(out + 2 * d, static_cast<unsigned short>(cvt_pair_of(args, x, 0.0f)));
    };
    careful_row_of<false>(
        args, query, [&](int j) { return row_of(args.k, args.k_strides, args.k_scale, args.k_scale_strides, j); },
        [&](int j) { return row_of(args.v, args.v_strides, args.v_scale, args.v_scale_strides, j); }, store, lse, first,
        end);
}

// The scales of values may be of any size, and 2 to the 32nd either way is followed: what is beyond that underflows, or
// makes a row that is not finite, which is computed again.
__device__ __forceinline__ float log2_of_scale(float scale) {
    return lg2_approx(minimum(maximum(absolute(scale), 0x1p-32f), 0x1p32f));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuflash_decode_8bit(const __grid_constant__ Args args) {
    const Paged place = locate(args);
    const Mask mask = mask_of(args, place.sequence, args.capacity);
    const Work work = work_of(args, mask, place);
    if (place.split >= work.splits) return;
    begin_late(args, work);
    const Pages pages = pages_of(args, place.sequence);
    const uint32 shared = shared_memory();
    load_queries(args, place, work, shared);
    cp_async_commit_group();
    const float k_scale = head_scale(args.k_scale, args.k_slots, args.k_scale_strides, place.key_head);

    RowsOfQ queries(shared);
    Weights weights;
    Out out;
    Rows rows;
    auto begin = [&] {
        sync_threads();  // the rows of q are here
        convert_queries(args, shared, shared + FACTORS_START, k_scale);
        sync_threads();  // as they are to be
        queries.keep();
        clear(rows);
        clear(out);
    };
    auto with_keys = [&](int key, uint32 stage) {
        Scores scores;
        Factors factors;
        multiply_keys(scores, queries, stage);
        load_factors(factors, shared + FACTORS_START);
        const uint32 scales = stage + KEY_BYTES + VALUE_BYTES;
        if (args.k_slots) scale_scores(scores, scales);
        if (key < work.all_first || key + TILE_K > work.all_end) hide(scores, mask, place, work.first_row, key);
        if (args.v_slots) {
            auto scale = [&](int n) { return scales_of(scales + SCALE_BYTES, n); };
            raise(rows, out, scores, factors, [&](int n) {
                const Pair pair = scale(n);
                return Pair{log2_of_scale(pair.low), log2_of_scale(pair.high)};
            });
            weigh(weights, rows, scores, factors, scale);
        } else {
            raise(rows, out, scores, factors, [](int) { return Pair{0.0f, 0.0f}; });
            weigh(weights, rows, scores, factors, [](int) { return Pair{1.0f, 1.0f}; });
        }
    };
    auto with_values = [&](uint32 stage) { multiply_values(out, weights, stage + KEY_BYTES); };
    const Scales scales{args, place, pages, work};
    const bool missing = stream(args, place, work, pages, shared, scales, begin, with_keys, with_values);

    const float v_scale = head_scale(args.v_scale, args.v_slots, args.v_scale_strides, place.key_head);
    auto write = [&](char* to, int column, const float(&x)[QUAD]) {
        store_halves(args, to, column, x, [&](float low, float high) { return cvt_pair_of(args, low, high); });
    };
    auto careful = [&](int row, char* to, char* lse, int first, int end) {
        careful_decode(args, row, to, lse, first, end);
    };
    auto finish = [&](int r, Part& part) {
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
#pragma unroll
            for (int e = 0; e < QUAD; ++e) part.out[p].values[e] *= v_scale;
        }
        store(args, mask, place, work.first_row + r, part, write, careful);
    };
    cuflash::finish(rows, missing);
    join(args, place, work, shared, [&](uint32 to, uint32 row) { leave(out, rows, work.rows, to, row); }, finish);
}

}  // namespace cuflash
