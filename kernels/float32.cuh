// float32 on tensor cores: each number is the sum of three bfloat16, each product that of the six largest of nine.
// (With two PARTS, where TF32 will do: of the three largest of four, within 2^-15.)
//
// x = x0 + x1 + x2, each the rounding of what is left: 8 bits of the 24 at a time, so nothing is left in the end but
// below 2^-126, where bfloat16 ends too. Of the products x0 y0, x0 y1, ... those left out, x1 y2 + x2 y1 + x2 y2, are
// together below 2^-24 |x y|, for |x1| <= 2^-8 |x| and |x2| <= 2^-17 |x|. (Parts that are cut instead of rounded would
// be twice and four times as large, and the six products eight times as wrong.)
//
// Tensor cores cut what they add where it is small against the sum, by 2^-23 of it: the five small products, less
// than 2^-6 of the large one, have a sum of their own, which is added at the end by an addition that rounds.
#pragma once

#include "ptx.cuh"
#include "tile.cuh"

namespace cuflash {

// Numbers whose rounding is beyond bfloat16 get its largest as their first part; the others hold the rest. An infinity
// leaves itself in its second part and NaN in its third, NaN NaN in its second: neither goes through a product
// unnoticed.
__device__ __forceinline__ float limited(float x) {
    constexpr float LARGEST = __builtin_bit_cast(float, 0x7f7f0000);
    return minimum(maximum(x, -LARGEST), LARGEST);
}

// The parts of two neighbours, each pair in a register. LIMIT: whether they may be beyond bfloat16.
template <bool LIMIT>
__device__ __forceinline__ void split(uint32 (&parts)[PARTS], float low, float high) {
    parts[0] = LIMIT ? cvt_pair(BFloat16{}, limited(low), limited(high)) : cvt_pair(BFloat16{}, low, high);
#pragma unroll
    for (int p = 1; p < PARTS; ++p) {
        low -= to_float(BFloat16{static_cast<unsigned short>(parts[p - 1])});
        high -= to_float(BFloat16{static_cast<unsigned short>(parts[p - 1] >> 16)});
        parts[p] = cvt_pair(BFloat16{}, low, high);
    }
}

using Parts = uint32[PARTS][4];  // registers of an operand of 16 x 16, for each part

// sum += the products of a, 16 x 16, and b, 16 x 8, whose registers begin at `at`; or, if `first`, = instead. The small
// ones, least first:
__device__ __forceinline__ void multiply_small(float (&sum)[4], const Parts& a, const Parts& b, int at, bool first) {
#pragma unroll
    for (int total = PARTS - 1; total > 0; --total) {
#pragma unroll
        for (int i = 0; i <= total; ++i) {
            if (first && i == 0 && total == PARTS - 1) {
                mma_m16n8k16_first(BFloat16{}, sum, a[i], b[total - i][at], b[total - i][at + 1]);
            } else {
                mma_m16n8k16(BFloat16{}, sum, a[i], b[total - i][at], b[total - i][at + 1]);
            }
        }
    }
}
// The large one:
__device__ __forceinline__ void multiply_large(float (&sum)[4], const Parts& a, const Parts& b, int at, bool first) {
    if (first) {
        mma_m16n8k16_first(BFloat16{}, sum, a[0], b[0][at], b[0][at + 1]);
    } else {
        mma_m16n8k16(BFloat16{}, sum, a[0], b[0][at], b[0][at + 1]);
    }
}

// Tiles of the parts of ROWS x COLUMNS numbers, one behind the other.
template <int ROWS, int COLUMNS>
struct SplitTile {
    using Shape = Tile<COLUMNS>;
    static constexpr int PART_BYTES = ROWS * Shape::PITCH;
    static constexpr int BYTES = PARTS * PART_BYTES;

    // Four neighbours of a row, the `quad`-th.
    static __device__ __forceinline__ void store(uint32 base, int row, int quad, const float (&x)[4]) {
        uint32 low[PARTS], high[PARTS];
        split<true>(low, x[0], x[1]);
        split<true>(high, x[2], x[3]);
        const uint32 address = base + Shape::offset(row, quad / 2) + quad % 2 * 8;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) store_shared(address + p * PART_BYTES, Vector8{{low[p], high[p]}});
    }
};

// scores (16 x 8 N) = a b^T, for 16 rows of a tile A and 8 N of a tile B, by spans of a row that the swizzle permutes,
// SPANS at a time where they come out even; those beyond `columns` are left out. (Written out without a branch between,
// the compiler would read ahead into more registers than there are.) A lane finds the first chunk that it reads of each
// at `lane`, from `base` on, which is the same for all lanes.
template <typename A, typename B, int SPANS, int N>
__device__ __forceinline__ void multiply_rows(float (&scores)[N][4], uint32 lane_a, uint32 lane_b, int columns,
                                              uint32 base_a = 0, uint32 base_b = 0) {
    using Shape = typename A::Shape;
    float small[N][4] = {};
#pragma unroll
    for (float(&each)[4] : scores) each[0] = each[1] = each[2] = each[3] = 0.0f;
    constexpr int BYTES = Shape::PITCH % (SPANS * Shape::SPAN) == 0 ? SPANS * Shape::SPAN : Shape::SPAN;
#pragma unroll 1
    for (int span = 0; span < 2 * columns; span += BYTES) {
#pragma unroll
        for (int step = 0; step < BYTES / 32; ++step) {
            Parts a;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                ldmatrix_x4(a[p], base_a + span + p * A::PART_BYTES + Shape::step(lane_a, 0, 2 * step));
            }
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                Parts b;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    ldmatrix_x4(b[p], base_b + span + p * B::PART_BYTES + Shape::step(lane_b, 8 * n, 2 * step));
                }
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    multiply_small(small[n + m], a, b, 2 * m, false);
                    multiply_large(scores[n + m], a, b, 2 * m, false);
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[n][e] += small[n][e];
    }
}

// sum (16 x 8 N) = a b, for A operands of 16 x 16 STEPS, `load_a(a, step)` each, and columns, 16 every STRIDE chunks,
// of the rows of a tile B that begin where `lane` is.
template <typename B, int STEPS, int STRIDE, int N, typename LoadA>
__device__ __forceinline__ void multiply_columns(float (&sum)[N][4], LoadA load_a, uint32 lane) {
    constexpr bool ONE_STEP = STEPS == 1;  // all small products come before all large ones: one sum will do
    float small[N][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        Parts a;
        load_a(a, step);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            Parts b;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                ldmatrix_x4_trans(b[p], p * B::PART_BYTES + B::Shape::step(lane, 16 * step, n / 2 * STRIDE));
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                multiply_small(small[n + m], a, b, 2 * m, step == 0);
                multiply_large(ONE_STEP ? small[n + m] : sum[n + m], a, b, 2 * m, step == 0 && !ONE_STEP);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] = ONE_STEP ? small[n][e] : sum[n][e] + small[n][e];
    }
}

// Four floats from `left` before the end of a row on; what lies behind it, or is not `inside`, is not read and is 0.
// WHOLE: rows are of whole fours.
template <bool WHOLE>
__device__ __forceinline__ void load_four(float (&x)[4], const char* address, int left, bool inside) {
    if constexpr (WHOLE) {
        const Vector16 loaded = load_global_16(address, inside && left > 0);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = __builtin_bit_cast(float, loaded.words[e]);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = inside && e < left ? load_global<float>(address + e * sizeof(float)) : 0.0f;
    }
}

// ROWS rows of an operand on their way into a tile of TILE_ROWS, THREADS together: read to registers, and later, when
// there is room, split and stored. Outside rows [first, end) all is 0.
template <int ROWS, int TILE_ROWS, int COLUMNS, int THREADS>
struct SplitCopy {
    static constexpr int QUADS = COLUMNS / 4;
    // Threads along a row: a power of two that divides it, small enough for steps of 8 rows, which keep the swizzle.
    static constexpr int DIVISOR = QUADS & -QUADS;
    static constexpr int LANES = DIVISOR < THREADS / 8 ? DIVISOR : THREADS / 8;
    static constexpr int ROW_STEP = THREADS / LANES;
    static constexpr int DOWN = ROWS / ROW_STEP, ACROSS = QUADS / LANES;
    static_assert(ROWS % ROW_STEP == 0, "ROWS: whole rounds of the threads that copy");

    float numbers[DOWN][ACROSS][4];

    template <bool WHOLE>
    __device__ __forceinline__ void load_all(const char* source, int64 stride, int columns, int first, int end) {
        const int thread = fresh_thread_index(), row = thread / LANES, quad = thread % LANES;
        const char* address = source + row * stride + quad * CHUNK;
#pragma unroll
        for (int n = 0; n < DOWN; ++n, address += ROW_STEP * stride) {
            const int r = row + n * ROW_STEP;
#pragma unroll
            for (int c = 0; c < ACROSS; ++c) {
                const int left = columns - 4 * (quad + c * LANES);
                load_four<WHOLE>(numbers[n][c], address + c * LANES * CHUNK, left, r >= first && r < end);
            }
        }
    }
    // `source` is the address of the first row.
    __device__ __forceinline__ void load(const char* source, int64 stride, int columns, int first, int end) {
        if (columns % 4 == 0) {
            load_all<true>(source, stride, columns, first, end);
        } else {
            load_all<false>(source, stride, columns, first, end);
        }
    }
    __device__ __forceinline__ void store(uint32 base, int first_row = 0) const {
        const int thread = fresh_thread_index(), row = first_row + thread / LANES, quad = thread % LANES;
#pragma unroll
        for (int n = 0; n < DOWN; ++n) {
#pragma unroll
            for (int c = 0; c < ACROSS; ++c) {
                SplitTile<TILE_ROWS, COLUMNS>::store(base, row + n * ROW_STEP, quad + c * LANES, numbers[n][c]);
            }
        }
    }
};

}  // namespace cuflash
