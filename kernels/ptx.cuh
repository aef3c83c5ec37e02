// One instruction a function, named after it; nothing here knows what attention is. This file alone holds inline
// PTX, CUDA's built-in indices and barriers: an emulator of the same functions can take its place.
//
// Everything here runs on sm_80 and newer, but clusters: sm_90 and newer.
#pragma once

namespace cuflash {

using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

constexpr int WARP = 32;
constexpr float INFINITE = __builtin_bit_cast(float, 0x7f800000);

// Where this thread is ---------------------------------------------------------------------------------------------

__device__ __forceinline__ int thread_index() { return threadIdx.x; }
// Read anew at each call: what follows from it is computed where it is used instead of kept in registers.
__device__ __forceinline__ int fresh_thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
__device__ __forceinline__ int64 fresh_block_index() {
    uint32 index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}
__device__ __forceinline__ int grid_size() { return gridDim.x; }  // blocks of the launch
__device__ __forceinline__ int lane_index() { return fresh_thread_index() % WARP; }
__device__ __forceinline__ int warp_index() { return fresh_thread_index() / WARP; }
// The same; the compiler does not know what it is made of, and computes with it as it is.
__device__ __forceinline__ const char* opaque(const char* address) {
    asm volatile("" : "+l"(address));
    return address;
}
__device__ __forceinline__ uint32 opaque(uint32 value) {
    asm volatile("" : "+r"(value));
    return value;
}
// A value that all lanes hold alike: the compiler may keep it, and what follows from it, in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Sleeps for about so long, at most twice that.
__device__ __forceinline__ void nanosleep(uint32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

__device__ __forceinline__ void sync_threads() { __syncthreads(); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
// bar.sync: the `threads` that name the same `barrier` (1 to 15; 0 is sync_threads) wait for one another.
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// bar.arrive: counts for the others' bar_sync and goes on.
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Blocks of this one's cluster, 1 where the launch has none; and the number of this one among them. sm_90 and newer.
__device__ __forceinline__ int cluster_size() {
    int blocks;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
    return blocks;
}
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// barrier.cluster.arrive: counts for the others' cluster_wait and goes on. Whole warps; sm_90 and newer.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// barrier.cluster.wait: until all threads of the cluster that have not left have arrived. Whole warps; sm_90 and newer.
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
// shfl.up: what the lane so many below holds; the first lanes keep their own.
__device__ __forceinline__ int shuffle_up(int value, int distance) {
    return __shfl_up_sync(0xffffffffu, value, distance);
}
// shfl.idx: what a lane holds, which all lanes name alike.
template <typename T>
__device__ __forceinline__ T shuffle_from(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
// redux: the sum, and the largest, of what all lanes hold.
__device__ __forceinline__ int redux_add(int value) {
    int sum;
    asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(value));
    return sum;
}
__device__ __forceinline__ int redux_max(int value) {
    int largest;
    asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
    return largest;
}
__device__ __forceinline__ bool any(bool predicate) { return __any_sync(0xffffffffu, predicate); }
__device__ __forceinline__ uint32 ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
__device__ __forceinline__ int find_first_set(uint32 bits) { return __ffs(bits) - 1; }

// Memory -----------------------------------------------------------------------------------------------------------

// Address of the block's dynamic shared memory in the shared window.
__device__ __forceinline__ uint32 shared_memory() {
    extern __shared__ __align__(1024) unsigned char bytes[];
    return static_cast<uint32>(__cvta_generic_to_shared(bytes));
}

template <typename T>
__device__ __forceinline__ T load_shared(uint32 address) {
    return *static_cast<const T*>(__cvta_shared_to_generic(address));
}
template <typename T>
__device__ __forceinline__ void store_shared(uint32 address, const T& value) {
    *static_cast<T*>(__cvta_shared_to_generic(address)) = value;
}
template <typename T>
__device__ __forceinline__ T load_global(const char* address) {
    return *reinterpret_cast<const T*>(address);
}
template <typename T>
__device__ __forceinline__ void store_global(char* address, const T& value) {
    *reinterpret_cast<T*>(address) = value;
}

// Adds and returns what was there before.
__device__ __forceinline__ int atomic_add(char* address, int value) {
    return atomicAdd(reinterpret_cast<int*>(address), value);
}

// The same as a release and an acquire: what came before it, of this thread and of those it has waited for at a barrier
// of the block, is there for whoever finds this addition made.
__device__ __forceinline__ int atomic_add_acq_rel(char* address, int value) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
}

// red: adds, by itself, in whatever order.
__device__ __forceinline__ void add_global(char* address, float value) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void add_global(char* address, double value) {
    asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;" ::"l"(address), "d"(value) : "memory");
}
// The same of four neighbours, 16 bytes together where the hardware has VECTORS of them (sm_90 and newer).
template <bool VECTORS>
__device__ __forceinline__ void add_global(char* address, const float (&values)[4]) {
    if constexpr (VECTORS) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(values[0]),
                     "f"(values[1]), "f"(values[2]), "f"(values[3])
                     : "memory");
    } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) add_global(address + n * sizeof(float), values[n]);
    }
}
// Whatever another block has written, soon; orders nothing.
__device__ __forceinline__ int load_relaxed(const char* address) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
// What came before a release, of this thread and of those it has waited for at a barrier of the block, is there for
// whoever has acquired what it released.
__device__ __forceinline__ int load_acquire(const char* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
__device__ __forceinline__ void add_release(char* address, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

struct alignas(8) Vector8 {  // 8 bytes that travel together
    uint32 words[2];
};
struct alignas(16) Vector16 {  // 16 bytes
    uint32 words[4];
};

// ld.shared::cluster: 8 or 16 bytes of the cluster's block of that rank, which lie there as at `address` in this one's
// shared memory. That block must have begun, which a cluster_wait tells, and not have ended. sm_90 and newer.
template <typename T>
__device__ __forceinline__ T load_cluster(uint32 address, int rank) {
    static_assert(sizeof(T) == 8 || sizeof(T) == 16, "8 or 16 bytes");
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    if constexpr (sizeof(T) == 16) {
        Vector16 v;
        asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                     : "r"(there)
                     : "memory");
        return __builtin_bit_cast(T, v);
    } else {
        Vector8 v;
        asm volatile("ld.shared::cluster.v2.b32 {%0, %1}, [%2];"
                     : "=r"(v.words[0]), "=r"(v.words[1])
                     : "r"(there)
                     : "memory");
        return __builtin_bit_cast(T, v);
    }
}

// ld.global: 16 bytes or, not `read`, zeros.
__device__ __forceinline__ Vector16 load_global_16(const char* address, bool read) {
    Vector16 v;
    asm volatile("{\n.reg .pred ignore;\nsetp.eq.u32 ignore, %5, 0;\n"
                 "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@!ignore ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(address), "r"(static_cast<uint32>(read))
                 : "memory");
    return v;
}

// The same with .cs: what nobody reads again leaves the caches before others.
__device__ __forceinline__ Vector16 load_global_16_once(const char* address, bool read) {
    Vector16 v;
    asm volatile("{\n.reg .pred ignore;\nsetp.eq.u32 ignore, %5, 0;\n"
                 "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@!ignore ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(address), "r"(static_cast<uint32>(read))
                 : "memory");
    return v;
}

// What the L2 cache should keep: the words that createpolicy makes.
constexpr uint64 EVICT_FIRST = 0x12f0000000000000, EVICT_LAST = 0x14f0000000000000;

// cp.async: 16 bytes from global to shared, of which the first `bytes` are read and the rest are zeros.
__device__ __forceinline__ void cp_async_16(uint32 shared, const char* global, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}
// The same of all 16 bytes or, not `read`, of none: much cheaper, since the hardware knows no other two sizes.
__device__ __forceinline__ void cp_async_16(uint32 shared, const char* global, bool read) {
    asm volatile("{\n.reg .pred ignore;\nsetp.eq.u32 ignore, %2, 0;\n"
                 "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignore;\n}" ::"r"(shared), "l"(global),
                 "r"(static_cast<uint32>(read))
                 : "memory");
}
// The same for what is read once: the L2 cache lets it go before anything else.
__device__ __forceinline__ void cp_async_16_once(uint32 shared, const char* global, bool read) {
    asm volatile("{\n.reg .pred ignore;\nsetp.eq.u32 ignore, %2, 0;\n"
                 "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, ignore, %3;\n}" ::"r"(shared),
                 "l"(global), "r"(static_cast<uint32>(read)), "l"(EVICT_FIRST)
                 : "memory");
}
// The same of 4 bytes.
__device__ __forceinline__ void cp_async_4(uint32 shared, const char* global, bool read) {
    asm volatile("{\n.reg .pred ignore;\nsetp.eq.u32 ignore, %2, 0;\n"
                 "cp.async.ca.shared.global [%0], [%1], 4, ignore;\n}" ::"r"(shared), "l"(global),
                 "r"(static_cast<uint32>(read))
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ldmatrix: four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Arithmetic -------------------------------------------------------------------------------------------------------

struct Float16 {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(Float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float to_float(BFloat16 x) { return __uint_as_float(static_cast<uint32>(x.bits) << 16); }

// cvt.rn: two floats to one register of two 16-bit elements, `low` in the low half.
__device__ __forceinline__ uint32 cvt_pair(Float16, float low, float high) {
    uint32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint32 cvt_pair(BFloat16, float low, float high) {
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// prmt: four of the eight bytes of a (0 to 3) and b (4 to 7), as the digits of the selector say, the lowest first.
__device__ __forceinline__ uint32 byte_permute(uint32 a, uint32 b, uint32 selector) {
    return __byte_perm(a, b, selector);
}
// Two float16 elements at a time, subnormals too.
__device__ __forceinline__ uint32 add_pair(uint32 a, uint32 b) {
    uint32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}
__device__ __forceinline__ uint32 multiply_pair(uint32 a, uint32 b) {
    uint32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
// cvt: the two E4M3 numbers in a half of a register, the low one or the high one, to two of float16; sm_89 and newer.
template <int HALF>
__device__ __forceinline__ uint32 cvt_pair_of_e4m3(uint32 pairs) {
    uint32 made;
    asm("{\n.reg .b16 half<2>;\nmov.b32 {half0, half1}, %1;\ncvt.rn.f16x2.e4m3x2 %0, half%2;\n}"
        : "=r"(made)
        : "r"(pairs), "n"(HALF));
    return made;
}

// mma.m16n8k16: d += a b, and d = a b. With g = lane / 4 and t = lane % 4, d holds (row g; columns 2t, 2t + 1), then
// row g + 8.
__device__ __forceinline__ void mma_m16n8k16(Float16, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16(BFloat16, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_first(Float16, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
__device__ __forceinline__ void mma_m16n8k16_first(BFloat16, float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                                   uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// The same in float64: mma.m8n8k4 and, on sm_90 and newer, of 16 rows and 4, 8 or 16 terms. a holds rows g and g + 8 of
// terms t, 4 + t and so on, b the same terms of column g; d is as above.
__device__ __forceinline__ void mma_m8n8k4(double& d0, double& d1, double a, double b) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(d0), "+d"(d1)
        : "d"(a), "d"(b));
}
__device__ __forceinline__ void mma_m16n8(double (&d)[4], const double (&a)[2], const double (&b)[1]) {
    asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(b[0]));
}
__device__ __forceinline__ void mma_m16n8(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}
__device__ __forceinline__ void mma_m16n8(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
          "d"(b[2]), "d"(b[3]));
}

// Halves of a float64's bits.
__device__ __forceinline__ uint32 low_word(double x) { return __double2loint(x); }
__device__ __forceinline__ uint32 high_word(double x) { return __double2hiint(x); }
__device__ __forceinline__ double from_words(uint32 low, uint32 high) { return __hiloint2double(high, low); }

// ex2.approx.ftz: 2^x within 2^-22 relative; 2^-inf = +0.
__device__ __forceinline__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// lg2.approx.ftz: log2 x within 2^-22 absolute for x in [1/2, 2], 2^-22 relative elsewhere; log2 0 = -inf.
__device__ __forceinline__ float lg2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// rcp.approx.ftz: 1 / x within 1 ulp.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ double reciprocal(double x) { return __drcp_rn(x); }
__device__ __forceinline__ float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fused_multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }
// A product rounded by itself, which the compiler may not fuse with a sum that follows.
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float maximum(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double maximum(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ int maximum(int a, int b) { return max(a, b); }
__device__ __forceinline__ float minimum(float a, float b) { return fminf(a, b); }

// The upper half of a product of 64 bits.
__device__ __forceinline__ uint32 multiply_high(uint32 a, uint32 b) { return __umulhi(a, b); }
__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ double absolute(double x) { return fabs(x); }
__device__ __forceinline__ int clamp(int x, int low, int high) { return min(max(x, low), high); }

// x - x is 0 for a finite x and NaN for NaN and the infinities.
template <typename T>
__device__ __forceinline__ bool is_finite(T x) {
    return x - x == T(0);
}

}  // namespace cuflash
