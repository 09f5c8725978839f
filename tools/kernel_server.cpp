// Calls of the kernel that come in at standard input, answered at standard output; see kernel_elsewhere.py.
// A call: how many buffers; each one's bytes; how many addresses lie inside buffers; of each the buffer, the place in it
// and the buffer that it is of; which function; how many arguments; each: a buffer's number or -1, and else a number.

#include <cstdio>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>

static int fenced(const char *start, const char *end, const char *next) {
    if (start) __asan_poison_memory_region(end, next + 64 - end);
    return 64;
}
#define FENCE fenced
#endif

#include "../src/polyfed/native/kernel.cpp"

static int64_t read_number() {
    int64_t n;
    if (std::fread(&n, sizeof n, 1, stdin) != 1) std::exit(0);
    return n;
}

int main() {
    for (;;) {
        std::vector<std::vector<char>> buffers(read_number());
        std::vector<char *> at;
        for (auto &buffer : buffers) {
            buffer.resize(read_number() + 64);
            at.push_back((char *)(((uintptr_t)buffer.data() + 63) & ~(uintptr_t)63));
            std::fread(at.back(), 1, buffer.size() - 64, stdin);
#ifdef __SANITIZE_ADDRESS__  // what is left for alignment is nobody's
            const char *end = at.back() + buffer.size() - 64;
            __asan_poison_memory_region(end, buffer.data() + buffer.size() - end);
#endif
        }
        for (int64_t k = read_number(); k > 0; k--) {
            const int64_t in = read_number(), place = read_number(), of = read_number();
            std::memcpy(at[in] + place, &at[of], sizeof(char *));
        }
        const int64_t which = read_number();
        int64_t a[11] = {};
        for (int64_t k = 0, count = read_number(); k < count; k++) {
            const int64_t of = read_number(), value = read_number();
            a[k] = of < 0 ? value : (int64_t)(uintptr_t)at[of];
        }
        auto p = [&](int k) { return (void *)(uintptr_t)a[k]; };
        int64_t said = 0;
        if (which == 0) said = polyfed_widest();
        if (which == 1) said = polyfed_train((const Job *)p(0), (int)a[1], (int)a[2]);
        if (which == 2)
            polyfed_renew((int)a[0], (int)a[1], a[2], a[3], p(4), (int64_t *)p(5), (int64_t *)p(6), p(7), (int64_t *)p(8), p(9),
                          (double *)p(10));
        if (which == 3)
            polyfed_products((int)a[0], (int)a[1], a[2], a[3], p(4), a[5], (int64_t *)p(6), (double *)p(7), (double *)p(8));
        if (which == 4) polyfed_mix((int)a[0], (int)a[1], a[2], a[3], a[4], a[5], p(6), p(7), (int64_t *)p(8), p(9));
        if (which == 5) polyfed_permutation((uint64_t *)p(0), a[1], a[2], (int64_t *)p(3));
        std::fwrite(&said, sizeof said, 1, stdout);
        for (size_t k = 0; k < buffers.size(); k++) std::fwrite(at[k], 1, buffers[k].size() - 64, stdout);
        std::fflush(stdout);
    }
}
