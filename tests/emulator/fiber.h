// Fibers: stacks, and the switch between them. A switch saves what the calling convention says a call keeps and changes
// the stack pointer, nothing more: no system call, and no floating-point control word, which all fibers share.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Saves this context's stack pointer in *from and goes on where the context of stack pointer `to` was left.
extern "C" __attribute__((visibility("hidden"))) void emulator_switch(void** from, void* to);

// The way back is a jump and not a return: the processor's stack of return addresses knows nothing of fibers, while
// its branch predictor soon knows that the lanes of a warp wait at the same place.
#if defined(__x86_64__)
asm(R"(
    .text
    .p2align 4
    .hidden emulator_switch
    .globl emulator_switch
    .type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size emulator_switch, . - emulator_switch
)");
#elif defined(__aarch64__)
asm(R"(
    .text
    .p2align 4
    .hidden emulator_switch
    .globl emulator_switch
    .type emulator_switch, %function
emulator_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size emulator_switch, . - emulator_switch
)");
#else
#error "the emulator switches fibers on x86-64 and aarch64"
#endif

namespace emulator {

#ifndef EMULATOR_STACK_BYTES
#define EMULATOR_STACK_BYTES (128 * 1024)
#endif

// A pool of stacks, each above a page that nothing may touch, so that an overflow stops instead of spoiling another.
class Stacks {
  public:
    char* take() {  // the upper end
        if (free.empty()) {
            void* low = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (low == MAP_FAILED || mprotect(low, page, PROT_NONE) != 0) {
                std::perror("emulator: no memory for the stack of a thread");
                std::abort();
            }
            free.push_back(static_cast<char*>(low) + bytes);
        }
        char* top = free.back();
        free.pop_back();
        return top;
    }
    void give(char* top) { free.push_back(top); }
    // Gives all but so many back to the system, which counts the pieces of a process's memory: each kernel that has
    // been launched has a pool of its own.
    void keep(size_t most) {
        for (; free.size() > most; free.pop_back()) munmap(free.back() - bytes, bytes);
    }

  private:
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), bytes = EMULATOR_STACK_BYTES + page;
    std::vector<char*> free;
};

// A context that will call `begin`, which may not return, when it is first switched to. `shift` moves the start of the
// stack: at the same place in every stack, the frames of all fibers would fall into the same sets of the caches.
inline void* context(char* top, size_t shift, void (*begin)()) {
    top -= shift * 64 % 16384;
#if defined(__x86_64__)
    void** at = reinterpret_cast<void**>(top) - 8;  // six registers, where to begin, and no return address
    for (int n = 0; n < 8; ++n) at[n] = nullptr;
    at[6] = reinterpret_cast<void*>(begin);
#else
    void** at = reinterpret_cast<void**>(top) - 20;
    for (int n = 0; n < 20; ++n) at[n] = nullptr;
    at[11] = reinterpret_cast<void*>(begin);
#endif
    return at;
}

}  // namespace emulator
