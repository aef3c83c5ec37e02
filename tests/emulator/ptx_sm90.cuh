// The instructions of kernels/ptx_sm90.cuh, by the same names, on the emulator's units. As in ptx.cuh, every function
// that can fail takes one more parameter: the place in the kernel that it is called from.
#pragma once

#include <hopper.h>

#include "ptx.cuh"

namespace cuflash {

constexpr int WARPGROUP = 4 * WARP;

template <int REGISTERS>
void setmaxnreg_inc(Site here = HERE) {
    emulator::set_registers(REGISTERS, true, here);
}
template <int REGISTERS>
void setmaxnreg_dec(Site here = HERE) {
    emulator::set_registers(REGISTERS, false, here);
}

// Asynchronous barriers in shared memory -----------------------------------------------------------------------------

inline void mbarrier_init(uint32 barrier, int count, Site here = HERE) { emulator::initialise_barrier(barrier, count, here); }
inline void fence_mbarrier_init() { emulator::own_fences().barriers.add(); }
inline void mbarrier_arrive(uint32 barrier, Site here = HERE) { emulator::arrive(barrier, 0, here); }
inline void mbarrier_arrive_expect_tx(uint32 barrier, uint32 bytes, Site here = HERE) {
    emulator::arrive(barrier, bytes, here);
}
inline void mbarrier_wait(uint32 barrier, uint32 parity, Site here = HERE) { emulator::wait_for_barrier(barrier, parity, here); }

// Copies of tensor tiles ---------------------------------------------------------------------------------------------

struct alignas(128) TensorMap {
    uint64 words[16];
};

struct Corner {
    int column, axis1, axis2, axis3, axis4;
};

constexpr uint64 EVICT_FIRST = 0x12f0000000000000, EVICT_LAST = 0x14f0000000000000;

inline emulator::Box box_at(const TensorMap& map, uint32 shared, Corner c, Site here) {
    return emulator::Box(&map, shared, {c.column, c.axis1, c.axis2, c.axis3, c.axis4}, here);
}
inline void cp_async_bulk_tensor_load(uint32 shared, const TensorMap& map, uint32 barrier, Corner corner, uint64,
                                      Site here = HERE) {
    emulator::load_bulk(box_at(map, shared, corner, here), barrier);
}
inline void cp_async_bulk_tensor_store(const TensorMap& map, uint32 shared, Corner corner, Site here = HERE) {
    emulator::store_bulk(box_at(map, shared, corner, here));
}
inline void cp_async_bulk_prefetch_tensor(const TensorMap& map, Corner corner, Site here = HERE) {
    box_at(map, 0, corner, here);
}
inline void prefetch_tensormap(const TensorMap& map, Site here = HERE) { box_at(map, 0, {}, here); }
inline void cp_async_bulk_load(uint32 shared, const char* global, uint32 bytes, uint32 barrier, Site here = HERE) {
    emulator::load_bulk(emulator::Line(global, shared, bytes, emulator::READS, false, here), barrier);
}
inline void cp_async_bulk_store(char* global, uint32 shared, uint32 bytes, Site here = HERE) {
    emulator::store_bulk(emulator::Line(global, shared, bytes, emulator::WRITES, false, here));
}
inline void cp_reduce_async_bulk_add(char* global, uint32 shared, uint32 bytes, Site here = HERE) {
    emulator::store_bulk(emulator::Line(global, shared, bytes, emulator::WRITES, true, here));
}
inline void cp_async_bulk_commit_group() { emulator::commit_stores(); }
template <int PENDING>
void cp_async_bulk_wait_group_read(Site here = HERE) {
    emulator::wait_for_stores(PENDING, false, "cp_async_bulk_wait_group_read", here);
}
template <int PENDING>
void cp_async_bulk_wait_group(Site here = HERE) {
    emulator::wait_for_stores(PENDING, true, "cp_async_bulk_wait_group", here);
}

inline void fence_proxy_async() { emulator::own_fences().proxy.add(); }
// Global memory has one proxy here: what is seen of a bulk copy, and when, is up to the waits alone.
inline void fence_proxy_async_global() {}

struct StMatrix {
    const uint32 (&r)[4];
    uint32 address;
};
inline void stmatrix(const char* what, uint32 address, const uint32 (&r)[4], bool transposed, Site here) {
    StMatrix mine{r, address};
    emulator::collective(emulator::thread().warp->lanes, what, mine, [here, transposed](StMatrix** lanes) {
        for (int lane = 0; lane < WARP; ++lane) {  // which gives the address of a row
            emulator::Thread& writer = *emulator::thread().warp->lanes.threads[lane];
            char* to = emulator::write_shared(lanes[lane]->address, 16, 16, writer, *writer.block, here);
            const int row = lane % 8, matrix = lane / 8;
            for (int column = 0; column < 8; ++column) {
                const int g = transposed ? column : row, t = transposed ? row : column;
                const uint32 pair = lanes[g * 4 + t / 2]->r[matrix];
                const unsigned short element = static_cast<unsigned short>(pair >> t % 2 * 16);
                std::memcpy(to + 2 * column, &element, 2);
            }
        }
    }, here);
}
inline void stmatrix_x4(uint32 address, const uint32 (&r)[4], Site here = HERE) {
    stmatrix("stmatrix_x4", address, r, false, here);
}
inline void stmatrix_x4_trans(uint32 address, const uint32 (&r)[4], Site here = HERE) {
    stmatrix("stmatrix_x4_trans", address, r, true, here);
}

// Products of a warpgroup ----------------------------------------------------------------------------------------------

inline constexpr bool IS_BFLOAT16 = !std::is_same_v<Element, Float16>;  // a float32 has three of them

template <int N>
struct Wgmma {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256);
    template <int TRANSPOSE_B>
    static void rs(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool accumulate, Site here = HERE) {
        emulator::issue_product({N, true, false, TRANSPOSE_B != 0, accumulate, 0, b, here}, d, const_cast<uint32*>(a));
    }
    template <int TRANSPOSE_A, int TRANSPOSE_B>
    static void ss(float (&d)[N / 2], uint64 a, uint64 b, bool accumulate, Site here = HERE) {
        emulator::issue_product({N, false, TRANSPOSE_A != 0, TRANSPOSE_B != 0, accumulate, a, b, here}, d, nullptr);
    }
};

inline void wgmma_fence() { emulator::fence_products(); }
inline void wgmma_commit_group(Site here = HERE) { emulator::commit_products(here); }
template <int PENDING>
void wgmma_wait_group(Site here = HERE) {
    emulator::wait_for_products(PENDING, IS_BFLOAT16, here);
}
// For a compiler that knows nothing of registers in flight; this one sees them poisoned.
template <typename Registers>
void pin(Registers&) {}

inline uint64 matrix_descriptor(uint32 place, uint32 leading, uint32 stride) {
    constexpr uint32 SWIZZLE_128 = 1u << 30;
    return static_cast<uint64>(SWIZZLE_128 | stride >> 4) << 32 | (leading >> 4 << 16 | place);
}

// Arithmetic -----------------------------------------------------------------------------------------------------------

inline int maximum(int a, int b, int c) { return std::max(std::max(a, b), c); }
inline int bits_of(float x) { return static_cast<int>(emulator::bits_of_float(x)); }
// One rounding, but for ties that float64 cannot tell.
template <typename Element>
uint32 fma_pair(Element, uint32 a, uint32 b, uint32 c) {
    double sums[2];
    for (int half = 0; half < 2; ++half) {
        auto part = [half](uint32 pair) { return to_float(Element{static_cast<unsigned short>(pair >> 16 * half)}); };
        sums[half] = static_cast<double>(part(a)) * part(b) + part(c);
    }
    return cvt_pair(Element{}, static_cast<float>(sums[0]), static_cast<float>(sums[1]));
}

}  // namespace cuflash
