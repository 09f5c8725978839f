// Local training of chains of linear layers, norms, activations, dropouts and additions, and of convolutions before them,
// one client after another: the steps that torch takes, for the same batches in the same order. A client's weights stay in the cache, samples are read where they
// lie, and a step's gradient goes straight into the weights together with a method's pull and shift.
//
// train.inc is compiled once per instruction set and number type; the widest one that the processor has is used.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#if !defined(__GNUC__) && !defined(__clang__)
#error "polyfed's kernel needs GCC or Clang, which have vectors and integers of 128 bits; without it torch trains alone"
#elif defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

enum Operation { LINEAR, NORM, SAME, TABLE, COLUMNS, IMAGE, CONVOLUTION, GROUPS, LARGEST, MEAN, ROW, RECURRENT, ATTENTION, PLACE };
// SAME: nothing, for what follows; from IMAGE on: of samples as rows of channels, places one after another
enum Activation { NONE, RELU, TANH, SIGMOID, GELU, GELU_TANH, SILU };
enum { SHAPE = 25, NEAR = 1 << 20, FEW = 64 };  // numbers that describe a layer; bytes of weights that a core's second
                                               // cache holds; rows whose part of a gradient is made together
enum Loss { CROSS_ENTROPY, MSE };

// What one call trains; filled in by ctypes (polyfed/native/__init__.py has the same fields in the same order).
struct Job {
    int64_t layers;              // convolutions, or what columns of a sample make; then the others
    const int64_t *shape;        // [layers, SHAPE]: inputs, outputs, whether there is a bias, the activation that follows;
                                 // of a convolution, else 0: its window, the zeros around its input, the input, the cells
                                 // that are pooled; high and wide each; the operation, whether it has weights, and the
                                 // layer whose input is added behind activation and dropout, or -1; of a table, whose
                                 // inputs are numbers and outputs rows, or of columns as they are: the first, how many,
                                 // of how many; of windows the steps, high and wide; groups of channels; the layer
                                 // whose input goes in, or -1 for the output of the one before; the taps of windows
                                 // that lie last in the model, or whether channels lie before places in a sample, or
                                 // whether a table's rows stay rows; where weights and biases lie in the model
    const double *real;          // [layers, 2]: what a norm adds to the variance, and the share that is dropped
    int64_t loss, clients, p;    // p: numbers in a model
    void *w;                     // [clients, p] the result
    const void *start;           // where it begins; client c's row is c * start_each numbers on, as below
    int64_t start_each;
    const void *x;               // [N, inputs] samples of everybody
    int64_t integers;            // whether they are int64; for tables alone
    const void *y;               // [N] int64 classes or [N, outputs] targets
    const int64_t *first, *count;  // [clients] of each client's samples
    const int64_t *steps;        // [clients]
    int64_t batch;               // samples per step; 0: all
    const uint64_t *keys;        // [clients, 2] of the generators that draw the order of samples in batches
    const uint64_t *seeds;       // [clients, steps] of what is dropped in each step, client c's c * seeds_each numbers on;
    int64_t seeds_each;          // or null
    const double *lr, *keep;     // [clients]: w <- keep w + add - lr gradient
    const void *kept;            // what is kept of each number, in place of `keep`; or null
    int64_t kept_each;
    int64_t terms;               // add: their sum
    const void *const *term;     // [terms]: by[k, c] times client c's row of term[k]
    const int64_t *term_each;
    const double *by;            // [terms, clients]
    const void *only;            // not 0 for what is trained; or null, where all is
    int64_t only_each;
    double *curvature;           // [clients]: the largest ||g' - g|| / ||w' - w|| of a step; or null. Of linear layers only,
                                 // all trained
    // Added to the mean loss of classes over samples of class y, features f (the last layer's input), outputs z:
    const void *pull;            // [C]: pull[y] ||f - toward[y]||^2, toward [C, inputs of the last layer]; or null
    int64_t pull_each;
    const void *toward;
    int64_t toward_each;
    const void *teacher;         // a model: distill heat^2 KL(softmax(its outputs / heat), softmax(z / heat)), without the
    int64_t teacher_each;        // sample's own class where not `own`; or null
    double distill, heat;
    int64_t own;
};

// NumPy's Generator(Philox(key)).permutation: the order of samples is that of `compute/batches.py`.
class Order {
    uint64_t key[2], counter[4] = {0, 0, 0, 0}, buffer[4] = {0, 0, 0, 0};
    int used = 4;
    bool half = false;
    uint32_t other = 0;

    static uint64_t high(uint64_t a, uint64_t b, uint64_t &low) {
        low = a * b;
        return (uint64_t)((unsigned __int128)a * b >> 64);
    }

    uint64_t next64() {
        if (used < 4) return buffer[used++];
        for (int i = 0; i < 4 && ++counter[i] == 0; i++) continue;
        uint64_t c[4] = {counter[0], counter[1], counter[2], counter[3]}, k[2] = {key[0], key[1]};
        for (int round = 0; round < 10; round++) {
            uint64_t low0, low1;
            uint64_t high0 = high(0xD2E7470EE14C6C93ULL, c[0], low0), high1 = high(0xCA5A826395121157ULL, c[2], low1);
            uint64_t next[4] = {high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0};
            std::memcpy(c, next, sizeof c);
            k[0] += 0x9E3779B97F4A7C15ULL;
            k[1] += 0xBB67AE8584CAA73BULL;
        }
        std::memcpy(buffer, c, sizeof c);
        used = 1;
        return buffer[0];
    }

    uint32_t next32() {
        if (half) {
            half = false;
            return other;
        }
        uint64_t value = next64();
        half = true;
        other = (uint32_t)(value >> 32);
        return (uint32_t)value;
    }

    uint64_t below_or_at(uint64_t most) {
        uint64_t mask = most;
        for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
        uint64_t value;
        do {
            value = (most <= 0xFFFFFFFFULL ? next32() : next64()) & mask;
        } while (value > most);
        return value;
    }

   public:
    explicit Order(const uint64_t *k) : key{k[0], k[1]} {}

    void permutation(int64_t *into, int64_t n) {
        for (int64_t i = 0; i < n; i++) into[i] = i;
        for (int64_t i = n - 1; i > 0; i--) std::swap(into[i], into[below_or_at((uint64_t)i)]);
    }
};

#ifndef FENCE
#define FENCE(start, end, next) 0  // bytes between what is taken; tools/kernel_server.cpp has some under a sanitizer
#endif

// Memory of one thread's solve, in lines of 64 bytes: what is taken before it is reserved is only added up.
class Arena {
    char *start = nullptr, *next = nullptr;

   public:
    ~Arena() { std::free(start); }

    void reserve() {
        const size_t bytes = next - start;
        start = (char *)std::calloc(bytes + 64, 1);
        if (!start) throw std::bad_alloc();
        next = (char *)(((uintptr_t)start + 63) & ~(uintptr_t)63);
    }

    template <typename T>
    T *take(int64_t n) {
        T *found = (T *)next;
        next += ((size_t)n * sizeof(T) + 63) & ~(size_t)63;
        next += FENCE(start, (char *)(found + n), next);
        return found;
    }
};

#if defined(__x86_64__)
#define ROUNDED(v) asm("" : "+v"(v))  // a product that is not to be fused with a sum
#elif defined(__aarch64__)
#define ROUNDED(v) asm("" : "+w"(v))
#else
#define ROUNDED(v)
#endif
#define STRETCH 8192  // numbers of a long row that are read together

#define INLINE static inline __attribute__((always_inline, TARGET))

#define NARROW (1 << 14)  // bytes of samples, one per lane, or of weights that stay in a core's first cache
#define UNROLLED _Pragma("GCC unroll 32")  // so that sums are in registers from the beginning

#if defined(__x86_64__)
#define TARGET target("avx512f,avx512dq,avx512vl,avx512bw,fma,avx2")
#define BYTES 64  // of a vector
#define DOTS 5    // samples and outputs of a block whose sums stay in registers
#define ROWS 5    // rows of a block, and
#define COLUMNS 4  // vectors of each
#define PLACES 14  // places, with two vectors of channels each, whose sums stay in registers
#define UP_TO_PLACES UP_TO_14
#define VECTORS 10  // of a row of a window
namespace avx512 {
#include "train.inc"
}
#undef TARGET
#undef BYTES
#undef DOTS
#undef ROWS
#define TARGET target("avx2,fma")
#define BYTES 32
#undef PLACES
#undef UP_TO_PLACES
#define DOTS 3
#define ROWS 3
#define PLACES 6
#define UP_TO_PLACES UP_TO_6
namespace avx2 {
#include "train.inc"
}
#undef TARGET
#undef BYTES
#undef DOTS
#undef ROWS
#undef COLUMNS
#undef PLACES
#undef UP_TO_PLACES
#undef VECTORS
#endif
#define TARGET unused
#define BYTES 16
#define DOTS 3
#define ROWS 3
#define COLUMNS 4
#define PLACES 6
#define UP_TO_PLACES UP_TO_6
#define VECTORS 10
namespace baseline {
#include "train.inc"
}

EXPORT int polyfed_version() { return 11; }

// 2: AVX-512, 1: AVX2 with FMA, 0: what every processor has
EXPORT int polyfed_widest() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

EXPORT void polyfed_permutation(const uint64_t *key, int64_t times, int64_t n, int64_t *into) {
    Order order(key);
    for (int64_t k = 0; k < times; k++) order.permutation(into + k * n, n);
}

#if defined(__x86_64__)
#define WIDEST(NAME, T, ...)                         \
    (width == 2 ? avx512::NAME<T>(__VA_ARGS__)       \
     : width == 1 ? avx2::NAME<T>(__VA_ARGS__)       \
                  : baseline::NAME<T>(__VA_ARGS__))
#else
#define WIDEST(NAME, T, ...) baseline::NAME<T>(__VA_ARGS__)
#endif

// delta[row[k]] = w[i[k]] - w[j[k]] + keep[k] delta[row[k]], each number rounded as torch does it; rows below 0 are not
// there. squares[k] += its sum of squares
EXPORT void polyfed_renew(int wide, int width, int64_t count, int64_t p, const void *w, const int64_t *i, const int64_t *j,
                          void *delta, const int64_t *row, const void *keep, double *squares) {
    if (wide == 8) WIDEST(renew, double, count, p, (const double *)w, i, j, (double *)delta, row, (const double *)keep, squares);
    else WIDEST(renew, float, count, p, (const float *)w, i, j, (float *)delta, row, (const float *)keep, squares);
}

// G[k, j] += w[ids[k]] . w[j] and squares[j] += w[j] . w[j], for m of n rows, in double
EXPORT void polyfed_products(int wide, int width, int64_t n, int64_t p, const void *w, int64_t m, const int64_t *ids,
                             double *G, double *squares) {
    if (wide == 8) WIDEST(products, double, n, p, (const double *)w, m, ids, G, squares);
    else WIDEST(products, float, n, p, (const float *)w, m, ids, G, squares);
}

// into[i] = the sum over j of by[i, j] table[rows[j]], m sums of k rows; `together` of them of the same rows, the next ones
// of the next k
EXPORT void polyfed_mix(int wide, int width, int64_t p, int64_t m, int64_t k, int64_t together, const void *by,
                        const void *table, const int64_t *rows, void *into) {
    if (wide == 8) WIDEST(mix, double, p, m, k, together, (const double *)by, (const double *)table, rows, (double *)into);
    else WIDEST(mix, float, p, m, k, together, (const float *)by, (const float *)table, rows, (float *)into);
}

EXPORT void polyfed_below(int width, uint64_t bound, uint64_t h, const uint64_t *keys, int64_t n, int64_t *into) {
    WIDEST(below, uint64_t, bound, h, keys, n, into);
}

// 0; 1 where there is not memory enough; 2 for a class that the model has no output for
EXPORT int polyfed_train(const Job *job, int wide, int width) {
    try {
#if defined(__x86_64__)
        if (width == 2) wide == 8 ? avx512::train<double>(*job) : avx512::train<float>(*job);
        if (width == 1) wide == 8 ? avx2::train<double>(*job) : avx2::train<float>(*job);
#endif
        if (width == 0) wide == 8 ? baseline::train<double>(*job) : baseline::train<float>(*job);
    } catch (const std::bad_alloc &) {
        return 1;
    } catch (const std::out_of_range &) {
        return 2;
    }
    return 0;
}
