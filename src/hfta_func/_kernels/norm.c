// Layer normalisation of rows, with scale and shift of M members, and its gradients.
#include <tgmath.h>

void layer_norm(count models, count rows, count width, const REAL *restrict x, const REAL *restrict scale,
                const REAL *restrict shift, const double *eps, REAL *restrict y, REAL *restrict stats, count threads)
{
    const REAL share = 1 / (REAL)width, least = *eps;
#pragma omp parallel for num_threads(threads) if (models * rows * width > 1 << 15) schedule(static) collapse(2)
    for (count model = 0; model < models; model++)
      for (count k = 0; k < rows; k++) {
        const count row = model * rows + k;
        const REAL *from = x + row * width, *by = scale + model * width, *plus = shift + model * width;
        REAL *into = y + row * width, sum = 0, squares = 0;
#pragma omp simd simdlen(32 / SIZE) reduction(+ : sum)
        for (count i = 0; i < width; i++)
            sum += from[i];
        const REAL mean = sum * share;
#pragma omp simd simdlen(32 / SIZE) reduction(+ : squares)
        for (count i = 0; i < width; i++)
            squares += (from[i] - mean) * (from[i] - mean);
        const REAL rstd = 1 / sqrt(squares * share + least);
#pragma omp simd simdlen(32 / SIZE)
        for (count i = 0; i < width; i++)
            into[i] = (from[i] - mean) * rstd * by[i] + plus[i];
        stats[2 * row] = mean;
        stats[2 * row + 1] = rstd;
    }
}

void layer_norm_backward(count models, count rows, count width, const REAL *restrict grad, const REAL *restrict x,
                         const REAL *restrict scale, const REAL *restrict stats, REAL *restrict dx, REAL *restrict dscale,
                         REAL *restrict dshift, count threads)
{
    const REAL share = 1 / (REAL)width;
#pragma omp parallel for num_threads(threads) if (models * rows * width > 1 << 15) schedule(static)
    for (count model = 0; model < models; model++) {
        const REAL *by = scale + model * width;
        REAL *of_scale = dscale + model * width, *of_shift = dshift + model * width;
        memset(of_scale, 0, sizeof(REAL) * width);
        memset(of_shift, 0, sizeof(REAL) * width);
        for (count row = model * rows; row < (model + 1) * rows; row++) {
            const REAL *g = grad + row * width, *from = x + row * width, mean = stats[2 * row], rstd = stats[2 * row + 1];
            REAL *into = dx + row * width, sum = 0, along = 0;
#pragma omp simd simdlen(32 / SIZE) reduction(+ : sum, along)
            for (count i = 0; i < width; i++) {
                const REAL unit = (from[i] - mean) * rstd, inner = g[i] * by[i];
                of_scale[i] += g[i] * unit;
                of_shift[i] += g[i];
                sum += inner;
                along += inner * unit;
            }
            sum *= share;
            along *= share;
#pragma omp simd simdlen(32 / SIZE)
            for (count i = 0; i < width; i++)
                into[i] = rstd * (g[i] * by[i] - sum - (from[i] - mean) * rstd * along);
        }
    }
}
