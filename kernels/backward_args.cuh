// What the kernels of the backward pass are given, and what lies in the array of turns.
#pragma once

#include "place.cuh"
#include "real.cuh"

namespace cuflash {

struct Args {
    const char *q, *k, *v, *dout, *out, *lse;
    const char* dlse;  // null: 0
    char *dq, *dk, *dv;
    char *row_lse, *row_delta;  // Real of [head of all batches][padded row]
    char* dq_sum;    // Real of [head of all batches][TILE_Q of backward_finish.cu][8 columns][16 rows]: SUM_BYTES each
    char* turns;     // int: ticket, flag, counters
    char* suspects;  // int of each item: whether dk or dv has a number that is not finite
    Strides q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides, dk_strides, dv_strides;
    int queries, keys, heads, group, head_dim, value_dim;
    int batches1;                             // length of the inner merged axis
    int first_shift, end_shift;               // of the mask
    int query_tiles, key_tiles;               // of a head
    int cyclic, passes_log2, section;         // see visits.cuh
    int items;                                // tiles of keys of all heads and batches
    int tile_q, tile_k, columns, parts;       // of the main kernel: its tiles, width of dq_sum (0: there is none),
                                              // counters a query tile
    int clear;                                // dq_sum has to begin as zeros
    int dq_wide, dk_wide, dv_wide;            // Real instead of Element
    int boxes;                                // dk and dv can leave by tensor copies
    Real scale, scale_log2;                   // scale * log2 e
};
template struct ArgsLayout<Args>;

// The accumulators of a warp in dq_sum, 16 rows and 8 columns: a lane's four of 32 bits side by side, so that they are
// moved at once; of 64 bits those of all lanes, so that a warp moves what is in one piece.
constexpr int SUM_BYTES = 128 * sizeof(Real);
constexpr int SUM_LANE = sizeof(Real) == 4 ? 4 * sizeof(Real) : sizeof(Real);        // from a lane to the next
constexpr int SUM_NEXT = sizeof(Real) == 4 ? sizeof(Real) : WARP * sizeof(Real);  // from a lane's number to the next

// Offsets in turns, in bytes. The counters begin in a line of the cache of their own.
constexpr int TICKET = 0;
constexpr int COARSE = 4;  // set where some lse is so large that rounding it may lift a weight above 1
constexpr int COUNTERS = 128;

}  // namespace cuflash
