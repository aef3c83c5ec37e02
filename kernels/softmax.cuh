// The state of the online softmax (Milakov & Gimelshein 2018): one owner of -inf, empty rows and rescaling.
#pragma once

#include "ptx.cuh"

namespace cuflash {

__device__ __forceinline__ float exp2_of(float x) { return ex2_approx(x); }
// 2^x for x below 1023, within 2^-52 of itself; 0 from -1022 down. The power of the fraction comes from a polynomial
// that errs by 2^-54, that of the whole part from its bits: 15 instructions of float64, for exp2 minds more cases.
__device__ __forceinline__ double exp2_of(double x) {
    constexpr double ROUNDER = 6755399441055744.0;  // 1.5 * 2^52: sums with it end in their whole part
    constexpr double TERMS[] = {4.078071929588337e-10,  7.072570412814423e-09,  1.0180647659234139e-07,
                                1.3215442675329823e-06, 1.5252727385193868e-05, 0.0001540353044157213,
                                0.0013333558153439966,  0.009618129107607003,   0.05550410866479039,
                                0.24022650695910097,    0.6931471805599457,     1.0};
    const double rounded = x + ROUNDER, fraction = x - (rounded - ROUNDER);
    double power = TERMS[0];
#pragma unroll
    for (int n = 1; n < 12; ++n) power = fused_multiply_add(power, fraction, TERMS[n]);
    // By a product, for NaN survives it.
    power *= from_words(0, (low_word(rounded) + 1023) << 20);
    // -inf to -1022 by their bits, which costs no float64 and leaves NaN aside.
    return high_word(x) - 0xc08ff000u <= 0xfff00000u - 0xc08ff000u ? 0.0 : power;
}
__device__ __forceinline__ float log2_of(float x) { return lg2_approx(x); }
__device__ __forceinline__ double log2_of(double x) { return log2(x); }

// One row: the reference that exponents are taken against and the sum of the weights, both shared by out and lse, so
// that any reference is exact up to rounding. It is raised only when the maximum has outgrown it by LAG: weights stay
// below 2^LAG, inside every format they are kept in, and almost no tile has to rescale out.
template <typename Real>
struct SoftmaxRow {
    static constexpr Real LAG = 8;
    static constexpr Real COARSE = sizeof(Real) == 4 ? 0x1p26 : 0x1p55;  // rounded to within 4
    static constexpr Real LN_2 = 0.693147180559945309417;

    Real reference = -INFINITE;  // log2 units; -inf until a finite score is seen
    Real sum = 0;                // of this thread's columns until finish()

    // Whether there is no room for a score (log2 units).
    __device__ __forceinline__ bool outgrown(Real score) const { return score > reference + LAG; }
    // Makes room for scores up to `top` (log2 units); returns the factor by which what was summed has to shrink.
    // A row's factor depends on that row alone: other rows of the warp change no bit of it.
    __device__ __forceinline__ Real raise(Real top) {
        if (!outgrown(top)) return 1;
        Real factor = exp2_of(reference - top);
        reference = top;
        sum = finite_sum() * factor;
        return factor;
    }
    // The sum; 0 where it is infinite, of weights against a reference that was too coarse. Once that is outgrown they
    // are nothing, but out, which is not finite, says that the row is to be made again.
    __device__ __forceinline__ Real finite_sum() const { return sum == INFINITE ? Real(0) : sum; }
    // What to subtract from a score: 0 while nothing finite was seen, since -inf - (-inf) is NaN.
    __device__ __forceinline__ Real shift() const { return reference == -INFINITE ? Real(0) : reference; }

    // The reference is a rounded product, and a fused multiply-add sees what was rounded off: beyond this size that is
    // no longer small against 1, and the weights it gives are wrong.
    __device__ __forceinline__ bool too_coarse() const {
        return is_finite(reference) && absolute(reference) >= COARSE;
    }

    // Sum over the THREADS neighbours that share a row.
    template <int THREADS>
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int lanes = 1; lanes < THREADS; lanes *= 2) sum += shuffle_xor(sum, lanes);
    }
    __device__ __forceinline__ Real inverse_sum() const { return sum == 0 ? Real(0) : reciprocal(sum); }
    __device__ __forceinline__ Real lse() const {
        return sum == 0 ? Real(-INFINITE) : (reference + log2_of(sum)) * LN_2;
    }
};

// The largest number of THREADS neighbours that share a row. In an accumulator's 16 x 8 blocks four of them share two,
// and have of each every fourth pair of columns.
template <int THREADS = 4, typename Real>
__device__ __forceinline__ Real maximum_of_row(Real x) {
#pragma unroll
    for (int lanes = 1; lanes < THREADS; lanes *= 2) x = maximum(x, shuffle_xor(x, lanes));
    return x;
}

// Multiplies out, as accumulators have it, by its rows' factors.
template <int BLOCKS, int N>
__device__ __forceinline__ void rescale(float (&out)[BLOCKS][N][4], const float (&factor)[BLOCKS][2]) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) out[block][n][e] *= factor[block][e / 2];
        }
    }
}

}  // namespace cuflash
