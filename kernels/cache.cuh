// Caches: sequences of lengths that the device alone knows, whose keys lie in pages. What all kernels that read one
// make of its arguments.
#pragma once

#include "mask.cuh"
#include "place.cuh"
#include "ptx.cuh"

namespace cuflash {

// Where a sequence's keys lie.
template <typename Args>
__device__ __forceinline__ Pages pages_of(const Args& args, int sequence) {
    const char* table = args.page_table == nullptr ? nullptr : args.page_table + sequence * args.table_stride;
    return {table, args.table_step, sequence, args.pages, {args.page_size, args.page_multiplier, args.page_shift}};
}

// A sequence's own length.
template <typename Args>
__device__ __forceinline__ int length_of(const Args& args, int sequence, int capacity) {
    return clamp(load_global<int>(args.lengths + sequence * args.length_stride), 0, capacity);
}

// The mask against so many keys.
template <typename Args>
__device__ __forceinline__ Mask mask_against(const Args& args, int keys) {
    const int offset = args.top_left ? 0 : keys - args.queries;
    const int first_shift = offset - args.left, end_shift = offset + args.right + 1;
    return Mask(keys, clamp(first_shift, -args.queries, keys), clamp(end_shift, -args.queries, keys));
}

// The mask against a sequence's own length, which is all that there is room for where none are given.
template <typename Args>
__device__ __forceinline__ Mask mask_of(const Args& args, int sequence, int capacity) {
    const int keys = args.lengths == nullptr ? capacity : uniform(length_of(args, sequence, capacity));
    return mask_against(args, keys);
}

}  // namespace cuflash
