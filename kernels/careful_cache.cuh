// The careful path of decode, where a cache holds numbers of q's own type.
#pragma once

#include "careful.cuh"
#include "split.cuh"

namespace cuflash {

// A row again, by the careful path, with all keys that it sees.
__device__ __noinline__ void careful_decode(const Args& args, int row, char* out, char* lse, int first, int end) {
    const Paged place = locate(args);
    const Pages pages = pages_of(args, place.sequence);
    auto row_of = [&](const char* base, const Strides& strides, int j) {
        return pages.row(base, strides, pages.number(pages.size.divide(j)), place.key_head, j);
    };
    careful_row_at<Element>(
        args, place.row(args.q, args.q_strides, row), [&](int j) { return row_of(args.k, args.k_strides, j); },
        [&](int j) { return row_of(args.v, args.v_strides, j); }, out, lse, first, end);
}

}  // namespace cuflash
