// What the kernels of forward over dense arrays are given, and what a block of theirs makes of it.
#pragma once

#include "careful.cuh"
#include "mask.cuh"
#include "place.cuh"
#include "real.cuh"

namespace cuflash {

// Of kernels that need nothing else. Others have structs of their own, with more between these fields.
struct DenseArgs {
    const char *q, *k, *v;
    char* out;
    char* lse;  // null where it is not wanted
    Strides q_strides, k_strides, v_strides, out_strides;
    Schedule schedule;
    int64 first_block;
    int queries, keys, heads, group, pack, head_dim, value_dim;
    int head_blocks, batches1;   // blocks along heads; length of the inner merged axis
    int first_shift, end_shift;  // of the mask
    int out_vectors;             // rows of out can be written by whole vectors
    Real scale_log2;             // scale * log2 e, positive
};

template <typename Args>
__device__ __forceinline__ Dense locate(const Args& args) {
    return Dense(args.schedule, args.first_block + fresh_block_index(), args.head_blocks, args.batches1, args.pack,
                 args.queries, LAST_FIRST);
}

// Key 0 of the block's head, of k or v.
template <typename Args>
__device__ __forceinline__ const char* head_of_keys(const Args& args, const Dense& place, const char* base,
                                                    const Strides& strides) {
    return base + strides.offset(place.batch0, place.batch1, place.head / args.group);
}

// Where out and lse of a packed row go.
template <typename Args>
__device__ __forceinline__ char* out_of(const Args& args, const Dense& place, int row) {
    return const_cast<char*>(place.row(args.out, args.out_strides, row));
}
template <typename Args>
__device__ __forceinline__ char* lse_of(const Args& args, const Dense& place, int row) {
    const int64 head = place.batch() * args.heads + place.head_of(row);
    return args.lse + (head * args.queries + place.query(row)) * sizeof(Real);
}

// A packed row by the careful path.
template <typename Args>
__device__ __forceinline__ void compute_again(const Args& args, const Mask& mask, const Dense& place, int row) {
    const int i = place.query(row);
    careful_row<Element>(args, place.row(args.q, args.q_strides, row),
                         head_of_keys(args, place, args.k, args.k_strides),
                         head_of_keys(args, place, args.v, args.v_strides), out_of(args, place, row),
                         lse_of(args, place, row), mask.first_key(i), mask.end_key(i));
}

}  // namespace cuflash
