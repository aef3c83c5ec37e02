// The instructions of kernels/ptx.cuh, by the same names, on the emulator's threads and memory. Every function takes
// one more parameter than there: the place in the kernel that it is called from, for reports.
#pragma once

#include <core.h>
#include <half.h>

namespace cuflash {

using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

constexpr int WARP = 32;
constexpr float INFINITE = __builtin_bit_cast(float, 0x7f800000);

using emulator::Site;

// Where this thread is ---------------------------------------------------------------------------------------------

inline int thread_index() { return emulator::thread().index; }
inline int fresh_thread_index() { return thread_index(); }
inline int64 fresh_block_index() { return emulator::block().index; }
inline int grid_size() { return static_cast<int>(emulator::world.launch->grid); }
inline int lane_index() { return emulator::thread().lane; }
inline int warp_index() { return emulator::thread().warp->index; }

inline void nanosleep(uint32) {}

inline void sync_threads(Site here = HERE) { emulator::sync_block(here); }
inline void sync_warp(Site here = HERE) { emulator::sync_lanes(here); }
inline void bar_sync(int barrier, int threads, Site here = HERE) {
    emulator::meet_at_named("bar_sync", barrier, threads, true, here);
}
inline void bar_arrive(int barrier, int threads, Site here = HERE) {
    emulator::meet_at_named("bar_arrive", barrier, threads, false, here);
}

inline int cluster_size() { return static_cast<int>(emulator::world.launch->cluster); }
inline int cluster_rank() { return emulator::block().rank; }
inline void cluster_arrive(Site here = HERE) { emulator::arrive_at_cluster(here); }
inline void cluster_wait(Site here = HERE) { emulator::wait_for_cluster(here); }

// Each lane gets what lane source(its own) holds.
template <typename T, typename Source>
T shuffle(const char* what, T value, Source source, Site here) {
    T mine = value;
    emulator::collective(emulator::thread().warp->lanes, what, mine, [source](T** lanes) {
        T values[WARP];
        for (int lane = 0; lane < WARP; ++lane) values[lane] = *lanes[lane];
        for (int lane = 0; lane < WARP; ++lane) *lanes[lane] = values[source(lane)];
    }, here);
    return mine;
}
template <typename T>
T shuffle_xor(T value, int mask, Site here = HERE) {
    return shuffle("shuffle_xor", value, [mask](int lane) { return lane ^ mask; }, here);
}
template <typename T>
T opaque(T value) {
    return value;
}
// Lanes that do not hold the value alike are stopped.
inline int uniform(int value, Site here = HERE) {
    const int first = shuffle("uniform", value, [](int) { return 0; }, here);
    if (first != value) emulator::fail(here, "uniform: %d here, %d in lane 0", value, first);
    return first;
}
inline int shuffle_up(int value, int distance, Site here = HERE) {
    return shuffle("shuffle_up", value, [distance](int lane) { return lane < distance ? lane : lane - distance; }, here);
}
template <typename T>
T shuffle_from(T value, int lane, Site here = HERE) {
    lane = uniform(lane, here);
    return shuffle("shuffle_from", value, [lane](int) { return lane; }, here);
}
// All lanes get what `join(a, b)` makes of what they hold.
template <typename Join>
int redux(const char* what, int value, Join join, Site here) {
    emulator::collective(emulator::thread().warp->lanes, what, value, [join](int** lanes) {
        int all = *lanes[0];
        for (int lane = 1; lane < WARP; ++lane) all = join(all, *lanes[lane]);
        for (int lane = 0; lane < WARP; ++lane) *lanes[lane] = all;
    }, here);
    return value;
}
inline int redux_add(int value, Site here = HERE) {
    return redux("redux_add", value, [](int a, int b) { return a + b; }, here);
}
inline int redux_max(int value, Site here = HERE) {
    return redux("redux_max", value, [](int a, int b) { return a > b ? a : b; }, here);
}
inline uint32 ballot(bool predicate, Site here = HERE) {
    uint32 mine = predicate;
    emulator::collective(emulator::thread().warp->lanes, "ballot", mine, [](uint32** lanes) {
        uint32 votes = 0;
        for (int lane = 0; lane < WARP; ++lane) votes |= *lanes[lane] << lane;
        for (int lane = 0; lane < WARP; ++lane) *lanes[lane] = votes;
    }, here);
    return mine;
}
inline bool any(bool predicate, Site here = HERE) { return ballot(predicate, here) != 0; }
inline int find_first_set(uint32 bits) { return __builtin_ffs(static_cast<int>(bits)) - 1; }

// Memory -----------------------------------------------------------------------------------------------------------

inline uint32 shared_memory() { return emulator::SHARED_BASE; }

template <typename T>
T load_shared(uint32 address, Site here = HERE) {
    T value;
    std::memcpy(&value, emulator::read_shared(address, sizeof(T), alignof(T), here), sizeof(T));
    return value;
}
template <typename T>
void store_shared(uint32 address, const T& value, Site here = HERE) {
    std::memcpy(emulator::write_shared(address, sizeof(T), alignof(T), here), &value, sizeof(T));
}
template <typename T>
T load_global(const char* address, Site here = HERE) {
    T value;
    emulator::check_global(address, sizeof(T), alignof(T), emulator::READS, here);
    std::memcpy(&value, address, sizeof(T));
    return value;
}
template <typename T>
void store_global(char* address, const T& value, Site here = HERE) {
    emulator::check_global(address, sizeof(T), alignof(T), emulator::WRITES, here);
    std::memcpy(address, &value, sizeof(T));
}

// Other threads may run before it: the order in which blocks come to one is the seed's.
inline int atomic_add(char* address, int value, Site here = HERE) {
    emulator::pause("atomic_add", here);
    const int before = load_global<int>(address, here);
    store_global(address, before + value, here);
    return before;
}
inline int atomic_add_acq_rel(char* address, int value, Site here = HERE) { return atomic_add(address, value, here); }

inline void add_global(char* address, float value, Site here = HERE) {
    emulator::pause("add_global", here);
    store_global(address, load_global<float>(address, here) + value, here);
}
inline void add_global(char* address, double value, Site here = HERE) {
    emulator::pause("add_global", here);
    store_global(address, load_global<double>(address, here) + value, here);
}
template <bool VECTORS>
void add_global(char* address, const float (&values)[4], Site here = HERE) {
    if (VECTORS) emulator::check_global(address, 16, 16, emulator::WRITES, here);
    for (int n = 0; n < 4; ++n) add_global(address + n * sizeof(float), values[n], here);
}
// Memory is in order here. Whoever acquires in a spin lets others run.
inline int load_acquire(const char* address, Site here = HERE) {
    emulator::pause("load_acquire", here);
    return load_global<int>(address, here);
}
inline int load_relaxed(const char* address, Site here = HERE) {
    emulator::pause("load_relaxed", here);
    return load_global<int>(address, here);
}
inline void add_release(char* address, int value, Site here = HERE) {
    emulator::pause("add_release", here);
    store_global(address, load_global<int>(address, here) + value, here);
}

struct alignas(8) Vector8 {  // 8 bytes that travel together
    uint32 words[2];
};
struct alignas(16) Vector16 {  // 16 bytes
    uint32 words[4];
};

template <typename T>
T load_cluster(uint32 address, int rank, Site here = HERE) {
    static_assert(sizeof(T) == 8 || sizeof(T) == 16, "8 or 16 bytes");
    T value;
    std::memcpy(&value, emulator::read_cluster(address, rank, sizeof(T), here), sizeof(T));
    return value;
}

inline Vector16 load_global_16(const char* address, bool read, Site here = HERE) {
    return read ? load_global<Vector16>(address, here) : Vector16{};
}
inline Vector16 load_global_16_once(const char* address, bool read, Site here = HERE) {
    return load_global_16(address, read, here);
}

// The bytes are read and written when the thread waits for the copy's group, not earlier; until then nobody may touch
// the destination. Source addresses are checked at once.
inline void cp_async_16(uint32 shared, const char* global, int bytes, Site here = HERE) {
    if (bytes < 0 || bytes > 16) emulator::fail(here, "cp.async: %d bytes; at most 16", bytes);
    if (reinterpret_cast<uint64_t>(global) % 16 != 0 && bytes > 0) emulator::fail(here, "cp.async: the source is no multiple of 16");
    if (bytes > 0) emulator::check_global(global, static_cast<size_t>(bytes), 16, emulator::READS, here);
    emulator::Thread& thread = emulator::thread();
    emulator::begin_async_write(shared, 16, 16, thread, *thread.block, here);
    thread.copies.add({&thread, global, shared, static_cast<uint32>(bytes), here});
}
inline void cp_async_16(uint32 shared, const char* global, bool read, Site here = HERE) {
    cp_async_16(shared, global, read ? 16 : 0, here);
}
inline void cp_async_16_once(uint32 shared, const char* global, bool read, Site here = HERE) {
    cp_async_16(shared, global, read, here);
}
inline void cp_async_4(uint32 shared, const char* global, bool read, Site here = HERE) {
    if (read) emulator::check_global(global, 4, 4, emulator::READS, here);
    emulator::Thread& thread = emulator::thread();
    emulator::begin_async_write(shared, 4, 4, thread, *thread.block, here);
    thread.copies.add({&thread, global, shared, read ? 4u : 0u, here, 4});
}
inline void cp_async_commit_group() { emulator::thread().copies.commit(); }
template <int PENDING>
void cp_async_wait_group() {
    emulator::thread().copies.wait(PENDING);
}

// Matrices are of whole tiles, some rows of which may have no use: what nothing has written is NaN and no mistake.
struct LdMatrix {
    uint32 (&r)[4];
    uint32 address;
};
inline void ldmatrix(const char* what, uint32 (&r)[4], uint32 address, bool transposed, Site here) {
    LdMatrix mine{r, address};
    emulator::collective(emulator::thread().warp->lanes, what, mine, [transposed, here](LdMatrix** lanes) {
        emulator::Block& block = emulator::block();
        unsigned short rows[4][8][8];
        for (int lane = 0; lane < WARP; ++lane) {
            emulator::Thread& reader = *emulator::thread().warp->lanes.threads[lane];
            const char* row = emulator::read_shared(lanes[lane]->address, 16, 16, reader, block, here, emulator::RACES);
            std::memcpy(rows[lane / 8][lane % 8], row, 16);
        }
        for (int lane = 0; lane < WARP; ++lane) {
            const int g = lane / 4, t = lane % 4 * 2;
            for (int m = 0; m < 4; ++m) {
                const uint32 low = transposed ? rows[m][t][g] : rows[m][g][t];
                const uint32 high = transposed ? rows[m][t + 1][g] : rows[m][g][t + 1];
                lanes[lane]->r[m] = low | high << 16;
            }
        }
    }, here);
}
inline void ldmatrix_x4(uint32 (&r)[4], uint32 address, Site here = HERE) { ldmatrix("ldmatrix_x4", r, address, false, here); }
inline void ldmatrix_x4_trans(uint32 (&r)[4], uint32 address, Site here = HERE) {
    ldmatrix("ldmatrix_x4_trans", r, address, true, here);
}

// Arithmetic -------------------------------------------------------------------------------------------------------

struct Float16 {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};

inline float to_float(Float16 x) { return emulator::float_of_half(x.bits); }
inline float to_float(BFloat16 x) { return emulator::float_of_bfloat(x.bits); }

inline uint32 cvt_pair(Float16, float low, float high) {
    return emulator::half_of_float(low) | static_cast<uint32>(emulator::half_of_float(high)) << 16;
}
inline uint32 cvt_pair(BFloat16, float low, float high) {
    return emulator::bfloat_of_float(low) | static_cast<uint32>(emulator::bfloat_of_float(high)) << 16;
}

inline uint32 byte_permute(uint32 a, uint32 b, uint32 selector) {
    const uint64 bytes = static_cast<uint64>(b) << 32 | a;
    uint32 chosen = 0;
    for (int n = 0; n < 4; ++n) {
        chosen |= static_cast<uint32>(bytes >> 8 * (selector >> 4 * n & 7) & 0xff) << 8 * n;
    }
    return chosen;
}
template <typename Of>
uint32 each_half(uint32 a, uint32 b, Of of) {
    uint32 pair = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const float x = emulator::float_of_half(static_cast<uint16_t>(a >> shift));
        const float y = emulator::float_of_half(static_cast<uint16_t>(b >> shift));
        pair |= static_cast<uint32>(emulator::half_of_float(of(x, y))) << shift;
    }
    return pair;
}
inline uint32 add_pair(uint32 a, uint32 b) { return each_half(a, b, [](float x, float y) { return x + y; }); }
inline uint32 multiply_pair(uint32 a, uint32 b) { return each_half(a, b, [](float x, float y) { return x * y; }); }
template <int HALF>
uint32 cvt_pair_of_e4m3(uint32 pairs) {
    const uint32 pair = pairs >> 16 * HALF;
    return emulator::half_of_e4m3(pair & 0xff) | static_cast<uint32>(emulator::half_of_e4m3(pair >> 8 & 0xff)) << 16;
}

// d += a b, 16 x 8 += 16 x 16 times 16 x 8: exact products, added one by one to the accumulator in float32, in the order of
// the keys of the sum. (Tensor cores add several at once, cutting what the largest of them leaves no room for.)
struct Mma {
    float (&d)[4];
    const uint32 (&a)[4];
    uint32 b[2];
};
template <typename Element>
__attribute__((noinline)) void mma_of_warp(Mma** lanes, bool first) {
    typedef float Row __attribute__((vector_size(32)));
    float a[16][16];  // row, k
    Row b[16];        // k; column
    for (int lane = 0; lane < WARP; ++lane) {
        const int g = lane / 4, t = lane % 4 * 2;
        for (int part = 0; part < 4; ++part) {
            const uint32 pair = lanes[lane]->a[part];
            float* to = &a[g + part % 2 * 8][t + part / 2 * 8];
            to[0] = to_float(Element{static_cast<unsigned short>(pair)});
            to[1] = to_float(Element{static_cast<unsigned short>(pair >> 16)});
        }
        for (int part = 0; part < 2; ++part) {
            const uint32 pair = lanes[lane]->b[part];
            b[t + part * 8][g] = to_float(Element{static_cast<unsigned short>(pair)});
            b[t + part * 8 + 1][g] = to_float(Element{static_cast<unsigned short>(pair >> 16)});
        }
    }
    for (int row = 0; row < 16; ++row) {
        Row sum = {};
        for (int column = 0; column < 8 && !first; ++column) {
            sum[column] = lanes[row % 8 * 4 + column / 2]->d[row / 8 * 2 + column % 2];
        }
        for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k];
        for (int column = 0; column < 8; ++column) {
            lanes[row % 8 * 4 + column / 2]->d[row / 8 * 2 + column % 2] = sum[column];
        }
    }
}
template <typename Element>
void mma(const char* what, bool first, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, Site here) {
    Mma mine{d, a, {b0, b1}};
    emulator::collective(emulator::thread().warp->lanes, what, mine, [first](Mma** lanes) {
        const emulator::Denormals kept(false);
        mma_of_warp<Element>(lanes, first);
    }, here);
}
template <typename Element>
void mma_m16n8k16(Element, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, Site here = HERE) {
    mma<Element>("mma_m16n8k16", false, d, a, b0, b1, here);
}
template <typename Element>
void mma_m16n8k16_first(Element, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, Site here = HERE) {
    mma<Element>("mma_m16n8k16_first", true, d, a, b0, b1, here);
}

// The same in float64, 16 or 8 rows and as many terms as the operands hold. (On a GPU each sum is rounded too, in an
// order that is not written down.)
template <int ROWS, int TERMS>
struct MmaFloat64 {
    double* d[ROWS / 4];  // of rows g, then g + 8: columns 2t and 2t + 1
    const double *a, *b;
};
template <int ROWS, int TERMS>
void mma_float64(const char* what, MmaFloat64<ROWS, TERMS> mine, Site here) {
    emulator::collective(emulator::thread().warp->lanes, what, mine, [](MmaFloat64<ROWS, TERMS>** lanes) {
        const emulator::Denormals kept(false);
        for (int row = 0; row < ROWS; ++row) {
            for (int column = 0; column < 8; ++column) {
                double& sum = *lanes[row % 8 * 4 + column / 2]->d[row / 8 * 2 + column % 2];
                for (int k = 0; k < TERMS; ++k) {
                    const double a = lanes[row % 8 * 4 + k % 4]->a[k / 4 * (ROWS / 8) + row / 8];
                    sum = __builtin_fma(a, lanes[column * 4 + k % 4]->b[k / 4], sum);
                }
            }
        }
    }, here);
}
inline void mma_m8n8k4(double& d0, double& d1, double a, double b, Site here = HERE) {
    mma_float64<8, 4>("mma_m8n8k4", {{&d0, &d1}, &a, &b}, here);
}
template <int PARTS>
void mma_m16n8(double (&d)[4], const double (&a)[PARTS], const double (&b)[PARTS / 2], Site here = HERE) {
    mma_float64<16, 2 * PARTS>("mma_m16n8", {{&d[0], &d[1], &d[2], &d[3]}, a, b}, here);
}

inline uint32 low_word(double x) { return static_cast<uint32>(__builtin_bit_cast(uint64, x)); }
inline uint32 high_word(double x) { return static_cast<uint32>(__builtin_bit_cast(uint64, x) >> 32); }
inline double from_words(uint32 low, uint32 high) {
    return __builtin_bit_cast(double, static_cast<uint64>(high) << 32 | low);
}

// Within half a unit in the last place or so, where the hardware promises 2^-22.
inline float ex2_approx(float x) { return std::exp2(x); }
inline float lg2_approx(float x) { return std::log2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline double reciprocal(double x) { return 1.0 / x; }
inline float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused_multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float multiply(float a, float b) { return a * b; }
inline double multiply(double a, double b) { return a * b; }
inline float maximum(float a, float b) { return std::fmax(a, b); }
inline double maximum(double a, double b) { return std::fmax(a, b); }
inline int maximum(int a, int b) { return std::max(a, b); }
inline float minimum(float a, float b) { return std::fmin(a, b); }

inline uint32 multiply_high(uint32 a, uint32 b) { return static_cast<uint32>(static_cast<uint64>(a) * b >> 32); }
inline float absolute(float x) { return std::fabs(x); }
inline double absolute(double x) { return std::fabs(x); }
inline int clamp(int x, int low, int high) { return std::min(std::max(x, low), high); }

template <typename T>
inline bool is_finite(T x) {
    return x - x == T(0);
}

using std::log2;

}  // namespace cuflash
