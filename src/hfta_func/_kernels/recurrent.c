// One direction of a recurrent layer of M members, through all steps, forward and backward.
//
// Every product is `product`: rows of any strides times a matrix that is packed into panels. A member's samples are taken in a
// number of parts that depends on shapes alone, and the gradients of weights are summed in their order, so that results are the
// same on any number of threads. REAL is float or double, SIZE its bytes.
//
// What is kept of a sample at a step: of an LSTM the gates i, f, g, o after their activations and the cell; of a GRU r, z, n and
// the state's part of n; of others the state. The gradients of a step are those of the gates, and of a GRU's parts of n.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Bytes of a vector, and rows of which two vectors each fit into the registers.
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8)
#define MOST 8
#else
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#define MOST 6
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
#define PANEL (2 * LANES)
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")
#define AT_MOST(a, b) ((a) < (b) ? (a) : (b))
#define AT_LEAST(a, b) ((a) > (b) ? (a) : (b))

typedef int64_t count;
typedef REAL vec __attribute__((vector_size(BYTES), aligned(SIZE), may_alias));
#if SIZE == 4
typedef int32_t indices __attribute__((vector_size(BYTES)));
#else
typedef int64_t indices __attribute__((vector_size(BYTES)));
#endif

// Rows of a block of as many rows as a vector has numbers become its columns.
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

// exp(x) - 1, exact near zero, too: with x = n log 2 + r, of the series of r. NaN stays NaN.
INLINE REAL exp_less_one(REAL x)
{
    x = x < -LARGEST ? -LARGEST : x;
    x = x > LARGEST ? LARGEST : x;
    union {
        REAL number;
        bits pattern;
    } power = {x * (REAL)1.44269504088896340736 + ROUNDER};
    const REAL n = power.number - ROUNDER, r = (x - n * HIGH) - n * LOW;
    power.pattern = (power.pattern + BIAS) << MANTISSA;
    return power.number * (r + r * r * SERIES) + (power.number - 1);
}

INLINE REAL sigmoid(REAL x) { return 1 / (2 + exp_less_one(-x)); }

INLINE REAL hyperbolic(REAL x)
{
    const REAL e = exp_less_one(-2 * (x < 0 ? -x : x)), y = -e / (2 + e);
    return x < 0 ? -y : y;
}

// into[i] += the sum over k of a[i * row + k * next] * b[k], for one or two vectors of columns.
#define TILE(ROWS)                                                                                                             \
    INLINE void tile_of_##ROWS(const int vectors, count depth, const REAL *a, count row, count next, const REAL *b, REAL *into, \
                               count wide)                                                                                     \
    {                                                                                                                          \
        vec sum[ROWS][2];                                                                                                      \
        UNROLLED for (int i = 0; i < ROWS; i++) UNROLLED for (int v = 0; v < vectors; v++) sum[i][v] =                         \
            *(const vec *)(into + i * wide + v * LANES);                                                                       \
        for (count k = 0; k < depth; k++, a += next, b += vectors * LANES) {                                                   \
            vec y[2];                                                                                                          \
            UNROLLED for (int v = 0; v < vectors; v++) y[v] = *(const vec *)(b + v * LANES);                                   \
            UNROLLED for (int i = 0; i < ROWS; i++)                                                                            \
            {                                                                                                                  \
                vec x = (vec){0} + a[i * row];                                                                                 \
                KEPT(x);                                                                                                       \
                UNROLLED for (int v = 0; v < vectors; v++) sum[i][v] += x * y[v];                                              \
            }                                                                                                                  \
        }                                                                                                                      \
        UNROLLED for (int i = 0; i < ROWS; i++) UNROLLED for (int v = 0; v < vectors; v++) *(                                  \
            vec *)(into + i * wide + v * LANES) = sum[i][v];                                                                   \
    }                                                                                                                          \
    static void narrow_##ROWS(count depth, const REAL *a, count row, count next, const REAL *b, REAL *into, count wide)        \
    {                                                                                                                          \
        tile_of_##ROWS(1, depth, a, row, next, b, into, wide);                                                                 \
    }                                                                                                                          \
    static void wide_##ROWS(count depth, const REAL *a, count row, count next, const REAL *b, REAL *into, count wide)          \
    {                                                                                                                          \
        tile_of_##ROWS(2, depth, a, row, next, b, into, wide);                                                                 \
    }
EACH(TILE)

typedef void tile(count, const REAL *, count, count, const REAL *, REAL *, count);
#define NAMES(ROWS) {narrow_##ROWS, wide_##ROWS},
static tile *const tiles[][2] = {EACH(NAMES)};

// Columns of the panel that begins at column `at`, as they are packed.
INLINE count width(count columns, count at) { return columns - at > LANES ? PANEL : LANES; }

// [rows,columns] += a @ b, whose panels have `depth` rows.
static void product(count rows, count columns, count depth, const REAL *a, count row, count next, const REAL *b, REAL *into,
                    count wide)
{
    const count blocks = (rows + MOST - 1) / MOST;
    for (count at = 0, size; at < columns; at += size) {
        size = width(columns, at);
        const count used = AT_MOST(size, columns - at);
        for (count block = 0; block < blocks; block++) {
            const count low = rows * block / blocks, high = rows * (block + 1) / blocks;
            tile *const run = tiles[high - low - 1][size / PANEL];
            REAL *const to = into + low * wide + at;
            if (used == size)
                run(depth, a + low * row, row, next, b, to, wide);
            else {
                REAL edge[MOST * PANEL];
                for (count i = 0; i < high - low; i++)
                    for (count j = 0; j < size; j++)
                        edge[i * size + j] = j < used ? to[i * wide + j] : 0;
                run(depth, a + low * row, row, next, b, edge, size);
                for (count i = 0; i < high - low; i++)
                    memcpy(to + i * wide, edge + i * size, sizeof(REAL) * used);
            }
        }
        b += depth * size;
    }
}

// Rows `first` to `first + rows` of panels that have `depth` rows.
static void pack(const REAL *from, count row, count rows, count columns, REAL *into, count first, count depth)
{
    for (count at = 0, size; at < columns; at += size) {
        size = width(columns, at);
        const count used = AT_MOST(size, columns - at);
        for (count k = 0; k < rows; k++) {
            REAL *const to = into + at * depth + (first + k) * size;
            if (used == PANEL)
                memcpy(to, from + k * row + at, sizeof(REAL) * PANEL);
            else
                for (count j = 0; j < size; j++)
                    to[j] = j < used ? from[k * row + at + j] : 0;
        }
    }
}

// The panels of a transposed matrix [columns,depth].
static void pack_transposed(const REAL *from, count columns, count depth, REAL *into)
{
    for (count at = 0, size; at < columns; at += size) {
        size = width(columns, at);
        for (count v = 0; v < size; v += LANES) {
            const REAL *const block = from + (at + v) * depth;
            count first = 0;
            for (; at + v + LANES <= columns && first + LANES <= depth; first += LANES) {
                vec rows[LANES];
                UNROLLED for (int j = 0; j < LANES; j++)
                    rows[j] = *(const vec *)(block + j * depth + first);
                transpose(rows);
                UNROLLED for (int k = 0; k < LANES; k++)
                    *(vec *)(into + (first + k) * size + v) = rows[k];
            }
            for (count j = 0; j < LANES; j++)
                for (count k = first; k < depth; k++)
                    into[k * size + v + j] = at + v + j < columns ? block[j * depth + k] : 0;
        }
        into += size * depth;
    }
}

enum { LSTM, GRU, TANH, RELU };

// One direction of one layer; strides of inputs, in numbers, by member, step and sample.
typedef struct {
    count kind, models, steps, batch, ins, size, reverse, of_x[3], of_grad[3], of_dx[3];
} layer;

#define GATES(l) ((l)->kind == LSTM ? 4 : (l)->kind == GRU ? 3 : 1)
// What is kept of a sample at a step, in states, and how many gradients it has.
#define KEEPS(l) ((l)->kind == LSTM ? 5 : (l)->kind == GRU ? 4 : 1)
#define SLOPES(l) ((l)->kind < TANH ? 4 : 1)
// Columns as panels hold them.
#define PADDED(n) (((n) + PANEL - 1) / PANEL * PANEL)

INLINE count num_parts(const layer *l) { return l->steps < 4 ? 1 : AT_LEAST(1, AT_MOST(4, l->batch / 16)); }
INLINE count time_of(const layer *l, count step) { return l->reverse ? l->steps - 1 - step : step; }

static REAL *memory(count numbers) { return aligned_alloc(64, (numbers * SIZE + 127) / 64 * 64); }

static void activate(const layer *l, REAL *restrict kept, const REAL *restrict cell, const REAL *restrict state,
                     REAL *restrict next)
{
    const count H = l->size;
    if (l->kind == LSTM)
        for (count j = 0; j < H; j++) {
            const REAL i = sigmoid(kept[j]), f = sigmoid(kept[H + j]), g = hyperbolic(kept[2 * H + j]);
            const REAL o = sigmoid(kept[3 * H + j]), c = f * cell[j] + i * g;
            kept[j] = i;
            kept[H + j] = f;
            kept[2 * H + j] = g;
            kept[3 * H + j] = o;
            kept[4 * H + j] = c;
            next[j] = o * hyperbolic(c);
        }
    else if (l->kind == GRU)
        for (count j = 0; j < H; j++) {
            const REAL r = sigmoid(kept[j]), z = sigmoid(kept[H + j]);
            const REAL n = hyperbolic(kept[2 * H + j] + r * kept[3 * H + j]);
            kept[j] = r;
            kept[H + j] = z;
            kept[2 * H + j] = n;
            next[j] = n + z * (state[j] - n);
        }
    else if (l->kind == TANH)
        for (count j = 0; j < H; j++)
            next[j] = kept[j] = hyperbolic(kept[j]);
    else
        for (count j = 0; j < H; j++)
            next[j] = kept[j] = kept[j] < 0 ? 0 : kept[j];
}

// Pointers: inputs, both weights, both biases or none, state, cell or none; results: states, last state, last cell, what is kept.
int forward(const layer *l, REAL *const *p, count threads)
{
    const count H = l->size, G = GATES(l) * H, K = KEEPS(l) * H, parts = num_parts(l), of_state = l->batch * H;
    // The state's part of a GRU's n is apart.
    const count joint = l->kind == GRU ? 2 * H : G;
    int missing = 0;
#pragma omp parallel num_threads(threads) if (l->models * parts > 1)
    {
        REAL *from_x = memory(PADDED(G) * l->ins), *from_h = memory((PADDED(joint) + PADDED(H)) * H), *bias = memory(K + H);
        if (!from_x || !from_h || !bias) {
#pragma omp atomic write
            missing = 1;
        }
#pragma omp barrier
        count last = -1;
#pragma omp for schedule(static)
        for (count item = 0; item < (missing ? 0 : l->models * parts); item++) {
            const count m = item / parts, part = item % parts;
            const count low = l->batch * part / parts, rows = l->batch * (part + 1) / parts - low;
            REAL *const apart = from_h + PADDED(joint) * H;
            if (m != last) {
                const REAL *const weight = p[2] + m * G * H;
                pack_transposed(p[1] + m * G * l->ins, G, l->ins, from_x);
                pack_transposed(weight, joint, H, from_h);
                if (l->kind == GRU)
                    pack_transposed(weight + joint * H, H, H, apart);
                memset(bias, 0, sizeof(REAL) * (K + H));
                for (count j = 0; p[3] && j < G; j++) {
                    bias[j] = p[3][m * G + j] + (j < joint ? p[4][m * G + j] : 0);
                    if (j >= joint)
                        bias[H + j] = p[4][m * G + j];
                }
                last = m;
            }
            const REAL *state = p[5] + m * of_state + low * H, *cell = p[6] ? p[6] + m * of_state + low * H : 0;
            count of_cell = H;
            for (count step = 0; step < l->steps; step++) {
                const count t = time_of(l, step), row = (m * l->steps + t) * l->batch + low;
                REAL *const kept = p[10] + row * K, *const next = p[7] + row * H;
                const count filled = l->kind == GRU ? K : G;
                for (count n = 0; n < rows; n++)
                    memcpy(kept + n * K, bias, sizeof(REAL) * filled);
                const REAL *const x = p[0] + m * l->of_x[0] + t * l->of_x[1] + low * l->of_x[2];
                product(rows, G, l->ins, x, l->of_x[2], 1, from_x, kept, K);
                product(rows, joint, H, state, H, 1, from_h, kept, K);
                if (l->kind == GRU)
                    product(rows, H, H, state, H, 1, apart, kept + G, K);
                for (count n = 0; n < rows; n++)
                    activate(l, kept + n * K, cell + (cell ? n * of_cell : 0), state + n * H, next + n * H);
                state = next;
                cell = kept + 4 * H;
                of_cell = K;
            }
            memcpy(p[8] + m * of_state + low * H, state, sizeof(REAL) * rows * H);
            for (count n = 0; l->kind == LSTM && n < rows; n++)
                memcpy(p[9] + m * of_state + (low + n) * H, cell + n * K, sizeof(REAL) * H);
        }
        free(from_x);
        free(from_h);
        free(bias);
    }
    return missing;
}

// The gradients `slope` of what a step is made of, out of those of the state and the cell after it, which become those that a
// step before has apart from the product with the weights.
static void differentiate(const layer *l, const REAL *restrict kept, const REAL *restrict before, REAL *restrict of_state,
                          REAL *restrict of_cell, REAL *restrict slope)
{
    const count H = l->size;
    if (l->kind == LSTM)
        for (count j = 0; j < H; j++) {
            const REAL i = kept[j], f = kept[H + j], g = kept[2 * H + j], o = kept[3 * H + j], y = hyperbolic(kept[4 * H + j]);
            const REAL dh = of_state[j], dc = of_cell[j] + dh * o * (1 - y * y);
            slope[j] = dc * g * i * (1 - i);
            slope[H + j] = dc * before[j] * f * (1 - f);
            slope[2 * H + j] = dc * i * (1 - g * g);
            slope[3 * H + j] = dh * y * o * (1 - o);
            of_cell[j] = dc * f;
            of_state[j] = 0;
        }
    else if (l->kind == GRU)
        for (count j = 0; j < H; j++) {
            const REAL r = kept[j], z = kept[H + j], n = kept[2 * H + j], dh = of_state[j], dn = dh * (1 - z) * (1 - n * n);
            slope[j] = dn * kept[3 * H + j] * r * (1 - r);
            slope[H + j] = dh * (before[j] - n) * z * (1 - z);
            slope[2 * H + j] = dn;
            slope[3 * H + j] = dn * r;
            of_state[j] = dh * z;
        }
    else
        for (count j = 0; j < H; j++) {
            slope[j] = of_state[j] * (l->kind == TANH ? 1 - kept[j] * kept[j] : kept[j] > 0);
            of_state[j] = 0;
        }
}

// About as many rows of gradients at once as the cache has room for.
#define ROWS_AT_ONCE 128

// Pointers: inputs, both weights, state, cell or none, states, what is kept; gradients of states, of the last state and of the
// last cell, each or none; results: gradients of inputs or none, of weights, biases, state, cell.
int backward(const layer *l, REAL *const *p, count threads)
{
    const count H = l->size, I = l->ins, G = GATES(l) * H, K = KEEPS(l) * H, S = SLOPES(l) * H, of_state = l->batch * H;
    const count parts = num_parts(l), joint = l->kind == GRU ? 2 * H : G, sizes[4] = {G * I, G * H, G, G};
    const count total = G * (I + H + 2), most = (l->batch + parts - 1) / parts, span = AT_LEAST(1, ROWS_AT_ONCE / AT_LEAST(most, 1));
    REAL *const sums = memory(l->models * parts * total);
    int missing = !sums;
#pragma omp parallel num_threads(threads) if (l->models * parts > 1)
    {
        REAL *to_x = memory(PADDED(I) * G), *to_h = memory(PADDED(H) * G), *packed = memory(span * most * PADDED(AT_LEAST(I, H)));
        REAL *slopes = memory(span * most * S), *dc = memory(most * H);
        if (!to_x || !to_h || !packed || !slopes || !dc) {
#pragma omp atomic write
            missing = 1;
        }
#pragma omp barrier
        count last = -1;
#pragma omp for schedule(static)
        for (count item = 0; item < (missing ? 0 : l->models * parts); item++) {
            const count m = item / parts, part = item % parts;
            const count low = l->batch * part / parts, rows = l->batch * (part + 1) / parts - low, begin = m * of_state + low * H;
            REAL *sum[4], *next = sums + item * total;
            for (int i = 0; i < 4; next += sizes[i++]) {
                sum[i] = parts == 1 && p[11 + i] ? p[11 + i] + m * sizes[i] : next;
                memset(sum[i], 0, sizeof(REAL) * sizes[i]);
            }
            REAL *const dwx = sum[0], *const dwh = sum[1], *const dbx = sum[2], *const dbh = sum[3];
            REAL *const dh = p[15] + begin, *const apart = to_h + PADDED(H) * joint;
            if (m != last) {
                if (p[10])
                    pack(p[1] + m * G * I, I, G, I, to_x, 0, G);
                pack(p[2] + m * G * H, H, joint, H, to_h, 0, joint);
                if (l->kind == GRU)
                    pack(p[2] + (m * G + joint) * H, H, H, H, apart, 0, H);
                last = m;
            }
            for (count i = 0; i < rows * H; i++) {
                dh[i] = p[8] ? p[8][begin + i] : 0;
                dc[i] = p[9] ? p[9][begin + i] : 0;
            }
            for (count high = l->steps, first; high > 0; high = first) {
                first = AT_LEAST(0, high - span);
                const count depth = (high - first) * rows;
                for (count step = high - 1; step >= first; step--) {
                    const count t = time_of(l, step), row = (m * l->steps + t) * l->batch + low;
                    const count before = step ? row + (l->reverse ? l->batch : -l->batch) : 0;
                    REAL *const slope = slopes + (step - first) * rows * S;
                    for (count n = 0; n < rows; n++) {
                        const REAL *old = 0;
                        if (l->kind == LSTM)
                            old = step ? p[6] + (before + n) * K + 4 * H : p[4] + begin + n * H;
                        else
                            old = step ? p[5] + (before + n) * H : p[3] + begin + n * H;
                        const REAL *const grad =
                            p[7] ? p[7] + m * l->of_grad[0] + t * l->of_grad[1] + (low + n) * l->of_grad[2] : 0;
                        for (count j = 0; grad && j < H; j++)
                            dh[n * H + j] += grad[j];
                        differentiate(l, p[6] + (row + n) * K, old, dh + n * H, dc + n * H, slope + n * S);
                    }
                    product(rows, H, joint, slope, S, 1, to_h, dh, H);
                    if (l->kind == GRU)
                        product(rows, H, H, slope + G, S, 1, apart, dh, H);
                    if (p[10]) {
                        REAL *const dx = p[10] + m * l->of_dx[0] + t * l->of_dx[1] + low * l->of_dx[2];
                        for (count n = 0; n < rows; n++)
                            memset(dx + n * l->of_dx[2], 0, sizeof(REAL) * I);
                        product(rows, I, G, slope, S, 1, to_x, dx, l->of_dx[2]);
                    }
                    const REAL *const x = p[0] + m * l->of_x[0] + t * l->of_x[1] + low * l->of_x[2];
                    pack(x, l->of_x[2], rows, I, packed, (step - first) * rows, depth);
                }
                product(G, I, depth, slopes, 1, S, packed, dwx, I);
                for (count step = first; step < high; step++) {
                    const count t = time_of(l, step - 1), row = (m * l->steps + t) * l->batch + low;
                    pack(step ? p[5] + row * H : p[3] + begin, H, rows, H, packed, (step - first) * rows, depth);
                }
                product(joint, H, depth, slopes, 1, S, packed, dwh, H);
                if (l->kind == GRU)
                    product(H, H, depth, slopes + G, 1, S, packed, dwh + joint * H, H);
                for (count k = 0; k < depth; k++)
                    for (count j = 0; j < G; j++) {
                        dbx[j] += slopes[k * S + j];
                        dbh[j] += slopes[k * S + (j < joint ? j : H + j)];
                    }
            }
            if (p[16])
                memcpy(p[16] + begin, dc, sizeof(REAL) * rows * H);
        }
        free(to_x);
        free(to_h);
        free(packed);
        free(slopes);
        free(dc);
    }
    for (count m = 0; m < l->models && parts > 1 && !missing; m++)
        for (count part = 0; part < parts; part++) {
            const REAL *from = sums + (m * parts + part) * total;
            for (int i = 0; i < 4; from += sizes[i++])
                for (count j = 0; p[11 + i] && j < sizes[i]; j++)
                    p[11 + i][m * sizes[i] + j] = from[j] + (part ? p[11 + i][m * sizes[i] + j] : 0);
        }
    free(sums);
    return missing;
}
