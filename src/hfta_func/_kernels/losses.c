// Cross entropy of rows of logits with the class of each, and its gradient.
#include <tgmath.h>

// Numbers of short rows whose exponentials are taken together, and the classes from which a row is long enough by itself.
#define BLOCK 1024
#define LONG (BLOCK / 4)

INLINE REAL largest(const REAL *restrict x, count classes)
{
    REAL most = -INFINITY;
    if (classes < 2 * LANES)
        for (count i = 0; i < classes; i++)
            most = x[i] > most ? x[i] : most;
    else
#pragma omp simd simdlen(LANES) reduction(max : most)
        for (count i = 0; i < classes; i++)
            most = x[i] > most ? x[i] : most;
    return most;
}

INLINE REAL total(const REAL *restrict x, count classes)
{
    REAL sum = 0;
    if (classes < 2 * LANES)
        for (count i = 0; i < classes; i++)
            sum += x[i];
    else
#pragma omp simd simdlen(LANES) reduction(+ : sum)
        for (count i = 0; i < classes; i++)
            sum += x[i];
    return sum;
}

// Of what is far below the largest, nothing is left.
INLINE REAL weight(REAL x) { return x < -LARGEST ? 0 : exponential(x, 0); }

INLINE count rows_at_once(count classes) { return classes < LONG ? BLOCK / classes : 1; }

// exp(x - most) of some rows, each with its own largest number, and what it is to be multiplied by.
INLINE void weights(count rows, count classes, const REAL *x, const REAL *most, const REAL *by, REAL *into)
{
    if (classes >= LONG) {
        const REAL top = most[0], times = by[0];
#pragma omp simd simdlen(LANES)
        for (count i = 0; i < classes; i++)
            into[i] = weight(x[i] - top) * times;
        return;
    }
    REAL shifted[BLOCK], times[BLOCK];
    for (count row = 0, at = 0; row < rows; row++)
        for (count i = 0; i < classes; i++, at++) {
            shifted[at] = x[at] - most[row];
            times[at] = by[row];
        }
#pragma omp simd simdlen(LANES)
    for (count at = 0; at < rows * classes; at++)
        into[at] = weight(shifted[at]) * times[at];
}

// The loss of each row, and in `stats` its largest number and the sum of exp(x - that). Returns whether a class does not exist.
int cross_entropy(count rows, count classes, const REAL *restrict x, const int64_t *restrict target, count ignored,
                  REAL *restrict loss, REAL *restrict stats, count threads)
{
    const count step = rows_at_once(classes);
    int wrong = 0;
#pragma omp parallel for num_threads(threads) if (rows * classes > 1 << 13) schedule(static) reduction(| : wrong)
    for (count first = 0; first < rows; first += step) {
        const count some = AT_MOST(step, rows - first);
        REAL most[BLOCK], ones[BLOCK], sums[BLOCK], short_rows[BLOCK];
        const REAL *from = x + first * classes;
        for (count row = 0; row < some; row++) {
            most[row] = largest(from + row * classes, classes);
            ones[row] = 1;
        }
        if (classes >= LONG) {
            REAL sum = 0;
#pragma omp simd simdlen(LANES) reduction(+ : sum)
            for (count i = 0; i < classes; i++)
                sum += weight(from[i] - most[0]);
            sums[0] = sum;
        } else {
            weights(some, classes, from, most, ones, short_rows);
            for (count row = 0; row < some; row++)
                sums[row] = total(short_rows + row * classes, classes);
        }
        for (count row = 0; row < some; row++) {
            const int64_t at = target[first + row];
            const int is_class = at >= 0 && at < classes;
            wrong |= !is_class && at != ignored;
            stats[2 * (first + row)] = most[row];
            stats[2 * (first + row) + 1] = sums[row];
            loss[first + row] = at != ignored && is_class ? log(sums[row]) - (from[row * classes + at] - most[row]) : 0;
        }
    }
    return wrong;
}

// The gradient of the logits, which may take their place.
void cross_entropy_backward(count rows, count classes, const REAL *grad, const REAL *x, const int64_t *target, count ignored,
                            const REAL *stats, REAL *dx, count threads)
{
    const count step = rows_at_once(classes);
#pragma omp parallel for num_threads(threads) if (rows * classes > 1 << 13) schedule(static)
    for (count first = 0; first < rows; first += step) {
        const count some = AT_MOST(step, rows - first);
        REAL most[BLOCK], by[BLOCK];
        for (count row = 0; row < some; row++) {
            most[row] = stats[2 * (first + row)];
            by[row] = target[first + row] == ignored ? 0 : grad[first + row] / stats[2 * (first + row) + 1];
        }
        weights(some, classes, x + first * classes, most, by, dx + first * classes);
        for (count row = first; row < first + some; row++)
            if (target[row] != ignored)
                dx[row * classes + target[row]] -= grad[row];
    }
}
