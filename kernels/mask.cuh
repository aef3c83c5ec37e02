// Masks: which keys a row may see. One run of keys per row, [first_key(i), end_key(i)), clamped to [0, keys], whose
// two ends never move left as i grows. Twins of the classes in cuflash/_masks.py.
#pragma once

#include "ptx.cuh"

namespace cuflash {

struct Full {
    static constexpr bool SEES_ALL = true;  // every row sees every key
    static constexpr bool FROM_FIRST = true;  // every row sees from the first key on
    int keys;
    __device__ Full(int keys, int, int) : keys(keys) {}
    __device__ int first_key(int) const { return 0; }
    __device__ int end_key(int) const { return keys; }
};

struct Causal {
    static constexpr bool SEES_ALL = false;
    static constexpr bool FROM_FIRST = true;
    int keys, end_shift;
    __device__ Causal(int keys, int, int end_shift) : keys(keys), end_shift(end_shift) {}
    __device__ int first_key(int) const { return 0; }
    __device__ int end_key(int i) const { return clamp(i + end_shift, 0, keys); }
};

struct Window {
    static constexpr bool SEES_ALL = false;
    static constexpr bool FROM_FIRST = false;
    int keys, first_shift, end_shift;
    __device__ Window(int keys, int first_shift, int end_shift)
        : keys(keys), first_shift(first_shift), end_shift(end_shift) {}
    __device__ int first_key(int i) const { return clamp(i + first_shift, 0, keys); }
    __device__ int end_key(int i) const { return clamp(i + end_shift, 0, keys); }
    // The rows that see key j, of so many: [first_query(j), end_query(j)), whose ends never move left either.
    __device__ int first_query(int j, int queries) const { return clamp(j - end_shift + 1, 0, queries); }
    __device__ int end_query(int j, int queries) const { return clamp(j - first_shift + 1, 0, queries); }
};

}  // namespace cuflash
