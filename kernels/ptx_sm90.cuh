// What Hopper adds: asynchronous barriers, tensor copies, products of a whole warpgroup, registers that move between
// warpgroups. One instruction a function, named after it, as in ptx.cuh; for sm_90a alone.
//
// The products themselves, struct Wgmma<N>, are written by the variant's preamble for the sizes in use.
#pragma once

#include "ptx.cuh"

namespace cuflash {

constexpr int WARPGROUP = 4 * WARP;

// Registers of each thread of the warpgroup. Those that one gives up another may take.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Asynchronous barriers in shared memory -----------------------------------------------------------------------------
//
// A phase ends when `count` arrivals and all bytes announced have come. Phases alternate in parity, 0 first.

__device__ __forceinline__ void mbarrier_init(uint32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers visible to the asynchronous proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that asynchronous copies will bring before the phase ends.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of this parity has ended: parity 1 of a fresh barrier has.
__device__ __forceinline__ void mbarrier_wait(uint32 barrier, uint32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        ::"r"(barrier), "r"(parity)
        : "memory");
}

// Copies of tensor tiles ---------------------------------------------------------------------------------------------

// A tensor of five axes in global memory and the box of it that one instruction moves, as the driver encodes them.
struct alignas(128) TensorMap {
    uint64 words[16];
};

// Where a box begins, innermost axis first. What lies outside the tensor reads as zeros and is not written.
struct Corner {
    int column, axis1, axis2, axis3, axis4;
};

// The box at `corner` to shared memory; its bytes, those outside the tensor too, count on the barrier.
__device__ __forceinline__ void cp_async_bulk_tensor_load(uint32 shared, const TensorMap& map, uint32 barrier,
                                                          Corner corner, uint64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
        "l"(&map), "r"(barrier), "r"(corner.column), "r"(corner.axis1), "r"(corner.axis2), "r"(corner.axis3),
        "r"(corner.axis4), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void cp_async_bulk_tensor_store(const TensorMap& map, uint32 shared, Corner corner) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
                 "r"(shared), "r"(corner.column), "r"(corner.axis1), "r"(corner.axis2), "r"(corner.axis3),
                 "r"(corner.axis4)
                 : "memory");
}
// The box to the L2 cache alone.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor(const TensorMap& map, Corner corner) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map),
                 "r"(corner.column), "r"(corner.axis1), "r"(corner.axis2), "r"(corner.axis3), "r"(corner.axis4)
                 : "memory");
}
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Bytes as they lie, a multiple of 16 from a multiple of 16: to shared memory, counting on the barrier, and from it.
__device__ __forceinline__ void cp_async_bulk_load(uint32 shared, const char* global, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared), "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void cp_async_bulk_store(char* global, uint32 shared, uint32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
                 : "memory");
}
// The same, adding float32 to what is there: each sum by itself, in whatever order.
__device__ __forceinline__ void cp_reduce_async_bulk_add(char* global, uint32 shared, uint32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(global), "r"(shared), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the newest PENDING groups of this thread have read their shared memory.
template <int PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// The same, and until what they wrote is there for this thread.
template <int PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Orders this thread's writes to shared memory before what the asynchronous proxy (wgmma, tensor copies) does after
// the next barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of global memory, either way: bulk copies that this thread has waited for before what it does after the
// fence, what it did before the fence ahead of its bulk copies after it.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// stmatrix: the inverse of ldmatrix_x4, and of ldmatrix_x4_trans.
__device__ __forceinline__ void stmatrix_x4(uint32 address, const uint32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(uint32 address, const uint32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Products of a warpgroup ---------------------------------------------------------------------------------------------
//
// Wgmma<N>: d (64 x N, float32) = or += a (64 x 16) b (16 x N). Thread t of the warpgroup, warp w = t / 32,
// g = t % 32 / 4, q = t % 4, holds d[i] = element (16 w + g + 8 (i / 2 % 2), 8 (i / 4) + 2 q + i % 2).
//     rs<TRANSPOSE_B>(d, a, b, accumulate)                 a in registers, as mma_m16n8k16 takes it
//     ss<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate)    a in shared memory
// Descriptors tell of matrices in shared memory; TRANSPOSE: rows of the 16 lie next to one another, not columns.

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving what touches these registers across this place.
template <int N>
__device__ __forceinline__ void pin(float (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int M, int N>
__device__ __forceinline__ void pin(uint32 (&registers)[M][N]) {
#pragma unroll
    for (int i = 0; i < M; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) asm volatile("" : "+r"(registers[i][j])::"memory");
    }
}

// The descriptor of a matrix whose rows of 128 bytes are swizzled: 16-byte chunk c of row r lies at chunk c ^ (r % 8).
// `place`: its address in units of 16 bytes, a multiple of 64 but for steps along the matrix; `leading` bytes between
// panels of 64 columns (where the columns are the product's N or M), eight rows every `stride` bytes. Sums in
// 32 bits leave one instruction a descriptor.
__device__ __forceinline__ uint64 matrix_descriptor(uint32 place, uint32 leading, uint32 stride) {
    constexpr uint32 SWIZZLE_128 = 1u << 30;
    return static_cast<uint64>(SWIZZLE_128 | stride >> 4) << 32 | ((leading >> 4 << 16) + place);
}

// Arithmetic ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int maximum(int a, int b, int c) { return __vimax3_s32(a, b, c); }
__device__ __forceinline__ int bits_of(float x) { return __float_as_int(x); }
// fma.rn of two 16-bit elements in a register each.
__device__ __forceinline__ uint32 fma_pair(Float16, uint32 a, uint32 b, uint32 c) {
    uint32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ uint32 fma_pair(BFloat16, uint32 a, uint32 b, uint32 c) {
    uint32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

}  // namespace cuflash
