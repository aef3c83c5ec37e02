// out (64 x N) = a (64 x K) b (K x N), by one warpgroup: every form in which a product takes its operands.
//
// An operand lies in global memory row by row, its K elements along the rows or, transposed, its 64 or N elements;
// tensor copies bring it as panels of SPAN bytes. SPAN 128, 64 and 32 are swizzled; of 16, panels of one chunk, not.
#include "ptx_sm90.cuh"

namespace cuflash {

constexpr int THREADS = WARPGROUP;
constexpr uint64 SWIZZLE = SPAN == 128 ? 1 : SPAN == 64 ? 2 : SPAN == 32 ? 3 : 0;  // as descriptors name it

// Panels of SPAN / 2 columns.
template <int ROWS, int COLUMNS>
struct Operand {
    static constexpr int WIDTH = SPAN / 2, PANELS = (COLUMNS + WIDTH - 1) / WIDTH;
    static constexpr int PANEL_BYTES = ROWS * SPAN, BYTES = (PANELS * PANEL_BYTES + 1023) / 1024 * 1024;

    static __device__ __forceinline__ void load(uint32 address, const TensorMap& map, uint32 barrier) {
        mbarrier_arrive_expect_tx(barrier, PANELS * PANEL_BYTES);
#pragma unroll 1
        for (int panel = 0; panel < PANELS; ++panel) {
            cp_async_bulk_tensor_load(address + panel * PANEL_BYTES, map, barrier, {panel * WIDTH, 0, 0, 0, 0}, EVICT_FIRST);
        }
    }
    // Where 16-byte chunk `chunk` of a row lies.
    static __device__ __forceinline__ uint32 offset(int row, int chunk) {
        uint32 byte = chunk / (SPAN / 16) * PANEL_BYTES + row * SPAN + chunk % (SPAN / 16) * 16;
        return byte ^ (byte >> 7) % (SPAN / 16) * 16;
    }
    // For step `step` of 16 along K.
    template <int TRANSPOSED>
    static __device__ __forceinline__ uint64 descriptor(uint32 address, int step) {
        uint32 down = 8 * SPAN, across = PANEL_BYTES;  // the next eight rows, the next panel
        if (TRANSPOSED) address += step * 16 * SPAN;
        else address += step * 32 / SPAN * PANEL_BYTES + step * 32 % SPAN;
        bool across_is_stride = SPAN == 16 && TRANSPOSED;
        uint64 plain = matrix_descriptor(address / 16, across_is_stride ? down : across, across_is_stride ? across : down);
        return plain << 2 >> 2 | SWIZZLE << 62;
    }
};
using A = Operand<TRANSPOSE_A ? K : 64, TRANSPOSE_A ? 64 : K>;
using B = Operand<TRANSPOSE_B ? K : N, TRANSPOSE_B ? N : K>;

constexpr int A_START = 0, B_START = A_START + A::BYTES, BARRIER = B_START + B::BYTES;
static_assert(SHARED_BYTES == BARRIER + 8, "SHARED_BYTES: the operands and a barrier");

struct Args {
    TensorMap a, b;
    char* out;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) products(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory(), barrier = shared + BARRIER;
    if (thread_index() == 0) {
        mbarrier_init(barrier, 2);
        fence_mbarrier_init();
        A::load(shared + A_START, args.a, barrier);
        B::load(shared + B_START, args.b, barrier);
    }
    sync_threads();
    mbarrier_wait(barrier, 0);

    float d[N / 2];
    [[maybe_unused]] uint32 registers[K / 16][4];
    if constexpr (A_IN_REGISTERS) {
#pragma unroll
        for (int step = 0; step < K / 16; ++step) {
            int row = 16 * warp_index() + lane_index() % 16, chunk = 2 * step + lane_index() / 16;
            ldmatrix_x4(registers[step], shared + A_START + A::offset(row, chunk));
        }
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < K / 16; ++step) {
        uint64 b = B::descriptor<TRANSPOSE_B>(shared + B_START, step);
        if constexpr (A_IN_REGISTERS) {
            Wgmma<N>::template rs<TRANSPOSE_B>(d, registers[step], b, step > 0);
        } else {
            uint64 a = A::descriptor<TRANSPOSE_A>(shared + A_START, step);
            Wgmma<N>::template ss<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, step > 0);
        }
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(d);

    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        int row = 16 * warp_index() + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        store_global<float>(args.out + (row * N + column) * 4, d[i]);
    }
}

}  // namespace cuflash
