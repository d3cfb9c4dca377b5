// What the programs of this folder have in common: it stands in front of each. REAL is float or double, SIZE its bytes.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Bytes of a vector, and how many of them the registers hold.
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
// Compilers read a factor of several products from memory for each of them.
#if defined(__AVX512F__)
#define KEPT(x) __asm__("" : "+v"(x))
#elif defined(__AVX__)
#define KEPT(x) __asm__("" : "+x"(x))
#else
#define KEPT(x)
#endif
#define LANES (BYTES / SIZE)
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")
#define AT_MOST(a, b) ((a) < (b) ? (a) : (b))
#define AT_LEAST(a, b) ((a) > (b) ? (a) : (b))

typedef int64_t count;
// Aligned, and at any number.
typedef REAL vec __attribute__((vector_size(BYTES), may_alias));
typedef REAL loose __attribute__((vector_size(BYTES), aligned(SIZE), may_alias));
#if SIZE == 4
typedef int32_t indices __attribute__((vector_size(BYTES)));
#else
typedef int64_t indices __attribute__((vector_size(BYTES)));
#endif

#if defined(__clang__)
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (indices){__VA_ARGS__})
#endif
#if LANES == 16
#define EVEN 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ODD 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define EVEN 0, 8, 1, 9, 2, 10, 3, 11
#define ODD 4, 12, 5, 13, 6, 14, 7, 15
#elif LANES == 4
#define EVEN 0, 4, 1, 5
#define ODD 2, 6, 3, 7
#else
#define EVEN 0, 2
#define ODD 1, 3
#endif

// Rows of a block of as many rows as a vector has numbers become its columns.
INLINE void transpose(vec *rows)
{
    UNROLLED for (int stage = 1; stage < LANES; stage *= 2) {
        vec mixed[LANES];
        UNROLLED for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = MIXED(rows[i], rows[i + LANES / 2], EVEN);
            mixed[2 * i + 1] = MIXED(rows[i], rows[i + LANES / 2], ODD);
        }
        UNROLLED for (int i = 0; i < LANES; i++)
            rows[i] = mixed[i];
    }
}

#if SIZE == 4
typedef uint32_t bits;
#define ROUNDER 12582912.0f // 1.5 * 2^23: what is added to it is rounded to an integer, in its lowest bits
#define HIGH 0.693359375f
#define LOW -2.12194440e-4f
#define MANTISSA 23
#define BIAS 127
#define LARGEST 87.0f
#define SERIES (1 / 2.0f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r * (1 / 720.0f + r * (1 / 5040.0f))))))
#else
typedef uint64_t bits;
#define ROUNDER 6755399441055744.0
#define HIGH 6.93147180369123816490e-01
#define LOW 1.90821492927058770002e-10
#define MANTISSA 52
#define BIAS 1023
#define LARGEST 708.0
#define SERIES                                                                                                                 \
    (1 / 2.0 +                                                                                                                 \
     r * (1 / 6.0 +                                                                                                            \
          r * (1 / 24.0 +                                                                                                      \
               r * (1 / 120.0 +                                                                                                \
                    r * (1 / 720.0 +                                                                                           \
                         r * (1 / 5040.0 +                                                                                     \
                              r * (1 / 40320.0 +                                                                               \
                                   r * (1 / 362880.0 +                                                                         \
                                        r * (1 / 3628800.0 +                                                                   \
                                             r * (1 / 39916800.0 + r * (1 / 479001600.0 + r * (1 / 6227020800.0))))))))))))
#endif

// exp(x) - less, where that is 0, or 1 and exact near zero, too: with x = n log 2 + r, of the series of r. NaN stays NaN.
INLINE REAL exponential(REAL x, const REAL less)
{
    x = x < -LARGEST ? -LARGEST : x;
    x = x > LARGEST ? LARGEST : x;
    union {
        REAL number;
        bits pattern;
    } power = {x * (REAL)1.44269504088896340736 + ROUNDER};
    const REAL n = power.number - ROUNDER, r = (x - n * HIGH) - n * LOW;
    power.pattern = (power.pattern + BIAS) << MANTISSA;
    return power.number * (r + r * r * SERIES) + (power.number - less);
}

INLINE REAL exp_less_one(REAL x) { return exponential(x, 1); }
